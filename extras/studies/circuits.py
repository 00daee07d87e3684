"""The circuits that ablate.py found in many runs, and whether a second search finds them again.

    python -m extras.studies.circuits results/[ABCD] --out results/figures

circuits.jsonl has a row for each run with weights and a circuit: its number of paths; again, how
many a search on other sequences finds, and how many both have.
"""

from collections import defaultdict

import ablate
import train
from ablate import paths_in
from extras.studies import RESULTS, command, markdown, rows_by
from extras.studies.rows import name_of


READS = [  # of which kinds, which token, what it reads, what it gains
    ("1b -> 1a, 2b -> 2a, 3b -> 3a", "1b, 2b, 3b", "1a, 2a, 3a", "the symbol by which it is found"),
    ("q -> 1b", "query", "1b", "B"),
    ("2b -> 3b", "2b", "3b", "D, ahead"),
    ("q -> 2b", "query", "2b", "C, and D with it"),
    ("1b -> 2b", "1b", "2b", "C, ahead"),
    ("q -> 3b", "query", "3b", "D"),
]
SIX = {kind for kinds, *_ in READS[:4] for kind in kinds.split(", ")}  # of pointer doubling


def draw(rows, out):
    """Search the runs that have weights and a circuit again, on other sequences, and put them into
    circuits.jsonl, in which all others stay."""
    file = out / "circuits.jsonl"
    kept = rows_by(file, "run")
    for row in (row for row in rows if row["folder"] and row["report"].get("paths")):
        model, task, _ = train.load(row["folder"])
        task.seed = 10**6
        paths = paths_in(row["report"]).keys()
        other = paths_in(ablate.find_circuit(model, task)).keys()
        again = len(other), len(paths & other)
        kept[name_of(row)] = dict(run=name_of(row), paths=len(paths), again=again)
        train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


def searched_again():
    """Return for which runs a second search finds the same circuit."""
    again = train.read_file(RESULTS / "figures/circuits.jsonl")
    same = [row["run"] for row in again if {row["paths"]} == {*row["again"]}]
    other = [row["run"] for row in again if row["run"] not in same]
    found = f"the same circuits for {', '.join(same[:-1])} and {same[-1]}"
    return f"{found}, and another for {' and '.join(other)}"


def by_head(paths):
    """Return {(layer, head): [path, ...]}, the paths of each head, sorted; [] for other heads."""
    heads = defaultdict(list)
    for path in sorted(paths):
        heads[path.layer, path.head].append(path)
    return heads


def heads_of(row):
    """Return {"q -> 1b": {(layer, head), ...}, ...}, which heads of a circuit read so."""
    heads = defaultdict(set)
    for path in paths_in(row["report"]):
        heads[f"{path.reader} -> {path.read}"].add((path.layer, path.head))
    return heads


def doubling_table(rows):
    """Return how many of these circuits have each read."""
    circuits, lines = [heads_of(row) for row in rows], []
    for kinds, *cells in READS:
        counts = [sum(kind in heads for heads in circuits) for kind in kinds.split(", ")]
        lines.append([*cells, ", ".join(map(str, counts))])
    return markdown(["token", "reads", "and gains", f"circuits of {len(rows)}"], *lines)


if __name__ == "__main__":
    command(__file__, __doc__, draw)
