"""Draw what a run directory holds: the figures of Sections 8 and 9, and a map of information.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: a file in the run for each entry of FIGURES

If the run was trained with --save-every, how the circuit emerged is drawn too. A new figure is a
function draw_...(run, file) and a row of FIGURES.
"""

import math
import pathlib
from typing import NamedTuple

from parts import UserError, command_line, config, program
from parts.circuit import Place, paths_in, read_report
from parts.config import Flags
from parts.emergence import Emergence, emergence_steps, read_emergence, removal_rises

import matplotlib.pyplot as plt
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.patches import FancyArrowPatch

from data import Task, held_out, token_names
from train import draw_curves


USEFUL = "tab:red"  # the colour of what is useful, in every figure


class Run(NamedTuple):
    """All that a figure may show."""

    folder: pathlib.Path
    model: torch.nn.Module | None
    flags: Flags
    task: Task
    report: dict  # of ablate.py, {} if there is none
    paths: dict  # {Path: its row in the report} of its circuit, {} if none is known
    emergence: Emergence | None

    @property
    def title(self):
        """12 layers x 1 head, D=3, seed 0, step 1100."""
        flags, step = self.flags, config.read_log(self.folder)[-1]["step"]
        shape = f"{flags.layers} layers x {flags.heads} head{'s' * (flags.heads > 1)}"
        return f"{shape}, {self.task.title}, seed {flags.seed}, step {step}"

    @property
    def sequences(self):
        """On how many ablate.certify measures attention."""
        return min(512, self.report["sequences"])


def read_run(folder, weights=True):
    """The Run in a run directory, without weights if they are not wanted. UserError if it cannot be
    analysed."""
    model, flags = config.load(folder) if weights else (None, config.read_flags(folder))
    if flags.circuit:
        what = "was trained with --circuit: its attention is known, there is nothing to find"
        raise UserError(f"{folder} {what}")
    task, report = flags.problem, read_report(folder)
    paths = paths_in(report, task)
    return Run(folder, model, flags, task, report, paths, read_emergence(folder))


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(run, file):
    """Every head on one held-out sequence, a row for each attending token; useful heads are
    framed."""
    # the attention, and the names of the tokens
    batch = config.sequences(run.flags, held_out("validation", 1))
    maps = {}
    for layer, patterns in enumerate(run.model(batch.inputs, return_patterns=True)[1]):
        maps |= {(layer, head): pattern for head, pattern in enumerate(patterns[0])}
    names = token_names(run.task, batch.inputs[0, :, : run.flags.K], batch.positions[0])

    # a panel per head
    heads, useful = run.flags.heads, {path[:2] for path in run.paths}
    columns = heads if heads > 1 else min(4, len(maps))
    lines = math.ceil(len(maps) / columns)
    shape = dict(figsize=(3.4 * columns, 3.6 * lines), squeeze=False, layout="constrained")
    figure, grid = plt.subplots(lines, columns, **shape)
    for axes in grid.flat[len(maps) :]:
        axes.axis("off")
    for axes, ((layer, head), pattern) in zip(grid.flat, maps.items(), strict=False):
        image = axes.imshow(pattern.numpy(), cmap="Blues", vmin=0, vmax=1)
        label_blocks(axes, run.task, names)
        mark = (layer, head) in useful
        title = f"layer {layer + 1}" + f", head {head + 1}" * (heads > 1) + ", has a path" * mark
        axes.set_title(title, fontsize=13, color=USEFUL if mark else "black")
        axes.spines[:].set(color=USEFUL if mark else "black", linewidth=2 if mark else 0.8)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    letters = "letter: symbol, A = $x_0$; number: chain"
    letters += "; D1.2: of B1 and C2" if run.task.crossed else ""
    figure.supxlabel(f"attended token ({letters})", fontsize=13)
    figure.supylabel("attending token", fontsize=13)
    figure.suptitle(f"Attention on one held-out sequence\n{run.title}", fontsize=15)
    config.save_figure(figure, file)


