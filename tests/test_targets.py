"""Which symbols are asked for (--targets, --mixture), and whose weights a run starts from."""

import json
from pathlib import Path

from parts import flags as table
from parts import runs

import pytest
import torch

import ablate
import data
import train
from sweep import read_table, row_of, write_table
from tests.common import (
    TINY,
    assert_refused,
    contents,
    logged,
    run_main,
    solve,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")
THREE = [*TINY, "--D", "3", "--heads", "1", "--steps", "20"]


# ---- --targets


def test_targets_are_the_symbols_asked_for():
    N, D, K = 3, 4, 2
    whole = data.make_batch(1, torch.arange(10), N, D, K)
    for targets in ([1], [2, 4], [1, 3, 4]):
        batch = data.make_batch(1, torch.arange(10), N, D, K, targets)
        assert torch.equal(batch.inputs, whole.inputs)
        for i in range(10):
            solved = solve(batch.inputs[i], N, D, K).view(N, D, K)
            wanted = solved[:, [k - 1 for k in targets]].flatten(1)
            assert torch.equal(batch.targets[i], wanted)


def test_one_run_has_one_name():
    for flags, name, symbols in (
        ("", "L12_H1_D3_s0", [1, 2, 3]),
        ("--targets 3 1 2", "L12_H1_D3_s0", [1, 2, 3]),
        ("--targets 3", "L12_H1_D3_no-ic_s0", [3]),
        ("--no-ic", "L12_H1_D3_no-ic_s0", [3]),
        ("--targets 3 1", "L12_H1_D3_targets1-3_s0", [1, 3]),
        ("--D 1 --targets 1", "L12_H1_D1_s0", [1]),
        ("--D 1 --no-ic", "L12_H1_D1_no-ic_s0", [1]),
        ("--mixture", "L12_H1_D3_mixture_s0", [1, 2, 3]),
        ("--init out/L2_s0/", "L12_H1_D3_initL2_s0_s0", [1, 2, 3]),
    ):
        parsed = train.parse_flags(flags.split())
        assert table.run_directory(parsed) == Path("out", name)
        assert [*table.asked(parsed)] == symbols


def test_bad_targets_get_one_line(tmp_path):
    for flags, says in (
        ("--targets 0", "--targets must be from 1 to 3"),
        ("--targets 1 4", "--targets must be from 1 to 3"),
        ("--targets 2 2", "--targets names a symbol twice"),
        ("--targets x", "invalid int"),
        ("--targets", "expected at least one"),
        ("--targets 1 --no-ic", "leave it or --targets out"),
    ):
        assert_refused(train, "--D", 3, *flags.split(), "--out", tmp_path / "run", says=says)
    assert not (tmp_path / "run").exists()


def test_a_run_of_some_targets_is_read_everywhere(tmp_path):
    run = tmp_path / "run"
    assert run_main(train, *THREE, "--targets", 1, 3, "--out", run)[0] == 0
    rows = runs.read_log(run)
    assert runs.crossings(rows).keys() == {"x_1", "x_3"} and "x_2" not in rows[0]
    assert rows[0]["val"] == (rows[0]["x_1"] + rows[0]["x_3"]) / 2
    model, config = runs.load(run)
    batch = runs.sequences(config, torch.arange(3))
    assert config["targets"] == [1, 3] and model(batch.inputs).shape == batch.targets.shape

    assert_refused(ablate, run, says="trained with --targets")

    # and its row of a table, which later stages read
    row = row_of(config | dict(out=run))
    write_table(tmp_path / "results.csv", {"run": row})
    assert read_table(tmp_path / "results.csv") == {"run": row} and row["targets"] == [1, 3]


def test_earlier_runs_have_no_targets_and_go_on(tmp_path):
    """A config.json with `ic` alone, of a run that was stopped."""
    for name, flags in (("all", []), ("last", ["--no-ic"])):
        whole, early = tmp_path / f"{name}-whole", tmp_path / f"{name}-early"
        assert run_main(train, *THREE, *flags, "--out", whole)[0] == 0
        train_until(10, *THREE, *flags, "--out", early)
        config = json.loads((early / "config.json").read_text())
        for newer in ("targets", "mixture", "init"):
            del config[newer]
        assert config["ic"] == (name == "all")
        (early / "config.json").write_text(json.dumps(config))
        assert run_main(train, *THREE, *flags, "--out", early, "--resume")[0] == 0
        assert weights_equal(whole, early) and logged(whole) == logged(early)


# ---- --init


def test_init_starts_from_the_weights_of_another_run(tmp_path):
    """The outputs of x_1, which both ask for, too; those of x_3 are as without --init."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_main(train, *THREE, "--targets", 1, 2, "--out", first)[0] == 0
    flags = [*THREE, "--targets", 3, 1, "--save-every", 20]
    for more in (["--init", first, "--out", second], ["--out", tmp_path / "fresh"]):
        assert run_main(train, *flags, *more)[0] == 0
    old = torch.load(first / "model.pt", weights_only=True)
    new = torch.load(second / "ckpt/000000.pt", weights_only=True)
    fresh = torch.load(tmp_path / "fresh/ckpt/000000.pt", weights_only=True)
    for name in old.keys() - {"head.weight", "head.bias"}:
        assert torch.equal(old[name], new[name])
    for name in ("head.weight", "head.bias"):
        assert torch.equal(new[name][:4], old[name][:4])
        assert torch.equal(new[name][4:], fresh[name][4:])
    assert not weights_equal(first, second) and not weights_equal(tmp_path / "fresh", second)

    # nor does what was stopped need that run again
    train_until(10, *flags, "--init", first, "--out", tmp_path / "stopped")
    first.rename(tmp_path / "moved")
    again = ["--init", first, "--out", tmp_path / "stopped", "--resume"]
    assert run_main(train, *flags, *again)[0] == 0
    assert weights_equal(tmp_path / "stopped", second)


def test_weights_of_another_shape_are_refused(tmp_path):
    other = tmp_path / "other"
    assert run_main(train, *THREE, "--out", other)[0] == 0
    before = contents(tmp_path)
    for flags, says in (
        ("--layers 3", "is of another shape (layers 2, not 3)"),
        ("--heads 2", "is of another shape (heads 1, not 2"),  # the same sizes of all matrices
        ("--width 32", "is of another shape (width 16, not 32"),
        ("--no-mlp --rotary qk", "(mlp True, not False, rotary input, not qk)"),
        ("--mixture", "(mixture False, not True)"),
    ):
        flags = [*THREE, *flags.split(), "--init", other, "--out", tmp_path / "run"]
        assert_refused(train, *flags, says=says)
    nowhere = ["--init", tmp_path / "nowhere", "--out", tmp_path / "run"]
    assert_refused(train, *THREE, *nowhere, says="--init: ")
    assert contents(tmp_path) == before and not (tmp_path / "run").exists()


# ---- --mixture


def test_a_mixture_asks_each_query_for_one_symbol():
    """The one that its token names; all tokens otherwise as without."""
    N, D, K, B = 4, 3, 4, 3000
    whole = data.make_batch(2, torch.arange(B), N, D, K)
    for targets in (None, [1, 3], [2]):
        batch = data.make_batch(2, torch.arange(B), N, D, K, targets, mixture=True)
        assert torch.equal(batch.inputs[..., : 2 * K], whole.inputs)
        told = batch.inputs[..., 2 * K :]
        assert told.shape[2] == D and not told[:, :-N].any()
        assert torch.equal(told[:, -N:].sum(-1), torch.ones(B, N))
        asked = told[:, -N:].argmax(-1)  # (B, N) 0 for x_1
        for i in range(20):
            solved = solve(batch.inputs[i], N, D, K).view(N, D, K)
            assert torch.equal(solved[torch.arange(N), asked[i]], batch.targets[i])
        counts = asked.flatten().bincount(minlength=D) / (B * N)
        share = [0.0] * D
        for k in targets or (1, 2, 3):
            share[k - 1] = 1 / len(targets or (1, 2, 3))
        assert (counts - torch.tensor(share)).abs().max() < 0.02


def test_a_mixture_is_measured_symbol_by_symbol(tmp_path):
    run = tmp_path / "run"
    code, out, err = run_main(train, *THREE, "--mixture", "--out", run)
    assert code == 0, err
    rows = runs.read_log(run)
    assert runs.crossings(rows).keys() == {"x_1", "x_2", "x_3"}
    assert_refused(ablate, run, says="trained with --mixture")
    model, config = runs.load(run)
    second = runs.sequences(config | dict(targets=[2]), data.held_out("validation", 1024))
    with torch.no_grad(), runs.precision(config):
        loss = (model(second.inputs).float() - second.targets).square().mean().item()
    assert abs(loss - rows[-1]["x_2"]) < 1e-4
