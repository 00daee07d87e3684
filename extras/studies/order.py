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
from argparse import Namespace
from typing import NamedTuple

import analyze
import train
from ablate import PatchedModel, Path, paths_in
from data import Task, progress
from extras import studies
from extras.studies.rows import RESULTS, committed, flags_of, name_of, replaced, settings_text
from extras.studies.theory import may_attend


HEADS = "q -> 1b", "1b -> 1a"  # what an induction head and its previous-token head read
EMERGED = "default/*", "adamw/*", "last/*", "decay/*", "cleaning/muon_e*", "rope/s?", "D"
LEVELS = 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9  # of attention, from which on a path has emerged
SEQUENCES = 64  # held out, for induction.jsonl


# ---- the order of symbols


def count(answers):
    """Return "3 of 5 (2)", of [(flags, bool), ...]: few seeds, here 2, make many runs."""
    seeds = len({flags.seed for flags, _ in answers})
    return f"{studies.share(answer for _, answer in answers)} ({seeds})" if answers else ""


def asks_all(flags):
    """Return whether a run asks for all symbols, from fresh weights."""
    return flags.targets == "all" and not flags.init


class Ended(NamedTuple):
    """What became of a run of chains: the step at which it learned each symbol, or None, and the
    last loss of each; known: the symbols that it knows at its end."""

    flags: Namespace
    learned: dict
    losses: dict
    known: list


@functools.cache
def all_chains():
    """Return an Ended for each run of chains, those of sweeps too."""
    found = []
    for row in committed("*"):
        losses = {name: row["log"][-1][name] for name in row["learned"]}
        found.append(Ended(row["flags"], row["learned"], losses, row["known"]))
    tables = map(train.read_file, sorted(RESULTS.glob("*/results.jsonl")))  # of sweep.py
    for row in itertools.chain(*tables):
        flags = flags_of(row)
        task = train.task_of(flags)
        learned = {name: row[f"{name}_learned"] for name in task.target_names}
        losses = {name: row[name] for name in task.target_names}
        known = [name for name in losses if losses[name] < task.learned_below]
        found.append(Ended(flags, learned, losses, known))
    return [run for run in found if run.flags.task == "chain"]


def count_orders():
    """Return ([(flags, in order), ...], unresolved): of the runs that ask for all symbols and learn
    several, an answer per settings and seed, True if all repeats, and runs of other steps, are in
    order; and how many of them have two symbols between the same two evaluations, so that their
    order is not known."""
    answers, unresolved = {}, set()
    for flags, learned, *_ in all_chains():
        steps = [step for step in learned.values() if step is not None]
        if asks_all(flags) and len(steps) > 1:
            key = settings_text(replaced(flags, steps=1, stop_below=0)), flags.seed
            if len({math.ceil(step / flags.eval_every) for step in steps}) < len(steps):
                unresolved.add(key)
            else:
                ordered = steps == sorted(steps) == [*learned.values()][: len(steps)]
                answers[key] = flags, ordered and answers.get(key, (flags, True))[1]
    return [*answers.values()], len(unresolved - answers.keys())


def ended(row):
    """Return whether a run ended by itself, and was not stopped by hand before."""
    return row["steps"] == row["flags"].steps or row["log"][-1]["val"] < row["flags"].stop_below


# ---- the order of paths and heads


def path_steps(row, level):
    """Return [(step, (layer, head), "q -> 1b"), ...], when the mean attention of each path of the
    circuit, or without a report of each that was measured, first passes a level, of those that do,
    the first one first."""
    steps = analyze.emergence_steps(row["emergence"], level)
    found = []
    for path in paths_in(row["report"]) or steps:
        if steps.get(path) is not None:
            found.append((steps[path], (path.layer, path.head), f"{path.reader} -> {path.read}"))
    return sorted(found)


def reads_in_order(row, level):
    """Return whether the query comes to read 1b, 2b, ... in this order, in whichever heads; None if
    it comes to read fewer than two of them."""
    kinds = [kind for _, _, kind in path_steps(row, level)]
    slots = [kind for kind in dict.fromkeys(kinds) if re.fullmatch(r"q -> \db", kind)]
    return slots == sorted(slots) if len(slots) > 1 else None


