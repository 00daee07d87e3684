"""Why some models need fewer layers than reading by content takes (Section 5): does a head find
where the next pair stands, and does it pass on this place, or a symbol?

    python -m extras.studies.addresses results/A results/main --out results/figures

A unit is a head and the role of its readers. addresses.png shows the first of these runs, and
addresses.jsonl has a row for each, measured on 512 fresh sequences:

    full: {symbol: loss}; threshold: below it the model knows a symbol
    units: how many; own: those that need their own attention pattern; mean: {symbol: loss} if all
        others have the mean of theirs over the sequences, by which none rises by SOLVED
    swaps: {role: of its finder}, of q and kb: the units of this role in own, of the first layer
        that has any. pattern, written: it attends, or writes, as in the next sequence: {each known
        x_j after x_k: [error from the own x_j, from that of the chain whose next pair stands where
        the next sequence has it]}, of the n queries for which this is another place
    exchange: the q units that are not in own read the value of the next chain's last token in place
        of the own: [error from the own x_D, from that of the next chain]
"""

import functools
import itertools
import statistics
from pathlib import Path

import ablate
import analyze
import train
from data import command_line, progress
from extras.studies import RESULTS, markdown, rows_by, span
from extras.studies.depth import SOLVED, from_the_next
from extras.studies.rows import all_runs, knows, load, name_of, rounded

import torch
from matplotlib.figure import Figure


ENOUGH = 30  # of fewer queries places_table() says nothing
FILE = "addresses.jsonl"


# ---- what a unit writes otherwise; mask (n, T, 1): True at its readers


def mean_pattern(pattern, values, mask):
    """What it writes by its mean pattern over the sequences with such a reader at that place."""
    return ((pattern * mask).sum(0) / mask.sum(0).clamp(min=1)) @ values


SWAPS = {
    "pattern": lambda pattern, values, mask: pattern.roll(-1, 0) @ values,
    "written": lambda pattern, values, mask: from_the_next(pattern, values),
}


def write_otherwise(pattern, values, write, masks):
    """The f of a head of which the units with these masks write otherwise."""
    written = pattern @ values
    for mask in masks:
        written = torch.where(mask, write(pattern, values, mask), written)
    return written


# ---- the row of a run


def answers_there(task, batch, role):
    """Return the answers (n, N, targets * K) to expect from x_{k+1} on if kb, or q (k = 0), looks
    for its next pair where the next sequence has it: those of the chain whose pair is there; and
    the queries (n, N) for which this is another chain."""
    k, roles = task.roles[role], [*task.roles]
    reader, pair = roles.index(role), roles.index(f"{k + 1}b")
    here, there = batch.places, batch.places.roll(-1, 0)  # (n, N, roles)

    # the chain there whose reader stands at this place; where it has its pair; whose pair is here
    same = here[:, :, None, reader] == there[:, None, :, reader]  # (n, N, N)
    place = (same * there[:, None, :, pair]).sum(-1)  # (n, N)
    chain = here[:, None, :, pair] == place[:, :, None]  # (n, N, N)
    moved = same.any(-1) & chain.any(-1) & (place != here[:, :, pair])
    other = batch.answers[torch.arange(len(here))[:, None], chain.int().argmax(-1)]
    return other, moved


@torch.no_grad()
def measure(model, task, n=512):
    """Return what the row of a model says of it."""
    batch, roles, masks = task.draw("circuits", n), [*task.roles], {}
    for role, places in zip(roles, batch.places.unbind(2), strict=True):
        masks[role] = torch.zeros(n, task.T).scatter(1, places, 1)[:, :, None] > 0
    last = max(layer for layer, _ in model.heads)
    units = [(*head, role) for head in model.heads for role in roles]
    units = [unit for unit in units if unit[0] < last or unit[2] == "q"]

    def losses(some=(), write=None, answers=batch.answers):
        """Return the losses (n, N, targets) if some units write otherwise."""
        heads = {}
        for layer, head, role in some:
            heads.setdefault((layer, head), []).append(masks[role])
        heads = {h: functools.partial(write_otherwise, write=write, masks=heads[h]) for h in heads}
        return task.losses(model(batch.inputs, heads=heads), batch._replace(answers=answers))

    # which units need their own pattern: first come those whose mean pattern costs most
    full = losses().mean((0, 1))  # (targets,)
    known = [i for i, loss in enumerate(full) if loss < task.learned_below]

    def rise(some):
        return (losses(some, mean_pattern).mean((0, 1)) - full).max().item()

    ranked = sorted(units, key=lambda unit: rise([unit]), reverse=True)
    own = sorted(units)
    for unit in reversed(ranked):
        if rise({*units} - {*own} | {unit}) < SOLVED:
            own.remove(unit)
    rest = [unit for unit in units if unit not in own]
    how = dict(full=ablate.symbol_means(losses(), task), threshold=task.learned_below)
    how |= dict(units=len(units), own=["L{}H{} {}".format(*unit) for unit in own], swaps={})
    how["mean"] = ablate.symbol_means(losses(rest, mean_pattern), task)

    # the swaps
    for role in ["q", *(f"{k}b" for k in range(1, task.D))]:
        of_role = [unit for unit in own if unit[2] == role]  # sorted by layers
        finder = [unit for unit in of_role if unit[0] == of_role[0][0]]
        after = [i for i in known if task.targets[i] > task.roles[role]]
        if finder and after:
            answers, moved = answers_there(task, batch, role)
            swap = dict(heads=["L{}H{}".format(*unit) for unit in finder], n=moved.sum().item())
            for name, write in SWAPS.items():
                both = losses(finder, write), losses(finder, write, answers)
                errors = torch.stack([error[moved].mean(0) for error in both], 1)  # (targets, 2)
                swap[name] = {task.target_names[i]: errors[i].tolist() for i in after}
            how["swaps"][role] = swap

    # the exchange: at the last token of a chain is the value from that of the next chain
    ends = batch.places[..., roles.index(f"{task.D}b")]  # (n, N)
    source = torch.arange(task.T).repeat(n, 1).scatter(1, ends, ends.roll(-1, 1))  # (n, T)
    sequence, copies = torch.arange(n)[:, None], [unit for unit in rest if unit[2] == "q"]

    def exchange(pattern, values, mask):
        return pattern @ values[sequence, source]

    if known and task.targets[known[-1]] == task.D:
        both = losses(copies, exchange), losses(copies, exchange, batch.answers.roll(-1, 1))
        how["exchange"] = [error[..., -1].mean().item() for error in both]
    return how


