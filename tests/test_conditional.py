"""Conditional retrieval: sequences against a slow solver, depth against sets; planted circuits."""

import hashlib
import itertools

import pytest
import torch

import ablate
import data
import train
from data import conditional, make_batch, partial_losses
from extras.studies import theory
from tests.common import bits_behind, run_main
from tests.other_tasks import distracted
from tests.planted import Planted, following, paths_from, symbols_reached


def sequences(B, N=4, K=4, **more):
    return make_batch(0, torch.arange(B), N, K=K, task="conditional", **more)


def solve_conditional(inputs, N, K):
    """The targets (N, 3*K) of one sequence (T, K or more), from its symbols as tuples of numbers:
    look up a's x and y, and then the triple that has both."""
    tokens = [tuple(token[:K].tolist()) for token in inputs]
    triples, pairs, queries = tokens[: 3 * N * N], tokens[3 * N * N : -N], tokens[-N:]
    pairs = [*zip(pairs[0::2], pairs[1::2], strict=True)]
    y_of, x_of = dict(pairs[:N]), dict(pairs[N:])
    z_of = {(x, y): z for x, y, z in zip(triples[0::3], triples[1::3], triples[2::3], strict=True)}
    assert z_of.keys() == {*itertools.product(x_of.values(), y_of.values())}
    assert len({*tokens}) == 3 * N + N * N and {*queries} == x_of.keys() == y_of.keys()
    return torch.tensor([[*x_of[a], *y_of[a], *z_of[x_of[a], y_of[a]]] for a in queries])


@pytest.mark.parametrize("N, K", [(1, 2), (2, 4), (4, 4)])
def test_targets_are_what_looking_up_gives(N, K):
    batch, last = sequences(20, N, K), sequences(20, N, K, targets=[3], rotary="qk")
    assert batch.inputs.shape == (20, 3 * N * N + 5 * N, 2 * K) and conditional(4).T == 68
    for i in range(20):
        solved = solve_conditional(batch.inputs[i], N, K)
        assert torch.equal(solved, batch.targets[i])
        assert torch.equal(solved[:, 2 * K :], last.targets[i])
        roles = batch.inputs[i, batch.positions[i], :K]  # (N, roles, K)
        order = batch.positions[i, :, 0].argsort()
        assert torch.equal(roles[order][:, [2, 4, 7]].flatten(1), solved)
        for first, second in ((0, 1), (0, 3), (2, 5), (4, 6)):
            assert torch.equal(roles[:, first], roles[:, second])


def test_sequences_stay_the_same():
    digest = hashlib.sha256()
    batch = make_batch(7, torch.tensor([0, 1, 12345, -1]), task="conditional", rotary="qk")
    for tensor in (bits_behind(batch.inputs), bits_behind(batch.targets), batch.positions):
        digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "5ebf381fe920d679"


def test_plateaus_are_what_averaging_gives():
    """The loss on z of predicting zero, the mean of all z, or that of all z of the right x."""
    N, batch = 4, sequences(3000)
    x, z = (batch.inputs[:, place : 3 * N * N : 3, :4] for place in (0, 2))  # (B, 16, 4)
    targets = batch.targets[..., 8:]
    fits = (x[:, None] == batch.targets[:, :, None, :4]).all(-1).float()  # (B, N, 16)
    means = [torch.zeros_like(targets), z.mean(1, keepdim=True).expand_as(targets), fits @ z / N]
    for predictions, (loss, _) in zip(means, conditional(N).plateaus, strict=True):
        assert abs(partial_losses(predictions, targets, 4).mean() - loss) < 0.02


# ---- depth


def layers_by_sets(N, causal, seed):
    """The layers after which the first query holds x, y and z, token by token on a real sequence
    and with sets: a token is attended to if no other token at its place in another slot holds all
    that is shared."""
    task = conditional(N)
    inputs = make_batch(seed, torch.arange(1), N, task="conditional").inputs[0, :, :4].tolist()
    known, place_of = {}, {}
    for number, (start, size, slots) in enumerate(task.blocks):
        for token in range(start, start + slots * size):
            slot, place = divmod(token - start, size)
            known[token], place_of[token] = {tuple(inputs[token]), (number, slot)}, (number, place)
    answers = solve_conditional(torch.tensor(inputs), N, 4)[0].view(3, 4).tolist()
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


def test_the_minimal_circuit_reaches_what_the_depth_allows():
    task, allowed = conditional(4), theory.may_attend(conditional(4))
    for layers in (1, 2, 3, 5):
        paths = theory.conditional_circuit(3, layers, True)
        reached = symbols_reached(task, paths, layers).tolist()
        assert reached == [layers >= 2, layers >= 2, layers >= 3]
        assert all(allowed[path.reader.role, path.read.role] for path in paths)


# ---- the stages


@pytest.mark.parametrize("name, layers, heads", [("conditional", 3, 2), ("distracted", 4, 1)])
def test_a_planted_circuit_is_found(name, layers, heads, monkeypatch, capsys):
    monkeypatch.setitem(data.TASKS, "distracted", distracted)
    task, paths = conditional(4), theory.conditional_circuit(3, 3, True)
    if name == "distracted":
        task = distracted(4, 3)
        paths = paths_from(task, "0 1b 1a", "0 2b 2a", "1 q 1b", "2 q 2b")
    flags = f"--task {name} --layers {layers} --heads {heads} --device cpu --dtype float32"
    model = Planted(task, following(task, paths), layers, heads)
    report = ablate.find_circuit(model, train.parse_flags(flags.split()))
    assert report["validated"] and sorted(ablate.paths_in(report, task)) == sorted(paths), report[
        "verdict"
    ]


def test_a_worked_sequence_names_its_distractors():
    code, out, err = run_main(data, "--task", "conditional", "--seed", 5)
    words = out.split()
    triples = {*zip(words, words[1:], words[2:], strict=False)}
    assert code == 0 and "68 tokens" in out and "  A3: B3 C3 D3\n" in out, err
    assert ("B3", "C3", "D3") in triples and ("B3", "C1", "D3.1") in triples
