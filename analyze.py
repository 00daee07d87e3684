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

import train
from ablate import arrivals, by_head, mask_of, mean_attention, parts_of, paths_in, read_report
from data import command_line, held_out, progress

import matplotlib
import torch
from matplotlib.figure import Figure


CIRCUIT, INK, GRAY, FAINT, PALE = "#e63946", "#22223b", "#a3a3b3", "#d8d8e0", "#f0f0f5"
SYMBOLS = "#8d99ae #4361ee #2a9d8f #f4a261 #9d4edd #588157 #a44a3f #a3a3b3".split()  # of x_0, ...
CENTER = dict(ha="center", va="center")
LETTERS = "Letters: what can have arrived at a token by this layer, an upper bound."


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
    """The losses, the steps at which symbols were learned, and the plateaus."""
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
    for k, (name, crossing) in zip(numbers, crossings(rows, task).items(), strict=False):
        color = symbol_color(k)
        right.plot(steps, [row[name] for row in rows], color=color, label=f"${name}$")
        if crossing is not None:
            label = f"at step {crossing:.0f}"
            right.plot(crossing, task.learned_below, "o", color=color, label=label)
    right.set(xlabel="training step", ylabel="of each symbol, validation", ylim=0)
    figure.legend(loc="outside right center")

    # the plateaus, and what a model on each of them does
    for level, meaning in task.plateaus:
        right.axhline(level, color=GRAY, ls=":")
        right.text(steps[-1], level, f"{level:.3g}: {meaning}", size=8.5, ha="right", va="bottom")
    add_title(figure, flags, "how it learned", "Dots: the symbol counts as learned.")
    return figure


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(model, flags, paths):
    """The attention of every head on one held-out sequence, its tokens sorted by chain: large for
    the heads of the circuit, with frames around its paths."""
    task = train.task_of(flags)
    batch = task.batch(held_out("validation", 1))
    _, patterns = model(batch.inputs, return_patterns=True)

    # the tokens of each chain together, (N, roles), without those of none; or all, without roles
    order, names = batch.positions[0].flatten().tolist(), [*task.roles] * task.N
    if not names:
        order = names = [*range(task.T)]

    # one grid of nine columns: first the heads of the circuit, or all, three to a row, with 3 x 3
    # cells each; below them the other heads, nine to a row, with one cell each
    groups = by_head(paths)
    n_large = len(groups) or len(model.heads)
    for head in model.heads:
        groups.setdefault(head, ())
    above = 3 * math.ceil(n_large / 3)  # rows of cells
    rows = above + math.ceil((len(groups) - n_large) / 9)
    figure = Figure(figsize=(10, 1.16 * rows + 1), layout="constrained")
    cells = figure.add_gridspec(rows, 9)
    for number, ((layer, head), group) in enumerate(groups.items()):
        if number < n_large:
            size, y, x = 3, number // 3 * 3, number % 3 * 3
        else:
            size, y, x = 1, above + (number - n_large) // 9, (number - n_large) % 9
        cell = cells[y : y + size, x : x + size]
        axes = figure.add_subplot(cell, xticks=[], yticks=[], title=f"L{layer}H{head}")
        pattern = patterns[layer][0, head, order][:, order].numpy()
        axes.imshow(pattern, "Blues", vmin=0, vmax=1)
        if number < n_large:
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(length=0, pad=1, labelsize=min(8, 230 / len(names)))
        for edge in range(0, len(names), len(task.roles) or task.T):
            axes.axhline(edge - 0.5, color=GRAY, lw=0.5)
            axes.axvline(edge - 0.5, color=GRAY, lw=0.5)
        mask = mask_of(group, task, batch.positions)[0, order][:, order]
        y, x = mask.nonzero().T.numpy()
        axes.plot(x, y, "s", ms=205 / len(names), mfc="none", mec=CIRCUIT)
    caption = f"One held-out sequence, {'sorted by chain' if task.roles else 'tokens by number'}."
    caption += " Rows attend to columns, the darker, the more. Red: the paths of the circuit."
    add_title(figure, flags, "where it attends", caption)
    return figure