def label_blocks(axes, task, names):
    """Lines where blocks begin; their roles as large labels, the tokens as small ones."""
    middles, roles = [], []
    for number, (start, size, slots) in enumerate(task.blocks):
        middles.append(start + (size * slots - 1) / 2)
        roles.append(" ".join(task.role_at(number, place).name for place in range(size)))
        axes.axhline(start - 0.5, color="black", lw=0.4)
        axes.axvline(start - 0.5, color="black", lw=0.4)
    small = {} if len(names) > 40 else dict(labels=names)
    axes.set_xticks(range(len(names)), minor=True, **small)
    axes.set_yticks(range(len(names)), minor=True, **small)
    axes.set_xticks(middles, roles)
    axes.set_yticks(middles, roles)
    axes.tick_params(which="minor", labelsize=5.5, length=0)
    axes.tick_params(axis="x", which="minor", labelrotation=90)
    axes.tick_params(which="major", length=0, pad=16, labelsize=11)


# ---- a circuit as a diagram


def path_title(path, task, heads):
    """layer 7: q -> 1b, with an arrow; the head too, if there are several."""
    head = f" head {path.head + 1}" * (heads > 1)
    source, target = path.source.name(task), path.target.name(task)
    return f"layer {path.layer + 1}{head}: {source} \N{RIGHTWARDS ARROW} {target}"


def columns_of(task, paths):
    """{Place: its column}: the roles in the order in which they are read, and relays behind the
    role from which they count."""
    places = {Place(role) for role in range(len(task.roles))}
    places |= {end for path in paths for end in path[2:]}
    order = {role: number for number, role in enumerate(task.in_reading_order)}
    places = sorted(places, key=lambda place: (order[place.role], place.offset))
    return {place: x for x, place in enumerate(places)}


def diagram_size(task, paths):
    """(width, height) in inches of the diagram of these paths, with room for a title."""
    layers, columns = len({path.layer for path in paths}), len(columns_of(task, paths))
    return max(8, 1.2 * columns + 1), (1.3 if layers < 7 else 0.95) * layers + 1.6


def draw_diagram(axes, task, paths, label, color):
    """The places of a chain across, the layers that have paths upward, an arrow per path from where
    information is taken to where it goes. label, color: of the arrow of a path, functions. Returns
    {path: (arrow, its text)}."""
    layers, across = sorted({path.layer for path in paths}), columns_of(task, paths)
    draw_columns(axes, task, layers, across)
    several, drawn = any(path.head for path in paths), {}
    for path in sorted(paths, key=lambda path: abs(across[path.source] - across[path.target])):
        # from the target, below, to the source; straight, unless another head of the layer has it
        below, start, to = layers.index(path.layer), across[path.target], across[path.source]
        same_path = [other for other in drawn if other._replace(head=path.head) == path]
        bend = f"arc3,rad={0.15 * len(same_path)}"
        style = dict(color=color(path), connectionstyle=bend, shrinkA=5, shrinkB=5)
        ends = (start, below), (to, below + 1)
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, **style)
        axes.add_patch(arrow)

        # its text upon it, lower where a shorter arrow ends in the same place
        end = path.layer, path.source
        same_end = [other for other in drawn if (other.layer, other.source) == end]
        up = 0.62 - 0.2 * (len(same_end) % 3)
        box = dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85)
        style = dict(fontsize=9, ha="center", va="center", bbox=box)
        text = f"head {path.head + 1}: " * several + label(path)
        drawn[path] = arrow, axes.text(start + up * (to - start), below + up, text, **style)
    return drawn


def draw_columns(axes, task, layers, across):
    """A line for each place, with a dot at the input and after each of the layers."""
    heights, names = range(len(layers) + 1), []
    for place, x in across.items():
        role = task.roles[place.role]
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * len(heights), heights, "o", color="white", markeredgecolor="gray", ms=7)
        symbol = f"{chr(ord('A') + role.symbol)} = $x_{{{role.symbol}}}$"
        symbol = "nobody's" if role.symbol < 0 else symbol
        names.append(f"{'relay' if place.offset else symbol}\n{place.name(task)}")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(heights, ["input", *(f"after layer {layer + 1}" for layer in layers)])
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-0.35, len(layers) + 0.3))
    relays = "; relay: so many tokens behind" * any(place.offset for place in across)
    axes.set_xlabel(f"symbol and role, as they are read{relays}")
    axes.spines[:].set_visible(False)


