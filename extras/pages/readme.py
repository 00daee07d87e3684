"""What README.md prints from our files, a function for each of its blocks."""

import contextlib
import io

import ablate
import train
from data import chain, describe, make_batch
from extras.bench import peers
from extras.studies import depth, rows, spread

import torch


RUN = "results/default_s0"  # the run that the README follows


def block(text):
    return f"```text\n{text.strip()}\n```"


def sequence():
    """Return one sequence of the problem, as `python data.py` shows it."""
    lines = describe(chain(4, 3), make_batch(0, torch.arange(1))).splitlines()
    return block("\n".join([*lines[2:10], "  ..."]))


def training():
    """Return how the main command ended, over all its seeds."""
    found = rows.load(["results/runs/default.jsonl"])
    level = found[0]["flags"].stop_below
    steps = [row["steps"] for row in found if row["log"][-1]["confirmed"] < level]
    return f"{len(steps)} of {len(found)} seeds end below {level}, after {spread(steps)} steps."


def log():
    """Return what train.py prints: every sixth evaluation without its speed, then its summary."""
    flags, log = train.read_flags(RUN), train.read_log(RUN)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        for end in range(6, len(log) + 1, 6):
            train.print_row(flags, log[end - 2 : end])
    lines = [line.rsplit("  ", 2)[0].rstrip() for line in text.getvalue().splitlines()]
    lines += [line for line in train.summary(RUN).splitlines() if line[:4] in ("---", "solv")]
    return block("\n".join(lines))


def report():
    """Return what ablate.py prints for the run: the losses, the paths and the verdict."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        ablate.print_report(ablate.read_report(RUN))
    _, paths = text.getvalue().split("\npath ")
    table, _, verdict = paths.partition("\n\nthe paper's test")
    _, _, verdict = verdict.partition("\n---\n")
    return block(f"path {table}\n---\n{verdict}")


def seconds():
    """Return how long the three commands took, on the machine of extras/bench."""
    provenance, _, commands = peers.read()
    took = ", ".join(str(row["seconds"]) for row in commands[:3])
    where = "{threads} threads of an {hardware}".format(**provenance)
    return f"The three commands took {took} seconds, on {where}."


def one_layer():
    """Return in how many runs a single layer learned x_1."""
    runs = f"{depth.solved_of(depth.wide_rows())} runs"
    heads = "With MLPs and 2N or more heads of 32 numbers"
    return f"{heads} one layer solved D = 1 in {runs}, not with RoPE."
