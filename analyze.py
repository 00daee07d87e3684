"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: curves.png, attention_maps.png, circuit.png, ...

A run with checkpoints (--save-every) also shows how the paths of its circuit emerged. What was
measured stays in emergence.json, and is drawn from there once the checkpoints are deleted. It holds
the number of held-out sequences, a hash of the weights, the steps, and for each path its attention
at each step.

To add a figure, write a function that returns it, and yield it in `figures_of`.
"""

import itertools
import math
import pathlib
import textwrap

import train
from ablate import arrivals, by_head, mark_edges, mean_attention, paths_in, read_report
from data import command_line, progress

import matplotlib
import torch
from matplotlib.figure import Figure


CIRCUIT, INK, GRAY, FAINT, PALE = "#e63946", "#22223b", "#a3a3b3", "#d8d8e0", "#f0f0f5"
SYMBOLS = "#8d99ae #4361ee #2a9d8f #f4a261 #9d4edd #588157 #a44a3f #a3a3b3".split()  # of x_0, ...
SMALL = dict(size=8.5)
LABEL = dict(size=8.5, ha="center", va="center", zorder=4)  # on top of arrows
LETTERS = "Letters: symbols that can have arrived at a token."


# ---- Figure 6: losses


def first_below(steps, losses, level):
    """Return the step, linearly interpolated, at which a curve first passes below level; the first
    step if it begins there; None if it never does."""
    if losses[0] < level:
        return steps[0]
    for (start, before), (end, after) in itertools.pairwise(zip(steps, losses, strict=True)):
        if after < level <= before:
            return start + (end - start) * (before - level) / (before - after)
    return None


def crossings(rows, task):
    """Return {x_1: the step at which it was learned, or None, ...} from the rows of a log."""
    found, steps = {}, [row["step"] for row in rows]
    for name in task.target_names:
        found[name] = first_below(steps, [row[name] for row in rows], task.learned_below)
    return found


def draw_curves(flags, rows):
    """The losses, the steps at which symbols were learned, and where they stall."""
    task, steps = train.task_of(flags), [row["step"] for row in rows]
    figure, (left, right) = panels(2, 2, 5, 3)

    # left: all symbols together; the first row has no training loss
    left.plot(steps[1:], [row["train"] for row in rows[1:]], color=GRAY, label="training")
    left.plot(steps, [row["val"] for row in rows], color=INK, label="validation, 1024 sequences")
    if flags.stop_below:
        left.axhline(flags.stop_below, color=CIRCUIT, ls="--", label="--stop-below")
    left.set(xlabel="training step", ylabel=task.loss_name, yscale="log")

    # right: each symbol alone, in its color, or in any if the task has other names than x_k
    numbers = itertools.chain(task.targets, itertools.count())
    for k, (name, step) in zip(numbers, crossings(rows, task).items(), strict=False):
        learned = "" if step is None else f": learned at {step:.0f}"
        losses, label = [row[name] for row in rows], f"${name}${learned}"
        right.plot(steps, losses, color=symbol_color(k), label=label)
        if step is not None:
            right.plot(step, task.learned_below, "o", color=symbol_color(k))
    right.set(xlabel="training step", ylabel="of each symbol, validation", ylim=0)
    # where training can stall, and what a model there does; for N = 1 both are one
    levels = {task.chance: f"averages the {task.N} candidates", task.blank: "knows nothing"}
    for level, meaning in levels.items():
        right.axhline(level, color=GRAY, ls=":")
        right.text(steps[-1], level, f"{level:.3g}: {meaning}", ha="right", va="bottom", **SMALL)
    figure.legend(loc="outside right center")
    add_title(figure, flags, "how it learned", "Dots: the symbol counts as learned.")
    return figure


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(model, flags, paths):
    """The attention of every head on one held-out sequence, first of those in the circuit, with
    frames around its paths. The tokens are sorted by chain."""
    task = train.task_of(flags)
    batch = task.draw("validation", 1)
    _, patterns = model(batch.inputs, return_patterns=True)

    # the tokens of each chain together, (N, roles), without those of none; or all, without roles
    order, names = batch.places[0].flatten().tolist(), [*task.roles] * task.N
    if not names:
        order = names = [*range(task.T)]

    groups = by_head(paths)
    groups |= {head: [] for head in model.heads if head not in groups}
    figure, grid = panels(len(groups), 4, 3, 3.1)
    for axes, ((layer, head), group) in zip(grid, groups.items(), strict=True):
        pattern = patterns[layer][0, head, order][:, order].numpy()
        axes.imshow(pattern, "Blues", vmin=0, vmax=1)
        axes.set_title(f"L{layer}H{head}")
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0, pad=1, labelsize=min(8, 180 / len(names)))
        for side in range(0, len(names), len(task.roles) or task.T):  # between chains
            axes.axhline(side - 0.5, color=GRAY, lw=0.5)
            axes.axvline(side - 0.5, color=GRAY, lw=0.5)
        edges = mark_edges(group, task, batch.places)[0, order][:, order]
        y, x = edges.nonzero().T.numpy()
        axes.plot(x, y, "s", ms=190 / len(names), mfc="none", mec=CIRCUIT)
    caption = "One held-out sequence. Rows attend to columns. Red: the paths of the circuit."
    add_title(figure, flags, "where it attends", caption)
    return figure


# ---- Figures 5 and 7: the circuit


def slots_of(task, paths):
    """Return [[token of the diagram, ...], ...]: the roles of each slot, and after it the
    intermediate tokens (3b+1) that these paths have."""
    ends = {end for path in paths for end in (path.reader, path.token)}
    slots = []
    for slot in task.chain_slots:
        after = sorted(end for end in ends if "+" in end and end.split("+")[0] in slot)
        slots += [slot, after] if after else [slot]
    return slots


def draw_diagram(axes, flags, looks):
    """Draw the tokens of a chain across, the layers that have paths upward, letters for what can
    have arrived at a token by then, and arrows from what is read to its reader, dashed if it is a
    star; looks: {path: (text, color, width)}. Return {path: (arrow, label)}, for a film."""
    task, paths = train.task_of(flags), sorted(looks)
    stages = arrivals(paths, task)  # [(layer, {token: symbols}), ...], from the input on
    columns = draw_tokens(axes, slots_of(task, paths))

    # arrows into one reader are parallel, one unit apart: a unit upward is 0.2 inches. The nearest
    # token comes first, so that they do not cross
    arriving = {}
    for path in sorted(paths, key=lambda path: abs(columns[path.token] - columns[path.reader])):
        arriving.setdefault((path.layer, path.reader), []).append(path)
    height = 3 + max(map(len, arriving.values()))  # of a layer
    y_of = {layer: height * number for number, (layer, _) in enumerate(stages)}
    top = max(y_of.values())
    axes.figure.set_size_inches(max(7.5, 0.85 * len(columns) + 1.2), 0.2 * top + 2)
    axes.set(xlim=(-0.6, len(columns) - 0.3), ylim=(-2, top + 1))
    axes.vlines(columns.values(), 0, top, FAINT, lw=1, zorder=0)
    axes.set_yticks([*y_of.values()], ["input", *(f"layer {layer}" for layer, _ in stages[1:])])

    drawn, shown = {}, {(0, token) for token in columns}  # where letters stand
    for (layer, reader), group in arriving.items():
        for i, path in enumerate(group, 1):
            # arrow i of n starts i units above the layer below, and ends n + 1 - i below its own
            start = columns[path.token], y_of[layer] - height + i
            end = columns[reader], y_of[layer] - (len(group) + 1 - i)
            text, color, width = looks[path]
            if flags.heads > 1:
                text = f"H{path.head} {text}".strip()
            drawn[path] = draw_arrow(axes, start, end, text, color, width, path.star)
            shown |= {(y_of[layer] - height, path.token), (y_of[layer], reader)}
    for layer, holds in stages:
        for token in columns:
            if (y_of[layer], token) in shown:
                draw_letters(axes, columns[token], y_of[layer], holds[token], task)
    return drawn


def draw_tokens(axes, slots):
    """Name the tokens below a diagram, with a band behind each slot; return {token: x}."""
    columns = {}
    for slot in slots:
        band = [len(columns) - 0.15, len(columns) + len(slot) - 0.85]
        axes.plot(band, [0, 0], color=PALE, lw=30, solid_capstyle="round")
        for token in slot:
            columns[token] = len(columns)
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    return columns


def draw_arrow(axes, start, end, text, color, width, dashed):
    """Draw an arrow between two points (x, y), with a text in its middle; return both."""
    style = dict(arrowstyle="-|>", mutation_scale=13, color=color, lw=width)
    arrow = axes.annotate("", end, start, arrowprops=dict(style, ls="--" if dashed else "-"))
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    label = axes.text(x, y, text, bbox=dict(fc="white", ec="none", pad=1), **LABEL)
    return arrow.arrow_patch, label


def draw_letters(axes, x, y, symbols, task):
    """Write the letters of these symbols, {k of x_k}, side by side around a point."""
    for i, k in enumerate(sorted(symbols)):
        box = dict(boxstyle="round,pad=0.25", fc=symbol_color(k), ec="white")
        style = dict(LABEL, family="monospace", weight="bold", color="white", bbox=box)
        axes.text(x + 0.2 * (i - (len(symbols) - 1) / 2), y, task.labels[k][0], **style)


def arrow_color(path, holds, task):
    """Return red if a path reads ahead: if it brings an x_k with k above those of the reader's own
    pair, as to 2b (x_1 and x_2) an x_3; gray if it brings nothing new. holds: {token: k of what
    can have arrived there before}."""
    brought = holds[path.token]
    for slot in task.chain_slots:
        own = [task.roles[role] for role in slot]
        if path.reader in slot and path.reader != "q" and max(brought, default=0) > max(own):
            return CIRCUIT
    return GRAY if brought <= holds[path.reader] else INK


def draw_circuit(flags, report):
    """Figures 5 and 7: the circuit; the more is lost without a path, the wider its arrow."""
    task, paths, looks = train.task_of(flags), paths_in(report), {}
    before = {layer: holds for (_, holds), (layer, _) in itertools.pairwise(arrivals(paths, task))}
    for path, row in paths.items():
        text = f"{row['attention']:.2f}" if row["attention"] < 0.9 else ""
        color = arrow_color(path, before[path.layer], task)
        looks[path] = text, color, 1 + 2 * min(1, max(row["without"].values()))
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    worst = max(report[report["ablation"]].values())
    caption = f"""{LETTERS} Wider: more is lost without it. Red: reads ahead, beyond its own pair.
