"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: curves.png, attention_maps.png, circuit.png, ...

Checkpoints (--save-every) show how its paths emerged. emergence.json keeps what was measured: the
number of held-out sequences, a hash of the weights, the steps, and each path's attention at each.

To add a figure, write a function that returns it, and yield it in `figures_of`.
"""

import itertools
import pathlib
import re
import textwrap

import train
from ablate import arrivals, by_head, mark_edges, mean_attention, paths_in, read_report
from data import Task, command_line, progress

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure


RED, INK, GRAY, FAINT, PALE = "#e63946", "#22223b", "#a3a3b3", "#d8d8e0", "#f0f0f5"
SYMBOLS = "#8d99ae #4361ee #2a9d8f #f4a261 #9d4edd #588157 #a44a3f #a3a3b3".split()  # of x_0, ...
LABEL = dict(size=8.5, ha="center", va="center", zorder=4)  # on top of arrows
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
    learned, end = crossings(rows, task), steps[-1]
    figure, (left, right) = panels(2, 2, 5, 3)

    # left: all targets together; the first row has no training loss, which is None
    left.plot(steps, [row["train"] for row in rows], color=GRAY, label="training")
    left.plot(steps, [row["val"] for row in rows], color=INK, label="validation, 1024 sequences")
    left.set(xlabel="training step", ylabel=task.loss_name, yscale="log")

    # right: each target, in the color of its x_k, or in any if it is no x_k
    ks = itertools.chain(task.targets, itertools.count())
    for k, (name, step) in zip(ks, learned.items(), strict=False):
        text = "" if step is None else f": learned at {step:.0f}"
        label, color = shown_name(name) + text, symbol_color(k)
        right.plot(steps, [row[name] for row in rows], color=color, label=label)
        right.plot([step], [task.learned_below], "o", color=color)  # none if step is None
    if None not in learned.values():
        end = min(end, 1.5 * max(learned.values()) + flags.eval_every)
    right.set(xlabel="training step", ylabel="of each target, validation", xlim=(0, end), ylim=0)

    # where it can stall, and what a model there does; for N = 1 both are one
    chance = f"averages the\n{task.N} candidates" if type(task) is Task else "chance"
    levels = {task.chance: chance, task.blank: "knows nothing"}
    texts = [f"{level:.3g}: {meaning}" for level, meaning in levels.items()]
    right.secondary_yaxis("right").set_yticks([*levels], texts, size=8.5)
    right.hlines([*levels], 0, end, GRAY, ":")
    figure.legend(loc="outside right center")
    caption = f"""Dots: the loss passes {task.learned_below:.3g}, and the target counts as learned.
