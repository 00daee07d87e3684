"""Which way do pairs read, if that of a later step may stand before or after (Section 5)?

    python -m extras.studies.directions out/directions/*    # adds these runs to directions.jsonl
    python -m extras.studies.directions    # prints the predictions beside what was measured

A row has the losses of a model and, for each order in which the steps of a query's chain stand, as
"132": n, how many queries; loss, of x_D; without, by how much it rises if no head reads so, {"2 ->
3": no token of pair 2 one of pair 3, "q -> 3": the query none, ...}; learned, the step of the first
checkpoint that knows x_D, if there is one.
"""

import functools
import itertools
import math
import operator
import pathlib
import statistics

import analyze
import train
from ablate import PatchedModel, Path, symbol_means
from data import command_line, progress
from extras.studies import RESULTS, markdown, rows_by, spread
from extras.studies.addresses import why_not
from extras.studies.layers import comparison, outcome
from extras.studies.rows import committed, load, name_of, rounded

import torch


FILE = RESULTS / "figures/directions.jsonl"
PREDICTED = RESULTS / "runs/directions_predicted.jsonl"


# ---- the row of a run


@torch.no_grad()
def measure(row, n=1024):
    """Return the row of a run, measured on n sequences."""
    model, task, flags = train.load(row["folder"])
    batch, steps = task.draw("circuits", n), range(1, task.D + 1)
    patched = PatchedModel(model, task, batch)

    # the queries (n, N) of each order
    places = batch.places[..., [[*task.roles].index(f"{k}b") for k in steps]]  # (n, N, D)
    masks = {}
    for order in itertools.permutations(steps):
        mask = (places[..., [k - 1 for k in order]].diff() > 0).all(-1)
        if mask.any():
            masks["".join(map(str, order))] = mask
    orders = {}
    for order, mask in masks.items():
        loss = patched.losses({})[mask][:, -1].mean().item()
        orders[order] = dict(n=mask.sum().item(), loss=loss, without={})

    # what is lost without each read
    tokens = {"q": ["q"]} | {f"{k}": [f"{k}a", f"{k}b"] for k in steps}
    for reader, read in itertools.permutations(tokens, 2):
        if read != "q":
            ends = itertools.product(model.heads, tokens[reader], tokens[read])
            paths = [Path(*head, *names) for head, *names in ends]
            rise = (patched.knock_out(paths) - patched.losses({}))[..., -1]  # (n, N)
            for order, mask in masks.items():
                orders[order]["without"][f"{reader} -> {read}"] = rise[mask].mean().item()

    # when x_D was learned
    for file in progress(f"{name_of(row)}: checkpoint", analyze.checkpoints_of(row["folder"])):
        model, *_ = train.load(row["folder"], f"ckpt/{file.name}")
        losses = task.losses(model(batch.inputs), batch)
        for order, mask in masks.items():
            if losses[mask][:, -1].mean() < task.learned_below:
                orders[order].setdefault("learned", int(file.stem))

    names = "task", "layers", "heads", "N", "D", "steps"
    how = dict(run=name_of(row)) | {name: getattr(flags, name) for name in names}
    how |= dict(threshold=task.learned_below, losses=symbol_means(patched.losses({}), task))
    return rounded(how | dict(orders=orders))


# ---- what is printed


@functools.cache
def measured_runs():
    """Return the rows of FILE."""
    return train.read_file(FILE)


def side(row, last_first):
    """Return the orders of a row in which the pair of step D stands before that of D - 1, or those
    in which it stands after."""
    last, other, orders = str(row["D"]), str(row["D"] - 1), row["orders"].items()
    return [found for name, found in orders if (name.find(last) < name.find(other)) == last_first]


def mean(orders, read=None):
    """Return the loss over the queries of some orders, or by how much it rises without a read."""
    values = [order["without"][read] if read else order["loss"] for order in orders]
    numbers = [order["n"] for order in orders]
    return sum(map(operator.mul, values, numbers)) / sum(numbers)


def learned(orders):
    """Return when x_D was learned in the median of some orders."""
    return statistics.median(order.get("learned", math.inf) for order in orders)


def table():
    """Return what is lost without each read: medians over the runs that know the last symbol, by
    the order of its pair and that before."""
    groups, lines = {}, []
    for row, last_first in itertools.product(measured_runs(), (True, False)):
        if orders := side(row, last_first):
            shape = [row[name] for name in ("D", "N", "layers", "heads", "steps", "task")]
            groups.setdefault((*shape, last_first), []).append((row, orders))
    for (D, N, layers, heads, limit, name, last_first), runs in sorted(groups.items()):
        first, second = (D, D - 1) if last_first else (D - 1, D)
        known = [orders for row, orders in runs if mean(orders) < row["threshold"]]
        order = "usual" if name == "chain" else name.rpartition(":")[2].lower()
        line = [f"{layers} x {heads}, {N}, {D}", f"{limit:,}", order, f"{first} before {second}"]
        line.append(f"{len(known)} of {len(runs)}")
        steps = [step for step in map(learned, known) if step < math.inf]
        line.append(spread(steps, "{:,.0f}") if steps else "")
        for reader, read in (second, first), ("q", first), ("q", second):
            rises = [mean(orders, f"{reader} -> {read}") for orders in known]
            text = spread(rises, "{:.2f}") if known else ""
            line.append(f"{reader} -> {read}: {text}" if known and reader != "q" else text)
        lines.append(line)
    head = "layers x heads, N, D", "steps", "order", "of the last two pairs", "know x_D"
    head += "from step", "x_D rises without", "without q -> first", "without q -> second"
    return markdown(head, *lines)


# ---- what was predicted


def learned_last(run):
    """Return when a committed run learned its last symbol."""
    [row] = committed(run)
    step = [*row["learned"].values()][-1]
    return math.inf if step is None else step


def value_of(row, name):
    """Return the number that a prediction names, as "x_3 without q -> 3, where 2 is first", or
    whether a run is one of those that it counts."""
    if name == "runs that know x_3 earlier where 3 is first":
        return learned(side(row, True)) < learned(side(row, False))
    if name == "runs that know x_3 later than in the usual order":
        shape, _, seed = pathlib.Path(row["run"]).name.rsplit("_", 2)
        other = f"main/{seed}" if row["layers"] == 12 else f"directions/{shape}_backward_{seed}"
        return learned_last(row["run"]) > learned_last(other)
    if name == "runs that know x_3 in every order":
        return all(order["loss"] < row["threshold"] for order in row["orders"].values())
    if name == "runs that know x_3":
        return row["losses"]["x_3"] < row["threshold"]
    if name == "x_3":
        return row["losses"]["x_3"]
    read, first = name.removeprefix("x_3 without ").removesuffix(" is first").split(", where ")
    return mean(side(row, first == "3"), read)


def measured(prediction):
    """Return what became of a row of PREDICTED."""
    rows = measured_runs()
    return outcome(prediction, rows, value_of, lambda row: value_of(row, "runs that know x_3"))


def main():
    p = command_line("python -m extras.studies.directions", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="*", help="run directories")
    kept = rows_by(FILE, "run")
    for row in load(p.parse_args().run):
        if reason := why_not(row) or "it has one step" * (row["task"].D == 1):
            print(f"{name_of(row)}: {reason}")
            continue
        kept[name_of(row)] = measure(row)
        train.write_file(FILE, [kept[run] for run in sorted(kept)])
    print(table(), comparison(train.read_file(PREDICTED), measured), sep="\n\n")


if __name__ == "__main__":
    main()
