"""What the tests of several stages share: command lines, run directories, the problem solved."""

import io
import json
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock


HERE = Path(__file__).parents[1]
TINY = (
    "--layers 2 --heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --warmup 5 "
    "--device cpu"
).split()
WHOLE = [*TINY, "--stop-below", "0", "--save-every", "20"]  # the run of the fixture `whole`


# ---- command lines


def run_main(module, *arguments):
    """Run a command line in this process; return (exit code, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = [Path(module.__file__).name, *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err):
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def start(script, *arguments, **options):
    """Start a command line as its own process, which a test can kill; script: "train", ..."""
    command, pipe = [sys.executable, "-m", script, *map(str, arguments)], subprocess.PIPE
    options = dict(cwd=HERE, text=True, stdout=pipe, stderr=pipe) | options
    return subprocess.Popen(command, **options)


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.01)


def assert_one_line(err, says):
    assert err.count("\n") == 1 and says in err and "Traceback" not in err, err


def assert_refused(module, *arguments, says, code=2):
    """The command line ends with one clear line and this exit code."""
    ended, _, err = run_main(module, *arguments)
    assert ended == code, (arguments, ended, err)
    assert_one_line(err, says)


# ---- run directories


def train_until(step, *arguments):
    """Train, with Ctrl-C at the evaluation at this step: the state is saved one step later."""
    import train  # here, so that the tests of llm start without torch

    flags, stopped = train.parse_flags([*map(str, arguments)]), []

    def interrupt(flags, rows):
        if rows[-1]["step"] == step:
            stopped.append(2)

    with mock.patch.object(train, "print_row", interrupt):
        assert not train.run_once(flags, stopped)


def contents(folder):
    """Return {path: bytes} of all files below a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def logged(run):
    """Return the rows of log.jsonl without the seconds, which differ from run to run."""
    rows = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights_equal(run_a, run_b, name="model.pt"):
    """Return whether two runs ended with the same weights, bit for bit."""
    import torch

    a, b = (torch.load(Path(run, name), weights_only=True) for run in (run_a, run_b))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def load_tensors(path):
    import torch

    return torch.load(path, weights_only=True)


def runs_equal(run_a, run_b):
    """Return whether two runs have the same log, weights and checkpoints, bit for bit."""
    names = [path for path in contents(run_a) if path.suffix == ".pt" and path.stem != "state"]
    same_log = logged(run_a) == logged(run_b)
    return same_log and all(weights_equal(run_a, run_b, name) for name in names)


# ---- the problem, solved without our code


def bits_behind(numbers):
    """Return the 23 random bits from which normal numbers were made: they are the same on every
    machine, unlike the last bit of the inverse error function."""
    import torch

    share = (torch.erf(numbers.double() / 2**0.5) + 1) / 2
    return (share * 2**23 - 0.5).round().long()


def solve(inputs, N, D, K):
    """Return the right targets (N, D*K) of one sequence (T, K or more): follow each query through
    the pairs by comparing symbols."""
    import torch

    tokens = [tuple(token[:K].tolist()) for token in inputs]
    pairs, queries = tokens[:-N], tokens[-N:]
    follows = dict(zip(pairs[0::2], pairs[1::2], strict=True))
    steps = []
    for _ in range(D):
        queries = [follows[symbol] for symbol in queries]
        steps.append(torch.tensor(queries))
    return torch.cat(steps, -1)
