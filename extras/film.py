"""A film of how the paths of a circuit emerge in training, an animated GIF (Figure 7).

python -m extras.film results/D    # a run with emergence.json, which analyze.py writes
"""

import io
import pathlib

import analyze
import train
from ablate import paths_in, read_report
from data import LOSS, command_line

import numpy
from matplotlib.figure import Figure
from PIL import Image


def draw_frames(flags, log, emergence, count=50):
    """Return the pictures of the film, at most `count`; log: the rows of log.jsonl."""
    # what stays: the diagram above, the losses below
    paths, steps, n = paths_in(emergence), emergence["steps"], emergence["sequences"]
    width, height = analyze.diagram_size(flags.problem, paths)
    figure = Figure(figsize=(0.8 * width, 0.8 * height + 2), dpi=75, layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[0.8 * height, 2])
    labels, colors = dict.fromkeys(paths, "0.00"), dict.fromkeys(paths, analyze.CIRCUIT)
    drawn = analyze.draw_diagram(above, flags.problem, paths, labels, colors)
    losses = [[row[name] for name in flags.target_names] for row in log]  # (rows, symbols)
    below.set_prop_cycle(color=[analyze.symbol_color(k, flags.D) for k in flags.target_symbols])
    below.plot([row["step"] for row in log], losses, label=flags.target_names)
    below.set(xlabel="training step", ylabel=LOSS, xscale="log", xlim=(steps[1], steps[-1]))
    below.legend(loc="lower left")
    now = below.axvline(steps[1], color="gray")
    analyze.add_title(figure, flags, f"mean attention (n = {n}); {analyze.ARROWS}")

    # attention changes by about as much between any two frames: the film slows down where it does
    means = numpy.array([paths[path]["mean"] for path in drawn])  # (paths, steps)
    passed = numpy.cumsum([0, *(abs(numpy.diff(means)).sum(0) + 0.001)])
    chosen = numpy.searchsorted(passed, numpy.linspace(0, passed[-1], count))
    for number in numpy.unique(chosen):
        above.set_title(f"step {steps[number]}", size=16)
        now.set_xdata([steps[number]] * 2)
        for (arrow, label), mean in zip(drawn.values(), means[:, number], strict=True):
            arrow.set_alpha(max(0.06, mean))
            label.set(text=f"{mean:.2f}", alpha=max(0.1, mean))
        figure.savefig(picture := io.BytesIO())
        figure.set_layout_engine("none")  # that of the first frame stays
        yield Image.open(picture).convert("RGB")


def main():
    p = command_line("extras.film", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory, after analyze.py")
    p.add_argument("--out", type=pathlib.Path, help="the film; default: RUN/emergence.gif")
    args = p.parse_args()
    emergence, out = read_report(args.run, "emergence.json"), args.out or args.run / "emergence.gif"
    if not emergence:
        p.error(f"{args.run} has no emergence.json: train with --save-every, then run analyze.py")
    frames = [*draw_frames(train.read_flags(args.run), train.read_log(args.run), emergence)]

    # all in the colours of the last, so that what does not move takes no bytes; it stays 2 seconds
    colors = frames[-1].quantize(128)
    frames = [frame.quantize(palette=colors, dither=Image.Dither.NONE) for frame in frames]
    rest = frames[1:] + frames[-1:] * 16
    frames[0].save(out, save_all=True, append_images=rest, duration=120, loop=0)
    print(out)


if __name__ == "__main__":
    main()
