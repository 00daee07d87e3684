"""Run directories: named after the flags, never overwritten, read by every later stage."""

import json
import shutil
from pathlib import Path

from parts import config
from parts import config as table

import pytest
import torch

import train
from tests.common import (
    WHOLE,
    assert_refused,
    contents,
    logged,
    run_main,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")


# ---- names and flags


def test_bad_flags_get_one_line(tmp_path):
    for flags, says in (
        ("--D 0", "--D must be at least 1"),
        ("--layers 1000000000", "--layers must be at most 1000"),
        ("--heads 3 --width 128", "not divisible"),
        ("--steps -1", "--steps must be at least 1"),
        ("--device nope", "--device nope is not there"),
        ("--device cuda:99", "--device cuda:99 is not there"),
        ("--lr nan", "--lr must be"),
        ("--K 3", "even"),
        ("--layers two", "invalid int value"),
        ("--rotary none", "invalid choice"),
        ("--lay 3", "unrecognized"),
        ("--decay 2", "at most 1"),
        ("--rotary qk --head-size 5", "even"),
        ("--beta2 1", "at most"),
        (f"--seed {2**63}", "--seed must be at most"),
        ("--targets 0", "--targets must be among 1 2 3"),
        ("--targets 1 4", "--targets must be among 1 2 3"),
        ("--targets", "expected at least one"),
    ):
        assert_refused(train, "--out", tmp_path / "run", *flags.split(), says=says)
    assert not (tmp_path / "run").exists()


# ---- what is there stays


def test_run_directories_are_never_overwritten(tmp_path, whole):
    run, kept = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(whole, run)
    kept.mkdir()
    for name in ("state.pt", "model.pt"):
        (run / name).rename(kept / name)
    before = contents(tmp_path)
    assert_refused(train, *WHOLE, "--out", run, says="--resume")
    lr = ["--lr", 0.5, "--out", run, "--resume"]
    assert_refused(train, *WHOLE, *lr, says="lr 0.001, not 0.5")
    with config.alone_in(run):
        assert_refused(train, *WHOLE, "--out", run, "--resume", says="in use by another process")
    for other in (tmp_path, kept):
        assert_refused(train, *WHOLE, "--out", other, says="which is no run's")
    (run / ".lock").unlink(), (kept / ".lock").unlink(), (tmp_path / ".lock").unlink()
    before.pop(Path("run/.lock"))
    assert contents(tmp_path) == before


def test_a_run_that_has_ended_is_told_again(whole):
    before = contents(whole)
    code, again, _ = run_main(train, *WHOLE, "--out", whole, "--resume")
    assert code == 0 and again == train.summary(whole) + "\n"
    assert contents(whole) == before


# ---- earlier runs


def test_a_run_older_than_a_flag_goes_on(tmp_path, whole):
    """Then it has the flag's default, or what was done before there was one."""
    early = tmp_path / "early"
    train_until(20, *WHOLE, "--out", early)
    settings = json.loads((early / "config.json").read_text())
    for newer in ("targets", "init", "circuit", "task"):
        del settings[newer]
    (early / "config.json").write_text(json.dumps(settings))
    assert run_main(train, *WHOLE, "--out", early, "--resume")[0] == 0
    assert weights_equal(whole, early) and logged(whole) == logged(early)

    del settings["optimizer"]
    (early / "config.json").write_text(json.dumps(settings))
    assert config.read_flags(early).optimizer == "adamw"
    assert_refused(train, *WHOLE, "--out", early, "--resume", says="optimizer adamw, not muon")


def test_a_flag_of_tomorrow_leaves_todays_runs_open(whole, monkeypatch):
    flag = table.Flag(0.0, "share of activations that are dropped", 0, 1)
    monkeypatch.setitem(table.FLAGS, "of tomorrow", {"dropout": flag})
    monkeypatch.setitem(table.ROWS, "dropout", flag)
    monkeypatch.setattr(config, "SETTINGS", [*config.SETTINGS, "dropout"])
    assert config.load(whole)[1].dropout == 0
    assert run_main(train, *WHOLE, "--out", whole, "--resume")[0] == 0
    says = "dropout 0.0, not 0.5"
    assert_refused(train, *WHOLE, "--dropout", 0.5, "--out", whole, "--resume", says=says)


def test_load_reads_what_was_trained(tmp_path, whole):
    """The same predictions as from the weights by hand; whatever device the run was trained on."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | dict(device="cuda:7")))
    model, flags = config.load(run)
    batch, other = config.sequences(flags, torch.arange(5)), config.build(flags)
    assert not torch.equal(other(batch.inputs), model(batch.inputs)) and not model.training
    other.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    assert torch.equal(other(batch.inputs), model(batch.inputs)) and flags.device == "cpu"


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("native", ["float32", "bfloat16"])
def test_a_run_is_computed_as_is_fast_here(whole, trained, native, monkeypatch):
    """bfloat16 only where the device is faster with it; float32 stays float32."""
    flags = config.read_flags(whole).replace(dtype=trained)
    monkeypatch.setattr(config, "read_flags", lambda run: flags)
    monkeypatch.setattr(config, "native_dtype", lambda device: native)
    both = trained == native == "bfloat16"
    assert config.load(whole)[1].dtype == ("bfloat16" if both else "float32")


@pytest.mark.parametrize(
    "has, dtype",
    [
        (dict(amx_bf16=True, avx512_bf16=True, cpu_name="Intel Xeon"), "bfloat16"),
        (dict(amx_bf16=False, avx512_bf16=True, cpu_name="Intel Xeon"), "float32"),
        (dict(avx512_bf16=True, cpu_name="AMD EPYC"), "bfloat16"),
        ({}, "float32"),
    ],
)
def test_bfloat16_is_for_processors_that_are_faster_with_it(has, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert table.native_dtype("cpu") == dtype
