"""What of the implicit curriculum is needed: runs asked for different symbols, side by side.

    python -m studies.curriculum results/runs/curriculum/D3*

Of a run that began with --init the runs that it began with are stages of the same kind, and their
steps count.
"""

import re
from pathlib import Path

from parts import UserError, config

import matplotlib.pyplot as plt

from studies import by_kind, command, kind_of, markdown, share, spread


# ---- the facts of one run


def stages(folder):
    """[folder, ...] of a run and of those that it began with, the first one first. UserError if one
    is not there."""
    found = [Path(folder)]
    while init := config.read_flags(found[0]).init:
        beside = found[0].parent / Path(init).name  # they may have been moved together
        found.insert(0, Path(init) if Path(init).exists() else beside)
    return found


def what_is_asked(flags):
    """x_1, x_3; or "one of x_1, x_3"."""
    symbols = ", ".join(flags.target_names)
    return f"one of {symbols}" if getattr(config, "mixture", False) else symbols


def facts(folder):
    """What is compared, a dict. learned: {k: the step at which x_k passed below 0.5, of all stages
    together, or None}; last: {k: its loss at the end} of those asked for in the last stage."""
    learned, before, ends, kind, labels = {}, 0, [], [], []
    for stage in stages(folder):
        flags, log = config.read_flags(stage), config.read_log(stage)
        for name, step in config.crossings(log, flags).items():
            if learned.get(int(name[2:])) is None:
                learned[int(name[2:])] = None if step is None else before + step
        before += log[-1]["step"]
        ends.append(before)
        labels.append(what_is_asked(flags))
        kind += [f"stage {len(ends)}: {text}" for text in ("", *kind_of(flags.replace(init="")))]
    size = f"{flags.layers} layers x {flags.heads} head{'s' * (flags.heads > 1)}"
    return dict(
        flags=flags,
        kind=tuple(kind),
        label="; then ".join(labels),
        problem=f"{flags.problem.title}, {size}",
        learned=dict(sorted(learned.items())),
        last={k: log[-1][f"x_{k}"] for k in flags.target_symbols},
        ends=ends,
    )


# ---- the table


def cell(group, k):
    """How many runs of a kind hold x_k at the end, with an interval, and when they learned it."""
    if k not in group[0]["last"]:
        return "" if k not in group[0]["learned"] else "then not asked"
    held = [fact for fact in group if fact["last"][k] < fact["flags"].problem.learned]
    steps = [fact["learned"][k] for fact in held if fact["learned"][k] is not None]
    when = f", step {spread(steps)}" if steps else ""
    return share([fact in held for fact in group]) + when


def tables(folders):
    """A line of Markdown per kind."""
    groups, rows = by_kind(map(facts, folders)).values(), []
    several = len({group[0]["problem"] for group in groups}) > 1
    symbols = sorted({k for group in groups for fact in group for k in fact["learned"]})
    for group in groups:
        row = [group[0]["problem"]] * several + [group[0]["label"]]
        row += [cell(group, k) for k in symbols]
        rows.append(row)
    learned = [f"x_{k} below 0.5" for k in symbols]
    return markdown(["problem"] * several + ["asked for", *learned], *rows)


def without_a_rung(folders):
    """(learned, runs): of the runs that were asked, from the start, for a symbol without every one
    before it, how many learned such a symbol; one run per setting and seed."""
    learned = []
    for folder in folders:
        flags, log = config.read_flags(folder), config.read_log(folder)
        ladder = [k for k, asked in enumerate(flags.target_symbols, 1) if k == asked]
        above = [f"x_{k}" for k in flags.target_symbols if k not in ladder]
        if above and not flags.init:
            learned.append(any(log[-1][name] < flags.problem.learned for name in above))
    return sum(learned), len(learned)


# ---- the figure


def draw(folders, out):
    """curriculum.png: when each run learned each symbol, a band per kind and a line per run; at the
    right edge what was never learned. UserError for runs of several problems or sizes."""
    groups = by_kind(map(facts, folders)).values()
    if len({group[0]["problem"] for group in groups}) > 1:
        raise UserError("these runs are of several problems or sizes: draw each apart")

    # a line per run, from its first step to its last
    every = [fact for group in groups for fact in group]
    shape = dict(figsize=(10, 1.8 + 0.16 * len(every) + 0.12 * len(groups)), layout="constrained")
    figure, axes = plt.subplots(**shape)
    most, y, ticks, names = max(fact["ends"][-1] for fact in every), 0, [], []
    learned, lost = {}, {}  # {k: [(x, y), ...]}
    for group in groups:
        ticks.append(y + (len(group) - 1) / 2)
        label = re.sub(r"x_(\d+)", r"$x_{\1}$", group[0]["label"])
        names.append(f"{label} (n = {len(group)})")
        for fact in group:
            axes.plot([0, fact["ends"][-1]], [y, y], color="lightgray", lw=1, zorder=0)
            axes.plot(fact["ends"][:-1], [y] * (len(fact["ends"]) - 1), "|", color="gray", ms=7)
            for k, step in fact["learned"].items():
                if step is None or fact["last"].get(k, 0) >= fact["flags"].problem.learned:
                    lost.setdefault(k, []).append((1.05 * most + 0.012 * most * (k - 1), y))
                else:
                    learned.setdefault(k, []).append((step, y))
            y += 1
        y += 0.8

    # a colour per symbol
    symbols = sorted({*learned, *lost})
    for k in symbols:
        color, label = config.symbol_color(k, symbols[-1]), f"$x_{{{k}}}$ below 0.5"
        for points, style in (learned, dict(label=label)), (lost, dict(mfc="none")):
            x, line = [x for x, _ in points.get(k, [])], [y for _, y in points.get(k, [])]
            axes.plot(x, line, "o", ms=5, color=color, **style)
    axes.axvspan(1.03 * most, 1.1 * most, color="0.92", zorder=-1)
    axes.text(1.065 * most, -1.1, "not at\nthe end", ha="center", va="bottom", fontsize="small")
    axes.set_yticks(ticks, names)
    staged = any(len(fact["ends"]) > 1 for fact in every)
    label = "training step" + ", of all stages together (tick: the next begins)" * staged
    axes.set(xlabel=label, ylim=(y - 0.3, -1))
    title = "What is learned when other symbols are asked for"
    axes.set_title(f"{title}\n({every[0]['problem']})")
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    config.save_figure(figure, out / "curriculum.png")
    yield out / "curriculum.png"


def main():
    command(__file__, __doc__, tables, draw)


if __name__ == "__main__":
    main()
