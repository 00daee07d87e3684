"""The claims of the README, counted over everything that is committed.

python -m studies.claims    # prints the table
"""

from parts import config
from parts.circuit import read_report

import sweep
from studies import committed, curriculum, depth, markdown, order


def table():
    """Return a row per claim: the paper, our runs, and the page that tells more."""
    counts = order.count_all()
    gaps = curriculum.learned_despite_gap(committed("runs/curriculum/*"))
    gaps = [answer for answers in gaps.values() for answer in answers]
    rows = sweep.section_7(depth.chains(committed("*")))
    shallow, limit, beyond = depth.too_shallow(rows)
    reports = [read_report(run) for run in committed("[ABCD]", "runs/*/*")]
    searched = [report for report in reports if report.get("paths")]
    validated = sum(report["validated"] for report in searched)
    steps = []
    for run in committed("D", "runs/rope/D_s0", "runs/literal/D_s0"):
        steps.append(config.crossings(config.read_log(run), config.read_flags(run))["x_1"])
    steps = ", ".join(f"{step:.0f}" for step in sorted(steps))
    law = f"{len(beyond)} of {shallow} that are too shallow; {limit} reached the limit"
    rows = [
        ("x_1 first, then x_2, ...", "100%", "{in_order} of {several}".format(**counts), "order"),
        ("x_D alone is not learned", "100%", "{above} of {alone}".format(**counts), "depth"),
        ("a symbol learned without all before it", "", f"{sum(gaps)} of {len(gaps)}", "curriculum"),
        ("more learned than the depth law allows", "log3(2D) layers", law, "depth"),
        ("circuits validated", "A to D, by eye", f"{validated} of {len(searched)}", "circuits"),
        ("D learns x_1: not replicated", "at step 3600", f"at steps {steps}", "emergence"),
    ]
    rows = [(*row, f"[{page}](results/{page}.md)") for *row, page in rows]
    return markdown(["", "the paper", "ours, of so many runs", ""], *rows)


if __name__ == "__main__":
    print(table())
