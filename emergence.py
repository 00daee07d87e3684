"""How a circuit emerged: what the checkpoints of a run tell about each of its paths (Section 9).

    python analyze.py results/D     # draws FIGURES too, where there is something to draw

Runs trained with --save-every have checkpoints. What is measured on them is kept in emergence.json,
so that the checkpoints may go.
"""

import itertools
import json
import math
import pathlib
import sys
import time
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from PIL import Image

import runs
from circuit import Path, one_hot, paths_in, read_paths, read_report
from data import held_out, partial_losses
from diagram import USEFUL, diagram_size, draw_diagram, faint_note, path_title
from order import emergence_steps, removal_rises
from train import asked_symbols


# ---- measuring


def checkpoints_of(folder):
    """The checkpoints of a run, first step first."""
    return sorted(pathlib.Path(folder, "ckpt").glob("*.pt"), key=lambda file: int(file.stem))


def measure_emergence(folder, paths, n=32):
    """What happens to each path over the checkpoints, on n sequences, as emergence.json keeps it: a
    dict with a row per checkpoint."""
    config, rows, began = runs.read_config(folder), [], time.time()
    task = runs.task_of(config)
    batch, files = runs.sequences(config, held_out("emergence", n)), checkpoints_of(folder)
    for done, file in enumerate(files, 1):
        model = runs.load(folder, f"ckpt/{file.name}")[0]
        rows.append(dict(step=int(file.stem)) | measure_checkpoint(model, config, paths, batch))
        left = (time.time() - began) / done * (len(files) - done)
        progress = f"\rcheckpoint {done}/{len(files)}, {left:.0f} s left "
        print(progress, end="" if done < len(files) else "\n", file=sys.stderr, flush=True)

    # layers and heads from 1, roles by name
    names = task.names
    named = [(at + 1, head + 1, names[a], names[b]) for at, head, a, b in paths]
    return dict(sequences=n, paths=named, rows=rows)


@torch.no_grad()
def measure_checkpoint(model, config, paths, batch):
    """The partial losses and, of each path, its mean attention, the 10% and 90% quantiles of it
    over sequences, for which share of tokens it is the largest (hits), and the partial losses
    without it (its attention taken away, all else alive); and those without each head."""
    task, of_paths, of_heads = runs.task_of(config), [], []
    predictions, patterns = model(batch.inputs, return_patterns=True)

    def losses(predictions):
        return rounded(partial_losses(predictions, batch.targets, config["K"]).mean(0))

    for path in paths:
        # what each token with the role gives to the target, and what it gives at most, (B, N)
        pattern, tokens = patterns[path.layer][:, path.head], batch.positions[..., path.source]
        attention = read_paths(pattern, task, batch.positions)[..., path.source, path.target]
        highest = pattern.amax(-1).gather(1, tokens)

        # in numbers, and what is lost without it
        low, high = attention.mean(1).quantile(torch.tensor([0.1, 0.9]))
        hits = (attention == highest).float().mean()
        values = rounded(torch.stack([attention.mean(), low, high, hits]))
        kept = pattern * (one_hot([path], task, batch.positions) == 0)
        without = losses(model(batch.inputs, patterns={path[:2]: kept}))
        names = "mean", "low", "high", "hits"
        of_paths.append(dict(zip(names, values, strict=True), without=without))

    # whether in the circuit or not: a head may matter early and die later
    nothing = torch.zeros(task.T, task.T)
    for head in itertools.product(range(len(patterns)), range(patterns[0].shape[1])):
        of_heads.append(losses(model(batch.inputs, patterns={head: nothing})))
    return dict(losses=losses(predictions), paths=of_paths, heads=of_heads)


def rounded(values):
    return [round(value, 4) for value in values.tolist()]


# ---- reading


def read_circuit(folder, task):
    """The report of ablate.py on a run, {} if there is none, and the {Path: mean attention} of its
    circuit, {} if none was found. ValueError with one line for a report that cannot be read."""
    report = read_report(folder)

    # the key that was added last, of the report of a circuit and of one without
    newest = "removals_at_the_papers_least" if "removals" in report else "grade"
    if report and newest not in report:
        what = f"{folder}/circuit.json is of an older form"
        raise ValueError(f"{what}: run ablate.py again (python ablate.py {folder})")
    return report, paths_in(report, task) or {}


class History(NamedTuple):
    """Of one path, lists with a value per checkpoint."""

    mean: list  # attention
    low: list  # its 10% and 90% quantiles over sequences
    high: list
    hits: list  # share of tokens whose largest attention this is
    without: dict  # {symbol: its losses without the path}


class Emergence(NamedTuple):
    """What the checkpoints of a run tell about a circuit."""

    sequences: int
    steps: list
    losses: dict  # {symbol: its loss at each checkpoint}
    paths: dict  # {Path: History}
    heads: dict = {}  # {(layer, head): {symbol: its losses without the head}}; {} if not measured


