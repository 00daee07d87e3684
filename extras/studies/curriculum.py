"""Which part of the implicit curriculum is needed: runs with different target symbols.

    python -m extras.studies.curriculum results/runs/curriculum/D3_targets*

Of a run with --init, the runs that it started from are its earlier stages, and their steps count.
"""

from pathlib import Path

import train
from extras import studies
from extras.studies import command, config_of, group_by_config, markdown, share, spread


def stages(folder):
    """Return [folder, ...] of a run and of those that it started from, the first one first."""
    folders = [Path(folder)]
    while init := train.read_flags(folders[0]).init:
        beside = folders[0].parent / Path(init).name  # they may have been moved together
        folders.insert(0, Path(init) if Path(init).exists() else beside)
    return folders


def load_row(folder):
    """Return what is compared of a run, a dict. learned: {symbol: its step, of all stages together,
    or None if it is not known at the end of its last stage}; ends: 0 and each stage's last step."""
    learned, ends, configs, targets = {}, [0], [], []
    for stage in map(studies.load_row, stages(folder)):
        for name, step in stage["learned"].items():
            if learned.get(name) is None:
                learned[name] = None if step is None else ends[-1] + step
            if name not in stage["known"]:
                learned[name] = None
        flags = stage["flags"]
        ends.append(ends[-1] + stage["steps"])
        targets.append(", ".join(flags.target_names))
        names = ("", *config_of(flags.replace(init="")))
        configs += [f"stage {len(targets)}: {name}" for name in names]
    return dict(
        flags=flags,
        config=tuple(configs),
        targets="; then ".join(targets),
        learned=dict(sorted(learned.items())),
        ends=ends,
    )


# ---- tables


def cell(group, name):
    """Return how many runs of a group know a symbol at the end, and when they learned it."""
    if name not in group[0]["flags"].target_names:
        return "no target" if name in group[0]["learned"] else ""
    steps = [row["learned"][name] for row in group]
    known = [step for step in steps if step is not None]
    when = f", step {spread(known)}" if known else ""
    return share([step is not None for step in steps]) + when


def tables(folders):
    """Return a row per train."""
    groups = group_by_config(map(load_row, folders)).values()
    names = sorted({name for group in groups for name in group[0]["learned"]})
    lines = [[group[0]["targets"], *(cell(group, name) for name in names)] for group in groups]
    return markdown(["target symbols", *(f"{name} below 0.5" for name in names)], *lines)


def learned_despite_gap(folders):
    """Return {symbol that is no target: [bool, ...]}: of the runs that have, from their start, a
    target symbol above this gap (the lowest one of the run), whether they learned such a symbol."""
    answers = {}
    for row in map(studies.load_row, folders):
        symbols = row["flags"].target_symbols
        gap = min({*range(1, 2 + len(symbols))} - {*symbols})
        above = {f"x_{k}" for k in symbols if k > gap}
        if above and not row["flags"].init:
            answers.setdefault(gap, []).append(bool(above & {*row["known"]}))
    return answers


if __name__ == "__main__":
    command(__file__, __doc__, tables)
