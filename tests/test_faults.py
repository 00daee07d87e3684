"""What goes wrong on a user's machine is said, gives no wrong result, and loses no work."""

import ctypes
import pickle
import random
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import ablate
import analyze
import train
from tests.common import TINY, assert_refused, contents, output_of, run_main, start, train_until

import matplotlib
import pytest
import torch


@pytest.fixture
def run(tmp_path, whole):
    """A finished run, which a test may change."""
    return shutil.copytree(whole, tmp_path / "run")


# ---- no wrong result


def test_a_finished_run_is_not_touched_and_says_so(run, whole):
    out = output_of(train, *TINY, "--out", run, "--resume")
    assert "has finished before (git" in out and "nothing was done" in out
    assert "--resume" not in assert_refused(train, *TINY, "--out", run, says="has finished before")
    assert contents(run) == contents(whole)


def test_of_two_trainings_that_start_at_once_one_runs(tmp_path, monkeypatch):
    """The first starts after the second has looked into the folder."""
    run, provenance = tmp_path / "run", train.provenance_of

    def late(flags):
        monkeypatch.setattr(train, "provenance_of", provenance)
        output_of(train, *TINY, "--seed", 5, "--out", run)
        return provenance(flags)

    monkeypatch.setattr(train, "provenance_of", late)
    assert_refused(train, *TINY, "--out", run, says="choose another --out")
    assert train.read_flags(run).seed == 5 and [*tmp_path.iterdir()] == [run]


def test_a_report_of_other_weights_is_refused(run):
    row = dict(layer=1, head=0, reader="q", read="1b", attention=0.5, without=dict(x_1=0.7))
    report = dict(validated=True, verdict="validated", ablation="mean", mean=dict(x_1=0.5))
    report.update(sequences=9, paths=[row])
    model, settings = train.read_file(run / "model.pt"), dict(matplotlib.rcParams)
    train.write_file(run / "circuit.json", dict(report, weights=train.weights_hash(run)))
    output_of(analyze, run)
    assert dict(matplotlib.rcParams) == settings  # of a notebook
    train.write_file(run / "model.pt", {name: 2 * weight for name, weight in model.items()})
    with pytest.raises(ValueError, match="circuit.json was made of other weights"):
        run_main(analyze, run)

    # emergence: measured anew from checkpoints, else refused
    before = train.read_file(run / "emergence.json")
    train.write_file(run / "circuit.json", dict(report, weights=train.weights_hash(run)))
    output_of(analyze, run)
    assert train.read_file(run / "emergence.json")["weights"] == train.weights_hash(run)
    train.write_file(run / "emergence.json", before)
    shutil.rmtree(run / "ckpt")
    with pytest.raises(ValueError, match="emergence.json was made of other weights"):
        run_main(analyze, run)


def test_words_and_flags_that_there_are_not_are_refused(run):
    model, task, _ = train.load(run)
    patched = ablate.PatchedModel(model, task, task.draw("validation", 2))
    path = ablate.Path(0, 0, "q", "1b")
    for wrong in "zero", "Mean", None, True:
        for measure in patched.keep_only, patched.knock_out:
            with pytest.raises(ValueError, match="ablation must be 'mean' or 'resample'"):
                measure([path], ablation=wrong)
    config = train.read_file(run / "config.json")
    train.write_file(run / "config.json", config | dict(momentum=0.9))
    says = f"has unknown flags, momentum: use the code that made it, commit {config['git']}"
    for module, words in (ablate, []), (analyze, []), (train, [*TINY, "--resume", "--out"]):
        assert_refused(module, *words, run, says=says)


