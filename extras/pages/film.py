"""A film of the circuit that emerges in training: emergence.gif in the run directory.

python -m extras.pages.film results/D     # a run with emergence.json
"""

import pathlib

import analyze
from ablate import parts_of, paths_in
from analyze import ARROWS, diagram_size, draw_diagram, read_run
from data import UserError, command_line, program

import matplotlib.pyplot as plt
import numpy
import torch
from PIL import Image


def draw_film(run, file, frames=44):
    """Write the film: above, the attention of every path in emergence.json; below, the loss of each
    symbol. It is slow where much changes."""
    # what stays: the places, and an arrow in the colour of the symbol that is read
    emergence, task, last = run.emergence, run.task, run.task.symbols - 1
    paths, steps = paths_in(emergence), emergence["steps"]
    width, height = diagram_size(task, paths)
    shape = dict(figsize=(0.8 * width, 0.8 * (height + 3)), height_ratios=[height, 2.8])
    figure, (above, below) = plt.subplots(2, 1, layout="constrained", **shape)
    colors = {}
    for path in paths:
        role, _ = parts_of(path.read)
        symbol = max(1, task.roles[role])
        colors[path] = analyze.symbol_color(symbol, last)
    drawn, dots = draw_diagram(above, task, paths, dict.fromkeys(paths, "0.00"), colors), {}
    for symbol, losses in emergence["losses"].items():
        color = analyze.symbol_color(int(symbol[2:]), last)
        below.plot(steps, losses, color=color, label=f"$x_{{{symbol[2:]}}}$", lw=1.5)
        (dots[symbol],) = below.plot([], [], "o", color=color, ms=8)
    now = below.axvline(0, color="gray", lw=1)
    limits = dict(xlim=(steps[0], steps[-1]), ylim=(0, 1.2))
    below.set(xlabel="training step", ylabel="MSE of each symbol", **limits)
    below.axhline(task.learned_below, color="gray", ls=":", lw=1)
    below.legend(fontsize="small", ncols=last, loc="upper right")
    n = emergence["sequences"]
    caption = (
        f"{ARROWS};\nmean attention (n = {n} sequences), in the colour of the symbol that is read;"
    )
    caption += f" dotted: a symbol is learned below {task.learned_below:.3g}"
    below.set_title(caption, fontsize=9)

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
        figure.canvas.draw()
        return Image.fromarray(numpy.asarray(figure.canvas.buffer_rgba())).convert("RGB")

    # between any two frames attention and losses change by the same amount
    curves = [row["mean"] for row in paths.values()] + [*emergence["losses"].values()]
    changes = torch.tensor(curves).diff().abs().sum(0) + 1e-3
    progress = torch.cat([torch.zeros(1), changes.cumsum(0) / changes.sum()])
    chosen = torch.searchsorted(progress, torch.linspace(0, 1, frames)).clamp(max=len(steps) - 1)
    chosen = [0, *dict.fromkeys(chosen.tolist())]
    figure.set_dpi(75)
    frame(0)
    figure.set_layout_engine("none")  # a new layout for every frame would take most of the time
    pictures = [frame(checkpoint).quantize(64) for checkpoint in chosen]
    milliseconds = [400] + [100] * (len(pictures) - 2) + [900]
    moving = dict(save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    pictures[0].save(file, "GIF", **moving)
    plt.close(figure)


def main():
    with program("extras.pages.film"):
        p = command_line("extras.pages.film", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        folder = p.parse_args().run
        run = read_run(folder)
        if "losses" not in run.emergence:
            raise UserError(f"run python -m extras.pages.removal {folder} first: it has the losses")
        draw_film(run, folder / "emergence.gif")
        print(folder / "emergence.gif")


if __name__ == "__main__":
    main()
