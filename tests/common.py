"""What the tests of several stages share: command lines, run directories."""

import shlex
from pathlib import Path

import test_all
import train

import torch


HERE = Path(__file__).parent.parent
TINY = test_all.TINY.split()  # two layers with two heads, 40 steps with 5 evaluations
torch.set_num_threads(1)  # more only wait on tensors this small, and last bits depend on them


def run_main(module, *arguments):
    """Run a command line in this process; return (exit code, stdout, stderr)."""
    return test_all.run_main(module, shlex.join(map(str, arguments)))


def output_of(module, *arguments):
    """Run a command line in this process, which must succeed; return what it prints."""
    code, out, err = run_main(module, *arguments)
    assert code == 0, err
    return out


def assert_refused(module, *arguments, says):
    """The command line ends with one line and exit code 2; return this line."""
    code, _, err = run_main(module, *arguments)
    assert code == 2 and says in err and err.count("\n") == 1, err
    return err


def random_model(*words):
    """Return (model, task, flags) of a command line: a transformer with random weights, whose
    attention is far from uniform."""
    flags = train.parse_flags([*TINY, *words])
    torch.manual_seed(0)
    model = train.build(flags).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model, train.task_of(flags), flags


def outcome_of(run):
    """Return the log of a run, without the seconds, and the bytes of all its weights."""
    rows = [dict(row, seconds=0) for row in train.read_log(run)]
    weights = (path for path in sorted(run.rglob("*.pt")) if path.stem != "state")
    return rows, [(path.name, path.read_bytes()) for path in weights]
