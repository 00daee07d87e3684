"""How many layers each symbol takes, with a mask and without one (Sections 5 and 7); and what was
predicted of runs with long chains before them.

    python -m extras.studies.layers    # prints the predictions beside the medians
"""

import statistics
from fnmatch import fnmatch

from extras.studies import RESULTS, markdown, share
from extras.studies.ahead import reads_twice
from extras.studies.rows import all_runs, committed, once, settings_text
from extras.studies.theory import causal_depth, unmasked_depth
from train import parse_flags, read_file


PREDICTED = RESULTS / "runs/ahead_predicted.jsonl"
BASELINE = 0.66  # the naive guess of a row that has none: the median of what was known before it
FEWEST = 3  # a group of fewer runs stands in no table


def knows(row, k):
    return f"x_{k}" in row["known"]


def obeys(row):
    """Return whether a model that knows all symbols that its layers allow by content knows no
    other; None if it does not know all these, or is not asked for another."""
    flags = row["flags"]
    allowed = [k for k in range(1, flags.D + 1) if causal_depth(k) <= flags.layers]
    if len(allowed) == flags.D or not all(knows(row, k) for k in allowed):
        return None
    return len(row["known"]) == len(allowed)


def uses_no_mask(row):
    """Return whether a model without a mask knows a symbol that takes more layers with one; None if
    its layers allow no such symbol."""
    layers, ks = row["flags"].layers, range(1, row["flags"].D + 1)
    found = [knows(row, k) for k in ks if unmasked_depth(k) <= layers < causal_depth(k)]
    return any(found) if found else None


def long_chains():
    """Return the runs with a mask that ask for five symbols or more of four chains."""
    wanted = dict(task="chain", targets="all", causal=True, init="", N=4, width=128).items()
    rows = [row for row in all_runs() if wanted <= vars(row["flags"]).items()]
    return once(row for row in rows if row["flags"].D >= 5)


def layers_table():
    """Return how many runs of long chains know each symbol at their end, by layers; bold where the
    flow of information has just become deep enough."""
    groups, lines = {}, []
    for row in long_chains():
        flags = row["flags"]
        groups.setdefault((flags.D, flags.layers, flags.heads, flags.steps), []).append(row)
    for (D, layers, heads, steps), rows in sorted(groups.items()):
        cells = []
        for k in range(1, D + 1):
            known = sum(knows(row, k) for row in rows)
            cells.append(f"**{known}**" if causal_depth(k) == layers else f"{known}")
        if len(rows) >= FEWEST:
            shape = f"{layers} x {heads}"
            lines.append([D, shape, f"{steps:,}", len(rows), ", ".join(cells)])
    return markdown(["D", "layers x heads", "steps", "runs", "know x_1, x_2, ..."], *lines)


# ---- the runs that were predicted: those of D = 7, with and without a mask, and with RoPE


def median_of(row):
    """Return the median of the runs of a prediction; None if there are too few."""
    settings = settings_text(parse_flags(row["flags"].split()))
    runs = [run for run in committed("*") if run["settings"] == settings]
    runs = runs[: row["n"]]  # those of the first seeds
    if len(runs) < FEWEST:
        return None
    if row["of"] == "count":  # of circuits that read ahead twice
        return sum(reads_twice(run) for run in runs if run["circuit"])
    if row["loss"].startswith("x_"):
        return statistics.median(run["log"][-1][row["loss"]] for run in runs)
    return statistics.median(run["steps"] for run in runs)


def compared(rows, median_of):
    """Return (table, inside, near): the medians beside what was predicted of them; whether each
    lies inside, and whether it lies as near to the naive guess. Rows without runs count in
    neither."""
    lines, inside, near = [], [], []
    for row in rows:
        low, high, median = row["low"], row["high"], median_of(row)
        said = "not run"
        if median is not None:
            inside.append(low <= median <= high)
            near.append(abs(median - row.get("naive", BASELINE)) <= (high - low) / 2)
            said = f"{median:.3f}, {'inside' if inside[-1] else 'outside'}"
        lines.append([row["group"], row.get("flags", ""), row["loss"], f"{low}-{high}", said])
    return markdown(["runs", "flags", "loss", "predicted", "median"], *lines), inside, near


def comparison(rows, median_of):
    """Return the table of compared() and its two shares, as text."""
    table, inside, near = compared(rows, median_of)
    return f"{table}\n\ninside: {share(inside)}; as near to the naive guess: {share(near)}"


def outcome(prediction, rows, value_of, know):
    """Return what became of a prediction on the measured rows whose names match: a number of runs,
    or the median of those that know their last symbol, of all if none does; None if fewer were
    measured than it is about, or none has the value (None)."""
    rows = [row for row in rows if fnmatch(row["run"], prediction["runs"])]
    if len(rows) < prediction["n"]:
        return None
    if prediction["of"] == "count":
        return sum(value_of(row, prediction["loss"]) for row in rows)
    known = [row for row in rows if know(row)] or rows
    values = [value_of(row, prediction["loss"]) for row in known]
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


if __name__ == "__main__":
    print(comparison(read_file(PREDICTED), median_of))
