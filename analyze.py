"""Draw what a run directory holds: the figures of Sections 5 and 8, and a map of information.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: a file in the run for each entry of FIGURES

If the run was trained with --save-every, how the circuit emerged is drawn too (emergence.py). A new
figure is a function draw_...(run, file) and a row of FIGURES.
"""

import runs  # noqa: I001 -- first: it says how threads wait, before torch loads

import math
import pathlib
from typing import NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch

import emergence
from circuit import check_roles
from data import Task, held_out, token_names
from depth import starting_information
from flags import command_line, problem_name
from diagram import USEFUL, diagram_size, draw_diagram, faint_note
from train import draw_curves


class Run(NamedTuple):
    """All that a figure may show."""

    folder: pathlib.Path
    model: torch.nn.Module
    config: dict  # the flags
    task: Task
    report: dict  # of ablate.py, {} if there is none
    paths: dict  # {Path: mean attention} of its circuit, {} if none is known
    emergence: emergence.Emergence | None


def read_run(folder):
    """The Run in a run directory; ValueError with one line if it cannot be analysed."""
    model, config = runs.load(folder)
    if config["circuit"]:
        what = "was trained with --circuit: its attention is known, there is nothing to find"
        raise ValueError(f"{folder} {what}")
    task = runs.task_of(config)
    check_roles(task, runs.sequences(config, held_out("validation", 8)), config["K"])
    report, paths = emergence.read_circuit(folder, task)
    emerged = emergence.read_emergence(folder, paths) if paths else None
    return Run(folder, model, config, task, report, paths, emerged)


# ---- Appendix C: attention maps


@torch.no_grad()
def attention_of_one(run):
    """The names of the T tokens of one held-out sequence, and {(layer, head): (T, T) attention}."""
    batch, maps = runs.sequences(run.config, held_out("validation", 1)), {}
    for layer, patterns in enumerate(run.model(batch.inputs, return_patterns=True)[1]):
        for head, pattern in enumerate(patterns[0]):
            maps[layer, head] = pattern
    symbols = batch.inputs[0, :, : run.config["K"]]
    return token_names(run.task, symbols, batch.positions[0]), maps


def draw_attention_maps(run, file):
    """Every head on one sequence, a row for each attending token; useful heads are framed."""
    # a panel per head
    names, maps = attention_of_one(run)
    heads, useful = run.config["heads"], {path[:2] for path in run.paths}
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


# ---- Figures 5 and 7, left: the circuit


def draw_circuit(run, file):
    """The circuit, with the mean attention of each path."""
    size = diagram_size(run.task, run.paths)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    labels = {path: f"{attention:.2f}" for path, attention in run.paths.items()}
    draw_diagram(axes, run.task, run.paths, labels.get, lambda path: USEFUL)
    layers, seed, problem = run.config["layers"], run.config["seed"], problem_name(run.config)
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
    problem = problem_name(run.config)
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
    batch = runs.sequences(run.config, held_out("information", 2 * n))
    scores = information(run.model, run.task, batch, run.config["K"])
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
        figures |= emergence.FIGURES | (emergence.HEAD_FIGURES if run.emergence.heads else {})
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
