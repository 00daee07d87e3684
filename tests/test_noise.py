"""noise.py and samples.py against loops, numpy's SVD, PyTorch's gradients and a planted MLP."""

import numpy
import pytest
import torch

from mechanisms import noise, samples
from mechanisms.bigrams import N, read_bigrams
from mechanisms.noise import NOISE, TwoLayers, measures, truncated


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(often, B=300, T=48, seed=0):
    return noise.sample(B, T, often, *read_bigrams()[1:], seeded(seed))


# ---- data


def test_sample_by_loops():
    characters, chances, frequency = read_bigrams()
    space, seen, noisy = characters.index(" "), torch.zeros(N, N), []
    tokens, scored, output = draw(often=0.5, B=1500)
    for sequence, flags, own in zip(tokens.tolist(), scored.tolist(), output.tolist(), strict=True):
        assert own != space and own < N and sequence[0] != NOISE
        for t, flag in enumerate(flags):
            now, following = sequence[t : t + 2]
            assert flag == (now == space and space in sequence[:t])
            if now == space:
                assert following in (own, NOISE)
                noisy.append(following == NOISE)
            elif now != NOISE:
                seen[now, following] += 1
    assert len(noisy) > 5000 and abs(sum(noisy) / len(noisy) - 0.5) < 0.03

    # all else by its row of chances: what cannot follow never does
    assert (seen[chances == 0] == 0).all()
    expected = seen.sum(1, keepdim=True) * chances
    z = (seen - expected) / (expected * (1 - chances)).sqrt()
    assert z[(expected > 25) & (chances < 0.99)].abs().max() < 5


def test_without_noise_there_is_none():
    tokens, scored, output = draw(often=0.0)
    following = tokens[:, 1:][scored]
    assert (tokens < N).all() and (following == output[:, None].expand(scored.shape)[scored]).all()


# ---- model, truncation, measures


def test_forward_by_loops():
    d, T = 12, 7
    model, tokens = TwoLayers(d, T, seeded()), draw(0.5, B=2, T=T)[0][:, :-1]
    for layer in (model.first, model.second):
        layer.key.data = torch.randn(d, d, generator=seeded(1))
    for b, sequence in enumerate(tokens):
        x = [model.E[token] + model.P[t] for t, token in enumerate(sequence)]
        for layer in (model.first, model.second):
            after = []
            for t in range(T):
                scores = torch.stack([x[t] @ layer.key @ x[s] for s in range(t + 1)]) / d**0.5
                share = scores.exp() / scores.exp().sum()
                read = sum(a * (layer.out @ layer.value @ x[s]) for s, a in enumerate(share))
                after.append(x[t] + read)
            x = [y + layer.down @ torch.clamp(layer.up @ y, min=0) for y in after]
        torch.testing.assert_close(model(tokens)[b], torch.stack([model.U @ y for y in x]))


@pytest.mark.parametrize("kept", [0, 1, 5, 12])
def test_truncation_by_numpy(kept):
    matrix = torch.randn(20, 12, generator=seeded())
    left, size, right = numpy.linalg.svd(matrix.numpy(), full_matrices=False)
    size[kept:] = 0
    expected = left @ numpy.diag(size) @ right
    numpy.testing.assert_allclose(truncated(matrix, kept).numpy(), expected, atol=1e-5)
    assert numpy.linalg.matrix_rank(truncated(matrix, kept).numpy(), tol=1e-4) == kept


def test_rank_kept_acts_on_the_second_mlp_alone():
    model, x = TwoLayers(16, 4, seeded()), torch.randn(5, 16, generator=seeded(1))
    torch.testing.assert_close(model.read(x, 0), x @ model.U.T)
    torch.testing.assert_close(model.read(x, 16), model.read(x))
    cut = truncated(model.second.up.data, 3)
    half = model.read(x, 3)
    model.second.up.data = cut
    torch.testing.assert_close(half, model.read(x), rtol=1e-4, atol=1e-4)


def planted(strength, d=128, T=48):
    """Nothing but a second MLP that names the noise token after a space, with this logit."""
    model = TwoLayers(d, T, seeded(3))
    for name, weight in model.named_parameters():
        if not name.endswith("key"):
            weight.data.zero_()
    space = model.E[read_bigrams()[0].index(" ")]
    model.second.up.data[0] = space / space.norm() ** 2
    model.second.down.data[:, 0] = strength * model.U[NOISE] / model.U[NOISE].norm() ** 2
    return model


