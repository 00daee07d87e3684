"""In which order runs learned their symbols and formed their paths (Sections 7.2 and 9).

    python -m studies.order results/D results/runs/default/* results/runs/rope/*

A symbol is learned when its error passes below 0.5; a path emerges when its mean attention passes
0.5, of all paths in emergence.json. What is not known of a run is left out of the counts.
"""

import math

from parts import config
from parts.circuit import read_report
from parts.config import Flags
from parts.emergence import emergence_steps, read_emergence, removal_rises

import matplotlib.pyplot as plt
import torch
from matplotlib.markers import TICKDOWN, TICKUP

import sweep
from studies import (
    by_kind,
    command,
    in_order,
    kind_of,
    markdown,
    name_of,
    share,
    spread,
    steps_text,
)


# ---- the induction head of a task


def beside_query_symbol(task):
    """{role: the role beside it that holds the symbol of the query}; of a chain {1b: 1a}."""
    asked, beside = task.roles[0].symbol, {}
    keys = [number for number, role in enumerate(task.roles) if number and role.symbol == asked]
    for key in keys:
        for number, role in enumerate(task.roles):
            if number != key and role.block == task.roles[key].block:
                beside[number] = key
    return beside


def induction_head(when, task):
    """[upper path, lower path] of the induction head that emerged first, None for what did not; the
    lower one is in a layer below. when: {path: step}, first step first."""
    beside = beside_query_symbol(task)
    for upper in when:
        if upper.source == (0, 0) and not upper.target.offset and upper.target.role in beside:
            ends = upper.target, (beside[upper.target.role], 0)
            lower = [path for path in when if path[2:] == ends and path.layer < upper.layer]
            return [upper, lower[0] if lower else None]
    return [None, None]


# ---- the facts of one run


def what_came_first(emergence, learned, task):
    """What the order says in which paths emerged, a dict without what does not apply."""
    # the paths that emerged, the first one first, and those of them between slots
    when = {path: step for path, step in emergence_steps(emergence).items() if step is not None}
    when = {path: when[path] for path in sorted(when, key=when.get)}
    block = [role.block for role in task.roles]
    across = [path for path in when if block[path.source.role] != block[path.target.role]]
    found = {}
    if None not in learned.values():
        in_time = [path for path in when if when[path] <= max(learned.values())]
        first = [path for path in in_time if path.layer == min(path.layer for path in in_time)]
        if first:
            found["previous_token"] = all(to_the_token_before(path, task) for path in first)
    if not across:
        return found

    # the induction head, and the first path between slots that belongs to none
    (upper, lower), beside = induction_head(when, task), beside_query_symbol(task)
    others = [path for path in across if path.source.role or path.target.role not in beside]
    following = others[0] if others else None
    until = when.get(following, math.inf)
    comes_first = upper == across[0] and when.get(lower, math.inf) < until
    told = [lower, upper, following] if upper == across[0] else across[:1]
    found |= dict(first_paths={path: when[path] for path in told if path}, head_first=comes_first)
    if lower:
        found |= dict(upper_step=when[upper], lower_step=when[lower])

    # what can only be said of an induction head that came first
    if comes_first:
        found["upper_first"] = when[upper] < when[lower]
        removed = removal_rises(emergence, [emergence.paths[upper].without])
        rises = [of_symbol[0][-1] for of_symbol in removed.values()]
        found["later_lost"] = max(rises[1:]) > task.lost if rises[1:] else None
        if following:
            complete = max(when[lower], when[upper])
            found["between"] = any(complete <= step <= until for step in emergence.steps)
    return found


def to_the_token_before(path, task):
    """Whether the source attends to the token right before it."""
    if path.source.role == path.target.role:
        return path.source.offset == path.target.offset + 1
    source, target = task.roles[path.source.role], task.roles[path.target.role]
    apart = source.place + path.source.offset - target.place - path.target.offset
    return source.block == target.block and apart == 1


def facts(run):
    """What is compared of a run, a dict without what is not known."""
    flags, log, emergence = config.read_flags(run), config.read_log(run), read_emergence(run)
    learned = config.crossings(log, flags)
    found = dict(
        run=run,
        flags=flags,
        kind=kind_of(flags),
        task=flags.problem,
        steps=log[-1]["step"],
        mse=log[-1].get("confirmed", log[-1]["val"]),
        learned=learned,
        ends={name: log[-1][name] for name in flags.target_names},
        in_order=in_order(list(learned.values())),
        report=read_report(run),
    )
    if emergence:
        found |= what_came_first(emergence, learned, flags.problem)
    return found


# ---- the tables


CLAIMS = {
    "in_order": "symbols in order",
    "head_first": "an induction head first",
    "between": "a checkpoint between it and the next path",
    "upper_first": "its upper path before its lower",
    "later_lost": "a later symbol lost without it at the end",
    "previous_token": "first layer: previous token",
}


def waits(group):
    """The steps from each symbol to the next, of the runs that learned all."""
    whole = [[*fact["learned"].values()] for fact in group]
    apart = [torch.tensor(steps).diff().tolist() for steps in whole if None not in steps]
    return ", ".join(map(spread, zip(*apart, strict=True)))


