"""How many layers and heads the problem needs (Sections 5, 7 and 10.1): trained models beside what
reading by content allows, how they read, and how many heads replace a layer.

    python -m extras.studies.depth                    # draws the figures, prints the big tables
    python -m extras.studies.depth out/depth_width/*  # the same, with these runs added
"""

import collections
import functools
import math
import statistics
from pathlib import Path

import analyze
import sweep
import train
from data import command_line, held_out, partial_losses, progress
from extras.studies import committed, load_rows, markdown, places, span, spread
from extras.studies.theory import causal_depth
from train import Flags

import torch
from matplotlib.figure import Figure


ROWS = Path("results/runs/depth_width.jsonl")
FIGURES = Path("results/figures")
SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
SERVED = 0.25  # the loss below which a slot is served; an unserved one has about 1


# ---- the row of a run


def row_of(run):
    """Return the row of a finished run: what it was, its losses at the end, and how it reads."""
    flags, log = train.read_flags(run), train.read_log(run)
    other = {"--no-mlp": not flags.mlp, "--rotary qk": flags.rotary == "qk"}
    other |= {f"--task {flags.task}": flags.task != "chain", "--init frozen": bool(flags.init)}
    other |= {f"--head-size {flags.head_size}": flags.head_size != 32}
    other |= {f"--steps {flags.steps}": flags.steps > 4000}
    other |= {"frozen": bool(getattr(flags, "circuit", ""))}
    names = "layers", "heads", "N", "D", "seed", "steps", "git", "hardware", "dtype"
    row = dict(run=run.name) | {name: getattr(flags, name) for name in names}
    row |= dict(other=" ".join(name for name in other if other[name]), ended=log[-1]["step"])
    row |= {name: round(log[-1][name], 5) for name in flags.target_names}
    row["threshold"] = flags.problem.learned_below

    # what x_D fell by in the last third of the steps that were taken: is the run decided?
    before = [step[f"x_{flags.D}"] for step in log if step["step"] <= log[-1]["step"] * 2 / 3]
    row["fell"] = round(before[-1] - row[f"x_{flags.D}"], 5)
    if flags.task in places.TASKS:
        return row
    beyond = [k for k in range(1, flags.D + 1) if needed(row["other"], k) > flags.layers]
    if any(knows(row, k) for k in beyond) or flags.layers == flags.D == 1:
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


@functools.cache
def needed(other, k):
    """Return the layers that x_k takes by content, with pairs read from step D to step 1, or, if
    steps are shuffled, in the best order."""
    return causal_depth(k)


def knows(row, k):
    """Return whether x_k was learned: its loss is below two thirds of the average's."""
    return row[f"x_{k}"] < row["threshold"]


def solves(row, k=None):
    return row[f"x_{k or row['D']}"] < SOLVED


# ---- how a model does it


def by_place(pattern, values):
    """Attend as on the average over the sequences: a function of the places alone."""
    return pattern.mean(0) @ values


def mean_written(pattern, values):
    """Write what is written on the average over the sequences."""
    return (pattern @ values).mean(0).expand_as(values)


def from_the_next(pattern, values):
    """Write what is written in the next sequence of the batch."""
    return (pattern @ values).roll(-1, 0)


def fixed_to(tokens):
    """Return a function that attends to these tokens as on the average over the sequences, and to
    all others as it is."""

    def attend(pattern, values):
        pattern = pattern.clone()
        pattern[:, :, tokens] = pattern[:, :, tokens].mean(0)
        return pattern @ values

    return attend


