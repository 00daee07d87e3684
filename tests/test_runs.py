"""Run directories: named after the flags, never overwritten, read by every later stage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from parts import Refused, runs
from parts import flags as table

import pytest
import torch

import train
from tests.common import (
    HERE,
    WHOLE,
    assert_refused,
    contents,
    logged,
    run_main,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")


# ---- how threads wait


@pytest.mark.slow
def test_threads_sleep_when_the_machine_is_busy():
    """OpenMP itself says what it read."""
    environment = os.environ | {"OMP_DISPLAY_ENV": "VERBOSE"}
    environment.pop("GOMP_SPINCOUNT", None)
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        command = [sys.executable, str(HERE / "train.py"), "--help"]
        said = subprocess.run(command, capture_output=True, text=True, env=environment).stderr
    finally:
        burner.kill()
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("torch uses another OpenMP here")
    assert "GOMP_SPINCOUNT = '0'" in said


# ---- names and flags


def test_bad_flags_get_one_line(tmp_path):
    for flags, says in (
        ("--D 0", "--D must be at least 1"),
        ("--layers 1000000000", "--layers must be at most 1000"),
        ("--width 1000000000000000", "--width must be at most 20000"),
        ("--heads 3 --width 128", "not divisible"),
        ("--steps -1", "--steps must be at least 1"),
        ("--device nope", "--device nope is not there"),
        ("--device meta", "--device meta is not there"),
        ("--device cuda:99", "--device cuda:99 is not there"),
        ("--lr nan", "--lr must be"),
        ("--lr inf", "--lr must be at most"),
        ("--K 3", "even"),
        ("--layers two", "invalid int value"),
        ("--rotary none", "invalid choice"),
        ("--lay 3", "unrecognized"),
        ("--decay 2", "at most 1"),
        ("--rotary qk --head-size 5", "even"),
        ("--beta2 1", "at most"),
        (f"--seed {2**63}", "--seed must be at most"),
        ("--task conditional --circuit query", "--circuit query takes --heads 2"),
        ("--task conditional --D 4", "leave out --D 4"),
        ("--targets 0", "--targets must be among 1 2 3"),
        ("--targets 1 4", "--targets must be among 1 2 3"),
        ("--targets 2 2", "--targets names a symbol twice"),
        ("--targets", "expected at least one"),
        ("--targets 1 --no-ic", "leave it or --targets out"),
    ):
        assert_refused(train, "--out", tmp_path / "run", *flags.split(), says=says)
    assert not (tmp_path / "run").exists()
    for name, flag in table.ROWS.items():  # and every number that no machine could take
        if type(flag.default) in (int, float):
            typed = f"--{name.replace('_', '-')}"
            assert_refused(train, typed, 10**30, says=f"{typed} must be at most")


# ---- what is there stays


def test_run_directories_are_never_overwritten(tmp_path, whole):
    run, kept = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(whole, run)
    kept.mkdir()
    for name in ("state.pt", "model.pt"):
        (run / name).rename(kept / name)
    before = contents(tmp_path)
    assert_refused(train, *WHOLE, "--out", run, says="--resume")
    assert_refused(train, *WHOLE, "--out", run, "--resume", says="state.pt is missing")
    lr = ["--lr", 0.5, "--out", run, "--resume"]
    assert_refused(train, *WHOLE, *lr, says="lr 0.001, not 0.5")
    with runs.alone_in(run):
        assert_refused(train, *WHOLE, "--out", run, "--resume", says="in use by another process")
    for nowhere in (run / "config.json" / "below", run / "config.json"):
        assert_refused(train, *WHOLE, "--out", nowhere, says=f"{nowhere}: ", code=1)
    for other in (tmp_path, kept):
        assert_refused(train, *WHOLE, "--out", other, says="something else than a run")
    (run / ".lock").unlink(), (kept / ".lock").unlink(), (tmp_path / ".lock").unlink()
    before.pop(Path("run/.lock"))
    assert contents(tmp_path) == before


def test_a_run_that_has_ended_is_told_again(whole):
    before = contents(whole)
    code, again, _ = run_main(train, *WHOLE, "--out", whole, "--resume")
    assert code == 0 and again == train.summary(whole) + "\n"
    assert contents(whole) == before


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be flushed here")
def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """What a power loss must find: the content is flushed, then renamed, then the folder is."""
    done, real = [], (os.fsync, Path.replace)

    def fsync(descriptor):
        flushed = os.fstat(descriptor)
        names = [path.name for path in (tmp_path, *tmp_path.iterdir())]
        where = {os.stat(tmp_path / name).st_ino: name for name in names[1:]}
        done.append(("flush", where.get(flushed.st_ino, "folder"), flushed.st_size))
        real[0](descriptor)

    def replace(path, target):
        done.append(("rename", path.name, target.name))
        return real[1](path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    runs.write_text(tmp_path / "a", "12345")
    assert done[:2] == [("flush", "a.tmp", 5), ("rename", "a.tmp", "a")]
    assert len(done) == 3 and done[2][:2] == ("flush", "folder")


# ---- earlier runs


def test_a_run_older_than_a_flag_goes_on(tmp_path, whole):
    """Then it has the flag's default, or what was done before there was one."""
    early = tmp_path / "early"
    train_until(20, *WHOLE, "--out", early)
    config = json.loads((early / "config.json").read_text())
    state = torch.load(early / "state.pt", weights_only=True)
    for newer in ("targets", "mixture", "init", "circuit", "task"):
        del config[newer], state["flags"][newer]
    (early / "config.json").write_text(json.dumps(config))
    torch.save(state, early / "state.pt")
    assert run_main(train, *WHOLE, "--out", early, "--resume")[0] == 0
    assert weights_equal(whole, early) and logged(whole) == logged(early)

    del config["optimizer"]
    (early / "config.json").write_text(json.dumps(config))
    assert runs.read_flags(early).optimizer == "adamw"
    assert_refused(train, *WHOLE, "--out", early, "--resume", says="optimizer adamw, not muon")


