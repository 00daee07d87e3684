"""In which order runs learned their symbols and formed their paths (Sections 7.2 and 9).

    python -m studies.order results/runs/default/* results/runs/rope/*

A symbol is learned when its loss passes below two thirds of its lowest plateau (0.5 for N=4). A
path has emerged when its mean attention passes 0.5; emergence.json has the paths that a run uses.
"""

import math

from parts import config
from parts.circuit import path_from, path_name
from parts.config import Flags
from parts.emergence import emergence_steps, read_emergence

import matplotlib.pyplot as plt
import torch
from matplotlib.markers import TICKDOWN, TICKUP

import studies


INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD = ("q", "1b"), ("1b", "1a")  # source, target of their paths
WORDS = {  # what a reader calls a flag; other flags are written as they are
    "optimizer=adamw": "AdamW",
    "rotary=qk": "RoPE",
    "ema=0.0": "weights not averaged",
    "qk_std=0.02": "smaller first W_Q and W_K",
    "weight_decay=1.0": "ten times the weight decay",
    "steps=1600": "1600 steps",
    "steps=3000": "3000 steps",
    "target=0.15": "until a loss of 0.15",
}


def in_order(steps):
    """Return whether symbols were learned in order, the last ones perhaps never; None if fewer than
    two were learned."""
    reached = [step for step in steps if step is not None]
    if len(reached) < 2:
        return None
    return reached == sorted(reached) and reached == steps[: len(reached)]


def by_title(rows):
    """Return {"AdamW, RoPE, 1600 steps": [row, ...]}: the rows by config, by seed within it, with
    names as a reader would give them."""
    titles = {}
    for group in studies.group_by_config(rows).values():
        words = [WORDS.get(text, text) for text in group[0]["config"]]
        kind = [word for word in ("AdamW", "RoPE") if word in words]
        more = [word for word in words if word not in kind] or ["the main command"]
        kind = ["AdamW" if "AdamW" in kind else "Muon"]
        kind.append("RoPE" if "RoPE" in words else "appended encoding")
        titles[", ".join(kind + more)] = group
    return titles


def load_rows_with_paths(folders):
    """Return the rows of runs, with what is known of their paths."""
    rows = []
    for row in map(studies.load_row, folders):
        emergence = read_emergence(row["run"])
        rows.append(row | paths_of(emergence, row["flags"].problem) if emergence else row)
    return rows


def ends_of(row):
    """Return the source and the target of a path, which say of what kind it is."""
    return row["source"], row["target"]


def paths_of(emergence, task):
    """Return what the checkpoints tell of the paths, a dict. emerged: {name: step} of the first
    three; the first step of each kind of path of an induction head. If x_1 is learned: there: the
    step at which it is, on the same sequences; every: how many steps lie between checkpoints; at:
    the index of the first checkpoint that knows it; and costliest: {kind, or "other": (rise, row)},
    the path without which its loss rises most at that checkpoint."""
    when = emergence_steps(emergence, task)
    first = sorted((path for path, step in when.items() if step is not None), key=when.get)
    row = dict(emerged={path_name(path, task): when[path] for path in first[:3]})
    for head in INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD:
        ends = {path: (path.source.name(task), path.target.name(task)) for path in first}
        row[head] = next((when[path] for path in first if ends[path] == head), None)

    # what the removal of a path costs
    steps, losses = emergence["steps"], emergence["losses"].get("x_1", [])
    at = next((at for at, loss in enumerate(losses) if loss < task.learned), None)
    if at is not None:
        costliest = {kind: (0, None) for kind in (INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD, "other")}
        for path in emergence["paths"]:
            kind = ends_of(path) if ends_of(path) in costliest else "other"
            rise = path["without"]["x_1"][at] - losses[at]
            costliest[kind] = max(costliest[kind], (rise, path), key=lambda cost: cost[0])
        there = config.first_below(steps, losses, task.learned)
        row |= dict(there=there, every=steps[1] - steps[0], at=at, costliest=costliest)
        row["loss"] = losses[at]
    return row


# ---- tables


