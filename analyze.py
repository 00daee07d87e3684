"""Draw what a run directory holds: the figures of Sections 5 and 8, and a map of information.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: a file in the run for each entry of FIGURES

If the run was trained with --save-every, how the circuit emerged is drawn too (emergence.py). A new
figure is a function draw_...(run, file) and a row of FIGURES.
"""

import math
import pathlib
from typing import NamedTuple

from parts import emergence, runs
from parts.circuit import check_roles
from parts.flags import command_line
from parts.flow import starting_information

import matplotlib
import matplotlib.pyplot as plt
import numpy
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch
from PIL import Image

from data import Task, held_out, token_names
from train import draw_curves


class Run(NamedTuple):
    """All that a figure may show."""

    folder: pathlib.Path
    model: torch.nn.Module
    flags: dict  # the flags
    task: Task
    report: dict  # of ablate.py, {} if there is none
    paths: dict  # {Path: mean attention} of its circuit, {} if none is known
    emergence: emergence.Emergence | None


def read_run(folder):
    """The Run in a run directory; ValueError with one line if it cannot be analysed."""
    model, flags = runs.load(folder)
    if flags.circuit:
        what = "was trained with --circuit: its attention is known, there is nothing to find"
        raise ValueError(f"{folder} {what}")
    task = flags.problem
    check_roles(task, runs.sequences(flags, held_out("validation", 8)), flags.K)
    report, paths = emergence.read_circuit(folder, task)
    emerged = emergence.read_emergence(folder, paths) if paths else None
    return Run(folder, model, flags, task, report, paths, emerged)


# ---- Appendix C: attention maps


@torch.no_grad()
def attention_of_one(run):
    """The names of the T tokens of one held-out sequence, and {(layer, head): (T, T) attention}."""
    batch, maps = runs.sequences(run.flags, held_out("validation", 1)), {}
    for layer, patterns in enumerate(run.model(batch.inputs, return_patterns=True)[1]):
        for head, pattern in enumerate(patterns[0]):
            maps[layer, head] = pattern
    symbols = batch.inputs[0, :, : run.flags.K]
    return token_names(run.task, symbols, batch.positions[0]), maps


def draw_attention_maps(run, file):
    """Every head on one sequence, a row for each attending token; useful heads are framed."""
    # a panel per head
    names, maps = attention_of_one(run)
    heads, useful = run.flags.heads, {path[:2] for path in run.paths}
    columns = heads if heads > 1 else min(4, len(maps))
    lines = math.ceil(len(maps) / columns)
    shape = dict(figsize=(4 * columns, 4.1 * lines), squeeze=False, layout="constrained")
    figure, grid = plt.subplots(lines, columns, **shape)
    for axes in grid.flat[len(maps) :]:
        axes.axis("off")
    for axes, ((layer, head), pattern) in zip(grid.flat, maps.items(), strict=False):
        # the map, and where blocks begin
        image = axes.imshow(pattern.numpy(), cmap="Blues", vmin=0, vmax=1)
        for block in run.task.blocks[1:]:
            axes.axhline(block.start - 0.5, color="black", lw=0.3)
            axes.axvline(block.start - 0.5, color="black", lw=0.3)
        axes.set_xticks(range(len(names)), names, fontsize=5, rotation=90)
        axes.set_yticks(range(len(names)), names, fontsize=5)

        # whether its head is useful
        mark = (layer, head) in useful
        title = f"layer {layer + 1}" + f", head {head + 1}" * (heads > 1) + ", useful" * mark
        axes.set_title(title, fontsize=10, color=USEFUL if mark else "black")
        axes.spines[:].set(color=USEFUL if mark else "black", linewidth=2 if mark else 0.8)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    letters = "letter: symbol, A = $x_0$; number: chain; lines: blocks"
    letters += "; D1.2: of B1 and C2" if run.task.crossed else ""
    figure.supxlabel(f"attended token of one held-out sequence\n({letters})", fontsize=10)
    figure.supylabel("attending token", fontsize=10)
    runs.save_figure(figure, file)


# ---- a circuit as a diagram

USEFUL = "tab:red"  # the colour of what is useful, in every figure
DASHED_BELOW = 0.1  # a path with less mean attention is dashed


