"""Pairs among distractors, a start from other weights, and how one layer reads."""

import train
from data import Task
from extras.studies import depth, places, rows
from tests.common import output_of
from tests.planted import address_and_values

import pytest
import torch


@pytest.mark.parametrize(
    "name, G, N", [("random20", 20, 2), ("random12", 12, 2), ("fixed20", 20, 2), ("random6", 6, 4)]
)
def test_pairs_stand_whole_among_distractors(name, G, N):
    """Who equals whom, what is asked, where pairs stand."""
    B, K, end = 1000, 4, 2 * N + G
    task = getattr(places, name)(N=N, D=1, K=K, seed=3)
    batch = task.draw("training", B)
    shown, sequence = batch.inputs, torch.arange(B)[:, None]
    query, key, value = batch.places.unbind(-1)  # (B, N)
    assert torch.equal(value, key + 1) and value.max() < end <= query.min()
    assert torch.equal(shown[sequence, query], shown[sequence, key])
    assert torch.equal(batch.answers[sequence, query - end], shown[sequence, value])
    for tokens, numbers in zip(shown.tolist(), batch.symbols.tolist(), strict=True):
        assert len({*map(tuple, tokens)}) == len({*numbers}) == end == len(tokens) - N
    assert {*key.flatten().tolist()} == ({5, 17} if name == "fixed20" else {*range(end - 1)})


# ---- a run from the weights of another, and how one layer reads


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    flags = "--layers 1 --heads 2 --N 2 --D 1 --width 16 --steps 3 --dtype float32 --device cpu"
    words = ["--task", "extras.studies.places:random4", *flags.split()]
    output_of(train, *words, "--out", tmp_path / "first")
    output_of(train, *words, "--out", tmp_path / "then", "--init", tmp_path / "first")
    ended, began = train.read_log(tmp_path / "first")[-1], train.read_log(tmp_path / "then")[0]
    assert began["val"] == pytest.approx(ended["val"], abs=1e-6)
    assert train.read_flags(tmp_path / "then").init == str(tmp_path / "first")
    assert f"init={tmp_path / 'first'}" in rows.load([tmp_path / "then"])[0]["settings"]


def test_interventions_find_the_address_and_the_memory(monkeypatch):
    """On a model whose mechanism is known."""
    monkeypatch.setattr(train, "load", lambda run: (address_and_values, Task(D=1), None))
    how = depth.mechanism(None)
    assert how["address"] == ["H0"] and how["place"] == ["H1", "H2", "H3", "H4"]
    assert how["full"] < 0.01 and how["by_place"] == pytest.approx([0] * 4, abs=0.01)

    # an address of another sequence fetches what stands there, all else that sequence's symbol
    for swap in "swap", "swap_rest":
        new, old = how[swap]
        assert new < 0.01 and old > 1
