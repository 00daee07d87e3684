"""How long the plateau lasts: the steps that small models take to learn x_1.

    python -m studies.waiting --preset waiting --out out/waiting    # trains them, as sweep.py does
    python -m studies.waiting out/waiting

x_1 is learned when a third of its loss on the plateau is gone, and a run ends when half is. A run
that ends before is censored: in a median it counts as longer than all others.
"""

import functools
import itertools
import math
import statistics

from parts import theory
from parts.config import Flags

import studies
import sweep
from data import TASKS, Task, chain
from studies import command, markdown


BASE = dict(task="chain", N=4, D=1, symbols=[1], batch=64, layers=4, circuit="", qk_std=0.02)
SETTINGS = {  # optimizer, rotary: name
    ("muon", "input"): "Muon, appended",
    ("muon", "qk"): "Muon, RoPE",
    ("adamw", "input"): "AdamW, appended",
    ("adamw", "qk"): "AdamW, RoPE",
}


# ---- the runs


@functools.cache
def unlinked(N, D):
    """The chains of step 1 alone, after pairs that belong to no chain."""
    roles = [role._replace(symbol=-1) if role.block < D - 1 else role for role in chain(N, D).roles]
    return Task(f"unlinked_D={D}", N, tuple(roles))


@functools.cache
def first_step_first(N, D):
    """Chains whose pairs are read from step 1 to step D, then the queries."""
    order = [*range(D - 1, -1, -1), D]
    roles = [role._replace(block=order[role.block]) for role in chain(N, D).roles]
    return Task(f"first_step_first_D={D}", N, tuple(roles))


def previous(D, layers, causal):
    """The paths of the previous-token head of the minimal circuit."""
    return theory.minimal_circuit(D, 1, causal)


def query(D, layers, causal):
    """The path q -> 1b of its induction head."""
    paths = theory.minimal_circuit(D, 2, causal)
    return [path for path in paths if path.layer == 1 and path.source.role == 0]


def induction(D, layers, causal):
    return previous(D, layers, causal) + query(D, layers, causal)


PARTS = dict(previous=previous, query=query, induction=induction)
theory.CIRCUITS |= {(name, "chain"): paths for name, paths in PARTS.items()}
TASKS |= dict(unlinked=unlinked, first_step_first=first_step_first)


def grid():
    """Return the groups of the preset, most of them of small models."""
    small = f"{sweep.PLAIN} --heads 4 --width 64 --batch 64 --dtype float32 --steps 2400"
    small += " --decay 0 --warmup 0 --eval-every 20"
    points = [f"--targets 1 --D {D}" for D in (2, 3, 5)]
    points += [f"--targets 1 --D 2 --task {task}" for task in ("unlinked", "first_step_first")]
    for D in 1, 2:
        points += [f"--targets 1 --D {D} --circuit {part}" for part in PARTS]
        points += [f"--targets 1 --D {D} --qk-std {std}" for std in (0.05, 0.1, 0.2)]
    points += [f"--D 1 --batch {batch}" for batch in (32, 128, 256, 512)]
    points = {f"--D 1 --N {N}": N for N in (2, 3, 4, 6, 8, 12)} | dict.fromkeys(points, 4)
    groups = []
    for (point, N), setting in itertools.product(points.items(), SETTINGS):
        layers = (4, 2, 12) if point == "--D 1 --N 4" else [4]
        flags = f"{small} {point} --optimizer {setting[0]} --rotary {setting[1]}"
        groups.append((f"{flags} --target {chain(N, 1).lost:.6g}", layers, 5))

    # three points at the size of the main command, which warms up
    for N, D in (4, 1), (8, 1), (4, 2):
        flags = f"--qk-std 0.02 --N {N} --D {D} --targets 1 --eval-every 20"
        groups.append((f"{flags} --target {chain(N, 1).lost:.6g}", [12], 3))
    return groups


sweep.PRESETS["waiting"] = grid()


def load_rows(folders):
    """Return the rows of sweeps and runs, with their target symbols and the length of their plateau
    in steps, infinite if it is censored."""
    rows = studies.load_rows(folders)
    for row in rows:
        steps = row.get("x_1_learned")
        row["plateau"] = math.inf if steps is None else steps
        row["symbols"] = Flags(**row).target_symbols
    return rows


def plateaus(rows, setting, **changes):
    """Return the plateau lengths of the runs of a setting that differ from BASE in these."""
    wanted = BASE | dict(optimizer=setting[0], rotary=setting[1]) | changes
    rows = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return sorted(row["plateau"] for row in rows)


# ---- tables


SIZES = {  # what differs from BASE
    **{f"N={N}, {3 * N} tokens": dict(N=N) for N in (2, 3, 4, 6, 8, 12)},
    **{f"batch {batch}": dict(batch=batch) for batch in (32, 64, 128, 256, 512)},
    **{f"{layers} layers": dict(layers=layers) for layers in (2, 4, 12)},
}
DISTRACTORS = {
    "D=1, N=8: 24 tokens": dict(N=8),
    "D=2: 20 tokens": dict(D=2),
    "D=3: 28 tokens": dict(D=3),
    "D=5: 44 tokens": dict(D=5),
    "D=2, read from step 1 on": dict(D=2, task="first_step_first"),
    "D=2, step 2 of other symbols": dict(D=2, task="unlinked"),
}
FROZEN = {
    f"D={D}, {name}": dict(D=D, circuit=part)
    for D in (1, 2)
    for part, name in (("", "free"), ("previous", "1b -> 1a frozen"), ("query", "q -> 1b frozen"))
}
SCALES = {f"D={D}, {std}": dict(D=D, qk_std=std) for D in (1, 2) for std in (0.02, 0.05, 0.1, 0.2)}
MAIN = {
    "D=1": dict(batch=128, layers=12),
    "D=1, N=8": dict(N=8, batch=128, layers=12),
    "D=2, x_1 alone": dict(D=2, batch=128, layers=12),
    "D=3, all symbols": dict(D=3, symbols=[1, 2, 3], batch=128, layers=12),
    "the same, first W_Q, W_K 0.1": dict(D=3, symbols=[1, 2, 3], batch=128, layers=12, qk_std=0.1),
}


def cell(steps):
    """Return the median of plateau lengths as text, and how many are censored; of one or two
    lengths all."""
    texts = ["never" if step == math.inf else f"{step:.0f}" for step in steps]
    if len(steps) < 3:
        return " and ".join(texts)
    middle, never = statistics.median(steps), texts.count("never")
    censored = f"{never} of {len(steps)} never"
    return censored if middle == math.inf else f"{middle:.0f}" + f" ({censored})" * (never > 0)


def table(rows, points):
    """Return a row for each point, a column for each setting; runs: of each, or of all."""
    lines = []
    for name, changes in points.items():
        columns = [plateaus(rows, setting, **changes) for setting in SETTINGS]
        counts = [len(steps) for steps in columns]
        counts = counts if len({*counts}) > 1 else counts[:1]
        lines.append([name, *map(cell, columns), ", ".join(map(str, counts))])
    return markdown(["median plateau, in steps", *SETTINGS.values(), "runs"], *lines)


def tables(folders):
    rows, parts = load_rows(folders), (SIZES, DISTRACTORS, FROZEN, SCALES, MAIN)
    return "\n\n".join(table(rows, points) for points in parts)


if __name__ == "__main__":
    command(__file__, __doc__, tables)
