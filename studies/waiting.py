"""How long the plateau lasts: the step at which small models learn x_1.

    python -m studies.waiting --preset waiting --out out/waiting    # trains them, as sweep.py does
    python -m studies.waiting out/waiting

x_1 is learned when a third of its loss on the plateau is gone, and a run ends when half is. One
that ends without is censored: longer than all others in a median, left out of the fits.
"""

import functools
import itertools
import math
import statistics
import sys

from parts import config, theory
from parts.config import Flags
from parts.stats import bootstrap

import matplotlib.pyplot as plt
import torch

import sweep
from data import TASKS, Task, chain, held_out
from studies import command, markdown


BASE = dict(task="chain", N=4, D=1, asked=[1], batch=64, layers=4, circuit="", qk_std=0.02)
WAYS = {  # optimizer, rotary: name and colour
    ("muon", "input"): ("Muon, appended", "tab:blue"),
    ("muon", "qk"): ("Muon, RoPE", "tab:cyan"),
    ("adamw", "input"): ("AdamW, appended", "tab:red"),
    ("adamw", "qk"): ("AdamW, RoPE", "tab:orange"),
}
AXES = {  # what grows in a panel: its label, the points on it by what is drawn at x
    "N": ("chains N, and T = 3N tokens", {N: dict(N=N) for N in (2, 3, 4, 6, 8, 12)}),
    "T": ("tokens T, by distractors: D = 1, 2, 3, 5", {8 * D + 4: dict(D=D) for D in (1, 2, 3, 5)}),
    "batch": ("sequences per step", {size: dict(batch=size) for size in (32, 64, 128, 256, 512)}),
    "layers": ("layers", {layers: dict(layers=layers) for layers in (2, 4, 12)}),
}
PUBLISHED = {"N": {"T$^2$ (2511.01033)": 2, "T$^{0.79}$ N$^{2.25}$ (2505.17863)": 3.04}}
PUBLISHED["T"] = {"T$^2$": 2, "T$^{0.79}$": 0.79}


# ---- the runs


def grid():
    """How long models, most of them small, wait until x_1 is learned: each run ends when half of
    its loss at the plateau is gone."""
    small = f"{sweep.PLAIN} --heads 4 --width 64 --batch 64 --dtype float32"
    small += " --decay 0 --warmup 0 --eval-every 20"
    points = [f"--targets 1 --D {D}" for D in (2, 3, 5)]
    points += [f"--targets 1 --D 2 --task {task}" for task in ("unlinked", "first_step_first")]
    held = "previous", "query", "induction"
    points += [f"--targets 1 --D {D} --circuit {part}" for part in held for D in (1, 2)]
    points += [f"--targets 1 --D {D} --qk-std {std}" for std in (0.05, 0.1, 0.2) for D in (1, 2)]
    points += [f"--D 1 --batch {batch}" for batch in (32, 128, 256, 512)]
    points = {f"--D 1 --N {N}": N for N in (2, 3, 4, 6, 8, 12)} | dict.fromkeys(points, 4)
    groups = []
    for point, N in points.items():
        target = chain(N, 1).lost
        for optimizer, rotary in itertools.product(("muon", "adamw"), ("input", "qk")):
            own = f"{small} {point} --optimizer {optimizer} --rotary {rotary} --steps 2400"
            layers = (4, 2, 12) if point == "--D 1 --N 4" else [4]
            groups.append((f"{own} --target {target:.6g}", layers, 5))

    # three points at the size of the main command, which warms up
    for N, D in (4, 1), (8, 1), (4, 2):
        own = f"--qk-std 0.02 --N {N} --D {D} --targets 1 --eval-every 20"
        groups.append((f"{own} --target {chain(N, 1).lost:.6g}", [12], 3))
    return groups


@functools.cache
def unlinked(N, D):
    """Chains of one step among pairs of nobody."""
    rows = chain(N, D).roles
    own = [role if role.block >= D - 1 else role._replace(symbol=-1) for role in rows]
    return Task(f"unlinked_D={D}", N, tuple(own))


@functools.cache
def first_step_first(N, D):
    """Chains read in the other order."""
    rows = chain(N, D).roles
    own = [role._replace(block=D - 1 - role.block) if role.block < D else role for role in rows]
    return Task(f"first_step_first_D={D}", N, tuple(own))


def part_of_minimal(wanted):
    """The paths of the minimal circuit, in which these layers look for x_1."""
    return lambda *about: [path for path in theory.minimal_circuit(*about) if wanted(path)]


def previous(path):
    return path.layer == 0


def query(path):
    return path.layer == 1 and path.source == (0, 0)


TASKS |= dict(unlinked=unlinked, first_step_first=first_step_first)
theory.CIRCUITS["previous", "chain"] = part_of_minimal(previous)
theory.CIRCUITS["query", "chain"] = part_of_minimal(query)
theory.CIRCUITS["induction", "chain"] = part_of_minimal(lambda path: previous(path) or query(path))
sweep.PRESETS["waiting"] = grid()


