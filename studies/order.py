"""In which order runs learned their symbols and formed their paths (Sections 7.2 and 9).

    python -m studies.order results/runs/default/* results/runs/rope/*

A symbol is learned when its loss passes below two thirds of its lowest plateau (0.5 for N=4). A
path has emerged when its mean attention passes 0.5; emergence.json has the paths that a run uses.
"""

import math

from parts import config
from parts.circuit import path_name
from parts.config import Flags
from parts.emergence import emergence_steps, read_emergence

import matplotlib.pyplot as plt
import torch
from matplotlib.markers import TICKDOWN, TICKUP

import studies


HEADS = {  # source, target of the path: name and colour
    ("q", "1b"): ("induction head", "tab:red"),
    ("1b", "1a"): ("previous-token head", "tab:blue"),
}
MEASURED = {  # the chain runs that have emergence.json
    "the main command": ["runs/default/*"],
    "appended encoding": ["runs/adamw/*", "runs/last/*", "runs/decay/*", "runs/cleaning/muon_e*"],
    "RoPE": ["runs/rope/*"],
    "transformer D": ["D"],
}
WORDS = {  # what a reader calls a flag in the figure; others are written as they are
    "muon": "Muon",
    "adamw": "AdamW",
    "input": "appended encoding",
    "qk": "RoPE",
    "ema=0.0": "weights not averaged",
    "qk_std=0.02": "smaller first W_Q, W_K",
    "weight_decay=1.0": "weight decay x 10",
}


def in_order(steps):
    """Return whether symbols were learned in order, the last ones perhaps never; None if fewer than
    two were learned."""
    reached = [step for step in steps if step is not None]
    if len(reached) < 2:
        return None
    return reached == sorted(reached) and reached == steps[: len(reached)]


def group_by_title(rows):
    """Return {"Muon, RoPE": [row, ...]}: the rows by config, named as a reader would name it."""
    groups = {}
    for group in studies.group_by_config(rows).values():
        flags = group[0]["flags"]
        texts = [
            text for text in group[0]["config"] if not text.startswith(("optimizer", "rotary"))
        ]
        texts = [flags.optimizer, flags.rotary, *texts]
        groups[", ".join(WORDS.get(text, text) for text in texts)] = group
    return groups


def load_rows_with_paths(folders):
    """Return the rows of runs, with what is known of their paths."""
    rows = []
    for row in map(studies.load_row, folders):
        emergence = read_emergence(row["run"])
        rows.append(row | paths_of(emergence, row["flags"].problem) if emergence else row)
    return rows


def paths_of(emergence, task):
    """Return what the checkpoints tell of the paths, a dict. emerged: {name: step} of the first
    three; the first step of each kind of path of an induction head, (source, target). If x_1 is
    learned: there: the step at which it is, on the same sequences; before: {kind: whether such a
    path emerged earlier}; costliest: {kind: the path without which the loss of x_1 is highest at
    the first checkpoint that knows it}; lost: {kind: whether x_1 is lost there without this path};
    and rise: the most that its loss rises without any other path."""
    when = emergence_steps(emergence, task)
    first = sorted((path for path, step in when.items() if step is not None), key=when.get)
    row = dict(emerged={path_name(path, task): when[path] for path in first[:3]})
    for head in HEADS:
        ends = {path: (path.source.name(task), path.target.name(task)) for path in first}
        row[head] = next((when[path] for path in first if ends[path] == head), None)

    # what the removal of a path costs
    losses = emergence["losses"].get("x_1", [])
    known = next((at for at, loss in enumerate(losses) if loss < task.learned), None)
    if known is not None:
        there = config.first_below(emergence["steps"], losses, task.learned)
        paths = sorted(emergence["paths"], key=lambda path: path["without"]["x_1"][known])
        costliest = {(path["source"], path["target"]): path for path in paths}
        loss = {ends: path["without"]["x_1"][known] for ends, path in costliest.items()}
        row |= dict(there=there, costliest=costliest)
        row["before"] = {head: (row[head] or math.inf) < there for head in HEADS}
        row["lost"] = {head: loss.get(head, 0) >= task.learned for head in HEADS}
        others = [loss[ends] for ends in loss if ends not in HEADS]
        row["rise"] = max([losses[known], *others]) - losses[known]
    return row


# ---- tables


