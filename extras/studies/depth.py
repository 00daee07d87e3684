"""How many layers and heads the problem needs (Sections 5, 7 and 10.1): trained models beside what
attention by shared content allows."""

from extras.studies import markdown
from extras.studies.rows import all_runs, knows, same_run
from extras.studies.theory import causal_depth


SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
FEWEST = 3  # a group of fewer runs stands in no table
WANTED = dict(task="chain", targets="all", causal=True, init="", N=4, width=128)


def solves(row):
    """Return whether a run solves the last symbol, and was asked for it."""
    return row["losses"].get(f"x_{row['flags'].D}", 1) < SOLVED


def layers_table():
    """Return how many runs of long chains know each symbol at their end, by layers; bold where the
    flow of information has just become deep enough. Repeats elsewhere are no further runs."""
    runs, groups, lines = {}, {}, []
    for row in all_runs():
        if row["flags"].D >= 5 and WANTED.items() <= vars(row["flags"]).items():
            runs.setdefault(same_run(row), row)
    for row in runs.values():
        flags = row["flags"]
        groups.setdefault((flags.D, flags.layers, flags.heads, flags.steps), []).append(row)
    for (D, layers, heads, steps), rows in sorted(groups.items()):
        cells = []
        for k in range(1, D + 1):
            known = sum(knows(row, k) for row in rows)
            cells.append(f"**{known}**" if causal_depth(k) == layers else f"{known}")
        if len(rows) >= FEWEST:
            lines.append([D, f"{layers} x {heads}", f"{steps:,}", len(rows), ", ".join(cells)])
    return markdown(["D", "layers x heads", "steps", "runs", "know x_1, x_2, ..."], *lines)
