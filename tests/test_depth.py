"""Pairs among distractors, a start from other weights, and how one layer reads."""

import data
import train
from extras.studies import depth, rows, start
from tests.common import output_of
from tests.planted import address_and_values

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
    assert {*key.flatten().tolist()} == ({5, 17} if task == "fixed20" else {*range(end - 1)})


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


def test_interventions_find_the_address_and_the_memory(monkeypatch):
    """On a model whose mechanism is known."""
    text = "--layers 1 --heads 5 --D 1 --dtype float32 --device cpu"
    monkeypatch.setattr(
        train, "load", lambda run: (address_and_values, train.parse_flags(text.split()))
    )
    how = depth.mechanism(None)
    assert how["address"] == ["H0"] and how["place"] == ["H1", "H2", "H3", "H4"]
    assert how["full"] < 0.01 and how["by_place"] == pytest.approx([0] * 4, abs=0.01)

    # an address of another sequence fetches what stands there, all else that sequence's symbol
    for swap in "swap", "swap_rest":
        new, old = how[swap]
        assert new < 0.01 and old > 1