@torch.no_grad()
def mechanism(run, n=512):
    """Return what interventions on a trained model say, a dict; losses are those of x_1, ..., x_D
    on n sequences, heads have names like L0H3.

    place, mean: of each head, the losses if its pattern is its mean over sequences, or what it
    writes. reads: of each head, its mean attention from the queries to all tokens; own: to the own
    1a. by_slot: the loss of x_D of queries whose pair of step D stands in this slot.
    address: in one layer the heads with more than half of their attention on the own 1a, in more
    the heads of the last layer that are not by place. If there are any, two swaps: `swap`, in which
    these heads write what they write in the next sequence, should fetch the value of the slot where
    the next sequence has its pair; `swap_rest`, in which all other heads of the layer do, the next
    sequence's value at the own slot. Each has the mean squared errors [to this value, to the
    unswapped one] of the queries whose slot is another in the next sequence.
    fixed_values, fixed_keys, in one layer: the rise of the loss if the weights on all values, or on
    all keys, are their means over the sequences."""
    model, flags = train.load(run)
    batch, N, K = train.sequences(flags, held_out("circuits", n)), flags.N, flags.K

    def answers(heads=None):
        with train.precision(flags):
            return model(batch.inputs, heads).float()

    def losses(heads=None):
        found = partial_losses(answers(heads), batch.targets, K).mean(0)
        return [round(loss, 5) for loss in found.tolist()]

    # what each head does
    layers = range(flags.layers)
    heads = {f"L{layer}H{head}": (layer, head) for layer in layers for head in range(flags.heads)}
    how = dict(n=n, full=losses())
    how["place"] = {name: losses({head: by_place}) for name, head in heads.items()}
    how["mean"] = {name: losses({head: mean_written}) for name, head in heads.items()}

    # attention from the queries, and how much of it to the own 1a
    _, patterns = model(batch.inputs, return_patterns=True)
    query, key = batch.positions[:, :, 0], batch.positions[:, :, 1]  # (n, N)
    how |= dict(reads={}, own={})
    for name, (layer, head) in heads.items():
        rows = patterns[layer][torch.arange(n)[:, None], head, query]  # (n, N, T)
        how["reads"][name] = [round(x, 3) for x in rows.mean((0, 1)).tolist()]
        how["own"][name] = round(rows.gather(2, key[:, :, None]).mean().item(), 3)
    if flags.task != "chain":
        return how

    # the slots of the pairs of step D, which stand first, in the order of the queries
    order = query.argsort(1)
    slots = batch.positions[:, :, 2 * flags.D - 1].gather(1, order) // 2  # (n, N)
    values = batch.inputs[:, 1 : 2 * N : 2, :K]  # (n, N, K) by slot
    sequence, old = torch.arange(n)[:, None], batch.targets[..., -K:]

    def errors(expected, changed=()):
        """Return the errors (n, N) of x_D if these heads write for the next sequence."""
        found = answers({heads[name]: from_the_next for name in changed})
        return (found[..., -K:] - expected).square().mean(-1)

    right = errors(old)
    how["by_slot"] = [round(right[slots == slot].mean().item(), 4) for slot in range(N)]
    last = [name for name, (layer, _) in heads.items() if layer == flags.layers - 1]
    if flags.layers == 1:
        address = [name for name in last if how["own"][name] > 0.5]
    else:
        address = [name for name in last if kind_of(how, name) == "content"]
    rest = [name for name in last if name not in address]
    how["address"] = address
    there, value = values[sequence, slots.roll(-1, 0)], values.roll(-1, 0)[sequence, slots]
    for name, changed, new in ("swap", address, there), ("swap_rest", rest, value):
        means = [errors(x, changed)[slots != slots.roll(-1, 0)].mean().item() for x in (new, old)]
        how |= {name: [round(mean, 4) for mean in means]} if address else {}

    if flags.layers == 1:
        for name, first in ("fixed_keys", 0), ("fixed_values", 1):
            fixed = losses(dict.fromkeys(heads.values(), fixed_to(slice(first, 2 * N, 2))))
            how[name] = round(fixed[-1] - how["full"][-1], 5)
    return how


def kind_of(how, name):
    """Return what a head does for x_D: "idle" if its mean may stand for what it writes, "place" if
    its mean pattern may stand for its pattern, "content" if not."""
    if how["mean"][name][-1] < how["full"][-1] + SOLVED:
        return "idle"
    return "place" if how["place"][name][-1] < how["full"][-1] + SOLVED else "content"


# ---- the committed rows