def why_not(row):
    """Return why a run cannot be measured, or nothing."""
    flags, task = row["flags"], row["task"]
    if not row["folder"] or not (row["folder"] / "model.pt").exists():
        return "it has no weights"
    if any(task.roles.get(f"{k}b") != k for k in range(1, task.D + 1)) or task.N == 1:
        return "its task has no chains of pairs"
    return "it has no head to spare" if flags.layers * flags.heads == 1 else ""


def write(rows, out):
    """Measure runs into FILE, among the rows of others; draw the first whose queries have a finder;
    return a table of these runs."""
    kept, lines, figure = rows_by(out / FILE, "run"), [], None
    for row in progress("runs measured", rows):
        if reason := why_not(row):
            lines.append([name_of(row), reason] + [""] * (len(HEAD) - 2))
            continue
        model, task, flags = train.load(row["folder"])
        how = dict(run=name_of(row), layers=flags.layers, heads=flags.heads, N=task.N, D=task.D)
        how |= rounded(measure(model, task))
        kept[how["run"]] = how
        train.write_file(out / FILE, [kept[run] for run in sorted(kept)])
        lines.append(line_of(how))
        if figure is None and "q" in how["swaps"]:
            figure = draw(how, task, flags)
            analyze.save_figure(figure, out / "addresses.png")
    return markdown(HEAD, *lines)


# ---- what is printed

HEAD = [
    *("run", "layers x heads, N, D", "losses", "own pattern", "losses then", "finder: passes on"),
    *("its pattern of another sequence: error from own, there", "what it wrote there", "n"),
    "values exchanged: error from own, other",
]


def mean_errors(errors):
    """Return [from the own symbol, from the one there], means over symbols."""
    return [statistics.fmean(each) for each in zip(*errors.values(), strict=True)]


def passes_on(swap, row):
    """Return what a finder passes on: a place if the answer follows what it writes in another
    sequence, a symbol if it follows its pattern alone."""
    pattern, written = (mean_errors(swap[kind])[1] < row["threshold"] for kind in SWAPS)
    return "a place" if written else "a symbol" if pattern else "neither"


def line_of(row):
    """Return the cells of a row."""

    def text(numbers):
        return ", ".join(f"{number:.2f}" for number in numbers)

    def cell(form):
        return "; ".join(f"{role} {form(swap)}" for role, swap in row["swaps"].items())

    return [
        row["run"],
        f"{row['layers']} x {row['heads']}, {row['N']}, {row['D']}",
        text(row["full"].values()),
        f"{len(row['own'])} of {row['units']}",
        text(row["mean"].values()),
        cell(lambda swap: f"{' '.join(swap['heads'])}: {passes_on(swap, row)}"),
        *(cell(lambda swap, kind=kind: text(mean_errors(swap[kind]))) for kind in SWAPS),
        cell(lambda swap: swap["n"]),
        text(row.get("exchange", [])),
    ]


def passes_on_a_place(row):
    """Return whether any finder of a committed run does; None if the run does not know its last
    symbol, or was not measured."""
    how = committed_rows().get(name_of(row))
    if not how or not knows(row, row["flags"].D):
        return None
    return any(passes_on(swap, how) == "a place" for swap in how["swaps"].values())


@functools.cache
def committed_rows():
    """Return {run: its committed row}."""
    return rows_by(RESULTS / "figures" / FILE, "run")