# ---- the runs of a point


def facts(folders):
    """The rows of sweeps' tables and of runs, with what is asked for and the wait in steps, or
    None. UserError for a folder that is neither."""
    rows = []
    for folder in folders:
        table = sweep.read_table(folder / "results.jsonl")
        rows += table.values() or [sweep.row_of(config.read_flags(folder))]
    return [
        row | dict(asked=Flags(**row).target_symbols, wait=row.get("x_1_learned")) for row in rows
    ]


def at_point(rows, **changed):
    """The rows that differ from BASE in this, by seed."""
    wanted = BASE | changed
    some = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return sorted(some, key=lambda row: row["seed"])


def waits(rows, way, **changed):
    """{seed: wait} of the runs of one way that differ from BASE in this."""
    some = at_point(rows, optimizer=way[0], rotary=way[1], **changed)
    return {row["seed"]: row["wait"] for row in some}


def on_axis(rows, way, name):
    """{x: {seed: wait}} of the points of one of AXES that have runs."""
    found = {x: waits(rows, way, **changed) for x, changed in AXES[name][1].items()}
    return {x: own for x, own in found.items() if own}


def median(found):
    """Of {seed: wait}, infinite where more than half are censored; None without runs."""
    steps = [math.inf if step is None else step for step in found.values()]
    return statistics.median_low(steps) if steps else None


def cell(found):
    """The median wait, and how many are censored, as text."""
    middle, never = median(found), [*found.values()].count(None)
    if middle is None:
        return ""
    censored = f"{never}/{len(found)} never"
    return censored if middle == math.inf else f"{middle:.0f}" + f" ({censored})" * (never > 0)


# ---- exponents


def exponents(rows, way, name):
    """[exponent, ...], a least-squares line through the logarithms of each seed that learned x_1 at
    every point, and the number of runs that are censored."""
    points = on_axis(rows, way, name)
    censored, slopes = sum([*found.values()].count(None) for found in points.values()), []
    for seed in range(max(map(len, points.values()), default=0)):
        steps = [found.get(seed) for found in points.values()]
        if len(steps) > 2 and None not in steps:
            logs = [[math.log(x) for x in values] for values in (points, steps)]
            slopes.append(statistics.linear_regression(*logs).slope)
    return slopes, censored


def exponent_cell(rows, way, name):
    slopes, censored = exponents(rows, way, name)
    never = f"; {censored} censored" if censored else ""
    if len(slopes) < 2:
        return "".join(f"{slope:.2f}, " for slope in slopes) + f"n={len(slopes)}{never}"
    low, high = bootstrap(torch.tensor(slopes), torch.Generator().manual_seed(0))
    return f"{statistics.fmean(slopes):.2f} [{low:.2f}, {high:.2f}], n={len(slopes)}{never}"


# ---- where the queries look


@functools.cache
@torch.no_grad()
def looks(run):
    """The facts of a run, with its looks, {role: attention}: what the queries give to all tokens of
    a role together, in the head that gives most, at the end."""
    model, flags = config.load(run)
    batch = config.sequences(flags, held_out("validation", 64))
    _, layers = model(batch.inputs, return_patterns=True)
    given, found = torch.stack(layers)[..., -flags.N :, :], {}  # (layers, 64, heads, N, T)
    for role, name in enumerate(flags.problem.names):
        tokens = batch.positions[:, None, None, :, role].expand(*given.shape[:4], -1)
        found[name] = round(given.gather(4, tokens).sum(4).mean((1, 3)).max().item(), 4)
    return facts([run])[0] | dict(looks=found)


def all_looks(folders):
    """Of the runs with D=2 below these whose weights are there."""
    files = [file for folder in folders for file in sorted(folder.glob("*_D2_*/model.pt"))]
    return [looks(file.parent) for file in files]


def looks_table(rows):
    """A row for each order of the pairs and outcome: the median run's attention."""
    body = []
    for name, changed in list(WHY.items())[1:]:
        some = at_point(rows, **changed)
        for outcome, never in ("learned", False), ("never", True):
            found = [row["looks"] for row in some if (row["wait"] is None) == never]
            if found:
                medians = [statistics.median(one[role] for one in found) for role in LOOKED_AT]
                body.append([name, outcome, len(found), *(f"{one:.2f}" for one in medians)])
    return markdown(["", "x_1", "runs", *(f"to all {role}" for role in LOOKED_AT)], *body)


# ---- tables of Markdown


def table(rows, title, lines):
    """A row for each {name: what differs from BASE}, a column for each way; seeds: of each, or of
    all."""
    body = []
    for name, changed in lines.items():
        found = [waits(rows, way, **changed) for way in WAYS]
        seeds = [len(own) for own in found]
        seeds = seeds if len({*seeds}) > 1 else seeds[:1]
        body.append([name, *map(cell, found), ", ".join(map(str, seeds))])
    return markdown([title, *(name for name, _ in WAYS.values()), "seeds"], *body)


