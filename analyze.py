"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: curves.png, attention_maps.png, circuit.png, ...

A run with checkpoints (--save-every) also shows how the paths of its circuit emerged. What was
measured stays in emergence.json, and is drawn from there once the checkpoints are deleted: the
number of held-out sequences, the steps, and for each path its attention at each step.

To add a figure, write a function that returns it, and yield it in `figures_of`.
"""

import itertools
import math
import pathlib

import train
from ablate import MEAN, attention_on, by_head, parts_of, paths_in, read_report, worst_of
from data import LOSS, command_line, held_out, progress

import matplotlib
import torch
from matplotlib.figure import Figure


CIRCUIT = "tab:red"  # the colour of its paths and heads
ARROWS = "arrows point from the attended token to the token that reads it; dashed: in all chains"


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


def crossings(rows, flags):
    """Return {x_1: the step at which it was learned, or None, ...} from the rows of a log."""
    steps = [row["step"] for row in rows]
    level = flags.problem.learned_below
    found = {}
    for name in flags.target_names:
        found[name] = first_below(steps, [row[name] for row in rows], level)
    return found


def draw_curves(flags, rows):
    """The losses, the steps at which symbols were learned, and the plateaus."""
    steps = [row["step"] for row in rows]
    validation = [row["val"] for row in rows]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    add_title(figure, flags, f"validation loss {validation[-1]:.4f} at step {steps[-1]}")

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
def draw_attention_maps(model, flags, paths):
    """The attention of every head on one held-out sequence; the heads of the circuit are red."""
    batch = train.sequences(flags, held_out("validation", 1))
    with train.precision(flags):
        _, layers = model(batch.inputs, return_patterns=True)
    patterns = torch.cat(layers, 1)[0]  # (layers * heads, T, T)

    # a panel for each head, a row for each layer or for four of one head; wide enough for names
    side = max(3.2, 0.11 * flags.problem.T)
    figure, grid = panels(len(patterns), flags.heads if flags.heads > 1 else 4, side, side)
    for i, axes in enumerate(grid):
        image = axes.imshow(patterns[i].numpy(), cmap="Blues", vmin=0, vmax=1)
        label_tokens(axes, flags.problem, batch.symbols[0].tolist())
        layer, head = divmod(i, flags.heads)
        color = CIRCUIT if (layer, head) in by_head(paths) else "black"
        axes.set_title(f"L{layer}H{head}", fontsize=13, color=color)
        axes.spines[:].set(color=color)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    figure.supxlabel("attended token (B3: $x_1$ of chain 3)")
    figure.supylabel("attending token")
    add_title(figure, flags, "attention on one held-out sequence; red: heads of the circuit")
    return figure


def label_tokens(axes, problem, symbols):
    """Draw lines where blocks begin, and name each token along both axes: 1b B3."""
    names = []
    for block in problem.blocks:
        axes.axhline(len(names) - 0.5, color="black", lw=0.4)
        axes.axvline(len(names) - 0.5, color="black", lw=0.4)
        roles = itertools.cycle(block.roles)
        for _ in range(block.size * block.slots):
            names.append(f"{next(roles)} {problem.labels[symbols[len(names)]]}")
    axes.set_xticks(range(len(names)), names, size=5.5, rotation=90)
    axes.set_yticks(range(len(names)), names, size=5.5)
    axes.tick_params(length=0)


# ---- Figures 5 and 7: the circuit


def columns_of(problem, paths):
    """Return {end of a path: its column}: the roles in the order of the sequence, each among its
    intermediate tokens (3b, 3b+1)."""
    order = [role for block in problem.blocks for role in block.roles]
    ends = {*order}
    for path in paths:
        ends |= {path.reader, path.token}

    def place(end):
        role, offset = parts_of(end)
        return order.index(role), offset

    return {end: column for column, end in enumerate(sorted(ends, key=place))}


def diagram_size(problem, paths):
    """Return (width, height) in inches of the diagram of these paths, with room for a title."""
    layers, columns = len({path.layer for path in paths}), len(columns_of(problem, paths))
    return max(8, 1.2 * columns + 1), layers + 2.2


def draw_diagram(axes, problem, paths, labels, colors):
    """Draw the tokens of a chain across, the layers that have paths upward, and an arrow for each
    path, dashed if it is a star; labels and colors: {path: that of its arrow}. Return {path:
    (arrow, label)}."""
    layers = sorted({path.layer for path in paths})
    columns = columns_of(problem, paths)

    # across: a line for each token, with a dot at the input and after each layer
    names = []
    for end, x in columns.items():
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * (len(layers) + 1), range(len(layers) + 1), "o", mfc="white", mec="gray")
        role, offset = parts_of(end)
        k = problem.roles[role]  # x_k of the first chain has the number k, and its label
        symbol = f"{problem.labels[k][0]} = $x_{{{k}}}$" if k >= 0 else "distractor"
        names.append(f"{'intermediate' if offset else symbol}\n{end}")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(layers) + 1), ["input", *(f"after L{layer}" for layer in layers)])
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.35, len(layers) + 0.3))
    axes.set(xlabel="symbol and role", ylabel="layer")
    axes.spines[:].set_visible(False)

    # upward from what is read to its reader
    drawn = {}
    for path in sorted(paths):
        x0, x1, y = columns[path.token], columns[path.reader], layers.index(path.layer)
        style = dict(arrowstyle="-|>", mutation_scale=14, shrinkA=5, shrinkB=5)
        style.update(color=colors[path], ls="--" if path.star else "-")
        arrow = axes.annotate("", (x1, y + 1), (x0, y), arrowprops=style).arrow_patch

        # the label is lower where others end, which may lie on the same line
        others = [end for end in drawn if (end.layer, end.reader) == (path.layer, path.reader)]
        share = 0.7 - 0.15 * (len(others) % 4)
        text = f"H{path.head}: {labels[path]}" if any(path.head for path in paths) else labels[path]
        box = dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85)
        place = dict(ha="center", va="center", fontsize=9, bbox=box)
        label = axes.text(x0 + share * (x1 - x0), y + share, text, **place)
        drawn[path] = arrow, label
    return drawn


def draw_circuit(flags, report):
    """Figures 5 and 7: the circuit, with the mean attention of each path."""
    paths = paths_in(report)
    figure = Figure(figsize=diagram_size(flags.problem, paths), layout="constrained")
    labels = {path: f"{row['attention']:.2f}" for path, row in paths.items()}
    draw_diagram(figure.subplots(), flags.problem, paths, labels, dict.fromkeys(paths, CIRCUIT))
    verdict = report["verdict"] if report["validated"] else "not validated"
    worst = worst_of(report[MEAN])
    caption = f"circuit, {verdict}; worst loss with all else at its mean: {worst}\n"
    caption += f"mean attention in the full model (n = {report['sequences']}); {ARROWS}"
    add_title(figure, flags, caption)
    return figure


# ---- Figure 7 and Appendix D: how the paths emerged


def checkpoints_of(run):
    """Return the checkpoint files of a run, the first step first."""
    return sorted(pathlib.Path(run, "ckpt").glob("*.pt"))


@torch.no_grad()
def measure_emergence(run, paths, n=32):
    """Return what emergence.json holds, measured on n sequences at each checkpoint of a run: for
    each path the mean attention."""
    batch = train.sequences(train.read_flags(run), held_out("emergence", n))
    files = checkpoints_of(run)
    rows = [dict(path._asdict(), mean=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, flags = train.load(run, f"ckpt/{file.name}")
        with train.precision(flags):
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in zip(paths, rows, strict=True):
            pattern = patterns[path.layer][:, path.head]
            attention = attention_on(pattern, path, flags.problem, batch.positions)  # (n, N)
            row["mean"].append(round(attention.mean().item(), 4))
    steps = [int(file.stem) for file in files]
    return dict(sequences=n, weights=train.weights_hash(run), steps=steps, paths=rows)


def emergence_of(run, paths):
    """Return what emergence.json holds, measured anew where there are checkpoints; {} if there is
    neither."""
    if not checkpoints_of(run):
        emergence = read_report(run, "emergence.json")
        if emergence and {*paths_in(emergence)} != {*paths}:
            raise ValueError(f"{run}/emergence.json is of another circuit than circuit.json")
        return emergence
    emergence = measure_emergence(run, sorted(paths))
    train.write_file(run / "emergence.json", emergence)
    return emergence


def emergence_steps(emergence, level=0.5):
    """Return {path: the step, linearly interpolated, at which its mean attention first passes the
    level, or None}."""
    # first_below of the negatives is the first above
    steps = {}
    for path, row in paths_in(emergence).items():
        steps[path] = first_below(emergence["steps"], [-x for x in row["mean"]], -level)
    return steps


def draw_emergence(flags, emergence):
    """Figure 7: the step at which each path emerged; the later, the darker."""
    steps = emergence_steps(emergence)
    known = [step for step in steps.values() if step is not None]
    labels, colors = dict.fromkeys(steps, "never"), dict.fromkeys(steps, "lightgray")
    for path, step in steps.items():
        if step is not None:
            labels[path] = f"{step:.0f}"
            late = (step - min(known)) / max(1, max(known) - min(known))  # from 0 to 1
            colors[path] = matplotlib.colormaps["viridis_r"](0.1 + 0.9 * late)
    figure = Figure(figsize=diagram_size(flags.problem, steps), layout="constrained")
    draw_diagram(figure.subplots(), flags.problem, steps, labels, colors)
    n = emergence["sequences"]
    caption = f"the step at which the mean attention of each path first passes 0.5 (n = {n})"
    add_title(figure, flags, f"{caption}\n{ARROWS}")
    return figure


def draw_paths(flags, emergence):
    """Appendix D: the attention of each path over training."""
    steps = emergence_steps(emergence)
    figure, grid = panels(len(steps), 4, 3.2, 2.2, sharey=True)
    for axes, (path, step), row in zip(grid, steps.items(), emergence["paths"], strict=True):
        axes.plot(emergence["steps"], row["mean"])
        axes.axhline(0.5, color="gray", ls=":", lw=1)
        if step is not None:
            axes.axvline(step, color=CIRCUIT, lw=1)
            axes.text(step, 0.05, f" {step:.0f}", color=CIRCUIT, fontsize=9)
        axes.set_title(str(path))
        axes.set(ylim=(-0.03, 1.03))
    figure.supxlabel("training step")
    figure.supylabel("mean attention")
    n = emergence["sequences"]
    add_title(figure, flags, f"mean attention of each path (n = {n}); red: it first passes 0.5")
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


def add_title(figure, flags, caption):
    """Name the run above a figure, and say there what the figure shows."""
    run = f"layers {flags.layers}, heads {flags.heads}, {flags.problem.title}, seed {flags.seed}"
    figure.suptitle(f"{run}\n{caption}", fontsize=10)


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def symbol_color(k, last):
    """Return the colour of x_k in all figures: x_1 is dark, the last symbol is bright."""
    return matplotlib.colormaps["viridis"](0.9 * (k - 1) / max(1, last - 1))


# ---- the command line


def figures_of(run):
    """Yield (file name, figure) for all that this run directory has been through."""
    yield "curves.png", draw_curves(train.read_flags(run), train.read_log(run))
    if not (run / "model.pt").exists():
        print(f"there is no {run / 'model.pt'}: finish the training with --resume")
        return
    model, flags = train.load(run)
    report = read_report(run)
    paths = paths_in(report)
    yield "attention_maps.png", draw_attention_maps(model, flags, paths)
    if not paths:
        reason = report.get("verdict", f"run python ablate.py {run} first")
        print(f"there is no circuit to draw: {reason}")
        return
    yield "circuit.png", draw_circuit(flags, report)
    emergence = emergence_of(run, paths)
    if emergence:
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
