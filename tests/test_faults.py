"""Damaged files, full disks, impossible flags: one line that says what to do, and nothing lost."""

import json
import os
import pickle
import subprocess
from pathlib import Path

from parts import runs

import pytest
import torch

import train
from tests.common import (
    TINY,
    assert_one_line,
    assert_refused,
    contents,
    logged,
    run_main,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")
FLAGS = [*TINY, "--target", 0, "--save-every", 20]
NOT_JSON = [b"", b"{", b"\xff\xfe{}", b"\x00", b"[" * 100_000, b'{"step": 1' + b"0" * 5000 + b"}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_main(train, *FLAGS, "--out", run)[0] == 0
    return run


@pytest.fixture
def stopped(tmp_path):
    """The same run, stopped at step 20."""
    train_until(20, *FLAGS, "--out", tmp_path / "run")
    return tmp_path / "run"


def assert_cannot_go_on(run, says):
    """Refused in one line, and no file is touched."""
    before = contents(run)
    assert_refused(train, *FLAGS, "--out", run, "--resume", says=says)
    assert contents(run) == before


# ---- damaged files


@pytest.mark.parametrize("name", ["config.json", "log.jsonl"])
def test_json_that_is_none_gets_one_line(name, stopped):
    for damage in NOT_JSON:
        (stopped / name).write_bytes(damage)
        assert_cannot_go_on(stopped, says=f"{stopped / name} ")


def test_json_of_the_wrong_kind_gets_one_line(stopped):
    path = stopped / "config.json"
    config = json.loads(path.read_text())
    wrong = [
        dict(layers="two"),
        dict(N=None),
        dict(lr=[1]),
        dict(rotary="none"),
        dict(K=3),
        dict(D=0),
    ]
    for other in ([], 3, None, "text", *(config | change for change in wrong)):
        path.write_text(json.dumps(other))
        assert_cannot_go_on(stopped, says=f"{path} ")
        with pytest.raises(ValueError, match="config.json"):
            runs.load(stopped)
    path.write_text(json.dumps(config))

    path = stopped / "log.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    short = {name: value for name, value in row.items() if name != "x_1"}
    wrong = [
        {},
        dict(step=0),
        row | dict(val="low"),
        row | dict(val=None),
        row | dict(x_1=[]),
        [row],
    ]
    for other in ([], 3, None, *wrong):
        path.write_text(json.dumps(other) + "\n")
        assert_cannot_go_on(stopped, says=f"{path} ")
    path.write_text(json.dumps(row) + "\n" + json.dumps(short) + "\n")
    assert_cannot_go_on(stopped, says=f"{path} ")


def test_a_damaged_state_is_refused_and_nothing_lost(stopped, whole):
    path = stopped / "state.pt"
    good = path.read_bytes()
    for damage in (b"", good[:1000], good[:-100], b"no checkpoint"):
        path.write_bytes(damage)
        assert_cannot_go_on(stopped, says="state.pt is damaged")
    for other in ([1, 2], {}, dict(model={}, optimizers=[], step=20)):
        torch.save(other, path)
        assert_cannot_go_on(stopped, says=f"{path} ")
    path.unlink()
    assert_cannot_go_on(stopped, says="state.pt is missing")
    path.write_bytes(good)
    assert run_main(train, *FLAGS, "--out", stopped, "--resume")[0] == 0
    assert weights_equal(stopped, whole) and logged(stopped) == logged(whole)


def test_weights_that_are_not_the_runs_get_one_line(whole, tmp_path):
    """Cut short, of another model, of the optimizer of another run, not a number."""
    weights = torch.load(whole / "model.pt", weights_only=True)
    narrow = {name: tensor[..., :8] for name, tensor in weights.items()}
    broken = weights | {"head.bias": torch.full_like(weights["head.bias"], torch.nan)}
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    for tensors, says in (
        (narrow, "another model"),
        (list(weights), "another model"),
        (weights | {"more": torch.zeros(1)}, "another model"),
        ({}, "another model"),
        (broken, "not finite"),
    ):
        torch.save(tensors, tmp_path / "model.pt")
        with pytest.raises(ValueError, match=f"model.pt .*{says}"):
            runs.load(tmp_path)
    (tmp_path / "model.pt").write_bytes((whole / "model.pt").read_bytes()[:2000])
    with pytest.raises(ValueError, match="model.pt is damaged"):
        runs.load(tmp_path)
    with pytest.raises(ValueError, match="no run directory"):
        runs.load(tmp_path / "nowhere")


def test_a_state_of_another_optimizer_is_refused(stopped, tmp_path):
    train_until(20, *FLAGS, "--optimizer", "adamw", "--out", tmp_path / "other")
    state = runs.read_tensors(tmp_path / "other" / "state.pt")
    runs.write_tensors(stopped / "state.pt", state)
    assert_cannot_go_on(stopped, says="is of another run")

    # of the same one, but with its averages in another order
    averages = state["optimizers"][0]["state"]
    averages[0], averages[1] = averages[1], averages[0]
    runs.write_tensors(tmp_path / "other" / "state.pt", state)
    flags = [*FLAGS, "--optimizer", "adamw", "--out", tmp_path / "other", "--resume"]
    assert_refused(train, *flags, says="is of another run")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_malicious_pickle_is_not_executed(stopped, monkeypatch):
    monkeypatch.chdir(stopped)
    (stopped / "state.pt").write_bytes(pickle.dumps(Malicious()))
    assert_cannot_go_on(stopped, says="state.pt is damaged")
    assert not Path("executed").exists()


# ---- full disks


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "name, at", [("config", 0), ("log", 0), ("state", 0), ("log", 20), ("state", 20), ("model", 40)]
)
def test_a_full_disk_gets_one_line_and_nothing_is_lost(name, at, tmp_path, whole, monkeypatch):
    """/dev/full answers every write as a full disk does."""
    file = {"config": "config.json", "log": "log.jsonl"}.get(name, f"{name}.pt")
    run, evaluate = tmp_path / "run", train.evaluate
    run.mkdir()

    def fill_the_disk(*arguments):
        if len(evaluated) * 10 == at:
            (run / f"{file}.tmp").symlink_to("/dev/full")
        evaluated.append(1)
        return evaluate(*arguments)

    evaluated = []
    with monkeypatch.context() as patched:
        if name == "config":
            (run / f"{file}.tmp").symlink_to("/dev/full")
        else:
            patched.setattr(train, "evaluate", fill_the_disk)
        code, _, err = run_main(train, *FLAGS, "--out", run)
    assert code == 1
    assert_one_line(err, says=f"cannot write {run / file} (No space left on device)")
    assert not (run / f"{file}.tmp").is_symlink()
    code, _, err = run_main(train, *FLAGS, "--out", run, "--resume")
    assert code == 0, err
    assert weights_equal(run, whole) and logged(run) == logged(whole)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 100 kB, for those who may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", disk]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_small_disk_gets_one_line_and_nothing_is_lost(small_disk, whole):
    run = small_disk / "run"
    code, _, err = run_main(train, *FLAGS, "--out", run)
    assert code == 1
    assert_one_line(err, says="No space left on device")
    subprocess.run(["mount", "-o", "remount,size=9m", small_disk], check=True)
    assert run_main(train, *FLAGS, "--out", run, "--resume")[0] == 0
    assert weights_equal(run, whole) and logged(run) == logged(whole)


# ---- impossible flags


@pytest.fixture
def little_memory():
    """This process gets 1 GB more, so that what is not refused fails and does not take it all."""
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.usefixtures("little_memory")
def test_sizes_that_no_machine_has_get_one_line(tmp_path):
    for name in ("N", "K", "width", "batch", "examples", "layers", "heads", "head-size", "D"):
        flags = [f"--{name}", 10**12, *(["--head-size", 8] if name == "heads" else [])]
        says = "--D must be at most 1000" if name == "D" else "GB of memory"
        assert_refused(train, *flags, "--out", tmp_path / "run", says=says)
        assert_refused(train, f"--{name}", 10**30, "--out", tmp_path / "run", says=f"--{name}")
    assert_refused(train, "--D", 1000, "--out", tmp_path / "run", says="GB of memory")
    assert not (tmp_path / "run").exists()


def test_flags_that_cannot_be_get_one_line(tmp_path):
    for flags, says in (
        ("--lr 1e308", "--lr must be at most"),
        ("--lr inf", "--lr must be at most"),
        ("--weight-decay 1e308", "--weight-decay must be at most"),
        ("--clip nan", "--clip must be"),
        ("--device meta", "--device meta is not there"),
        ("--device cuda:99", "--device cuda:99 is not there"),
        ("--out /dev/null/run", "cannot write to"),
        (f"--out {'x' * 300}", "cannot write to"),
    ):
        assert_refused(train, "--out", tmp_path / "run", *flags.split(), says=says)
    assert not (tmp_path / "run").exists()


def test_compile_without_a_compiler_gets_one_line(tmp_path, monkeypatch):
    inductor = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    torch._dynamo.reset()
    flags = [*FLAGS, "--out", tmp_path / "run"]
    assert_refused(train, *flags, "--compile", says="--compile does not work here")
    torch._dynamo.reset()
    assert run_main(train, *flags, "--resume")[0] == 0


def test_a_run_that_blows_up_stops_and_keeps_the_last_good_state(tmp_path):
    code, _, err = run_main(train, *TINY, "--lr", 1000, "--clip", 0, "--out", tmp_path / "run")
    assert code == 1
    assert_one_line(err, says="no longer finite")
    state = runs.read_tensors(tmp_path / "run" / "state.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
