"""Print what must stand on a page, from the committed rows; tests/test_results.py asks whether it
stands there.

    python -m extras.studies results/depth.md    # after a change, paste what differs
"""

import importlib

from data import command_line
from extras import appendix_e
from extras.mechanisms import NAMES, table_of
from extras.studies import RESULTS, claims, counts, groups, matches
from extras.studies.rows import committed
from train import read_file


def readme():
    """What the README says of the seeds of its command, and its claims."""
    runs = counts.count(claims.fresh_is_validated)
    both = [run for run in runs if claims.is_validated_under_both(run)]
    plain = sum("2b reads 3b" in claims.heads_of(run) for run in both)
    return [
        f"Of {len(runs)} other seeds {len(both)} end validated, {plain} of them with this read",
        *(counts.readme_table(finding) for finding in range(1, 6)),
    ]


def paper():
    """The claims of the paper, and the numbers of two trainings in the table of verdicts."""
    [D], [few] = committed("D"), committed("adamw/D_2048")
    lowest = min(entry["val"] for row in committed("others/literal_*") for entry in row["log"])
    never_below = min(entry["x_1"] for entry in few["log"])
    return [
        counts.sections(),
        f"Ours knows it at step {D['learned']['x_1']:.0f} and ends at {D['log'][-1]['val']:.3f}",
        f"its x_1 never falls below {never_below:.2f}, and the mean of all symbols ends at "
        f"{few['log'][-1]['val']:.2f}",
        f"one of them falls to {lowest:.3f}",
    ]


def circuits():
    """The claims, what their circuits read, and the tables of three studies."""
    found = [counts.table("circuits"), groups.doubling()]
    for name, table in (
        ("matches", matches.table),
        ("emergence", matches.emergence_table),
        ("appendix_e", appendix_e.table),
    ):
        found.append(table(read_file(RESULTS / f"figures/{name}.jsonl")))
    return found


def language_models():
    """The tables of extras/llm, which needs openai."""
    weights = importlib.import_module("extras.llm.weights")
    return [weights.choices_table(), weights.late_table()]


def mechanisms():
    """The tables of the related systems."""
    found = []
    for name in NAMES:
        for function, _, _, text in importlib.import_module(f"extras.mechanisms.{name}").TASKS:
            found += [table_of(name, function.__name__)] if text else []
    return found


PAGES = {  # page: the function that returns the pieces of text that must stand on it
    "README.md": readme,
    "results/paper.md": paper,
    "results/circuits.md": circuits,
    "results/curriculum.md": lambda: [counts.table("curriculum"), groups.targets()],
    "results/depth.md": lambda: [counts.table("depth"), groups.layers(), groups.places()],
    "extras/llm/README.md": language_models,
    "extras/mechanisms/README.md": mechanisms,
}


if __name__ == "__main__":
    p = command_line("python -m extras.studies", __doc__)
    p.add_argument("page", choices=PAGES)
    print(*PAGES[p.parse_args().page](), sep="\n\n")
