"""How many layers and heads the problem needs (Sections 5, 7 and 10.1): trained models beside what
attention by shared content allows, and how many heads replace a layer.

    python -m extras.studies.depth                    # prints the predictions, draws the figure
    python -m extras.studies.depth out/depth_width/*  # the same, with these runs added
"""

import collections
import functools
import itertools
import statistics
from pathlib import Path

import analyze
import train
from data import command_line, progress
from extras.moved import patterns_of
from extras.studies import RESULTS
from extras.studies.layers import compared
from extras.studies.rows import rounded

import torch
from matplotlib.figure import Figure


ROWS = RESULTS / "runs/depth_width.jsonl"
PREDICTED = RESULTS / "runs/controls_predicted.jsonl"
FIGURE = RESULTS / "figures/heads_places.png"
SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
SEEDS = 5  # a cell of the page has runs of so many seeds or more
PLACES, HEADS = (9, 11, 15, 23), (8, 16, 32)  # of a 1b, and in the one layer
MARKS = {"all": "#2a9d8f", "some": "#e9c46a", "none": "white"}  # how many runs solve it


# ---- the row of a run


def row_of(run):
    """Return the row of a finished run: what it was, its losses at the end, and how it reads."""
    flags, log = train.read_flags(run), train.read_log(run)
    task = train.task_of(flags)
    other = {"--no-mlp": not flags.mlp, "--positions rope": flags.positions == "rope"}
    other |= {f"--task {flags.task.rpartition(':')[2].lower()}": flags.task != "chain"}
    other |= {f"--head-size {flags.head_size}": flags.head_size != 32}
    names = "layers", "heads", "N", "D", "seed", "steps", "git", "hardware", "dtype"
    row = dict(run=run.name) | {name: getattr(flags, name) for name in names}
    row["other"] = " ".join(name for name in other if other[name])
    row["init"] = Path(flags.init).name
    row["ended"], row["threshold"] = log[-1]["step"], task.learned_below
    row |= {name: round(log[-1][name], 5) for name in task.target_names}
    row["learned"] = [step and round(step) for step in analyze.crossings(log, task).values()]

    # what x_D fell by in the last third of the steps that were taken: is the run decided?
    before = [step[f"x_{flags.D}"] for step in log if step["step"] <= log[-1]["step"] * 2 / 3]
    row["fell"] = round(before[-1] - row[f"x_{flags.D}"], 5)
    if flags.layers == flags.D == 1:
        row["how"] = mechanism(run)
    return row


def measure(folders):
    """Add the rows of these runs to the committed ones. A run that has a row, or has not ended, is
    left out."""
    rows = train.read_file(ROWS)
    names = {row["run"] for row in rows}
    ended = [run for run in folders if (run / "model.pt").exists() and run.name not in names]
    for run in progress("runs measured", ended):
        rows.append(row_of(run))
        train.write_file(ROWS, rows)


def by_place(pattern, values):
    """Attend as on the average over the sequences: a function of the places alone."""
    return pattern.mean(0) @ values


def mean_written(pattern, values):
    """Write what is written on the average over the sequences."""
    return (pattern @ values).mean(0).expand_as(values)


def from_the_next(pattern, values):
    """Write what is written in the next sequence of the batch."""
    return (pattern @ values).roll(-1, 0)


@torch.no_grad()
def mechanism(run, n=512):
    """Return how a model of one layer answers x_1 of D = 1, measured on n sequences, a dict:

    full: the loss; by_place: that of the queries whose own 1b stands at its first place, its
        second, ...
    address: the heads with more than half of their attention, at queries, on the own 1a
    place: the heads for whose pattern its mean over sequences may stand (the loss rises by less
        than SOLVED), but not the mean of what they write for what they write
    swap: if the address heads write what they write in the next sequence, the errors of the answers
        [from the symbol where the next sequence has its own 1b, from their own]; swap_rest: if all
        others do, [from the next sequence's symbol where the own 1b stands, from their own]; of the
        queries whose 1b stands elsewhere in the next sequence"""
    model, task, _ = train.load(run)
    batch, sequence = task.draw("circuits", n), torch.arange(n)[:, None]
    query, key, own = batch.places.unbind(2)  # (n, N) each

    def errors(heads=None, expected=batch.answers):
        return (model(batch.inputs, heads) - expected).square().mean(-1)  # (n, N)

    right = errors()
    full, used = right.mean().item(), torch.stack([right[own == k].mean() for k in own.unique()])
    how = dict(n=n, full=full, by_place=used.tolist(), address=[], place=[])

    # what each head does
    [patterns] = patterns_of(model, batch.inputs)
    names = {f"H{head}": (layer, head) for layer, head in model.heads}
    for name, (_, head) in names.items():
        if patterns[sequence, head, query, key].mean() > 0.5:
            how["address"].append(name)
        idle = errors({(0, head): mean_written}).mean() < full + SOLVED
        if not idle and errors({(0, head): by_place}).mean() < full + SOLVED:
            how["place"].append(name)

    # the swaps
    symbols = batch.inputs
    there, other = symbols[sequence, own.roll(-1, 0)], symbols.roll(-1, 0)[sequence, own]
    moved = own != own.roll(-1, 0)
    for name, expected in ("swap", there), ("swap_rest", other):
        swapped = {}
        for head in names:
            if (head in how["address"]) == (name == "swap"):
                swapped[names[head]] = from_the_next
        if how["address"]:
            both = errors(swapped, expected)[moved], errors(swapped)[moved]
            how[name] = [error.mean().item() for error in both]
    return rounded(how)


