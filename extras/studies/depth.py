"""How many layers and heads the problem needs (Sections 5, 7 and 10.1): trained models beside what
attention by shared content allows, and how many heads replace a layer.

    python -m extras.studies.depth                    # prints the table, draws the figure
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
from extras.studies import RESULTS, markdown, share, span
from extras.studies.layers import compared, exceeds_the_flow
from extras.studies.rows import committed, rounded
from extras.studies.theory import causal_depth

import torch
from matplotlib.figure import Figure


ROWS = RESULTS / "runs/depth_width.jsonl"
PREDICTED = RESULTS / "runs/controls_predicted.jsonl"
FIGURE = RESULTS / "figures/heads_places.png"
SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
SEEDS = 5  # a cell of the page has runs of so many seeds or more
PLACES, HEADS = (9, 11, 15, 23), (8, 16, 32)  # of a 1b, and in the one layer
EQUAL = [  # places or None, N, D, steps, two shapes (layers, heads) with as many parameters
    (None, 4, 1, 4000, (1, 16), (2, 4)),
    (15, 2, 1, 10_000, (1, 16), (2, 4)),
    (None, 4, 2, 2500, (2, 16), (3, 8)),
    (None, 4, 3, 12_000, (2, 16), (3, 8)),
]
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
    _, [patterns] = model(batch.inputs, return_patterns=True)
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


def beyond_the_flow():
    """Return [whether a model exceeds the flow, ...] of those that could show it, without other
    flags and from fresh weights."""
    runs = []
    for (other, layers, *_), rows in cells().items():
        for row in rows if other == "" else []:
            known = {k for k in range(1, row["D"] + 1) if row[f"x_{k}"] < row["threshold"]}
            runs.append((layers, row["D"], known))
    for row in committed("mask/*"):
        if row["flags"].causal:
            known = {int(name[2:]) for name in row["known"]}
            runs.append((row["flags"].layers, row["flags"].D, known))
    answers = [exceeds_the_flow(known, layers, D) for layers, D, known in runs]
    return [answer for answer in answers if answer is not None]


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


def far():
    """Return the rows of one layer and 23 places, those of 4,000 steps too."""
    return at_random(23) + rows_of(1, 8, 2, 1, 4000, 23) + rows_of(1, 16, 2, 1, 4000, 23)


def losses_of(rows):
    return [row[f"x_{row['D']}"] for row in rows]


def median_of(rows):
    return statistics.median(losses_of(rows))


def solves(row):
    return row[f"x_{row['D']}"] < SOLVED


def solved_of(rows, form="{} of {}"):
    """Return "3 of 5": how many of these runs solve x_D."""
    return form.format(sum(map(solves, rows)), len(rows))


# ---- what stands on the page


def heads_table():
    """Return which models solve x_2 or a later symbol in fewer layers than it takes by content, by
    their heads: of SEEDS runs or more, some with more than N heads, those of most steps. x_1 is in
    the figure."""
    lines, longest = collections.defaultdict(dict), {}
    for (other, layers, N, heads, D, steps), rows in cells().items():
        if not other and len(rows) >= SEEDS and layers < causal_depth(D) and D > 1:
            lines[D, layers, N, steps][heads] = solved_of(rows, "{}/{}")
    for (k, layers, N, steps), solved in sorted(lines.items()):
        if max(solved) > N:
            longest[k, layers, N] = steps, solved
    table = []
    for (k, layers, N), (steps, solved) in longest.items():
        parts = []
        for text, group in itertools.groupby(solved, solved.get):
            parts.append(f"{', '.join(map(str, group))}: {text}")
        table.append([k, f"{layers} ({causal_depth(k)})", N, f"{steps:,}", "; ".join(parts)])
    head = "k", "layers (by content)", "chains", "steps", "heads: runs that solve x_k"
    return markdown(head, *table)


def without():
    """Return the rows of one layer of four chains with 8 heads and no MLPs, and those of 16 heads
    with RoPE."""
    return cells()["--no-mlp", 1, 4, 8, 1, 4000], cells()["--positions rope", 1, 4, 16, 1, 4000]


def led_to_x2():
    """Return the rows of one layer of 16 heads that is asked for x_2, of two, three and four
    chains; the last two start from the weights of fewer chains."""
    three, four = (rows_of(1, 16, N, 2, 5000, led=True) for N in (3, 4))
    return rows_of(1, 16, 2, 2, 10_000), three, four


def at_15(led):
    """Return the rows of one layer of 16 and 32 heads at 15 places, of two chains and of four."""
    return at_random(15, (16, 32), [led]) + at_random(15, [16], [led], 4)


def two_layers_far():
    return rows_of(2, 8, 2, 1, 4000, 23) + rows_of(2, 16, 2, 1, 4000, 23)


def page():
    """Return what stands in the text of the page on heads."""
    beyond, three, four = led_to_x2()
    no_mlp, rope = without()
    wide_far = at_random(23, [32])
    staged = [row for row in wide_far if row["init"]]
    narrow = [row for row in far() if row["heads"] < 23]
    deep = two_layers_far()
    losses = "{:.2f}, {:.2f} and {:.2f}".format(*map(median_of, (beyond, three, four)))
    inside, near = compared(train.read_file(PREDICTED), median_of_prediction)[1:]
    return [
        f"or of fewer chains, many did ({share(beyond_the_flow())})",
        f"two-layer task ({solved_of(wide())} runs)",
        f"x_2, which the paper's bound of log3(2k) layers excludes ({solved_of(beyond)})",
        f"if trained on fewer places first ({solved_of(at_15(True))} runs), but rarely from "
        f"scratch ({solved_of(at_15(False))})",
        f"At 23 places 32 heads failed ({solved_of(wide_far)})",
        f"trained in stages came down to {span(losses_of(staged))} and were still falling",
        f"fewer heads than places failed too ({solved_of(narrow)})",
        f"Two layers of 8 or 16 heads succeed in no more steps ({solved_of(deep)})",
        f"x_2 of {losses}, where knowing nothing costs 0.50, 0.67 and 0.75",
        f"solves x_1 in no run ({solved_of(no_mlp)})",
        f"one of 16 heads with RoPE ({solved_of(rope)}), which ends at {median_of(rope):.2f} after "
        "4,000 steps and still falls",
        *swaps(),
        equal_parameters(),
        f"heads {share(inside)} lie inside, where one guess for all would get {sum(near)}",
    ]


def swaps():
    """Return how many models of one layer that solve x_1 read as a table does, and by how much the
    loss rises when address heads point to where another sequence has its pair."""
    solved = [row["how"] for row in one_layer() if solves(row)]
    both = [how for how in solved if how["address"] and len(how["place"]) >= len(how["by_place"])]
    rises = [how["swap"][0] - how["full"] for how in both]
    return [
        f"a place head for each place ({len(both)} of {len(solved)})",
        f"the loss rises by at most {max(rises):.2f}",
    ]


def equal_parameters():
    """Return, of shapes with as many parameters, which solve x_D: few layers of many heads, and
    more layers of fewer heads."""
    texts = []
    for places, N, D, steps, *shapes in EQUAL:
        rows = [rows_of(layers, heads, N, D, steps, places) for layers, heads in shapes]
        few, more = (solved_of(group, "{}/{}") for group in rows)
        where = f"x_{D} at {places} places" if places else f"x_{D}"
        texts.append(f"{where} by {few} and {more}")
    return f"{', '.join(texts[:-1])}, and {texts[-1]}"


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
    axes.plot(x, y, "--", color=analyze.CIRCUIT, zorder=0)
    text = "right of the stairs: a head or more for each place"
    axes.text(-0.5, len(lines) - 2, text, color=analyze.CIRCUIT, va="center")
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
    print(heads_table(), compared(train.read_file(PREDICTED), median_of_prediction)[0], sep="\n\n")
    draw_places()
