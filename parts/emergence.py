"""How a circuit emerged: what the checkpoints of a run tell about each of its paths (Section 9).

    python analyze.py results/D     # draws FIGURES too, where there is something to draw

Runs trained with --save-every have checkpoints. What is measured on them is kept in emergence.json,
so that the checkpoints may go.
"""

import itertools
import json
import pathlib
import sys
import time
from typing import NamedTuple

from parts import runs
from parts.circuit import Path, one_hot, paths_in, read_paths, read_report
from parts.flags import asked

import torch

from data import held_out, partial_losses


# ---- measuring


def checkpoints_of(folder):
    """The checkpoints of a run, first step first."""
    return sorted(pathlib.Path(folder, "ckpt").glob("*.pt"), key=lambda file: int(file.stem))


def measure_emergence(folder, paths, n=32):
    """What happens to each path over the checkpoints, on n sequences, as emergence.json keeps it: a
    dict with a row per checkpoint."""
    flags, rows, began = runs.read_flags(folder), [], time.time()
    task = flags.problem
    batch, files = runs.sequences(flags, held_out("emergence", n)), checkpoints_of(folder)
    for done, file in enumerate(files, 1):
        model = runs.load(folder, f"ckpt/{file.name}")[0]
        rows.append(dict(step=int(file.stem)) | measure_checkpoint(model, flags, paths, batch))
        left = (time.time() - began) / done * (len(files) - done)
        progress = f"\rcheckpoint {done}/{len(files)}, {left:.0f} s left "
        print(progress, end="" if done < len(files) else "\n", file=sys.stderr, flush=True)

    # layers and heads from 1, roles by name
    names = task.names
    named = [(at + 1, head + 1, names[a], names[b]) for at, head, a, b in paths]
    return dict(sequences=n, paths=named, rows=rows)


@torch.no_grad()
def measure_checkpoint(model, flags, paths, batch):
    """The partial losses and, of each path, its mean attention, the 10% and 90% quantiles of it
    over sequences, for which share of tokens it is the largest (hits), and the partial losses
    without it (its attention taken away, all else alive); and those without each head."""
    task, of_paths, of_heads = flags.problem, [], []
    predictions, patterns = model(batch.inputs, return_patterns=True)

    def losses(predictions):
        return rounded(partial_losses(predictions, batch.targets, flags.K).mean(0))

    for path in paths:
        # what each token with the role gives to the target, and what it gives at most, (B, N)
        pattern, tokens = patterns[path.layer][:, path.head], batch.positions[..., path.source]
        attention = read_paths(pattern, task, batch.positions)[..., path.source, path.target]
        highest = pattern.amax(-1).gather(1, tokens)

        # in numbers, and what is lost without it
        low, high = attention.mean(1).quantile(torch.tensor([0.1, 0.9]))
        hits = (attention == highest).float().mean()
        values = rounded(torch.stack([attention.mean(), low, high, hits]))
        kept = pattern * (one_hot([path], task, batch.positions) == 0)
        without = losses(model(batch.inputs, patterns={path[:2]: kept}))
        names = "mean", "low", "high", "hits"
        of_paths.append(dict(zip(names, values, strict=True), without=without))

    # whether in the circuit or not: a head may matter early and die later
    nothing = torch.zeros(task.T, task.T)
    for head in itertools.product(range(len(patterns)), range(patterns[0].shape[1])):
        of_heads.append(losses(model(batch.inputs, patterns={head: nothing})))
    return dict(losses=losses(predictions), paths=of_paths, heads=of_heads)


def rounded(values):
    return [round(value, 4) for value in values.tolist()]


# ---- reading


