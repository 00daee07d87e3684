"""How many layers and heads the problem needs (Sections 5, 7 and 10.1): trained models beside what
attention by shared content allows, and how many heads replace a layer.

    python -m extras.studies.depth                    # draws the figure
    python -m extras.studies.depth out/depth_width/*  # the same, with these runs added to the rows

A row is that of sweep.py; of one layer and one step, how is what mechanism returns.
"""

import collections

import analyze
import sweep
import train
from ablate import record_reads
from data import command_line, progress
from extras.studies import RESULTS, markdown, rows_by, share
from extras.studies.rows import all_runs, knows, once, rounded
from extras.studies.theory import causal_depth

import torch
from matplotlib.figure import Figure


ROWS = RESULTS / "runs/depth_width.jsonl"
FIGURE = RESULTS / "figures/heads_places.png"
SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
FEWEST = 3  # a group of fewer runs stands in no table
SEEDS = 5  # nor one of fewer in the figure, but with distractors
ALL, SOME, NONE = "#2a9d8f", "#e9c46a", "white"  # how many runs solve it


# ---- many layers


def long_chains():
    """Return the runs with a mask that ask for five symbols or more of four chains."""
    wanted = dict(task="chain", targets="all", causal=True, init="", N=4, width=128).items()
    rows = [row for row in all_runs() if wanted <= vars(row["flags"]).items()]
    return once(row for row in rows if row["flags"].D >= 5)


def layers_table():
    """Return how many runs of long chains know each symbol at their end, by layers; bold where the
    flow of information has just become deep enough."""
    groups, lines = {}, []
    for row in long_chains():
        flags = row["flags"]
        groups.setdefault((flags.D, flags.layers, flags.heads, flags.steps), []).append(row)
    for (D, layers, heads, steps), rows in sorted(groups.items()):
        cells = []
        for k in range(1, D + 1):
            known = sum(knows(row, k) for row in rows)
            cells.append(f"**{known}**" if causal_depth(k) == layers else f"{known}")
        if len(rows) >= FEWEST:
            lines.append([D, f"{layers} x {heads}", f"{steps:,}", len(rows), ", ".join(cells)])
    return markdown(["D", "layers x heads", "steps", "runs", "know x_1, x_2, ..."], *lines)


# ---- one layer


def from_the_next(pattern, values):
    """Write what is written in the next sequence of the batch."""
    return (pattern @ values).roll(-1, 0)


@torch.no_grad()
def mechanism(run, n=512):
    """Return how a model of one layer answers x_1 of D = 1, measured on n sequences, a dict:

    full: the loss
    address: the heads with more than half of their attention, at queries, on the own 1a
    swap: if these write what they write in the next sequence, the errors of the answers [from the
        symbol where the next sequence has its own 1b, from their own], of the queries whose 1b
        stands elsewhere in the next sequence"""
    model, task, _ = train.load(run)
    batch, sequence = task.draw("circuits", n), torch.arange(n)[:, None]
    query, key, own = batch.places.unbind(2)  # (n, N) each
    next_own, reads = own.roll(-1, 0), record_reads(model, batch.inputs)

    def errors(heads, answers):
        return task.losses(model(batch.inputs, heads), batch._replace(answers=answers))[..., 0]

    address = [head for head in reads if reads[head][0][sequence, query, key].mean() > 0.5]
    how = dict(n=n, full=errors({}, batch.answers).mean().item())
    how["address"] = [f"H{head}" for _, head in address]
    if address:
        there, heads = batch.inputs[sequence, next_own], dict.fromkeys(address, from_the_next)
        both = errors(heads, there), errors(heads, batch.answers)
        how["swap"] = [error[own != next_own].mean().item() for error in both]
    return rounded(how)


def solves(row):
    """Return whether a run solves the last symbol, and was asked for it."""
    return row["losses"].get(f"x_{row['flags'].D}", 1) < SOLVED


def groups_of_one_layer():
    """Return {(places, N, heads, whether its weights are those of a run with fewer places): [row,
    ...]} of the runs of one layer and one step, with distractors those of 5,000 steps or more."""
    groups = collections.defaultdict(list)
    wanted = dict(layers=1, D=1, mlp=True, positions="appended", head_size=32).items()
    for row in all_runs():
        flags, places = row["flags"], row["places"]
        if row["group"] == "depth_width" and wanted <= vars(flags).items():
            groups[places, flags.N, flags.heads, bool(flags.init), flags.steps >= 5000].append(row)
    found = {}
    for (places, N, *kind, long), rows in groups.items():
        if (N == 2 and long) if places > N else len(rows) >= SEEDS:
            found[(places, N, *kind)] = rows
    return found


def draw_places(path=FIGURE):
    """Draw how many runs of one layer solve x_1: a mark for runs of as many heads and places."""
    groups = groups_of_one_layer()
    lines, numbers = sorted({group[:2] for group in groups}), sorted({group[2] for group in groups})
    figure = Figure(figsize=(8.2, 0.58 * len(lines) + 1.4), layout="constrained")
    axes = figure.subplots()

    # from scratch beside led; above, how many solve it
    for (places, N, heads, led), rows in groups.items():
        x, y = numbers.index(heads), lines.index((places, N))
        if (places, N, heads, not led) in groups:
            x += 0.2 if led else -0.2
        solved = [solves(row) for row in rows]
        color = ALL if all(solved) else SOME if any(solved) else NONE
        edge = analyze.INK if any(solved) else analyze.GRAY
        axes.plot(x, y - 0.1, "^" if led else "o", ms=12, mfc=color, mec=edge)
        text = share(solved).replace(" of ", "/")
        axes.text(x, y + 0.3, text, size=8, color="gray", ha="center", va="center")

    # right of the stairs there is a head for each place
    edges = [sum(heads < places for heads in numbers) - 0.5 for places, _ in lines]
    x = [edge for edge in edges for _ in range(2)]
    y = [line + half for line in range(len(lines)) for half in (-0.5, 0.5)]
    axes.plot(x, y, "--", color=analyze.RED, zorder=0)
    text = "right of the stairs: a head or more for each place"
    axes.text(-0.5, len(lines) - 1, text, color=analyze.RED, va="center")
    axes.hlines(y[1:-1:2], -0.6, len(numbers) - 0.4, analyze.PALE, zorder=-1)

    for color, name in (ALL, "all solve it"), (SOME, "some"), (NONE, "none"):
        axes.plot([], [], "o", mfc=color, mec=analyze.INK, ms=9, label=name)
    name = "in stages: from fewer places to more"
    axes.plot([], [], "^", mfc="white", mec=analyze.INK, ms=9, label=name)
    axes.set_yticks(range(len(lines)), [f"{places} (N = {N})" for places, N in lines])
    axes.set_xticks(range(len(numbers)), numbers)
    axes.set(xlabel="heads in the only layer", ylabel="places where the answer may stand")
    axes.set(xlim=(-0.6, len(numbers) - 0.4), ylim=(-0.6, len(lines) - 0.4))
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    title = "The more places, the more heads one layer needs to find x_1"
    figure.suptitle(title, x=0.01, ha="left", size=13, weight="bold")
    analyze.save_figure(figure, path)


if __name__ == "__main__":
    p = command_line("python -m extras.studies.depth", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="*", help="run directories to measure")
    found = rows_by(ROWS, "run")
    for run in progress("runs measured", p.parse_args().run):
        row = rounded(sweep.row_of(run))
        how = dict(how=mechanism(run)) if row["layers"] == row["D"] == 1 else {}
        found[row["run"]] = row | how
        train.write_file(ROWS, [*found.values()])
    draw_places()
    print(FIGURE)