# ---- Figures 5 and 7: the circuit


def slots_of(task, paths):
    """Return [[token of the diagram, ...], ...]: the roles of each slot, and then the intermediate
    tokens after it (3b+1) that these paths have."""
    ends = {end for path in paths for end in (path.reader, path.token)}
    slots = []
    for slot in task.slots:
        after = {end for end in ends if parts_of(end)[0] in slot}.difference(slot)
        slots += [slot, sorted(after)] if after else [slot]
    return slots


def draw_diagram(axes, flags, looks):
    """Draw the tokens of a chain across, the layers that have paths upward, letters for what can
    have arrived at a token by then, and arrows from what is read to its reader, dashed if it is a
    star; looks: {path: (label, color, width)}. Return {path: (arrow, label)}, for a film."""
    task, paths = train.task_of(flags), sorted(looks)
    layers, stages = zip(*arrivals(paths, task), strict=True)
    columns = {}  # {token: x}

    # across, with a band behind each slot; upward, dotted where layers are left out
    for slot in slots_of(task, paths):
        first = len(columns)
        band = [first - 0.15, first + len(slot) - 0.85]
        axes.plot(band, [0, 0], color=PALE, lw=30, solid_capstyle="round")
        for x, token in enumerate(slot, first):
            columns[token] = x
    across = len(columns)
    for y, (below, layer) in enumerate(itertools.pairwise(layers)):
        style = "-" if layer == below + 1 else ":"
        axes.vlines(range(across), y, y + 1, FAINT, style, lw=1, zorder=0)
    axes.set_xticks(range(across), columns)
    axes.set_yticks(range(len(layers)), ["input", *(f"layer {layer}" for layer in layers[1:])])
    axes.tick_params(length=0)
    axes.set_frame_on(False)

    # arrows into one reader are parallel, each a gap of 0.18 inches above the one before, for which
    # layers are high enough. The nearest token comes first, so that they do not cross
    arriving = {}
    for path in sorted(paths, key=lambda path: abs(columns[path.token] - columns[path.reader])):
        arriving.setdefault((path.layer, path.reader), []).append(path)
    height = 0.66 + 0.18 * max(map(len, arriving.values()))  # of a layer, in inches
    gap = 0.18 / height  # in layers
    axes.set(xlim=(-0.6, across - 0.3), ylim=(-2 * gap, len(layers) - 1 + gap))
    axes.figure.set_size_inches(max(7.5, 0.85 * across + 1.2), height * (len(layers) - 1) + 2)

    # y counts the layers that have paths, and 0 is the input
    drawn, shown = {}, {(0, token) for token in columns}
    for (layer, reader), group in arriving.items():
        y, x1 = layers.index(layer), columns[reader]
        for i, path in enumerate(group, 1):
            shown |= {(y - 1, path.token), (y, reader)}
            x0 = columns[path.token]
            # arrow i of n starts i gaps above the layer below and ends n + 1 - i gaps below its own
            bottom = y - 1 + gap * i
            top = y - gap * (len(group) + 1 - i)
            text, color, width = looks[path]
            style = dict(arrowstyle="-|>", mutation_scale=13, color=color, lw=width)
            style["ls"] = "--" if path.star else "-"
            arrow = axes.annotate("", (x1, top), (x0, bottom), arrowprops=style)
            if flags.heads > 1:
                text = f"H{path.head} {text}".strip()
            label = axes.text(
                (x0 + x1) / 2,
                (bottom + top) / 2,
                text,
                zorder=4,
                size=8.5,
                bbox=dict(fc="white", ec="none", pad=1),
                **CENTER,
            )
            drawn[path] = arrow.arrow_patch, label

    # letters of all tokens at the input, and where one reads or is read
    for y, token in shown:
        symbols = sorted(stages[y][token])  # none at first of an intermediate token
        for i, k in enumerate(symbols):
            axes.text(
                columns[token] + 0.2 * (i - (len(symbols) - 1) / 2),
                y,
                task.labels[k][0],
                family="monospace",
                weight="bold",
                size=9,
                color="white",
                bbox=dict(boxstyle="round,pad=0.25", fc=symbol_color(k), ec="white"),
                **CENTER,
            )
    return drawn


