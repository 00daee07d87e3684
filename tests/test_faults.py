"""What goes wrong on a user's machine gets one line that says what to do, and nothing is lost."""

import errno
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import ablate
import analyze
import data
import train
from test_all import HERE, is_png
from tests.common import WHOLE, assert_one_line, assert_refused, contents, output_of, run_main
from tests.other_tasks import write_circuit

import pytest
import torch


@pytest.mark.parametrize(
    "module, flags, says",
    [
        (train, "--targets 1 4", "--targets must be among 1 to 3"),
        (train, "--no-ic --targets 1", "leave out either it or --targets"),
        (train, "--task conditional --D 4", "leave --D out"),
        (train, "--init nowhere", "there is no file nowhere/model.pt"),
        (train, "--seed 99999999999999999999", "--seed: must be from 0 to"),
        (train, "--N 1e9", "--N: invalid int value"),
        (train, "--beta2 1", "--beta2: must be from 0 to 0.999999"),
        (train, "--init {whole}", "--init {whole} is a model of another shape"),
        (train, "--out {whole}/log.jsonl/run", "cannot write {whole}/log.jsonl/run/config.json"),
    ],
)
def test_a_mistake_leaves_nothing(module, flags, says, tmp_path, whole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(module, *flags.format(whole=whole).split(), says=says.format(whole=whole))
    assert not contents(tmp_path)


def test_a_run_that_blows_up_keeps_the_last_good_state(tmp_path):
    flags = [*WHOLE, "--lr", 1000, "--clip", 0, "--out", tmp_path / "run"]
    assert_refused(train, *flags, says="the loss is not finite")
    state = train.read_file(tmp_path / "run" / "state.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.parametrize("name, content", [("a.pt", dict(x=torch.zeros(9))), ("a.jsonl", [{}])])
def test_a_full_disk_gets_one_line_and_keeps_the_old_file(tmp_path, monkeypatch, name, content):
    train.write_file(tmp_path / name, content)
    old, write_bytes = contents(tmp_path), Path.write_bytes
    errors = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]

    def half(path, content):
        write_bytes(path, content[: len(content) // 2])
        raise errors.pop(0)

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(data.UserError, match="No space left on device"):
        train.write_file(tmp_path / name, content)
    with pytest.raises(KeyboardInterrupt):
        train.write_file(tmp_path / name, content)
    assert contents(tmp_path) == old


def test_a_damaged_file_is_named_in_one_line(tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    write_circuit(run, (0, 0, "1b", "1a", 0.9))
    (run / "emergence.json").write_text('{"steps": []}')
    stages = dict.fromkeys(("config.json", "log.jsonl", "circuit.json", "emergence.json"), analyze)
    for name, module in (stages | {"model.pt": ablate, "state.pt": train}).items():
        kept = (run / name).read_bytes()
        flipped = bytearray(kept)
        flipped[len(kept) // 3] ^= 0x80  # in model.pt, a bit of a weight
        (run / name).write_bytes(flipped)
        words = [run]
        if module is train:
            (run / "model.pt").unlink()  # an unfinished run
            words = [*WHOLE, "--out", run, "--resume"]
        assert_refused(module, *words, says=f"{run / name} is damaged")
        (run / name).write_bytes(kept)


def in_a_process(*command, **environment):
    """Run a command in this clone; return (exit code, stdout, stderr)."""
    how = dict(cwd=HERE, env=os.environ | environment, capture_output=True, timeout=300)
    ended = subprocess.run([*map(str, command)], **how)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize("script", "data train sweep ablate analyze extras.studies.order".split())
def test_how_threads_wait_is_set_before_torch(script):
    """As GNU OpenMP says itself."""
    command = "env", "-u", "GOMP_SPINCOUNT", sys.executable
    code, _, err = in_a_process(*command, "-m", script, "--help", OMP_DISPLAY_ENV="verbose")
    assert code == 0 and "GOMP_SPINCOUNT = '1000'" in err


def test_figures_are_ours_whatever_a_user_has_set(tmp_path, whole):
    """LaTeX in a matplotlibrc where there is none; a window that cannot be loaded."""
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "circuit.json").write_text('{"verdict": "not faithful: x", "paths": []}')
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nsavefig.format: pdf\n")
    user = dict(MPLBACKEND="module://nowhere", MATPLOTLIBRC=str(tmp_path))
    code, out, err = in_a_process(sys.executable, "analyze.py", run, **user)
    assert code == 0 and is_png(run / "curves.png"), err
    assert "no circuit to draw: not faithful: x" in out


def test_a_device_that_computes_other_sequences_is_refused(tmp_path, monkeypatch):
    made, real = iter(range(2)), train.sequences
    monkeypatch.setattr(train, "sequences", lambda flags, index: real(flags, index + next(made)))
    says = "--device cpu makes other sequences than the CPU"
    assert_refused(train, *WHOLE, "--out", tmp_path / "run", says=says)
    assert not contents(tmp_path)


def test_an_unfinished_run_gets_its_losses_and_an_unknown_one_a_line(tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "model.pt").unlink()
    assert_refused(ablate, run, says="not finished goes on with python train.py ... --resume")
    curves, missing = output_of(analyze, run).splitlines()
    assert curves == str(run / "curves.png") and "model.pt: finish the training" in missing
    settings = train.read_file(run / "config.json")
    for name in "task", "rotary":
        train.write_file(run / "config.json", settings | {name: "mine"})
        assert_refused(analyze, run, says=f"--{name} mine, unknown here")


def test_an_exception_of_yours_keeps_its_traceback(tmp_path, monkeypatch):
    """Also of an object in state.pt that is no tensor, which is no damage."""
    monkeypatch.setattr(train, "make_optimizers", lambda *_: Path("no_file").read_text())
    with pytest.raises(FileNotFoundError, match="no_file"):
        run_main(train, *WHOLE, "--out", tmp_path / "run")
    train.write_file(tmp_path / "state.pt", dict(mine=Path))
    with pytest.raises(pickle.UnpicklingError, match="pathlib"):
        train.read_file(tmp_path / "state.pt")


def test_files_of_others_are_no_checkpoints(tmp_path):
    for name in "000100.pt", "1000000.pt", "._000100.pt", "best.pt", "000200.json":
        train.write_file(tmp_path / "ckpt" / name, {})
    assert [file.name for file in train.checkpoints_of(tmp_path)] == ["000100.pt", "1000000.pt"]


@pytest.mark.parametrize("reader", ["| head -1", "2>&1 | true", "> /dev/full"])
def test_a_training_goes_on_when_its_reader_has_gone(tmp_path, reader):
    line = f"{sys.executable} train.py {' '.join(WHOLE)} --out {tmp_path}/run {reader}"
    code, _, err = in_a_process("bash", "-c", f"set -o pipefail; {line}")
    if "full" in reader:
        assert code == 2
        assert_one_line(err, "cannot print: No space left on device")
    else:
        assert code == 0 and (tmp_path / "run/model.pt").exists() and not err
