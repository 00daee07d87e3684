"""The tables of README.md, from the measurements of peers.py."""

from pathlib import Path

import train
from extras.studies import markdown


def peers():
    """Return the provenance of peers.jsonl, and its other rows."""
    return train.read_file(Path(__file__).with_name("peers.jsonl"))


def steps_table():
    """Return what was measured where, and a row for each model and dtype."""
    provenance, *rows = peers()
    names = ["setting", "model", "ms", "ours_faster_by"]
    lines = [[row[name] for name in names] for row in rows if "model" in row]
    table = markdown([name.replace("_", " ") for name in names], *lines)
    return ", ".join(f"{name} {value}" for name, value in provenance.items()) + f"\n\n{table}"


def commands_table():
    """Return a row for each command of the README, and their sum."""
    lines = [[*row.values()] for row in peers() if "command" in row]
    _, seconds, steps = zip(*lines, strict=True)
    head = "command", "seconds", "steps of GPT2Model"
    return markdown(head, *lines, ["all four", sum(seconds), sum(steps)])
