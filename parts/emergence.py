"""How a circuit emerged: what the checkpoints of a run tell about each of its paths (Section 9).

    emergence = read_emergence("results/D")    # of a run trained with --save-every

What is measured on checkpoints is kept in emergence.json, so that they may go.
"""

import json
import pathlib
import time
from typing import NamedTuple

from parts import config
from parts.circuit import (
    MECHANISMS,
    PatchedModel,
    fields_of,
    path_from,
    paths_in,
    read_path,
    read_report,
)
from parts.search import attention_knockout

import torch

from data import held_out


class History(NamedTuple):
    """Of one path, lists with a value per checkpoint."""

    mean: list  # attention
    low: list  # its 10% and 90% quantiles over sequences
    high: list
    hits: list  # share of tokens whose largest attention this is
    without: dict  # {symbol: its losses without the path, all else free}


class Emergence(NamedTuple):
    """What the checkpoints of a run tell."""

    sequences: int
    steps: list
    losses: dict  # {symbol: its loss at each checkpoint}
    paths: dict  # {Path: History}
    heads: dict  # {(layer, head): {symbol: its losses without the head}}


# ---- measuring


@torch.no_grad()
def measure_emergence(run, flags, paths, n=32):
    """The Emergence of these paths, and of all heads, over the checkpoints, on n sequences."""
    task, symbols, began = flags.problem, flags.target_names, time.time()
    batch, files = config.sequences(flags, held_out("emergence", n)), config.checkpoints_of(run)
    heads = [(layer, head) for layer in range(flags.layers) for head in range(flags.heads)]
    losses, without, no_head, seen = [], {}, {}, {}
    for done, file in enumerate(files, 1):
        held = PatchedModel(config.load(run, f"ckpt/{file.name}")[0], flags, batch)
        losses.append(held.intact.tolist())
        for path in paths:
            # what each chain's source gives to the target, and what it gives at most, (B, N)
            pattern = held.attention()[path[:2]]
            tokens, there = path.source.tokens(task, batch.positions)
            given = read_path(pattern, path, task, batch.positions)
            most = pattern.amax(-1).gather(1, tokens)
            spread = given.mean(1).quantile(torch.tensor([0.1, 0.9])).tolist()
            hits = ((given == most) & there).float().mean().item()
            seen.setdefault(path, []).append([given.mean().item(), *spread, hits])
            without.setdefault(path, []).append(attention_knockout(held, [path]).mean(0).tolist())

        # whether in the circuit or not: a head may matter early and die later
        nothing = MECHANISMS["zero"](task.T, None, None)
        for head in heads:
            rows = held.errors_with({head: nothing}).mean(0).tolist()
            no_head.setdefault(head, []).append(rows)
        config.print_progress(f"{run}: checkpoint", done, len(files), began)

    def by_symbol(rows):  # a list per checkpoint -> a curve per symbol
        return dict(zip(symbols, map(list, zip(*rows, strict=True)), strict=True))

    histories = {}
    for path in paths:
        curves = map(list, zip(*seen[path], strict=True))
        histories[path] = History(*curves, by_symbol(without[path]))
    steps = [int(file.stem) for file in files]
    of_heads = {head: by_symbol(rows) for head, rows in no_head.items()}
    return Emergence(n, steps, by_symbol(losses), histories, of_heads)


def to_json(emergence, task):
    """As emergence.json keeps it: paths and heads as rows, with four digits."""

    def short(value):
        if isinstance(value, dict):
            return {name: short(curve) for name, curve in value.items()}
        return [round(number, 4) for number in value]

    paths, heads = [], []
    for path, history in emergence.paths.items():
        curves = {name: short(curve) for name, curve in history._asdict().items()}
        paths.append(fields_of(path, task) | curves)
    for (layer, head), without in emergence.heads.items():
        heads.append(dict(layer=layer, head=head, without=short(without)))
    kept = dict(sequences=emergence.sequences, steps=emergence.steps)
    return kept | dict(losses=short(emergence.losses), paths=paths, heads=heads)


# ---- reading


def read_emergence(run):
    """The Emergence that emergence.json keeps or, if there are checkpoints and it does not know
    all paths of circuit.json, that is measured and then kept. None where there is neither."""
    file, flags = pathlib.Path(run, "emergence.json"), config.read_flags(run)
    known = from_json(config.read_json(file), flags.problem) if file.exists() else None
    report = read_report(run)
    paths = {*paths_in(report, flags.problem), *paths_in(report, flags.problem, "uses")}
    if config.checkpoints_of(run) and paths and not (known and paths <= known.paths.keys()):
        known = measure_emergence(run, flags, sorted(paths))
        config.write_text(file, json.dumps(to_json(known, flags.problem)) + "\n")
    return known


def from_json(kept, task):
    """The Emergence in what emergence.json holds."""
    paths, heads = {}, {}
    for row in kept["paths"]:
        paths[path_from(row, task)] = History(*(row[name] for name in History._fields))
    for row in kept["heads"]:
        heads[row["layer"], row["head"]] = row["without"]
    return Emergence(kept["sequences"], kept["steps"], kept["losses"], paths, heads)


# ---- what it says


def emergence_steps(emergence):
    """{path: the step, interpolated, at which its mean attention first passes 0.5, or None}"""
    when = {}
    for path, history in emergence.paths.items():
        # above 0.5 is, with the signs turned, below -0.5
        when[path] = config.first_below(emergence.steps, [-mean for mean in history.mean], -0.5)
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