@functools.cache
def cells():
    """Return {(other flags, layers, N, heads, D): [row, ...]} of the committed rows, sorted."""
    groups, names = collections.defaultdict(list), ("other", "layers", "N", "heads", "D")
    for row in sorted(train.read_file(ROWS), key=lambda row: row["seed"]):
        groups[tuple(row[name] for name in names)].append(row)
    return {cell: groups[cell] for cell in sorted(groups) if cell[0] != "frozen"}


def plain_rows():
    """Return the rows of the recipe, of each shape and seed the longest run."""
    longest = {}
    for (other, *shape), group in cells().items():
        for row in group if other.split(" ")[0] in ("", "--steps") else ():
            key = *shape, row["seed"]
            longest[key] = max(row, longest.get(key, row), key=lambda row: row["steps"])
    return [*longest.values()]


def one_layer_rows():
    """Return the rows of one layer, one step and the recipe."""
    found = []
    for (other, layers, *_, D), group in cells().items():
        if layers == D == 1 and not other:
            found += group
    return found


def losses_text(group, k):
    """Return the median and the range of the losses of x_k."""
    return spread([row[f"x_{k}"] for row in group], "{:.3f}")


# ---- the tables of the page


def wide_rows():
    """Return the rows of one layer with 2N heads or more."""
    return [row for row in one_layer_rows() if row["heads"] >= 2 * row["N"]]


def far_rows(layers):
    """Return the rows of so many layers where pairs stand anywhere among 20 distractors."""
    kind = "--task random20", layers
    return [row for cell, rows in cells().items() if cell[:2] == kind for row in rows]


def solved_of(rows):
    """Return "3 of 5": how many of these runs solve x_D."""
    return f"{sum(map(solves, rows))} of {len(rows)}"


def print_answer(out):
    """Print how many models solve x_1 with many heads, larger k, and where places say nothing."""
    groups, wide = cells(), wide_rows()
    chains = ", ".join(str(N) for N in sorted({row["N"] for row in wide}))
    no_mlp = solved_of(groups["--no-mlp", 1, 4, 8, 1])
    rope = solved_of(groups["--rotary qk", 1, 4, 8, 1] + groups["--rotary qk", 1, 4, 16, 1])
    x_3 = [row for row in plain_rows() if (row["layers"], row["D"]) == (2, 3)]
    few = solved_of([row for row in x_3 if row["N"] < 4])
    four = solved_of([row for row in x_3 if row["N"] == 4])
    short, long = (solved_of(groups[steps, 1, 2, 16, 2]) for steps in ("", "--steps 10000"))
    out(f"""\
One layer solves D = 1 in {solved_of(wide)} runs with 2N heads or more of 32 numbers (N = {chains}),
but without MLPs in {no_mlp} and with RoPE in {rope} (N = 4). Two layers solve x_3 in {few} runs
with N = 2 or 3, but with N = 4 in {four}; one layer of 16 heads (N = 2) solves x_2 in {long} runs
of 10000 steps, {short} of 3000. With the pairs anywhere among 20 distractors (N = 2, 4),
one layer solves D = 1 in {solved_of(far_rows(1))} runs, two do in {solved_of(far_rows(2))}.""")


def heads_table():
    """Return how many models solved a symbol that takes a layer more by content, by their heads."""
    shapes = (1, 1, 2), (1, 1, 4), (1, 1, 8), (2, 1, 2), (2, 2, 4), (3, 2, 2), (3, 2, 4), (4, 3, 4)
    lines, plain = [], plain_rows()
    for k, layers, N in shapes:
        rows = [row for row in plain if (row["D"], row["layers"], row["N"]) == (k, layers, N)]
        line = [k, causal_depth(k), layers, N]
        for low, high in (1, N), (N + 1, 2 * N - 1), (2 * N, 2 * N), (2 * N + 1, math.inf):
            group = [solves(row, k) for row in rows if low <= row["heads"] <= high]
            line.append(f"{sum(group)} of {len(group)}" if group else "")
        lines.append(line)
    heads = "N heads or fewer", "N + 1 to 2N - 1", "2N", "more"
    return markdown(("D", "layers by content", "layers", "N", *heads), *lines)


