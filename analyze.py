"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: curves.png, attention_maps.png, circuit.png, ...

How the circuit emerged is measured and drawn if the run was trained with --save-every. The numbers
stay in emergence.json, so that the checkpoints may be deleted. A run that was stopped has no model
yet, and gets its losses alone. emergence.json is a dict:

    sequences: the number of held-out sequences that each checkpoint was measured on
    steps: the steps of the checkpoints
    paths: a row for each path of the circuit and of "attended" in circuit.json: layer, head,
        reader, read, and lists with a number for each step:
        mean, low, high: the mean attention, its 10% and its 90% quantile over sequences
        hits: the share of readers that attend to no token more than to what they read

To add a figure, write a function draw_...(run) that returns a matplotlib figure, and add a row to
FIGURES, with what the run must have for it.
"""

import itertools
import math
import pathlib
from typing import NamedTuple

from ablate import MEAN, Path, by_head, parts_of, paths_in, read_report, worst_of
from data import LOSS, Task, command_line, held_out, program, progress
from train import (
    Flags,
    checkpoints_of,
    load,
    precision,
    read_file,
    read_flags,
    read_log,
    sequences,
    write_file,
    writing,
)

import matplotlib
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch


CIRCUIT = "tab:red"  # the colour of its paths and heads, and of the steps in paths.png
ARROWS = "arrows point from the attended token to the token that reads it"


class Run(NamedTuple):
    """All that a figure may show."""

    folder: pathlib.Path
    model: torch.nn.Module  # None if training was stopped
    flags: Flags
    problem: Task
    log: list  # of log.jsonl
    report: dict  # of ablate.py, {} without circuit.json
    paths: dict  # {Path: its row in the report} of the circuit, {} if none was found
    emergence: dict  # {} if it was not measured


def read_run(folder):
    """Return the Run in a run directory."""
    flags, log, report = read_flags(folder), read_log(folder), read_report(folder)
    model = None
    if (folder / "model.pt").exists():
        model, flags = load(folder)
    emergence = read_file(folder / "emergence.json", {})
    return Run(folder, model, flags, flags.problem, log, report, paths_in(report), emergence)


# ---- Figure 6: losses


def first_below(steps, losses, level):
    """Return the step, linearly interpolated, at which a curve first passes below level; the first
    step if it begins there (with --init); None if it never does."""
    if losses and losses[0] < level:
        return steps[0]
    for (start, before), (end, after) in itertools.pairwise(zip(steps, losses, strict=True)):
        if after < level <= before:
            return start + (end - start) * (before - level) / (before - after)
    return None


def crossings(rows, flags):
    """Return {x_1: the step at which it was learned, or None, ...} from the rows of a log."""
    steps = [row["step"] for row in rows]
    level = flags.problem.learned_below
    found = {}
    for name in flags.target_names:
        found[name] = first_below(steps, [row[name] for row in rows], level)
    return found


def draw_curves(run):
    """The losses, the steps at which symbols were learned, and the plateaus."""
    flags, rows = run.flags, run.log
    steps = [row["step"] for row in rows]
    validation = [row["val"] for row in rows]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{flags.title}: validation loss {validation[-1]:.4f} at step {steps[-1]}")

    # left: all symbols together; the first row has no training loss
    left.plot(steps[1:], [row["train"] for row in rows[1:]], color="tab:gray", label="training")
    left.plot(steps, validation, color="black", label="validation, 1024 sequences")
    if flags.stop_below:
        left.axhline(flags.stop_below, color="tab:green", ls="--", label="--stop-below")
    left.set(xlabel="training step", ylabel=LOSS, yscale="log")
    left.legend(fontsize="small", loc="lower left")

    # right: each symbol alone
    for name, crossing in crossings(rows, flags).items():
        color = symbol_color(int(name[2:]), flags.problem.symbols - 1)
        label = f"${name}$"
        if crossing is not None:
            right.plot(crossing, flags.problem.learned_below, "o", color=color)
            label += f", below {flags.problem.learned_below:.3g} at step {crossing:.0f}"
        right.plot(steps, [row[name] for row in rows], color=color, label=label)
    highest, _ = flags.problem.plateaus[0]
    right.set(xlabel="training step", ylabel="of each symbol, validation", ylim=(0, 1.2 * highest))
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)

    # both: the plateaus, and what a model on each of them does
    for level, meaning in flags.problem.plateaus:
        left.axhline(level, color="tab:red", ls=":")
        right.axhline(level, color="tab:red", ls=":")
        right.text(steps[-1], level, f"{level:.3g}: {meaning}", ha="right", va="bottom")
    return figure


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(run):
    """The attention pattern of every head on one held-out sequence; those of the circuit have red
    frames."""
    # the patterns of all heads, and the names of the tokens
    batch = sequences(run.flags, held_out("validation", 1))
    with precision(run.flags):
        _, layers = run.model(batch.inputs, return_patterns=True)
    patterns = torch.cat(layers, 1)[0]  # (layers * heads, T, T)
    names = [run.problem.labels[symbol] for symbol in batch.symbols[0].tolist()]

    # a panel for each head, a row for each layer or for four of one head
    columns = run.flags.heads if run.flags.heads > 1 else min(4, len(patterns))
    figure, grid = panels(len(patterns), columns, 3.4, 3.2)
    circuit_heads = by_head(run.paths)
    for i, axes in enumerate(grid):
        layer, head = divmod(i, run.flags.heads)
        image = axes.imshow(patterns[i].numpy(), cmap="Blues", vmin=0, vmax=1)
        label_blocks(axes, run.problem, names)
        color, width = "black", 0.8
        if (layer, head) in circuit_heads:
            color, width = CIRCUIT, 2
        axes.set_title(f"L{layer}H{head}", fontsize=13, color=color)
        axes.spines[:].set(color=color, linewidth=width)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    tokens = "letter: symbol, A = $x_0$, B = $x_1$, ...; number: chain"
    if run.problem.distractors:
        tokens += f"; {run.problem.distractors[0]} and the like: distractors"
    figure.supxlabel(f"attended token ({tokens})", fontsize=13)
    figure.supylabel("attending token", fontsize=13)
    red = "; red: heads of the circuit" if run.paths else ""
    add_title(figure, run, f"attention patterns on one held-out sequence (n = 1){red}")
    return figure


def label_blocks(axes, problem, names):
    """Draw lines where blocks begin; write the roles large and, of 40 tokens or fewer, the names
    small."""
    middles, roles = [], []
    start = 0
    for block in problem.blocks:
        axes.axhline(start - 0.5, color="black", lw=0.4)
        axes.axvline(start - 0.5, color="black", lw=0.4)
        middles.append(start + (block.symbols.numel() - 1) / 2)
        roles.append(" ".join(block.roles))
        start += block.symbols.numel()
    for axis in axes.xaxis, axes.yaxis:
        axis.remove_overlapping_locs = False  # a role may stand at the middle token
        axis.set_ticks(middles, roles)
        if len(names) <= 40:
            axis.set_ticks(range(len(names)), names, minor=True)
    axes.tick_params(which="minor", labelsize=5.5, length=0)
    axes.tick_params(axis="x", which="minor", labelrotation=90)
    axes.tick_params(which="major", length=0, pad=16, labelsize=11)


# ---- the diagram of a circuit


def columns_of(problem, paths):
    """Return {end of a path: its column}: the roles in the order of the sequence, each among its
    intermediate tokens (3b-1, 3b, 3b+1)."""
    order = [role for block in problem.blocks for role in block.roles]

    def place(end):
        role, offset = parts_of(end)
        return order.index(role), offset

    ends = set(order)
    for path in paths:
        ends.update([path.reader, path.token])
    return {end: column for column, end in enumerate(sorted(ends, key=place))}


def diagram_size(problem, paths):
    """Return (width, height) in inches of the diagram of these paths, with room for a title."""
    layers, columns = len({path.layer for path in paths}), len(columns_of(problem, paths))
    row_height = 1.3 if layers < 7 else 0.95
    return max(8, 1.2 * columns + 1), row_height * layers + 1.6


def draw_diagram(axes, problem, paths, labels, colors):
    """Draw the tokens of a chain across, the layers that have paths upward, and an arrow for each
    path; labels and colors: {path: that of its arrow}. Return {path: (arrow, label)}."""
    layers = sorted({path.layer for path in paths})
    columns = columns_of(problem, paths)
    name_heads = any(path.head for path in paths)

    # a line for each token, with a dot at the input and after each layer
    names = []
    for end, x in columns.items():
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * (len(layers) + 1), range(len(layers) + 1), "o", mfc="white", mec="gray")
        role, offset = parts_of(end)
        k = problem.roles[role]  # x_k of the first chain has the number k, and its label
        text = f"{problem.labels[k][0]} = $x_{{{k}}}$" if k >= 0 else "distractor"
        names.append(f"{'intermediate' if offset else text}\n{end}")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(layers) + 1), ["input", *(f"after L{layer}" for layer in layers)])
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.35, len(layers) + 0.3))
    more = "; intermediate token: role + offset in tokens" * (len(columns) > len(problem.roles))
    axes.set(xlabel=f"symbol and role{more}", ylabel="layer")
    axes.spines[:].set_visible(False)

    # upward from what is read to its reader, the shortest arrows first
    drawn = {}
    for path in sorted(paths, key=lambda path: abs(columns[path.reader] - columns[path.token])):
        x0, x1, y = columns[path.token], columns[path.reader], layers.index(path.layer)

        # where others end: bent if another head has the same path, and with a lower label
        others = [end for end in drawn if (end.layer, end.reader) == (path.layer, path.reader)]
        bend = 0.15 * sum(other.read == path.read for other in others)
        share = 0.7 - 0.15 * (len(others) % 4)
        style = dict(color=colors[path], ls="--" if path.star else "-")
        shape = dict(arrowstyle="-|>", mutation_scale=14, shrinkA=5, shrinkB=5)
        shape["connectionstyle"] = f"arc3,rad={bend}"
        arrow = FancyArrowPatch((x0, y), (x1, y + 1), **style, **shape)
        axes.add_patch(arrow)
        text = f"H{path.head}: {labels[path]}" if name_heads else labels[path]
        label = axes.text(x0 + share * (x1 - x0), y + share, text, ha="center", va="center")
        box = dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85)
        label.set(fontsize=9, bbox=box)
        drawn[path] = arrow, label
    return drawn


# ---- Figures 5 and 7, left: the circuit


def draw_mean_attention(axes, run):
    """Draw the diagram of the circuit with the mean attention of each path."""
    labels = {path: f"{row['attention']:.2f}" for path, row in run.paths.items()}
    draw_diagram(axes, run.problem, run.paths, labels, dict.fromkeys(run.paths, CIRCUIT))
    n = run.report["path_sequences"]
    axes.set_title(f"mean attention in the full model (n = {n} sequences)", fontsize=10)


def draw_circuit(run):
    """The circuit, with the mean attention of each path."""
    figure = Figure(figsize=diagram_size(run.problem, run.paths), layout="constrained")
    draw_mean_attention(figure.subplots(), run)
    report = run.report
    verdict = report["verdict"] if report["validated"] else "not validated"
    dashed = ", dashed from all chains" * any(path.star for path in run.paths)
    caption = f"circuit, {verdict}; {ARROWS}{dashed}\n"
    caption += f"with all else at its mean, {worst_of(report[MEAN])} is the worst symbol"
    add_title(figure, run, f"{caption} (n = {report['sequences']} sequences)")
    return figure


# ---- Figure 7 and Appendix D: how it emerged


@torch.no_grad()
def measure_emergence(run, paths, n=32):
    """Return what emergence.json holds, measured on n sequences at each checkpoint of a run."""
    batch, files = sequences(run.flags, held_out("emergence", n)), checkpoints_of(run.folder)
    rows = [dict(path._asdict(), mean=[], low=[], high=[], hits=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, flags = load(run.folder, f"ckpt/{file.name}")  # with the dtype of this machine
        with precision(flags):
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in zip(paths, rows, strict=True):
            # the attention of each chain's reader to all tokens, and that along the path; all of it
            # is 0 if the reader, an intermediate token, would stand outside of the sequence
            reader, read = path.marks(run.problem, batch.positions)
            given = reader @ patterns[path.layer][:, path.head]  # (B, N, T)
            along = given * read
            attention, largest = along.sum(-1), given.amax(-1)
            hits = ((along.amax(-1) == largest) & (largest > 0)).float().mean().item()
            low, high = attention.mean(1).quantile(torch.tensor([0.1, 0.9])).tolist()
            measured = dict(mean=attention.mean().item(), low=low, high=high, hits=hits)
            for name, value in measured.items():
                row[name].append(round(value, 4))
    return dict(sequences=n, steps=[int(file.stem) for file in files], paths=rows)


def with_emergence(run):
    """Return a Run with the emergence of all its paths. Where there are checkpoints, and a path of
    circuit.json is not in emergence.json, measure all paths first and write the file."""
    if not checkpoints_of(run.folder):
        return run
    paths = set(run.paths)
    paths.update(map(Path.parse, run.report.get("attended", [])))
    if paths <= paths_in(run.emergence).keys():
        return run
    emergence = measure_emergence(run, sorted(paths))
    write_file(run.folder / "emergence.json", emergence)
    return run._replace(emergence=emergence)


def emergence_steps(emergence, level=0.5):
    """Return {path: the step, linearly interpolated, at which its mean attention first passes the
    level, or None}."""
    # first_below of the negatives is the first above
    steps = {}
    for path, row in paths_in(emergence).items():
        steps[path] = first_below(emergence["steps"], [-x for x in row["mean"]], -level)
    return steps


def draw_emergence(run):
    """Figure 7: the circuit with its attention, and the step at which each path emerged."""
    width, height = diagram_size(run.problem, run.paths)
    columns = 1 if width > 10 else 2  # two wide diagrams side by side could not be read on a page
    figure, (left, right) = panels(2, columns, 0.85 * width, height - 0.7, sharey=True)
    draw_mean_attention(left, run)

    # right: the step of each path, dark if late; viridis's brightest colours are too faint
    steps = emergence_steps(run.emergence)
    labels, colors = {}, {}
    known = [steps[path] for path in run.paths if steps.get(path) is not None]
    shades = ListedColormap(matplotlib.colormaps["viridis_r"](torch.linspace(0.1, 1, 256).numpy()))
    scale = ScalarMappable(Normalize(min(known, default=0), max(known, default=1)), shades)
    for path in run.paths:
        step = steps.get(path)
        labels[path], colors[path] = "never" if path in steps else "not measured", "lightgray"
        if step is not None:
            labels[path], colors[path] = f"{step:.0f}", scale.to_rgba(step)
    draw_diagram(right, run.problem, run.paths, labels, colors)
    n = run.emergence["sequences"]
    right.set_title(f"step at which mean attention first passes 0.5 (n = {n})", fontsize=10)
    figure.colorbar(scale, ax=right, label="training step", shrink=0.8)
    add_title(figure, run, f"the circuit and its emergence; {ARROWS}")
    return figure


def draw_paths(run):
    """Appendix D: the attention of each path over training."""
    emergence, steps = run.emergence, emergence_steps(run.emergence)
    columns = 4
    figure, grid = panels(len(steps), columns, 3.2, 2.1, sharex=True, sharey=True)
    for axes, (path, step), row in zip(grid, steps.items(), emergence["paths"], strict=True):
        # its attention
        x = emergence["steps"]
        label = "10% to 90% of the sequences"
        axes.fill_between(x, row["low"], row["high"], color="tab:blue", alpha=0.25, label=label)
        axes.plot(x, row["mean"], color="tab:blue", label="mean attention")
        label = "share of readers that attend to it most"
        axes.plot(x, row["hits"], color="tab:orange", lw=1, label=label)

        # the step at which it emerged
        axes.axhline(0.5, color="gray", ls=":", lw=1)
        if step is not None:
            axes.axvline(step, color=CIRCUIT, lw=1)
            beside = dict(xytext=(3, 0), textcoords="offset points", color=CIRCUIT, fontsize=9)
            axes.annotate(f"{step:.0f}", (step, 0.05), **beside)
        axes.set_title(str(path), fontsize=10)
        axes.set(ylim=(-0.03, 1.03))

    for axes in grid[-columns:]:  # sharex hides what is not in the last row
        axes.set_xlabel("training step")
        axes.tick_params(labelbottom=True)
    figure.supylabel("attention, or share of readers", fontsize=10)
    legend = dict(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.legend(*grid[0].get_legend_handles_labels(), **legend)
    n = emergence["sequences"]
    add_title(figure, run, f"attention of each path (n = {n}); red: the mean first passes 0.5")
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


def add_title(figure, run, caption):
    """Name the run above a figure, and say there what the figure shows."""
    figure.suptitle(f"{run.flags.title}, step {run.log[-1]['step']}\n{caption}", fontsize=10)


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG."""
    with writing(path):
        figure.savefig(path, dpi=130, format="png")