# ---- the committed rows


@functools.cache
def cells():
    """Return {(other flags, layers, N, heads, D, steps): [row, ...]} of the committed rows, sorted;
    "led" is among the flags of those that start from the weights of another run."""
    groups = collections.defaultdict(list)
    for row in sorted(train.read_file(ROWS), key=lambda row: row["seed"]):
        other = row["other"] + " led" * bool(row["init"])
        cell = other, row["layers"], row["N"], row["heads"], row["D"], row["steps"]
        groups[cell].append(row)
    return dict(sorted(groups.items()))


def one_layer():
    """Return the rows of one layer, D = 1 and no other flags, of cells with SEEDS runs or more."""
    found = []
    for (other, layers, _, _, D, _), rows in cells().items():
        found += rows if (other, layers, D) == ("", 1, 1) and len(rows) >= SEEDS else []
    return found


def wide():
    """Return the rows of one layer that have 2N heads or more."""
    return [row for row in one_layer() if row["heads"] >= 2 * row["N"]]


def rows_of(layers, heads, N, D, steps, places=None, led=False):
    """Return the rows of a cell without further flags; places: of a 1b among distractors."""
    other = f"--task random{places - 2 * N + 1}" if places else ""
    return cells().get((other + " led" * led, layers, N, heads, D, steps), [])


def at_random(places, heads=HEADS, led=(False, True), N=2):
    """Return the rows of one layer where a 1b stands at any of so many places: with these numbers
    of heads, from scratch with 10,000 steps, and led."""
    found = []
    for number, start in itertools.product(heads, led):
        found += rows_of(1, number, N, 1, 5000 if start else 10_000, places, start)
    return found


def median_of(rows):
    return statistics.median(row[f"x_{row['D']}"] for row in rows)


def solves(row):
    return row[f"x_{row['D']}"] < SOLVED


def solved_of(rows, form="{} of {}"):
    """Return "3 of 5": how many of these runs solve x_D."""
    return form.format(sum(map(solves, rows)), len(rows))


def moves_the_answer(row):
    """Return whether x_1 is answered from where another sequence has its pair, if address heads
    write what they write there; None of a model that does not solve x_1, or was not measured."""
    how = row.get("how")
    if not how or row["losses"]["x_1"] >= SOLVED:
        return None
    return bool(how["address"]) and how["swap"][0] < how["full"] + SOLVED


# ---- what was predicted


def median_of_prediction(row):
    """Return the median of the runs of a row of PREDICTED."""
    led = row["group"].startswith("led")
    steps = row.get("steps") or (5000 if led else 10_000)
    shape = row["layers"], row["heads"], row["N"], row["D"]
    return median_of(rows_of(*shape, steps, row["places"], led))


# ---- the figure


def draw_places(path=FIGURE):
    """Draw how many runs of one layer solve x_1: a mark for runs of as many heads and places."""
    groups = collections.defaultdict(list)  # {(places, N, heads, led): [row, ...]}
    sizes = {row["N"] for row in wide()}
    for row in one_layer():
        if row["N"] in sizes:
            groups[row["N"], row["N"], row["heads"], False].append(row)
    for places, led in itertools.product(PLACES, (False, True)):
        for row in at_random(places, led=[led]):
            groups[places, row["N"], row["heads"], led].append(row)
    lines, numbers = sorted({group[:2] for group in groups}), sorted({group[2] for group in groups})
    figure = Figure(figsize=(8.2, 0.58 * len(lines) + 1.4), layout="constrained")
    axes = figure.subplots()

    # from scratch beside led; above, how many solve it
    for (places, N, heads, led), rows in groups.items():
        x, y = numbers.index(heads), lines.index((places, N))
        if (places, N, heads, not led) in groups:
            x += 0.2 if led else -0.2
        share = sum(map(solves, rows)) / len(rows)
        color = MARKS["all"] if share == 1 else MARKS["some" if share else "none"]
        edge = analyze.INK if share else analyze.GRAY
        axes.plot(x, y - 0.1, "^" if led else "o", ms=12, mfc=color, mec=edge)
        text = solved_of(rows, "{}/{}")
        axes.text(x, y + 0.3, text, size=8, color="gray", ha="center", va="center")

    # right of the stairs there is a head for each place
    edges = [sum(heads < places for heads in numbers) - 0.5 for places, _ in lines]
    x = [edge for edge in edges for _ in range(2)]
    y = [line + half for line in range(len(lines)) for half in (-0.5, 0.5)]
    axes.plot(x, y, "--", color=analyze.RED, zorder=0)
    text = "right of the stairs: a head or more for each place"
    axes.text(-0.5, len(lines) - 2, text, color=analyze.RED, va="center")
    axes.hlines(y[1:-1:2], -0.6, len(numbers) - 0.4, analyze.PALE, zorder=-1)

    for name, color in MARKS.items():
        axes.plot([], [], "o", mfc=color, mec=analyze.INK, ms=9, label=f"{name} solve it")
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
    p.add_argument("run", type=Path, nargs="*", help="run directories to measure")
    measure(p.parse_args().run)
    print(compared(train.read_file(PREDICTED), median_of_prediction)[0])
    draw_places()
