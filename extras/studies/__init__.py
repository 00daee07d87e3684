"""Questions put to many runs, one script each: it prints Markdown and draws into --out.

    python -m extras.studies.order results/runs/default.jsonl out/L12_H1_D3_s*

A study takes run directories and files of rows (rows.py) alike.
"""

import statistics
from operator import itemgetter
from pathlib import Path

from data import command_line
from train import read_file


RESULTS = Path("results")


def command(script, description, tables, draw=None):
    """Run the command line of a study: tables(rows) returns the text to print, draw(rows, out)
    draws a figure into the folder out and returns what is printed last, its path."""
    from extras.studies import rows  # here, because rows is a command too

    p = command_line(f"python -m extras.studies.{Path(script).stem}", description)
    p.add_argument("run", type=Path, nargs="+", help="run directories, or files of rows")
    if draw:
        p.add_argument("--out", type=Path, default="out", help="the folder of the figure")
    args = p.parse_args()
    found = rows.load(args.run)
    print(tables(found))
    if draw:
        print(draw(found, args.out))


def rows_by(file, *names):
    """Return {these fields of a row: the row} of a file, {} without it, for others to be added."""
    return {itemgetter(*names)(row): row for row in read_file(file, [])}


# ---- the tables of sweep.py; rows.py has the runs


def committed(*patterns):
    """Return the folders below results/ that hold the table of a sweep and match a pattern."""
    tables = [table for name in patterns for table in sorted(RESULTS.glob(f"{name}/results.jsonl"))]
    return [table.parent for table in tables]


def load_rows(folders):
    """Return the rows of the tables of these sweeps."""
    rows = []
    for folder in folders:
        rows += read_file(Path(folder, "results.jsonl"))
    return rows


# ---- text


def markdown(head, *lines):
    """Return a table of rows of cells."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *lines)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def spread(values, form="{:.0f}"):
    """Return "437 (359-674)": the median and the range; of two values both."""
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


def steps_text(steps):
    """Return "347, 419, never", where None stands for never."""
    return ", ".join("never" if step is None else f"{step:.0f}" for step in steps)