def symbol_color(k, last):
    """Return the colour of x_k in all figures: x_1 is dark, the last symbol is bright."""
    return matplotlib.colormaps["viridis"](0.9 * (k - 1) / max(1, last - 1))


# ---- the command line


# file: (the function that draws it, what a run must have for it)
FIGURES = {
    "curves.png": (draw_curves, lambda run: run.log),
    "attention_maps.png": (draw_attention_maps, lambda run: run.model),
    "circuit.png": (draw_circuit, lambda run: run.paths),
    "emergence.png": (draw_emergence, lambda run: run.paths and run.emergence),
    "paths.png": (draw_paths, lambda run: run.emergence),
}


def main():
    p = command_line("analyze.py", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
    matplotlib.rcdefaults()  # figures have our style, whatever a user has set
    with program("analyze.py"):
        folder = p.parse_args().run
        run = with_emergence(read_run(folder))
        for name, (draw_figure, needed) in FIGURES.items():
            if needed(run):
                save_figure(draw_figure(run), folder / name)
                print(folder / name)
        if not run.model:
            print(f"there is no {folder / 'model.pt'}: finish the training with --resume")
        elif not run.paths:
            reason = run.report.get("verdict", f"run python ablate.py {folder} first")
            print(f"there is no circuit to draw: {reason}")


if __name__ == "__main__":
    main()
