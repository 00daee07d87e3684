"""The claims of the README, counted over everything that is committed.

python -m studies.claims    # prints the table
"""

from pathlib import Path

from parts import config

import sweep
from studies import circuits, committed, curriculum, depth, markdown, order


RESULTS = Path("results")


def free_runs():
    """The rows of our sweeps with a causal mask, the implicit curriculum, attention learned."""
    files = sorted(RESULTS.glob("*/results.jsonl"))
    rows = [row for file in files for row in sweep.plain(sweep.read_table(file).values())]
    return [row for row in rows if row["ic"]]


def claims():
    """[(claim, in the paper, ours, page), ...]"""
    found, free = order.everywhere(RESULTS), free_runs()
    learned, asked = curriculum.without_a_rung(committed("runs/curriculum/*"))
    beaten = depth.counted_by_law(free)[-1].split(": ")[1]
    reports = [fact["report"] for fact in circuits.facts(committed("[ABCD]", "runs/*/*"))]
    searched = [one for one in reports if not one["verdict"].startswith("not searched")]
    certified = sum(one["certified"] for one in searched)
    of_D = committed("D", "runs/rope/D_s0", "runs/literal/D_s0")
    waits = [config.crossings(config.read_log(run), config.read_flags(run))["x_1"] for run in of_D]
    return [
        ("x_1 first, then x_2, ...", "100%", f"{found['in_order']} of {found['several']}", "order"),
        ("x_D alone is not learned", "100%", f"{found['lost']} of {found['alone']}", "depth"),
        (
            "a symbol with one before it not asked for",
            "not asked",
            f"learned by {learned} of {asked}",
            "curriculum",
        ),
        ("fewer layers than the law", "at least log3(2D)", f"{beaten}, of {len(free)}", "depth"),
        ("certified circuits", "A to D, by eye", f"{certified} of {len(searched)}", "circuits"),
        (
            "D waits for x_1",
            "3600 steps",
            f"{min(waits):.0f} to {max(waits):.0f}, of {len(waits)}",
            "emergence",
        ),
    ]


def table():
    rows = [(*told, f"[{page}](results/{page}.md)") for *told, page in claims()]
    return markdown(["", "the paper", "ours, of so many runs", ""], *rows)


if __name__ == "__main__":
    print(table())
