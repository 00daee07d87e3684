"""Batches: random numbers, targets, positions, epochs, held-out examples, and the command line."""

import hashlib
import itertools
import statistics

import pytest
import torch

import data
from tests.common import assert_refused, bits_behind, run_main, solve
from tests.other_tasks import PAIR, TASKS, distracted, table


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
    digest, index = hashlib.sha256(), torch.tensor([0, 1, 5, 12345, -1, -2, -1048577])
    for D in range(1, 9):
        for N, K, targets, rotary in ((4, 4, None, "input"), (3, 2, [D], "qk")):
            for seed in (0, 7):
                batch = data.make_batch(seed, index, N, D, K, targets, rotary)
                symbols = bits_behind(batch.inputs[..., :K]), bits_behind(batch.targets)
                for tensor in (*symbols, batch.positions):
                    digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "3c12a7cc19785a57"


def test_targets_are_what_following_the_chain_gives():
    for N, D, K in itertools.product((1, 2, 4, 5), (1, 2, 3, 6), (2, 4)):
        T, index = N * (2 * D + 1), torch.arange(20)
        batch = data.make_batch(3, index, N, D, K)
        last = data.make_batch(3, index, N, D, K, [D], rotary="qk")
        assert batch.inputs.shape == (20, T, 2 * K) and last.inputs.shape == (20, T, K)
        for i in index:
            solved = solve(batch.inputs[i], N, D, K)
            assert torch.equal(solved, batch.targets[i])
            assert torch.equal(solved[:, -K:], last.targets[i])


@pytest.mark.parametrize("title", TASKS)
def test_positions_are_where_the_roles_stand(title, monkeypatch):
    """Every role of a chain shows its symbol, at its place of a slot that it shares with the other
    roles of its block, and queries have their targets in the order of their tokens."""
    task, K = TASKS[title], 4
    monkeypatch.setitem(data.TASKS, title, lambda N, D: task)
    batch = data.make_batch(0, torch.arange(20), task.N, K=K, task=title)
    tokens = batch.positions.flatten(1).sort(1).values
    assert torch.equal(tokens, torch.arange(task.T).expand(20, -1))
    sizes = [[role.block for role in task.roles].count(k) for k in range(len(task.blocks))]
    for b, n in itertools.product(range(20), range(task.N)):
        query = batch.positions[b, n, 0] - task.T + task.N
        symbols = [batch.inputs[b, -task.N + query, :K], *batch.targets[b, query].split(K)]
        slots = {}
        for role, token in zip(task.roles, batch.positions[b, n].tolist(), strict=True):
            assert torch.equal(batch.inputs[b, token, :K], symbols[role.symbol])
            slot, place = divmod(token - task.N * sum(sizes[: role.block]), sizes[role.block])
            assert place == role.place and slots.setdefault(role.block, slot) == slot < task.N


def test_role_names_are_unique():
    with pytest.raises(ValueError, match="two roles of task twice have the same name"):
        table("twice", 2, ("q", 0, 1, 0), *PAIR, PAIR[0])


def test_distractors_belong_to_no_chain(monkeypatch):
    monkeypatch.setitem(data.TASKS, "distracted", distracted)
    task, N = distracted(4, 3), 4
    batch = data.make_batch(0, torch.arange(20), task="distracted")
    assert batch.inputs.shape == (20, 28, 8) and batch.targets.shape == (20, N, 8)
    for inputs, targets, positions in zip(*batch, strict=True):
        shown = [tuple(numbers) for numbers in inputs[:, :4].tolist()]
        distractors = {*shown[8:16]}
        assert torch.equal(solve(inputs, N, 2, 4), targets)
        assert len(distractors) == 8 and not distractors & {*shown[:8], *shown[16:]}
        names = data.token_names(task, inputs[:, :4], positions)
        assert len({*zip(names, shown, strict=True)}) == len({*names}) == len({*shown})
        assert sorted(names[8:16]) == sorted(f"d{x}.{n}" for x in "ab" for n in range(1, 5))


def test_batches_are_a_pure_function_of_seed_and_index():
    batch = data.make_batch(2, torch.arange(100))
    alone = data.make_batch(2, torch.tensor([71, 3]))
    assert all(torch.equal(a, b[[71, 3]]) for a, b in zip(alone, batch, strict=True))
    assert not torch.equal(batch.inputs, data.make_batch(3, torch.arange(100)).inputs)


def test_every_example_comes_once_per_epoch():
    steps = [data.batch_index(0, step, 16, 40) for step in range(5)]  # 80 examples, 2 epochs
    first, second = torch.cat(steps).split(40)
    assert torch.equal(first.sort().values, torch.arange(40))
    assert torch.equal(second.sort().values, torch.arange(40))
    assert not torch.equal(first, second)
    assert torch.equal(data.batch_index(0, 3, 16, 0), torch.arange(48, 64))


def test_held_out_splits_are_disjoint_and_never_trained_on():
    end = 0
    for split, examples in data.SPLITS.items():
        index = data.held_out(split, len(examples))
        assert index.max() == -1 - end < 0  # training counts up from 0
        end = -index.min().item()
        with pytest.raises(ValueError, match="sequences held out for"):
            data.held_out(split, len(examples) + 1)


def test_a_worked_sequence_can_be_solved_from_its_text():
    code, out, _ = run_main(data, "--N", 3, "--D", 2, "--seed", 5)
    assert code == 0 and "3 chains, 4 numbers per symbol, 15 tokens" in out
    blocks = [line[10:].split() for line in out.splitlines()[3:6]]
    pairs, queries = blocks[0] + blocks[1], blocks[2]
    follows = dict(zip(pairs[0::2], pairs[1::2], strict=True))
    for name in queries:
        assert f"  {name}: {follows[name]} {follows[follows[name]]}\n" in out


def test_wrong_flags_get_one_line():
    for flags, says in (
        ("--D 0", "at least 1"),
        ("--N 1000", "at most 100"),
        ("--K 3", "--K even"),
        ("--D x", "invalid int"),
        ("--task conditional --D 4", "leave --D out"),
        (f"--seed {2**63}", "--seed must be"),
    ):
        assert_refused(data, *flags.split(), says=says)
