"""Conditional retrieval: the depth that its information flow needs, against sets."""

import itertools

import pytest
import torch

from data import conditional, make_batch
from extras.studies import theory


def layers_by_sets(N, causal, seed):
    """The layers after which the first query holds x, y and z, token by token on a real sequence
    and with sets: a token is attended to if no other token at its place in another slot holds all
    that is shared."""
    task = conditional(N)
    batch = make_batch(seed, torch.arange(1), N, task="conditional")
    inputs, answers = batch.inputs[0, :, :4].tolist(), batch.targets[0, 0].view(3, 4).tolist()
    known, place_of = {}, {}
    for number, (start, size, slots) in enumerate(task.blocks):
        for token in range(start, start + slots * size):
            slot, place = divmod(token - start, size)
            known[token], place_of[token] = {tuple(inputs[token]), (number, slot)}, (number, place)
    query, layers = task.blocks[-1].start, [None] * 3
    for layer in range(1, 9):
        after = {token: set(pieces) for token, pieces in known.items()}
        for token, target in itertools.product(known, known):
            shared = known[token] & known[target]
            same_place = [other for other in known if place_of[other] == place_of[target]]
            rivals = [known[other] for other in same_place if other != target]
            unique = shared and not any(shared <= pieces for pieces in rivals)
            if unique and (target <= token or not causal):
                after[token] |= known[target]
        known = after
        for k, symbol in enumerate(answers):
            if tuple(symbol) in known[query] and layers[k] is None:
                layers[k] = layer
        if None not in layers:
            return layers


@pytest.mark.parametrize("causal", [True, False])
def test_depth_against_sets_on_a_real_sequence(causal):
    for N, seed in ((2, 0), (2, 1), (3, 0)):
        assert layers_by_sets(N, causal, seed) == theory.least_layers(conditional(N), causal)
    assert theory.least_layers(conditional(4), causal) == [2, 2, 3]