def read_circuit(folder, task):
    """The report of ablate.py on a run, {} if there is none, and the {Path: mean attention} of its
    circuit, {} if none was found. ValueError with one line for a report that cannot be read."""
    report = read_report(folder)

    # the key that was added last, of the report of a circuit and of one without
    newest = "removals_at_the_papers_least" if "removals" in report else "grade"
    if report and newest not in report:
        what = f"{folder}/circuit.json is of an older form"
        raise ValueError(f"{what}: run ablate.py again (python ablate.py {folder})")
    return report, paths_in(report, task) or {}


class History(NamedTuple):
    """Of one path, lists with a value per checkpoint."""

    mean: list  # attention
    low: list  # its 10% and 90% quantiles over sequences
    high: list
    hits: list  # share of tokens whose largest attention this is
    without: dict  # {symbol: its losses without the path}


class Emergence(NamedTuple):
    """What the checkpoints of a run tell about a circuit."""

    sequences: int
    steps: list
    losses: dict  # {symbol: its loss at each checkpoint}
    paths: dict  # {Path: History}
    heads: dict = {}  # {(layer, head): {symbol: its losses without the head}}; {} if not measured


def read_emergence(folder, paths):
    """The Emergence of these paths: what emergence.json says or, if it does not know them all, what
    is measured on the checkpoints and then kept there. None where there is neither."""
    file, flags = pathlib.Path(folder, "emergence.json"), runs.read_flags(folder)
    known = by_path(runs.read_json(file), flags, file) if file.exists() else None
    enough = known and set(paths) <= set(known.paths)

    # nothing to measure it on
    if not enough and not checkpoints_of(folder):
        if known:
            what = f"{file} is of another circuit, and there are no checkpoints to measure"
            print(f"{what}: not used", file=sys.stderr)
        return None

    if not enough:
        measured = measure_emergence(folder, paths)
        runs.write_text(file, json.dumps(measured) + "\n")
        known = by_path(measured, flags, file)
    return known._replace(paths={path: known.paths[path] for path in paths})


def by_path(measured, flags, file):
    """The Emergence in what emergence.json holds, a dict; ValueError if it is of another task."""
    symbols, names, histories = [f"x_{k}" for k in asked(flags)], flags.problem.names, {}

    def by_symbol(losses):  # a list per checkpoint -> a curve per symbol
        return dict(zip(symbols, zip(*losses, strict=True), strict=True))

    try:
        rows, sequences = measured["rows"], measured["sequences"]
        for number, (layer, head, source, target) in enumerate(measured["paths"]):
            if target == "previous token":  # of an older circuit: such tokens are no paths now
                continue
            path = Path(layer - 1, head - 1, names.index(source), names.index(target))
            own = [row["paths"][number] for row in rows]
            kinds = "mean", "low", "high", "hits"
            curves = [[values[kind] for values in own] for kind in kinds]
            histories[path] = History(*curves, by_symbol([values["without"] for values in own]))
        steps, losses = [row["step"] for row in rows], by_symbol([row["losses"] for row in rows])
        numbers = itertools.product(range(flags.layers), range(flags.heads))
        of_heads = zip(*(row.get("heads", []) for row in rows), strict=True)
        heads = dict(zip(numbers, map(by_symbol, of_heads), strict=False))
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is of another task or damaged: remove it") from None
    return Emergence(sequences, steps, losses, histories, heads)


def emergence_steps(emergence):
    """{path: the step, interpolated, at which its mean attention first passes 0.5, or None}"""
    when = {}
    for path, history in emergence.paths.items():
        # above 0.5 is, with the signs turned, below -0.5
        when[path] = runs.first_below(emergence.steps, [-mean for mean in history.mean], -0.5)
    return when


def removal_rises(emergence, removed):
    """{symbol: a row for each of removed: by how much its removal raises the loss, at each
    checkpoint}; removed: [{symbol: losses}, ...], of paths or of heads."""
    rises = {}
    for symbol, losses in emergence.losses.items():
        rises[symbol] = []
        for curves in removed:
            rises[symbol].append([a - b for a, b in zip(curves[symbol], losses, strict=True)])
    return rises
