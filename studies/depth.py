"""What each depth can learn, beside the law (Section 7.2, and floor(log2 k) + 2).

python -m studies.depth --preset law --out out/law    # trains the runs, as sweep.py does
python -m studies.depth out/law                       # prints the counts, draws law.png
"""

import collections
import math
import statistics
import sys

from parts import config
from parts.config import Flags
from parts.theory import DEPTH_LAWS

import matplotlib.pyplot as plt

import sweep
from studies import command, in_order


HELD = f"{sweep.PLAIN} --D 8 --circuit minimal --steps 400"
sweep.PRESETS["law"] = [
    (sweep.WITH_IC, range(1, 6), 3),
    (f"{sweep.LAPTOP} --D 5 --steps 2000 --no-causal --rotary qk", range(2, 5), 2),
    (f"{HELD} --heads 1", range(1, 6), 2),
    (f"{HELD} --heads 2 --no-causal", range(1, 5), 2),
]


def rows_of(folder):
    """The runs of a sweep of which the law speaks."""
    table = sweep.read_table(folder / "results.jsonl").values()
    wanted = [row for row in table if row["task"] == "chain" and not row["error"]]
    return [row for row in wanted if not (row["targets"] or row["init"])]


def symbols_in(rows):
    """The k of x_1, x_2, ..., of all that any of the runs was asked for."""
    return range(1, 1 + max([row["D"] for row in rows], default=0))


def learned(row, k):
    """Whether a run ended with x_k learned."""
    return row.get(f"x_{k}") is not None and row[f"x_{k}"] < Flags(**row).problem.learned


def least_depths(rows, k):
    """The least number of layers in which each seed learned x_k, a list; infinite where in none of
    those tried."""
    depths = {}
    for row in rows:
        if row.get(f"x_{k}") is not None:
            depth = row["layers"] if learned(row, k) else math.inf
            depths[row["seed"]] = min(depth, depths.get(row["seed"], math.inf))
    return [depths[seed] for seed in sorted(depths)]


def with_attention(rows, causal, held):
    """The runs with the implicit curriculum, this mask, and attention held or learned."""
    wanted = (True, causal, "minimal" if held else "")
    return [row for row in rows if (row["ic"], row["causal"], row["circuit"]) == wanted]


def draw_least_depths(axes, rows, deepest, marker, color, shift, name):
    """Marks at the least depths that learned each x_k, above the deepest if none did, each with
    the number of its seeds."""
    seeds, tried = len({row["seed"] for row in rows}), [row["layers"] for row in rows]
    marks = collections.Counter()
    for k in symbols_in(rows):
        for depth in least_depths(rows, k):
            marks[k + shift, min(depth, deepest + 1)] += 1
    D, steps = (", ".join(map(str, sorted({row[key] for row in rows}))) for key in ("D", "steps"))
    label = f"{name}: D={D}, {min(tried)} to {max(tried)} layers, {steps} steps, {seeds} seeds"
    axes.plot(*zip(*marks, strict=True), marker, color=color, ms=11, label=label)
    for (x, depth), count in marks.items():
        axes.text(x, depth, count, color="white", fontsize=8, ha="center", va="center")