def places_table():
    """Return what was learned where places say nothing, and at fixed places."""
    cases = collections.defaultdict(dict)
    for (other, layers, N, heads, _), group in cells().items():
        task = other.removeprefix("--task ")
        if task in places.TASKS:
            kind, number = "fixed", N
            if "random" in task:
                kind, number = "random", int(task[6:]) + 2 * N - 1
            cases[N, layers, number, kind][heads] = f"{solved_of(group)}: {losses_text(group, 1)}"
    lines = [(*case, cases[case].get(8, ""), cases[case].get(16, "")) for case in sorted(cases)]
    head = "N", "layers", "places of a 1b", "", "8 heads: solve D = 1, loss", "16 heads"
    return markdown(head, *lines)


def further_table():
    """Return the median losses of models of more steps than layers, with 2N heads or more, of
    shapes that were trained more than once."""
    groups, lines = collections.defaultdict(list), []
    for row in plain_rows():
        if row["heads"] >= 2 * row["N"] and row["layers"] < row["D"]:
            groups[row["N"], row["layers"], row["heads"], row["D"]].append(row)
    for (N, layers, heads, D), group in sorted(groups.items()):
        if len(group) == 1:
            continue
        medians = [statistics.median(row[f"x_{k}"] for row in group) for k in range(1, D + 1)]
        losses = [f"{loss:.3f}" for loss in medians] + [""] * (7 - D)
        steps = span([row["steps"] for row in group], "{}")
        lines.append((N, D, layers, heads, steps, solved_of(group), *losses))
    head = "N", "D", "layers", "heads", "training steps", "solve x_D"
    return markdown((*head, *(f"x_{k}" for k in range(1, 8))), *lines)


def print_held(out):
    """Print what three layers learned while one head of each was held on the minimal circuit, once
    freed, and from the start."""
    groups = collections.defaultdict(list)
    for row in train.read_file(ROWS):
        if (row["layers"], row["heads"], row["N"], row["D"]) == (3, 4, 4, 4):
            groups[row["other"]].append(row)
    held, freed = [row["x_4"] for row in groups["frozen"]], groups["--init frozen"]
    start = [row for row in plain_rows() if row in groups[""] + groups["--steps 4500"]]
    best = min(row["x_4"] for row in start)
    out("Training may miss what a shape can do. Three layers of four heads (N = 4) learn x_4 to")
    out(f"{span(held)} while one head per layer is held on a circuit (n = {len(held)});")
    out(f"freed, {solved_of(freed)} solve it, in 3300 steps in all. Without this help")
    out(f"{solved_of(start)} do, in 2500 or 4500 steps (best {best:.3f}).")


def print_heads(out):
    """Print how many models of one layer read by an address and the values of all places."""
    for name, times, more in ("N + 1", 1, 1), ("2N", 2, 0):
        rows = [row for row in one_layer_rows() if row["heads"] == times * row["N"] + more]
        both = sum(map(has_address_and_values, rows))
        out(f"With {name} heads {solved_of(rows)} models of one layer solve D = 1,")
        out(f"{both} of them with an address head and N place heads or more.")


def has_address_and_values(row):
    """Return whether a model solves x_1 with an address head and a place head for each slot."""
    return solves(row) and bool(row["how"]["address"]) and count(row["how"], "place") >= row["N"]


def count(how, kind, layer=0):
    """Return how many heads of a layer are of a kind."""
    names = [name for name in how["reads"] if name.startswith(f"L{layer}H")]
    return sum(kind_of(how, name) == kind for name in names)


def print_swaps(out):
    """Print what becomes of the answers when the address heads, or all others, write what they
    write in another sequence."""
    one = [row["how"] for row in one_layer_rows() if "swap" in row["how"]]
    two = [row["how"] for row in plain_rows() if row["layers"] > 1 and solves(row) and "how" in row]
    two = [how for how in two if "swap" in how]
    lines, deeper = [], []
    for name, heads in ("swap", "they swapped"), ("swap_rest", "all others swapped"):
        new = span([round(how[name][0] - how["full"][-1], 2) + 0 for how in one])  # no -0
        lines.append((heads, new, span([how[name][1] for how in one])))
        deeper.append(sum(how[name][0] - how["full"][-1] < SERVED for how in two))
    of = f"{len(one)} of {len(one_layer_rows())} models of one layer have an address head"
    out(markdown((of, "expected value: added loss", "own value: loss"), *lines))
    out("\nIn the last layer of deeper models the swaps bring the expected value (added loss below")
    out(f"{SERVED}) in {deeper[0]} and {deeper[1]} of {len(two)}.")


