"""How many layers and heads the problem needs (Sections 5, 7 and 10.1): trained models beside what
attention by shared content allows."""

from extras.studies import markdown, share
from extras.studies.rows import all_runs, knows, same_run
from extras.studies.theory import causal_depth


SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
FEWEST = 3  # a group of fewer runs stands in no table
LONG = dict(task="chain", targets="all", causal=True, init="", N=4, width=128)
ONE_LAYER = dict(layers=1, D=1, mlp=True, positions="appended", head_size=32)


def solves(row):
    """Return whether a run solves the last symbol, and was asked for it."""
    return row["losses"].get(f"x_{row['flags'].D}", 1) < SOLVED


def groups_of(wanted, *names):
    """Return [((D, ...), [row, ...]), ...], sorted: the runs with the wanted flags, repeats once,
    in groups by these flags or fields of their rows."""
    groups, runs = {}, {}
    for row in all_runs():
        runs.setdefault(same_run(row), row)
    for row in runs.values():
        values = row | vars(row["flags"])
        if wanted.items() <= values.items():
            groups.setdefault(tuple(values[name] for name in names), []).append(row)
    return sorted((key, rows) for key, rows in groups.items() if len(rows) >= FEWEST)


def layers_table():
    """Return how many runs of long chains know each symbol at their end, by layers; bold where the
    flow of information has just become deep enough."""
    lines = []
    for (D, layers, heads, steps), rows in groups_of(LONG, "D", "layers", "heads", "steps"):
        cells = []
        for k in range(1, D + 1):
            known = sum(knows(row, k) for row in rows)
            cells.append(f"**{known}**" if causal_depth(k) == layers else f"{known}")
        if D >= 5:
            lines.append([D, f"{layers} x {heads}", f"{steps:,}", len(rows), ", ".join(cells)])
    return markdown(["D", "layers x heads", "steps", "runs", "know x_1, x_2, ..."], *lines)


def heads_table():
    """Return how many runs of one layer and one step solve x_1, by places and heads."""
    lines = {}
    names = "places", "N", "in_stages", "steps", "heads"
    for (places, N, in_stages, steps, heads), rows in groups_of(ONE_LAYER, *names):
        line = places, N, "in stages" if in_stages else "fresh", f"{steps:,}"
        lines.setdefault(line, []).append(f"{heads}: {share(map(solves, rows))}")
    lines = [[*line, ", ".join(cells)] for line, cells in lines.items()]
    return markdown(["places", "N", "weights", "steps", "heads: runs that solve x_1"], *lines)
