"""Questions put to many runs, one script each: it prints Markdown and draws into --out.

    python -m extras.studies.order results/runs/default/*

A study that needs its own tasks, circuits or presets registers them when it is imported.
"""

import statistics
import sys
from pathlib import Path

import analyze
import sweep
import train
from data import command_line, program
from extras.studies.stats import wilson
from train import DEFAULTS, SETTINGS


NOT_CONFIG = {"seed", "dtype", "eval_every", "save_every"}  # runs that differ in these compare


def command(script, description, tables, draw=None):
    """Run the command line of a study: tables(folders) returns the text to print, draw(folders,
    out) draws a figure into the folder out and returns its path. A run that is named twice counts
    once. With --preset, train the study's own runs as sweep.py does."""
    if "--preset" in sys.argv:
        return sweep.main()
    name = f"python -m extras.studies.{Path(script).stem}"
    with program(name):
        p = command_line(name, description)
        p.add_argument("run", type=Path, nargs="+", help="run directories of train.py")
        if draw:
            default = Path("out")
            p.add_argument("--out", type=Path, default=default, help="for figures (default: out)")
        args = p.parse_args()
        folders = list({folder.resolve(): folder for folder in args.run}.values())
        print(tables(folders))
        if draw:
            args.out.mkdir(parents=True, exist_ok=True)
            print(draw(folders, args.out))


# ---- which runs


def committed(*patterns):
    """Return the folders of runs and sweeps below results/ that match these patterns, in order."""
    folders = [run for pattern in patterns for run in sorted(Path("results").glob(pattern))]
    files = "config.json", "results.jsonl"
    return [folder for folder in folders if any((folder / file).exists() for file in files)]


def load_row(run):
    """Return what most studies compare of a run, a dict. learned: {symbol: step or None}; known:
    the symbols that it knows at its end."""
    flags, log = train.read_flags(run), train.read_log(run)
    last, learned = log[-1], analyze.crossings(log, flags)
    known = [name for name in learned if last[name] < flags.problem.learned_below]
    row = dict(run=run, flags=flags, config=config_of(flags), log=log, steps=last["step"])
    return row | dict(learned=learned, known=known, mse=last.get("confirmed", last["val"]))


def load_rows(folders):
    """Return the rows of these sweeps and runs, as in the table of a sweep, without failures."""
    rows = []
    for folder in folders:
        table = sweep.read_table(folder / "results.jsonl")
        rows += table.values() or [sweep.row_of(train.read_flags(folder))]
    return [row for row in rows if not row["error"]]


def name_of(run):
    """Return rope/s4 for results/runs/rope/s4, and A for results/A."""
    return f"{run.parent.name}/{run.name}" if run.parent.parent.name == "runs" else run.name


def config_of(flags):
    """Return ("width=64", ...), the flags of a run that are not the defaults. Runs of one config
    differ in no more than the seed."""
    values = {name: getattr(flags, name) for name in SETTINGS if name not in NOT_CONFIG}
    return tuple(f"{name}={value}" for name, value in values.items() if value != DEFAULTS[name])


def group_by_config(rows):
    """Return {name: [row, ...]} of dicts with "config" and "flags", by seed within a group. A name
    leaves out what all configs share."""
    rows, groups = list(rows), {}
    shared = set.intersection(*(set(row["config"]) for row in rows)) if rows else set()
    for row in rows:
        name = ", ".join(text for text in row["config"] if text not in shared)
        groups.setdefault(name or ", ".join(row["config"]) or "the defaults", []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: row["flags"].seed)
    return groups


# ---- Markdown


def markdown(head, *rows):
    """Return a table of rows of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def share(answers):
    """Return "7 of 9 [0.45, 0.94]", the number of True with a 95% Wilson interval from three on;
    answers: [bool or None, ...], where None is left out."""
    answers = [answer for answer in answers if answer is not None]
    if not answers:
        return ""
    text = f"{sum(answers)} of {len(answers)}"
    low, high = wilson(sum(answers), len(answers))
    return text + f" [{low:.2f}, {high:.2f}]" * (len(answers) > 2)


def spread(steps):
    """Return "437 (359-674)", with a dash: the median and the range; of two values both."""
    if len(steps) == 2:
        return f"{min(steps):.0f} and {max(steps):.0f}"
    text = f"{statistics.median(steps):.0f}"
    return text + f" ({min(steps):.0f}\N{EN DASH}{max(steps):.0f})" * (len(steps) > 2)


def steps_text(steps):
    """Return "347, 419, never", where None stands for never."""
    return ", ".join("never" if step is None else f"{step:.0f}" for step in steps)