def test_a_flag_of_tomorrow_leaves_todays_runs_open(whole, monkeypatch):
    flag = table.Flag(0.0, "share of activations that are dropped", 0, 1)
    monkeypatch.setitem(table.FLAGS, "of tomorrow", {"dropout": flag})
    monkeypatch.setitem(table.ROWS, "dropout", flag)
    monkeypatch.setattr(runs, "SETTINGS", [*runs.SETTINGS, "dropout"])
    assert runs.load(whole)[1].dropout == 0
    assert run_main(train, *WHOLE, "--out", whole, "--resume")[0] == 0
    says = "dropout 0.0, not 0.5"
    assert_refused(train, *WHOLE, "--dropout", 0.5, "--out", whole, "--resume", says=says)

    # and one of tomorrow is none that could be read rightly today
    monkeypatch.undo()
    config = json.loads((whole / "config.json").read_text()) | dict(dropout=0.5)
    monkeypatch.setattr(runs, "read_json", lambda path: config)
    with pytest.raises(Refused, match="flags that are not known here: dropout"):
        runs.load(whole)


def test_load_reads_what_was_trained(tmp_path, whole):
    """The same predictions as from the weights by hand; whatever device the run was trained on."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | dict(device="cuda:7")))
    model, flags = runs.load(run)
    batch, other = runs.sequences(flags, torch.arange(5)), runs.build(flags)
    assert not torch.equal(other(batch.inputs), model(batch.inputs)) and not model.training
    other.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    assert torch.equal(other(batch.inputs), model(batch.inputs)) and flags.device == "cpu"


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("native", ["float32", "bfloat16"])
def test_a_run_is_computed_as_is_fast_here(whole, trained, native, monkeypatch):
    """bfloat16 only where the device is faster with it; float32 stays float32."""
    flags = runs.read_flags(whole).but(dtype=trained)
    monkeypatch.setattr(runs, "read_flags", lambda run: flags)
    monkeypatch.setattr(runs, "native_dtype", lambda device: native)
    both = trained == native == "bfloat16"
    assert runs.load(whole)[1].dtype == ("bfloat16" if both else "float32")


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
    monkeypatch.setattr(table, "cpu_capabilities", lambda: has)
    assert table.native_dtype("cpu") == dtype
