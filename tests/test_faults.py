"""What goes wrong on a user's machine is said, gives no wrong result, and loses no work."""

import resource
import shutil
import subprocess
from unittest import mock

import train
from tests.common import TINY, assert_refused, outcome_of, output_of, run_main

import pytest
import torch


def test_a_run_that_is_there_is_not_touched_and_says_so(tmp_path, whole):
    """Finished, or begun with other flags."""
    run = shutil.copytree(whole, tmp_path / "run")
    assert "has finished before" in output_of(train, *TINY, "--out", run, "--resume")
    other = *TINY, "--seed", 5, "--lr", 0.5, "--out", run, "--resume"
    assert_refused(train, *other, says="has another lr, seed")
    assert train.read_flags(run).lr == 1e-3 and outcome_of(run) == outcome_of(whole)
    assert train.run_directory(run / "ckpt/..").name == run.name
    (run / "model.pt").unlink()
    train.write_file(run / "config.json", train.read_file(run / "config.json") | dict(threads=64))
    assert "with another threads than before" in output_of(train, *TINY, "--out", run, "--resume")


def test_a_commit_is_not_that_of_a_repository_around_the_code(tmp_path, monkeypatch):
    subprocess.check_call(["git", "init", "-q", tmp_path])
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(train, "__file__", str(tmp_path / "inner/train.py"))
    assert train.made_by("cpu")["git"] == "unknown"


def test_tensors_of_a_gpu_are_read_where_there_is_none(tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    content = torch.load(run / "model.pt")
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
        train.write_file(run / "model.pt", content)
    assert train.load(run)[0].embed.weight.device.type == "cpu"


def test_a_run_that_blows_up_ends_without_a_model_and_keeps_its_last_good_state(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is not finite at step 10"):
        run_main(train, *TINY, "--lr", 1e18, "--clip", 0, "--out", tmp_path / "run")
    assert not (tmp_path / "run/model.pt").exists()
    state = train.read_file(tmp_path / "run/state.pt")
    assert state["step"] == 0
    assert all(weight.isfinite().all() for weight in state["parts"][0].values())


def test_a_disk_that_is_full_keeps_the_old_file(tmp_path):
    path, limits = tmp_path / "log.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    train.write_file(path, [dict(step=0)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the largest file
    try:
        with pytest.raises(OSError):
            train.write_file(path, [dict(step=0)] * 9999)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert train.read_file(path) == [dict(step=0)]
