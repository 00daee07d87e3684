"""What the tests of several stages share: command lines, run directories, the problem solved."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import test_all
import train
from test_all import HERE

import torch


TINY = test_all.TINY.replace(" --stop-below 0", "").replace(" --save-every 20", "").split()
WHOLE = test_all.TINY.split()  # the run of the fixture `whole`
torch.set_num_threads(1)  # more only wait on tensors this small, and last bits depend on them


def run_main(module, *arguments):
    """Run a command line in this process; return (exit code, stdout, stderr)."""
    return test_all.run_main(module, shlex.join(map(str, arguments)))


def output_of(module, *arguments):
    """Run a command line in this process, which must succeed; return what it prints."""
    code, out, err = run_main(module, *arguments)
    assert code == 0, err
    return out


def start(script, *arguments):
    """Start a command line as its own process, which a test can kill; script: "train", ..."""
    command, pipe = [sys.executable, "-m", script, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, cwd=HERE, text=True, stdout=pipe, stderr=pipe)


def wait_for(condition, seconds=300):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.01)


def assert_one_line(err, says):
    assert err.count("\n") == 1 and says in err and "Traceback" not in err, err


def assert_refused(module, *arguments, says):
    """The command line ends with one clear line and exit code 2; return what it printed before."""
    code, out, err = run_main(module, *arguments)
    assert code == 2, (arguments, code, err)
    assert_one_line(err, says)
    return out


def train_until(step, *arguments):
    """Train, with Ctrl-C at the evaluation at this step: the state is saved one step later."""
    test_all.train_until(step, shlex.join(map(str, arguments)))


def contents(folder):
    """Return {path: bytes} of all files below a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def runs_equal(*runs):
    """Return whether two runs have the same log, but for the seconds, and the same weights."""
    logs = [[row | dict(seconds=0) for row in train.read_log(run)] for run in runs]
    names, others = ([path for path in contents(run) if path.suffix == ".pt"] for run in runs)
    if {*names} != {*others} or logs[0] != logs[1]:
        return False
    for name in [path for path in names if path.stem != "state"]:
        a, b = (train.read_file(Path(run, name)) for run in runs)
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            return False
    return True
