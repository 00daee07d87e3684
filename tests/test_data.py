"""Batches: random numbers, tasks as tables of roles, targets, epochs, what is held out."""

import hashlib
import itertools
import math
import statistics

import pytest
import torch

import data
from tests.common import assert_refused, bits_behind, run_main, solve
from tests.other_tasks import TASKS, sequences_of


# ---- random numbers


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
    bits = data.random_bits(0, torch.arange(1), 200)[0]
    for number, bit in zip(data.standard_normal(bits).tolist(), bits.tolist(), strict=True):
        share = ((bit % 2**64 >> 41) + 0.5) / 2**23
        assert abs(number - statistics.NormalDist().inv_cdf(share)) < 1e-5


def test_symbols_are_distinct_standard_normal_numbers():
    extremes = data.standard_normal(torch.tensor([-1, 0, 2**63 - 1, -(2**63)]))
    assert extremes.isfinite().all() and 5 < extremes.max() == -extremes.min() < 6
    batch = data.make_batch(1, torch.arange(4000), rotary="qk")
    tokens = batch.positions[:, :, [0, 2, 4, 6]].flatten(1)  # one role per symbol
    held = batch.inputs.gather(1, tokens[..., None].expand(-1, -1, 4)).flatten(0, 1)
    numbers = held.flatten().double().sort().values
    assert abs(numbers.mean()) < 0.01 and abs(numbers.var() - 1) < 0.01

    # Kolmogorov-Smirnov, p = 0.001
    cdf = 0.5 * (1 + (numbers / math.sqrt(2)).erf())
    distance = (cdf - (torch.arange(len(numbers)) + 0.5) / len(numbers)).abs().max()
    assert distance * math.sqrt(len(numbers)) < 1.95
    assert len(held.unique(dim=0)) == len(held)
    assert (torch.corrcoef(held.T) - torch.eye(4)).abs().max() < 0.02


def test_shuffles_are_uniform_and_independent():
    N, D, B = 3, 2, 12000
    tokens = data.make_batch(5, torch.arange(B), N, D).positions[:, :, [1, 3, 0]]
    order = tokens.argsort(1)  # (B, N, 3) who stands where: steps 1 and 2, queries
    code = (order * torch.tensor([9, 3, 1])[:, None]).sum(1)  # a permutation as one number
    joint = torch.stack([c.unique(return_inverse=True)[1] for c in code.T], 1)  # (B, 3) in 0..5
    for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
        cell = sum(joint[:, c] * 6**i for i, c in enumerate(columns))
        counts, expected = cell.bincount(minlength=6 ** len(columns)), B / 6 ** len(columns)
        chi2, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
        assert abs(chi2 - freedom) < 4.5 * math.sqrt(2 * freedom), (columns, chi2)


# ---- batches


def test_batches_are_those_of_the_first_release():
    """What was published must be able to be made again."""
    found, index = hashlib.sha256(), torch.tensor([0, 1, 5, 12345, -1, -2, -1048577])
    for D in range(1, 9):
        for N, K, asked, rotary in ((4, 4, None, "input"), (3, 2, [D], "qk")):
            for seed in (0, 7):
                batch = data.make_batch(seed, index, N, D, K, asked, rotary)
                symbols = bits_behind(batch.inputs[..., :K]), bits_behind(batch.targets)
                for whole in (*symbols, batch.positions):
                    found.update(whole.contiguous().numpy().tobytes())
    assert found.hexdigest()[:16] == "3c12a7cc19785a57"


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


def test_positions_are_where_the_roles_stand():
    N, D, K = 4, 3, 4
    batch = data.make_batch(0, torch.arange(50), N, D, K)
    assert data.chain(N, D).names == ["q", "1a", "1b", "2a", "2b", "3a", "3b"]
    every = batch.positions.flatten(1).sort(1).values
    assert torch.equal(every, torch.arange(28).expand(50, 28))
    for b, n in itertools.product(range(50), range(N)):
        tokens = batch.positions[b, n].tolist()
        held = batch.inputs[b, tokens, :K]
        asked = tokens[0] - 2 * N * D
        assert asked >= 0  # the queries come last
        for k in range(1, D + 1):
            first, second = tokens[2 * k - 1], tokens[2 * k]
            assert second == first + 1 and first // (2 * N) == D - k  # adjacent, deepest step first
            assert torch.equal(held[2 * k - 1], held[2 * k - 2])  # ka repeats x_{k-1}
            assert torch.equal(batch.targets[b, asked].view(D, K)[k - 1], held[2 * k])


