"""How much attention grows beneath the plateau of x_1, from committed measurements.

    python -m extras.studies.plateau    # prints the table, draws results/figures/growth.png

results/figures/growth.jsonl has a row for each of 40 small runs that ask for x_1 alone (4 layers of
4 heads, width 64, D=1, N=4): setting, qk_std (of the first W_Q and W_K), seed, plateau (the step at
which a third of the loss there is gone) and, for every tenth step, steps, loss (of x_1 on 256
held-out sequences) and excess: how much more a query attends to 1b of its own chain than to that of
another, in the head where this is largest at the end. The script that trained and measured them is
extras/studies/waiting.py of commit 409940f.
"""

import analyze
import train
from data import command_line, program
from extras import studies
from extras.studies.rows import RESULTS

import matplotlib.pyplot as plt


LEVEL = 0.75  # the plateau: the average of four candidates
FLOOR = 1e-4  # half of the 95% interval of an excess over 256 sequences


def load_growth():
    """Return {(setting, qk_std): [row, ...]}."""
    rows = train.read_file(RESULTS / "figures/growth.jsonl")
    groups = {}
    for row in rows:
        groups.setdefault((row["setting"], row["qk_std"]), []).append(row)
    return groups


def inside(row, band):
    """Return the numbers of the checkpoints at which the loss lies within this share of the
    plateau."""
    return [n for n, loss in enumerate(row["loss"]) if abs(loss / LEVEL - 1) <= band]


def growth(row, band):
    """Return (steps, factor): how many steps the loss of a run lies within this share of the
    plateau, and by what factor the excess grows in them; (0, 1) if no step does."""
    within = inside(row, band) or [0]
    enters, leaves = (max(row["excess"][n], FLOOR) for n in (within[0], within[-1]))
    return row["steps"][within[-1]] - row["steps"][within[0]], leaves / enters


def table():
    """Return a row per setting, with medians and ranges over seeds."""
    lines = []
    for (setting, std), rows in load_growth().items():
        columns = [[growth(row, 0.1)[0] for row in rows]]
        columns += [[growth(row, band)[1] for row in rows] for band in (0.05, 0.1, 0.15)]
        lines.append([setting, std, *map(studies.spread, columns)])
    growths = [f"growth within {band}%" for band in (5, 10, 15)]
    return studies.markdown(["", "first std", "steps within 10%", *growths], *lines)


def draw(file):
    """Draw the loss of x_1 and, below, the excess on a log axis, a line for each run."""
    groups = load_growth()
    settings = [*dict.fromkeys(setting for setting, _ in groups)]
    size = dict(figsize=(8.5, 5), sharex="col", sharey="row", layout="constrained")
    figure, axes = plt.subplots(2, len(settings), **size)
    for (above, below), setting in zip(axes.T, settings, strict=True):
        for std, color in (0.02, "tab:blue"), (0.1, "tab:orange"):
            rows, style = groups[setting, std], dict(color=color, lw=0.9, alpha=0.8)
            for row in rows:
                excess = [max(x, FLOOR) for x in row["excess"]]
                above.plot(row["steps"], row["loss"], **style)
                below.plot(row["steps"], excess, **style)
                dots = [(row["steps"][n], excess[n]) for n in inside(row, 0.1)]
                below.scatter(*zip(*dots, strict=True), s=5, color="black", zorder=3)
            label = f"first $W_Q$, $W_K$ of std {std}: {len(rows)} seeds"
            above.plot([], [], color=color, label=label)
        label = f"the loss is within 10% of {LEVEL}, the average of the candidates"
        above.axhspan(0.9 * LEVEL, 1.1 * LEVEL, color="0.9", zorder=0, label=label)
        above.scatter([], [], s=5, color="black", label="the excess at these steps")
        above.set_title(setting, fontsize="medium")
        below.set(yscale="log", xlabel="training step")
    axes[0, 0].set(ylabel="MSE of $x_1$", ylim=(0, 1.1))
    axes[1, 0].set_ylabel(f"excess attention to own 1b\n(smaller than {FLOOR:g}: drawn there)")
    legend = dict(loc="outside lower center", ncols=2, fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), **legend)
    figure.suptitle("The loss of $x_1$, and the attention that it needs (n = 256 sequences)")
    analyze.save_figure(figure, file)


if __name__ == "__main__":
    with program("python -m extras.studies.plateau"):
        command_line("python -m extras.studies.plateau", __doc__).parse_args()
        print(table())
        draw(RESULTS / "figures/growth.png")
