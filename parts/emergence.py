"""How a circuit emerged, measured at the checkpoints of a run (Section 9).

    emergence = read_emergence("results/D")    # of a run that was trained with --save-every

emergence.json holds all that was measured, so that the checkpoints may be deleted. It is a dict:

    sequences: the number of held-out sequences that each checkpoint was measured on
    ablation: what replaces a path that is knocked out, its "mean" ("zero" in older files)
    steps: the steps of the checkpoints; every list below has a number for each of them
    losses: {"x_1": [MSE, ...], ...} of the full model
    paths: a row for each path of the circuit and each candidate: layer, head, source, target, and
        mean, low, high: the mean attention, its 10% and its 90% quantile over sequences
        hits: the share of sources that attend to the target more than to any other token
        without: {"x_1": [MSE, ...], ...} of the full model with this path alone knocked out
"""

import json
import pathlib

from parts import config
from parts.circuit import PatchedModel, attention_on, paths_in, read_report, to_row

import torch

from data import held_out


@torch.no_grad()
def measure_emergence(run, flags, paths, n=32):
    """Return what emergence.json holds, measured on n sequences at each checkpoint of a run."""
    task, names = flags.problem, flags.target_names
    batch, files = config.sequences(flags, held_out("emergence", n)), config.checkpoints_of(run)
    losses, rows = {name: [] for name in names}, []
    for path in paths:
        curves = {name: [] for name in ("mean", "low", "high", "hits")}
        rows.append(to_row(path, task) | curves | dict(without={name: [] for name in names}))

    def extend(curves, numbers):
        """Append a number, to four digits, to each of the curves."""
        for name, number in zip(curves, numbers, strict=True):
            curves[name].append(round(number, 4))

    for file in config.progress(f"{run}: checkpoint", files):
        model = PatchedModel(config.load(run, f"ckpt/{file.name}")[0], flags, batch)
        extend(losses, model.baseline.mean(0).tolist())
        for path, row in zip(paths, rows, strict=True):
            # the attention from each chain's source to its target, and the source's largest
            pattern = model.attention()[path[:2]]
            attention = attention_on(pattern, path, task, batch.positions)  # (B, N)
            sources, exist = path.source.tokens(task, batch.positions)
            largest = pattern.amax(-1).gather(1, sources)
            hits = ((attention == largest) & exist).float().mean().item()
            low, high = attention.mean(1).quantile(torch.tensor([0.1, 0.9])).tolist()

            curves = {name: row[name] for name in ("mean", "low", "high", "hits")}
            extend(curves, [attention.mean().item(), low, high, hits])
            extend(row["without"], model.knock_out([path]).mean(0).tolist())
    steps = [int(file.stem) for file in files]
    return dict(sequences=n, ablation="mean", steps=steps, losses=losses, paths=rows)


def read_emergence(run):
    """Return what emergence.json of a run holds; {} without the file. Where there are checkpoints,
    and a path of circuit.json is not in the file, measure all paths first and write the file."""
    file, flags = pathlib.Path(run, "emergence.json"), config.read_flags(run)
    report, task = read_report(run), flags.problem
    emergence = config.read_json(file) if file.exists() else {}
    paths = {*paths_in(report, task), *paths_in(report, task, "candidates")}
    if config.checkpoints_of(run) and not paths <= paths_in(emergence, task).keys():
        emergence = measure_emergence(run, flags, sorted(paths))
        config.write_text(file, json.dumps(emergence) + "\n")
    return emergence


def emergence_steps(emergence, task):
    """Return {path: the step, linearly interpolated, at which its mean attention first passes 0.5,
    or None}."""
    steps = {}
    for path, row in paths_in(emergence, task).items():
        # a curve that passes above 0.5 is one whose negative passes below -0.5
        negative = [-mean for mean in row["mean"]]
        steps[path] = config.first_below(emergence["steps"], negative, -0.5)
    return steps


def knock_out_rises(emergence, row):
    """Return {symbol: by how much its loss rises at each checkpoint when the path of this row is
    knocked out}."""
    rises = {}
    for symbol, losses in emergence["losses"].items():
        pairs = zip(row["without"][symbol], losses, strict=True)
        rises[symbol] = [without - loss for without, loss in pairs]
    return rises