def figure_law(rows, path):
    """For each x_k the least depth in which it was learned, with attention held at a minimal
    circuit (what a depth can do) and with attention learned (what training finds), with the number
    of seeds, beside the law; left with a causal mask, right without."""
    size = dict(figsize=(11, 4.6), layout="constrained", sharey=True)
    figure, (left, right) = plt.subplots(1, 2, **size)
    deepest = max(row["layers"] for row in rows)
    for axes, causal, side, title in (
        (left, True, "left", "causal mask: floor(log$_2$ k) + 2"),
        (right, False, "right", "no mask: ceil(log$_3$(4k+1))"),
    ):
        # the law as steps, then the runs
        group = [row for row in rows if row["ic"] and row["causal"] == causal]
        most = max(symbols_in(group), default=1)
        law = [DEPTH_LAWS[causal](k) for k in range(1, most + 2)]
        edges = [k + 0.5 for k in range(most + 1)]
        axes.step(edges, law, where="post", color="black", label="the law")
        if held := with_attention(rows, causal, held=True):
            draw_least_depths(axes, held, deepest, "s", "tab:green", -0.15, "minimal circuit held")
        if found := with_attention(rows, causal, held=False):
            draw_least_depths(axes, found, deepest, "o", "tab:blue", 0.15, "attention learned")

        # above the deepest that was tried: learned in none of them
        axes.axhspan(deepest + 0.5, deepest + 1.5, color="0.92")
        axes.set_yticks(range(1, deepest + 2), [*range(1, deepest + 1), "in none"])
        axes.set(xlabel="k", title=title, xlim=(0.4, most + 0.6), xticks=range(1, most + 1))
        axes.grid(axis="y", lw=0.3)
        where = dict(loc=f"outside lower {side}", fontsize="small")
        figure.legend(*axes.get_legend_handles_labels(), **where)
    label = "fewest layers that learn $x_k$\n(in a mark: how many seeds)"
    left.set(ylabel=label, ylim=(0.5, deepest + 1.5))
    config.save_figure(figure, path)


# ---- in words


def counted(rows):
    """The claims of Section 7.2, counted, as lines of text."""
    curriculum = [row for row in rows if row["ic"]]
    lines = ["learned by (median step):"] if curriculum else []
    for layers in sorted({row["layers"] for row in curriculum}):
        group, cells = [row for row in curriculum if row["layers"] == layers], []
        for k in symbols_in(group):
            steps = [row[f"x_{k}_learned"] for row in group]
            steps = [step for step in steps if step is not None]
            cells += [f"x_{k} {len(steps)} ({statistics.median(steps):.0f})"] if steps else []
        told = ", ".join(cells) or "nothing"
        lines.append(f"{layers} layers, {len(group)} runs: {told}")
    learned_at = [
        [row[f"{name}_learned"] for name in Flags(**row).target_names] for row in curriculum
    ]
    orders = [in_order(steps) for steps in learned_at]
    many = len(orders) - orders.count(None)
    lines.append(f"x_1, x_2, ... learned in this order: {orders.count(True)} of {many} runs")
    without = [row["val"] > 0.7 for row in rows if not row["ic"]]
    lines.append(f"without the implicit curriculum above 0.7: {sum(without)} of {len(without)}")
    return lines


def counted_by_law(rows):
    """The fewest layers in which each seed learned x_k beside the law, then the runs that beat the
    law, as lines of text."""
    lines, beaten = [], []
    for causal, mask in (True, "causal mask"), (False, "no mask"):
        for held, name in (True, "held at a minimal circuit"), (False, "learned"):
            some, cells = with_attention(rows, causal, held), []
            for k in symbols_in(some):
                depths = ",".join(map(str, least_depths(some, k))).replace("inf", "-")
                cells.append(f"x_{k} {depths} (law {DEPTH_LAWS[causal](k)})")
            lines.append(f"fewest layers by seed, {mask}, attention {name}: {', '.join(cells)}")
    for row in rows:
        law = DEPTH_LAWS[row["causal"]]
        too_early = [k for k in symbols_in([row]) if learned(row, k) and row["layers"] < law(k)]
        beaten += [f"{row['run']} (x_{k})" for k in too_early]
    return [*lines, f"in fewer layers than the law allows: {', '.join(beaten) or 'nothing'}"]


def tables(folders):
    rows = [row for folder in folders for row in rows_of(folder)]
    return "\n".join([*counted(sweep.plain(rows)), *counted_by_law(rows)])


def draw(folders, out):
    figure_law([row for folder in folders for row in rows_of(folder)], out / "law.png")
    yield out / "law.png"


def main():
    if "--preset" in sys.argv:
        sweep.main()
    else:
        command(__file__, __doc__, tables, draw)


if __name__ == "__main__":
    main()
