"""layers.py: the transformer is causal and learns what it should."""

import torch

from mechanisms import layers
from mechanisms.bigrams import N, read_bigrams, sample


def draw_batch(B, T):
    _, chances, frequency = read_bigrams()
    return sample(B, T, "random", chances, frequency, torch.Generator().manual_seed(0))


def test_generic_is_causal():
    torch.manual_seed(0)
    model, tokens = layers.Generic(2, 16, 2, 12), draw_batch(B=3, T=12)[0][:, :-1]
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % N
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax((0, 2)).min() > 1e-3


def test_what_is_learnt(monkeypatch):
    """With fixed triggers all tokens, with random ones those that follow a trigger seen before."""
    batches, losses = [], []

    def drawn(*arguments):
        batches.append(sample(*arguments))
        return batches[-1]

    def loss(logits, targets):
        losses.append((targets, torch.nn.functional.cross_entropy(logits, targets)))
        return losses[-1][1]

    monkeypatch.setattr(layers, "sample", drawn)
    monkeypatch.setattr(layers, "cross_entropy", loss)
    for triggers in ("fixed", "random"):
        batches.clear()
        losses.clear()
        rows = layers.train(0, 1, triggers, 60, d=16, T=16, B=16)
        assert [row[0] for row in rows] == [0, 50, 60]
        for (tokens, scored, _, _), (targets, _) in zip(batches[1:], losses, strict=True):
            expected = tokens[:, 1:][scored] if triggers == "random" else tokens[:, 1:].flatten()
            assert torch.equal(targets, expected)
        if triggers == "fixed":  # few tokens are scored: too noisy for so short a run
            values = torch.stack([value for _, value in losses]).detach()
            assert values[:20].mean() > 1.1 * values[-20:].mean()
