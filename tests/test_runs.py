"""Run directories: never overwritten, and read by every later stage."""

import json
import shutil
from pathlib import Path

import torch

import train
from tests.common import (
    WHOLE,
    assert_refused,
    contents,
    load_tensors,
    run_main,
    runs_equal,
    train_until,
)


# ---- what is there stays


def test_run_directories_are_never_overwritten(tmp_path, whole):
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns(".lock"))
    foreign.mkdir()
    (run / "state.pt").rename(foreign / "state.pt")
    before = contents(tmp_path)
    assert_refused(train, *WHOLE, "--out", run, says="--resume")
    lr = ["--lr", 0.5, "--out", run, "--resume"]
    assert_refused(train, *WHOLE, *lr, says="lr 0.001, not 0.5")
    with train.alone_in(run):
        assert_refused(train, *WHOLE, "--out", run, "--resume", says="in use by another process")
    for lock in tmp_path.rglob(".lock"):
        lock.unlink()
    assert contents(tmp_path) == before


def test_resuming_a_run_that_has_ended_prints_its_summary_again(whole):
    before = contents(whole)
    code, again, _ = run_main(train, *WHOLE, "--out", whole, "--resume")
    assert (code, again, contents(whole)) == (0, train.summary(whole) + "\n", before)


# ---- earlier runs and other code


def test_a_run_older_than_a_flag_continues_with_its_default(tmp_path, whole):
    run = tmp_path / "run"
    train_until(20, *WHOLE, "--out", run)
    settings, state = (
        json.loads(Path(run / "config.json").read_text()),
        load_tensors(run / "state.pt"),
    )
    for newer in ("targets", "init", "task"):
        del settings[newer]
    train.write_text(run / "config.json", json.dumps(settings))
    train.write_tensors(run / "state.pt", state)
    assert run_main(train, *WHOLE, "--out", run, "--resume")[0] == 0
    assert runs_equal(run, whole)


# ---- the model of a run


def test_load_reads_what_was_trained(tmp_path, whole):
    """The predictions equal those of the weights read by hand, wherever the run was trained."""
    run = shutil.copytree(whole, tmp_path / "run")
    settings = json.loads(Path(run / "config.json").read_text())
    train.write_text(run / "config.json", json.dumps(settings | dict(device="cuda:7")))
    model, flags = train.load(run)
    batch, other = train.sequences(flags, torch.arange(5)), train.build(flags)
    assert not torch.equal(other(batch.inputs), model(batch.inputs)) and not model.training
    other.load_state_dict(torch.load(run / "model.pt", weights_only=True))
    assert torch.equal(other(batch.inputs), model(batch.inputs)) and flags.device == "cpu"


def test_a_run_is_loaded_with_bfloat16_only_where_that_is_fast(whole, monkeypatch):
    flags = train.read_flags(whole).replace(dtype="bfloat16")
    monkeypatch.setattr(train, "read_flags", lambda run: flags)
    for native in "float32", "bfloat16":
        monkeypatch.setattr(train, "native_dtype", lambda device, native=native: native)
        assert train.load(whole)[1].dtype == native


def test_bfloat16_is_for_processors_that_are_faster_with_it(monkeypatch):
    for name, capability, dtype in (
        ("Intel Xeon", "amx_bf16", "bfloat16"),
        ("Intel Xeon", "avx512_bf16", "float32"),
        ("AMD EPYC", "avx512_bf16", "bfloat16"),
    ):
        capabilities = {capability: True, "cpu_name": name}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert train.native_dtype("cpu") == dtype