def test_weights_that_have_changed_on_the_disk_are_refused(tmp_path, run):
    """Emptied, cut off, or with one bit turned, which may be one that says nothing."""
    weights, state = train.read_file(run / "model.pt"), (run / "model.pt").read_bytes()
    for number in range(60):
        damaged = bytearray(state)
        damaged[random.Random(number).randrange(len(state))] ^= 1 << number % 8
        (run / "model.pt").write_bytes(damaged)
        try:
            found = train.read_file(run / "model.pt")
        except (ValueError, RuntimeError, pickle.UnpicklingError):
            continue
        assert all(torch.equal(found[name], weights[name]) for name in weights), number
    for content in b"", state[: len(state) // 2]:
        (run / "model.pt").write_bytes(content)
        for module, words in (train, [*TINY, "--out", run, "--resume"]), (ablate, [run]):
            with pytest.raises(ValueError, match=r"model\.pt is damaged"):
                run_main(module, *words)
    stopped = tmp_path / "stopped"
    train_until(3, *TINY, "--out", stopped)
    (stopped / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"state\.pt is damaged"):
        run_main(train, *TINY, "--out", stopped, "--resume")


def test_the_commit_is_of_this_clone_or_unknown(tmp_path, monkeypatch):
    """Not that of another repository around it; none without git."""
    monkeypatch.setattr(train, "__file__", str(tmp_path / "inner/train.py"))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ["init", "-q"], ["commit", "-qm", "a", "--allow-empty"]:
        subprocess.check_call([*git, *words])
    (tmp_path / "inner").mkdir()
    assert train.commit_of_this_code() == "unknown"
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    assert len(train.commit_of_this_code()) == 7
    monkeypatch.setenv("PATH", "")
    assert train.commit_of_this_code() == "unknown"


def test_a_resumed_run_says_that_the_code_has_changed(tmp_path, monkeypatch):
    for now, says in ("1111111", False), ("2222222", True), ("1111111-dirty", True):
        monkeypatch.setattr(train, "commit_of_this_code", lambda: "1111111")
        train_until(2, *TINY, "--out", tmp_path / now)
        monkeypatch.setattr(train, "commit_of_this_code", lambda now=now: now)
        out = output_of(train, *TINY, "--out", tmp_path / now, "--resume")
        assert (f"begun with the code of commit 1111111, and goes on with {now}" in out) == says


def test_one_set_of_targets_has_one_name():
    for same in (
        ["", "--targets all", "--targets 1,2,3", "--targets 3,2,1"],
        ["--targets last", "--targets 3", "--targets 3,3"],
        ["--targets 1,3", "--targets 3,1"],
        ["--D 1", "--D 1 --targets last", "--D 1 --targets 1"],
    ):
        settings = [train.values_of(train.parse_flags(words.split())) for words in same]
        assert all(each == settings[0] for each in settings)


def test_a_new_circuit_takes_the_figures_of_the_old_one_away(run):
    for name in "circuit", "emergence", "paths", "attention_maps", "curves":
        (run / f"{name}.png").touch()
    output_of(ablate, run)
    assert [path.name for path in run.glob("*.png")] == ["curves.png"]


def test_tensors_of_a_gpu_are_read_where_there_is_none(tmp_path):
    """Also by --resume, on the device of its flags."""
    run = tmp_path / "run"
    train_until(3, *TINY, "--out", run)
    for name in "ckpt/000000.pt", "state.pt":
        content = torch.load(run / name)
        with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
            train.write_file(run / name, content)
    assert train.load(run, "ckpt/000000.pt")[0].embed.weight.device.type == "cpu"
    assert "resumed" in output_of(train, *TINY, "--out", run, "--resume")


def test_a_run_that_blows_up_ends_without_a_model_and_keeps_its_last_good_state(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is not finite at step 10"):
        run_main(train, *TINY, "--lr", 1e30, "--clip", 0, "--out", tmp_path / "run")
    assert not (tmp_path / "run/model.pt").exists()
    state = train.read_file(tmp_path / "run/state.pt")
    assert state["step"] == 0
    assert all(weight.isfinite().all() for weight in state["model"].values())


# ---- no lost work


@pytest.mark.parametrize("name, content", [("a.pt", dict(x=torch.zeros(9))), ("a.jsonl", [{}])])
def test_a_write_that_ends_halfway_keeps_the_old_file(tmp_path, monkeypatch, name, content):
    train.write_file(tmp_path / name, content)
    old, write_bytes = (tmp_path / name).read_bytes(), Path.write_bytes

    def half(path, whole):
        write_bytes(path, whole[:1])
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="disk is full"):
        train.write_file(tmp_path / name, content)
    assert contents(tmp_path) == {Path(name): old}


def test_a_disk_that_is_full_ends_a_run_in_one_line(tmp_path, monkeypatch):
    """While a checkpoint is written: state.pt is whole, and the run goes on from there."""
    write_file = train.write_file

    def full(path, content):
        if path.name == "000020.pt":
            raise OSError(28, "No space left on device")
        write_file(path, content)

    monkeypatch.setattr(train, "write_file", full)
    code, _, err = run_main(train, *TINY, "--out", tmp_path / "run")
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1
    monkeypatch.setattr(train, "write_file", write_file)
    assert "resumed" in output_of(train, *TINY, "--out", tmp_path / "run", "--resume")


def test_a_report_that_cannot_be_written_is_printed_first(run):
    """On a read-only folder; here something stands in its way."""
    (run / "circuit.json").mkdir()
    process = start("ablate", run)
    out, err = process.communicate()
    assert process.returncode == 1 and "circuit.json" in err and "\nverdict: " in out


def test_a_libc_without_mallopt_is_left_alone(monkeypatch):
    for library in dict(side_effect=OSError), dict(return_value=object()):
        monkeypatch.setattr(ctypes, "CDLL", mock.Mock(**library))
        train.keep_freed_memory()
