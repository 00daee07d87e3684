"""Print what must stand on a page, from the committed rows; tests/test_results.py asks whether it
stands there.

    python -m extras.studies results/depth.md    # after a change, paste what differs
"""

import importlib
from functools import partial

from ablate import Path, paths_in, read_report
from data import command_line
from extras.mechanisms import NAMES, table_of
from extras.studies import (
    RESULTS,
    ahead,
    circuits,
    claims,
    curriculum,
    depth,
    later,
    layers,
    order,
    share,
    steps,
)
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
    """Return the numbers in the README, but those that its commands print."""
    main = committed(*circuits.MAIN)
    solved = share(map(steps.solved, main))
    report = read_report(RESULTS / "default_s0")
    ahead = paths_in(report)[Path(5, 0, "2b", "3b")]
    before, after = report[report["ablation"]]["x_3"], ahead["without"]["x_3"]
    four = layers.of_shape(4, 4, 7) + layers.of_shape(4, 4, 8)
    three = layers.of_shape(3, 4, 7)
    alone, (orders, _) = claims.alone()[0], order.count_orders()
    tested, held = circuits.one_hot()
    literal = committed("literal/*")
    found = circuits.found(*circuits.MAIN)
    return [
        f"error below 0.01 ({solved} seeds)",
        f"error on D rises from {before:.2f} to {after:.2f}",
        f"full model's error rises by {ahead['cost']['x_3']:.3f}",
        f"without the red one its error becomes {after:.3f}",
        f"some learn seven symbols ({layers.know(four, 'x_6', 'x_7')})",
        f"none gets beyond x_3 ({share(map(layers.knows_x_4, three))})",
        f"for fewer symbols or chains, many exceed this ({share(depth.beyond_the_flow())})",
        f"pointer doubling ({len(circuits.holds_six(found))} of {len(found)})",
        f"this two-layer task ({depth.solved_of(depth.wide())})",
        f"below the paper's bound ({depth.solved_of(depth.led_to_x2()[0])})",
        f"at 23 places 32 heads fail ({depth.solved_of(depth.at_random(23, [32]))}) in steps in "
        f"which two layers succeed ({depth.solved_of(depth.two_layers_far())})",
        f"({share(curriculum.learn_x_3('targets1-3_*'))} learn D, instead of "
        f"{sum(curriculum.learn_x_3('targets1-2-3_*'))})",
        f"do ([{share(answer for _, answer in alone)}](results/curriculum.md))",
        f"a later symbol first ({share(not in_order for _, in_order in orders)})",
        f"reads of an induction head ({share(answer for _, answer in claims.needs_both())})",
        f"most circuits still answer ({len(held)} of {len(tested)})",
        f"none ends solved ({share(row['mse'] < 0.01 for row in literal)}); one reached "
        f"{claims.lowest_loss('literal/no_aid_*'):.3f} on its way",
    ]


PAGES = {  # page: functions that return a table, or the pieces of text, that must stand on it
    "README.md": [readme],
    "results/paper.md": [claims.table, claims.verdicts],
    "results/circuits.md": [
        *(circuits.doubling, circuits.doubling_table, circuits.papers_claims),
        *(ahead.page, order.page, order.induction_table, claims.induction),
        *(steps.page, steps.table, circuits.trust_table, circuits.trust),
    ],
    "results/curriculum.md": [
        *(curriculum.table, curriculum.claim, curriculum.conditional_claim),
        claims.alone_claim,
    ],
    "results/depth.md": [
        *(layers.page, layers.layers_table, layers.mask_table, later.page, later.table),
        *(depth.page, depth.heads_table),
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
