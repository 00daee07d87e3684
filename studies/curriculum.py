"""Which part of the implicit curriculum is needed: runs with different target symbols.

    python -m studies.curriculum results/runs/curriculum/D3_targets*

Of a run with --init, the runs that it started from are its earlier stages, and their steps count.
"""

import re
from pathlib import Path

from parts import UserError, config

import matplotlib.pyplot as plt

from studies import command, config_of, group_by_config, markdown, share, spread


def stages(folder):
    """Return [folder, ...] of a run and of those that it started from, the first one first."""
    folders = [Path(folder)]
    while init := config.read_flags(folders[0]).init:
        beside = folders[0].parent / Path(init).name  # they may have been moved together
        folders.insert(0, Path(init) if Path(init).exists() else beside)
    return folders


def load_row(folder):
    """Return what is compared of a run, a dict. learned: {k: the step at which x_k was learned, of
    all stages together, or None if the run does not know it at its end}; ends: the last step of
    each stage."""
    learned, ends, configs, labels = {}, [0], [], []
    for stage in stages(folder):
        flags, log = config.read_flags(stage), config.read_log(stage)
        steps = config.crossings(log, flags).values()
        for k, step in zip(flags.target_symbols, steps, strict=True):
            if learned.get(k) is None:
                learned[k] = None if step is None else ends[-1] + step
        ends.append(ends[-1] + log[-1]["step"])
        labels.append(", ".join(flags.target_names))
        names = ("", *config_of(flags.replace(init="")))
        configs += [f"stage {len(labels)}: {name}" for name in names]
    for k in flags.target_symbols:
        if log[-1][f"x_{k}"] >= flags.problem.learned:
            learned[k] = None
    size = f"{flags.layers} layers x {flags.heads} head{'s' * (flags.heads > 1)}"
    return dict(
        flags=flags,
        config=tuple(configs),
        targets="; then ".join(labels),
        problem=f"{flags.problem.title}, {size}",
        learned=dict(sorted(learned.items())),
        ends=ends[1:],
    )


# ---- tables


def cell(group, k):
    """Return how many runs of a group know x_k at the end, and when they learned it."""
    if k not in group[0]["flags"].target_symbols:
        return "no target" if k in group[0]["learned"] else ""
    steps = [row["learned"][k] for row in group]
    known = [step for step in steps if step is not None]
    when = f", step {spread(known)}" if known else ""
    return share([step is not None for step in steps]) + when


def tables(folders):
    """Return a row per config."""
    groups = group_by_config(map(load_row, folders)).values()
    symbols = sorted({k for group in groups for k in group[0]["learned"]})
    lines = [[group[0]["targets"], *(cell(group, k) for k in symbols)] for group in groups]
    return markdown(["target symbols", *(f"x_{k} below 0.5" for k in symbols)], *lines)


def learned_despite_gap(folders):
    """Return {symbol that is no target: [bool, ...]}: of the runs that have, from their start, a
    target symbol above this gap (the lowest one of the run), whether they learned such a symbol."""
    answers = {}
    for row in map(load_row, folders):
        symbols = row["flags"].target_symbols
        gap = min({*range(1, 2 + len(symbols))} - {*symbols})
        above = [k for k in symbols if k > gap]
        if above and not row["flags"].init:
            learned = [row["learned"][k] is not None for k in above]
            answers.setdefault(gap, []).append(any(learned))
    return answers


# ---- the figure


def draw(folders, out):
    """Draw when each run learned each symbol that it knows at its end, a line per run."""
    groups = group_by_config(map(load_row, folders)).values()
    if len({group[0]["problem"] for group in groups}) > 1:
        raise UserError("these runs are of several problems or sizes: draw each apart")

    # a line per run, a tick where a stage ends
    lines, ticks, names, y = [], [], [], 0
    for group in groups:
        ticks.append(y + (len(group) - 1) / 2)
        targets = re.sub(r"x_(\d+)", r"$x_{\1}$", group[0]["targets"])
        names.append(f"{targets} (n = {len(group)})")
        lines += [(y + number, row) for number, row in enumerate(group)]
        y += len(group) + 0.8
    shape = dict(figsize=(10, 1.8 + 0.16 * y), layout="constrained")
    figure, axes = plt.subplots(**shape)
    for line, row in lines:
        stages = [0, *row["ends"]]
        axes.plot(stages, [line] * len(stages), "-|", color="lightgray", zorder=0)

    # a colour per symbol
    last = max(k for _, row in lines for k in row["learned"])
    for k in range(1, last + 1):
        known = [(row["learned"].get(k), line) for line, row in lines]
        known = [(step, line) for step, line in known if step is not None]
        label, color = f"$x_{{{k}}}$ below 0.5 (n = {len(known)})", config.symbol_color(k, last)
        axes.scatter(*zip(*known, strict=True) if known else ([], []), color=color, label=label)
    axes.set_yticks(ticks, names)
    axes.set(xlabel="training step, of all stages together", ylim=(y - 0.3, -1))
    axes.set_title(f"What is learned with other target symbols\n({lines[0][1]['problem']})")
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    config.save_figure(figure, out / "curriculum.png")
    return out / "curriculum.png"


if __name__ == "__main__":
    command(__file__, __doc__, tables, draw)
