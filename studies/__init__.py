"""Questions put to many runs, one script each: it prints Markdown and draws into --out.

    python -m studies.order results/runs/default/*

Runs that differ in nothing but the seed are of one kind.
"""

import statistics
from pathlib import Path

from parts import command_line, program
from parts.config import ROWS, SETTINGS
from parts.stats import wilson


ASIDE = {"seed", "dtype", "eval_every", "save_every"}  # do not make another kind of run


def command(script, about, tables, draw=None):
    """The command line of a study: tables(folders) is the text to print, draw(folders, out) yields
    the files that it draws into the folder out. A run named twice counts once."""
    name = f"python -m studies.{Path(script).stem}"
    with program(name):
        p = command_line(name, about)
        p.add_argument("run", type=Path, nargs="+", help="run directories of train.py")
        if draw:
            where = dict(type=Path, default=Path("out"))
            p.add_argument("--out", **where, help="folder of the figures (default: out)")
        args = p.parse_args()
        folders = list({folder.resolve(): folder for folder in args.run}.values())
        print(tables(folders))
        if draw:
            args.out.mkdir(parents=True, exist_ok=True)
            for file in draw(folders, args.out):
                print(file)


# ---- which runs


def committed(*patterns):
    """The runs below results/ of these patterns, in order: what the pages tell of."""
    found = [file for pattern in patterns for file in sorted(Path("results").glob(pattern))]
    return [file for file in found if (file / "config.json").exists()]


def name_of(run):
    """rope/s4, or A: below results/ the name and the set, else the name alone."""
    return f"{run.parent.name}/{run.name}" if run.parent.parent.name == "runs" else run.name


def kind_of(flags):
    """(text, ...) the flags of a run that are not the defaults, but for those in ASIDE."""
    values = {name: getattr(flags, name) for name in SETTINGS if name not in ASIDE}
    return tuple(f"{name}={value}" for name, value in values.items() if value != ROWS[name].default)


def by_kind(facts):
    """{name: [fact, ...]} of dicts with "kind" and "flags", each by seed; the name says what the
    kinds do not share."""
    facts, groups = list(facts), {}
    shared = set.intersection(*(set(fact["kind"]) for fact in facts)) if facts else set()
    for fact in facts:
        name = ", ".join(text for text in fact["kind"] if text not in shared)
        groups.setdefault(name or ", ".join(fact["kind"]) or "the defaults", []).append(fact)
    return {
        name: sorted(group, key=lambda one: one["flags"].seed) for name, group in groups.items()
    }


def in_order(steps):
    """Whether symbols were learned in order, the last ones perhaps never; None for fewer than two
    that were."""
    reached = [step for step in steps if step is not None]
    if len(reached) < 2:
        return None
    return reached == sorted(reached) and reached == steps[: len(reached)]


# ---- Markdown


def markdown(head, *rows):
    """A table of rows of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def share(known):
    """Of how many it is true, with a 95% Wilson interval from three on, as text; known: [bool or
    None, ...]."""
    known = [one for one in known if one is not None]
    if len(known) < 3:
        return f"{sum(known)} of {len(known)}" if known else ""
    low, high = wilson(sum(known), len(known))
    return f"{sum(known)} of {len(known)} [{low:.2f}, {high:.2f}]"


def spread(steps):
    """437 (359-674), with a dash: the median and the range, if there are several."""
    text = f"{statistics.median(steps):.0f}"
    several = f" ({min(steps):.0f}\N{EN DASH}{max(steps):.0f})"
    return text + several * (len(steps) > 1)


def steps_text(steps):
    """347, 419, never: of what was learned."""
    return ", ".join("never" if step is None else f"{step:.0f}" for step in steps)
