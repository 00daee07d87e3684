"""Runs as rows: a file of one JSON line per run, in place of many run directories.

    python -m extras.studies.rows default out/L12_H1_D3_s*    # into results/runs/default.jsonl

A row replaces the one of the same name; out/L12_H1_D3_s0 is called s0. It is a dict, with five
significant digits:

    name, config: of the run directory, and what its config.json holds
    log: the rows of log.jsonl
    report: of circuit.json, if it is there
    emergence: of emergence.json, if it is there: the steps, and the mean attention of each path
"""

import functools
import itertools
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
from train import DEFAULTS, task_of, values_of


KEPT = "layer", "head", "reader", "read", "mean"  # of a path in emergence.json
SAME = {"seed", "dtype", "stop_below", "eval_every", "save_every"}  # settings are all other flags


def flags_of(config):
    """Return the flags of a run from its config.json, or from a row that has them."""
    return Namespace(**(DEFAULTS | config))


def replaced(flags, **changes):
    """Return a copy of flags with these changes."""
    return Namespace(**(vars(flags) | changes))


def rounded(value):
    """Return what JSON holds with five significant digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.5g}"))


def row_of(run):
    """Return the row of a run directory."""
    flags, config = train.read_flags(run), train.read_file(run / "config.json")
    name = f"s{flags.seed}" if train.run_name(flags) == run.name else run.name
    row = dict(name=name, config=config, log=rounded(train.read_log(run)))
    if report := read_report(run):
        row["report"] = rounded(report)
    if emergence := train.read_file(run / "emergence.json", {}):
        paths = [{key: path[key] for key in KEPT} for path in emergence["paths"]]
        row["emergence"] = dict(steps=emergence["steps"], paths=rounded(paths))
    return row


# ---- what studies read


def load(sources):
    """Return a row, a dict, for each run of these run directories and files of rows. It has what
    this file says above, what completed() adds, and
        folder, group: the run directory, None for a row of a file; the name above the run's
        steps: the last step
        mse: the last validation loss, on the most sequences"""
    found = {}
    for source in map(Path, sources):
        many = source.suffix == ".jsonl"
        rows = train.read_file(source) if many else [row_of(source)]
        for row in (row for row in rows if "config" in row):  # a study may keep others there
            row["folder"] = None if many else source
            row["group"] = source.stem if many else source.absolute().parent.name
            if "/" in row["name"]:  # of others.jsonl, which holds small groups
                row["group"], row["name"] = row["name"].split("/")
            flags, last = flags_of(row["config"]), row["log"][-1]
            flags.out = row["folder"] or Path(row["name"])  # names it in figures
            row["steps"], row["mse"] = last["step"], last.get("confirmed", last["val"])
            learned = analyze.crossings(row["log"], task_of(flags))
            losses = {name: last[name] for name in learned}
            found[row["group"], row["name"]] = completed(row, flags, losses, learned)
    return [*found.values()]


def completed(row, flags, losses, learned):
    """Return a row with
    flags, task: those of the run, and their data.Task
    losses, learned: {symbol: its last loss}, {symbol: the step at which it was learned, or
        None}
    known: the symbols that it knows at its end
    report, emergence, circuit: {} where there is none; whether its circuit is validated
    settings: ("width=64", ...), the flags that are not the defaults, but those in SAME
    places: at how many places the 1b of a query may stand
    head_dimension: of each head"""
    row = dict(report={}, emergence={}) | row
    task = task_of(flags)
    distractors = re.search(r"places:random(\d+)", flags.task)
    row |= dict(flags=flags, task=task, losses=losses, learned=learned)
    row["known"] = [name for name in losses if losses[name] < task.learned_below]
    row["circuit"] = bool(row["report"].get("validated"))
    row["settings"] = settings_text(flags)
    row["places"] = 2 * flags.N + int(distractors[1]) - 1 if distractors else flags.N
    row["head_dimension"] = flags.head_size or flags.width // flags.heads
    return row


def settings_text(flags):
    """Return ("width=64", ...), the flags that are not the defaults, but those in SAME."""
    texts = []
    for name, value in values_of(flags).items():
        if name not in SAME and value != DEFAULTS[name]:
            texts.append(f"{name}={value.rpartition(':')[2] if name == 'task' else value}")
    return tuple(texts)


@functools.cache
def all_committed():
    """Return the rows of the run directories A, B, C, D and of all files below results/runs."""
    return load([*sorted(RESULTS.glob("[ABCD]")), *sorted(RESULTS.glob("runs/*.jsonl"))])


@functools.cache
def all_runs():
    """Return a row for each committed training: also for those in the tables of sweep.py and in
    depth_width.jsonl, which have neither a log nor a report."""
    runs = [*all_committed()]
    for file in sorted(RESULTS.glob("*/results.jsonl")):
        for row in train.read_file(file):
            flags, kept = flags_of(row), dict(name=row["run"], group=file.parent.name)
            names = task_of(flags).target_names
            losses = {name: row[name] for name in names}
            learned = {name: row[f"{name}_learned"] for name in names}
            runs.append(completed(kept, flags, losses, learned))
    for row in train.read_file(RESULTS / "runs/depth_width.jsonl"):
        kept = dict(name=row["run"], group="depth_width", how=row.get("how"))
        losses = {name: row[name] for name in row if name.startswith("x_")}
        learned = dict(zip(losses, row.get("learned", []), strict=False))  # some rows lack it
        runs.append(completed(kept, flags_of_short(row), losses, learned))
    return runs


def flags_of_short(row):
    """Return the flags of a row of depth_width.jsonl; other: "--task random20" or the like."""
    other = dict(itertools.pairwise(row["other"].split()))  # {"--task": "random20"}
    flags = {name: row[name] for name in ("layers", "heads", "N", "D", "seed", "steps", "init")}
    flags |= dict(mlp=row["other"] != "--no-mlp", eval_every=100)
    flags["positions"] = other.get("--positions", "appended")
    flags["head_size"] = int(other.get("--head-size", 32))
    flags["task"] = {None: "chain", "shuffled": "extras.studies.tables:Shuffled"}.get(
        other.get("--task"), f"extras.studies.places:{other.get('--task')}"
    )
    return flags_of(flags)


def committed(*patterns):
    """Return the committed rows whose names match, in this order: A, default/s0, rope/s?."""
    rows = [(name_of(row), row) for row in all_committed()]
    found = [row for pattern in patterns for name, row in rows if fnmatch(name, pattern)]
    if not found:
        raise LookupError(f"{RESULTS.absolute()} holds no run called {' or '.join(patterns)}")
    return found


def name_of(row):
    """Return rope/s4 for a row of runs/rope.jsonl, and A for that of results/A."""
    return row["name"] if row["group"] == "results" else f"{row['group']}/{row['name']}"


def once(rows):
    """Return the first row of each settings and seed: a repeat elsewhere is no further run."""
    found = {}
    for row in rows:
        found.setdefault((row["settings"], row["flags"].seed), row)
    return [*found.values()]


def main():
    p = command_line("python -m extras.studies.rows", __doc__)
    p.add_argument("group", help="the name of the file, without .jsonl")
    p.add_argument("run", type=Path, nargs="+", help="run directories of train.py")
    p.add_argument("--out", type=Path, default=RESULTS / "runs", help="the folder of the file")
    args = p.parse_args()
    file = args.out / f"{args.group}.jsonl"
    rows = rows_by(file, "name")
    for row in map(row_of, args.run):
        row["name"] = row["name"].removeprefix(f"{args.group}_")  # results/default_s0 is s0
        rows[row["name"]] = row
    names = sorted(rows, key=lambda name: (len(name), name))  # s10 after s9
    train.write_file(file, [rows[name] for name in names])
    print(f"{file}: {len(rows)} runs")


if __name__ == "__main__":
    main()
