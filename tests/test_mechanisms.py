"""Each script of extras/mechanisms against a loop, gradients of PyTorch or a planted answer."""

import math
from unittest import mock

from extras.mechanisms import __main__, attention, bigrams, hops, memories, noise, recall
from extras.mechanisms.bigrams import N
from tests.common import run_main

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize, one_hot


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_committed_system_is_drawn_and_printed_as_ascii():
    with mock.patch.object(__main__, "save_figure") as save:
        for name in __main__.NAMES:
            code, out, err = run_main(__main__, name, "--out", "results/mechanisms")
            assert (code, err) == (0, "") and out.isascii()
    assert save.call_count == len(__main__.NAMES)


def test_planted_induction_head_is_recalled_and_solves_the_task():
    d = 512
    model = bigrams.Simplified(d, 64, seeded(3))
    E, P = model.E, model.P
    with torch.no_grad():
        model.W_OV2.copy_(30 * model.U.T @ E / d)
        model.W_KQ2.copy_(15 * E.T @ E @ model.W_OV1.T / d**1.5)
        model.W_KQ1.copy_(15 * P[1:].T @ P[:-1] / d**1.5)
        how = "random", bigrams.read_bigrams(), seeded()
        tokens, scored, cyclic = bigrams.sample(100, 64, *how)
        logits, patterns = model(tokens[:, :-1])
    assert model.recalls(range(N)) == [1.0] * 3
    # the first token has no previous token: L0H0 attends to the token itself, which misleads
    misled = tokens[:, :-1] == tokens[:, :1]
    assert min(bigrams.accuracies(logits, tokens, scored & ~misled, cyclic)) == 1
    previous, following = attention.targets_of(tokens[:, :-1], scored)
    assert (patterns[0] * previous).sum(2)[:, 1:].min() > 0.99
    assert (patterns[1] * following).sum(2)[scored & ~misled].mean() > 0.99

    # one wrong association: the recall of its memory falls by its share
    with torch.no_grad():
        model.W_KQ2.sub_(30 * torch.outer(E[7], model.W_OV1 @ E[7]) / d**1.5)
    assert model.recalls(range(N)) == pytest.approx([1, 1 - 1 / N, 1])


def test_targets_of_attention_by_a_loop():
    tokens = torch.randint(4, (5, 12), generator=seeded())
    scored = torch.rand(5, 12, generator=seeded()) < 0.5
    previous, following = attention.targets_of(tokens, scored)
    for b, t, s in np.ndindex(following.shape):
        after = 0 < s <= t and tokens[b, s - 1] == tokens[b, t] and scored[b, t]
        assert following[b, t, s] == bool(after)
        assert previous[b, t, s] == (s == t - 1)


def test_frozen_memories_stay_at_zero_until_their_step():
    def moved(steps, *frozen):
        settings = dict(triggers="random", frozen=frozen, until=4, d=16, T=8, B=8)
        model, _ = bigrams.train_simplified(0, steps=steps, **settings)
        return [name for name in bigrams.MEMORIES if model.get_parameter(name).any()]

    assert moved(3, "W_KQ2", "W_KQ1") == ["W_OV2"]  # after steps 0 to 3
    assert moved(4, "W_KQ2", "W_KQ1") == [*bigrams.MEMORIES]
    assert moved(3, "W_OV2") == ["W_KQ1"]  # as long as W_OV2 is zero, W_KQ2 has no gradient either


def test_memory_table_of_planted_curves():
    def curve(*steps):  # half recall of each memory, then accuracy 0.9, at these steps
        return [[t, 0, 0.9 * (t >= steps[3]), *(0.5 * (t >= s) for s in steps[:3])] for t in times]

    times = range(0, 40, 10)
    values = [curve(0, 10, 20, 30), curve(10, 30, 20, 99), curve(20, 10, 30, 30)]
    row = dict(triggers="random", frozen=["W_KQ2"], until=20, values=values)
    assert bigrams.memory_table([row]).splitlines()[2] == (
        "| W_KQ2 from step 20 | 10 (0-20) | 10 (10-30) | 20 (20-30) | 30 (30-inf) | 1 | 1 | 0.60 |"
    )


def test_one_step_recall_is_that_of_autograd():
    generator, right = seeded(), 0
    for _ in range(33):
        U, E = normalize(torch.randn(2, 123, 64, generator=generator), dim=2)
        W = torch.zeros(64, 64, requires_grad=True)
        cross_entropy(E @ W.T @ U.T, torch.arange(123)).backward()
        right += int(((E @ -W.grad.T @ U.T).argmax(1) == torch.arange(123)).sum())
    assert memories.one_step_recall(0, 123, 64) == pytest.approx(right / (33 * 123), abs=1e-3)


def test_steps_of_sgd_by_autograd():
    generator, N, rate, p = seeded(2), 16, 16, [0.0]
    held_out, _ = noise.contexts("attention", 64, N, generator)
    weight = torch.zeros(N + 1, held_out.shape[1], requires_grad=True)
    while max(p[::4]) < 0.25:
        for read, target in zip(*noise.contexts("attention", 64, N, generator), strict=True):
            cross_entropy(weight @ read, target).backward()
            weight.data -= rate * weight.grad
            weight.grad = None
            p.append((held_out @ weight.T).softmax(1)[:, N].mean().item())
    taken = noise.samples_online(2, "attention", N, rate)
    assert p[taken] >= 0.25 > max(p[:taken:4])


def test_flow_is_small_step_gradient_descent():
    """All weights free: the symmetry on which the flow rests is not put in."""
    S, R, D, init, lr = 8, 3, 4, 0.01, 0.05
    facts = recall.draw_facts(S, R, D, seeded())
    subject, relation = torch.cartesian_prod(torch.arange(S), torch.arange(R)).T
    counts = torch.cat([one_hot(subject), one_hot(relation), torch.ones(S * R, 3)], 1).double()
    w = torch.full((S + R + 3,), init, dtype=torch.double, requires_grad=True)
    output = torch.full((R * D, S + R + 3), init, dtype=torch.double, requires_grad=True)
    curve = []
    for _ in range(6000):
        logits = counts * w @ output.T
        curve.append(recall.measures(logits.detach(), subject, relation, facts, D)[1:3])
        loss = cross_entropy(logits, facts.flatten())
        for x, gradient in zip((w, output), torch.autograd.grad(loss, (w, output)), strict=True):
            x.data -= lr * gradient
    for i, level in enumerate([math.log(R), math.log(D)]):
        assert curve[0][i] > 0.9 * level and curve[-1][i] < 0.1 * level
    for i, kind in enumerate([(R, R, D), (S, D, R)]):
        for time, loss in list(recall.flow(*kind, init, end=5900 * lr))[::50]:
            assert curve[round(time / lr)][i] == pytest.approx(loss, abs=0.02)


@pytest.mark.parametrize("layers, hops_of_levels", [(0, [1, 2, 4, 8]), (3, [1, 2, 8])])
def test_ring_by_walking(layers, hops_of_levels):
    k, n = 8, 5
    task = hops.Ring(k, n, 1, layers)
    tokens, targets = task.sample([*range(len(hops_of_levels))], 12, seeded())
    for b, sequence in enumerate(tokens.tolist()):
        for level, steps in enumerate(hops_of_levels):
            walked = []
            for place, number in np.ndindex(k, n):
                for i in range(place, place + steps):
                    number = sequence[i % k * n + int(task.pi[0, i % k, number])]
                walked.append(number)
            assert targets[level, b].tolist() == walked