def path_title(path, task, heads):
    """layer 7: q -> 1b, with an arrow; the head too, if there are several."""
    names, head = task.names, f" head {path.head + 1}" * (heads > 1)
    source, target = names[path.source], names[path.target]
    return f"layer {path.layer + 1}{head}: {source} \N{RIGHTWARDS ARROW} {target}"


def diagram_size(task, paths):
    """(width, height) in inches of the diagram of these paths, with room for a title."""
    layers = len({path.layer for path in paths})
    return max(8, 1.3 * len(task.roles) + 1), (1.3 if layers < 7 else 0.9) * layers + 1.6


def faint_note(paths):
    """Two lines for the title that say what dashed arrows are, if there are any."""
    share = f"dashed: less than {DASHED_BELOW} in this head;\nother heads or relays do the rest"
    return f"\n{share}" if min(paths.values()) < DASHED_BELOW else ""


def draw_diagram(axes, task, paths, label, color):
    """The roles of a chain across in the order in which they are read, the layers that have paths
    upward, an arrow per path from where information is taken to where it goes.

    paths: {Path: mean attention}; label, color: of the arrow of a path, functions. Returns {path:
    (arrow, its text)}."""
    layers = sorted({path.layer for path in paths})
    across = {role: x for x, role in enumerate(task.in_reading_order)}
    draw_roles(axes, task, layers)

    drawn = {}
    for path, attention in paths.items():
        # from the target, below, to the source; straight, unless another head of the layer has it
        below, start, to = layers.index(path.layer), across[path.target], across[path.source]
        same_path = [other for other in drawn if other._replace(head=path.head) == path]
        bend = f"arc3,rad={0.15 * len(same_path)}"
        line = "-" if attention >= DASHED_BELOW else (0, (4, 4))
        style = dict(color=color(path), ls=line, connectionstyle=bend, shrinkA=5, shrinkB=5)
        ends = (start, below), (to, below + 1)
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, **style)
        axes.add_patch(arrow)

        # its text upon it, lower where another arrow ends in the same place
        end = path.layer, path.source
        same_end = [other for other in drawn if (other.layer, other.source) == end]
        up = 0.62 - 0.2 * (len(same_end) % 3)
        box = dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85)
        style = dict(fontsize=9, ha="center", va="center", bbox=box)
        drawn[path] = arrow, axes.text(start + up * (to - start), below + up, label(path), **style)
    return drawn


def draw_roles(axes, task, layers):
    """A line for each role, with a dot at the input and after each of the layers."""
    heights, names = range(len(layers) + 1), []
    for x, role in enumerate(task.roles[number] for number in task.in_reading_order):
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * len(heights), heights, "o", color="white", markeredgecolor="gray", ms=7)
        names.append(f"{chr(ord('A') + role.symbol)} = $x_{{{role.symbol}}}$\n{role.name}")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(heights, ["input", *(f"after layer {layer + 1}" for layer in layers)])
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.35, len(layers) + 0.3))
    axes.set_xlabel("symbol and role, in the order of reading")
    axes.spines[:].set_visible(False)


# ---- Figures 5 and 7, left: the circuit


def draw_circuit(run, file):
    """The circuit, with the mean attention of each path."""
    size = diagram_size(run.task, run.paths)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    labels = {path: f"{attention:.2f}" for path, attention in run.paths.items()}
    draw_diagram(axes, run.task, run.paths, labels.get, lambda path: USEFUL)
    layers, seed, problem = run.flags.layers, run.flags.seed, run.flags.problem.title
    grade = f"Circuit ({run.report['grade']}) of {layers} layers, {problem}, seed {seed}"
    title = f"{grade}: arrows carry mean attention (512 sequences);\n"
    title += f"useless heads are uniform or identity, rows without an arrow: {run.report['fill']}"
    axes.set_title(title + faint_note(run.paths))
    runs.save_figure(figure, file)


# ---- Figures 3 and 8: shared information before any layer


def shared_information(task):
    """Two lists of [role, role], numbers: those who share a symbol, those who share a slot."""
    pieces = starting_information(task).float().split([task.symbols, len(task.blocks)], 1)
    return [(held @ held.T).triu(1).nonzero().tolist() for held in pieces]