# ---- what the page prints of the laws and of the sweep


def print_sweep(out):
    """Print what the runs of our sweeps learned with implicit curriculum, beside content."""
    steps, beyond = collections.Counter(), 0
    for row in sweep.section_7(load_rows(committed("*"))):
        symbols, learned = range(1, row["D"] + 1), Flags(**row).problem.learned_below
        if row["ic"]:
            steps[row["steps"]] += row["layers"] < causal_depth(row["D"])
            more = [k for k in symbols if causal_depth(k) > row["layers"]]
            beyond += any(row[f"x_{k}"] < learned for k in more)
    runs = ", ".join(f"{count} runs at {number}" for number, count in sorted(steps.items()))
    out(f"- In Figure 4's shape (N = 4, D = 5, eight heads of 16 numbers) {beyond} of our runs")
    out(f"  with too few layers for x_D ({runs} steps) learned more than content allows.")


# ---- the tables of the command


def diagram_table():
    """Return the table of all cells: the median and the range of the last losses of x_D. A star:
    some loss above SOLVED still fell by as much in the last third of its steps."""
    lines, columns = collections.defaultdict(dict), set()
    for (other, layers, N, heads, D), group in cells().items():
        falls = [row["fell"] > SOLVED < row[f"x_{D}"] for row in group]
        text = losses_text(group, D) + "*" * any(falls) + f", n = {len(group)}"
        lines[other, layers, N, D][heads] = text
        columns.add(heads)
    columns = sorted(columns)
    head = ["layers", "N", "loss of", "other flags", *(f"{heads} heads" for heads in columns)]
    table = []
    for (other, layers, N, D), line in lines.items():
        flags = f"`{other}`" * bool(other)
        table.append((layers, N, f"x_{D}", flags, *(line.get(heads, "") for heads in columns)))
    return markdown(head, *table)


# ---- figures


def draw_stair(path=FIGURES / "stair.png"):
    """Draw the loss of x_1 in each slot of the own pair, a row for each model of one layer."""
    figure = Figure(figsize=(7.4, 5), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, N in zip(panels, (4, 8), strict=True):
        rows = [row for row in one_layer_rows() if row["N"] == N]
        rows.sort(key=lambda row: (row["heads"], row["x_1"]))
        heads = [row["heads"] for row in rows]
        losses = [sorted(row["how"]["by_slot"]) for row in rows]
        image = panel.imshow(losses, aspect="auto", cmap="Blues_r", vmin=0, vmax=1)
        ticks = {}
        for number in sorted(set(heads)):
            first, seeds = heads.index(number), heads.count(number)
            panel.axhline(first - 0.5, color="white", lw=2)
            ticks[f"{number} head{'s' * (number > 1)}"] = first + (seeds - 1) / 2
        panel.set_yticks([*ticks.values()], [*ticks])
        panel.set_xticks(range(N), range(1, N + 1))
        panel.set_xlabel("slot of the own pair, the best first")
        panel.set_title(f"N = {N} chains, n = {len(rows)} models", fontsize="medium")
        panel.tick_params(length=0)
    figure.suptitle("One layer, a row per model: more heads serve more slots", fontsize="medium")
    figure.colorbar(image, ax=panels, label="loss of $x_1$ (1: knows nothing)", shrink=0.8)
    analyze.save_figure(figure, path)


if __name__ == "__main__":
    p = command_line("python -m extras.studies.depth", __doc__)
    p.add_argument("run", type=Path, nargs="*", help="run directories to measure")
    measure(p.parse_args().run)
    print(diagram_table())
    draw_stair()
