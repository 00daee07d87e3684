"""What is counted and measured over many runs. What stands on the pages is printed by

python -m extras.studies results/depth.md
"""

import statistics
from pathlib import Path

from train import read_file


RESULTS = Path("results")


def rows_by(file, name):
    """Return {this field of a row: the row} of a file, {} without it, for others to be added."""
    return {row[name]: row for row in read_file(file, [])}


def grouped(rows, *names):
    """Return {(value, ...) of these fields: [row, ...]}, in the order of the rows."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


# ---- text


def share(answers):
    """Return "3 of 5", how many of these are true."""
    answers = [*answers]
    return f"{sum(answers)} of {len(answers)}"


def markdown(head, *lines):
    """Return a table of rows of cells."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *lines)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def spread(values, form="{:.0f}"):
    """Return "437 (359-674)": the median and the range; of two values both, nothing of none."""
    if not values:
        return ""
    low, median, high = map(form.format, (min(values), statistics.median(values), max(values)))
    if len(values) == 2:
        return f"{low} and {high}"
    return median + f" ({low}-{high})" * (len(values) > 2)


def span(values, form="{:.2f}"):
    """Return "0.28-0.31", the range of numbers; one if all look the same, and nothing of none."""
    if not values:
        return ""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}-{high}"
