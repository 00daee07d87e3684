"""Which part of the implicit curriculum is needed: runs with different target symbols."""

import math

from extras.studies import markdown, spread
from extras.studies.rows import all_runs, committed


def after_a_gap(row):
    """Return the names of the symbols of chains that a run is asked for, but not for all before
    them; none if it starts from the weights of another run."""
    targets, flags = row["task"].targets, row["flags"]
    if flags.task != "chain" or flags.init:
        return []
    return [f"x_{k}" for k in targets if {*range(1, k)} - {*targets}]


def learned_if_asked_for_all(row):
    """Return whether all runs of these settings and seed that are asked for all symbols, of as long
    a chain or a longer one, learn these in as many steps as this one has; None if there is none."""
    steps, names, settings = [], after_a_gap(row), same(row)
    for other in all_runs():
        flags = other["flags"]
        for_all = flags.targets == "all" and flags.D >= row["flags"].D and not flags.init
        if for_all and same(other) == settings:
            steps += [other["learned"][name] or math.inf for name in names]
    return max(steps) <= row["flags"].steps if steps else None


def same(row):
    """Return the settings but for D, targets and steps, and the seed."""
    names = "D=", "targets=", "steps="
    return [text for text in row["settings"] if not text.startswith(names)], row["flags"].seed


def table():
    """Return a row per set of targets, of fresh weights and D = 3: how many know each symbol at
    their end, and when they learned it."""
    groups, lines = {}, []
    for row in committed("curriculum/*"):
        if row["flags"].D == 3 and not row["flags"].init:
            groups.setdefault(tuple(row["task"].targets), []).append(row)
    for targets, group in groups.items():
        cells = []
        for k in (1, 2, 3):
            known = [row["learned"][f"x_{k}"] for row in group if f"x_{k}" in row["known"]]
            text = f"{len(known)}: {spread(known)}" if known else "0"
            cells.append(text if k in targets else "")
        lines.append([", ".join(f"x_{k}" for k in targets), len(group), *cells])
    return markdown(["asked for", "runs", "x_1", "x_2", "x_3"], *lines)
