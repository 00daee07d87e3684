"""Batches: random numbers, positions, plateaus, the first release, and the command line."""

import hashlib
import itertools
import statistics

import pytest
import torch

import data
from tests.common import assert_refused, bits_behind, run_main
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

    digest = hashlib.sha256()
    batch = data.make_batch(7, torch.tensor([0, 1, 12345, -1]), task="conditional", rotary="qk")
    for tensor in (bits_behind(batch.inputs), bits_behind(batch.targets), batch.positions):
        digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "5ebf381fe920d679"


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
    task = distracted(4, 3)
    batch = data.make_batch(0, torch.arange(20), task="distracted")
    assert batch.inputs.shape == (20, 28, 8) and batch.targets.shape == (20, 4, 8)
    for inputs, _, positions in zip(*batch, strict=True):
        shown = [tuple(numbers) for numbers in inputs[:, :4].tolist()]
        distractors = {*shown[8:16]}
        assert len(distractors) == 8 and not distractors & {*shown[:8], *shown[16:]}
        names = data.token_names(task, inputs[:, :4], positions)
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


def test_a_split_has_an_end_and_examples_are_endless():
    for split, examples in data.SPLITS.items():
        with pytest.raises(ValueError, match="sequences held out for"):
            data.held_out(split, len(examples) + 1)
    assert torch.equal(data.batch_index(0, 3, 16, 0), torch.arange(48, 64))


# ---- the command line


def test_a_worked_sequence_can_be_solved_from_its_text():
    code, out, _ = run_main(data, "--N", 3, "--D", 2, "--seed", 5)
    assert code == 0 and "3 chains, 4 numbers per symbol, 15 tokens" in out
    blocks = [line[10:].split() for line in out.splitlines()[3:6]]
    pairs, queries = blocks[0] + blocks[1], blocks[2]
    follows = dict(zip(pairs[0::2], pairs[1::2], strict=True))
    for name in queries:
        assert f"  {name}: {follows[name]} {follows[follows[name]]}\n" in out

    code, out, err = run_main(data, "--task", "conditional", "--seed", 5)
    words = out.split()
    triples = {*zip(words, words[1:], words[2:], strict=False)}
    assert code == 0 and "68 tokens" in out and "  A3: B3 C3 D3\n" in out, err
    assert ("B3", "C3", "D3") in triples and ("B3", "C1", "D3.1") in triples


def test_wrong_flags_get_one_line():
    for flags, says in (
        ("--D 0", "from 1 to 100"),
        ("--N 1000", "from 1 to 100"),
        ("--K 3", "even"),
        ("--D x", "invalid int"),
        ("--task conditional --D 4", "leave --D out"),
        (f"--seed {2**63}", "--seed: must be"),
    ):
        assert_refused(data, *flags.split(), says=says)