Gray: brings nothing new. Dashed: reads all chains. Numbers: mean attention below 0.9.
Circuit {report["verdict"].split(":")[0]}; the worst symbol has a loss of {worst:.3f} \
under {report["ablation"]} ablation (n = {report["sequences"]})."""
    add_title(figure, flags, "what it learned", caption)
    return figure


# ---- Figure 7 and Appendix D: how the paths emerged


def checkpoints_of(run):
    """Return the checkpoint files of a run, the first step first. ValueError if the name of one
    begins like a number but is none."""
    return sorted(pathlib.Path(run, "ckpt").glob("[0-9]*.pt"), key=lambda file: int(file.stem))


@torch.no_grad()
def measure_emergence(run, paths, n=32):
    """Return what emergence.json holds, measured on n sequences at each checkpoint of a run."""
    files = checkpoints_of(run)
    rows = [dict(path._asdict(), mean=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, task, _ = train.load(run, f"ckpt/{file.name}")
        batch = task.draw("emergence", n)
        _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in zip(paths, rows, strict=True):
            pattern = patterns[path.layer][:, path.head]
            attention = mean_attention(pattern, path, task, batch.places)
            row["mean"].append(round(attention.item(), 4))
    steps = [int(file.stem) for file in files]
    return dict(sequences=n, weights=train.weights_hash(run), steps=steps, paths=rows)


def emergence_steps(emergence, level=0.5):
    """Return {path: the step, linearly interpolated, at which its mean attention first passes the
    level, or None}."""
    steps = {}
    for path, row in paths_in(emergence).items():  # the first below of the negatives
        steps[path] = first_below(emergence["steps"], [-x for x in row["mean"]], -level)
    return steps


def draw_emergence(flags, emergence):
    """Figure 7: the step at which each path emerged; the later, the darker."""
    looks, steps = {}, emergence_steps(emergence)
    known = sorted({*steps.values()} - {None})
    for path, step in steps.items():
        looks[path] = "never", FAINT, 1
        if step is not None:
            rank = (known.index(step) + 1) / len(known)
            looks[path] = f"{step:.0f}", matplotlib.colormaps["plasma_r"](rank), 2
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    caption = f"""{LETTERS} Numbers: the step at which mean attention
first passes 0.5 (n = {emergence["sequences"]}). The later, the darker."""
    add_title(figure, flags, "when each path emerged", caption)
    return figure


def draw_paths(flags, emergence):
    """Appendix D: the attention of each path over training."""
    steps = emergence_steps(emergence)
    figure, grid = panels(len(steps), 4, 2.5, 1.8, sharey=True)
    for axes, (path, step), row in zip(grid, steps.items(), emergence["paths"], strict=True):
        axes.plot(emergence["steps"], row["mean"], color=INK)
        axes.set_title(f"{path}: {'never' if step is None else round(step)}", size=9)
        axes.axhline(0.5, color=CIRCUIT, lw=0.5)
    n = emergence["sequences"]
    caption = f"Mean attention (n = {n}) by training step, and when it passes 0.5"
    add_title(figure, flags, "how it learned its paths", caption)
    return figure


# ---- what all figures share


def panels(count, columns, width, height, **options):
    """Return (figure, [axes, ...]): a grid of panels, each of width x height inches."""
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows + 1), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat[count:]:
        axes.axis("off")
    return figure, list(grid.flat[:count])


def add_title(figure, flags, title, caption):
    """Name the run above a figure, by its directory; write a caption and its command below it."""
    title = f"{flags.out.resolve().name}: {title}"
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    command = textwrap.wrap(train.command_of(flags), 80, break_on_hyphens=False)
    caption += "\n" + " \\\n    ".join(command)  # as a shell takes it in several lines
    figure.supxlabel(caption, x=0.01, ha="left", color="gray", wrap=True, **SMALL)


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def symbol_color(k):
    """Return the colour of x_k in all figures."""
    return SYMBOLS[k % len(SYMBOLS)]


# ---- the command line


def figures_of(run):
    """Yield (file name, figure) for all that this run directory has been through."""
    flags = train.read_flags(run)
    yield "curves.png", draw_curves(flags, train.read_log(run))
    if not (run / "model.pt").exists():
        print(f"there is no {run / 'model.pt'}: finish the training with --resume")
        return
    model, report = train.load(run)[0], read_report(run)
    paths = paths_in(report)
    yield "attention_maps.png", draw_attention_maps(model, flags, paths)
    if not paths:
        reason = report.get("verdict", f"run python ablate.py {run} first")
        print(f"there is no circuit to draw: {reason}")
        return
    yield "circuit.png", draw_circuit(flags, report)
    if checkpoints_of(run):
        train.write_file(run / "emergence.json", measure_emergence(run, sorted(paths)))
    emergence = read_report(run, "emergence.json")
    if paths_in(emergence).keys() == paths.keys():  # else none, or of another circuit
        yield "emergence.png", draw_emergence(flags, emergence)
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
