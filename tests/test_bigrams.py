"""bigrams.py and theorems.py against loops and planted memories."""

import csv
import json
from collections import Counter
from functools import partial

import pytest
import torch

from mechanisms import bigrams, theorems
from mechanisms.bigrams import K, N, Simplified, accuracies, attention_kept, read_bigrams, sample
from tests.common import HERE


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw_batch(triggers, B=400, T=64, seed=0):
    _, chances, frequency = read_bigrams()
    return sample(B, T, triggers, chances, frequency, seeded(seed))


# ---- data


def test_table_is_the_text_s():
    with open(HERE / "mechanisms/shakespeare_bigrams.csv", newline="") as file:
        rows = [(json.loads(a), json.loads(b), int(n)) for a, b, n in list(csv.reader(file))[1:]]
    characters, chances, frequency = read_bigrams()
    assert len(characters) == N and sum(n for *_, n in rows) == 1115393
    of_first = Counter()
    for first, _, count in rows:
        of_first[first] += count
    for first, second, count in rows[::7]:
        i, j = characters.index(first), characters.index(second)
        assert chances[i, j].item() == pytest.approx(count / of_first[first])
        assert frequency[i].item() == pytest.approx(of_first[first] / 1115393)
    assert int((chances > 0).sum()) == len(rows)


@pytest.mark.parametrize("triggers", ["fixed", "random"])
def test_sample_follows_rule_and_bigrams(triggers):
    tokens, _, _, rule = draw_batch(triggers, B=3000)
    _, chances, frequency = read_bigrams()
    counts = torch.zeros(N, N)
    for sequence, outputs in zip(tokens.tolist(), rule.tolist(), strict=True):
        for now, following in zip(sequence, sequence[1:], strict=False):
            if outputs[now] >= 0:
                assert following == outputs[now]
            else:
                counts[now, following] += 1
    assert (counts[chances == 0] == 0).all()

    # every cell with enough expected counts lies within 5 standard errors
    expected = counts.sum(1, keepdim=True) * chances
    z = (counts - expected) / (expected * (1 - chances)).sqrt()
    enough = (expected > 25) & (chances < 0.99)
    assert enough.sum() > 200 and z[enough].abs().max() < 5
    first = torch.bincount(tokens[:, 0], minlength=N)
    assert (first - 3000 * frequency).abs().max() < 5 * (3000 * frequency).sqrt().max()


def test_triggers_and_outputs():
    _, _, frequency = read_bigrams()
    rule = draw_batch("fixed", B=13000, T=1)[3]
    top = sorted(range(N), key=lambda i: -frequency[i])[:K]
    assert all(set(torch.where(row >= 0)[0].tolist()) == set(top) for row in rule[:50])
    outputs = torch.bincount(rule[rule >= 0], minlength=N)  # 1000 expected of each
    assert (outputs - 1000).abs().max() < 5 * 1000**0.5

    # random: K different ones, drawn one after another by frequency
    rule = draw_batch("random", B=20000, T=1, seed=1)[3]
    assert ((rule >= 0).sum(1) == K).all()
    share = (rule >= 0).float().mean(0)
    clocks = torch.empty(20000, N).exponential_(generator=seeded(2)) / frequency
    arrived = (
        torch.zeros(N).index_add(
            0, clocks.topk(K, largest=False).indices.flatten(), torch.ones(20000 * K)
        )
        / 20000
    )
    assert (share - arrived).abs().max() < 0.025


def test_scored_and_cyclic_by_loops():
    tokens, scored, cyclic, rule = draw_batch("random", B=600, T=40)
    for sequence, flags, cycle, outputs in zip(
        tokens.tolist(), scored.tolist(), cyclic.tolist(), rule.tolist(), strict=True
    ):
        for t, flag in enumerate(flags):
            assert flag == (outputs[sequence[t]] >= 0 and sequence[t] in sequence[:t])
        found = False
        for trigger in (token for token in range(N) if outputs[token] >= 0):
            visited, token = set(), trigger
            while outputs[token] >= 0 and token not in visited:
                visited.add(token)
                token = outputs[token]
            found |= outputs[token] >= 0
        assert cycle == found
    assert 20 < cyclic.sum() < 80


# ---- the simplified model


def random_model(d=24, T=10, seed=0):
    model = Simplified(d, T, 1.0, seeded(seed))
    with torch.no_grad():
        for memory in model.parameters():
            memory.copy_(torch.randn(d, d, generator=seeded(seed + 1)) / d)
    return model


def test_forward_by_loops():
    model, tokens = random_model(), draw_batch("random", B=2, T=9)[0]
    logits, (first, second) = model(tokens)
    d = 24
    for b in range(2):
        x = [model.E[token] + model.P[t] for t, token in enumerate(tokens[b])]
        for key, maps in (model.W_KQ1, first), (model.W_KQ2, second):
            attention = []
            for t in range(10):
                scores = torch.stack([x[t] @ key @ x[s] / d**0.5 for s in range(t + 1)])
                attention.append(scores.exp() / scores.exp().sum())
                torch.testing.assert_close(maps[b, t, : t + 1], attention[t])
                assert (maps[b, t, t + 1 :] == 0).all()
            matrix = model.W_OV1 if key is model.W_KQ1 else model.W_OV2
            read = [sum(a * (matrix @ x[s]) for s, a in enumerate(row)) for row in attention]
            x = [some + more for some, more in zip(x, read, strict=True)]
        torch.testing.assert_close(logits[b], torch.stack([model.U @ some for some in x]))


