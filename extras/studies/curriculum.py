"""Which part of the implicit curriculum is needed: runs with different target symbols.

python -m extras.studies.curriculum results/runs/curriculum.jsonl --out results/figures
"""

import itertools
import math

import analyze
from extras import studies
from extras.studies import order
from extras.studies.rows import committed, once


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


def by_targets(rows):
    """Return {(1, 3): [row, ...]}, the runs with D = 3 and fresh weights by what they ask for."""
    groups = {}
    for row in rows:
        if row["flags"].D == 3 and not row["flags"].init:
            groups.setdefault(tuple(row["task"].targets), []).append(row)
    return groups


def names_of(targets):
    return ", ".join(f"x_{k}" for k in targets)


def without_x_1(rows):
    """Return whether each run that starts afresh and is not asked for x_1 knows a later symbol, if
    the run of the same D and seed that is asked for all does."""
    answers, controls = [], {}
    for row in rows:
        if order.asks_all(row["flags"]):
            controls[row["flags"].D, row["flags"].seed] = {*row["known"]} - {"x_1"}
    for row in rows:
        flags = row["flags"]
        learnable = controls.get((flags.D, flags.seed), set()) & {*row["learned"]}
        if not flags.init and "x_1" not in row["learned"] and learnable:
            answers.append(bool(row["known"]))
    return answers


def learn_x_3(pattern):
    """Return whether x_3 is known at the end, for each of these runs of curriculum.jsonl."""
    return ["x_3" in row["known"] for row in committed(f"curriculum/D3_{pattern}")]


def claim():
    """Return what the table decides."""
    whole, no_x_2 = learn_x_3("targets1-2-3_*"), learn_x_3("targets1-3_*")
    alone, turns = learn_x_3("x1-2_then_x3_*"), learn_x_3("x1_then_x1-2_then_all_*")
    return [
        f"once C is asked for ({studies.share(no_x_2)}, instead of {sum(whole)})",
        f"Without B nothing is learned ({studies.share(without_x_1(committed('curriculum/*')))})",
        f"asked for all three, did ({studies.share(alone)}, and {studies.share(turns)})",
    ]


def draw(rows, out):
    """Draw the last loss of each symbol that a run with D = 3 was asked for, by what it was."""
    groups, (figure, [axes]) = by_targets(rows), analyze.panels(1, 1, 8.2, 3.6)
    for x, (targets, group) in enumerate(groups.items()):
        for k, (number, row) in itertools.product(targets, enumerate(group)):
            place = x + 0.24 * (k - 2) + 0.2 * ((number + 0.5) / len(group) - 0.5)
            style = dict(color=analyze.symbol_color(k), ms=5, mec="white", mew=0.5)
            axes.plot(place, row["log"][-1][f"x_{k}"], "o", **style)
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


# ---- conditional retrieval: x_1, x_2, x_3 are called x, y, z


def conditional_claim():
    """Return in which order the symbols are learned, and what runs with fewer targets learn: of
    those in whose steps all repeats of their seed, asked for all three, learn what they ask for of
    x and y, or z."""
    rows = committed("conditional/*", "again/cond*")
    whole = [row for row in rows if len(row["learned"]) == 3]
    steps = [[*row["learned"].values()] for row in once(whole)]
    known = [all_three for all_three in steps if None not in all_three]
    answers = []
    for row in (row for row in rows if len(row["learned"]) < 3):
        first = next(iter(row["learned"]))
        controls = [other["learned"][first] for other in whole if same_seed(row, other)]
        if controls and max(step or math.inf for step in controls) <= row["steps"]:
            answers.append(bool(row["known"]))
    in_order = [z >= max(x, y) for x, y, z in known]
    return [
        f"but z comes last** ({studies.share(in_order)} runs that learn it, of {len(steps)})",
        f"asked for, nothing is learned ({studies.share(answers)})",
    ]


def same_seed(row, other):
    return row["flags"].seed == other["flags"].seed and row["flags"].layers == other["flags"].layers


if __name__ == "__main__":
    studies.command(__file__, __doc__, draw)
