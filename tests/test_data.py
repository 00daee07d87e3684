"""The batches of the first release, plateaus, a sequence as text."""

import hashlib
import itertools
import math

import data
from tests.common import output_of

import torch


def test_normal_numbers_are_finite():
    extremes = data.standard_normal(torch.tensor([-1, 0, 2**63 - 1, -(2**63)]))
    assert extremes.isfinite().all() and 5 < extremes.max() == -extremes.min() < 6


def test_positions_are_appended_as_numbers():
    """With K = 4 the cosines and sines of two frequencies, 1 and 0.01."""
    appended = data.make_batch(0, torch.arange(1)).inputs[0, :, 4:]
    angles = [(t, 0.01 * t) for t in range(28)]
    expected = [[math.cos(a), math.cos(b), math.sin(a), math.sin(b)] for a, b in angles]
    torch.testing.assert_close(appended, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def bits_behind(numbers):
    """Return the 23 random bits from which normal numbers were made: they are the same on every
    machine, unlike the last bit of the inverse error function."""
    share = (torch.erf(numbers.double() / 2**0.5) + 1) / 2
    return (share * 2**23 - 0.5).round().long()


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