def draw_circuit(flags, report):
    """Figures 5 and 7: the circuit; the more is lost without a path, the wider its arrow."""
    task, paths, looks = train.task_of(flags), paths_in(report), {}
    layers, stages = zip(*arrivals(paths, task), strict=True)
    pairs = [slot for slot in task.slots if "q" not in slot]
    for path, row in paths.items():
        # it reads ahead if it brings an x_k with k above those of the reader's own pair, as to 2b
        # (x_1 and x_2) an x_3; q and 3b+1 have no pair
        before = stages[layers.index(path.layer) - 1]
        brought = before[path.token]
        own = [task.roles[role] for slot in pairs if path.reader in slot for role in slot]
        if own and max(brought, default=0) > max(own):
            color = CIRCUIT
        elif brought <= before[path.reader]:
            color = GRAY
        else:
            color = INK
        text = ""
        if row["attention"] < 0.9:
            text = f"{row['attention']:.2f}"
        looks[path] = text, color, 1 + 2 * min(1, max(row["without"].values()))
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    worst = max(report[report["ablation"]].values())
    caption = f"""{LETTERS} Arrows point to the reader.
Wider: more is lost without it. Red: reads ahead, beyond its own pair. Gray: brings nothing new.
Dashed: reads all chains. Numbers: mean attention below 0.9. Dotted: layers without paths left out.
Circuit {report["verdict"].split(":")[0]}; the worst symbol has a loss of {worst:.3f} \
with {report["ablation"]} for all else (n = {report["sequences"]})."""
    add_title(figure, flags, "what it learned", caption)
    return figure


# ---- Figure 7 and Appendix D: how the paths emerged


def checkpoints_of(run):
    """Return the checkpoint files of a run, the first step first. ValueError if the name of one
    begins like a number but is none."""
    return sorted(pathlib.Path(run, "ckpt").glob("[0-9]*.pt"), key=lambda file: int(file.stem))


@torch.no_grad()
def measure_emergence(run, paths, n=32):
    """Return what emergence.json holds, measured on n sequences at each checkpoint of a run: for
    each path the mean attention."""
    files = checkpoints_of(run)
    rows = [dict(path._asdict(), mean=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, task, _ = train.load(run, f"ckpt/{file.name}")
        batch = task.batch(held_out("emergence", n))
        _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in zip(paths, rows, strict=True):
            pattern = patterns[path.layer][:, path.head]
            attention = mean_attention(pattern, path, task, batch.positions)
            row["mean"].append(round(attention.item(), 4))
    steps = [int(file.stem) for file in files]
    return dict(sequences=n, weights=train.weights_hash(run), steps=steps, paths=rows)


def emergence_of(run, paths):
    """Return what emergence.json holds, measured anew if there are checkpoints; {} with neither."""
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
    looks, steps = {}, emergence_steps(emergence)
    known = sorted({*steps.values()} - {None})
    for path, step in steps.items():
        looks[path] = "never", FAINT, 1
        if step is not None:
            rank = (known.index(step) + 1) / len(known)
            looks[path] = f"{step:.0f}", matplotlib.colormaps["plasma_r"](rank), 2
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    numbers = f"the step at which mean attention first passes 0.5 (n = {emergence['sequences']})"
    caption = f"{LETTERS}\nNumber of a path: {numbers}. The later, the darker."
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
    caption = (
        f"Mean attention (n = {emergence['sequences']}) by training step, and when it passes 0.5"
    )
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
    """Name the run above a figure, by its directory, and write a caption below it."""
    title = f"{flags.out.resolve().name}: {title}"
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    caption += f"\nFlags: {train.run_name(flags).replace('_', ' ')}"
    figure.supxlabel(caption, x=0.01, ha="left", size=8.5, color="gray", wrap=True)


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