# ---- Figures 5 and 7, left: the circuit


def draw_circuit(run, file):
    """The circuit, with the mean attention of each path."""
    figure, axes = plt.subplots(figsize=diagram_size(run.task, run.paths), layout="constrained")
    labels = {path: f"{row['attention']:.2f}" for path, row in run.paths.items()}
    draw_diagram(axes, run.task, run.paths, labels.get, lambda path: USEFUL)
    kinds = sorted({row["mechanism"] for row in run.report["heads"]} - {"paths"})
    verdict = "certified circuit" if run.report["certified"] else "circuit, not certified"
    title = f"{run.title}: {verdict}\narrows carry mean attention ({run.sequences} sequences)\n"
    title += f"heads without a path: {', '.join(kinds) or 'none'}"
    axes.set_title(f"{title}; rows without an arrow: {run.report['fill']}", fontsize=10)
    config.save_figure(figure, file)


# ---- the information map


@torch.no_grad()
def residual_streams(model, inputs):
    """[(B, T, width), ...] before the first and after each layer."""
    streams, hooks = [], []

    def keep(module, arguments, output):
        streams.append(output[0] if isinstance(output, tuple) else output)

    try:
        for module in dict.fromkeys((model.embed, *model.blocks)):  # layers may share weights
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
    batch = config.sequences(run.flags, held_out("information", 2 * n))
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
    figure.supxlabel("symbol that is read", fontsize=10)
    title = f"{run.title}: what can be read from the residual stream at each role\n"
    title += f"by least squares ({n} sequences to fit, {n} to test)"
    title += "; red: layers with paths" if useful else ""
    figure.suptitle(title, fontsize=11)
    config.save_figure(figure, file)


# ---- Figures 6, 7 and Appendix D: how it emerged


def draw_emergence(run, file):
    """Figure 7: the circuit with its attention, and the step at which each path emerged."""
    # left: how it ended
    width, height = diagram_size(run.task, run.paths)
    size = (1.7 * width, height + 0.3)
    figure, panels = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    labels = {path: f"{row['attention']:.2f}" for path, row in run.paths.items()}
    draw_diagram(panels[0], run.task, run.paths, labels.get, lambda path: USEFUL)
    panels[0].set_title(f"mean attention at the end ({run.sequences} sequences)", fontsize=11)

    # right: how it began; the brightest colours of viridis are too faint for lines
    when = emergence_steps(run.emergence)
    known = [when[path] for path in run.paths if when.get(path) is not None]
    shades = ListedColormap(plt.get_cmap("viridis_r")(torch.linspace(0.1, 1, 256).numpy()))
    ends = (min(known), max(known)) if known else (0, 1)
    scale = ScalarMappable(plt.Normalize(*ends), shades)
    labels, colors = dict.fromkeys(run.paths, "not measured"), dict.fromkeys(run.paths, "lightgray")
    for path, step in when.items():
        labels[path] = "never" if step is None else f"{step:.0f}"
        if step is not None:
            colors[path] = scale.to_rgba(step)
    draw_diagram(panels[1], run.task, run.paths, labels.get, colors.get)
    title = f"step at which it first passes 0.5 ({run.emergence.sequences} sequences)"
    panels[1].set_title(title, fontsize=11)
    if known:
        figure.colorbar(scale, ax=panels[1], label="training step", shrink=0.8)
    figure.suptitle(run.title)
    config.save_figure(figure, file)


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
        axes.set_title(path_title(path, run.task, run.flags.heads), fontsize=10)
        axes.set(ylim=(-0.03, 1.03))

    # the scale, also where nothing is drawn below, and the legend
    for axes in grid.flat[max(0, len(when) - columns) : len(when)]:
        axes.tick_params(labelbottom=True)
    label = f"training step; red: the mean passes 0.5 ({run.emergence.sequences} sequences)"
    figure.supxlabel(label, fontsize=10)
    figure.supylabel("attention, or share", fontsize=10)
    above = dict(loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), **above)
    config.save_figure(figure, file)


