"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: curves.png, attention_maps.png, circuit.png, ...

Checkpoints (--save-every) show how its paths emerged: emergence.json keeps the attention of each
path at each. To add a figure, write a function that returns it, and yield it in `figures_of`.
"""

import itertools
import pathlib
import re

import train
from ablate import arrivals, mark_edges, mean_attention, paths_in, read_report, record_reads
from data import command_line, progress

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure


RED, INK, GRAY, FAINT, PALE = "#e63946", "#22223b", "#a3a3b3", "#d8d8e0", "#f0f0f5"
SYMBOLS = "#8d99ae #4361ee #2a9d8f #f4a261 #9d4edd #588157 #a44a3f #a3a3b3".split()  # of x_0, ...
LETTERS = "Letters: symbols that can have arrived at a token over the paths of the final circuit."


# ---- Figure 6: losses


def first_below(steps, losses, level):
    """The step, interpolated, at which a curve first is below a level; None if it never is."""
    if losses[0] < level:
        return steps[0]
    for (start, before), (end, after) in itertools.pairwise(zip(steps, losses, strict=True)):
        if after < level <= before:
            return start + (end - start) * (before - level) / (before - after)
    return None


def crossings(rows, task):
    """{x_1: the step at which it was learned, or None, ...} from the rows of a log."""
    steps, found = [row["step"] for row in rows], {}
    for name in task.target_names:
        found[name] = first_below(steps, [row[name] for row in rows], task.learned_below)
    return found


def draw_curves(flags, rows):
    """The losses of all targets together, and of each, with the step at which it was learned."""
    task, steps = train.task_of(flags), [row["step"] for row in rows]
    figure, (left, right) = panels(2, 2, 5, 3)
    # the first row has no training loss, which is None
    left.plot(steps, [row["train"] for row in rows], color=GRAY, label="training")
    left.plot(steps, [row["val"] for row in rows], color=INK, label="validation, 1024 sequences")
    left.set(xlabel="training step", ylabel=task.loss_name, yscale="log")
    learned = crossings(rows, task)
    for k, (name, step) in zip(task.targets, learned.items(), strict=True):
        text = "" if step is None else f": learned at {step:.0f}"
        label, color = shown_name(name) + text, symbol_color(k)
        right.plot(steps, [row[name] for row in rows], color=color, label=label)
        right.plot([step], [task.learned_below], "o", color=color)  # none if step is None
    right.axhline(task.chance, color=GRAY, ls=":", label=f"{task.chance:.3g}: cannot tell chains")
    end = min(steps[-1], 1.5 * max(step or steps[-1] for step in learned.values()))
    right.set(xlabel="training step", ylabel="of each target, validation", xlim=(0, end), ylim=0)
    figure.legend(loc="outside right center")
    caption = f"Dots: the loss passes {task.learned_below:.3g}, and the target counts as learned."
    add_title(figure, flags, "how it learned", caption)
    return figure


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(model, flags, paths):
    """The attention of every head on one held-out sequence, first of those in the circuit, with
    frames around its paths. The tokens are sorted by chain."""
    task = train.task_of(flags)
    batch = task.draw("validation", 1)
    reads = record_reads(model, batch.inputs)
    order = batch.places[0].flatten()  # the tokens of each chain together, (N * roles)
    names, n = [*task.roles] * task.N, len(order)
    chains = np.arange(0, n, len(task.roles)) - 0.5  # where they begin
    ticks = names if n <= 40 else []  # more are too small to read, and take minutes

    circuit = {path[:2] for path in paths}
    heads = sorted(model.heads, key=lambda head: head not in circuit)
    figure, grid = panels(len(heads), 3, 4, 4.3)
    for axes, (layer, head) in zip(grid, heads, strict=True):
        pattern, _ = reads[layer, head]
        axes.imshow(pattern[0, order][:, order], "Blues", vmin=0, vmax=1)
        axes.set_title(f"L{layer}H{head}")
        axes.set_xticks(range(len(ticks)), ticks, rotation=90)
        axes.set_yticks(range(len(ticks)), ticks)
        axes.tick_params(length=0, pad=1, labelsize=min(8, 200 / n))
        axes.hlines(chains, -0.5, n - 0.5, GRAY, lw=0.5)
        axes.vlines(chains, -0.5, n - 0.5, GRAY, lw=0.5)
        own = [path for path in paths if path[:2] == (layer, head)]
        edges = mark_edges(own, task, batch.places)[0, order][:, order]
        axes.plot(*edges.T.nonzero().T, "s", ms=250 / n, mfc="none", mec=RED)
    caption = f"""Heads of the circuit come first. Rows attend to columns. Tokens between lines: \
{" ".join(task.roles)}.
Red: paths of the circuit. They were found on many sequences, and may be empty in this one."""
    add_title(figure, flags, "where it attends", caption)
    return figure


# ---- Figures 5 and 7, Appendix D: the circuit, and how its paths emerged


def tokens_of(task, paths):
    """All roles as they stand in a sequence, and those 1b+1 that some path has."""
    tokens = [[*slot, *(f"{slot[-1]}+{i}" for i in range(1, 9))] for slot in task.chain_slots]
    used = {*task.roles, *(token for path in paths for token in path[2:])}
    return [token for token in itertools.chain(*tokens) if token in used]


def draw_diagram(axes, flags, looks):
    """Draw the tokens of a chain across and the layers that have paths upward, letters for what can
    have arrived at a token by then, and arrows from what is read to its reader;
    looks: {path: (text, color, width)}."""
    task, paths = train.task_of(flags), sorted(looks)
    x_of = {token: x for x, token in enumerate(tokens_of(task, paths))}

    # one row a layer that has paths, from the input, layer -1
    rows = arrivals(paths, task)
    axes.figure.set_size_inches(max(7.5, 0.85 * len(x_of) + 1.2), 0.8 * len(rows) + 2)
    axes.set_yticks(range(len(rows)), ["input", *(f"layer {layer}" for layer, _ in rows[1:])])
    axes.set_xticks(range(len(x_of)), x_of)
    axes.set(xlim=(-0.6, len(x_of) - 0.3), ylim=(-0.4, len(rows) - 0.6), frame_on=False)
    axes.tick_params(length=0)
    axes.vlines(x_of.values(), 0, len(rows) - 1, FAINT, lw=1, zorder=0)

    # the arrows, and where they start and end letters, as at the input
    shown = {(0, token) for token in x_of}
    y_of = {layer: y for y, (layer, _) in enumerate(rows)}
    center = dict(size=8.5, ha="center", va="center", zorder=4)  # on top of arrows
    for path in paths:
        y, (text, color, width) = y_of[path.layer], looks[path]
        read, dashes = path.read.rstrip("*"), "--" if "*" in path.read else "-"
        start, end = (x_of[read], y - 0.8), (x_of[path.reader], y - 0.2)
        style = dict(arrowstyle="-|>", mutation_scale=13, color=color, lw=width, ls=dashes)
        axes.annotate("", end, start, arrowprops=style)
        head = f"H{path.head} " * (flags.heads > 1)
        box = dict(fc="white", ec="none", pad=1)
        axes.text(*np.mean([start, end], 0), head + text, bbox=box, **center)
        shown |= {(y - 1, read), (y, path.reader)}
    center |= dict(family="monospace", weight="bold", color="white")
    for y, token in shown:
        symbols = sorted(rows[y][1][token])
        for i, k in enumerate(symbols):  # side by side
            box = dict(boxstyle="round,pad=0.25", fc=symbol_color(k), ec="white")
            x = x_of[token] + 0.2 * (i - (len(symbols) - 1) / 2)
            axes.text(x, y, task.labels[k][0], bbox=box, **center)


def draw_circuit(flags, report):
    """Figure 5: the circuit; the more the loss rises without a path, the wider its arrow."""
    task, paths, looks = train.task_of(flags), paths_in(report), {}
    # {layer: {token: what has arrived there before this layer}}
    before = {layer: holds for (_, holds), (layer, _) in itertools.pairwise(arrivals(paths, task))}
    for path, row in paths.items():
        # red: 2b, of the pair x_1 x_2, reads an x_3 or beyond
        brought, has = before[path.layer][path.read.rstrip("*")], before[path.layer][path.reader]
        ahead = path.reader in task.roles and max(brought, default=0) > task.roles[path.reader]
        color = RED if ahead and path.reader != "q" else GRAY if brought <= has else INK
        text = f"{row['attention']:.2f}" if row["attention"] < 0.9 else ""
        looks[path] = text, color, 1 + 2 * min(1, max(row["without"].values()))
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    verdict, ablation = report["verdict"].split(":")[0], report["ablation"]
    caption = f"""{LETTERS} Numbers: mean attention below 0.9.