def order_table(rows):
    """Return a row per config: the steps from each symbol to the next, of the runs that learned
    all, and how many learned them in order."""
    lines = []
    for name, group in by_title(rows).items():
        steps = [[*row["learned"].values()] for row in group]
        gaps = [torch.tensor(row).diff().tolist() for row in steps if None not in row]
        gaps = ", ".join(map(studies.spread, zip(*gaps, strict=True)))
        ends = studies.spread([row["steps"] for row in group])
        lines.append([name, len(group), gaps, ends, studies.share(map(in_order, steps))])
    heads = "steps from symbol to symbol", "ends at step", "symbols in order"
    return studies.markdown(["config", "runs", *heads], *lines)


def removals(rows):
    """Return a sentence on what the induction head means to x_1, when it is first known."""
    rows, rises, lost = [row for row in rows if "costliest" in row], {}, []
    if not rows:
        return "x_1 was learned in none of the runs whose checkpoints were measured"
    for row in rows:
        for kind, (rise, _) in row["costliest"].items():
            rises.setdefault(kind, []).append(rise)
        least = min(rises[INDUCTION_HEAD][-1], rises[PREVIOUS_TOKEN_HEAD][-1])
        lost.append(row["loss"] + least >= row["flags"].problem.learned)
    query, previous, other = rises.values()
    return (
        f"x_1 is lost without either path in {sum(lost)} of {len(rows)} runs: its loss rises by "
        f"{min(query):.2f} to {max(query):.2f} without q -> 1b, by {min(previous):.2f} to "
        f"{max(previous):.2f} without 1b -> 1a, and by at most {max(other):.3f} without any path "
        "of another kind"
    )


def leads(rows):
    """Return [(lead, every), ...] of the runs that were measured and learned x_1: by how many steps
    both paths of the induction head passed an attention of 0.5 before x_1 passed a loss of 0.5, on
    the same sequences (negative if they came later), and the steps between checkpoints."""
    rows, heads = [row for row in rows if "there" in row], (INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD)
    last = [max(row[head] or math.inf for head in heads) for row in rows]
    return [(row["there"] - step, row["every"]) for row, step in zip(rows, last, strict=True)]


def runs_table(rows, paths=True):
    """Return a row per run; with its first paths, or without."""
    lines = []
    for row in rows:
        losses = ", ".join(f"{name} {row['log'][-1][name]:.2g}" for name in row["learned"])
        emerged = [f"{path}: {step:.0f}" for path, step in row.get("emerged", {}).items()]
        learned = studies.steps_text(row["learned"].values())
        line = [studies.name_of(row["run"]), learned, row["steps"], losses, f"{row['mse']:.4f}"]
        lines.append(line + ["; ".join(emerged)] * paths)
    heads = ["run", "learned at step", "ends at", "errors there", "MSE"]
    return studies.markdown(heads + ["first paths, at step"] * paths, *lines)


def tables(folders):
    rows = load_rows_with_paths(folders)
    return "\n\n".join([runs_table(rows), order_table(rows), removals(rows)])


def count_all():
    """Return counts over all committed runs, one run per config and seed, a dict: of those that
    learned two or more of all symbols ("several") how many did so in order, and how many with an
    evaluation between any two ("resolved"); of those with x_D alone as their target ("alone") how
    many ended above 0.7."""
    several, alone = {}, {}
    for row in studies.load_rows(studies.committed("*", "runs/*/*")):
        flags = Flags(**row)
        if flags.task != "chain" or flags.targets or flags.init:
            continue
        key = studies.config_of(flags), flags.seed
        steps = [row[f"{name}_learned"] for name in flags.target_names]
        if not flags.ic:
            alone.setdefault(key, row["val"] > 0.7)
        elif not flags.circuit and in_order(steps) is not None:
            between = [math.ceil(step / flags.eval_every) for step in steps if step is not None]
            several.setdefault(key, (in_order(steps), len({*between}) == len(between)))
    ordered, resolved = map(sum, zip(*several.values(), strict=True))
    counts = dict(several=len(several), in_order=ordered, resolved=resolved)
    return counts | dict(alone=len(alone), above=sum(alone.values()))


# ---- the figures


