"""The circuits that ablate.py found in many runs, and whether a second search finds them again.

    python -m extras.studies.circuits results/runs/default.jsonl            # prints the tables
    python -m extras.studies.circuits results/[ABCD] --out results/figures  # searches again

circuits.jsonl has a row for each run with weights and a circuit: paths, their number; again, how
many paths a search on other sequences finds, and how many of ours are among them.
"""

import ablate
import train
from ablate import paths_in
from extras.studies import command, markdown, rows_by, span
from extras.studies.rows import RESULTS, committed, name_of

import torch


OLD = "ae492b7"  # the last commit with the search of the reports in results/runs
GROUPS = {
    "main command": "default/s*",
    "AdamW with RoPE": "rope/s[0-9]*",
    "one layer, 16 heads": "one_layer/L1_H16_*",
    "one layer, 5 and 8 heads": "one_layer/L1_H[58]_*",
    "conditional retrieval": "conditional/*",
    "three layers, shuffled blocks": "shuffled/*",
}
FRESH = {"main command": "default_", "one layer, 16 heads": "one_layer_"}  # of names in fresh.jsonl


# ---- a second search


@torch.no_grad()
def search_again(row):
    """Return the row of circuits.jsonl of a run directory with weights."""
    model, flags = train.load(row["folder"])
    paths, threshold = paths_in(row["report"]).keys(), row["report"]["threshold"]
    other = paths_in(ablate.find_circuit(model, flags.replace(seed=10**6), threshold)).keys()
    return dict(run=name_of(row), paths=len(paths), again=[len(other), len(paths & other)])


def draw(rows, out):
    """Put into circuits.jsonl the runs that have weights and a circuit, the others stay."""
    file = out / "circuits.jsonl"
    kept = rows_by(file, "run")
    for row in rows:
        if row["folder"] and row["report"].get("paths"):
            kept[name_of(row)] = search_again(row)
            train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


def again_table():
    """Return a row per run that was searched a second time."""
    lines = []
    for row in train.read_file(RESULTS / "figures/circuits.jsonl"):
        found, shared = row["again"]
        lines.append([row["run"], row["paths"], found, shared])
    return markdown(["run", "paths", "of a second search", "shared with it"], *lines)


# ---- tables of the reports


def mean_of(loss):
    """Return the mean of a loss in a report; older ones have [mean, low, high] instead."""
    return loss[0] if isinstance(loss, list) else loss


def circuits_table(rows):
    """Return a row per run that has a report."""
    lines = []
    for row in (row for row in rows if row["report"]):
        paths = paths_in(row["report"])
        stars = sum(path.star for path in paths)
        lines.append([name_of(row), row["report"]["verdict"], len(paths), stars])
    return markdown(["run", "report", "paths", "stars"], *lines)


def seeds(name):
    """Return (in sample, out of sample): the committed runs of a group that have a report, those
    on which the old search was fitted, and those that it searched once after its freeze."""
    rows = [row for row in committed(GROUPS[name]) if row["report"]]
    out = [row for row in rows if row["report"].get("search") == "c79df16"]
    return [row for row in rows if row not in out], out


def counted(rows):
    """Return "9 / 0 / 1 / 0 of 10": validated under both ablations, under the mean alone, not
    validated, not searched since the model has not learned every symbol."""
    kinds = "validated under both", "validated under mean", "not validated", "not searched"
    reports = [row["report"]["verdict"] for row in rows]
    counts = [sum(text.startswith(kind) for text in reports) for kind in kinds]
    return f"{' / '.join(map(str, counts))} of {len(rows)}" if rows else "none"


def both(rows):
    """Return "9 of 10", how many circuits are validated under both ablations."""
    return f"{sum('both' in row['report']['verdict'] for row in rows)} of {len(rows)}"


def sizes(rows):
    """Return the ranges of the numbers of paths and stars, of validated circuits."""
    circuits = [paths_in(row["report"]) for row in rows if row["report"]["validated"]]
    stars = [sum(path.star for path in paths) for paths in circuits]
    return span([*map(len, circuits)], "{}"), span(stars, "{}")


def answer():
    """Return in how many runs a circuit is validated."""
    fitted, fresh = seeds("main command")
    rope, more = seeds("AdamW with RoPE")
    return f"""\
A circuit is validated under both ablations in {both(fitted)} seeds of the main command on which the
search was fitted, and in {both(fresh)} seeds searched once after it was frozen. With AdamW and RoPE
it is in {both(rope)} and {both(more)}. Conditional retrieval has none in
{len(seeds("conditional retrieval")[0])} runs."""


def groups_table():
    """Return a row per group of committed runs: how the old search fared in and out of sample."""
    lines = []
    for name in GROUPS:
        fitted, fresh = seeds(name)
        numbers = len({row["flags"].seed for row in fitted + fresh})
        lines.append([name, numbers, counted(fitted), counted(fresh), *sizes(fitted + fresh)])
    return markdown(["runs", "seeds", "in sample", "out of sample", "paths", "stars"], *lines)


def fresh_runs(prefix):
    """Return the runs of runs/fresh.jsonl of these names, [] without the file."""
    if not (RESULTS / "runs/fresh.jsonl").exists():
        return []
    return committed(f"fresh/{prefix}*")


def fresh_table():
    """Return a row per group of runs trained after the search of this commit was frozen, all out of
    sample; "" before there are any."""
    lines = []
    for name, prefix in FRESH.items():
        if rows := fresh_runs(prefix):
            lines.append([name, len(rows), counted(rows), *sizes(rows)])
    head = "out of sample, this search", "seeds", "circuits", "paths", "stars"
    return markdown(head, *lines) if lines else ""


def compiled_table():
    """Return a row per compiled program: at which noise on the weights the search finds the circuit
    that is known, and what it says at others."""
    programs, lines = {}, []
    for row in train.read_file(RESULTS / "figures/compiled.jsonl"):
        programs.setdefault(row["program"], []).append(row)
    for program, rows in programs.items():
        cells = {}
        for row in rows:
            said = "exact" if row["exact"] else row["verdict"].partition(":")[0]
            cells.setdefault(said, []).append(f"{row['noise']:g}")
        found = "; ".join(f"{said} at {', '.join(noise)}" for said, noise in cells.items())
        lines.append([program, rows[0]["shape"], rows[0]["paths"], found])
    return markdown(["program", "layers x heads", "paths", "at noise on the weights"], *lines)


def papers_test():
    """Return how many committed circuits pass steps 5 and 6 of Appendix E."""
    rows = [row for name in GROUPS for part in seeds(name) for row in part]
    rows = [row for row in rows if row["report"]["validated"]]
    tests = [row["report"]["paper"] for row in rows if "paper" in row["report"]]
    held, passed = sum(test["held"] < 0.05 for test in tests), sum(test["passed"] for test in tests)
    return f"""\
Of {len(rows)} validated circuits {len(rows) - len(tests)} have stars, and were not tested. Of the
other {len(tests)}, {held} pass step 5 and {passed} pass both steps."""


if __name__ == "__main__":
    command(__file__, __doc__, circuits_table, draw)