The run ended at step {steps[-1]}, the axis on the right ends at {end:.0f}."""
    add_title(figure, flags, "how it learned", caption)
    return figure


# ---- Appendix C: attention maps


@torch.no_grad()
def draw_attention_maps(model, flags, paths):
    """The attention of every head on one held-out sequence, first of those in the circuit, with
    frames around its paths. The tokens are sorted by chain."""
    task, circuit = train.task_of(flags), by_head(paths)
    batch = task.draw("validation", 1)
    _, patterns = model(batch.inputs, return_patterns=True)

    # the tokens of each chain together, (N * roles), without those of none; or all, without roles
    order = batch.places[0].flatten() if task.roles else torch.arange(task.T)
    names = [*map(shown_name, task.roles)] * task.N or [*range(task.T)]
    n = len(names)
    chains = np.arange(0, n, len(task.roles) or n) - 0.5  # where they begin
    ticks = names if n <= 40 else []  # more are too small to read, and take minutes

    heads = sorted(model.heads, key=lambda head: head not in circuit)
    figure, grid = panels(len(heads), 3, 4, 4.3)
    for axes, (layer, head) in zip(grid, heads, strict=True):
        pattern = patterns[layer][0, head, order][:, order]
        axes.imshow(pattern.numpy(), "Blues", vmin=0, vmax=1)
        axes.set_title(f"L{layer}H{head}")
        axes.set_xticks(range(len(ticks)), ticks, rotation=90)
        axes.set_yticks(range(len(ticks)), ticks)
        axes.tick_params(length=0, pad=1, labelsize=min(8, 200 / n))
        axes.hlines(chains, -0.5, n - 0.5, GRAY, lw=0.5)
        axes.vlines(chains, -0.5, n - 0.5, GRAY, lw=0.5)
        edges = mark_edges(circuit[layer, head], task, batch.places)[0, order][:, order]
        axes.plot(*edges.T.nonzero().T, "s", ms=250 / n, mfc="none", mec=RED)
    caption = f"""Heads of the circuit come first. Rows attend to columns. Tokens between lines: \
{" ".join(task.roles) or "all"}.
Red: paths of the circuit. They were found on many sequences, and may be empty in this one."""
    add_title(figure, flags, "where it attends", caption)
    return figure


# ---- Figures 5 and 7, Appendix D: the circuit, and how its paths emerged


def slots_of(task, paths):
    """[[token of the diagram, ...], ...]: the roles of each slot, and after it the intermediate
    tokens (3b+1) that these paths have."""
    tokens = {token for path in paths for token in (path.reader, path.token)}
    slots = []
    for slot in task.chain_slots:
        after = sorted(token for token in tokens if "+" in token and token.split("+")[0] in slot)
        slots += [slot, after] if after else [slot]
    return slots


def draw_diagram(axes, flags, looks):
    """Draw the tokens of a chain across and the layers that have paths upward, letters for what can
    have arrived at a token by then, and arrows from what is read to its reader, dashed if it is a
    star; looks: {path: (text, color, width)}. Arrows into one reader do not cross: the first comes
    from the nearest token.

        layer 4   y                        B C   what 1b holds after it
                  y - 1                     2    arrow 2 ends
                  y - 2                     1    arrow 1 ends
                  y - 3     2                    arrow 2 starts
                  y - 4            1             arrow 1 starts
        layer 3   y - 5     B      C        B    what they hold after it
                            2a     2b      1b"""
    task, paths = train.task_of(flags), sorted(looks)
    slots, holds = slots_of(task, paths), dict(arrivals(paths, task))  # {layer: {token: symbols}}
    x_of = {token: x for x, token in enumerate(itertools.chain(*slots))}
    i_of, n_of = {}, {}
    for path in sorted(paths, key=lambda path: abs(x_of[path.token] - x_of[path.reader])):
        reader = path.layer, path.reader
        n_of[reader] = i_of[path] = n_of.get(reader, 0) + 1

    # the y of each layer, in units of 0.2 inches; the input is layer -1
    height = 3 + max(n_of.values())
    y_of = {layer: height * number for number, layer in enumerate(holds)}
    top = max(y_of.values())
    axes.figure.set_size_inches(max(7.5, 0.85 * len(x_of) + 1.2), 0.2 * top + 2)
    axes.set(xlim=(-0.6, len(x_of) - 0.3), ylim=(-2, top + 1), frame_on=False)
    axes.set_yticks([*y_of.values()], ["input", *map("layer {}".format, [*holds][1:])])
    axes.set_xticks(range(len(x_of)), map(shown_name, x_of))
    axes.tick_params(length=0)

    # the line of each token, and a band behind each slot
    axes.vlines(x_of.values(), 0, top, FAINT, lw=1, zorder=0)
    for slot in slots:
        ends = x_of[slot[0]] - 0.15, x_of[slot[-1]] + 0.15
        axes.plot(ends, [0, 0], color=PALE, lw=30, solid_capstyle="round")

    # the arrows, and where they start and end letters, as at the input
    shown = {(-1, token) for token in x_of}
    for path in paths:
        below = max(layer for layer in holds if layer < path.layer)
        i, n = i_of[path], n_of[path.layer, path.reader]
        start = x_of[path.token], y_of[below] + i
        end = x_of[path.reader], y_of[path.layer] - (n + 1 - i)
        text, color, width = looks[path]
        head = f"H{path.head} " * (flags.heads > 1)
        style = dict(arrowstyle="-|>", mutation_scale=13, color=color, lw=width)
        style["ls"] = "--" if path.star else "-"
        axes.annotate("", end, start, arrowprops=style)
        box = dict(fc="white", ec="none", pad=1)
        axes.text(*np.mean([start, end], 0), head + text, bbox=box, **LABEL)
        shown |= {(below, path.token), (path.layer, path.reader)}
    for layer, token in shown:
        draw_letters(axes, x_of[token], y_of[layer], holds[layer][token], task)


def draw_letters(axes, x, y, symbols, task):
    """Write the letters of these symbols, {k of x_k}, side by side around a point."""
    for i, k in enumerate(sorted(symbols)):
        box = dict(boxstyle="round,pad=0.25", fc=symbol_color(k), ec="white")
        style = dict(LABEL, family="monospace", weight="bold", color="white", bbox=box)
        axes.text(x + 0.2 * (i - (len(symbols) - 1) / 2), y, task.labels[k][0], **style)


def arrow_color(path, before, task):
    """Red if a path reads ahead: if to 2b (x_1 and x_2) it brings an x_3; else gray if it brings
    nothing new. before: {token: k of what can have arrived there before}."""
    brought = before[path.token]
    for slot in task.chain_slots:
        own = [task.roles[role] for role in slot]
        if path.reader in slot and path.reader != "q" and max(brought, default=0) > max(own):
            return RED
    return GRAY if brought <= before[path.reader] else INK


def draw_circuit(flags, report):
    """Figure 5: the circuit; the more the loss rises without a path, the wider its arrow."""
    task, paths, looks = train.task_of(flags), paths_in(report), {}
    # {layer: {token: what has arrived there before this layer}}
    before = {layer: holds for (_, holds), (layer, _) in itertools.pairwise(arrivals(paths, task))}
    for path, row in paths.items():
        text = f"{row['attention']:.2f}" if row["attention"] < 0.9 else ""
        color = arrow_color(path, before[path.layer], task)
        looks[path] = text, color, 1 + 2 * min(1, max(row["without"].values()))
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    verdict, ablation = report["verdict"].split(":")[0], report["ablation"]
    star = " Dashed: reads the tokens of all queries." * any(path.star for path in paths)
    caption = f"""{LETTERS} Numbers: mean attention below 0.9.
