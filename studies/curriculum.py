"""What of the implicit curriculum is needed: runs asked for different symbols, side by side.

    python curriculum.py results/curriculum/D3*  # prints Markdown, draws curriculum.png beside
    python curriculum.py results/curriculum/D*   # several D: draws depths.png, steps against D

Runs that differ in nothing but the seed are one kind. Of a run that began with --init the runs that
it began with are stages of the same kind, and their steps count.
"""

import re
import statistics
from pathlib import Path

from parts import runs
from parts.flags import SETTINGS, command_line
from parts.intervals import wilson

import matplotlib
import matplotlib.pyplot as plt


REGIMES = {  # what is asked: in words that fit every D, its colour
    "all": ("all of $x_1, ..., x_D$", "#009E73"),
    "mixture": ("one of them, at random", "#0072B2"),
    "last": ("$x_D$ alone", "#D55E00"),
}
OF_A_KIND = [name for name in SETTINGS if name not in ("seed", "init", "dtype")]


# ---- the facts of one run


def stages(folder):
    """[folder, ...] of a run and of those that it began with, the first one first. ValueError with
    one line if one is not there."""
    found = [Path(folder)]
    while init := runs.read_flags(found[0]).init:
        beside = found[0].parent / Path(init).name  # they may have been moved together
        found.insert(0, Path(init) if Path(init).exists() else beside)
        if len(found) > 100:
            raise ValueError(f"{folder} began with itself: correct its config.json")
    return found


def what_is_asked(flags):
    """x_1, x_3; or "one of x_1, x_3"."""
    symbols = ", ".join(f"x_{k}" for k in flags.asked)
    return f"one of {symbols}" if flags.mixture else symbols


def regime(flags):
    """Which of REGIMES; None for some of the symbols."""
    if flags.targets or flags.init or flags.task != "chain":
        return None
    if flags.mixture:
        return "mixture"
    return "all" if flags.ic else "last"


def facts(folder):
    """What is compared, a dict. learned: {k: the step at which x_k passed below 0.5, of all stages
    together, or None}; last: {k: its loss at the end} of those asked for in the last stage."""
    learned, before, ends, kind, labels = {}, 0, [], [], []
    for stage in stages(folder):
        flags, log = runs.read_flags(stage), runs.read_log(stage)
        for name, step in runs.crossings(log).items():
            if learned.get(int(name[2:])) is None:
                learned[int(name[2:])] = None if step is None else before + step
        before += log[-1]["step"]
        ends.append(before)
        labels.append(what_is_asked(flags))
        kind.append(str([getattr(flags, name) for name in OF_A_KIND]))
    last = {int(name[2:]): log[-1][name] for name in log[-1] if name[:2] == "x_"}
    size = f"{flags.layers} layers x {flags.heads} head{'s' * (flags.heads > 1)}"
    return dict(
        D=flags.D,
        regime=regime(flags),
        kind=tuple(kind),
        label="; then ".join(labels),
        problem=f"{flags.problem.title}, {size}",
        learned=dict(sorted(learned.items())),
        last=last,
        ends=ends,
    )


def by_kind(folders):
    """[[facts, ...], ...] the runs of each kind, in the order given."""
    groups = {}
    for folder in folders:
        fact = facts(folder)
        groups.setdefault(fact["kind"], []).append(fact)
    return list(groups.values())


# ---- the table


def cell(group, k):
    """How many runs of a kind hold x_k at the end, with an interval, and when they learned it."""
    if k not in group[0]["last"]:
        return "not asked" if k not in group[0]["learned"] else "not asked at the end"
    held = [fact for fact in group if fact["last"][k] < 0.5]
    low, high = wilson(len(held), len(group))
    steps = [fact["learned"][k] for fact in held if fact["learned"][k] is not None]
    when = f", step {statistics.median(steps):.0f}" if steps else ""
    when += f" ({min(steps):.0f} to {max(steps):.0f})" if len(steps) > 1 else ""
    return f"{len(held)} of {len(group)} [{low:.2f}, {high:.2f}]{when}"


def table(groups):
    """A line of Markdown per kind."""
    symbols = sorted({k for group in groups for fact in group for k in fact["learned"]})
    heads = ["problem", "asked for", "runs", "steps", *(f"x_{k} below 0.5" for k in symbols)]
    lines = [f"| {' | '.join([*heads, 'MSE at the end'])} |", "|---" * (len(heads) + 1) + "|"]
    for group in groups:
        ends = [fact["ends"][-1] for fact in group]
        means = [statistics.fmean(fact["last"].values()) for fact in group]
        row = [group[0]["problem"], group[0]["label"], len(group)]
        row.append(f"{min(ends)} to {max(ends)}" if len({*ends}) > 1 else ends[0])
        row += [cell(group, k) for k in symbols]
        row.append(f"{min(means):.3f} to {max(means):.3f}")
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