def new_heads(row, level):
    """Return how many heads emerge before x_2, x_3, ... are learned and after the symbol before."""
    first = {}
    for step, head, _ in path_steps(row, level):
        first.setdefault(head, step)
    between = itertools.pairwise(row["learned"].values())
    return [sum(a < step <= b for step in first.values()) for a, b in between]


# ---- what x_1 needs when it is learned, whichever paths the circuit has at the end


def measure_run(row, n=SEQUENCES):
    """Return the row of induction.jsonl of a run, None if no checkpoint knows x_1."""
    for file in progress(f"{name_of(row)}: checkpoint", analyze.checkpoints_of(row["folder"])):
        model, task, flags = train.load(row["folder"], f"ckpt/{file.name}")
        patched = PatchedModel(model, task, task.draw("emergence", n))
        loss = patched.baseline[..., 0].mean().item()
        if loss < task.learned_below:
            kinds = {}
            names, readable = [*task.roles], may_attend(task, flags.causal)
            for reader, read in readable.fill_diagonal_(False).nonzero().tolist():
                kind = f"{names[reader]} -> {names[read]}"
                paths = [Path(*head, *kind.split(" -> ")) for head in patched.corrupted_reads]
                rise = patched.knock_out(paths)[..., 0].mean().item() - loss
                kinds[kind] = round(rise, 4)
            row = dict(run=name_of(row), positions=flags.positions, optimizer=flags.optimizer)
            return row | dict(step=int(file.stem), loss=round(loss, 4), kinds=kinds)


def load_induction():
    return train.read_file(RESULTS / "figures/induction.jsonl")


def needed(row, kind):
    """Return whether half of what was learned of x_1, beside the average of four, is lost."""
    return row["kinds"][kind] >= (Task(N=4).chance - row["loss"]) / 2


def induction_groups():
    """Return {title: [row of induction.jsonl, ...]} of the recipes."""
    groups = {"main command": [], "with RoPE": [], "AdamW": []}
    for row in load_induction():
        recipe = "with RoPE" if row["positions"] == "rope" else "main command"
        groups["AdamW" if row["optimizer"] == "adamw" else recipe].append(row)
    return {f"{title} (n = {len(rows)})": rows for title, rows in groups.items() if rows}


def induction_table(shown=2):
    """Return a row per kind of read: by how much x_1 rises without it, and who needs it."""
    groups, lines, rows = induction_groups(), [], load_induction()
    kinds = sorted(rows[0]["kinds"], key=lambda kind: -max(row["kinds"][kind] for row in rows))
    named = {kind.replace("->", "reads"): [kind] for kind in kinds[:shown]}
    for title, group in (named | {"any other read": kinds[shown:]}).items():
        line = [title]
        for rows in groups.values():
            rises = [max(row["kinds"][kind] for kind in group) for row in rows]
            lost = [any(needed(row, kind) for kind in group) for row in rows]
            line.append(f"{studies.span(rises)}; {studies.share(lost)}")
        lines.append(line)
    return studies.markdown(["without, in all heads", *groups], *lines)


def last_paths(row):
    """Return [(level, "q -> 1b", gap, longest), ...]: the last path to pass a level of attention,
    how many steps after the one before it, and the longest such gap between any two before."""
    found = []
    for level in LEVELS:
        paths = path_steps(row, level)
        *before, last = [b[0] - a[0] for a, b in itertools.pairwise(paths)]
        found.append((level, paths[-1][2], last, max(before)))
    return found


def page():
    """Return what the page says of the order of symbols and of D's last head."""
    answers, unresolved = count_orders()
    late = [gap > longest for _, _, gap, longest in last_paths(*committed("D"))]
    return [
        f"before an earlier one ({studies.share(not in_order for _, in_order in answers)})",
        f"Left out are {unresolved} in which two come between the same two evaluations",
        f"at {studies.share(late)} such thresholds it is so",
    ]


def write_induction(rows, out):
    """Measure the runs that have checkpoints into induction.jsonl, among the rows of others."""
    file = out / "induction.jsonl"
    measured = studies.rows_by(file, "run")
    for row in rows:
        if row["folder"] and analyze.checkpoints_of(row["folder"]):
            found = measure_run(row)
            measured |= {found["run"]: found} if found else {}
    train.write_file(file, [*measured.values()])
    return file


if __name__ == "__main__":
    studies.command(__file__, __doc__, write_induction)
