"""Run directories: named after the flags, never overwritten, read by every later stage."""

import json
import os
import subprocess
import sys
from pathlib import Path

from parts import flags as table
from parts import runs

import pytest
import torch

import train
from tests.common import (
    HERE,
    TINY,
    assert_refused,
    contents,
    logged,
    run_main,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")


# ---- how threads wait


@pytest.mark.parametrize("script", ["train.py", "ablate.py", "analyze.py"])
def test_threads_sleep_when_the_machine_is_busy(script):
    """OpenMP itself says what it read."""
    environment = os.environ | {"OMP_DISPLAY_ENV": "VERBOSE"}
    environment.pop("GOMP_SPINCOUNT", None)
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        command = [sys.executable, str(HERE / script), "--help"]
        said = subprocess.run(command, capture_output=True, text=True, env=environment).stderr
    finally:
        burner.kill()
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("torch uses another OpenMP here")
    assert "GOMP_SPINCOUNT = '0'" in said


# ---- names and flags


def test_run_names_come_from_the_flags():
    for flags, name in (
        ("", "L12_H1_D3_s0"),
        ("--layers 2 --heads 8 --D 5 --seed 4", "L2_H8_D5_s4"),
        ("--no-ic --rotary qk", "L12_H1_D3_no-ic_rotaryqk_s0"),
        (
            "--no-mlp --head-size 16 --resume --device cpu --compile --eval-every 7",
            "L12_H1_D3_head_size16_no-mlp_s0",
        ),
        ("--steps 1500 --target 0 --circuit", "L12_H1_D3_circuit_steps1500_target0.0_s0"),
    ):
        assert table.run_directory(train.parse_flags(flags.split())) == Path("out", name)


def test_the_run_directory_is_made_from_the_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(train, *TINY, "--target", 0)
    assert code == 0, err
    name = "L2_H2_D1_N2_width16_steps40_target0.0_batch8_warmup5_s0"
    assert [str(path) for path in Path("out").iterdir()] == [f"out/{name}"]
    assert f"run: out/{name}" in out


def test_bad_flags_get_one_line(tmp_path):
    for flags, says in (
        ("--D 0", "--D must be at least 1"),
        ("--heads 3 --width 128", "not divisible"),
        ("--steps -1", "--steps must be at least 1"),
        ("--device nope", "--device nope is not there"),
        ("--lr nan", "--lr must be"),
        ("--K 3", "even"),
        ("--layers two", "invalid int value"),
        ("--rotary none", "invalid choice"),
        ("--lay 3", "unrecognized"),
        ("--decay 2", "at most 1"),
        ("--rotary qk --head-size 5", "even"),
        ("--beta2 1", "at most"),
        (f"--seed {2**63}", "--seed must be at most"),
        ("--seeds 2", "unrecognized"),  # the stack of seeds is gone
    ):
        assert_refused(train, *flags.split(), "--out", tmp_path / "run", says=says)
    assert not (tmp_path / "run").exists()


# ---- what is there stays


def test_run_directories_are_never_overwritten(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"
    kept.mkdir()
    assert run_main(train, *TINY, "--out", run)[0] == 0
    for name in ("state.pt", "model.pt"):
        (run / name).rename(kept / name)
    before = contents(tmp_path)
    assert_refused(train, *TINY, "--out", run, says="--resume")
    assert_refused(train, *TINY, "--out", run, "--resume", says="state.pt is missing")
    lr = ["--lr", 0.5, "--out", run, "--resume"]
    assert_refused(train, *TINY, *lr, says="lr 0.001, not 0.5")
    for nowhere in (run / "config.json" / "below", run / "config.json"):
        assert_refused(train, *TINY, "--out", nowhere, says="cannot write to")
    for other in (tmp_path, kept):
        assert_refused(train, *TINY, "--out", other, says="something else than a run")
    assert contents(tmp_path) == before


def test_a_run_that_has_ended_is_told_again(tmp_path):
    _, first, _ = run_main(train, *TINY, "--out", tmp_path / "run")
    before = contents(tmp_path)
    code, again, _ = run_main(train, *TINY, "--out", tmp_path / "run", "--resume")
    assert code == 0 and again == first[first.index("---") :]
    assert contents(tmp_path) == before


def test_a_file_is_the_old_or_the_new_one(tmp_path):
    """Whatever the writer does, and nothing else is left."""
    path = tmp_path / "file"
    runs.write_text(path, "old")

    def fails(temporary):
        temporary.write_text("ne")
        raise OSError(28, os.strerror(28))

    with pytest.raises(OSError, match=f"cannot write {path} .No space left on device"):
        runs.write_file(path, fails)
    assert contents(tmp_path) == {Path("file"): b"old"}
    runs.write_text(path, "new")
    assert contents(tmp_path) == {Path("file"): b"new"}


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


def test_earlier_configs_load_and_resume(tmp_path):
    """A config.json older than a flag has its default, or what was done before there was one."""
    flags = [*TINY, "--optimizer", "adamw"]
    whole, early = tmp_path / "whole", tmp_path / "early"
    assert run_main(train, *flags, "--out", whole)[0] == 0
    train_until(20, *flags, "--out", early)

    # as it was: no flag --optimizer or --circuit, no number of rows in the state
    config = json.loads((early / "config.json").read_text())
    for newer in ("optimizer", "circuit"):
        del config[newer]
    (early / "config.json").write_text(json.dumps(config))
    state = torch.load(early / "state.pt", weights_only=True)
    del state["rows"]
    torch.save(state, early / "state.pt")

    assert runs.read_config(early)["optimizer"] == "adamw"
    assert runs.read_config(early)["circuit"] is False
    assert_refused(train, *TINY, "--out", early, "--resume", says="optimizer adamw, not muon")
    assert run_main(train, *flags, "--out", early, "--resume")[0] == 0
    assert weights_equal(whole, early) and logged(whole) == logged(early)
    runs.load(early)


def test_a_flag_of_tomorrow_leaves_todays_runs_open(tmp_path, monkeypatch):
    assert run_main(train, *TINY, "--out", tmp_path)[0] == 0
    tomorrow = {"dropout": table.Flag(0.0, "share of activations that are dropped", 0, 1)}
    monkeypatch.setitem(table.FLAGS, "of tomorrow", tomorrow)
    monkeypatch.setitem(table.ROWS, "dropout", tomorrow["dropout"])
    monkeypatch.setitem(table.DEFAULTS, "dropout", 0.0)
    assert runs.load(tmp_path)[1]["dropout"] == 0
    assert run_main(train, *TINY, "--out", tmp_path, "--resume")[0] == 0
    says = "dropout 0.0, not 0.5"
    assert_refused(train, *TINY, "--dropout", 0.5, "--out", tmp_path, "--resume", says=says)


def test_load_reads_what_was_trained(tmp_path):
    """The same predictions as from the weights by hand; whatever device the run was trained on."""
    assert run_main(train, *TINY, "--heads", 1, "--out", tmp_path)[0] == 0
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(device="cuda:7")))
    model, config = runs.load(tmp_path)
    batch = runs.sequences(config, torch.arange(5))
    untrained = runs.build(config)
    before = untrained(batch.inputs)
    untrained.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(untrained(batch.inputs), model(batch.inputs))
    assert not torch.equal(before, model(batch.inputs)) and not model.training
    assert config["device"] == "cpu"


def test_a_run_is_computed_as_is_fast_here(tmp_path, monkeypatch):
    """bfloat16 only where the device multiplies it natively; float32 stays float32."""
    for trained in ("float32", "bfloat16"):
        run = tmp_path / trained
        assert run_main(train, *TINY, "--dtype", trained, "--out", run)[0] == 0
        for native in ("float32", "bfloat16"):
            monkeypatch.setattr(runs, "native_dtype", lambda device, native=native: native)
            both = trained == native == "bfloat16"
            assert runs.load(run)[1]["dtype"] == ("bfloat16" if both else "float32")