def test_planted_bigram_is_measured_and_cut(monkeypatch):
    monkeypatch.setattr(noise, "KEPT", (0, 1, 8))
    *rows, without_first = measures(planted(40.0), *draw(0.0))
    assert [row[1] > 0.9 for row in rows] == [kept > 0 for kept in noise.KEPT]
    assert rows[-1][0] == without_first[0] == 0 and without_first[1] > 0.9
    assert measures(planted(-40.0), *draw(0.0))[-1][1] < 1e-4


def test_without_first_mlp_is_what_the_second_reads_of_attention_alone():
    model, (tokens, scored, output) = TwoLayers(16, 48, seeded()), draw(0.0)
    found = measures(model, tokens, scored, output)
    model.first.down.data.zero_()
    p = model(tokens[:, :-1]).softmax(2)
    right = (p.argmax(2) == output[:, None])[scored].float().mean()
    assert found[-1] == pytest.approx([float(right), float(p[scored][:, NOISE].mean())], abs=1e-4)
    assert found[-1] != pytest.approx(found[-2], abs=1e-4)


def test_a_model_that_cannot_know_says_so():
    """All weights zero, all logits alike: p is 1 / (N + 1)."""
    model = planted(0.0)
    model.U = torch.zeros_like(model.U)
    for _, p in measures(model, *draw(0.0, B=40)):
        assert p == pytest.approx(1 / (N + 1), abs=1e-5)


def test_training_learns_the_noise_first():
    (_, start), *_, (step, (*rows, _)) = noise.train(0, 20, d=48, T=32, B=32)
    assert step == 20 and rows[-1][1] > start[-1][1] + 0.1 and rows[-1][1] > 0.2 > rows[0][1]
    assert noise.train(1, 10, d=16, T=16, B=4) == noise.train(1, 10, d=16, T=16, B=4)


# ---- one step


def test_one_step_is_a_gradient_step():
    n, T, sizes = 9, 20, (3, 50)
    tokens, target = samples.sample(51, n, T, seeded(4))
    found = samples.one_step(n, sizes, seeded(4), T)
    for size, (by_mlp, by_attention, copied) in zip(sizes, found, strict=True):
        last, context = torch.zeros(2, n + 1, n + 1, requires_grad=True)
        one_hot = torch.eye(n + 1)
        read = one_hot[tokens[:, :size]].mean(0) @ context.T + one_hot[0] @ last.T
        loss = torch.nn.functional.cross_entropy(read, target[:size])
        last, context = (-slope for slope in torch.autograd.grad(loss, (last, context)))
        logits = context @ one_hot[tokens[:, -1]].mean(0)
        assert by_mlp == pytest.approx(float(last[n, 0] - last[:n, 0].max()), abs=1e-6)
        assert by_attention == pytest.approx(float(logits[n] - logits[:n].max()), abs=1e-6)
        names = [
            context[c, c] > max(context[j, c] for j in range(1, n) if j != c) + 1e-9
            for c in range(1, n)
        ]
        assert copied == pytest.approx(sum(map(float, names)) / (n - 1))


def test_samples_of_the_step_by_loops():
    tokens, target = samples.sample(2000, 12, 30, seeded())
    for sequence, following in zip(tokens.T.tolist(), target.tolist(), strict=True):
        named = {b for a, b in zip(sequence, sequence[1:], strict=False) if a == 0} | {following}
        assert sequence[0] == 0 and 0 not in named and len(named - {12}) <= 1
    assert abs(float((target == 12).float().mean()) - 0.5) < 0.05
    assert target.bincount()[1:12].min() > 50


def test_needed_by_hand():
    shares = [0.0] * 3 + [0.5] * 2 + [1.0] * 9
    assert samples.needed(shares, 1.0) == 32 and samples.needed(shares, 0.5) == 8
    assert samples.needed(shares, 0.75) == pytest.approx(2**4.5)
    assert samples.needed([0.0] * 14, 0.5) == float("inf") and samples.needed([1.0], 0.5) == 1


def test_shares_are_of_trials(monkeypatch):
    """Three planted trials of two numbers of samples each."""
    trials = [[[1, -1, 0], [1, 1, 0.5]], [[1, 1, 0.5], [-3, 1, 0.5]], [[-1, 1, 0.5], [-1, 2, 0.5]]]
    planted = iter(trials)
    monkeypatch.setattr(samples, "one_step", lambda *_: next(planted))
    expected = torch.tensor([[2.0, 2.0, 1.0], [1.0, 3.0, 1.5]]) / 3
    torch.testing.assert_close(torch.tensor(samples.learnt(0, 5, 3)), expected)
