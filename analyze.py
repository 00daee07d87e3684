"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: attention_maps.png, circuit.png, ...

How the circuit emerged is drawn if the run was trained with --save-every. To add a figure, write a
function draw_...(run) that returns a matplotlib figure, and add a row to FIGURES.
"""

import math
import pathlib
from typing import NamedTuple

from parts import UserError, command_line, config, program
from parts.circuit import Place, path_name, paths_in, read_report
from parts.config import Flags
from parts.emergence import emergence_steps, knock_out_rises, read_emergence

import matplotlib.pyplot as plt
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch

from data import Task, held_out, token_names
from train import draw_curves


CIRCUIT = "tab:red"  # the colour of the circuit in every figure


class Run(NamedTuple):
    """All that a figure may show."""

    folder: pathlib.Path
    model: torch.nn.Module | None
    flags: Flags
    task: Task
    report: dict  # of ablate.py, {} without circuit.json
    paths: dict  # {Path: its row in the report} of the circuit, {} if none was found
    emergence: dict  # of parts.emergence, {} if it was not measured

    @property
    def title(self):
        """12 layers x 1 head, D=3, seed 0, step 1100."""
        return f"{self.flags.title}, step {config.read_log(self.folder)[-1]['step']}"


def read_run(folder, weights=True):
    """Return the Run in a run directory, with weights=False without its model; UserError if the run
    cannot be analyzed."""
    model, flags = config.load(folder) if weights else (None, config.read_flags(folder))
    if flags.circuit:
        problem = "was trained with --circuit: its attention is known, there is nothing to find"
        raise UserError(f"{folder} {problem}")
    task, report = flags.problem, read_report(folder)
    paths = paths_in(report, task)
    return Run(folder, model, flags, task, report, paths, read_emergence(folder))


def panels(count, columns, width, height, **options):
    """Return (figure, [axes, ...]): a grid of panels, each of width x height inches."""
    rows = math.ceil(count / columns)
    shape = dict(figsize=(width * columns, height * rows + 1), squeeze=False, layout="constrained")
    figure, grid = plt.subplots(rows, columns, **shape, **options)
    for axes in grid.flat[count:]:
        axes.axis("off")
    return figure, list(grid.flat[:count])


def add_title(figure, run, caption):
    """Name the run above a figure, and say there what the figure shows."""
    figure.suptitle(f"{run.title}\n{caption}", fontsize=10)


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(run):
    """The attention pattern of every head on one held-out sequence; the heads of the circuit are
    framed."""
    # the patterns of all heads, and the names of the tokens
    batch = config.sequences(run.flags, held_out("validation", 1))
    patterns = {}
    for layer, heads in enumerate(run.model(batch.inputs, return_patterns=True)[1]):
        patterns |= {(layer, head): pattern for head, pattern in enumerate(heads[0])}
    names = token_names(run.task, batch.inputs[0, :, : run.flags.K], batch.positions[0])

    # a panel for each head
    columns = run.flags.heads if run.flags.heads > 1 else min(4, len(patterns))
    figure, grid = panels(len(patterns), columns, 3.4, 3.2)
    circuit_heads = {path[:2] for path in run.paths}
    for axes, ((layer, head), pattern) in zip(grid, patterns.items(), strict=True):
        image = axes.imshow(pattern.numpy(), cmap="Blues", vmin=0, vmax=1)
        label_blocks(axes, run.task, names)
        color, width = ("black", 0.8) if (layer, head) not in circuit_heads else (CIRCUIT, 2)
        axes.set_title(f"L{layer}H{head}", fontsize=13, color=color)
        axes.spines[:].set(color=color, linewidth=width)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    tokens = "letter: symbol, A = $x_0$, B = $x_1$, ...; number: chain"
    tokens += "; D1.2: distractor in the triple of B1 and C2" if run.task.crossed else ""
    figure.supxlabel(f"attended token ({tokens})", fontsize=13)
    figure.supylabel("attending token", fontsize=13)
    red = "; red: heads of the circuit" if run.paths else ""
    add_title(figure, run, f"attention patterns on one held-out sequence (n = 1){red}")
    return figure


def label_blocks(axes, task, names):
    """Draw lines where blocks begin; write the roles large and the names of the tokens small."""
    middles, roles = [], []
    for number, (start, size, slots) in enumerate(task.blocks):
        middles.append(start + (size * slots - 1) / 2)
        roles.append(" ".join(task.role_at(number, place).name for place in range(size)))
        axes.axhline(start - 0.5, color="black", lw=0.4)
        axes.axvline(start - 0.5, color="black", lw=0.4)
    small = {} if len(names) > 40 else dict(labels=names)
    for set_ticks in axes.set_xticks, axes.set_yticks:
        set_ticks(range(len(names)), minor=True, **small)
        set_ticks(middles, roles)
    axes.tick_params(which="minor", labelsize=5.5, length=0)
    axes.tick_params(axis="x", which="minor", labelrotation=90)
    axes.tick_params(which="major", length=0, pad=16, labelsize=11)


# ---- the diagram of a circuit


ARROWS = "arrows point from the attended token to the token that reads it"


def columns_of(task, paths):
    """Return {Place: its column}: the roles in reading order, each followed by the intermediate
    tokens that are counted from it."""
    places = {Place(role) for role in range(len(task.roles))}
    places |= {place for path in paths for place in path[2:]}
    order = {role: number for number, role in enumerate(task.in_reading_order)}
    places = sorted(places, key=lambda place: (order[place.role], place.offset))
    return {place: column for column, place in enumerate(places)}


def diagram_size(task, paths):
    """Return (width, height) in inches of the diagram of these paths, with room for a title."""
    layers, columns = len({path.layer for path in paths}), len(columns_of(task, paths))
    return max(8, 1.2 * columns + 1), (1.3 if layers < 7 else 0.95) * layers + 1.6


def draw_diagram(axes, task, paths, labels, colors):
    """Draw the places of a chain across, the layers that have paths upward, and an arrow for each
    path; labels and colors are {path: that of its arrow}. Return {path: (arrow, label)}."""
    layers, columns = sorted({path.layer for path in paths}), columns_of(task, paths)
    draw_columns(axes, task, layers, columns)
    several_heads, drawn = any(path.head for path in paths), {}
    for path in sorted(paths, key=lambda path: abs(columns[path.source] - columns[path.target])):
        # upward from the target to the source; bent if another head of the layer has this path
        x0, x1, y = columns[path.target], columns[path.source], layers.index(path.layer)
        same_path = [other for other in drawn if other._replace(head=path.head) == path]
        style = dict(color=colors[path], connectionstyle=f"arc3,rad={0.15 * len(same_path)}")
        style |= dict(arrowstyle="-|>", mutation_scale=14, shrinkA=5, shrinkB=5)
        arrow = axes.add_patch(FancyArrowPatch((x0, y), (x1, y + 1), **style))

        # the label on the arrow, lower where a shorter arrow ends at the same place
        end = path.layer, path.source
        same_end = [other for other in drawn if (other.layer, other.source) == end]
        share = 0.62 - 0.2 * (len(same_end) % 3)
        style = dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85)
        style = dict(fontsize=9, ha="center", va="center", bbox=style)
        text = f"H{path.head}: " * several_heads + labels[path]
        drawn[path] = arrow, axes.text(x0 + share * (x1 - x0), y + share, text, **style)
    return drawn


def draw_columns(axes, task, layers, columns):
    """Draw a line for each place, with a dot at the input and after each of these layers."""
    names = []
    for place, x in columns.items():
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * (len(layers) + 1), range(len(layers) + 1), "o", mfc="white", mec="gray")
        symbol = task.roles[place.role].symbol
        text = f"{chr(ord('A') + symbol)} = $x_{{{symbol}}}$" if symbol >= 0 else "distractor"
        names.append(f"{'intermediate' if place.offset else text}\n{place.name(task)}")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(layers) + 1), ["input", *(f"after L{layer}" for layer in layers)])
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.35, len(layers) + 0.3))
    offset = "; intermediate token: role + offset in tokens"
    axes.set_ylabel("layer")
    axes.set_xlabel("symbol and role" + offset * any(place.offset for place in columns))
    axes.spines[:].set_visible(False)


# ---- Figures 5 and 7, left: the circuit


def draw_mean_attention(axes, run):
    """Draw the diagram of the circuit with the mean attention of each path."""
    labels = {path: f"{row['attention']:.2f}" for path, row in run.paths.items()}
    draw_diagram(axes, run.task, run.paths, labels, dict.fromkeys(run.paths, CIRCUIT))
    n = run.report["attention_sequences"]
    axes.set_title(f"mean attention in the full model (n = {n} sequences)", fontsize=10)


def draw_circuit(run):
    """The circuit, with the mean attention of each path."""
    figure, axes = plt.subplots(figsize=diagram_size(run.task, run.paths), layout="constrained")
    draw_mean_attention(axes, run)
    report = run.report
    caption = f"circuit, {'validated' if report['validated'] else 'not validated'}; {ARROWS}\n"
    caption += "with all else ablated, the worst symbol, ${worst}$, has an MSE of ".format(**report)
    caption += "{:.3f} (95%: {:.3f} to {:.3f}".format(*report["faithful"][report["worst"]])
    add_title(figure, run, f"{caption}, n = {report['sequences']})")
    return figure


# ---- Figures 6, 7 and Appendix D: how it emerged


def draw_emergence(run):
    """Figure 7: the circuit with its attention, and the step at which each path emerged."""
    width, height = diagram_size(run.task, run.paths)
    figure, (left, right) = panels(2, 2, 0.85 * width, height - 0.7, sharey=True)
    draw_mean_attention(left, run)

    # right: the step of each path, dark if late; viridis's brightest colours are too faint
    steps, labels, colors = emergence_steps(run.emergence, run.task), {}, {}
    known = [steps[path] for path in run.paths if steps.get(path) is not None]
    shades = ListedColormap(plt.get_cmap("viridis_r")(torch.linspace(0.1, 1, 256).numpy()))
    scale = ScalarMappable(plt.Normalize(min(known, default=0), max(known, default=1)), shades)
    for path in run.paths:
        step = steps.get(path)
        labels[path] = "never" if path in steps else "not measured"
        labels[path] = labels[path] if step is None else f"{step:.0f}"
        colors[path] = "lightgray" if step is None else scale.to_rgba(step)
    draw_diagram(right, run.task, run.paths, labels, colors)
    n = run.emergence["sequences"]
    right.set_title(f"step at which mean attention first passes 0.5 (n = {n})", fontsize=10)
    figure.colorbar(scale, ax=right, label="training step", shrink=0.8)
    add_title(figure, run, f"the circuit and its emergence; {ARROWS}")
    return figure


def draw_paths(run):
    """Appendix D: the attention of each path over training."""
    emergence, steps = run.emergence, emergence_steps(run.emergence, run.task)
    figure, grid = panels(len(steps), 4, 3.2, 2.1, sharex=True, sharey=True)
    for axes, (path, step), row in zip(grid, steps.items(), emergence["paths"], strict=True):
        # its attention
        label = "10% to 90% of the sequences"
        style = dict(color="tab:blue", alpha=0.25, label=label)
        axes.fill_between(emergence["steps"], row["low"], row["high"], **style)
        axes.plot(emergence["steps"], row["mean"], color="tab:blue", label="mean attention")
        label = "share of sources that attend to the target most"
        axes.plot(emergence["steps"], row["hits"], color="tab:orange", lw=1, label=label)

        # the step at which it emerged
        axes.axhline(0.5, color="gray", ls=":", lw=1)
        if step is not None:
            axes.axvline(step, color=CIRCUIT, lw=1)
            beside = dict(xytext=(3, 0), textcoords="offset points", color=CIRCUIT, fontsize=9)
            axes.annotate(f"{step:.0f}", (step, 0.05), **beside)
        axes.set_title(path_name(path, run.task), fontsize=10)
        axes.set(ylim=(-0.03, 1.03))

    for axes in grid[-4:]:
        axes.set_xlabel("training step")
        axes.tick_params(labelbottom=True)
    figure.supylabel("attention, or share of sources", fontsize=10)
    legend = dict(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.legend(*grid[0].get_legend_handles_labels(), **legend)
    n = emergence["sequences"]
    add_title(figure, run, f"attention of each path (n = {n}); red: the mean first passes 0.5")
    return figure


def draw_removal(run):
    """By how much the loss of each symbol rises without each path, over training."""
    emergence, names, rises = run.emergence, [], []
    for path, row in paths_in(emergence, run.task).items():
        names.append(path_name(path, run.task))
        rises.append(knock_out_rises(emergence, row))
    steps, count = emergence["steps"], len(names)
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [steps[0], *middles, steps[-1]]  # the steps may be unequally spaced

    # a panel for each symbol, with a row for each path
    symbols, level = emergence["losses"], run.task.learned
    figure, grid = panels(len(symbols), len(symbols), 3.6, 0.33 * count + 0.8, sharey=True)
    for axes, (symbol, losses) in zip(grid, symbols.items(), strict=True):
        rows = [number - 0.5 for number in range(count + 1)]
        values = [rise[symbol] for rise in rises]
        image = axes.pcolormesh(edges, rows, values, cmap="Reds", vmin=0, vmax=1)
        learned = config.first_below(steps, losses, level)
        if learned is not None:
            axes.axvline(learned, color="tab:blue", lw=1, ls="--")
        axes.set(title=f"$x_{{{symbol[2:]}}}$", xlabel="training step", ylim=(count - 0.5, -0.5))

    grid[0].set_yticks(range(count), names, fontsize=9)
    figure.colorbar(image, ax=grid, label="rise of the symbol's MSE", extend="max")
    n, ablation = emergence["sequences"], emergence["ablation"]
    caption = f"rise of the full model's loss without each path ({ablation} ablation, n = {n}"
    caption += f" sequences); dashed: the symbol's loss passes {level:.3g}"
    add_title(figure, run, caption)
    return figure


# ---- the command line


FIGURES = {"attention_maps.png": draw_attention_maps}
CIRCUIT_FIGURES = {"circuit.png": draw_circuit}
EMERGENCE_FIGURES = {
    "emergence.png": draw_emergence,
    "paths.png": draw_paths,
    "removal.png": draw_removal,
}


def draw(folder):
    """Draw all figures of a run into its directory."""
    run, figures = read_run(folder), dict(FIGURES)
    if run.paths:
        figures |= CIRCUIT_FIGURES
    if run.paths and run.emergence:
        figures |= EMERGENCE_FIGURES
    draw_curves(folder)
    print(folder / "curves.png", flush=True)
    for name, draw_figure in figures.items():
        config.save_figure(draw_figure(run), folder / name)
        print(folder / name, flush=True)
    if not run.paths:
        reason = run.report.get("verdict", f"run python ablate.py {folder} first")
        print(f"there is no circuit to draw: {reason}")


def main():
    with program("analyze.py"):
        p = command_line("analyze.py", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        folder = p.parse_args().run
        config.read_flags(folder)  # the lock is only for a run directory
        with config.alone_in(folder):
            draw(folder)


if __name__ == "__main__":
    main()
