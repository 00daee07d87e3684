"""In which order runs learn their symbols and paths, what x_1 needs when it is learned (Sections
7.2, 9), and which circuits read ahead twice (Section 5).

    python -m extras.studies.order out/L12_H1_D3_s* --out results/figures

Runs with checkpoints are measured into induction.jsonl, a row for the first checkpoint of each that
knows x_1, with a loss below 0.5: run, step, loss of x_1, and kinds, {"q -> 1b": by how much it
rises if all heads lose what they read so, ...}, of all pairs of roles.
"""

import itertools
import math

import analyze
import train
from ablate import PatchedModel, Path, arrivals, paths_in
from data import progress
from extras.studies import RESULTS, command, rows_by
from extras.studies.rows import load, name_of
from extras.studies.theory import may_attend


# ---- the order of symbols, paths and heads


def in_order(row):
    """Return whether a run learned its symbols in the order of the chain; None if it learned fewer
    than two, or two of them between the same two evaluations."""
    steps = [step for step in row["learned"].values() if step is not None]
    evaluations = {math.ceil(step / row["flags"].eval_every) for step in steps}
    if len(steps) < 2 or len(evaluations) < len(steps):
        return None
    return steps == sorted(steps) == [*row["learned"].values()][: len(steps)]


def path_steps(row):
    """Return [(step, (layer, head), "q -> 1b"), ...], when the mean attention of each path of the
    circuit, or without a report of each that was measured, first passes one half, of those that do,
    the first one first."""
    steps = analyze.emergence_steps(row["emergence"])
    found = []
    for path in paths_in(row["report"]) or steps:
        if steps.get(path) is not None:
            found.append((steps[path], path[:2], f"{path.reader} -> {path.read}"))
    return sorted(found)


def new_heads(row):
    """Return how many heads emerge before x_2, x_3, ... are learned and after the symbol before."""
    first = {}
    for step, head, _ in path_steps(row):
        first.setdefault(head, step)
    between = itertools.pairwise(row["learned"].values())
    return [sum(a < step <= b for step in first.values()) for a, b in between]


# ---- what x_1 needs when it is learned, whichever paths the circuit has at the end


def measure(row, n=64):
    """Return the row of induction.jsonl of a run; None if no checkpoint knows x_1."""
    for file in progress(f"{name_of(row)}: checkpoint", analyze.checkpoints_of(row["folder"])):
        model, task, flags = train.load(row["folder"], f"ckpt/{file.name}")
        patched = PatchedModel(model, task, task.draw("emergence", n))
        loss = patched.full[..., 0].mean().item()
        if loss < task.learned_below:
            names, kinds = [*task.roles], {}
            readable = may_attend(task, flags.causal).fill_diagonal_(False)
            for reader, read in readable.nonzero().tolist():
                paths = [Path(*head, names[reader], names[read]) for head in model.heads]
                rise = patched.knock_out(paths)[..., 0].mean().item() - loss
                kinds[f"{names[reader]} -> {names[read]}"] = round(rise, 4)
            run = {name: getattr(flags, name) for name in ("positions", "optimizer", "seed")}
            run |= dict(run=name_of(row), step=int(file.stem), x_1=round(loss, 4))
            return run | dict(kinds=kinds)


def write(rows, out):
    """Measure the runs that have checkpoints into induction.jsonl, among the rows of others."""
    file = out / "induction.jsonl"
    measured = rows_by(file, "run")
    for row in rows:
        if row["folder"] and (found := measure(row)):
            measured[found["run"]] = found
    train.write_file(file, [*measured.values()])
    return file


def induction_runs():
    """Return the rows of induction.jsonl."""
    return load([RESULTS / "figures/induction.jsonl"])


# ---- reading ahead


def reads_twice(row):
    """Return whether a circuit reads ahead in two rounds or more. At first kb holds its own pair,
    x_{k-1} and x_k, and after one round of reading ahead x_{k+1} at most."""
    paths, task = paths_in(row["report"]), row["task"]
    return reached_within(paths, task, 1) != reached_within(paths, task, task.D)


def reached_within(paths, task, steps):
    """Return the k of all x_k that reach the query if no token of a pair keeps a symbol more than
    so many steps ahead of its pair. A token finds another pair by a symbol that both hold."""
    [(_, holds)] = arrivals([], task)
    for layer in sorted({path.layer for path in paths}):
        before = {token: {*symbols} for token, symbols in holds.items()}
        for path in (path for path in paths if path.layer == layer):
            own, symbols = before.get(path.reader, set()), before.get(path.read, set())
            pair = pair_of(path.reader)
            if pair == pair_of(path.read) or own & symbols:
                most = task.D if path.reader == "q" else pair + steps
                holds[path.reader] |= {k for k in symbols if k <= most}
    return holds["q"]


def pair_of(token):
    """Return the step of a token's pair: 2 for 2a, 2b, 2b+1 and 2b*, 0 for the query."""
    role = token.rstrip("*").partition("+")[0]
    return int(role[:-1] or 0)


if __name__ == "__main__":
    command(__file__, __doc__, write)
