"""What the tests of several stages share: command lines run here or as processes, and refusals."""

import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock


HERE = Path(__file__).parents[1]
TINY = (
    "--layers 2 --heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --warmup 5 "
    "--device cpu"
).split()
WHOLE = [*TINY, "--target", "0", "--save-every", "20"]  # of the run that tests share


# ---- command lines


def run_main(module, *arguments):
    """(exit code, stdout, stderr) of a command line, run in this process: torch loads slowly."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = [Path(module.__file__).name, *map(str, arguments)]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", argv),
    ):
        try:
            module.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def start(script, *arguments, **more):
    """The command line as a process of its own, for tests that kill it; script: train, pages.index,
    ..."""
    command, pipe = [sys.executable, "-m", script, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, **dict(cwd=HERE) | more)


def wait_for(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited too long"
        time.sleep(0.01)


def assert_one_line(err, says):
    assert err.count("\n") == 1 and says in err and "Traceback" not in err, err


def assert_refused(module, *arguments, says, code=2):
    """One clear line and this exit code."""
    found, _, err = run_main(module, *arguments)
    assert found == code, (arguments, found, err)
    assert_one_line(err, says)


# ---- run directories


def train_until(step, *arguments):
    """Train, and stop as after Ctrl-C at the evaluation at this step."""
    import train  # here, so that the tests of llm start without torch

    flags, stopped = train.parse_flags([*map(str, arguments)]), []

    def stop(row, *_):
        if row["step"] == step:
            stopped.append(2)

    with mock.patch.object(train, "print_row", stop):
        assert not train.run_once(flags, stopped)


def contents(folder):
    """{path: bytes} of all files below a folder."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def logged(run):
    """The rows of log.jsonl but for the seconds, which differ from run to run."""
    rows = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def weights_equal(run_a, run_b, name="model.pt"):
    """Whether two runs ended in the same weights, bit for bit."""
    import torch

    a, b = (torch.load(Path(run, name), weights_only=True) for run in (run_a, run_b))
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---- the problem, solved without our code


def bits_behind(numbers):
    """The 23 random bits from which a normal number was made: unlike the last bit of the inverse
    error function, the same on every machine."""
    import torch

    share = (torch.erf(numbers.double() / 2**0.5) + 1) / 2
    return (share * 2**23 - 0.5).round().long()


def solve(inputs, N, D, K):
    """What the targets must be, found the slow and obvious way: follow each query through the pairs
    by comparing symbols. inputs (T, K or more) of one sequence -> (N, D*K)."""
    import torch

    tokens = [tuple(token[:K].tolist()) for token in inputs]
    pairs, queries = tokens[:-N], tokens[-N:]
    follows = dict(zip(pairs[0::2], pairs[1::2], strict=True))
    answers = []
    for symbol in queries:
        chain = []
        for _ in range(D):
            symbol = follows[symbol]
            chain.extend(symbol)
        answers.append(chain)
    return torch.tensor(answers)
