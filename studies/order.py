"""In which order runs learned their symbols and formed their paths (Sections 7.2 and 9).

    python -m studies.order results/D results/runs/default/* results/runs/rope/*

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


INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD = ("q", "1b"), ("1b", "1a")  # source, target of their paths


def in_order(steps):
    """Return whether symbols were learned in order, the last ones perhaps never; None if fewer than
    two were learned."""
    reached = [step for step in steps if step is not None]
    if len(reached) < 2:
        return None
    return reached == sorted(reached) and reached == steps[: len(reached)]


def load_rows_with_paths(folders):
    """Return the rows of runs, with what is known of their paths."""
    rows = []
    for row in map(studies.load_row, folders):
        emergence = read_emergence(row["run"])
        rows.append(row | paths_of(emergence, row["flags"].problem) if emergence else row)
    return rows


def paths_of(emergence, task):
    """Return what the checkpoints tell of the paths, a dict. emerged: {name: step} of the first
    three; the first step of each path of an induction head; and at the first checkpoint that knows
    x_1, lost: whether its loss passes above 0.5 again without either of these paths, and rise: the
    most that it rises without any other path."""
    when = emergence_steps(emergence, task)
    first = sorted((path for path, step in when.items() if step is not None), key=when.get)
    row = dict(emerged={path_name(path, task): when[path] for path in first[:3]})
    for head in INDUCTION_HEAD, PREVIOUS_TOKEN_HEAD:
        ends = {path: (path.source.name(task), path.target.name(task)) for path in first}
        row[head] = next((when[path] for path in first if ends[path] == head), None)

    # what the removal of a path costs
    losses = emergence["losses"].get("x_1", [])
    known = next((at for at, loss in enumerate(losses) if loss < task.learned), None)
    if known is not None:
        without = {INDUCTION_HEAD: 0, PREVIOUS_TOKEN_HEAD: 0, "other": 0}
        for path in emergence["paths"]:
            ends = path["source"], path["target"]
            kind = ends if ends in without else "other"
            without[kind] = max(without[kind], path["without"]["x_1"][known])
        rise = without.pop("other") - losses[known]
        row |= dict(lost=min(without.values()) >= task.learned, rise=rise)
    return row


# ---- tables


def order_table(rows):
    """Return a row per config: the steps from each symbol to the next, of the runs that learned
    all, and how many learned them in order."""
    lines = []
    for name, group in studies.group_by_config(rows).items():
        steps = [[*row["learned"].values()] for row in group]
        gaps = [torch.tensor(row).diff().tolist() for row in steps if None not in row]
        gaps = ", ".join(map(studies.spread, zip(*gaps, strict=True)))
        ends = studies.spread([row["steps"] for row in group])
        lines.append([name, len(group), gaps, ends, studies.share(map(in_order, steps))])
    heads = "steps from symbol to symbol", "ends at step", "symbols in order"
    return studies.markdown(["config", "runs", *heads], *lines)


def removals(rows):
    """Return a sentence on what the induction head means to x_1, when it is first known."""
    rows = [row for row in rows if "lost" in row]
    rise = max([row["rise"] for row in rows], default=0)
    lost = f"lost without either path in {sum(row['lost'] for row in rows)} of {len(rows)} runs"
    return f"x_1 is {lost}; without any other path its loss rises by at most {rise:.3f}"


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


# ---- the figure


def draw(folders, out):
    """Draw when each run learned each symbol and formed its induction head, a line per run."""
    groups, lines, names, y = studies.group_by_config(load_rows_with_paths(folders)), [], [], 0
    for name, group in groups.items():
        names.append((y, f"{name} (n = {len(group)})"))
        lines += [(y + number, row | row["learned"]) for number, row in enumerate(group, 1)]
        y += len(group) + 1.3

    # a colour per symbol, a tick for each path of the induction head
    marks, last = {}, max(row["flags"].problem.symbols for _, row in lines) - 1
    for k in range(1, last + 1):
        style = dict(marker="o", s=32, color=config.symbol_color(k, last))
        marks[f"x_{k}"] = f"$x_{{{k}}}$ learned", style
    red = dict(s=60, color="tab:red", zorder=3)
    marks[INDUCTION_HEAD] = "induction head (q -> 1b)", dict(marker=TICKUP, **red)
    marks[PREVIOUS_TOKEN_HEAD] = "previous-token head (1b -> 1a)", dict(marker=TICKDOWN, **red)
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.17 * y), layout="constrained")
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
    axes.set_title("When losses passed below 0.5, and attention above 0.5", fontsize=11)
    axes.grid(lw=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    config.save_figure(figure, out / "order.png")
    return out / "order.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, tables, draw)
