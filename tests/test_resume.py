"""Stopped, killed, and gone on with: bitwise as if nothing had happened, or refused in one line."""

import os
import signal
import subprocess
import sys
from unittest import mock

from parts import config

import pytest
import torch

import train
from tests.common import (
    TINY,
    WHOLE,
    assert_refused,
    logged,
    run_main,
    start,
    train_until,
    wait_for,
    weights_equal,
)


pytestmark = pytest.mark.usefixtures("without_curves")
LONG = [*TINY, "--examples", 100, "--steps", 400, "--target", 0]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run of LONG that nobody touched."""
    run = tmp_path_factory.mktemp("long") / "run"
    code, _, err = run_main(train, *LONG, "--out", run)
    assert code == 0 and len(logged(run)) == 41, err
    return run


# ---- stopped from outside


@pytest.mark.slow
@pytest.mark.parametrize(
    "blow, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_killed_and_resumed_ends_bitwise_as_uninterrupted(blow, code, tmp_path, long):
    """And while it trains, nobody else may; what a kill leaves locked is locked no more."""
    run = tmp_path / "run"
    process = start("train", *LONG, "--out", run)
    wait_for(lambda: (run / "log.jsonl").exists() and len(logged(run)) > 3)
    assert_refused(train, *LONG, "--out", run, "--resume", says="in use by another process")
    wait_for(lambda: len(logged(run)) > 10)
    process.send_signal(blow)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert not (run / "model.pt").exists() and logged(run)[-1]["step"] < 400
    assert blow == signal.SIGKILL or out.splitlines()[-1].endswith(f"--out {run} --resume")

    assert_refused(train, *LONG, "--out", run, says="holds this run already")
    code, out, err = run_main(train, *LONG, "--out", run, "--resume")
    assert code == 0 and "resumed" in out, err
    assert logged(run) == logged(long) and weights_equal(run, long)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_few_kills_at_random_and_before_file_events():
    """The short form of what tests/kill_many.py does 200 times."""
    command = [sys.executable, "-m", "tests.kill_many", "--kills", "4", "--every", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if "kills" in line]
    assert counts[0] == counts[2] == 2 and min(counts[1], counts[3]) >= 2, done.stdout


# ---- stopped where little is written yet


@pytest.mark.parametrize("name, left", [("state.pt", 0), ("log.jsonl", 1), ("state.pt", 2)])
def test_a_run_stopped_before_its_first_row_starts_over(name, left, tmp_path, whole, monkeypatch):
    """Whichever of the first files it came to: state.pt, log.jsonl, the second state.pt."""
    real, written = config.write_file, []

    def killed(path, write):
        if path.name == name and len(written) >= left:
            raise SystemExit(137)
        if path.parent.name != "ckpt":
            written.append(path.name)
        real(path, write)

    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        left += 1  # config.json
        patched.setattr(config, "write_file", killed)
        assert run_main(train, *WHOLE, "--out", run)[0] == 137
    assert written == ["config.json", "state.pt", "log.jsonl"][:left]
    assert run_main(train, *WHOLE, "--out", run, "--resume")[0] == 0
    assert weights_equal(run, whole) and logged(run) == logged(whole)


# ---- what comes back with the state


def test_threads_come_back_with_the_state(tmp_path, whole):
    """Sums of another number of threads have other last bits."""
    run = tmp_path / "run"
    train_until(20, *WHOLE, "--out", run)
    before, used = torch.get_num_threads(), []

    def evaluate(*arguments):
        used.append(torch.get_num_threads())
        return real(*arguments)

    real = train.evaluate
    torch.set_num_threads(before + 1)
    try:
        with mock.patch.object(train, "evaluate", evaluate):
            assert run_main(train, *WHOLE, "--out", run, "--resume")[0] == 0
    finally:
        torch.set_num_threads(before)
    assert {*used} == {before} and weights_equal(run, whole)
