"""Print the tables and counts of a page from the committed rows; tests/test_results.py asks
whether they stand there.

    python -m extras.studies results/depth.md    # after a change, paste what differs
"""

import importlib
from functools import partial

from data import command_line, program
from extras.mechanisms import table_of
from extras.mechanisms.__main__ import NAMES
from extras.studies import circuits, claims, curriculum, depth, metrics, order
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


PAGES = {  # page: functions that return what stands on it
    "README.md": [claims.short_table],
    "results/paper.md": [
        *(claims.table, claims.repeats_table, claims.literal_table, metrics.table),
    ],
    "results/circuits.md": [
        *(circuits.answer, circuits.groups_table, circuits.again_table, circuits.compiled_table),
        circuits.papers_test,
    ],
    "results/curriculum.md": [
        *(lambda: curriculum.table(committed("curriculum/D3_*")), curriculum.claim),
        *(curriculum.conditional_table, curriculum.conditional_claim),
    ],
    "results/emergence.md": [
        *(order.order_claim, order.order_table, order.induction_table, order.other_routes),
        order.d_claim,
    ],
    "results/depth.md": [
        *(depth.answer, depth.heads_table, depth.limits, depth.sweeps),
        *(depth.swaps, depth.places_table, depth.waits, depth.place_heads),
    ],
    "extras/llm/README.md": [
        partial(language_models, f"{name}_table") for name in ("choices", "late")
    ],
    "extras/mechanisms/README.md": mechanisms(),
}


if __name__ == "__main__":
    with program("python -m extras.studies"):
        p = command_line("python -m extras.studies", __doc__)
        p.add_argument("page", choices=PAGES)
        for function in PAGES[p.parse_args().page]:
            print(function(), end="\n\n")
