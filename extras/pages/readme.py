"""What README.md prints from our files, a function for each of its blocks."""

import contextlib
import io
import statistics
from pathlib import Path

import torch

import ablate
import train
from data import chain, describe, make_batch
from extras.studies import claims, rows


RUN = "results/default_s0"  # the run that the README follows
LINES_A_MINUTE = 20  # at which the readers of a trial read the core
FILES = {
    "data.py": "the problem and its sequences; what all command lines share",
    "model.py": "the transformer, whose heads can be read and replaced; its optimizers",
    "train.py": "the flags, the run directory, one training loop",
    "ablate.py": "paths, ablation, the search for a circuit and its validation",
    "analyze.py": "the figures of a run",
    "sweep.py": "many runs, on all cores or a Dask cluster",
}


def block(text):
    return f"```text\n{text.strip()}\n```"


def sequence():
    """Return one sequence of the problem, as `python data.py` shows it."""
    lines = describe(chain(4, 3), make_batch(0, torch.arange(1)), 4).splitlines()
    return block("\n".join(lines[2:10]))


def span(values):
    """Return "20 (7 to 25)", the median and the range."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def training():
    """Return how long the main command took and how it ended, over all its seeds."""
    found = rows.load(["results/runs/default.jsonl"])
    solved = sum(row["log"][-1]["confirmed"] < row["flags"].stop_below for row in found)
    machines = {(row["config"]["hardware"], row["config"]["dtype"]) for row in found}
    where = " and ".join(f"an {hardware} in {dtype}" for hardware, dtype in sorted(machines))
    minutes = span([row["log"][-1]["seconds"] / 60 for row in found])
    steps = span([row["steps"] for row in found])
    level = found[0]["flags"].stop_below
    return (
        f"{solved} of {len(found)} seeds end below {level}, after a median of {steps} steps and "
        f"{minutes} minutes on one\ncore of {where}. The first command prints (every third line of "
        "seed 0 is shown):"
    )


def log():
    """Return what train.py prints for the run, every third line."""
    flags, log = train.read_flags(RUN), train.read_log(RUN)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        for end in range(3, len(log) + 1, 3):
            train.print_row(flags, log[end - 2 : end])
    lines = [line.rsplit("  ", 2)[0].rstrip() for line in text.getvalue().splitlines()]
    return block("\n".join(lines))


def report():
    """Return what ablate.py prints for the run."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        ablate.print_report(ablate.read_report(RUN))
    return block(text.getvalue())


def files():
    """Return a row of a table for each script, with its lines and the minutes to read them."""
    cells = []
    for name, text in FILES.items():
        lines = len(Path(name).read_text(encoding="utf-8").splitlines())
        cells.append(f"| `{name}` | {lines} | {lines / LINES_A_MINUTE:.0f} | {text} |")
    return "\n".join(cells)


def what_came_out():
    return claims.short_table()
