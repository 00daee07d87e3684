"""The tables of README.md, from the measurements of peers.py and the rows of committed runs."""

from pathlib import Path

import train
from extras.studies import markdown, spread
from extras.studies.rows import committed, group_by_settings


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


def minutes_table():
    """Return the steps and minutes of all seeds of the main command and variants, by machine."""
    lines = []
    for names in ("default/*",), ("qk_std0.02/*",), ("last/*", "again/s*", "float32/*"):
        machines = {}
        for row in committed(*names):
            machine = (row["config"][name] for name in ("hardware", "threads", "dtype"))
            machines.setdefault("{}, threads: {}, {}".format(*machine), []).append(row)
        for machine, rows in machines.items():
            minutes = [row["log"][-1]["seconds"] / 60 for row in rows]
            ends = spread([row["steps"] for row in rows])
            [settings] = group_by_settings(rows)
            lines.append([settings, machine, len(rows), ends, spread(minutes)])
    return markdown(["settings", "machine", "seeds", "ends at step", "minutes"], *lines)
