"""What each path is needed for while it emerges: Figure 7, beyond the paper, and as a film.

python -m extras.pages.removal results/D    # a run with checkpoints, or where this was measured

At each checkpoint of a run, each path of its circuit, and each candidate, is ablated alone to its
mean. The rise of every symbol's loss is drawn into removal.png, attention and losses step by step
into emergence.gif. The losses stay in emergence.json, so that the checkpoints may be deleted: those
of the full model, and of each path without, both {"x_1": [MSE, ...], ...}.
"""

import pathlib

import analyze
import train
from ablate import PatchedModel, parts_of, paths_in
from data import UserError, command_line, held_out, program, progress
from extras.studies.stats import knock_out_rises

import numpy
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image


@torch.no_grad()
def measure(run):
    """Add the losses without each path to what emergence.json holds."""
    emergence, flags = run.emergence, run.flags
    batch = train.sequences(flags, held_out("emergence", emergence["sequences"]))
    emergence["losses"] = {name: [] for name in flags.target_names}
    for row in emergence["paths"]:
        row["without"] = {name: [] for name in flags.target_names}
    for file in progress("checkpoints", train.checkpoints_of(run.folder)):
        patched = PatchedModel(train.load(run.folder, f"ckpt/{file.name}")[0], flags, batch)
        measured = [(emergence["losses"], patched.baseline)]
        for path, row in paths_in(emergence).items():
            measured.append((row["without"], patched.knock_out([path])))
        for curves, losses in measured:
            for curve, loss in zip(curves.values(), losses.mean((0, 1)).tolist(), strict=True):
                curve.append(round(loss, 4))
    train.write_file(run.folder / "emergence.json", emergence)


def draw_removal(run):
    """Return the figure: by how much the loss of each symbol rises without each path."""
    emergence, paths = run.emergence, paths_in(run.emergence)
    steps, losses = emergence["steps"], emergence["losses"]
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [1, *middles, steps[-1]]  # the steps may be unequally spaced; a log axis has no 0
    rows = [number - 0.5 for number in range(len(paths) + 1)]
    learned = [analyze.first_below(steps, c, run.problem.learned_below) for c in losses.values()]
    begin = min((step for step in learned if step is not None), default=4) / 4
    height = 0.33 * len(paths) + 0.8
    figure, grid = analyze.panels(len(losses), len(losses), 3.6, height, sharey=True)

    # a panel for each symbol, with a row for each path
    for axes, step, symbol in zip(grid, learned, losses, strict=True):
        rises = [knock_out_rises(emergence, row)[symbol] for row in paths.values()]
        image = axes.pcolormesh(edges, rows, rises, cmap="Reds", vmin=0, vmax=1)
        if step is not None:
            axes.axvline(step, color="tab:blue", lw=1, ls="--")
        axes.set(title=f"$x_{{{symbol[2:]}}}$", xlabel="training step", xscale="log")
        axes.set(xlim=(begin, steps[-1]), ylim=(len(paths) - 0.5, -0.5))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()

    grid[0].set_yticks(range(len(paths)), [*map(str, paths)], fontsize=9)
    figure.colorbar(image, ax=grid, label="rise of the symbol's MSE, drawn up to 1", extend="max")
    caption = "rise of the full model's loss with one path ablated to its mean (n = "
    caption += f"{emergence['sequences']} sequences); dashed: the symbol is learned"
    analyze.add_title(figure, run, caption)
    return figure


def draw_film(run, file, frames=44):
    """Write the film: above, the attention of every path in emergence.json; below, the loss of each
    symbol. It is slow where much changes."""
    # what stays: the places, and an arrow in the colour of the symbol that is read
    emergence, task, last = run.emergence, run.problem, run.problem.symbols - 1
    paths, steps = paths_in(emergence), emergence["steps"]
    width, height = analyze.diagram_size(task, paths)
    figure = Figure(figsize=(0.8 * width, 0.8 * (height + 3)), dpi=75, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[height, 2.8])
    colors = {}
    for path in paths:
        role, _ = parts_of(path.read)
        colors[path] = analyze.symbol_color(max(1, task.roles[role]), last)
    drawn = analyze.draw_diagram(above, task, paths, dict.fromkeys(paths, "0.00"), colors)
    dots = {}
    for symbol, losses in emergence["losses"].items():
        color = analyze.symbol_color(int(symbol[2:]), last)
        below.plot(steps, losses, color=color, label=f"$x_{{{symbol[2:]}}}$", lw=1.5)
        (dots[symbol],) = below.plot([], [], "o", color=color, ms=8)
    now = below.axvline(0, color="gray", lw=1)
    below.set(xlim=(steps[0], steps[-1]), ylim=(0, 1.2))
    below.set(xlabel="training step", ylabel="MSE of each symbol")
    below.axhline(task.learned_below, color="gray", ls=":", lw=1)
    below.legend(fontsize="small", ncols=last, loc="upper right")
    caption = f"{analyze.ARROWS};\nmean attention (n = {emergence['sequences']} sequences), in the"
    caption += " colour of the symbol that is read; dotted: a symbol is learned below"
    below.set_title(f"{caption} {task.learned_below:.3g}", fontsize=9)

    def frame(checkpoint):
        """Return the picture at a checkpoint."""
        losses = {name: curve[checkpoint] for name, curve in emergence["losses"].items()}
        learned = [f"$x_{{{name[2:]}}}$" for name in losses if losses[name] < task.learned_below]
        learned = ", ".join(learned) or "nothing"
        above.set_title(f"Step {steps[checkpoint]}: the model has learned {learned}")
        now.set_xdata([steps[checkpoint]] * 2)
        for symbol, dot in dots.items():
            dot.set_data([steps[checkpoint]], [losses[symbol]])
        for path, row in paths.items():
            (arrow, text), mean = drawn[path], row["mean"][checkpoint]
            arrow.set_alpha(max(0.06, mean))
            text.set(text=f"{mean:.2f}", alpha=max(0.1, mean))
        canvas.draw()
        return Image.fromarray(numpy.asarray(canvas.buffer_rgba())).convert("RGB")

    # between any two frames attention and losses change by the same amount
    curves = [row["mean"] for row in paths.values()] + [*emergence["losses"].values()]
    changes = torch.tensor(curves).diff().abs().sum(0) + 1e-3
    passed = torch.cat([torch.zeros(1), changes.cumsum(0) / changes.sum()])
    chosen = torch.searchsorted(passed, torch.linspace(0, 1, frames)).clamp(max=len(steps) - 1)
    chosen = [0, *dict.fromkeys(chosen.tolist())]
    frame(0)
    figure.set_layout_engine("none")  # a new layout for every frame would take most of the time
    pictures = [frame(checkpoint).quantize(64) for checkpoint in chosen]
    milliseconds = [400] + [100] * (len(pictures) - 2) + [900]
    moving = dict(save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    pictures[0].save(file, "GIF", **moving)


def main():
    p = command_line("extras.pages.removal", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory, after ablate.py")
    folder = p.parse_args().run
    with program("extras.pages.removal"):
        run = analyze.read_run(folder)
        if not run.emergence:
            raise UserError(f"{folder} has no checkpoints: train it with --save-every 20")
        if "losses" not in run.emergence:
            measure(run)
        analyze.save_figure(draw_removal(run), folder / "removal.png")
        draw_film(run, folder / "emergence.gif")
        print(folder / "removal.png", folder / "emergence.gif", sep="\n")


if __name__ == "__main__":
    main()
