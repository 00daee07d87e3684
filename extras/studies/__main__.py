"""Print what must stand on a page, from the committed rows; tests/test_results.py asks whether it
stands there.

    python -m extras.studies results/depth.md    # after a change, paste what differs
"""

import importlib
from functools import partial

import train
from ablate import paths_in, read_report
from data import command_line
from extras import appendix_e
from extras.mechanisms import NAMES, table_of
from extras.studies import RESULTS, addresses, circuits, claims, counts, curriculum, depth, matches
from extras.studies.rows import committed


def mechanisms():
    """Return a function for each table of the related systems."""
    found = []
    for name in NAMES:
        for function, _, _, table in importlib.import_module(f"extras.mechanisms.{name}").TASKS:
            found += [partial(table_of, name, function.__name__)] if table else []
    return found


def language_models(name):
    """Return a table of extras/llm, which needs openai."""
    return getattr(importlib.import_module("extras.llm.weights"), name)()


def readme():
    """Return what the README says of the committed run of its commands."""
    report = read_report(RESULTS / "main")
    ahead = {path: row for path, row in paths_in(report).items() if path[2:] == ("2b", "3b")}
    path, row = max(ahead.items(), key=lambda item: item[1]["cost"]["x_3"])
    runs = [run for run, _ in counts.count(claims.first_run_is_plain)]
    both = [run for run in runs if claims.is_validated_under_both(run)]
    plain = sum("2b reads 3b" in circuits.heads_of(run) for run in both)
    return [
        f"In layer {path.layer}, head {path.head}, 2b reads 3b",
        f"rises by {row['cost']['x_3']:.3f} in the full model",
        f"to {row['without']['x_3']:.3f} in the circuit",
        f"Of {len(runs)} seeds {len(both)} end so, {plain} with this read",
    ]


def trainings():
    """Return the numbers of two trainings in the table of verdicts."""
    [D] = committed("D")
    lowest = min(entry["val"] for row in committed("literal/*") for entry in row["log"])
    return [
        f"Ours knows it at step {D['learned']['x_1']:.0f}",
        f"one of them falls to {lowest:.3f}",
    ]


def one_hot():
    """Return the paper's test of the runs with weights."""
    return appendix_e.table(train.read_file(RESULTS / "figures/appendix_e.jsonl"))


def matched():
    """Return what the reads of the runs with weights match."""
    return matches.table(train.read_file(RESULTS / "figures/matches.jsonl"))


def begins():
    """Return when reads begin to match over training."""
    return matches.emergence_table(train.read_file(RESULTS / "figures/emergence.jsonl"))


def reads():
    """Return how many of the circuits of the first claim have each read."""
    return circuits.doubling_table([row for row, _ in counts.count(claims.holds_six_reads)])


PAGES = {  # page: functions that return a table, or the pieces of text, that must stand on it
    "README.md": [readme, *(partial(counts.readme_table, k) for k in range(1, 6))],
    "results/paper.md": [counts.sections, trainings],
    "results/circuits.md": [partial(counts.table, "circuits"), reads, matched, begins, one_hot],
    "results/curriculum.md": [partial(counts.table, "curriculum"), curriculum.table],
    "results/depth.md": [
        *(partial(counts.table, "depth"), depth.layers_table, addresses.places_table),
    ],
    "extras/llm/README.md": [
        partial(language_models, f"{name}_table") for name in ("choices", "late")
    ],
    "extras/mechanisms/README.md": mechanisms(),
}


def pieces_of(page):
    """Return all that must stand on a page, a list of texts."""
    pieces = []
    for function in PAGES[page]:
        found = function()
        pieces += [found] if isinstance(found, str) else found
    return pieces


if __name__ == "__main__":
    p = command_line("python -m extras.studies", __doc__)
    p.add_argument("page", choices=PAGES)
    print(*pieces_of(p.parse_args().page), sep="\n\n")
