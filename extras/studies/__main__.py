"""Print what must stand on a page, from the committed rows; tests/test_results.py asks whether it
stands there.

    python -m extras.studies results/depth.md    # after a change, paste what differs
"""

import importlib
from functools import partial

from data import command_line
from extras.mechanisms import NAMES, table_of
from extras.studies import circuits, claims, curriculum, depth, order, spread
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


def main_command():
    """Return how many seeds of the main command end below its threshold, and after which steps."""
    rows = committed("default/*", "fresh/default_*")
    steps = [row["steps"] for row in rows if row["mse"] < row["flags"].stop_below]
    said = f"{len(steps)} of {len(rows)} seeds end below 0.01"
    return f"{said}, after {spread(steps)} steps (median and range)"


def findings():
    return "\n".join(claims.findings())


def curriculum_table():
    return curriculum.table(committed("curriculum/D3_*"))


PAGES = {  # page: functions that return what stands on it
    "README.md": [main_command, findings],
    "results/paper.md": [claims.table],
    "results/circuits.md": [
        *(circuits.answer, circuits.fresh_table, circuits.again_table, circuits.compiled_table),
        circuits.papers_test,
    ],
    "results/curriculum.md": [curriculum_table, curriculum.claim, curriculum.conditional_claim],
    "results/emergence.md": [order.order_claim, order.induction_table, order.d_claim],
    "results/depth.md": [
        *(depth.answer, depth.heads_table, depth.limits, depth.equal_parameters),
        *(depth.swaps, depth.places_table, depth.waits, depth.place_heads),
    ],
    "extras/llm/README.md": [
        partial(language_models, f"{name}_table") for name in ("choices", "late")
    ],
    "extras/mechanisms/README.md": mechanisms(),
}


if __name__ == "__main__":
    p = command_line("python -m extras.studies", __doc__)
    p.add_argument("page", choices=PAGES)
    for function in PAGES[p.parse_args().page]:
        print(function(), end="\n\n")