def draw_order(rows, file):
    """Draw when each run learned each symbol and formed its induction head, a line per run."""
    lines, names, y = [], [], 0
    for name, group in by_title(rows).items():
        names.append((y, f"{name} (n = {len(group)})"))
        lines += [(y + number, row | row["learned"]) for number, row in enumerate(group, 1)]
        y += len(group) + 1.3

    # a colour per symbol, a tick for each path of the induction head
    marks, last = {}, max(row["flags"].problem.symbols for _, row in lines) - 1
    for k in range(1, last + 1):
        style = dict(marker="o", s=32, color=config.symbol_color(k, last))
        marks[f"x_{k}"] = f"$x_{{{k}}}$ learned: its loss passes below 0.5", style
    red = dict(s=60, color="tab:red", zorder=3)
    heads = {INDUCTION_HEAD: ("induction head", TICKUP)}
    heads[PREVIOUS_TOKEN_HEAD] = "previous-token head", TICKDOWN
    for (source, target), (name, marker) in heads.items():
        label = f"{name}: attention {source} $\\to$ {target} passes above 0.5"
        marks[source, target] = label, dict(marker=marker, **red)
    figure, axes = plt.subplots(figsize=(7, 2 + 0.17 * y), layout="constrained")
    for key, (label, style) in marks.items():
        points = [(row[key], line) for line, row in lines if row.get(key)]
        if points:
            axes.scatter(*zip(*points, strict=True), label=f"{label} (n = {len(points)})", **style)

    # the names of configs and runs, the axis
    for line, name in names:
        axes.text(0.01, line, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    seeds = [f"seed {row['flags'].seed}" for _, row in lines]
    axes.set_yticks([line for line, _ in lines], seeds, fontsize=7)
    axes.set(xscale="log", xlabel="training step", ylim=(y - 0.3, -0.7))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_title("When each run learned what; ticks where checkpoints were measured", fontsize=10)
    axes.grid(lw=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    config.save_figure(figure, file)


def draw_induction(row, file):
    """Draw how x_1 is learned together with the induction head, over the checkpoints of a run."""
    emergence = read_emergence(row["run"])
    steps, losses = emergence["steps"], emergence["losses"]["x_1"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(7, 6), height_ratios=(1, 1.4), sharex=True, layout="constrained"
    )

    # the two paths without which the loss rises most when x_1 is first learned
    heads = {INDUCTION_HEAD: ("induction head", "tab:red")}
    heads[PREVIOUS_TOKEN_HEAD] = "previous-token head", "tab:blue"
    for kind, (name, color) in heads.items():
        path = row["costliest"][kind][1]
        text = path_name(path_from(path, row["flags"].problem), row["flags"].problem)
        top.plot(steps, path["mean"], color=color, label=f"{name}, {text}")
        top.fill_between(steps, path["low"], path["high"], color=color, alpha=0.2, lw=0)
        bottom.plot(steps, path["without"]["x_1"], color=color, label=f"without the {name}")

    # at each checkpoint, the highest loss without a path of another kind
    others = [path["without"]["x_1"] for path in emergence["paths"] if ends_of(path) not in heads]
    if others:
        label = f"highest without any one of {len(others)} paths of other kinds"
        highest = [max(losses) for losses in zip(*others, strict=True)]
        bottom.plot(steps, highest, color="tab:green", label=label)
    bottom.plot(steps, losses, color="black", label="full model")

    # the step from which x_1 counts as learned
    text = f"$x_1$ below 0.5 (step {row['there']:.0f})"
    for axes in top, bottom:
        axes.axvline(row["there"], color="gray", ls=":", label=text)
        axes.grid(lw=0.3)
        axes.legend(fontsize="small")
    top.set(ylim=(0, 1.02), ylabel="attention (mean, 10% to 90%\nof sequences)")
    bottom.set(ylim=(0, None), xlabel="training step", ylabel="loss of $x_1$ (MSE)")
    group = [*by_title([row])][0]
    top.set_title(
        f"$x_1$ comes with an induction head ({group}, seed {row['flags'].seed})", fontsize=10
    )
    config.save_figure(figure, file)


def draw(folders, out):
    """Draw both figures, the second one of the first run whose checkpoints were measured."""
    rows = load_rows_with_paths(folders)
    draw_order(rows, out / "order.png")
    for row in [row for row in rows if "costliest" in row][:1]:
        draw_induction(row, out / "induction.png")
    return out / "order.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, tables, draw)
