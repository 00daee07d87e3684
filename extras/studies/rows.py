"""Runs as rows: a file of one JSON line per run, in place of many run directories.

    python -m extras.studies.rows main out/L12_H1_D3_s*    # into results/runs/main.jsonl

out/L12_H1_D3_s0 is called s0, unless s0 has other settings. A row replaces the one of the same
name. It has, with five significant digits, what config.json and log.jsonl hold, and, if they are
there, circuit.json (report) and emergence.json.
"""

import functools
import json
import re
from argparse import Namespace
from fnmatch import fnmatch
from pathlib import Path

import analyze
import train
from ablate import read_report
from data import command_line
from extras.studies import RESULTS, rows_by


SOLVED = 0.05  # the loss of x_k below which it is solved, and the rise that an ablation must cause
SAME = {"seed", "dtype", "stop_below", "eval_every", "save_every"}  # flags that are no settings


def rounded(value):
    """Return what JSON holds with five significant digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.5g}"))


def row_of(run):
    """Return the row of a run directory."""
    flags, config = train.read_flags(run), train.read_file(run / "config.json")
    name = f"s{flags.seed}" if train.run_name(flags) == run.name else run.name
    row = dict(name=name, config=config, log=rounded(train.read_log(run)))
    for key, file in ("report", "circuit.json"), ("emergence", "emergence.json"):
        if found := read_report(run, file):
            row[key] = rounded(found)
    return row


# ---- what studies read


def load(sources):
    """Return a row for each run of these run directories, files of rows, and tables of sweep.py,
    whose rows have no log and no report, with

    group: the name above the run's
    flags, task: those of the run, each also by its name, but task is their data.Task
    losses, learned: {symbol: its last loss}, {symbol: the step at which it was learned, or None}
    known, solved: the symbols that it knows at its end; whether the last is solved then
    circuit, verdict: whether its circuit is validated; what ablate.py says of it
    settings: ("width=64", ...), the flags that are not the defaults, but those in SAME
    places: at how many places the 1b of a query may stand
    head_dimension: of each head"""
    found = []
    for source in map(Path, sources):
        if source.suffix != ".jsonl":
            rows, group = [row_of(source)], source.absolute().parent.name
        else:
            rows = train.read_file(source)
            group = source.stem if source.stem != "results" else source.parent.name
        for row in rows:
            if "config" not in row:  # of a table
                row |= dict(name=row["run"], config=row.copy(), log=[])
            found.append(completed(row | dict(group=group)))
    return found


def completed(row):
    """Return a row with all that load adds to it."""
    flags = Namespace(**train.DEFAULTS | row["config"])
    task, last = train.task_of(flags), (row["log"] or [row["config"]])[-1]
    row = vars(flags) | dict(report={}, emergence={}) | row | dict(flags=flags, task=task)
    row["dtype"] = row["config"].get("dtype", "unknown")  # of the oldest rows it was not kept
    row["losses"] = {name: last[name] for name in task.target_names if name in last}
    row["learned"] = {name: last.get(f"{name}_learned") for name in row["losses"]}
    if row["log"]:
        row["learned"] = analyze.crossings(row["log"], task)
    row["known"] = [name for name, loss in row["losses"].items() if loss < task.learned_below]
    row["solved"] = row["losses"].get(f"x_{flags.D}", 1) < SOLVED
    row["circuit"] = bool(row["report"].get("validated"))
    row["verdict"] = row["report"].get("verdict", "not searched")
    values = train.values_of(flags) | dict(task=flags.task.rpartition(":")[2])
    changed = [name for name in values if values[name] != train.DEFAULTS[name] and name not in SAME]
    row["settings"] = tuple(f"{name}={values[name]}" for name in changed)
    distractors = re.search(r"places:random(\d+)", flags.task)
    row["places"] = 2 * flags.N + int(distractors[1]) - 1 if distractors else flags.N
    row["head_dimension"] = flags.head_size or flags.width // flags.heads
    return row


def knows(row, k):
    """Return whether a run knows x_k at its end."""
    return f"x_{k}" in row["known"]


@functools.cache
def all_runs():
    """Return the rows of the committed runs: A, B, C, D, and those below results/runs and in the
    table of Figure 4."""
    files = [*sorted(RESULTS.glob("runs/*.jsonl")), RESULTS / "sweep/results.jsonl"]
    return load([*sorted(RESULTS.glob("[ABCD]")), *files])


def committed(pattern):
    """Return the committed rows whose names match: A, main/s0, rope/s?."""
    return [row for row in all_runs() if fnmatch(name_of(row), pattern)]


def name_of(row):
    """Return rope/s4 for a row of runs/rope.jsonl, and A for that of results/A."""
    return row["name"] if row["group"] == "results" else f"{row['group']}/{row['name']}"


def same_run(row, *but):
    """Return the settings and the seed, which a repeat elsewhere shares: it is no further run; or
    the settings without these flags."""
    settings = [text for text in row["settings"] if text.partition("=")[0] not in but]
    return (*settings, row["flags"].seed)


@functools.cache
def continuations():
    """Return {name: that of the run before} of the committed runs that go on from another, that is,
    start from its weights (--init) with its settings, for as many steps as they like."""
    rows, found, but = {row["name"]: row for row in all_runs()}, {}, ("init", "steps")
    for name, row in rows.items():
        before = rows.get(Path(row["init"]).name)
        if before and same_run(before, *but) == same_run(row, *but):
            found[name] = before["name"]
    return found


def main():
    p = command_line("python -m extras.studies.rows", __doc__)
    p.add_argument("group", help="the name of the file, without .jsonl")
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories of train.py")
    p.add_argument("--out", type=Path, default=RESULTS / "runs", help="the folder of the file")
    args = p.parse_args()
    file = args.out / f"{args.group}.jsonl"
    rows = rows_by(file, "name")
    for run in args.run:
        row = row_of(run)
        taken = rows.get(row["name"], row)
        flags = [Namespace(**train.DEFAULTS | each["config"]) for each in (taken, row)]
        if train.run_name(flags[0]) != train.run_name(flags[1]):
            row["name"] = run.name
        rows[row["name"]] = row
    names = sorted(rows, key=lambda name: (len(name), name))  # s10 after s9
    train.write_file(file, [rows[name] for name in names])
    print(f"{file}: {len(rows)} runs")


if __name__ == "__main__":
    main()
