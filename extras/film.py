"""A film of how the paths of a circuit emerge in training, an animated GIF (Figure 7).

python -m extras.film results/main    # a run with emergence.json, which analyze.py writes
"""

import io

import analyze
import train
from ablate import paths_in, read_report
from data import command_line

import numpy
from matplotlib.figure import Figure
from PIL import Image


def draw_frames(flags, log, emergence, count=50):
    """Return the pictures of the film, at most `count`; log: the rows of log.jsonl."""
    # what stays: the losses below
    paths, steps, n = paths_in(emergence), emergence["steps"], emergence["sequences"]
    figure, task = Figure(dpi=100, layout="constrained"), train.task_of(flags)
    above, below = figure.subplots(2, 1)
    for k, (name, step) in zip(task.targets, analyze.crossings(log, task).items(), strict=True):
        losses, color = [row[name] for row in log], analyze.symbol_color(k)
        below.plot([row["step"] for row in log], losses, color=color, lw=2)
        x, y = steps[-1], losses[-1]  # the name stands where it is learned, or at the end
        if step is not None:
            x, y = step, task.learned_below
        text = f"{analyze.shown_name(name)} "
        below.text(x, y, text, size=14, color=color, ha="right", va="top")
    below.set(xlabel="training step", ylabel=task.loss_name, xlim=(0, steps[-1]), ylim=0)
    now = below.axvline(0, color=analyze.INK)
    caption = f"""{analyze.LETTERS}
Not all of them have arrived at this step. Numbers: mean attention (n = {n})."""
    analyze.add_title(figure, flags, "how it learned", caption)

    # attention changes by about as much between any two frames: the film slows down where it does
    means = numpy.array([row["mean"] for row in paths.values()])  # (paths, steps)
    passed = numpy.cumsum([0, *(abs(numpy.diff(means)).sum(0) + 0.001)])
    chosen = numpy.searchsorted(passed, numpy.linspace(0, passed[-1], count))
    for number in numpy.unique(chosen):
        looks = {}
        for path, mean in zip(paths, means[:, number], strict=True):
            looks[path] = [(f"{mean:.2f}", "white")], (analyze.RED, max(0.06, mean)), 2.5
        above.clear()
        analyze.draw_diagram(above, flags, looks)
        width, height = figure.get_size_inches()  # of the diagram alone
        above.get_gridspec().set_height_ratios([height, 2])
        figure.set_size_inches(width, height + 2.2)
        above.set_title(f"step {steps[number]}", size=16)
        now.set_xdata([steps[number]] * 2)
        figure.savefig(picture := io.BytesIO())
        yield Image.open(picture).convert("RGB")


def main():
    p = command_line("python -m extras.film", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory, after analyze.py")
    run = p.parse_args().run
    emergence, out = read_report(run, "emergence.json"), run / "emergence.gif"
    if not emergence:
        p.error(f"{run} has no emergence.json: train with --save-every, then run analyze.py")
    frames = [*draw_frames(train.read_flags(run), train.read_log(run), emergence)]

    # all in the colours of the last, so that what does not move takes no bytes; it stays 2 seconds
    colors = frames[-1].quantize(128)
    frames = [frame.quantize(palette=colors, dither=Image.Dither.NONE) for frame in frames]
    rest = frames[1:] + frames[-1:] * 16
    frames[0].save(out, save_all=True, append_images=rest, duration=120, loop=0)
    print(out)


if __name__ == "__main__":
    main()
