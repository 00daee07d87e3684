"""Kill a tiny training run just before each of its writes, resume it, and compare how it ends with
a run that was never killed. It needs a system with fork.

    python -m tests.kill_many
"""

import itertools
import os
import signal
import tempfile
from pathlib import Path

import torch

import train
from tests.common import WHOLE, run_main, runs_equal


def train_in_child(run, killed_at=None):
    """Train in a forked process, which kills itself before its rename number `killed_at` in the run
    directory. Return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    renames = itertools.count()

    def kill(path, target):
        if next(renames) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        os.replace(path, target)

    Path.replace = kill
    code, _, err = run_main(train, *WHOLE, "--out", run, "--resume")
    os.write(2, err.encode())
    os._exit(code)


def kill_before_each_write():
    """Return the number of writes; AssertionError if a run cannot be resumed or ends otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        run_main(train, *WHOLE, "--out", whole)
        for number in itertools.count():
            run = Path(folder, str(number))
            if train_in_child(run, number) == 0:
                return number  # there was no such write
            assert train_in_child(run) == 0, f"killed before write {number}, it cannot be resumed"
            assert runs_equal(run, whole), f"killed before write {number}, it ends otherwise"


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process has no other threads
    print(f"killed before each of {kill_before_each_write()} writes: all runs ended as without")