def law_table(rows):
    body = [
        [label, *(exponent_cell(rows, way, name) for way in WAYS)]
        for name, (label, _) in AXES.items()
    ]
    return markdown(["exponent in steps of", *(name for name, _ in WAYS.values())], *body)


WHY = {
    "D=1, N=8: 24 tokens": dict(N=8),
    "D=2: 20 tokens": dict(D=2),
    "D=2, read from step 1 on": dict(D=2, task="first_step_first"),
    "D=2, step 2 of other symbols": dict(D=2, task="unlinked"),
}
HELD = {
    f"D={D}, {name}": dict(D=D, circuit=part)
    for D in (1, 2)
    for part, name in (
        ("", "free"),
        ("previous", "1b -> 1a held"),
        ("query", "q -> 1b held"),
    )
}
MAIN = {
    "D=1": dict(batch=128, layers=12),
    "D=1, N=8": dict(N=8, batch=128, layers=12),
    "D=2, x_1 alone": dict(D=2, batch=128, layers=12),
    "D=3, all asked": dict(D=3, asked=[1, 2, 3], batch=128, layers=12),
    "the same, first W_Q, W_K 0.1": dict(D=3, asked=[1, 2, 3], batch=128, layers=12, qk_std=0.1),
}
LOOKED_AT = "1b", "2a"
SCALES = {f"D={D}, {std}": dict(D=D, qk_std=std) for D in (1, 2) for std in (0.02, 0.05, 0.1, 0.2)}


def tables(folders):
    rows = facts(folders)
    several = {"main size": MAIN, "same length": WHY, "attention held": HELD, "scale": SCALES}
    told = [table(rows, title, lines) for title, lines in several.items()]
    return "\n\n".join([law_table(rows), *told, looks_table(all_looks(folders))])


# ---- the figure


def draw(folders, out):
    """waiting.png: the wait against what grows, in logarithms; the exponents that are published are
    lines through the median of the first way. looks.jsonl, where there are weights."""
    rows = facts(folders)
    longest = max(row["steps"] for row in rows)
    size = dict(figsize=(14, 4.8), sharey=True, layout="constrained")
    figure, panels = plt.subplots(1, len(AXES), **size)
    for axes, (name, (label, points)) in zip(panels, AXES.items(), strict=True):
        # every run, those that never learn x_1 above the others, and their medians
        for shift, (way, (called, color)) in enumerate(WAYS.items()):
            found = on_axis(rows, way, name)
            for x, own in found.items():
                steps = [1.3 * longest if step is None else step for step in own.values()]
                aside = [x * (1 + 0.02 * (shift - 1.5))] * len(steps)
                axes.plot(aside, steps, "o", color=color, ms=4, alpha=0.5)
            middles = [min(median(own), 1.3 * longest) for own in found.values()]
            axes.plot([*found], middles, color=color, label=called)

        # what was published, through the first median if there is one
        x, begin = [*points], median(waits(rows, next(iter(WAYS)), **next(iter(points.values()))))
        lines, laws = [], PUBLISHED.get(name, {}) if begin else {}
        for (law, power), style in zip(laws.items(), ("--", ":"), strict=False):
            y = [begin * (one / x[0]) ** power for one in x]
            lines += axes.plot(x, y, style, color="gray", label=f"published: {law}")
        if lines:
            axes.legend(handles=lines, fontsize="small", loc="lower right")
        axes.set(xscale="log", yscale="log", xlabel=label, ylim=(60, 1.6 * longest))
        axes.set_xticks(x, x)
        axes.set_yticks(ticks := [100, 200, 500, 1000, 2000], ticks)
        axes.minorticks_off()
        axes.grid(axis="y", lw=0.3)
        axes.axhspan(1.1 * longest, 1.6 * longest, color="0.92", zorder=-1)
    panels[0].text(2, 1.3 * longest, f"not in {longest} steps", va="center", fontsize="small")
    panels[0].set_ylabel("step at which $x_1$ is learned")
    what = "4 layers of 4 heads, width 64; a mark per run, lines through medians"
    figure.suptitle(f"How long the plateau lasts: {what}", fontsize=11)
    lines = [line for line in panels[0].get_lines() if line.get_label() in dict(WAYS.values())]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(WAYS))
    config.save_figure(figure, out / "waiting.png")
    yield out / "waiting.png"
    if found := all_looks(folders):
        config.write_rows(out / "looks.jsonl", found)
        yield out / "looks.jsonl"


def main():
    if "--preset" in sys.argv:
        sweep.main()
    else:
        command(__file__, __doc__, tables, draw)


if __name__ == "__main__":
    main()