# ---- the figure


def draw_curricula(groups, file):
    """When each run learned each symbol, a band per kind and a line per run; at the right edge what
    was never learned."""
    # a line per run, from its first step to its last
    every = [fact for group in groups for fact in group]
    shape = dict(figsize=(10, 1.8 + 0.16 * len(every) + 0.12 * len(groups)), layout="constrained")
    figure, axes = plt.subplots(**shape)
    most, y, ticks, names = max(fact["ends"][-1] for fact in every), 0, [], []
    learned, lost = {}, {}  # {k: [(x, y), ...]}
    for group in groups:
        first = y
        for fact in group:
            axes.plot([0, fact["ends"][-1]], [y, y], color="lightgray", lw=1, zorder=0)
            axes.plot(fact["ends"][:-1], [y] * (len(fact["ends"]) - 1), "|", color="gray", ms=7)
            for k, step in fact["learned"].items():
                if step is None or fact["last"].get(k, 0) >= 0.5:
                    lost.setdefault(k, []).append((1.05 * most + 0.012 * most * (k - 1), y))
                else:
                    learned.setdefault(k, []).append((step, y))
            y += 1
        ticks.append((first + y - 1) / 2)
        label = re.sub(r"x_(\d+)", r"$x_{\1}$", group[0]["label"])
        names.append(f"{label} (n = {len(group)})")
        y += 0.8

    # a colour per symbol
    symbols = sorted({*learned, *lost})
    for k in symbols:
        color, label = runs.symbol_color(k, symbols[-1]), f"$x_{{{k}}}$ below 0.5"
        for points, style in (learned, dict(label=label)), (lost, dict(mfc="none")):
            x, line = [x for x, _ in points.get(k, [])], [y for _, y in points.get(k, [])]
            axes.plot(x, line, "o", ms=5, color=color, **style)
    axes.axvspan(1.03 * most, 1.1 * most, color="0.92", zorder=-1)
    axes.text(1.065 * most, -1.1, "not at\nthe end", ha="center", va="bottom", fontsize="small")
    axes.set_yticks(ticks, names)
    axes.set(xlabel="training step, of all stages together", ylim=(y - 0.3, -1))
    title = "What is learned when other symbols are asked for"
    axes.set_title(f"{title}\n({every[0]['problem']}; tick: next stage)")
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    runs.save_figure(figure, file)


def draw_depths(groups, file):
    """How many steps it takes to learn x_D, against D: a dot per run, a triangle at the last step
    of one that did not."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    depths = sorted({group[0]["D"] for group in groups})
    for number, (name, (words, color)) in enumerate(REGIMES.items()):
        mine = [fact for group in groups for fact in group if fact["regime"] == name]
        seen = dict.fromkeys(depths, 0)
        for fact in mine:
            D, step = fact["D"], fact["learned"][fact["D"]]
            x = depths.index(D) + 0.2 * (number - 1) + 0.04 * (seen[D] - 1)
            y, mark = (fact["ends"][-1], "^") if step is None else (step, "o")
            axes.plot(x, y, mark, color=color, mfc=color if mark == "o" else "none")
            seen[D] += 1
        axes.plot([], [], "o", color=color, label=f"{words} (n = {len(mine)})")
    axes.plot([], [], "k^", mfc="none", label="not learned when it was ended")
    axes.set_xticks(range(len(depths)), depths)
    axes.set(xlabel="D, steps of the chain", ylabel="training step at which $x_D$ is below 0.5")
    axes.set(xlim=(-0.5, len(depths) - 0.5), ylim=0)
    axes.set_title("What is asked decides whether the last symbol is learned")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    runs.save_figure(figure, file)


# ---- the command line


def main():
    p = command_line("curriculum.py", __doc__)
    p.add_argument("run", type=Path, nargs="+", help="run directories of train.py")
    folders = p.parse_args().run
    matplotlib.use("Agg")
    try:
        groups, folder = by_kind(folders), folders[0].parent
        print(table(groups))
        if len({group[0]["D"] for group in groups}) > 1:
            draw_depths(groups, folder / "depths.png")
            print(folder / "depths.png")
            return
        if len({group[0]["problem"] for group in groups}) > 1:
            raise ValueError("these runs are of several problems or sizes: draw each apart")
        draw_curricula(groups, folder / "curriculum.png")
        print(folder / "curriculum.png")
    except (OSError, ValueError) as error:
        p.error(error)


if __name__ == "__main__":
    main()
