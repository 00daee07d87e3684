"""Wrong flags and damaged files get one line that says what to do, and nothing is lost."""

import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

from parts import UserError, config, program

import pytest
import torch

import train
from tests.common import WHOLE, assert_refused, contents, run_main, runs_equal, train_until


pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--D 0", "--D must be at least 1"),
        ("--layers 10000", "--layers must be at most 1000"),
        ("--heads 3 --width 128", "divisible by --heads 3"),
        ("--device cuda:99", "--device cuda:99 does not exist"),
        ("--lr nan", "--lr must be"),
        ("--K 3", "even"),
        ("--layers two", "invalid int value"),
        ("--lay 3", "unrecognized"),
        ("--rotary qk --head-size 5", "even"),
        (f"--seed {2**63}", "--seed must be at most"),
        ("--targets 1 4", "--targets must be among 1 2 3"),
        ("--targets 1 --no-ic", "leave out either"),
        ("--task conditional --D 4", "leave --D out"),
        ("--circuit largest", "no circuit largest"),
        ("--circuit minimal --no-causal", "--circuit minimal needs --heads 2"),
        ("--circuit minimal --task conditional", "--circuit minimal needs --heads 2"),
        ("--init nowhere", "nowhere is no run directory"),
        ("--init {whole}", "use the model flags of that run"),
    ],
)
def test_a_wrong_flag_gets_one_line_and_leaves_no_folder(flags, says, tmp_path, whole):
    flags = flags.format(whole=whole).split()
    assert_refused(train, "--out", tmp_path / "run", *flags, says=says)
    assert not (tmp_path / "run").exists()


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_damaged_file_gets_one_line_and_nothing_is_lost(tmp_path, whole, monkeypatch):
    run = tmp_path / "run"
    train_until(20, *WHOLE, "--out", run)
    monkeypatch.chdir(run)
    for name, damages in (
        ("config.json", (b"", b"{", b"\xff\xfe{}")),
        ("state.pt", (b"", b"no checkpoint", pickle.dumps(Malicious()))),
    ):
        path = run / name
        good = path.read_bytes()
        flipped = good[:500] + bytes([good[500] ^ 1]) + good[501:]
        for damage in (*damages, good[:-100], *([flipped] if name == "state.pt" else [])):
            path.write_bytes(damage)
            before = contents(run)
            assert_refused(train, *WHOLE, "--out", run, "--resume", says=f"{path} is damaged")
            assert contents(run) == before
        path.write_bytes(good)
    torch.save(Malicious(), "state.pt.tmp")  # a write that was cut off
    (run / "log.jsonl").write_bytes(b"\x00{]")  # the state holds the rows
    code, out, err = run_main(train, *WHOLE, "--out", run, "--resume")
    assert code == 0 and "resumed" in out and not err, err
    assert runs_equal(run, whole) and not Path("executed").exists()


def test_the_state_of_another_run_or_of_other_code_is_refused(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    train_until(10, *WHOLE, "--out", run)
    train_until(20, *WHOLE, "--seed", 1, "--out", other)
    state = config.read_tensors(run / "state.pt")
    without_rows = {name: value for name, value in state.items() if name != "rows"}
    for tensors in config.read_tensors(other / "state.pt"), without_rows, state | dict(more=1):
        torch.save(tensors, run / "state.pt")
        before = contents(run)
        says = "is of another run or other code"
        assert_refused(train, *WHOLE, "--out", run, "--resume", says=says)
        assert contents(run) == before


def test_weights_of_another_model_get_one_line(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    weights = torch.load(run / "model.pt", weights_only=True)
    narrow = {name: tensor[..., :8] for name, tensor in weights.items()}
    for tensors in narrow, weights | {"more": torch.zeros(1)}, {}:
        torch.save(tensors, run / "model.pt")
        with pytest.raises(UserError, match="weights of another model"):
            config.load(run)


def test_a_run_that_blows_up_stops_and_keeps_the_last_good_state(tmp_path):
    flags = [*WHOLE, "--lr", 1000, "--clip", 0, "--out", tmp_path / "run"]
    assert_refused(train, *flags, says="the loss is not finite")
    state = config.read_tensors(tmp_path / "run" / "state.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_figure_that_fails_costs_no_weights(tmp_path, whole, monkeypatch):
    """The clock may stand still too."""
    monkeypatch.setattr(train, "draw_curves", lambda run: 1 / 0)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    with pytest.raises(ZeroDivisionError):
        run_main(train, *WHOLE, "--out", tmp_path)
    assert runs_equal(tmp_path, whole)


def test_a_bug_keeps_its_traceback():
    for bug in (KeyError("D"), ValueError("no"), RuntimeError("mat1 and mat2"), AssertionError()):
        with pytest.raises(type(bug)), program("train.py"):
            raise bug
    for error, code in (UserError("no"), 2), (KeyboardInterrupt(), 130), (OSError("full"), 2):
        with pytest.raises(SystemExit) as end, program("train.py"):
            raise error
        assert end.value.code == code


def test_an_import_changes_nothing_outside():
    code = """
import os, sys
before = dict(os.environ), sys.excepthook
import train, ablate, analyze, sweep, data
assert (dict(os.environ), sys.excepthook) == before
"""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
