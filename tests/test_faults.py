"""Wrong flags and damaged files get one line that says what to do, and nothing is lost."""

import os
import subprocess
import sys

import pytest

import train
from tests.common import WHOLE, assert_refused, load_tensors


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--D -1", "--D must be at least 0"),
        ("--heads 3 --width 128", "divisible by --heads 3"),
        ("--lr nan", "--lr must be"),
        ("--K 3", "even"),
        ("--layers two", "invalid int value"),
        ("--lay 3", "unrecognized"),
        ("--seed -1", "--seed must be at least 0"),
        ("--targets 1 4", "--targets must be among 1 to 3"),
        ("--task conditional --D 4", "leave --D out"),
    ],
)
def test_a_wrong_flag_gets_one_line_and_leaves_no_folder(flags, says, tmp_path, whole):
    flags = flags.format(whole=whole).split()
    assert_refused(train, "--out", tmp_path / "run", *flags, says=says)
    assert not (tmp_path / "run").exists()


def test_a_run_that_blows_up_stops_and_keeps_the_last_good_state(tmp_path):
    flags = [*WHOLE, "--lr", 1000, "--clip", 0, "--out", tmp_path / "run"]
    assert_refused(train, *flags, says="the loss is not finite")
    state = load_tensors(tmp_path / "run" / "state.pt")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_an_import_changes_nothing_outside():
    code = """
import os, sys
before = dict(os.environ), sys.excepthook
import train, ablate, analyze, sweep, data
assert (dict(os.environ), sys.excepthook) == before
"""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