def draw_removal(run, file):
    """When a path starts to matter, and for which symbol: what its removal raises."""
    removed = [history.without for history in run.emergence.paths.values()]
    titles = [path_title(path, run.task, run.flags.heads) for path in run.emergence.paths]
    map_of_rises(run, removed, titles, "path", file)


def draw_heads(run, file):
    """The same of every head, whether it is in the circuit at the end or not (marked if it is)."""
    useful, titles = {path[:2] for path in run.paths}, []
    for layer, head in run.emergence.heads:
        title = f"layer {layer + 1}"
        title += f" head {head + 1}" if run.flags.heads > 1 else ""
        titles.append(title + " *" * ((layer, head) in useful))
    what = "head (*: in the circuit)"
    map_of_rises(run, list(run.emergence.heads.values()), titles, what, file)


def map_of_rises(run, removed, titles, what, file):
    """A map for each symbol: a row for each that was removed, a column per checkpoint."""
    # what is drawn
    emerged, level = run.emergence, run.task.learned
    steps, count, rises = emerged.steps, len(removed), removal_rises(emerged, removed)
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [steps[0], *middles, steps[-1]]  # checkpoints may be unequally apart

    # a panel per symbol
    shape = dict(figsize=(3.3 * len(rises) + 2, 0.33 * count + 1.8), sharey=True)
    figure, panels = plt.subplots(1, len(rises), squeeze=False, layout="constrained", **shape)
    for axes, (symbol, rise) in zip(panels[0], rises.items(), strict=True):
        rows = [number - 0.5 for number in range(count + 1)]
        image = axes.pcolormesh(edges, rows, rise, cmap="Reds", vmin=0, vmax=1)
        crossing = config.first_below(steps, emerged.losses[symbol], level)
        if crossing is not None:
            axes.axvline(crossing, color="tab:blue", lw=1, ls="--")
        axes.set(title=f"$x_{{{symbol[2:]}}}$", xlabel="training step", ylim=(count - 0.5, -0.5))

    # the names and the scale
    panels[0, 0].set_yticks(range(count), titles, fontsize=9)
    figure.colorbar(image, ax=panels, label="rise of the partial loss (MSE)", extend="max")
    title = f"What the removal of each {what} destroys ({emerged.sequences} sequences)\n"
    figure.suptitle(title + f"dashed: the symbol's loss passes {level:.3g}", fontsize=11)
    config.save_figure(figure, file)


# ---- the command line


FIGURES = {
    "curves.png": lambda run, file: draw_curves(run.folder),
    "attention_maps.png": draw_attention_maps,
    "information_map.png": draw_information_map,
}
CIRCUIT_FIGURES = {"circuit.png": draw_circuit}
EMERGENCE_FIGURES = {
    "emergence.png": draw_emergence,
    "paths.png": draw_paths,
    "removal.png": draw_removal,
    "heads.png": draw_heads,
}


def draw(folder):
    """Draw all figures of a run into its directory."""
    run, figures = read_run(folder), dict(FIGURES)
    if run.paths:
        figures |= CIRCUIT_FIGURES
    if run.paths and run.emergence:
        figures |= EMERGENCE_FIGURES
    for name, draw_figure in figures.items():
        draw_figure(run, folder / name)
        print(folder / name, flush=True)
    if not run.report:
        print(f"no circuit is known here, so none is drawn: run python ablate.py {folder} first")
    elif not run.paths:
        print(f"no circuit is drawn: {run.report['verdict']}")


def main():
    with program("analyze.py"):
        p = command_line("analyze.py", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        folder = p.parse_args().run
        config.read_flags(folder)  # refuses what is no run before it is locked
        with config.alone_in(folder):
            draw(folder)


if __name__ == "__main__":
    main()