def places_table():
    """Return how many measured runs of two steps and two chains know x_2, and what their finders
    pass on, by layers and by the places where a pair may stand."""
    groups, lines = {}, []
    for row in all_runs():
        how = committed_rows().get(name_of(row))
        if how and how["N"] == how["D"] == 2:
            groups.setdefault((row["places"], how["layers"]), []).append((row, how))
    for (places, layers), runs in sorted(groups.items()):
        known, cells = [how for row, how in runs if knows(row, 2)], []
        for role in "1b", "q":
            swaps = [(how["swaps"][role], how) for how in known if role in how["swaps"]]
            passed = []
            for swap, how in swaps:
                in_last = swap["heads"][0].startswith(f"L{layers - 1}H")  # it passes nothing on
                if swap["n"] >= ENOUGH and not in_last:
                    passed.append(passes_on(swap, how))
            cells.append(", ".join(f"{passed.count(what)}: {what}" for what in sorted({*passed})))
        losses = span([row["losses"]["x_2"] for row, _ in runs])
        lines.append([places, layers, f"{len(known)} of {len(runs)}", losses, *cells])
    finders = "finder at 1b passes on", "at q"
    return markdown(["places", "layers", "know x_2", "loss of x_2", *finders], *lines)


# ---- the figure


def draw(row, task, flags):
    """Draw the swap at a query in two sequences, and the units that need their own pattern."""
    swap, roles, batch = row["swaps"]["q"], [*task.roles], task.draw("circuits", 512)
    figure = Figure(figsize=(10, 7), layout="constrained")
    top, bottom = figure.subplots(2)
    blue, red, center = analyze.symbol_color(1), analyze.RED, dict(ha="center", va="center")

    # a query whose pair stands elsewhere in the next sequence; blue: what comes after its symbol,
    # red: after that of the chain which has its pair there
    here, query = answers_there(task, batch, "q")[1].nonzero()[0].tolist()
    q, own = batch.places[here, query, [0, roles.index("1b")]].tolist()
    there = batch.places[here + 1, query, roles.index("1b")].item()
    symbols, others = batch.symbols[[here, here + 1]].tolist()
    colors = {symbols[own] + k: blue for k in range(task.D)}
    colors |= {symbols[there] + k: red for k in range(task.D)}
    for x, (symbol, other) in enumerate(zip(symbols, others, strict=True)):
        top.text(x, 1, f"{task.labels[other]}'", **center)
        top.text(x, 0, task.labels[symbol], color=colors.get(symbol, analyze.INK), **center)
    arrow = dict(arrowstyle="-|>", shrinkA=9, shrinkB=9, connectionstyle="arc3,rad=-0.2", lw=2)
    for y, x, color in (1, there, analyze.INK), (0, there, red), (0, own, blue):
        top.annotate("", (q, y), (x, y), arrowprops=dict(arrow, color=color))
    top.text(-0.7, 1, "another sequence", ha="right", va="center")
    top.text(-0.7, 0, "this sequence", ha="right", va="center")

    # the errors
    heads = " and ".join(swap["heads"])
    text = f"The query is asked for the blue symbols. Its error (n = {swap['n']}),"
    for kind, does in zip(SWAPS, ("attends as", "writes what it writes"), strict=True):
        errors = "{:.2f} from the blue, {:.2f} from the red".format(*mean_errors(swap[kind]))
        text += f"\nif {heads} {does} in the other sequence: {errors}"
    top.text(-2.6, -0.6, text, va="top", linespacing=1.6)
    top.set(xlim=(-2.6, task.T), ylim=(-1.9, 1.5))
    top.axis("off")

    # the units
    ticks = {}  # {head: x}
    for layer, head in itertools.product(range(flags.layers), range(flags.heads)):
        name = f"L{layer}H{head}"
        ticks[name] = layer * (flags.heads + 1) + head
        for y, role in enumerate(roles if layer < flags.layers - 1 else ["q"]):
            color = red if f"{name} {role}" in row["own"] else analyze.FAINT
            bottom.plot(ticks[name], y, "s", ms=9, color=color)
    bottom.set_xticks([*ticks.values()], ticks, rotation=90)
    bottom.set_yticks(range(len(roles)), roles)
    bottom.tick_params(length=0)
    bottom.set_frame_on(False)
    losses = ", ".join(f"{loss:.2f}" for loss in row["mean"].values())
    caption = f"""Red squares: the {len(row["own"])} of {row["units"]} heads and readers that need \
their own attention pattern;
losses with the mean pattern over sequences in all others: {losses}."""
    title = f"what {heads} passes on to the query is {passes_on(swap, row)}"
    analyze.add_title(figure, flags, title, caption)
    return figure


def main():
    p = command_line("python -m extras.studies.addresses", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories")
    p.add_argument("--out", type=Path, default="out", help="the folder of both files")
    args = p.parse_args()
    print(write(load(args.run), args.out))


if __name__ == "__main__":
    main()
