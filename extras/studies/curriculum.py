"""Which part of the implicit curriculum is needed: runs with different target symbols.

python -m extras.studies.curriculum results/runs/curriculum.jsonl --out results/figures
"""

import collections
import functools
import itertools
import math

import analyze
from extras import studies
from extras.studies.rows import all_runs, committed


def by_targets(rows):
    """Return {(1, 3): [row, ...]}, the runs with D = 3 and fresh weights by what they ask for."""
    groups = {}
    for row in rows:
        if row["flags"].D == 3 and not row["flags"].init:
            groups.setdefault(tuple(row["task"].targets), []).append(row)
    return groups


def names_of(targets):
    return ", ".join(f"x_{k}" for k in targets)


def table():
    """Return a row per set of targets, of fresh weights and D = 3: how many know each symbol at
    their end, and when they learned it."""
    lines = []
    for targets, group in by_targets(committed("curriculum/*")).items():
        cells = []
        for k in (1, 2, 3):
            known = [row["learned"][f"x_{k}"] for row in group if f"x_{k}" in row["known"]]
            text = f"{len(known)}: {studies.spread(known)}" if known else "0"
            cells.append(text if k in targets else "")
        lines.append([names_of(targets), len(group), *cells])
    return studies.markdown(["asked for", "runs", "x_1", "x_2", "x_3"], *lines)


def after_a_gap(row):
    """Return the names of the symbols that a run is asked for, but not for all before them."""
    targets = row["task"].targets
    return [f"x_{k}" for k in targets if {*range(1, k)} - {*targets}]


def learned_if_asked_for_all(row):
    """Return whether all runs of these settings and seed that are asked for all symbols, of as long
    a chain or a longer one, learn these in as many steps as this one has; None if there is none."""
    steps = []
    for D, learned in asked_for_all()[same(row)]:
        if D >= row["flags"].D:
            steps += [learned[name] or math.inf for name in after_a_gap(row)]
    return max(steps) <= row["flags"].steps if steps else None


@functools.cache
def asked_for_all():
    """Return {what same returns: [(D, learned), ...]} of the runs that ask for all symbols."""
    found = collections.defaultdict(list)
    for row in all_runs():
        if row["flags"].targets == "all" and not row["flags"].init:
            found[same(row)].append((row["flags"].D, row["learned"]))
    return found


def same(row):
    """Return the settings but for D, targets and steps, and the seed."""
    others = [
        text for text in row["settings"] if text.split("=")[0] not in ("D", "targets", "steps")
    ]
    return tuple(others), row["flags"].seed


def draw(rows, out):
    """Draw the last loss of each symbol that a run with D = 3 was asked for, by what it was."""
    groups, (figure, [axes]) = by_targets(rows), analyze.panels(1, 1, 8.2, 3.6)
    for x, (targets, group) in enumerate(groups.items()):
        for k, (number, row) in itertools.product(targets, enumerate(group)):
            place = x + 0.24 * (k - 2) + 0.2 * ((number + 0.5) / len(group) - 0.5)
            style = dict(color=analyze.symbol_color(k), ms=5, mec="white", mew=0.5)
            axes.plot(place, row["losses"][f"x_{k}"], "o", **style)
    for k in (1, 2, 3):
        axes.plot([], [], "o", color=analyze.symbol_color(k), label=f"x_{k}")
    axes.axhline(0.75, color=analyze.GRAY, lw=1, ls="--", zorder=0)
    axes.text(len(groups) - 0.5, 0.77, "averages the four candidates", color="gray", ha="right")
    axes.vlines([x + 0.5 for x in range(len(groups) - 1)], 0, 1, analyze.PALE, zorder=0)
    labels = [f"{names_of(targets)}\n{len(group)} runs" for targets, group in groups.items()]
    axes.set_xticks(range(len(groups)), labels)
    axes.set(ylim=(-0.04, 1), ylabel="last loss of a symbol", xlabel="what is asked for")
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    title = "A symbol is learned only if all symbols before it are asked for"
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    analyze.save_figure(figure, out / "curriculum.png")
    return out / "curriculum.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, draw)
