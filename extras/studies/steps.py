"""How many steps the main command takes until its error is below 0.01: with RoPE, and with another
schedule, average or clipping, of which the one with the lowest median on three seeds is counted on
ten others.

    python -m extras.studies.steps    # prints the table
"""

import statistics

from extras.studies import markdown, share, span
from extras.studies.circuits import MAIN
from extras.studies.rows import committed


def solved(row):
    return row["mse"] < row["flags"].stop_below


def steps_of(row):
    """Return the steps of a run; one more than it was given if it does not solve the task."""
    return row["steps"] if solved(row) else row["flags"].steps + 1


def median_steps(rows):
    return statistics.median(map(steps_of, rows))


def flag_of(row):
    """Return "--ema 0.95" for a row of tail.jsonl called ema0.95_s10, and "" for base_s10."""
    name = row["name"].partition("_")[0]
    word = name.rstrip("0123456789.")
    return "" if name == "base" else f"--{word} {name.removeprefix(word)}"


def tried():
    """Return {flag: [row, ...]} of the three seeds of the choice, the lowest median first."""
    groups = {}
    for row in committed("tail/*_s1[012]"):
        groups.setdefault(flag_of(row), []).append(row)
    return dict(sorted(groups.items(), key=lambda group: median_steps(group[1])))


def seeds_of(rows):
    """Return "0-9, 40-49", the seeds of these runs."""
    groups = {}
    for place, seed in enumerate(sorted(row["flags"].seed for row in rows)):
        groups.setdefault(seed - place, []).append(seed)  # neighbours have the same difference
    return ", ".join(span(group, "{}") for group in groups.values())


def line(name, rows):
    return [name, seeds_of(rows), share(map(solved, rows)), f"{median_steps(rows):.0f}"]


def table():
    """Return a row per group of runs: how many solve the task, and the median of their steps."""
    chosen = committed("tail/*_s4?")
    lines = [line("positions appended", committed(*MAIN))]
    lines += [line("RoPE", committed("rope_muon/*"))]
    lines += [line("RoPE", committed("rope_muon/s4?"))]
    lines += [line(f"RoPE, `{flag_of(chosen[0])}`", chosen)]
    for flag, rows in tried().items():
        lines.append(line(f"RoPE, `{flag}`" if flag else "RoPE", rows))
    return markdown(["main command with", "seeds", "solved", "median of steps"], *lines)


def page():
    """Return what the text says of the medians, and of the chosen flag beside none."""
    appended, rope = median_steps(committed(*MAIN)), median_steps(committed("rope_muon/*"))
    before = {row["flags"].seed: row for row in committed("rope_muon/s4?")}
    sooner, solves, solved_before = [], 0, sum(map(solved, before.values()))
    for row in committed("tail/*_s4?"):
        solves += solved(row)
        sooner.append(solved(row) and row["steps"] < steps_of(before[row["flags"].seed]))
    return [
        f"at a median of {rope:.0f} steps instead of {appended:.0f}",
        f"ends sooner on some of ten others ({share(sooner)}), but solves {solves} of them instead "
        f"of {solved_before}",
    ]


if __name__ == "__main__":
    print(table())
