"""A run that was stopped or killed and then resumed ends with the same bits as one that was not."""

import os
import signal

import pytest
import torch

import train
from tests import kill_many
from tests.common import WHOLE, assert_refused, run_main, runs_equal, start, train_until, wait_for


LONG = [*WHOLE, "--examples", 100, "--steps", 400]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run of LONG without any interruption."""
    run = tmp_path_factory.mktemp("long") / "run"
    code, _, err = run_main(train, *LONG, "--out", run)
    assert code == 0 and len(train.read_log(run)) == 41, err
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "blow, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_killed_and_resumed_ends_bitwise_as_uninterrupted(blow, code, tmp_path, long):
    """While it trains, no other process may; a kill leaves nothing locked."""
    run = tmp_path / "run"
    process = start("train", *LONG, "--out", run)
    wait_for(lambda: (run / "log.jsonl").exists() and len(train.read_log(run)) > 3)
    assert_refused(train, *LONG, "--out", run, "--resume", says="in use by another process")
    wait_for(lambda: len(train.read_log(run)) > 10)
    process.send_signal(blow)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert not (run / "model.pt").exists() and train.read_log(run)[-1]["step"] < 400
    assert blow == signal.SIGKILL or out.splitlines()[-1].endswith(f"--out {run} --resume")

    assert_refused(train, *LONG, "--out", run, says="holds this run already")
    code, out, err = run_main(train, *LONG, "--out", run, "--resume")
    assert code == 0 and "resumed" in out, err
    assert runs_equal(run, long)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_before_each_write():
    """config.json, 3 checkpoints, 5 evaluations (state.pt, then log.jsonl), model.pt."""
    assert kill_many.kill_before_each_write() == 15


def test_threads_are_restored_with_the_state(tmp_path, whole):
    """Sums over another number of threads differ in the last bits."""
    run = tmp_path / "run"
    train_until(20, *WHOLE, "--out", run)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert run_main(train, *WHOLE, "--out", run, "--resume")[0] == 0
        assert torch.get_num_threads() == before and runs_equal(run, whole)
    finally:
        torch.set_num_threads(before)
