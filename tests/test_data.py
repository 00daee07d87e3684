"""Random numbers, positions, plateaus, the batches of the first release, a sequence as text."""

import hashlib
import itertools
import statistics

import data
from tests.common import bits_behind, output_of
from tests.other_tasks import TASKS, distracted, place_of, sequences_of, spans

import pytest
import torch


def test_random_bits_are_splitmix64():
    def reference_mix(x):  # Steele, Lea and Flood (2014), in Python's own whole numbers
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, index in ((0, 0), (7, 123456789), (3, -5)):
        start = reference_mix((seed + golden) % 2**64)
        stream = reference_mix(start ^ index * golden % 2**64)
        expected = [reference_mix((stream + (i + 1) * golden) % 2**64) for i in range(9)]
        bits = data.random_bits(seed, torch.tensor([index]), 9)[0].tolist()
        assert [b % 2**64 for b in bits] == expected


def test_normal_numbers_are_the_inverse_of_the_distribution_function():
    extremes = data.standard_normal(torch.tensor([-1, 0, 2**63 - 1, -(2**63)]))
    assert extremes.isfinite().all() and 5 < extremes.max() == -extremes.min() < 6
    bits = data.random_bits(0, torch.arange(1), 200)[0]
    for number, bit in zip(data.standard_normal(bits).tolist(), bits.tolist(), strict=True):
        share = ((bit % 2**64 >> 41) + 0.5) / 2**23
        assert abs(number - statistics.NormalDist().inv_cdf(share)) < 1e-5


def test_batches_are_those_of_the_first_release():
    chains, triples = [], [dict(task="conditional", rotary="qk")]
    for D in range(1, 9):
        chains += [dict(N=4, D=D), dict(N=3, D=D, K=2, targets=[D], rotary="qk")]
    for cases, seeds, index, expected in (
        (chains, (0, 7), [0, 1, 5, 12345, -1, -2, -1048577], "3c12a7cc19785a57"),
        (triples, [7], [0, 1, 12345, -1], "5ebf381fe920d679"),
    ):
        digest = hashlib.sha256()
        for how, seed in itertools.product(cases, seeds):
            batch, K = data.make_batch(seed, torch.tensor(index), **how), how.get("K", 4)
            symbols = bits_behind(batch.inputs[..., :K]), bits_behind(batch.targets)
            for tensor in (*symbols, batch.positions):
                digest.update(tensor.contiguous().numpy().tobytes())
        assert digest.hexdigest()[:16] == expected


def test_batches_are_the_same_whatever_torch_does_by_default(monkeypatch):
    """As with torch.set_default_dtype; and on a Mac, which sorts a view in the order of storage."""
    how = [dict(rotary="qk"), dict(task="conditional")]
    expected = [data.make_batch(0, torch.arange(9), **case) for case in how]
    argsort = torch.Tensor.argsort

    def as_mps(x, *dim):
        strides = torch.empty(x.shape).stride()
        return argsort(x.as_strided(x.shape, strides, x.storage_offset()), *dim)

    monkeypatch.setattr(torch.Tensor, "argsort", as_mps)
    torch.set_default_dtype(torch.float64)
    try:
        batches = [data.make_batch(0, torch.arange(9), **case) for case in how]
    finally:
        torch.set_default_dtype(torch.float32)
    for tensor, other in zip(sum(expected, ()), sum(batches, ()), strict=True):
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype


@pytest.mark.parametrize("title", TASKS)
def test_positions_are_where_the_roles_stand(title):
    """Every role of a chain shows its symbol, at its place of a slot that it shares with the other
    roles of its block, and queries have their targets in the order of their tokens."""
    task, K = TASKS[title], 4
    batch = sequences_of(task, 20)
    tokens = batch.positions.flatten(1).sort(1).values
    assert torch.equal(tokens, torch.arange(task.T).expand(20, -1))
    for b, n in itertools.product(range(20), range(task.N)):
        query = batch.positions[b, n, 0] - task.T + task.N
        symbols = [batch.inputs[b, -task.N + query, :K], *batch.targets[b, query].split(K)]
        slots = {}
        for role, token in zip(task.names, batch.positions[b, n].tolist(), strict=True):
            assert torch.equal(batch.inputs[b, token, :K], symbols[task.roles[role]])
            block, expected = place_of(role, task)
            start, size, _ = spans(task)[block]
            slot, place = divmod(token - start, size)
            assert place == expected and slots.setdefault(block, slot) == slot < task.N


def test_distractors_belong_to_no_chain():
    task = distracted(4, 3)
    batch = sequences_of(task, 20)
    assert batch.inputs.shape == (20, 28, 4) and batch.targets.shape == (20, 4, 8)
    for inputs, symbols in zip(batch.inputs, batch.symbols, strict=True):
        shown = [tuple(symbol) for symbol in inputs.tolist()]
        distractors = {*shown[8:16]}
        assert len(distractors) == 8 and not distractors & {*shown[:8], *shown[16:]}
        names = [task.labels[symbol] for symbol in symbols.tolist()]
        assert len({*zip(names, shown, strict=True)}) == len({*names}) == len({*shown})
        assert sorted(names[8:16]) == sorted(f"d{x}.{n}" for x in "ab" for n in range(1, 5))


def test_plateaus_are_what_averaging_gives():
    """The loss on z of conditional retrieval of predicting zero, the mean of all z, or that of all
    z of the right x."""
    N, batch = 4, data.make_batch(0, torch.arange(3000), task="conditional")
    x, z = (batch.inputs[:, place : 3 * N * N : 3, :4] for place in (0, 2))  # (B, 16, 4)
    targets = batch.targets[..., 8:]
    fits = (x[:, None] == batch.targets[:, :, None, :4]).all(-1).float()  # (B, N, 16)
    means = [torch.zeros_like(targets), z.mean(1, keepdim=True).expand_as(targets), fits @ z / N]
    for predictions, (loss, _) in zip(means, data.conditional(N).plateaus, strict=True):
        assert abs(data.partial_losses(predictions, targets, 4).mean() - loss) < 0.02


def test_a_worked_sequence_can_be_solved_from_its_text():
    lines = output_of(data, "--N", 3, "--D", 2, "--seed", 5).splitlines()
    pairs, queries = [line[10:].split() for line in lines[3:5]], lines[5]
    follows = dict(pair for names in pairs for pair in zip(names[::2], names[1::2], strict=True))
    assert len(follows) == 6
    for name in queries[10:].split():
        assert f"  {name}: {follows[name]} {follows[follows[name]]}" in lines

    words = output_of(data, "--task", "conditional", "--seed", 5).split()
    triples = {*zip(words, words[1:], words[2:], strict=False)}
    assert ("B3", "C3", "D3") in triples and ("B3", "C1", "D3.1") in triples
