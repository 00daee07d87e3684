"""In which order runs learned their symbols and formed their paths (Sections 7.2 and 9).

    python -m extras.studies.order results/runs/default/* results/runs/rope/*

A symbol is learned when its loss passes below two thirds of its lowest plateau (0.5 for N=4). A
path has emerged when its mean attention passes 0.5; emergence.json has the paths that a run uses.
"""

import itertools
import math

import matplotlib.pyplot as plt
import torch
from matplotlib.markers import TICKDOWN, TICKUP

import analyze
import train
from ablate import End, PatchedModel, Path, attention_on, path_name
from analyze import emergence_steps, read_emergence
from data import held_out
from extras import studies
from extras.studies.stats import progress
from extras.studies.theory import may_attend
from train import Flags


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
    path emerged earlier}; lost: {kind: whether x_1 is lost without such a path at the first
    checkpoint that knows it}; rise: the most that its loss rises there without any other path."""
    when = emergence_steps(emergence, task)
    first = sorted((path for path, step in when.items() if step is not None), key=when.get)
    row = dict(emerged={path_name(path, task): when[path] for path in first[:3]})
    for head in HEADS:
        ends = {path: (path.reader.name(task), path.read.name(task)) for path in first}
        row[head] = next((when[path] for path in first if ends[path] == head), None)

    # what the removal of a path costs
    losses = emergence["losses"].get("x_1", [])
    known = next((at for at, loss in enumerate(losses) if loss < task.learned_below), None)
    if known is not None:
        there = analyze.first_below(emergence["steps"], losses, task.learned_below)
        paths = sorted(emergence["paths"], key=lambda path: path["without"]["x_1"][known])
        loss = {(path["reader"], path["read"]): path["without"]["x_1"][known] for path in paths}
        row["there"] = there
        row["before"] = {head: (row[head] or math.inf) < there for head in HEADS}
        row["lost"] = {head: loss.get(head, 0) >= task.learned_below for head in HEADS}
        others = [loss[ends] for ends in loss if ends not in HEADS]
        row["rise"] = max([losses[known], *others]) - losses[known]
    return row


# ---- what x_1 needs when it is learned, whichever paths the circuit has at the end


def kinds_of(patched):
    """Return {"q -> 1b": [rise, attention], ...} for any two roles of a chain of which the first
    may read the second: by how much the loss of x_1 rises if all that it reads there, in any head,
    is ablated; and the mean attention of the head that attends there most."""
    kinds, task, positions = {}, patched.task, patched.batch.positions
    readable = may_attend(task, patched.flags.causal).fill_diagonal_(False)
    for source, target in readable.nonzero().tolist():
        ends = End(source), End(target)
        paths = [Path(*head, *ends) for head in patched.heads]
        rise = (patched.knock_out(paths) - patched.baseline)[:, 0].mean().item()
        patterns = patched.attention()
        on_path = [attention_on(patterns[path[:2]], path, task, positions) for path in paths]
        attention = max(attention.mean().item() for attention in on_path)
        name = " -> ".join(place.name(task) for place in ends)
        kinds[name] = [round(rise, 4), round(attention, 4)]
    return kinds


def measure_run(run, whole, n=64):
    """Return [dict(run, step, loss of x_1, kinds), ...] for the first checkpoint of a run with x_1
    below 0.5, or for the whole run, on n held-out sequences."""
    rows, flags = [], train.read_flags(run)
    batch = train.sequences(flags, held_out("emergence", n))
    for file in progress(f"{run}: checkpoint", train.checkpoints_of(run)):
        patched = PatchedModel(train.load(run, f"ckpt/{file.name}")[0], flags, batch)
        loss = patched.baseline[:, 0].mean().item()
        if whole or loss < flags.problem.learned_below:
            row = dict(run=studies.name_of(run), step=int(file.stem), loss=round(loss, 4))
            rows.append(row | dict(kinds=kinds_of(patched)))
            if not whole:
                break
    return rows


def rises_of(row):
    """Return (rise, rise, other) of a row of measure_run: without each kind of HEADS, and the most
    without any other."""
    rises = {name: rise for name, (rise, _) in row["kinds"].items()}
    heads = [rises.pop(" -> ".join(head)) for head in HEADS]
    return *heads, max(rises.values())


def load_first_learned():
    """Return [row, ...], of each run in the committed rows of measure_run the first that knows
    x_1."""
    first = {}
    for row in train.read_json("results/figures/induction.jsonl", lines=True):
        if row["loss"] < 0.5:
            first.setdefault(row["run"], row)
    return [*first.values()]


def is_lost(row):
    """Return whether x_1 is lost again without either kind of HEADS, in a row of measure_run."""
    return row["loss"] + min(rises_of(row)[:2]) >= 0.5


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
        style = dict(marker="o", s=32, color=analyze.symbol_color(k, last))
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
    analyze.save_figure(figure, file)


def draw_induction(rows, title, file):
    """Draw over the checkpoints of a run how much its heads attend along the paths of an induction
    head, and the loss of x_1 with one kind of read ablated; rows: of measure_run."""
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    without = [[row["loss"] + rise for rise in rises_of(row)] for row in rows]
    *heads, other = zip(*without, strict=True)
    shape = dict(figsize=(7, 6), height_ratios=(1, 1.3), sharex=True, layout="constrained")
    figure, (top, bottom) = plt.subplots(2, 1, **shape)
    for (head, (name, color)), curve in zip(HEADS.items(), heads, strict=True):
        attention = [row["kinds"][" -> ".join(head)][1] for row in rows]
        text = f"{' to '.join(head)} ({name})"
        top.plot(steps, attention, color=color, label=f"{text}, in the head that attends most")
        bottom.plot(steps, curve, color=color, label=f"without {text}, in all heads")
    count = len(rows[0]["kinds"]) - len(HEADS)
    label = f"highest without any one of the {count} other kinds"
    bottom.plot(steps, other, color="tab:green", label=label)
    bottom.plot(steps, losses, color="black", label="full model")

    # the step from which x_1 counts as learned
    learned = analyze.first_below(steps, losses, 0.5)
    for axes in top, bottom:
        axes.axvline(learned, color="gray", ls=":", label="$x_1$ below 0.5")
        axes.grid(lw=0.3)
        axes.legend(loc="upper left", fontsize="small")
    top.set(ylim=(0, 1.5), yticks=(0, 0.5, 1), ylabel="mean attention")
    bottom.set(
        ylim=(0, 1.5 * max(max(curve) for curve in heads)),
        xlabel="training step",
        ylabel="loss of $x_1$ (MSE)",
    )
    top.set_title(f"$x_1$ and its induction head ({title})", fontsize=11)
    analyze.save_figure(figure, file)


def draw(folders, out):
    """Draw order.png and, if there are checkpoints, induction.png of the first run that has them,
    after measuring it and the first checkpoint of each that knows x_1, into induction.jsonl."""
    rows = load_rows_with_paths(folders)
    draw_order(rows, out / "order.png")
    if runs := [row for row in rows if train.checkpoints_of(row["run"])]:
        measured = [measure_run(row["run"], whole=row is runs[0]) for row in runs]
        train.write_rows(out / "induction.jsonl", itertools.chain(*measured))
        title = f"{next(iter(group_by_title(runs[:1])))}, seed {runs[0]['flags'].seed}"
        draw_induction(measured[0], title, out / "induction.png")
    return out / "order.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, tables, draw)
