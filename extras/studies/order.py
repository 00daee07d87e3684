"""In which order runs learn their symbols, and what x_1 needs when it is learned (Sections 7.2, 9).

    python -m extras.studies.order out/L12_H1_D3_s* --out results/figures

Runs with checkpoints are measured into induction.jsonl, a row for the first checkpoint of each that
knows x_1, with a loss below 0.5: run, step, loss of x_1, and kinds, {"q -> 1b": by how much it
rises if all heads lose what they read so, ...}, of all pairs of roles.
"""

import functools
import itertools
import math
import re

import analyze
import train
from ablate import PatchedModel, Path, paths_in
from data import Task, progress
from extras import studies
from extras.studies.rows import RESULTS, completed, flags_of, name_of
from extras.studies.theory import may_attend


# ---- the order of symbols


def in_order(row):
    """Return whether a run learned its symbols in the order of the chain; None if it learned fewer
    than two, or two of them between the same two evaluations."""
    steps = [step for step in row["learned"].values() if step is not None]
    evaluations = {math.ceil(step / row["flags"].eval_every) for step in steps}
    if len(steps) < 2 or len(evaluations) < len(steps):
        return None
    return steps == sorted(steps) == [*row["learned"].values()][: len(steps)]


# ---- the order of paths and heads


def path_steps(row):
    """Return [(step, (layer, head), "q -> 1b"), ...], when the mean attention of each path of the
    circuit, or without a report of each that was measured, first passes one half, of those that do,
    the first one first."""
    steps = analyze.emergence_steps(row["emergence"])
    found = []
    for path in paths_in(row["report"]) or steps:
        if steps.get(path) is not None:
            found.append((steps[path], (path.layer, path.head), f"{path.reader} -> {path.read}"))
    return sorted(found)


def reads_in_order(row):
    """Return whether the query comes to read 1b, 2b, ... in this order, in whichever heads; None if
    it comes to read fewer than two of them."""
    kinds = [kind for _, _, kind in path_steps(row)]
    slots = [kind for kind in dict.fromkeys(kinds) if re.fullmatch(r"q -> \db", kind)]
    return slots == sorted(slots) if len(slots) > 1 else None


def new_heads(row):
    """Return how many heads emerge before x_2, x_3, ... are learned and after the symbol before."""
    first = {}
    for step, head, _ in path_steps(row):
        first.setdefault(head, step)
    between = itertools.pairwise(row["learned"].values())
    return [sum(a < step <= b for step in first.values()) for a, b in between]


# ---- what x_1 needs when it is learned, whichever paths the circuit has at the end


def measure_run(row, n=64):
    """Return the row of induction.jsonl of a run; None if no checkpoint knows x_1."""
    for file in progress(f"{name_of(row)}: checkpoint", analyze.checkpoints_of(row["folder"])):
        model, task, flags = train.load(row["folder"], f"ckpt/{file.name}")
        patched = PatchedModel(model, task, task.draw("emergence", n))
        loss = patched.losses({})[..., 0].mean().item()
        if loss < task.learned_below:
            names, kinds = [*task.roles], {}
            readable = may_attend(task, flags.causal).fill_diagonal_(False)
            for reader, read in readable.nonzero().tolist():
                paths = [Path(*head, names[reader], names[read]) for head in model.heads]
                rise = patched.knock_out(paths)[..., 0].mean().item() - loss
                kinds[f"{names[reader]} -> {names[read]}"] = round(rise, 4)
            row = dict(run=name_of(row), positions=flags.positions, optimizer=flags.optimizer)
            return row | dict(step=int(file.stem), loss=round(loss, 4), kinds=kinds)


@functools.cache
def induction_runs():
    """Return the rows of induction.jsonl, as of rows.completed()."""
    runs = []
    for row in train.read_file(RESULTS / "figures/induction.jsonl"):
        named = {name: row[name] for name in ("positions", "optimizer")}
        flags = flags_of(dict(named, seed=int(row["run"].rpartition("s")[2])))
        runs.append(completed(row, flags, dict(x_1=row["loss"]), {}))
    return runs


def needs_both(row):
    """Return whether without either read of an induction head half of what was learned of x_1,
    beside the average of four, is lost."""
    learned = Task(N=4).chance - row["losses"]["x_1"]
    return min(row["kinds"][kind] for kind in ("q -> 1b", "1b -> 1a")) >= learned / 2


def last_comes_late(row):
    """Return whether the last path of a circuit to pass half of the attention comes after a longer
    gap than any two before."""
    *before, last = [b[0] - a[0] for a, b in itertools.pairwise(path_steps(row))]
    return last > max(before)


def write_induction(rows, out):
    """Measure the runs that have checkpoints into induction.jsonl, among the rows of others."""
    file = out / "induction.jsonl"
    measured = studies.rows_by(file, "run")
    for row in rows:
        if row["folder"] and (found := measure_run(row)):
            measured[found["run"]] = found
    train.write_file(file, [*measured.values()])
    return file


if __name__ == "__main__":
    studies.command(__file__, __doc__, write_induction)
