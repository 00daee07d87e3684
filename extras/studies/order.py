"""In which order runs learn their symbols, and what x_1 needs when it is learned (Sections 7.2, 9).

    python -m extras.studies.order results/runs/default.jsonl          # prints the tables
    python -m extras.studies.order out/L12_H1_D3_s* --out results/figures    # measures

Runs with checkpoints are measured into induction.jsonl, a row for the first checkpoint of each that
knows x_1, with a loss below 0.5: run, step, loss of x_1, and kinds, {"q -> 1b": by how much it
rises if all heads lose what they read so, ...}, of all pairs of roles.
"""

import itertools
import math
import re

import analyze
import train
from ablate import PatchedModel, Path, paths_in
from data import Task, held_out, progress
from extras import studies
from extras.studies.rows import (
    RESULTS,
    committed,
    flags_of,
    group_by_settings,
    name_of,
    replaced,
    settings_text,
)
from extras.studies.theory import may_attend


HEADS = "q -> 1b", "1b -> 1a"  # what an induction head and its previous-token head read
EMERGED = "default/*", "adamw/*", "last/*", "decay/*", "cleaning/muon_e*", "rope/s?", "D"
LEVELS = 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9  # of attention, from which on a path has emerged
SEQUENCES = 64  # held out, for induction.jsonl


# ---- the order of symbols


def count(answers):
    """Return "3 of 5 (2 seeds)", of [(flags, bool), ...]: few seeds make many runs."""
    numbers = len({flags.seed for flags, _ in answers})
    text = f"{sum(answer for _, answer in answers)} of {len(answers)}"
    return f"{text} ({numbers} seed{'s' * (numbers > 1)})" if answers else ""


def asks_all(flags):
    """Return whether a run asks for all symbols, from fresh weights."""
    return flags.ic and not (flags.targets or flags.init)


def all_chains():
    """Return [(flags, {symbol: step or None}, last loss), ...] of all chain runs, and of sweeps."""
    runs = [(row["flags"], row["learned"], row["log"][-1]["val"]) for row in committed("*")]
    for row in studies.load_rows(studies.committed("*")):
        flags = flags_of(row)
        names = train.task_of(flags).target_names
        learned = {name: row[f"{name}_learned"] for name in names}
        runs.append((flags, learned, row["val"]))
    return [run for run in runs if run[0].task == "chain"]


def count_orders():
    """Return ([(flags, in order), ...], unresolved): of the runs that ask for all symbols and learn
    several, an answer per settings and seed, True if all repeats, and runs of other steps, are in
    order; and how many of them have two symbols between the same two evaluations, so that their
    order is not known."""
    answers, unresolved = {}, set()
    for flags, learned, _ in all_chains():
        steps = [step for step in learned.values() if step is not None]
        if asks_all(flags) and len(steps) > 1:
            key = settings_text(replaced(flags, steps=1, stop_below=0)), flags.seed
            if len({math.ceil(step / flags.eval_every) for step in steps}) < len(steps):
                unresolved.add(key)
            else:
                ordered = steps == sorted(steps) == [*learned.values()][: len(steps)]
                answers[key] = flags, ordered and answers.get(key, (flags, True))[1]
    return [*answers.values()], len(unresolved - answers.keys())


def order_claim():
    """Return the sentence on all runs."""
    answers, unresolved = count_orders()
    return f"""\
**Symbols are learned in order in {count(answers)}**: each seed of each setting counts once, of the
runs of chains in `runs/`, `sweep/`, `longer/` and A to D that ask for all symbols, from fresh
weights, and learn two or more. Left out are {unresolved} in which two symbols fall between the same
evaluations, and `depth_width`."""


def ended(row):
    """Return whether a run ended by itself, and was not stopped by hand before."""
    return row["steps"] == row["flags"].steps or row["log"][-1]["val"] < row["flags"].stop_below


def order_table(rows=None):
    """Return a row per setting of runs that ended by themselves: when they learn, and end."""
    lines, rows = [], rows or committed("default/*", "[ABC]", "adamw/*")
    for name, group in group_by_settings([*filter(ended, rows)]).items():
        steps = [[*row["learned"].values()] for row in group]
        learned = [row for row in steps if None not in row]
        gaps = [[b - a for a, b in itertools.pairwise(row)] for row in learned]
        gaps = ", ".join(map(studies.spread, zip(*gaps, strict=True)))
        first = studies.spread([row[0] for row in learned]) if learned else ""
        ends = studies.spread([row["steps"] for row in group])
        seeds = f"{len(group)} ({len({row['flags'].seed for row in group})})"
        lines.append([name, seeds, len(learned), first, gaps, ends])
    head = "flags", "runs (seeds)", "learn all", "x_1 at step", "steps to the next", "end at"
    return studies.markdown(head, *lines)


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
        patched = PatchedModel(model, task, task.batch(held_out("emergence", n)))
        loss = patched.baseline[..., 0].mean().item()
        if loss < task.learned_below:
            kinds = {}
            names, readable = [*task.roles], may_attend(task, flags.causal)
            for reader, read in readable.fill_diagonal_(False).nonzero().tolist():
                kind = f"{names[reader]} -> {names[read]}"
                paths = [Path(*head, *kind.split(" -> ")) for head in patched.corrupted_reads]
                rise = patched.knock_out(paths)[..., 0].mean().item() - loss
                kinds[kind] = round(rise, 4)
            row = dict(run=name_of(row), rotary=flags.rotary, optimizer=flags.optimizer)
            return row | dict(step=int(file.stem), loss=round(loss, 4), kinds=kinds)


def load_induction():
    return train.read_file(RESULTS / "figures/induction.jsonl")


def needed(row, kind):
    """Return whether half of what was learned of x_1, beside the average of four, is lost."""
    average, _ = Task(N=4).plateaus[-1]
    return row["kinds"][kind] >= (average - row["loss"]) / 2


def induction_groups():
    """Return {title: [row of induction.jsonl, ...]} of the recipes."""
    groups = {"main command": [], "with RoPE": [], "AdamW": []}
    for row in load_induction():
        recipe = "with RoPE" if row["rotary"] == "qk" else "main command"
        groups["AdamW" if row["optimizer"] == "adamw" else recipe].append(row)
    return {f"{title} (n = {len(rows)})": rows for title, rows in groups.items() if rows}


def induction_table(shown=5):
    """Return a row per kind of read: by how much x_1 rises without it, and who needs it."""
    groups, lines, rows = induction_groups(), [], load_induction()
    kinds = sorted(rows[0]["kinds"], key=lambda kind: -max(row["kinds"][kind] for row in rows))
    named = {kind: [kind] for kind in kinds[:shown]} | {"largest of others": kinds[shown:]}
    for title, group in named.items():
        line = [title]
        for rows in groups.values():
            rises = [max(row["kinds"][kind] for kind in group) for row in rows]
            lost = sum(any(needed(row, kind) for kind in group) for row in rows)
            line.append(f"{studies.span(rises)}; {lost} of {len(rows)}")
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


def d_claim():
    """Return when D learns its symbols, and how late its last path emerges, by the threshold."""
    [row] = committed("D")
    learned, lasts = studies.steps_text(row["learned"].values()), last_paths(row)
    gaps = [gap for _, _, gap, longest in lasts if gap > longest]
    return f"""\
D (one run) learns x_1 to x_4 at steps {learned}. At {len(gaps)} of {len(lasts)} thresholds from
{LEVELS[0]} to {LEVELS[-1]} its last path comes after the longest gap between two paths, of
{min(gaps):.0f} to {max(gaps):.0f} steps."""


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
    studies.command(__file__, __doc__, order_table, write_induction)