def read_emergence(folder, paths):
    """The Emergence of these paths: what emergence.json says or, if it does not know them all, what
    is measured on the checkpoints and then kept there. None where there is neither."""
    file, config = pathlib.Path(folder, "emergence.json"), runs.read_config(folder)
    known = by_path(runs.read_json(file), config, file) if file.exists() else None
    enough = known and set(paths) <= set(known.paths)

    # nothing to measure it on
    if not enough and not checkpoints_of(folder):
        if known:
            what = f"{file} is of another circuit, and there are no checkpoints to measure"
            print(f"{what}: not used", file=sys.stderr)
        return None

    if not enough:
        measured = measure_emergence(folder, paths)
        runs.write_text(file, json.dumps(measured) + "\n")
        known = by_path(measured, config, file)
    return known._replace(paths={path: known.paths[path] for path in paths})


def by_path(measured, config, file):
    """The Emergence in what emergence.json holds, a dict; ValueError if it is of another task."""
    symbols, names, histories = asked_symbols(config), runs.task_of(config).names, {}

    def by_symbol(losses):  # a list per checkpoint -> a curve per symbol
        return dict(zip(symbols, zip(*losses, strict=True), strict=True))

    try:
        rows, sequences = measured["rows"], measured["sequences"]
        for number, (layer, head, source, target) in enumerate(measured["paths"]):
            if target == "previous token":  # of an older circuit: such tokens are no paths now
                continue
            path = Path(layer - 1, head - 1, names.index(source), names.index(target))
            own = [row["paths"][number] for row in rows]
            kinds = "mean", "low", "high", "hits"
            curves = [[values[kind] for values in own] for kind in kinds]
            histories[path] = History(*curves, by_symbol([values["without"] for values in own]))
        steps, losses = [row["step"] for row in rows], by_symbol([row["losses"] for row in rows])
        numbers = itertools.product(range(config["layers"]), range(config["heads"]))
        of_heads = zip(*(row.get("heads", []) for row in rows), strict=True)
        heads = dict(zip(numbers, map(by_symbol, of_heads), strict=False))
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is of another task or damaged: remove it") from None
    return Emergence(sequences, steps, losses, histories, heads)


# ---- drawing: each function draws one of FIGURES, from an analyze.Run, into a file


def draw_emergence(run, file):
    """Figure 7: the circuit with its attention, and the step at which each path emerged."""
    # left: how it ended
    width, height = diagram_size(run.task, run.paths)
    size = (1.7 * width, height + 0.3)
    figure, panels = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    labels = {path: f"{attention:.2f}" for path, attention in run.paths.items()}
    draw_diagram(panels[0], run.task, run.paths, labels.get, lambda path: USEFUL)
    panels[0].set_title("mean attention at the end" + faint_note(run.paths), fontsize=11)

    # right: how it began; the brightest colours of viridis are too faint for lines
    when = emergence_steps(run.emergence)
    known = [step for step in when.values() if step is not None]
    shades = ListedColormap(plt.get_cmap("viridis_r")(torch.linspace(0.1, 1, 256).numpy()))
    ends = (min(known), max(known)) if known else (0, 1)
    scale = ScalarMappable(plt.Normalize(*ends), shades)
    labels, colors = {}, {}
    for path, step in when.items():
        labels[path] = "never" if step is None else f"{step:.0f}"
        colors[path] = "lightgray" if step is None else scale.to_rgba(step)
    draw_diagram(panels[1], run.task, run.paths, labels.get, colors.get)
    title = f"step at which it first passes 0.5 ({run.emergence.sequences} sequences)"
    panels[1].set_title(title, fontsize=11)
    if known:
        figure.colorbar(scale, ax=panels[1], label="training step", shrink=0.8)
    runs.save_figure(figure, file)


def draw_paths(run, file):
    """Appendix D: the attention of each path over training."""
    # a panel per path
    when, steps, columns = emergence_steps(run.emergence), run.emergence.steps, 4
    lines = math.ceil(len(when) / columns)
    shape = dict(figsize=(3.2 * columns, 2.1 * lines + 0.9), sharex=True, sharey=True)
    figure, grid = plt.subplots(lines, columns, squeeze=False, layout="constrained", **shape)
    for axes in grid.flat[len(when) :]:
        axes.axis("off")
    for axes, (path, history) in zip(grid.flat, run.emergence.paths.items(), strict=False):
        # its attention
        spread = dict(alpha=0.25, label="10% to 90% of the sequences")
        axes.fill_between(steps, history.low, history.high, color="tab:blue", **spread)
        axes.plot(steps, history.mean, color="tab:blue", label="mean attention")
        label = "share of tokens whose largest attention this is"
        axes.plot(steps, history.hits, color="tab:orange", lw=1, label=label)

        # when it emerged
        axes.axhline(0.5, color="gray", ls=":", lw=1)
        if when[path] is not None:
            axes.axvline(when[path], color=USEFUL, lw=1)
            beside = dict(xytext=(3, 0), textcoords="offset points", color=USEFUL, fontsize=9)
            axes.annotate(f"{when[path]:.0f}", (when[path], 0.05), **beside)
        axes.set_title(path_title(path, run.task, run.config["heads"]), fontsize=10)
        axes.set(ylim=(-0.03, 1.03))

    # the scale, also where nothing is drawn below, and the legend
    for axes in grid.flat[max(0, len(when) - columns) : len(when)]:
        axes.tick_params(labelbottom=True)
    label = f"training step; red: the mean passes 0.5 ({run.emergence.sequences} sequences)"
    figure.supxlabel(label, fontsize=10)
    above = dict(loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), **above)
    runs.save_figure(figure, file)