def draw_shared_information(run, file):
    """Which roles share a symbol (above) or a slot (below) to begin with."""
    # the roles, in the order of the chain
    width = max(6, 1.1 * len(run.task.roles) + 1)
    figure, axes = plt.subplots(figsize=(width, 3), layout="constrained")
    for x, role in enumerate(run.task.roles):
        box = dict(boxstyle="round", fc="white")
        name = f"$x_{{{role.symbol}}}$\n{role.name}"
        axes.text(x, 0, name, ha="center", va="center", bbox=box)

    # an arc between each two that share something
    by_symbol, by_slot = shared_information(run.task)
    for pairs, height, color, label in (
        (by_symbol, 0.3, "tab:blue", "share a symbol"),
        (by_slot, -0.3, "tab:orange", "share a slot (stand side by side)"),
    ):
        axes.plot([], [], color=color, lw=2, label=label)
        for a, b in pairs:
            bend = math.copysign(0.5 / math.sqrt(b - a), -height)  # wide arcs are flatter
            style = dict(arrowstyle="-", lw=2, color=color, connectionstyle=f"arc3,rad={bend}")
            axes.add_patch(FancyArrowPatch((a, height), (b, height), **style))
    axes.legend(loc="upper right", ncols=2, frameon=False)
    axes.set(xlim=(-0.6, len(run.task.roles) - 0.4), ylim=(-1, 1.3))
    problem = run.flags.problem.title
    axes.set_title(f"What the roles of one chain share before any layer, {problem}")
    axes.axis("off")
    runs.save_figure(figure, file)


# ---- the information map


@torch.no_grad()
def residual_streams(model, inputs):
    """[(B, T, width), ...] before the first and after each layer."""
    streams, hooks = [], []

    def keep(module, arguments, output):
        streams.append(output[0] if isinstance(output, tuple) else output)

    try:
        for module in (model.embed, *model.blocks):
            hooks.append(module.register_forward_hook(keep))
        model(inputs, return_patterns=True)  # then the last layer computes all tokens
    finally:
        for hook in hooks:
            hook.remove()
    return streams


def information(model, task, batch, K):
    """(layers+1, roles, symbols) R^2 of reading x_k from the residual stream at a role, before the
    first and after each layer, by least squares: fitted on half of the sequences, tested on the
    others. An empirical Lemma 2."""

    def at(values, role):  # (B, T, size) -> (B*N, size), at the tokens with this role
        tokens = batch.positions[:, :, role, None].expand(-1, -1, values.shape[-1])
        return values.gather(1, tokens).flatten(0, 1)

    # what is to be read: every symbol, from a role that holds it
    held = [role.symbol for role in task.roles]
    symbols = [at(batch.inputs[..., :K], held.index(k)) for k in range(task.symbols)]
    wanted, truth = torch.cat(symbols, -1).double().chunk(2)

    # how well each role's part of each stream tells it
    streams = residual_streams(model, batch.inputs)
    scores = torch.empty(len(streams), len(task.roles), task.symbols)
    for layer, stream in enumerate(streams):
        for role in range(len(task.roles)):
            read = at(stream, role).double()
            fit, test = torch.cat([read, torch.ones(len(read), 1)], -1).chunk(2)
            solution = torch.linalg.lstsq(fit, wanted, driver="gelsy").solution
            missed = (test @ solution - truth).square().mean(0)
            scores[layer, role] = (1 - missed / truth.var(0)).view(-1, K).mean(1)
    return scores


