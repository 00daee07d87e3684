"""hops.py against brute force, and a transformer given the known circuit."""

from unittest import mock

import pytest
import torch

from mechanisms import hops
from mechanisms.hops import BATCH, EVERY, Ring, Transformer


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- the ring


def walk(sigma, pi, i, b, count):
    """`count` hops from number b at place i, one by one."""
    for _ in range(count):
        b = sigma[i][pi[i][b]]
        i = (i + 1) % len(sigma)
    return b


@pytest.mark.parametrize("k, N", [(2, 3), (4, 4), (8, 5)])
@pytest.mark.parametrize("hop_token", [False, True])
def test_ring_by_brute_force(k, N, hop_token):
    task = Ring(k, N, hop_token, seed=1)
    levels = [*range(len(task.hops))]
    assert task.hops == [2**i for i in levels] and task.hops[-1] == k
    tokens, targets = task.sample(levels, 12, seeded())
    assert tokens.shape == (12, task.T) and tokens.max() < task.vocabulary
    assert targets.shape == (1 if hop_token else len(levels), 12, task.T)
    pi, met = task.pi[0].tolist(), set()
    for n, sequence in enumerate(tokens.tolist()):
        if hop_token:
            asked = [sequence.pop(0) - N]
            assert targets[0, n, 0] == -100
        else:
            asked = levels
        met |= set(asked)
        sigma = [sequence[i * N : (i + 1) * N] for i in range(k)]
        assert all(sorted(row) == [*range(N)] for row in [*sigma, *pi])
        for reading, level in enumerate(asked):
            own = targets[reading, n, hop_token:].view(k, N).tolist()
            for i in range(k):
                assert own[i] == [walk(sigma, pi, i, b, 2**level) for b in range(N)]
    assert met == set(levels)


def test_only_asked_levels_are_in_a_batch():
    tokens, targets = Ring(4, 4, False, 0).sample([2], 5, seeded())
    assert (targets[0] == Ring(4, 4, False, 0).sample([0, 1, 2], 5, seeded())[1][2]).all()
    asked = Ring(4, 4, True, 0).sample([0, 2], 40, seeded())[0][:, 0]
    assert set(asked.tolist()) == {4, 6}


def test_hidden_permutations_stay():
    task = Ring(4, 5, False, 3)
    assert (task.pi == Ring(4, 5, False, 3).pi).all() and (task.pi != Ring(4, 5, False, 4).pi).any()


# ---- the transformer


def with_circuit(task):
    """Its maps on given sequences: layer 1 to (i, pi_i(b)), then to the place 2^(l-2) ahead that
    holds the number known so far; found by walking."""

    def maps(tokens):
        held, (k, N) = [], (task.k, task.N)
        for layer in range(len(task.hops)):
            own = torch.zeros(len(tokens), task.T, task.T)
            ahead = 0 if layer == 0 else 2 ** (layer - 1)
            for n, sequence in enumerate(tokens.tolist()):
                sigma = [sequence[i * N : (i + 1) * N] for i in range(k)]
                for i in range(k):
                    for b in range(N):
                        known = walk(sigma, task.pi[0].tolist(), i, b, ahead)
                        wanted = known if ahead else int(task.pi[0, i, b])
                        own[n, i * N + b, (i + ahead) % k * N + wanted] = 1
            held.append({0: own, 1: own})
        return held

    return maps


def test_attention_of_the_known_circuit_is_counted():
    """A model whose maps are the circuit's: all attention is where it should be."""
    task = Ring(4, 3, False, 0)
    torch.manual_seed(0)
    model, maps = Transformer(task), with_circuit(task)
    tokens, _ = task.sample([0], 4 * BATCH, seeded(7))
    own = maps(tokens)
    free = model.forward

    def forward(tokens, levels, held=()):
        logits, _ = free(tokens, levels, held or own)
        return logits, [
            torch.stack([own[i][0], torch.full_like(own[i][0], 1 / 12)], 1) for i in (0, 1, 2)
        ]

    with mock.patch.object(model, "forward", forward):
        found = hops.attended(model, task, seeded(7))
    for layer, ahead in enumerate([0, 1, 2]):
        assert found["places"][layer][0] == pytest.approx([float(s == ahead) for s in range(4)])
        assert found["places"][layer][1] == pytest.approx([0.25] * 4)


def test_even_attention_is_even():
    task = Ring(4, 4, False, 0)
    model = Transformer(task)
    for block in model.blocks:
        block.qkv.weight.data.zero_()
        block.qkv.bias.data.zero_()
    found = hops.attended(model, task, seeded())
    torch.testing.assert_close(torch.tensor(found["places"]), torch.full((3, 2, 4), 0.25))


def test_held_maps_replace_attention():
    """With both heads of layer 1 on the right token, a constructed read-out names one hop."""
    task = Ring(2, 3, False, 0)
    model = Transformer(task)
    tokens, targets = task.sample([0], 20, seeded())
    block = model.blocks[0]
    with torch.no_grad():
        model.P.zero_()
        model.E.copy_(torch.eye(64)[:3] * 10 - torch.eye(64)[3:6] * 10)  # of mean 0
        block.qkv.weight.zero_()
        block.qkv.bias.zero_()
        block.qkv.weight[128:] = torch.eye(64)  # values
        block.out.weight.copy_(100 * torch.eye(64))
        block.out.bias.zero_()
        model.reads[0][1].weight.copy_(torch.eye(64)[:3])
        model.reads[0][1].bias.zero_()
        right = model(tokens, [0], with_circuit(task)(tokens))[0].argmax(3) == targets
        free = model(tokens, [0])[0].argmax(3) == targets
    assert right.all() and not free.all()


# ---- training


def test_one_hop_is_learnt_by_mixture_and_last_level_alone_by_hard():
    task = Ring(2, 3, False, 0)
    model, rows = hops.fit(task, "mixture", 300, 0)
    assert rows[0][0] == 0 and rows[0][1] < 0.6
    assert min(rows[-1][1:]) > 0.9 and rows[-1][0] < 300 and rows[-1][0] % EVERY == 0
    assert hops.fit(task, "mixture", 50, 0)[1] == rows[:3]  # a seed is a run
    assert hops.fit(task, "hard", 25, 0)[0].reads[0][1].weight.grad is None
    found = hops.attended(model, task, seeded(1))
    assert found["held"][0] > 0.8 > 0.6 > found["held"][1]


def test_curriculum_adds_a_level_when_the_newest_is_solved():
    task, asked = Ring(4, 3, False, 0), []
    sample, accuracies = task.sample, iter([0.1, 0, 0, 0.96, 0, 0, 0.3, 0.97, 0, 0, 0, 0])

    def record(levels, B, generator):
        asked.append([*levels])
        return sample(levels, B, generator)

    with (
        mock.patch.object(task, "sample", record),
        mock.patch.object(hops, "EVERY", 1),
        mock.patch.object(hops, "accuracy", lambda *_: next(accuracies)),
    ):
        hops.fit(task, "curriculum", 3, 0)
    assert asked == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_table_names_the_steps_of_solved_runs():
    runs = [dict(rows=[[0, 0.1], [at, accuracy]]) for at, accuracy in ((75, 0.96), (25, 0.95))]
    row = dict(k=2, N=4, regime="hard", hop_token=False, steps=90)
    missed = dict(rows=[[0, 0.1], [90, 0.94]])
    results = dict(train=[row | dict(values=[missed, *runs]), row | dict(k=4, values=[missed])])
    assert hops.table(results).splitlines()[-1] == "|hard|25, 75, -|-|"