def draw_removal(run, file):
    """When a path starts to matter, and for which symbol: what its removal raises."""
    removed = [history.without for history in run.emergence.paths.values()]
    titles = [path_title(path, run.task, run.config["heads"]) for path in run.emergence.paths]
    map_of_rises(run.emergence, removed, titles, "path", file)


def draw_heads(run, file):
    """The same of every head, whether it is in the circuit at the end or not (marked if it is)."""
    useful, titles = {path[:2] for path in run.paths}, []
    for layer, head in run.emergence.heads:
        title = f"layer {layer + 1}"
        title += f" head {head + 1}" if run.config["heads"] > 1 else ""
        titles.append(title + " *" * ((layer, head) in useful))
    what = "head (*: in the circuit)"
    map_of_rises(run.emergence, list(run.emergence.heads.values()), titles, what, file)


def map_of_rises(emergence, removed, titles, what, file):
    """A map for each symbol: a row for each that was removed, a column per checkpoint."""
    # what is drawn
    steps, count, rises = emergence.steps, len(removed), removal_rises(emergence, removed)
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [steps[0], *middles, steps[-1]]  # checkpoints may be unequally apart

    # a panel per symbol
    shape = dict(figsize=(3.3 * len(rises) + 2, 0.33 * count + 1.8), sharey=True)
    figure, panels = plt.subplots(1, len(rises), squeeze=False, layout="constrained", **shape)
    for axes, (symbol, rise) in zip(panels[0], rises.items(), strict=True):
        rows = [number - 0.5 for number in range(count + 1)]
        image = axes.pcolormesh(edges, rows, rise, cmap="Reds", vmin=0, vmax=1)
        crossing = runs.first_below(steps, emergence.losses[symbol])
        if crossing is not None:
            axes.axvline(crossing, color="tab:blue", lw=1, ls="--")
        axes.set(title=f"$x_{{{symbol[2:]}}}$", xlabel="training step", ylim=(count - 0.5, -0.5))

    # the names and the scale
    panels[0, 0].set_yticks(range(count), titles, fontsize=9)
    figure.colorbar(image, ax=panels, label="rise of the partial loss (MSE)", extend="max")
    title = f"What the removal of each {what} destroys ({emergence.sequences} sequences)\n"
    figure.suptitle(title + "dashed: the symbol's loss passes 0.5", fontsize=11)
    runs.save_figure(figure, file)


def draw_animation(run, file):
    """The circuit lighting up through training, the partial losses under it."""
    # the frame that stays
    steps, (width, height) = run.emergence.steps, diagram_size(run.task, run.paths)
    shape = dict(figsize=(0.75 * width, 0.75 * (height + 3.2)), height_ratios=[height, 2.6])
    figure, (above, below) = plt.subplots(2, 1, layout="constrained", **shape)
    drawn = draw_diagram(above, run.task, run.paths, lambda path: "0.00", lambda path: USEFUL)
    symbols = run.emergence.losses
    for symbol, losses in symbols.items():
        color = runs.symbol_color(int(symbol[2:]), run.task.symbols - 1)
        below.plot(steps, losses, color=color, label=f"$x_{{{symbol[2:]}}}$")
    now = below.axvline(0, color=USEFUL)
    below.set(xlabel="training step", ylabel="MSE of each symbol", ylim=(0, 1.2))
    below.set_xlim(steps[0], steps[-1])
    below.legend(fontsize="small", ncols=len(symbols), loc="upper right")

    def show(checkpoint):
        title = f"Who attends to whom after {steps[checkpoint]} training steps"
        above.set_title(title, fontsize=11)
        now.set_xdata([steps[checkpoint]] * 2)
        for path, history in run.emergence.paths.items():
            (arrow, text), mean = drawn[path], history.mean[checkpoint]
            arrow.set_alpha(max(0.04, mean))
            text.set(text=f"{mean:.2f}", alpha=max(0.15, mean))
        figure.canvas.draw()
        return Image.fromarray(numpy.asarray(figure.canvas.buffer_rgba())).convert("RGB")

    # a frame per checkpoint, and the last for a second more
    figure.set_dpi(75)
    show(0)
    figure.set_layout_engine("none")  # to lay out every frame anew takes most of the time
    frames = [show(checkpoint) for checkpoint in range(len(steps))]
    frames += frames[-1:] * 8
    moving = dict(save_all=True, append_images=frames[1:], duration=125, loop=0)
    runs.write_file(file, lambda temporary: frames[0].save(temporary, "GIF", **moving))
    plt.close(figure)


FIGURES = {
    "emergence.png": draw_emergence,
    "paths.png": draw_paths,
    "removal.png": draw_removal,
    "emergence.gif": draw_animation,
}
HEAD_FIGURES = {"heads.png": draw_heads}  # not in every emergence.json
