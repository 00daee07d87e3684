"""Damaged files, impossible flags: one line that says what to do, and nothing lost."""

import os
import pickle
import shutil
import time
from pathlib import Path

from parts import UserError, config, program

import pytest
import torch

import train
from tests.common import (
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


@pytest.fixture
def stopped(tmp_path):
    """The run `whole`, stopped at step 20."""
    train_until(20, *WHOLE, "--out", tmp_path / "run")
    return tmp_path / "run"


def assert_cannot_go_on(run, says):
    """UserError in one line, and no file is touched."""
    before = contents(run)
    assert_refused(train, *WHOLE, "--out", run, "--resume", says=says)
    assert contents(run) == before


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_damaged_file_gets_one_line_and_nothing_is_lost(stopped, whole, monkeypatch):
    monkeypatch.chdir(stopped)
    for name, damages in (
        ("config.json", (b"", b"{", b"\xff\xfe{}")),
        ("state.pt", (b"", b"no checkpoint", pickle.dumps(Malicious()))),
    ):
        path = stopped / name
        good = path.read_bytes()
        for damage in (*damages, good[:-100]):
            path.write_bytes(damage)
            assert_cannot_go_on(stopped, says=f"{path} cannot be read")
        path.write_bytes(good)
    torch.save(Malicious(), "state.pt.tmp")  # a write that was cut off
    (stopped / "log.jsonl").write_bytes(b"\x00{]")  # is written anew from the state
    code, out, err = run_main(train, *WHOLE, "--out", stopped, "--resume")
    assert code == 0 and "resumed" in out and not err, err
    assert weights_equal(stopped, whole) and logged(stopped) == logged(whole)
    assert not Path("executed").exists()


def test_weights_that_are_not_the_runs_get_one_line(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    weights = torch.load(run / "model.pt", weights_only=True)
    narrow = {name: tensor[..., :8] for name, tensor in weights.items()}
    for tensors in narrow, weights | {"more": torch.zeros(1)}, {}:
        torch.save(tensors, run / "model.pt")
        with pytest.raises(UserError, match="weights of another model"):
            config.load(run)
    with pytest.raises(UserError, match="no run directory"):
        config.load(tmp_path / "nowhere")


def test_a_run_that_blows_up_stops_and_keeps_the_last_good_state(tmp_path):
    flags = [*TINY, "--lr", 1000, "--clip", 0, "--out", tmp_path / "run"]
    assert_refused(train, *flags, says="no longer finite")
    state = config.read_tensors(tmp_path / "run" / "state.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_figure_that_fails_costs_no_weights(tmp_path, whole, monkeypatch):
    """Say, by MPLBACKEND=nonsense. And a clock may stand still."""
    monkeypatch.setattr(train, "draw_curves", lambda run: 1 / 0)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    with pytest.raises(ZeroDivisionError) as raised:
        run_main(train, *WHOLE, "--out", tmp_path)
    assert raised.traceback[-1].name == "<lambda>"
    assert weights_equal(tmp_path, whole) and logged(tmp_path) == logged(whole)


def test_a_bug_keeps_its_traceback():
    for bug in (KeyError("D"), ValueError("no"), RuntimeError("mat1 and mat2"), AssertionError()):
        with pytest.raises(type(bug)), program("train.py"):
            raise bug
    for error, code in (UserError("no"), 2), (KeyboardInterrupt(), 130), (OSError("full"), 2):
        with pytest.raises(SystemExit) as end, program("train.py"):
            raise error
        assert end.value.code == code