def test_batches_are_a_pure_function_of_seed_and_index():
    whole = data.make_batch(2, torch.arange(100))
    alone = data.make_batch(2, torch.tensor([71, 3]))
    assert all(torch.equal(a, w[[71, 3]]) for a, w in zip(alone, whole, strict=True))
    assert not torch.equal(whole.inputs, data.make_batch(3, torch.arange(100)).inputs)


def test_every_example_comes_once_per_epoch():
    steps = [data.batch_index(0, step, 16, 40) for step in range(5)]  # 80 examples, 2 epochs
    first, second = torch.cat(steps).split(40)
    assert torch.equal(first.sort().values, torch.arange(40))
    assert torch.equal(second.sort().values, torch.arange(40))
    assert not torch.equal(first, second)
    assert torch.equal(data.batch_index(0, 3, 16, 0), torch.arange(48, 64))


def test_held_out_parts_never_meet():
    """Neither each other nor what is trained on, which counts up from 0."""
    starts = [*data.SPLITS.values()]
    assert starts == sorted(set(starts)) and starts[0] == 0
    for (split, start), end in zip(data.SPLITS.items(), starts[1:], strict=False):
        index = data.held_out(split, end - start)
        assert index.max() == -1 - start < 0 and index.min() == -end
        with pytest.raises(ValueError, match="sequences held out for"):
            data.held_out(split, end - start + 1)


# ---- tasks


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_positions_and_slots_of_every_task(task):
    """Against sequences that are made token by token."""
    positions = sequences_of(task, 20).positions
    every = positions.flatten(1).sort(1).values
    assert torch.equal(every, torch.arange(task.T).expand(20, -1))
    slots = task.slots(positions)
    assert torch.equal(slots.sort(1).values, torch.arange(task.N)[:, None].expand_as(slots))
    assert torch.equal(task.positions(slots), positions)


# ---- the command line


def test_one_sequence_told_in_words():
    """Followed through the words alone, as a reader would."""
    code, out, _ = run_main(data, "--N", 3, "--D", 2, "--seed", 5)
    assert code == 0 and "3 chains, 4 numbers per symbol: 15 tokens. Chain 1 is A1, B1, C1." in out
    tokens = " ".join(line[14:].split("roles")[0] for line in out.splitlines() if "roles:" in line)
    pairs, queries = tokens.split()[:12], tokens.split()[12:]
    follows = dict(zip(pairs[0::2], pairs[1::2], strict=True))
    for name in queries:
        assert f"  {name}: {follows[name]} {follows[follows[name]]}\n" in out


def test_bad_flags_of_data_get_one_line():
    for flags, says in (
        ("--D 0", "at least 1"),
        ("--N 1000000000000", "at most 100"),
        ("--K 5", "--K even"),
        ("--D x", "invalid int"),
        ("--task conditional --D 4", "leave out --D 4"),
        ("--seed -1", "--seed must be"),
        (f"--seed {2**63}", "--seed must be"),
    ):
        assert_refused(data, *flags.split(), says=says)
    assert run_main(data, *"--task conditional --D 3".split())[0] == 0


@pytest.mark.parametrize("task", ["unlinked", "first_step_first"])
def test_tasks_to_compare_with(task):
    """Read by a solver that knows no roles: x_1 follows x_0; which symbols stand twice; and the
    order of blocks."""
    batch = data.make_batch(3, torch.arange(64), N=4, D=2, task=task)
    for inputs, targets in zip(batch.inputs[..., :4].tolist(), batch.targets, strict=True):
        pairs, queries, answers = inputs[:16], inputs[16:], targets[:, :4].tolist()
        followed = [pairs[pairs.index(query) + 1] for query in queries]
        assert followed == answers
        again = sum(pairs.count(answer) == 2 for answer in followed)
        assert again == (0 if task == "unlinked" else 4)
        first = {pairs.index(query) // 8 for query in queries}  # the block in which x_0 stands
        assert first == {0 if task == "first_step_first" else 1}