Wider: the loss rises more without it. Red: a pair reads a letter from beyond its gray band.
Gray: brings no new letter.{star}
Circuit {verdict}; the worst target has a loss of {max(report[ablation].values()):.3f} \
under {ablation} ablation (n = {report["sequences"]})."""
    add_title(figure, flags, "what it learned", caption)
    return figure


def checkpoints_of(run):
    """The checkpoint files of a run, by step; ValueError for a file like 20_old.pt."""
    return sorted(pathlib.Path(run, "ckpt").glob("[0-9]*.pt"), key=lambda file: int(file.stem))


@torch.no_grad()
def measure_emergence(run, paths, n=32):
    """What emergence.json holds, measured on n sequences at each checkpoint of a run."""
    files, rows = checkpoints_of(run), [dict(path._asdict(), mean=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, task, _ = train.load(run, f"ckpt/{file.name}")
        batch = task.draw("emergence", n)
        _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in zip(paths, rows, strict=True):
            mean = mean_attention(patterns[path.layer][:, path.head], path, task, batch.places)
            row["mean"].append(round(mean.item(), 4))
    steps = [int(file.stem) for file in files]
    return dict(sequences=n, weights=train.weights_hash(run), steps=steps, paths=rows)


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
        axes.set_title(path, size=9, parse_math=False)
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
    """Name the run above a figure, by its directory; write a caption and its command below it."""
    style = dict(x=0.01, ha="left", parse_math=False)
    figure.suptitle(f"{flags.out.resolve().name}: {title}", size=13, weight="bold", **style)
    command = textwrap.wrap(train.command_of(flags), 80, break_on_hyphens=False)
    text = caption + "\n" + " \\\n    ".join(command)  # as a shell takes it in several lines
    figure.supxlabel(text, color="dimgray", size=8.5, **style)


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def shown_name(name):
    """A name as matplotlib shows it: x_12 with an index, others as they are, dollars included."""
    return re.sub(r"^x_(\d+)$", r"$x_{\1}$", name.replace("$", r"\$"))


def symbol_color(k):
    """The colour of x_k in all figures."""
    return SYMBOLS[k % len(SYMBOLS)]


# ---- the command line


def figures_of(run):
    """Yield (file name, figure) for all that this run directory has been through."""
    flags = train.read_flags(run)
    yield "curves.png", draw_curves(flags, train.read_log(run))
    if not (run / "model.pt").exists():
        print(f"there is no {run / 'model.pt'}: finish the training with --resume")
        return
    report = read_report(run)
    paths = paths_in(report)
    yield "attention_maps.png", draw_attention_maps(train.load(run)[0], flags, paths)
    if not paths:
        print("there is no circuit:", report.get("verdict", f"run python ablate.py {run} first"))
        return
    yield "circuit.png", draw_circuit(flags, report)
    if checkpoints_of(run):
        train.write_file(run / "emergence.json", measure_emergence(run, sorted(paths)))
    emergence = read_report(run, "emergence.json")
    if paths_in(emergence).keys() == paths.keys():
        yield "emergence.png", draw_emergence(flags, emergence, train.read_log(run))
        yield "paths.png", draw_paths(flags, emergence)
    else:
        other = "emergence.json is of another circuit, and " if emergence else ""
        print(f"no emergence: {other}there are no checkpoints (train.py --save-every)")


def main():
    p = command_line("analyze.py", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory of train.py")
    run = p.parse_args().run
    for name, figure in figures_of(run):
        save_figure(figure, run / name)
        print(run / name)


if __name__ == "__main__":
    main()
