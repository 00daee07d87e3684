"""Section 5: the information flow against sets on real sequences, and the depth laws against it."""

import itertools
import math

from data import Task
from extras.studies import theory

import pytest


def query_layers(task, causal=True):
    return theory.layers_until_held(task, causal)[0, 1:].tolist()


def test_depth_laws_against_the_simulation():
    for D in range(1, 65):
        task = Task(1, D)
        unmasked, causal = query_layers(task, causal=False), query_layers(task)
        assert unmasked[-1] == theory.unmasked_depth(D) == math.ceil(math.log(4 * D + 1, 3) - 1e-9)
        assert causal == [math.floor(math.log2(k)) + 2 for k in range(1, D + 1)]
        assert causal[-1] == theory.causal_depth(D)


def test_no_order_of_the_pairs_takes_more_layers():
    """As depth.md says; x_4 may take one fewer."""
    for D in range(1, 7):
        usual, task = query_layers(Task(1, D)), Task(1, D)
        *pairs, _ = task.chain_slots
        for task.chain_slots[:-1] in itertools.permutations(pairs):
            fewer = [a - b for a, b in zip(usual, query_layers(task), strict=True)]
            assert {*fewer} <= {0, 1} and not any(fewer[:3]) and not any(fewer[4:])


def layers_by_sets(task, batch, causal):
    """The layers after which the first query holds each target symbol, token by token."""
    known, slots = [], [token // 2 for token in range(task.T - task.N)]  # of pairs
    slots += range(task.T, task.T + task.N)  # of queries
    for symbol, slot in zip(batch.inputs[0].tolist(), slots, strict=True):
        known.append({tuple(symbol), slot})
    query, layers = task.T - task.N, {}
    for layer in range(1, 9):
        after = [set(pieces) for pieces in known]
        for token, read in itertools.product(range(task.T), repeat=2):
            shared = known[token] & known[read]
            if shared and (read <= token or not causal):
                after[token] |= known[read]
        known = after
        for symbol in batch.answers[0, 0].split(4):
            if tuple(symbol.tolist()) in known[query]:
                layers.setdefault(tuple(symbol.tolist()), layer)
    return [layers[tuple(symbol.tolist())] for symbol in batch.answers[0, 0].split(4)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [1, 2, 3, 4, 5, 8])
def test_layers_against_sets_on_a_real_sequence(D, causal):
    task = Task(N=2, D=D)
    for number in range(3):
        batch = task.draw("training", 1, number)
        assert layers_by_sets(task, batch, causal) == query_layers(task, causal)


def test_the_figure_is_drawn(tmp_path):
    theory.draw_flow(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 10_000