Wider: the loss rises more without it. Red: reads ahead, beyond its own pair. Gray: brings no new
letter. Dashed: reads the tokens of all chains. Circuit {verdict}; the worst target has a loss of
{max(report[ablation].values()):.3f} under {ablation} ablation (n = {report["sequences"]})."""
    add_title(figure, flags, "what it learned", caption)
    return figure


def checkpoints_of(run):
    """The checkpoint files of a run, by step."""
    return sorted(pathlib.Path(run, "ckpt").glob("*.pt"))


@torch.no_grad()
def measure_emergence(run, paths, n=32):
    """What emergence.json holds: each path's attention in n sequences at each checkpoint."""
    files, rows = checkpoints_of(run), [dict(path._asdict(), mean=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, task, _ = train.load(run, f"ckpt/{file.name}")
        batch = task.draw("emergence", n)
        reads = record_reads(model, batch.inputs)
        for path, row in zip(paths, rows, strict=True):
            pattern, _ = reads[path[:2]]
            attention = mean_attention(pattern, path, task, batch.places).item()
            row["mean"].append(round(attention, 4))
    return dict(sequences=n, steps=[int(file.stem) for file in files], paths=rows)


def emergence_steps(emergence):
    """{path: the step, interpolated, at which its mean attention first passes 0.5, or None}."""
    steps, rows = emergence["steps"], paths_in(emergence)
    # x first passes 0.5 where -x first is below -0.5
    return {path: first_below(steps, [-x for x in rows[path]["mean"]], -0.5) for path in rows}


def draw_emergence(flags, emergence, log):
    """Figure 7: the step at which each path emerged; the later, the darker."""
    rows, steps, n = paths_in(emergence), emergence_steps(emergence), emergence["sequences"]
    looks = {path: (f"({rows[path]['mean'][-1]:.2f})", GRAY, 1) for path in rows}
    passed = sorted((step, path) for path, step in steps.items() if step is not None)
    for rank, (step, path) in enumerate(passed, 1):
        looks[path] = f"{step:.0f}", matplotlib.colormaps["plasma_r"](rank / len(passed)), 2
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    learned = crossings(log, train.task_of(flags))
    learned = [f"{name} {step:.0f}" for name, step in learned.items() if step is not None]
    caption = f"""{LETTERS}
Numbers: the training step at which mean attention (n = {n}) passes 0.5 (the later, the darker); in
brackets its last value, if it never does. Reads below 0.5, or by other heads, may help before.
Learned at step: {", ".join(learned) or "nothing"}."""
    add_title(figure, flags, "when each path emerged", caption)
    return figure


def draw_paths(flags, emergence):
    """Appendix D: the attention of each path over training."""
    figure, grid = panels(len(emergence["paths"]), 4, 2.5, 1.8, sharey=True)
    for axes, (path, row) in zip(grid, paths_in(emergence).items(), strict=True):
        axes.plot(emergence["steps"], row["mean"], color=INK)
        axes.set_title(path, size=9)
        axes.axhline(0.5, color=RED, lw=0.5)
    caption = f"Mean attention (n = {emergence['sequences']}) by training step"
    add_title(figure, flags, "how it learned its paths", caption)
    return figure


# ---- what all figures share


def panels(count, columns, width, height, **more):
    """(figure, [axes, ...]): a grid of panels, each of width x height inches."""
    rows = (count - 1) // columns + 1
    figure = Figure(figsize=(width * columns, height * rows + 1), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **more)
    for axes in grid.flat[count:]:
        axes.axis("off")
    return figure, list(grid.flat[:count])


def add_title(figure, flags, title, caption):
    """Name the run above a figure, by its directory, and write a caption below it."""
    style = dict(x=0.01, ha="left", parse_math=False)
    figure.suptitle(f"{flags.out.resolve().name}: {title}", size=13, weight="bold", **style)
    figure.supxlabel(caption, color="dimgray", size=8.5, **style)


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def shown_name(name):
    """A name as matplotlib shows it: x_12 with an index."""
    return re.sub(r"^x_(\d+)$", r"$x_{\1}$", name)


def symbol_color(k):
    """The colour of x_k in all figures."""
    return SYMBOLS[k % len(SYMBOLS)]


# ---- the command line


def figures_of(run):
    """Yield (file name, figure) for all that this run directory has been through."""
    flags, log = train.read_flags(run), train.read_log(run)
    yield "curves.png", draw_curves(flags, log)
    report = read_report(run)
    paths = sorted(paths_in(report))
    yield "attention_maps.png", draw_attention_maps(train.load(run)[0], flags, paths)
    if not paths:
        print("there is no circuit:", report.get("verdict", f"run python ablate.py {run} first"))
        return
    yield "circuit.png", draw_circuit(flags, report)
    if checkpoints_of(run):
        train.write_file(run / "emergence.json", measure_emergence(run, paths))
    emergence = read_report(run, "emergence.json")
    if sorted(paths_in(emergence)) != paths:
        print("no emergence of this circuit: there are no checkpoints (train.py --save-every)")
        return
    yield "emergence.png", draw_emergence(flags, emergence, log)
    yield "paths.png", draw_paths(flags, emergence)


def main():
    p = command_line("analyze.py", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory of train.py")
    run = p.parse_args().run
    for name, figure in figures_of(run):
        save_figure(figure, run / name)
        print(run / name)


if __name__ == "__main__":
    main()
