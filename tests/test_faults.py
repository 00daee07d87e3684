"""What goes wrong on a user's machine is said, gives no wrong result, and loses no work."""

import resource
import shutil
import subprocess
from unittest import mock

import train
from tests.common import HERE, TINY, assert_refused, contents, output_of, run_main

import pytest
import torch


def test_a_run_that_is_there_is_not_touched_and_says_so(tmp_path, whole):
    """Finished, or begun with other flags."""
    run = shutil.copytree(whole, tmp_path / "run")
    out = output_of(train, *TINY, "--out", run, "--resume")
    assert "has finished before" in out
    other = *TINY, "--seed", 5, "--lr", 0.5, "--out", run, "--resume"
    assert_refused(train, *other, says="has another lr, seed")
    assert contents(run) == contents(whole)


def test_a_run_says_what_made_it(tmp_path, whole, monkeypatch):
    """The commit is that of this clone, and not of a repository around it, or unknown."""
    config, git = train.read_file(whole / "config.json"), ["git", "-C", str(HERE)]
    commit = subprocess.check_output([*git, "rev-parse", "--short=7", "HEAD"], text=True)
    assert config["git"].startswith(commit.strip())
    assert config["hardware"] and config["torch"] == torch.__version__
    subprocess.check_call(["git", "init", "-q", tmp_path])
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(train, "__file__", str(tmp_path / "inner/train.py"))
    assert train.made_by("cpu")["git"] == "unknown"


def test_one_set_of_targets_has_one_name():
    for same in (
        ["", "--targets all", "--targets 3,2,1"],
        ["--targets last", "--targets 3,3"],
        ["--D 1", "--D 1 --targets last"],
        ["--targets 1,3", "--targets 3,1"],
    ):
        assert len({train.parse_flags(words.split()).out for words in same}) == 1


def test_tensors_of_a_gpu_are_read_where_there_is_none(tmp_path, whole):
    """Also by --resume, on the device of its flags."""
    run = shutil.copytree(whole, tmp_path / "run")
    for name in "model.pt", "state.pt":
        content = torch.load(run / name)
        with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
            train.write_file(run / name, content)
    assert train.load(run)[0].embed.weight.device.type == "cpu"
    (run / "model.pt").unlink()
    assert "resumed" in output_of(train, *TINY, "--out", run, "--resume")


def test_a_run_that_blows_up_ends_without_a_model_and_keeps_its_last_good_state(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss is not finite at step 10"):
        run_main(train, *TINY, "--lr", 1e18, "--clip", 0, "--out", tmp_path / "run")
    assert not (tmp_path / "run/model.pt").exists()
    state = train.read_file(tmp_path / "run/state.pt")
    assert state["step"] == 0
    assert all(weight.isfinite().all() for weight in state["parts"][0].values())


@pytest.mark.parametrize(
    "name, content",
    [("a.pt", dict(x=torch.zeros(9999))), ("a.jsonl", [{}] * 9999), ("a.json", {"x": "y" * 9999})],
)
def test_a_disk_that_is_full_keeps_the_old_file(tmp_path, name, content):
    train.write_file(tmp_path / name, content)
    old, limits = (tmp_path / name).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the largest file
    try:
        with pytest.raises((OSError, RuntimeError)):
            train.write_file(tmp_path / name, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / name).read_bytes() == old