def order_table(rows):
    """Return a row per config: the steps from each symbol to the next, of the runs that learned
    all, and how many learned them in order."""
    lines = []
    for name, group in group_by_title(rows).items():
        steps = [[*row["learned"].values()] for row in group]
        gaps = [torch.tensor(row).diff().tolist() for row in steps if None not in row]
        gaps = ", ".join(map(studies.spread, zip(*gaps, strict=True)))
        ends = studies.spread([row["steps"] for row in group])
        lines.append([name, len(group), gaps, ends, studies.share(map(in_order, steps))])
    heads = "steps from symbol to symbol", "ends at step", "symbols in order"
    return studies.markdown(["config", "runs", *heads], *lines)


def induction_table(groups):
    """Return a row for each {name: rows}, of the runs that learned x_1 and have emergence.json: in
    how many a path of the induction head emerged before x_1 was learned, and in how many x_1 is
    lost without it at the first checkpoint that knows x_1."""
    lines = []
    for name, rows in groups.items():
        rows = [row for row in rows if "there" in row]
        counts = [
            sum(row[key][head] for row in rows) for key in ("before", "lost") for head in HEADS
        ]
        rise = max([row["rise"] for row in rows], default=0)
        lines.append([name, *(f"{count} of {len(rows)}" for count in counts), f"{rise:.3f}"])
    names = [" -> ".join(head) for head in HEADS]
    heads = [f"{name} {text}" for text in ("above 0.5 before x_1", "needed") for name in names]
    return studies.markdown(["runs", *heads, "x_1 rises without any other path by at most"], *lines)


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
    return "\n\n".join([runs_table(rows), order_table(rows), induction_table({"all": rows})])


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
    for name, group in group_by_title(rows).items():
        names.append((y, f"{name} (n = {len(group)})"))
        lines += [(y + number, row | row["learned"]) for number, row in enumerate(group, 1)]
        y += len(group) + 1.3

    # a colour per symbol, a tick for each path of the induction head
    marks, last = {}, max(row["flags"].problem.symbols for _, row in lines) - 1
    for k in range(1, last + 1):
        style = dict(marker="o", s=32, color=config.symbol_color(k, last))
        marks[f"x_{k}"] = f"$x_{{{k}}}$ learned: its loss passes below 0.5", style
    for head, marker in zip(HEADS, (TICKUP, TICKDOWN), strict=True):
        label = f"{HEADS[head][0]}: attention from {' to '.join(head)} passes above 0.5"
        marks[head] = label, dict(marker=marker, s=60, color=HEADS[head][1], zorder=3)
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
    axes.set_title("When each run learned what (ticks where measured)", fontsize=11)
    axes.grid(lw=0.3)
    figure.legend(loc="outside lower center", fontsize="small")
    config.save_figure(figure, file)


def draw_induction(row, file):
    """Draw over the checkpoints of a run the attention of its induction head, and the loss of x_1
    in the full model and without one path."""
    emergence = read_emergence(row["run"])
    steps, losses = emergence["steps"], emergence["losses"]["x_1"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    for head, (name, color) in HEADS.items():
        path = row["costliest"][head]
        label = "{}, L{layer}H{head}: {source} to {target}".format(name, **path)
        top.plot(steps, path["mean"], color=color, label=label)
        bottom.plot(steps, path["without"]["x_1"], color=color, label=f"without the {name}")

    # at each checkpoint, the highest loss without a path of another kind
    paths = emergence["paths"]
    others = [path for path in paths if (path["source"], path["target"]) not in HEADS]
    highest = torch.tensor([path["without"]["x_1"] for path in others]).amax(0)
    bottom.plot(steps, highest, color="tab:green", label="highest without any other path")
    bottom.plot(steps, losses, color="black", label="full model")
    for axes in top, bottom:
        axes.axvline(row["there"], color="gray", ls=":", label="$x_1$ learned")
        axes.grid(lw=0.3)
        axes.legend(fontsize="small")
    top.set(ylim=(0, 1), ylabel="mean attention")
    bottom.set(ylim=(0, None), xlabel="training step", ylabel="loss of $x_1$ (MSE)")
    name = next(iter(group_by_title([row])))
    top.set_title(f"$x_1$ and its induction head ({name}, seed {row['flags'].seed})", fontsize=11)
    config.save_figure(figure, file)


def draw(folders, out):
    """Draw both figures; the second is of the first run in which x_1 needs both paths."""
    rows = load_rows_with_paths(folders)
    draw_order(rows, out / "order.png")
    for row in [row for row in rows if "there" in row and all(row["lost"].values())][:1]:
        draw_induction(row, out / "induction.png")
    return out / "order.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, tables, draw)
