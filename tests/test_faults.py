"""Damaged files, full disks, impossible flags: one line that says what to do, and nothing lost."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

from parts import Refused, program, runs

import pytest
import torch

import train
from tests.common import (
    HERE,
    TINY,
    WHOLE,
    assert_refused,
    contents,
    logged,
    run_main,
    train_until,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")
NOT_JSON = [b"", b"{", b"\xff\xfe{}", b"\x00", b"[" * 100_000, b'{"step": 1' + b"0" * 5000 + b"}"]
NOT_JSON += [b"[]\n", b"3\n", b"null\n", b'"text"\n', b"{}\n"]


@pytest.fixture(scope="module")
def at_20(tmp_path_factory):
    """The run `whole`, stopped at step 20."""
    run = tmp_path_factory.mktemp("at_20") / "run"
    train_until(20, *WHOLE, "--out", run)
    return run


@pytest.fixture
def stopped(at_20, tmp_path):
    return shutil.copytree(at_20, tmp_path / "run")


@pytest.fixture
def ended(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def assert_cannot_go_on(run, says):
    """Refused in one line, and no file is touched."""
    before = contents(run)
    assert_refused(train, *WHOLE, "--out", run, "--resume", says=says)
    assert contents(run) == before


def assert_goes_on(run, whole):
    code, out, err = run_main(train, *WHOLE, "--out", run, "--resume")
    assert code == 0 and "resumed" in out and not err, err
    assert weights_equal(run, whole) and logged(run) == logged(whole)


# ---- damaged text


def test_a_config_that_is_none_gets_one_line(stopped):
    path = stopped / "config.json"
    config = json.loads(path.read_text())
    wrong = [dict(layers="two"), dict(N=None), dict(lr=[1]), dict(rotary="none"), dict(K=3)]
    wrong += [dict(D=True), dict(D=0), dict(layers=10**9), dict(width=10**15), dict(ic=1)]
    wrong += [dict(targets=[True]), dict(targets=3), dict(dropout=0.5)]
    text = [json.dumps(config | change).encode() for change in wrong]
    for damage in NOT_JSON + text:
        path.write_bytes(damage)
        assert_cannot_go_on(stopped, says=f"{path} ")
        with pytest.raises(Refused, match="config.json"):
            runs.load(stopped)


def test_a_damaged_log_is_refused_where_it_is_read(ended):
    path = ended / "log.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 5
    swapped, doubled = [rows[1], rows[0], *rows[2:]], [rows[0], *rows]
    wrong = [swapped, doubled, [{}], [dict(step=0)], [[rows[0]]], [rows[0] | dict(step=0.5)]]
    for value in (float("nan"), float("inf"), True, "low", None, []):
        wrong += [[*rows[:4], rows[4] | dict(val=value)], [rows[0] | dict(x_1=value)]]
    text = ["".join(json.dumps(row) + "\n" for row in one).encode() for one in wrong]
    text.append(text[-1].replace(b"[]", b"1e400"))
    for damage in NOT_JSON + text:
        path.write_bytes(damage)
        assert_cannot_go_on(ended, says=f"{path} ")


def test_a_damaged_log_is_healed_from_the_state(stopped, whole):
    (stopped / "log.jsonl").write_bytes(b"\x00{]" + (stopped / "log.jsonl").read_bytes()[:99])
    assert_goes_on(stopped, whole)


# ---- damaged tensors


def test_a_damaged_state_is_refused_and_nothing_lost(stopped, whole):
    path = stopped / "state.pt"
    good = path.read_bytes()
    for damage in (b"", good[:1000], good[:-100], b"no checkpoint"):
        path.write_bytes(damage)
        assert_cannot_go_on(stopped, says="state.pt is damaged")
    path.unlink()
    assert_cannot_go_on(stopped, says="state.pt is missing")
    path.write_bytes(good)
    assert_goes_on(stopped, whole)


def test_a_state_of_the_wrong_kind_is_refused(stopped, tmp_path):
    path = stopped / "state.pt"
    state = runs.read_tensors(path)
    first, second = state["optimizers"]
    without_one = [{i: own for i, own in first.items() if i}, second]
    swapped = [first | {0: first[1], 1: first[0]}, second]
    wrong = [dict(optimizers=[{}, {}]), dict(optimizers=[first, {}]), dict(optimizers=without_one)]
    wrong += [dict(optimizers=[{i: {} for i in first}, second]), dict(optimizers=swapped)]
    wrong += [dict(optimizers=[first]), dict(model={}), dict(model=[]), dict(flags=[])]
    wrong += [dict(step=value) for value in ("20", 20.0, True, None, 10, 30, -20)]
    wrong += [dict(rows=value) for value in ([], [3], state["rows"][:1], [{}, {}], None)]
    wrong += [dict(seconds="1"), dict(threads="one"), dict(threads=0)]
    wrong += [dict(train_loss=0.0), dict(train_loss=torch.zeros(3))]
    for other in ({}, dict(step=20), *(state | change for change in wrong)):
        torch.save(other, path)
        assert_cannot_go_on(stopped, says=f"{path} is of another run")
    for other in ([1, 2], None, 3):
        torch.save(other, path)
        assert_cannot_go_on(stopped, says=f"{path} is damaged")
    for other in (["--seed", 1], ["--optimizer", "adamw"]):
        train_until(20, *WHOLE, *other, "--out", tmp_path / other[0])
        shutil.copy(tmp_path / other[0] / "state.pt", path)
        assert_cannot_go_on(stopped, says=f"{path} is of another run")


@pytest.mark.parametrize("name", ["state.pt", "model.pt"])
def test_a_flipped_bit_is_refused_or_changes_nothing(name, ended):
    path = ended / name
    good, whole = path.read_bytes(), str(runs.read_tensors(path))
    refused = 0
    for i in range(30):
        at = i * len(good) // 30 + i
        flipped = good[at] ^ 1 << i % 8
        path.write_bytes(good[:at] + bytes([flipped]) + good[at + 1 :])
        try:
            assert str(runs.read_tensors(path)) == whole, at
        except Refused:
            refused += 1
    assert refused >= 15


def test_weights_that_are_not_the_runs_get_one_line(ended, tmp_path):
    """Cut short, of another model, not a number."""
    path = ended / "model.pt"
    weights = torch.load(path, weights_only=True)
    narrow = {name: tensor[..., :8] for name, tensor in weights.items()}
    broken = weights | {"head.bias": torch.full_like(weights["head.bias"], torch.nan)}
    for tensors, says in (
        (narrow, "another model"),
        (list(weights), "is damaged"),
        (weights | {"more": torch.zeros(1)}, "another model"),
        ({}, "another model"),
        (broken, "not finite"),
    ):
        torch.save(tensors, path)
        with pytest.raises(Refused, match=f"model.pt .*{says}"):
            runs.load(ended)
    with pytest.raises(Refused, match="no run directory"):
        runs.load(tmp_path / "nowhere")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_malicious_pickle_is_not_executed(stopped, monkeypatch):
    monkeypatch.chdir(stopped)
    for save in (lambda one: Path("state.pt").write_bytes(pickle.dumps(one)), save_as_torch):
        save(Malicious())
        assert_cannot_go_on(stopped, says="state.pt is damaged")
    assert not Path("executed").exists()


def save_as_torch(one):
    torch.save(one, "state.pt")


# ---- full disks


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("file, at", [("config.json", 0), ("state.pt", 20), ("model.pt", 40)])
def test_a_full_disk_gets_one_line_and_nothing_is_lost(file, at, tmp_path, whole, monkeypatch):
    """/dev/full answers every write as a full disk does."""
    run, evaluate, evaluated = tmp_path / "run", train.evaluate, []
    run.mkdir()

    def fill_the_disk(*arguments):
        if len(evaluated) * 10 == at:
            (run / f"{file}.tmp").symlink_to("/dev/full")
        evaluated.append(1)
        return evaluate(*arguments)

    with monkeypatch.context() as patched:
        if file == "config.json":
            (run / f"{file}.tmp").symlink_to("/dev/full")
        else:
            patched.setattr(train, "evaluate", fill_the_disk)
        says = f"cannot write {run / file}: No space left on device: make room"
        assert_refused(train, *WHOLE, "--out", run, says=says, code=1)
    assert not (run / f"{file}.tmp").is_symlink()
    code, _, err = run_main(train, *WHOLE, "--out", run, "--resume")
    assert code == 0, err
    assert weights_equal(run, whole) and logged(run) == logged(whole)


# ---- what a machine lacks


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_too_little_memory_gets_one_line(tmp_path):
    """This process gets 1 GB more, so that what is asked for fails and does not take it all."""
    resource = pytest.importorskip("resource")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        flags = ["--heads", 1000, "--head-size", 20_000, "--out", tmp_path]
        assert_refused(train, *flags, says="too little memory: choose smaller sizes", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_run_that_blows_up_stops_and_keeps_the_last_good_state(tmp_path):
    flags = [*TINY, "--lr", 1000, "--clip", 0, "--out", tmp_path / "run"]
    assert_refused(train, *flags, says="no longer finite", code=1)
    state = runs.read_tensors(tmp_path / "run" / "state.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_figure_that_fails_costs_no_weights(tmp_path, whole, monkeypatch):
    """Say, by MPLBACKEND=nonsense. And a clock may stand still."""
    monkeypatch.setattr(train, "draw_curves", lambda run: 1 / 0)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    with pytest.raises(ZeroDivisionError) as raised:
        run_main(train, *WHOLE, "--out", tmp_path)
    assert raised.traceback[-1].name == "<lambda>"
    assert weights_equal(tmp_path, whole) and logged(tmp_path) == logged(whole)


# ---- readers that are gone


def test_a_pipe_that_nobody_reads_ends_quietly(monkeypatch):
    data = subprocess.Popen(
        [sys.executable, HERE / "data.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    data.stdout.close()
    for arguments in ["--help"], ["--no-such-flag"]:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", pipe)
            patched.setattr(sys, "argv", ["train.py", *arguments])
            with pytest.raises(SystemExit) as end:
                train.main()
            assert end.value.code == (0 if arguments == ["--help"] else 2)
    assert not data.stderr.read()


def test_a_bug_keeps_its_traceback():
    for bug in (KeyError("D"), ValueError("no"), RuntimeError("mat1 and mat2"), AssertionError()):
        with pytest.raises(type(bug)), program("train.py"):
            raise bug
    for error, code in (Refused("no"), 2), (KeyboardInterrupt(), 130), (MemoryError(), 1):
        with pytest.raises(SystemExit) as end, program("train.py"):
            raise error
        assert end.value.code == code
