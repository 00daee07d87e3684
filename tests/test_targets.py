"""Which symbols are asked for (--targets), and whose weights a run starts from."""

from pathlib import Path

from parts import config

import pytest
import torch

import data
import train
from sweep import read_table, row_of
from tests.common import (
    TINY,
    assert_refused,
    run_main,
    solve,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")
THREE = [*TINY, "--eval-every", "5", "--D", "3", "--heads", "1", "--steps", "10"]


# ---- --targets


def test_targets_are_the_symbols_asked_for():
    N, D, K = 3, 4, 2
    every = data.make_batch(1, torch.arange(10), N, D, K)
    for targets in ([1], [2, 4], [1, 3, 4]):
        batch = data.make_batch(1, torch.arange(10), N, D, K, targets)
        assert torch.equal(batch.inputs, every.inputs)
        for i in range(10):
            solved = solve(batch.inputs[i], N, D, K).view(N, D, K)
            wanted = solved[:, [k - 1 for k in targets]].flatten(1)
            assert torch.equal(batch.targets[i], wanted)


def test_one_run_has_one_name():
    for flags, name, symbols in (
        ("", "L12_H1_D3_s0", [1, 2, 3]),
        ("--layers 2 --heads 8 --D 5 --seed 4", "L2_H8_D5_s4", [1, 2, 3, 4, 5]),
        ("--no-mlp --resume --compile --eval-every 7", "L12_H1_D3_no-mlp_s0", [1, 2, 3]),
        (
            "--target 0 --circuit minimal --head-size 4",
            "L12_H1_D3_circuitminimal_head_size4_target0.0_s0",
            [1, 2, 3],
        ),
        ("--task conditional --rotary qk", "L12_H1_conditional_rotaryqk_s0", [1, 2, 3]),
        ("--targets 3 1 2", "L12_H1_D3_s0", [1, 2, 3]),
        ("--targets 3", "L12_H1_D3_no-ic_s0", [3]),
        ("--no-ic", "L12_H1_D3_no-ic_s0", [3]),
        ("--targets 3 1", "L12_H1_D3_targets1-3_s0", [1, 3]),
        ("--D 1 --targets 1", "L12_H1_D1_s0", [1]),
        ("--D 1 --no-ic", "L12_H1_D1_no-ic_s0", [1]),
        ("--init out/L2_s0/", "L12_H1_D3_initL2_s0_s0", [1, 2, 3]),
    ):
        parsed = train.parse_flags(flags.split())
        assert parsed.out == Path("out", name)
        assert parsed.asked == symbols


def test_a_run_of_some_targets_is_read_everywhere(tmp_path):
    run = tmp_path / "run"
    assert run_main(train, *THREE, "--targets", 1, 3, "--out", run)[0] == 0
    rows, (model, flags) = config.read_log(run), config.load(run)
    assert config.crossings(rows, flags).keys() == {"x_1", "x_3"} and "x_2" not in rows[0]
    assert rows[0]["val"] == (rows[0]["x_1"] + rows[0]["x_3"]) / 2
    batch = config.sequences(flags, torch.arange(3))
    assert flags.targets == [1, 3] and model(batch.inputs).shape == batch.targets.shape

    # and its row of a table, which later stages read
    row = row_of(flags)
    config.write_rows(tmp_path / "results.jsonl", [row])
    assert read_table(tmp_path / "results.jsonl") == {"run": row} and row["targets"] == [1, 3]


# ---- --init


def test_init_starts_from_the_weights_of_another_run(tmp_path):
    """The outputs of x_1, which both ask for, too; those of x_3 are as without --init."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_main(train, *THREE, "--targets", 1, 2, "--out", first)[0] == 0
    flags = [*THREE, "--targets", 3, 1, "--save-every", 10]
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
    train_until(5, *flags, "--init", first, "--out", tmp_path / "stopped")
    first.rename(tmp_path / "moved")
    again = ["--init", first, "--out", tmp_path / "stopped", "--resume"]
    assert run_main(train, *flags, *again)[0] == 0
    assert weights_equal(tmp_path / "stopped", second)


def test_weights_of_another_shape_are_refused(tmp_path):
    other = tmp_path / "other"
    assert run_main(train, *THREE, "--out", other)[0] == 0
    for flags, says in (
        ("--layers 3", "is of another shape"),
        ("--heads 2", "is of another shape"),  # matrices alike
        ("--no-mlp --rotary qk", "is of another shape"),
    ):
        flags = [*THREE, *flags.split(), "--init", other, "--out", tmp_path / "run"]
        assert_refused(train, *flags, says=says)
    nowhere = ["--init", tmp_path / "nowhere", "--out", tmp_path / "run"]
    assert_refused(train, *THREE, *nowhere, says="is no run directory")


# ---- a task of four symbols, added as a table alone


def star(N, D):
    """Triples (x_0, x_1, x_2), then pairs (x_2, x_3), then the queries."""
    roles = [("q", 0, 2, 0), ("1a", 0, 0, 0), ("1b", 1, 0, 1), ("1c", 2, 0, 2)]
    roles += [("2a", 2, 1, 0), ("2b", 3, 1, 1)]
    return data.Task("star", N, tuple(data.Role(*role) for role in roles))


def test_a_task_is_a_table_and_nothing_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(data.TASKS, "star", star)
    few = [*TINY, "--steps", 2, "--task", "star", "--D", 3]
    for more, name, symbols in (
        ([], "", "x_1 x_2 x_3"),
        (["--no-ic"], "_no-ic", "x_3"),
        (["--targets", "3"], "_no-ic", "x_3"),
    ):
        flags = train.parse_flags([*map(str, few), *more])
        assert str(flags.out).startswith(f"out/L2_H2_star_N2{name}_w")
        assert flags.target_names == symbols.split()
    code, out, err = run_main(train, *few, "--no-ic")
    assert code == 0 and "x_3: " in out and "x_2" not in out, err
    (run,) = Path("out").iterdir()
    batch = config.sequences(
        config.load(run)[1], torch.arange(1)
    )  # each query's x_3, token by token
    tokens = [tuple(token[:4].tolist()) for token in batch.inputs[0]]
    for query, answer in zip(tokens[-2:], batch.targets[0].tolist(), strict=True):
        x_2 = tokens[tokens[:6].index(query) + 2]
        assert tokens[6:10][tokens[6:10].index(x_2) + 1] == tuple(answer)

    code, out, err = run_main(data, "--task", "star", "--N", 2)
    assert code == 0 and "\n1a 1b 1c  " in out and "  A1: B1 C1 D1" in out, err
    assert_refused(
        train, *few, "--circuit", "minimal", says="no circuit minimal of --task star is known"
    )