def claims_table(every, *names):
    """A row per kind, a column for each of these CLAIMS, or all."""
    rows, names = [], names or [*CLAIMS]
    told = "in_order" in names
    for kind, group in by_kind(every).items():
        counts = [share([fact.get(name) for fact in group]) for name in names]
        apart = [waits(group), spread([fact["steps"] for fact in group])]
        rows.append([kind, len(group), *(apart if told else []), *counts])
    claims = [CLAIMS[name] for name in names]
    apart = ["steps from symbol to symbol", "ends at step"] if told else []
    return markdown(["kind", "runs", *apart, *claims], *rows)


def runs_table(every, paths=True):
    """A row per run; with its first paths, or without."""
    rows = []
    for fact in every:
        told = []
        for path, step in fact.get("first_paths", {}).items():
            ends = f"{path.source.name(fact['task'])} -> {path.target.name(fact['task'])}"
            told.append(f"layer {path.layer + 1}, {ends}: {step:.0f}")
        when = steps_text(fact["learned"].values())
        ends = ", ".join(f"{name} {loss:.2g}" for name, loss in fact["ends"].items())
        row = [name_of(fact["run"]), when, fact["steps"], ends, f"{fact['mse']:.4f}"]
        rows.append(row + ["; ".join(told)] * paths)
    heads = ["run", "learned at step", "ends at", "errors there", "MSE"]
    return markdown(heads + ["first paths between slots, at step"] * paths, *rows)


def tables(folders):
    every = [facts(folder) for folder in folders]
    return f"{runs_table(every)}\n\n{claims_table(every)}"


def everywhere(folder):
    """Counts over all runs below a folder and the tables of its sweeps, one run per kind and seed:
    {"several", "in_order", "resolved", "alone", "lost"}. Several: were asked for all symbols and
    learned two or more; in order; resolved: no two of them between the same two evaluations; alone:
    were asked for x_D alone, from the start; lost: ended above 0.7."""
    rows, seen, alone = [], {}, {}
    for table in sorted(folder.glob("*/results.jsonl")):
        rows += sweep.read_table(table).values()
    for file in sorted(folder.rglob("config.json")):
        flags = config.read_flags(file.parent)
        rows += [] if getattr(config, "mixture", False) else [sweep.row_of(flags)]
    for row in rows:
        if row["task"] != "chain" or row["targets"] or row["init"]:
            continue
        flags = Flags(**row)
        steps, run = (
            [row[f"{name}_learned"] for name in flags.target_names],
            (kind_of(flags), flags.seed),
        )
        if not flags.ic:
            alone.setdefault(run, row["val"] > 0.7)
        elif not flags.circuit and (order := in_order(steps)) is not None:
            between = [math.ceil(step / flags.eval_every) for step in steps if step is not None]
            seen.setdefault(run, (order, len({*between}) == len(between)))
    orders, resolved = zip(*seen.values(), strict=True)
    found = dict(several=len(seen), in_order=sum(orders), resolved=sum(resolved))
    return found | dict(alone=len(alone), lost=sum(alone.values()))


# ---- the figure


def draw(folders, out):
    """order.png: when each run learned each symbol and formed its induction head."""
    # a line per run, with room above each kind for its name
    every = [facts(folder) for folder in folders]
    groups, lines, names, at = by_kind(every), [], [], 0
    for name, group in groups.items():
        names.append((at, f"{name} (n = {len(group)})"))
        lines += [(at + number, fact) for number, fact in enumerate(group, 1)]
        at += len(group) + 1.3

    # a colour per symbol, a tick for each path of the induction head; the names of keys in facts
    marks, last = {}, max(fact["task"].symbols for fact in every) - 1
    for k in range(1, last + 1):
        color = config.symbol_color(k, last)
        marks[f"x_{k}"] = f"$x_{{{k}}}$ learned", dict(marker="o", s=32, color=color)
    ticks = dict(s=60, color="tab:red", zorder=3)
    marks["upper_step"] = "upper path of an induction head", dict(marker=TICKUP, **ticks)
    marks["lower_step"] = "lower path", dict(marker=TICKDOWN, **ticks)
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.17 * at), layout="constrained")
    for key, (label, style) in marks.items():
        seen = [((fact | fact["learned"]).get(key), line) for line, fact in lines]
        seen = [point for point in seen if point[0]]
        if seen:
            axes.scatter(*zip(*seen, strict=True), label=f"{label} (n = {len(seen)})", **style)

    # the names of kinds and runs, the axis
    for line, name in names:
        axes.text(0.01, line, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    seeds = [f"seed {fact['flags'].seed}" for _, fact in lines]
    axes.set_yticks([line for line, _ in lines], seeds, fontsize=7)
    axes.set(xscale="log", xlabel="training step", ylim=(at - 0.3, -0.7))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_title("When each run learned what: errors below 0.5, attention above 0.5", fontsize=11)
    axes.grid(lw=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    config.save_figure(figure, out / "order.png")
    yield out / "order.png"


def main():
    command(__file__, __doc__, tables, draw)


if __name__ == "__main__":
    main()
