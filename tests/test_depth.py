"""Pairs among distractors, a start from other weights, how one layer reads, what tables count."""

import hashlib
import json

import data
import train
from extras.studies import depth, rows, start
from tests.common import output_of

import pytest
import torch


@pytest.mark.parametrize(
    "task, G, N", [("random20", 20, 2), ("random12", 12, 2), ("fixed20", 20, 2), ("random6", 6, 4)]
)
def test_pairs_stand_whole_among_distractors(task, G, N):
    """Who equals whom, what is asked, where pairs stand, what stays in place."""
    B, K, end = 1000, 4, 2 * N + G
    batch = data.make_batch(3, torch.arange(B), N, 1, K, task=task)
    again = data.make_batch(3, torch.arange(B - 7, B), N, 1, K, task=task)
    assert torch.equal(again.inputs, batch.inputs[-7:])
    shown, sequence = batch.inputs[..., :K], torch.arange(B)[:, None]
    query, key, value = batch.positions.unbind(-1)  # (B, N)
    assert torch.equal(value, key + 1) and value.max() < end <= query.min()
    assert torch.equal(shown[sequence, query], shown[sequence, key])
    assert torch.equal(batch.targets[sequence, query - end], shown[sequence, value])
    for tokens, numbers in zip(shown.tolist(), batch.symbols.tolist(), strict=True):
        assert len({*map(tuple, tokens)}) == len({*numbers}) == end == len(tokens) - N
    assert torch.equal(batch.inputs[..., K:], batch.inputs[:1, :, K:].expand(B, -1, -1))
    assert abs(shown.mean()) < 0.02
    assert {*key.flatten().tolist()} == ({5, 17} if task == "fixed20" else {*range(end - 1)})
    if task == "random20":  # each place is as likely as any other, but for the ends
        counts = key.flatten().bincount()[1:-1]
        assert counts.min() > 0.6 * counts.float().mean()


@pytest.mark.parametrize(
    "task, N, D, digest",
    [
        ("random20", 2, 1, "90b1fdb2f933"),
        ("fixed6", 4, 1, "6c5dca99f11f"),
        ("shuffled", 4, 2, "f56bf7269141"),
        ("conditional", 4, 3, "3c752052388d"),
    ],
)
def test_sequences_are_those_of_the_committed_rows(task, N, D, digest):
    batch = data.make_batch(7, torch.arange(50), N, D, task=task)
    numbers = torch.cat([batch.symbols.flatten(), batch.positions.flatten()])
    assert hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:12] == digest


# ---- a run from the weights of another, and how one layer reads


def test_a_run_starts_from_the_weights_of_another(tmp_path, monkeypatch):
    for name in "build", "provenance_of":  # start.py replaces them
        monkeypatch.setattr(train, name, getattr(train, name))
    flags = "--layers 1 --heads 2 --N 2 --D 1 --width 16 --steps 3 --dtype float32 --device cpu"
    first = ["--task", "random4", *flags.split(), "--out", tmp_path / "first"]
    output_of(train, *first)
    output_of(start, tmp_path / "first", *first[2:-1], tmp_path / "then", "--task", "random4")
    ended, began = train.read_log(tmp_path / "first")[-1], train.read_log(tmp_path / "then")[0]
    assert began["val"] == pytest.approx(ended["val"], abs=1e-6)
    assert train.read_flags(tmp_path / "then").init == "first"
    assert "init=first" in rows.load([tmp_path / "then"])[0]["settings"]


def by_hand(inputs, heads=None, return_patterns=False):
    """One layer that answers x_1: head 0 reads where the own 1a stands, head k the symbol of token
    k, and the answer is what the head of the next token has read. Two queries or four."""
    B, T, _ = inputs.shape
    symbols = inputs[..., :4]
    N = int((symbols[:1, :, None] == symbols[:1, None]).all(-1).sum() - T) // 2  # pairs of equals
    same = (symbols[:, :, None] == symbols[:, None]).all(-1) * torch.arange(T, 0, -1)
    patterns = [torch.nn.functional.one_hot(same.argmax(-1), T).float()]  # the first equal token
    patterns += [torch.eye(T)[k].expand(B, T, T) for k in range(1, T - N)]
    values = [torch.eye(T).expand(B, T, T)] + [symbols] * (T - N - 1)
    written = []
    for head, (pattern, value) in enumerate(zip(patterns, values, strict=True)):
        written.append((heads or {}).get((0, head), torch.matmul)(pattern, value)[:, -N:])
    memory = torch.stack(written[1:], 2)  # (B, N, T - N - 1, K)
    answers = (written[0][:, :, : T - N - 1, None] * memory).sum(2)
    return (answers, [torch.stack(patterns, 1)]) if return_patterns else answers


@pytest.mark.parametrize(
    "task, N, heads, places", [("chain", 4, 8, [1, 3, 5, 7]), ("random4", 2, 8, [*range(1, 8)])]
)
def test_interventions_find_the_address_and_the_memory(task, N, heads, places, monkeypatch):
    """On a model whose mechanism is known."""
    text = f"--task {task} --N {N} --layers 1 --heads {heads} --D 1 --dtype float32 --device cpu"
    flags = train.parse_flags(text.split())
    monkeypatch.setattr(train, "load", lambda run: (by_hand, flags))
    how = depth.mechanism(None)
    assert how["address"] == ["H0"] and how["place"] == [f"H{k}" for k in places]
    assert how["full"] < 1e-6 and how["by_place"] == pytest.approx([0] * len(places))

    # an address of another sequence fetches what stands there, all else that sequence's symbol
    for swap in "swap", "swap_rest":
        new, old = how[swap]
        assert new < 1e-6 and old > 1


# ---- what the page counts


def test_medians_are_compared_with_what_was_predicted(tmp_path, monkeypatch):
    """Of made-up runs: a scratch cell inside, a led one outside; other steps count in neither."""
    made = []
    for steps, init, losses in (10_000, "", (0.1, 0.2, 0.9)), (5000, "a", (0.6,)), (4000, "", (0,)):
        for seed, loss in enumerate(losses):
            row = dict(layers=1, heads=8, N=2, D=1, seed=seed, other="--task random6", fell=0)
            made.append(row | dict(steps=steps, init=init, x_1=loss))
    predicted = []
    for group, low, high in ("scratch", 0.1, 0.3), ("led: 5000 steps", 0.7, 0.9):
        cell = dict(group=group, layers=1, N=2, D=1, places=9, heads=8, loss="x_1")
        predicted.append(cell | dict(low=low, high=high))
    for name, content in ("ROWS", made), ("PREDICTED", predicted):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in content))
        monkeypatch.setattr(depth, name, file)
    depth.cells.cache_clear()
    assert depth.solved_of(depth.at_random(9, [8], [False])) == "0 of 3"
    assert "inside: 1 of 2; 0.66 in each, as wide: 1" in depth.predictions()
    depth.cells.cache_clear()
