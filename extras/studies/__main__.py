"""Print what must stand on a page, from the committed rows; tests/test_results.py asks whether it
stands there.

    python -m extras.studies results/depth.md    # after a change, paste what differs
"""

import importlib

from data import command_line
from extras import appendix_e
from extras.llm import weights
from extras.mechanisms import NAMES, read_results
from extras.studies import RESULTS, claims, counts, groups, matches, share, span
from extras.studies.rows import committed
from train import read_file


def readme():
    """What the README says of the seeds of its command, and its claims."""
    runs = counts.count(claims.fresh_is_validated)
    both = [run for run in runs if claims.is_validated_under_both(run)]
    plain = sum("2b reads 3b" in claims.heads_of(run) for run in both)
    return [
        f"{len(both)} of {len(runs)} other seeds end validated; in {plain} of these 2b reads 3b",
        *(counts.readme_table(finding) for finding in range(1, 6)),
    ]


def paper():
    """The claims of the paper, and the numbers of single trainings in the table of verdicts."""
    [D], [few] = map(committed, ("D", "adamw/D_2048"))
    tests = read_file(RESULTS / "figures/appendix_e.jsonl")
    tests = [row for row in tests if ", others" not in row["run"]]  # A to D are the first
    plain = [committed(f"others/literal_{name}")[0] for name in ("D_s0", "no_aid_s1", "no_aid_s2")]
    late = [[*row["learned"].values()] for row in plain]
    first, _ = claims.first_steps(D)
    first = [f"L{layer}H{head} at {step:,.0f}" for (layer, head), step in first.items()]
    learned = [f"{step:.0f}" for step in D["learned"].values()]
    ours = [claims.head_count(committed(name)[0]) for name in "ABCD"]
    theirs = [appendix_e.head_count(row) for row in tests]
    led = [row["losses"]["x_2"] for row in committed("depth_width/L1_H16_N4_D2_led_s?")]
    later = [loss for row in tests[:4] for loss in appendix_e.later_losses(row)]
    uniform = [0.05 <= row["first_uniform"] <= 0.1 for row in tests[:4]]
    literal = [entry["val"] for entry in plain[0]["log"]]
    return [
        counts.sections(),
        groups.with_adamw(),
        f"of four it then lowers x_2 to {span(led)}",
        "By the paper's test {}, {} and {} of twelve heads, and {} of D's 24".format(*theirs),
        "by ours {}, {}, {} and {}".format(*ours),
        f"{share(row['holds'] for row in tests)} hold on fresh sequences",
        f"Of A to D {share(loss >= 0.17 for loss in later)} later reads cost 0.17 or more",
        f"with the first useful layer uniform {share(uniform)} have 0.05-0.1",
        f"Ours ends at {D['log'][-1]['confirmed']:.4f}, and at {tests[3]['held']:.3f} by the "
        "paper's test. Without aids, in bfloat16, it falls to "
        f"{min(literal):.3f}, and ends at {literal[-1]:.2f}",
        f"Ours knows it at step {learned[0]}, or {late[0][0]:.0f} without these aids",
        f"A's size takes {late[1][0]:,.0f} and {late[2][0]:,.0f} steps",
        f"x_1 never falls below {min(entry['x_1'] for entry in few['log']):.2f}",
        f"its heads pass a mean attention of one half, {', '.join(first)}",
        f"x_1 to x_4 are learned at {', '.join(learned)}",
    ]


def circuits():
    """The claims, what their circuits read, and the tables of three studies."""
    found = [counts.table("circuits"), groups.doubling(), matches.table(matched(swapped=False))]
    for name, table in ("emergence", matches.emergence_table), ("appendix_e", appendix_e.table):
        found.append(table(read_file(RESULTS / f"figures/{name}.jsonl")))
    return found


def matched(swapped):
    """What the reads of models match whose finders were swapped (depth.md), or of all others."""
    rows = read_file(RESULTS / "figures/matches.jsonl")
    return [row for row in rows if (f"addresses/{row['run']}" in claims.swaps()) == swapped]


def depth():
    """The claims, which symbols runs know by layers, and how those beyond the law find them."""
    by_match = matches.table(matched(swapped=True))
    return [counts.table("depth"), groups.layers(), by_match, groups.longer(), groups.places()]


def mechanisms():
    """The tables of the related systems."""
    found = []
    for name in NAMES:
        results = read_results(RESULTS / f"mechanisms/{name}.jsonl")
        for function, _, _, text in importlib.import_module(f"extras.mechanisms.{name}").TASKS:
            found += [text(results[function.__name__])] if text else []
    return found


PAGES = {  # page: the function that returns the pieces of text that must stand on it
    "README.md": readme,
    "results/paper.md": paper,
    "results/circuits.md": circuits,
    "results/curriculum.md": lambda: [counts.table("curriculum"), groups.targets()],
    "results/depth.md": depth,
    "extras/llm/README.md": lambda: [weights.choices_table(), weights.late_table()],
    "extras/mechanisms/README.md": mechanisms,
}


if __name__ == "__main__":
    p = command_line("python -m extras.studies", __doc__)
    p.add_argument("page", choices=PAGES)
    print(*PAGES[p.parse_args().page](), sep="\n\n")