def plant(strength=(30.0, 15.0, 15.0), d=512, T=64):
    """The induction head of the slides, by sums of outer products of its associations."""
    model = Simplified(d, T, 1.0, seeded(3))
    E, P, remapped = model.E, model.P, model.E @ model.W_OV1.T
    with torch.no_grad():
        model.W_OV2.copy_(strength[0] * model.U.T @ E / d)
        model.W_KQ2.copy_(strength[1] * E.T @ remapped / d**1.5)
        model.W_KQ1.copy_(strength[2] * P[1:].T @ P[:-1] / d**1.5)
    return model


def test_planted_memories_are_recalled_and_solve_the_task():
    model = plant()
    assert model.recalls(range(N)) == [1.0] * 3
    tokens, scored, cyclic, _ = draw_batch("random", B=100)
    with torch.no_grad():
        logits, maps = model(tokens[:, :-1])
    # head 1 of the first token has only itself to attend to, as if it followed itself: wrong there
    misled = tokens[:, :-1] == tokens[:, :1]
    assert min(accuracies(logits, tokens, scored & ~misled, cyclic)) == 1
    assert 0.5 < accuracies(logits, tokens, scored & misled, cyclic)[1] < 0.95
    assert min(attention_kept(tokens, scored & ~misled, *maps)) > 0.99

    # one association wrong: only its own recall falls, and by its share
    with torch.no_grad():
        model.W_KQ2.sub_(30 * torch.outer(model.E[7], model.W_OV1 @ model.E[7]) / 512**1.5)
    recalls = model.recalls(range(N))
    assert recalls[0] == recalls[2] == 1 and recalls[1] == pytest.approx(1 - 1 / N)
    assert model.recalls([7])[1] == 0 and model.recalls([3, 4])[1] == 1


def test_random_memories_are_at_chance():
    recalls = torch.tensor([random_model(T=32, seed=seed).recalls(range(N)) for seed in range(60)])
    chance = torch.tensor([1 / N, 1 / N, 1 / 32])
    assert ((recalls.mean(0) - chance).abs() < 5 * (chance / (60 * 16)).sqrt()).all()


def test_measures_by_hand():
    tokens = torch.tensor([[5, 8, 5, 8, 5], [9, 9, 9, 9, 9]])
    scored = torch.tensor([[False, False, True, True], [False, True, True, True]])
    logits = torch.zeros(2, 4, N)
    logits[0, :, 8] = logits[1, :, 9] = 1  # the first is right at token 2, the second always
    cyclic = torch.tensor([False, True])
    assert accuracies(logits, tokens, scored, cyclic) == pytest.approx([4 / 5, 1 / 2])
    even = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    kept = attention_kept(tokens[:1], scored[:1], even[None], even[None])
    # head 1: 1/2, 1/3, 1/4 before; head 2: tokens after the same: 1 for the third, 2 for the fourth
    assert kept == pytest.approx([(1 / 2 + 1 / 3 + 1 / 4) / 3, (1 / 3 + 1 / 4) / 2])


def test_gradient_at_zero_is_a_sum_of_memories():
    """W_OV2 from zero: sum of (p - 1{right}) u times the mean of what it reads (the lemma)."""
    model = Simplified(32, 12, 1.0, seeded())
    tokens, scored, _, _ = draw_batch("random", B=6, T=12)
    logits = model(tokens[:, :-1])[0][scored]
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][scored], reduction="sum")
    (gradient,) = torch.autograd.grad(loss, model.W_OV2)
    expected = torch.zeros(32, 32)
    for b, t in scored.nonzero().tolist():
        x = model.E[tokens[b, : t + 1]] + model.P[: t + 1]
        x = torch.stack([x[s] + model.W_OV1 @ x[: s + 1].mean(0) for s in range(t + 1)])
        error = (model.U @ x[-1]).softmax(0)
        error[tokens[b, t + 1]] -= 1
        expected += torch.outer(model.U.T @ error, x.mean(0))
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_frozen_memories_wait():
    run = partial(bigrams.train, 0, d=32, T=16, B=16)
    rows = run("keys frozen to step 60", 70)
    assert [row[0] for row in rows] == [*range(0, 80, 10)]
    assert len(rows[0]) == len(bigrams.COLUMNS)
    assert rows[6][4] == pytest.approx(1 / N) and rows[6][5] == pytest.approx(1 / 15)
    assert rows[6][3] != pytest.approx(1 / N)  # W_OV2 has learnt
    assert rows[6][6:] == rows[0][6:] != rows[7][6:]  # attention stays even for so long
    rows = run("W_OV2 frozen to step 60", 70)
    assert rows[6][3] == pytest.approx(1 / N) != rows[7][3]
    assert rows == run("W_OV2 frozen to step 60", 70)  # a seed is a run


# ---- theorems.py


def test_steps_recall_far_more_than_chance():
    recalls = theorems.three_steps(0, "uniform", 128, 1024)
    assert recalls[0] > 0.2 and recalls[1] > 4 / N and len(recalls) == 3
    assert theorems.three_steps(0, "uniform", 128, 1024) == recalls
