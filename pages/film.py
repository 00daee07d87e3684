"""A film of a circuit that lights up through training: emergence.gif in the run directory.

python -m pages.film results/D     # a run with emergence.json
"""

import pathlib

from parts import command_line, config, program

import matplotlib.pyplot as plt
import numpy
import torch
from PIL import Image

from analyze import diagram_size, draw_diagram, read_run


def draw_film(run, file, frames=44):
    """The circuit lighting up through training, the partial losses under it; slow while it does."""
    # the frame that stays: every path that the model uses, in the colour of the symbol it finds
    emerged, task, last = run.emergence, run.task, run.task.symbols - 1
    paths, steps = [*emerged.paths], emerged.steps
    width, height = diagram_size(task, paths)
    shape = dict(figsize=(0.8 * width, 0.8 * (height + 3)), height_ratios=[height, 2.8])
    figure, (above, below) = plt.subplots(2, 1, layout="constrained", **shape)

    def color(path):
        return config.symbol_color(max(1, task.roles[path.target.role].symbol), last)

    drawn = draw_diagram(above, task, paths, lambda path: "0.00", color)
    marks = {}
    for symbol, losses in emerged.losses.items():
        shade = config.symbol_color(int(symbol[2:]), last)
        below.plot(steps, losses, color=shade, label=f"${symbol[:2]}{{{symbol[2:]}}}$", lw=1.5)
        (marks[symbol],) = below.plot([], [], "o", color=shade, ms=8)
    now = below.axvline(0, color="gray", lw=1)
    limits = dict(xlim=(steps[0], steps[-1]), ylim=(0, 1.2))
    below.set(xlabel="training step", ylabel="MSE of each symbol", **limits)
    below.axhline(task.learned, color="gray", ls=":", lw=1)
    below.legend(fontsize="small", ncols=last, loc="upper right")
    about = f"arrows: mean attention ({emerged.sequences} sequences), in the colour of the symbol"
    below.set_title(f"{about}\nthat they find; dotted: known below {task.learned:.3g}", fontsize=9)

    def show(checkpoint):
        step = steps[checkpoint]
        losses = {name: curve[checkpoint] for name, curve in emerged.losses.items()}
        known = [name for name, loss in losses.items() if loss < task.learned]
        said = ", ".join(f"$x_{{{name[2:]}}}$" for name in known) or "nothing"
        above.set_title(f"Step {step}: asked for all of its chain, the query q knows {said}")
        now.set_xdata([step] * 2)
        for symbol, mark in marks.items():
            mark.set_data([step], [losses[symbol]])
        for path, history in emerged.paths.items():
            (arrow, text), mean = drawn[path], history.mean[checkpoint]
            arrow.set_alpha(max(0.06, mean))
            text.set(text=f"{mean:.2f}", alpha=max(0.1, mean))
        figure.canvas.draw()
        return Image.fromarray(numpy.asarray(figure.canvas.buffer_rgba())).convert("RGB")

    # frames where as much has changed since the one before, in arrows and errors
    curves = [history.mean for history in emerged.paths.values()] + [*emerged.losses.values()]
    moved = torch.tensor(curves).diff().abs().sum(0) + 1e-3
    share = torch.cat([torch.zeros(1), moved.cumsum(0) / moved.sum()])
    chosen = torch.searchsorted(share, torch.linspace(0, 1, frames)).clamp(max=len(steps) - 1)
    chosen = [0, *dict.fromkeys(chosen.tolist())]
    figure.set_dpi(75)
    show(0)
    figure.set_layout_engine("none")  # to lay out every frame anew takes most of the time
    pictures = [show(checkpoint).quantize(64) for checkpoint in chosen]
    milliseconds = [400] + [100] * (len(pictures) - 2) + [900]
    moving = dict(save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    config.write_file(file, lambda temporary: pictures[0].save(temporary, "GIF", **moving))
    plt.close(figure)


def main():
    with program("pages.film"):
        p = command_line("pages.film", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        folder = p.parse_args().run
        draw_film(read_run(folder), folder / "emergence.gif")
        print(folder / "emergence.gif")


if __name__ == "__main__":
    main()