def draw_information_map(run, file, n=512):
    """One panel per role, layers upward, symbols across."""
    # a map per role
    batch = runs.sequences(run.flags, held_out("information", 2 * n))
    scores = information(run.model, run.task, batch, run.flags.K)
    roles, useful = run.task.roles, {path.layer for path in run.paths}
    size = max(6.5, 1.5 * len(roles) + 1.5), 0.32 * len(scores) + 2
    shape = dict(figsize=size, sharey=True, layout="constrained")
    figure, panels = plt.subplots(1, len(roles), **shape)
    for number, axes in enumerate(panels):
        style = dict(origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
        image = axes.imshow(scores[:, number].numpy(), **style)
        symbols = range(run.task.symbols)
        axes.set_xticks(symbols, [f"$x_{{{k}}}$" for k in symbols])
        axes.set_title(roles[number].name)

    # the layers, red where one of their heads is useful
    names = ["input", *(f"layer {layer}" for layer in range(1, len(scores)))]
    panels[0].set_yticks(range(len(names)), names)
    for layer in useful:
        panels[0].get_yticklabels()[layer + 1].set_color(USEFUL)
    figure.colorbar(image, ax=panels, label="held-out $R^2$", shrink=0.8)
    title = "What can be read from the residual stream at each role, by least squares\n"
    title += f"({n} sequences to fit, {n} to test)"
    title += "; red: layers with a useful head" if useful else ""
    figure.suptitle(title, fontsize=11)
    runs.save_figure(figure, file)


# ---- Figures 6, 7 and Appendix D: how it emerged


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
    when = emergence.emergence_steps(run.emergence)
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
    when, steps, columns = emergence.emergence_steps(run.emergence), run.emergence.steps, 4
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
        axes.set_title(path_title(path, run.task, run.flags.heads), fontsize=10)
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
    titles = [path_title(path, run.task, run.flags.heads) for path in run.emergence.paths]
    map_of_rises(run.emergence, removed, titles, "path", file)


def draw_heads(run, file):
    """The same of every head, whether it is in the circuit at the end or not (marked if it is)."""
    useful, titles = {path[:2] for path in run.paths}, []
    for layer, head in run.emergence.heads:
        title = f"layer {layer + 1}"
        title += f" head {head + 1}" if run.flags.heads > 1 else ""
        titles.append(title + " *" * ((layer, head) in useful))
    what = "head (*: in the circuit)"
    map_of_rises(run.emergence, list(run.emergence.heads.values()), titles, what, file)


def map_of_rises(emerged, removed, titles, what, file):
    """A map for each symbol: a row for each that was removed, a column per checkpoint."""
    # what is drawn
    steps, count, rises = emerged.steps, len(removed), emergence.removal_rises(emerged, removed)
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [steps[0], *middles, steps[-1]]  # checkpoints may be unequally apart

    # a panel per symbol
    shape = dict(figsize=(3.3 * len(rises) + 2, 0.33 * count + 1.8), sharey=True)
    figure, panels = plt.subplots(1, len(rises), squeeze=False, layout="constrained", **shape)
    for axes, (symbol, rise) in zip(panels[0], rises.items(), strict=True):
        rows = [number - 0.5 for number in range(count + 1)]
        image = axes.pcolormesh(edges, rows, rise, cmap="Reds", vmin=0, vmax=1)
        crossing = runs.first_below(steps, emerged.losses[symbol])
        if crossing is not None:
            axes.axvline(crossing, color="tab:blue", lw=1, ls="--")
        axes.set(title=f"$x_{{{symbol[2:]}}}$", xlabel="training step", ylim=(count - 0.5, -0.5))

    # the names and the scale
    panels[0, 0].set_yticks(range(count), titles, fontsize=9)
    figure.colorbar(image, ax=panels, label="rise of the partial loss (MSE)", extend="max")
    title = f"What the removal of each {what} destroys ({emerged.sequences} sequences)\n"
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


EMERGENCE_FIGURES = {
    "emergence.png": draw_emergence,
    "paths.png": draw_paths,
    "removal.png": draw_removal,
    "emergence.gif": draw_animation,
}
HEAD_FIGURES = {"heads.png": draw_heads}  # not in every emergence.json


# ---- the command line


FIGURES = {
    "curves.png": lambda run, file: draw_curves(run.folder),
    "shared_information.png": draw_shared_information,
    "attention_maps.png": draw_attention_maps,
    "information_map.png": draw_information_map,
}
CIRCUIT_FIGURES = {"circuit.png": draw_circuit}


def draw(folder):
    """Draw all figures of a run into its directory."""
    run, figures = read_run(folder), dict(FIGURES)
    if run.paths:
        figures |= CIRCUIT_FIGURES
    if run.emergence:
        figures |= EMERGENCE_FIGURES | (HEAD_FIGURES if run.emergence.heads else {})
    for name, draw_figure in figures.items():
        draw_figure(run, folder / name)
        print(folder / name, flush=True)
    if not run.report:
        print(f"no circuit is known here, so none is drawn: run python ablate.py {folder} first")
    elif not run.paths:
        print("ablate.py found no circuit here, so none is drawn")


def main():
    p = command_line("analyze.py", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
    folder = p.parse_args().run
    matplotlib.use("Agg")
    try:
        draw(folder)
    except (OSError, ValueError) as error:
        p.error(error)


if __name__ == "__main__":
    main()
