"""What each depth can learn, beside the depth law (Section 7.2, and floor(log2 k) + 2).

python -m extras.studies.depth --preset law --out out/law    # trains the runs, as sweep.py does
python -m extras.studies.depth out/law                       # prints the counts, draws law.png
"""

import collections
import math
import statistics

import matplotlib.pyplot as plt

import analyze
import sweep
from extras.studies import command, load_rows
from extras.studies.theory import DEPTH_LAWS
from train import Flags


FROZEN = f"{sweep.PLAIN} --D 8 --circuit minimal --steps 400"
sweep.PRESETS["law"] = [
    (sweep.WITH_IC, range(1, 6), 3),
    (f"{sweep.LAPTOP} --D 5 --steps 2000 --no-causal --rotary qk", range(2, 5), 2),
    (f"{FROZEN} --heads 1", range(1, 6), 2),
    (f"{FROZEN} --heads 2 --no-causal", range(1, 5), 2),
]


def chains(folders):
    """Return the runs to which the law applies, with implicit curriculum, of sweeps."""
    rows = [row for row in load_rows(folders) if row["task"] == "chain" and row["ic"]]
    return [row for row in rows if not (row["targets"] or row["init"])]


def learned(row, k):
    """Return whether a run ended with x_k learned."""
    return row[f"x_{k}"] < Flags(**row).problem.learned_below


def least_depths(rows, k):
    """Return the least number of layers in which each seed learned x_k, a list by seed; infinite
    where it did in none of those tried."""
    depths = {}
    for row in rows:
        depth = row["layers"] if learned(row, k) else math.inf
        depths[row["seed"]] = min(depth, depths.get(row["seed"], math.inf))
    return [depths[seed] for seed in sorted(depths)]


def with_attention(rows, causal, frozen):
    """Return the runs with this mask, and with attention frozen at a minimal circuit or learned."""
    wanted = causal, "minimal" if frozen else ""
    return [row for row in rows if (row["causal"], row.get("circuit", "")) == wanted]


def too_shallow(rows):
    """Return (runs, at the limit, beyond): how many runs have fewer layers than the law for one of
    their symbols; how many of these learned all that the law allows, if it allows any; and the
    names of those that learned more."""
    shallow, limit, beyond = 0, 0, []
    for row in rows:
        law = DEPTH_LAWS[row["causal"]]
        known = {k for k in range(1, row["D"] + 1) if learned(row, k)}
        allowed = {k for k in range(1, row["D"] + 1) if law(k) <= row["layers"]}
        if row["layers"] < law(row["D"]):
            shallow += 1
            limit += bool(allowed) and known >= allowed
            beyond += [row["run"]] if known - allowed else []
    return shallow, limit, beyond


def count_learners(rows):
    """Return how many runs of each depth learned each symbol, and when, as lines of text."""
    lines = ["learned by (median step):"]
    for layers in sorted({row["layers"] for row in rows}):
        group, cells = [row for row in rows if row["layers"] == layers], []
        for k in range(1, group[0]["D"] + 1):
            steps = [row[f"x_{k}_learned"] for row in group]
            steps = [step for step in steps if step is not None]
            cells += [f"x_{k} {len(steps)} ({statistics.median(steps):.0f})"] if steps else []
        lines.append(f"{layers} layers, {len(group)} runs: {', '.join(cells) or 'nothing'}")
    return lines


def count_exact(rows, causal):
    """Return for how many symbols and seeds the fewest layers that learned the symbol, with frozen
    attention, are those of the law, and for how many not, as text."""
    rows, exact = with_attention(rows, causal, True), []
    for k in range(1, 1 + max([row["D"] for row in rows], default=0)):
        exact += [depth == DEPTH_LAWS[causal](k) for depth in least_depths(rows, k)]
    return f"{sum(exact)} of {len(exact)}"


def tables(folders):
    rows = chains(folders)
    exact = f"{count_exact(rows, True)} with a causal mask, {count_exact(rows, False)} without"
    exact = f"with frozen attention the fewest layers are the law's: {exact}"
    return "\n".join([*count_learners(sweep.section_7(rows)), exact])


# ---- the figure


def draw(folders, out):
    """Draw for each x_k the least depth that learned it, with attention frozen at a minimal circuit
    (what a depth can do) and learned (what training finds), beside the law; left with a causal
    mask, right without. A mark shows how many seeds it stands for."""
    rows = chains(folders)
    last, deepest = max(row["D"] for row in rows), max(row["layers"] for row in rows)
    size = dict(figsize=(7.5, 4.6), layout="constrained", sharey=True)
    figure, panels = plt.subplots(1, 2, **size)
    titles = "causal mask: floor(log$_2$ k) + 2", "no mask: ceil(log$_3$(4k+1))"
    kinds = (True, "s", "tab:green", "frozen"), (False, "o", "tab:blue", "learned")
    for axes, causal, title, side in zip(
        panels, (True, False), titles, ("left", "right"), strict=True
    ):
        law = [DEPTH_LAWS[causal](k) for k in range(1, last + 2)]
        edges = [k + 0.5 for k in range(last + 1)]
        axes.step(
            edges, law, where="post", color="black", label="depth law: no fewer can hold $x_k$"
        )
        for frozen, marker, color, name in kinds:
            # marks at the least depths, above the deepest if x_k was learned in none
            group, marks = with_attention(rows, causal, frozen), collections.Counter()
            for k in range(1, 1 + max([row["D"] for row in group], default=0)):
                for depth in least_depths(group, k):
                    marks[k - 0.15 if frozen else k + 0.15, min(depth, deepest + 1)] += 1
            seeds = len({row["seed"] for row in group})
            label = f"{name} attention: {len(group)} runs, {seeds} seeds"
            points = [x for x, _ in marks], [depth for _, depth in marks]
            axes.scatter(*points, marker=marker, color=color, s=120, label=label)
            for (x, depth), count in marks.items():
                axes.text(x, depth, count, color="white", fontsize=8, ha="center", va="center")
        axes.axhspan(deepest + 0.5, deepest + 1.5, color="0.92", zorder=0)
        axes.set_yticks(range(1, deepest + 2), [*range(1, deepest + 1), "in none"])
        axes.set(xlabel="k", title=title, xlim=(0.4, last + 0.6), xticks=range(1, last + 1))
        axes.grid(axis="y", lw=0.3)
        below = dict(loc=f"outside lower {side}", fontsize="small")
        figure.legend(*axes.get_legend_handles_labels(), **below)
    panels[0].set(ylabel="layers", ylim=(0.5, deepest + 1.5))
    figure.suptitle("A mark: the fewest layers that learned $x_k$, and in how many seeds")
    analyze.save_figure(figure, out / "law.png")
    return out / "law.png"


if __name__ == "__main__":
    command(__file__, __doc__, tables, draw)
