"""What each path is needed for while it emerges: Figure 7, beyond the paper.

python -m extras.pages.removal results/D    # a run with checkpoints, or where this was measured

At each checkpoint of a run, each path of its circuit, and each candidate, is ablated alone to its
mean. The rise of every symbol's loss is drawn into removal.png. The losses stay in emergence.json,
so that the checkpoints may be deleted: losses of the full model, and of each path without, both
{"x_1": [MSE, ...], ...}.
"""

import pathlib

import analyze
import train
from ablate import PatchedModel, paths_in
from data import UserError, command_line, held_out, program, progress
from extras.studies.stats import knock_out_rises

import torch
from matplotlib.ticker import LogLocator


@torch.no_grad()
def measure(folder, run):
    """Add the losses without each path to what emergence.json holds, and return it."""
    emergence, flags = run.emergence, run.flags
    batch = train.sequences(flags, held_out("emergence", emergence["sequences"]))
    emergence["losses"] = {name: [] for name in flags.target_names}
    for row in emergence["paths"]:
        row["without"] = {name: [] for name in flags.target_names}
    for file in progress("checkpoints", train.checkpoints_of(folder)):
        patched = PatchedModel(train.load(folder, f"ckpt/{file.name}")[0], flags, batch)
        measured = [(emergence["losses"], patched.baseline)]
        for path, row in paths_in(emergence).items():
            measured.append((row["without"], patched.knock_out([path])))
        for curves, losses in measured:
            for curve, loss in zip(curves.values(), losses.mean((0, 1)).tolist(), strict=True):
                curve.append(round(loss, 4))
    train.write_file(folder / "emergence.json", emergence)
    return emergence


def draw_removal(run, emergence):
    """Return the figure: by how much the loss of each symbol rises without each path."""
    steps, paths = emergence["steps"], paths_in(emergence)
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    edges = [1, *middles, steps[-1]]  # the steps may be unequally spaced; a log axis has no 0
    rows = [number - 0.5 for number in range(len(paths) + 1)]
    losses, height = emergence["losses"], 0.33 * len(paths) + 0.8
    learned = [analyze.first_below(steps, c, run.task.learned_below) for c in losses.values()]
    begin = min((step for step in learned if step is not None), default=4) / 4
    figure, grid = analyze.panels(len(losses), len(losses), 3.6, height, sharey=True)

    for axes, step, symbol in zip(grid, learned, losses, strict=True):
        # a row for each path
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


def main():
    p = command_line("extras.pages.removal", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory, after ablate.py")
    folder = p.parse_args().run
    with program("extras.pages.removal"):
        run = analyze.read_run(folder)
        if not run.emergence:
            raise UserError(f"{folder} has no checkpoints: train it with --save-every 20")
        measured = "losses" in run.emergence
        emergence = run.emergence if measured else measure(folder, run)
        analyze.save_figure(draw_removal(run, emergence), folder / "removal.png")
        print(folder / "removal.png")


if __name__ == "__main__":
    main()
