"""The paper, claim by claim, and what our committed runs say of each.

python -m extras.studies.claims    # prints the table
"""

import bisect
import itertools

from ablate import by_head, paths_in
from extras.studies import circuits, curriculum, load_rows, markdown, order
from extras.studies.rows import RESULTS, committed
from extras.studies.theory import least_layers
from train import Flags


def claim(section, text, answers, more="", page="circuits"):
    """Return a row: where the paper says what, in how many of the runs that could refute it it is
    True, what else there is to say, the verdict, and the page. answers: [bool, ...]"""
    yes, n = sum(answers), len(answers)
    verdict = "mixed" if 0 < yes < n else "holds" if yes else "does not hold"
    counts = f"{yes} of {n}" if verdict != "mixed" else f"{yes} of {n} ({n - yes} not)"
    return section, text, (counts if n else "") + more, verdict if n else "not tested", page


# ---- Section 7


def alone():
    """Return whether the loss stays above 0.7, of each run that asks for x_D alone in as many
    layers as let most runs learn x_D that ask for all symbols."""
    runs = [(row["flags"], row["log"][-1]["val"], row["learned"]) for row in committed("*")]
    for row in load_rows([RESULTS / "sweep", RESULTS / "longer"]):
        flags = Flags(**row)
        learned = {name: row[f"{name}_learned"] for name in flags.target_names}
        runs.append((flags, row["val"], learned))
    runs = [run for run in runs if run[0].task == "chain" and run[0].causal and not run[0].init]
    runs = [run for run in runs if not getattr(run[0], "circuit", "") and not run[0].targets]

    def most_learn(layers, k):
        answers = [
            f[f"x_{k}"]
            for flags, _, f in runs
            if flags.ic and flags.layers == layers and flags.D >= k
        ]
        return bool(answers) and sum(answer is not None for answer in answers) >= len(answers) / 2

    return [
        loss > 0.7 for flags, loss, _ in runs if not flags.ic and most_learn(flags.layers, flags.D)
    ]


def section_7():
    kinds, figure_4 = order.count_orders(), []
    for row in load_rows([RESULTS / "sweep"]):
        flags = Flags(**row)
        if flags.causal and flags.ic and not getattr(flags, "circuit", ""):
            known = [row[name] < flags.problem.learned_below for name in flags.target_names]
            figure_4 += [sorted(known, reverse=True) == known] if any(known) else []
    gaps = sum(curriculum.learned_despite_gap(committed("curriculum/*")).values(), [])
    gaps = [not answer for answer in gaps]
    gap = " learn no symbol beyond one that is not asked for"
    depth = " with 1500 steps, not 10,000"
    return [
        claim(
            "7.2", "x_D alone is not learned: the loss stays above 0.7", alone(), "", "curriculum"
        ),
        claim("7.2", "the implicit curriculum is essential", gaps, gap, "curriculum"),
        claim(
            "7.2", "no run knows a later symbol without the earlier ones", figure_4, depth, "depth"
        ),
        claim("7.2", "x_1 is learned first, then x_2, ...", kinds["resolved"], "", "emergence"),
    ]


# ---- Section 8 and Appendix E


def first_goes_back(row):
    """Return whether all paths of the first useful head lead to the token before."""
    heads = by_head(paths_in(row["report"], row["flags"].problem))
    ends = [(sum(path.reader), sum(path.read)) for path in heads[min(heads)]]  # role + offset
    return all(reader == read + 1 for reader, read in ends)


def heads_of(row):
    return {(path["layer"], path["head"]) for path in row["report"]["paths"]}


def later_kinds(row):
    """Return {"q -> 1b", ...}, what is read in a circuit after its first head."""
    first = min(heads_of(row))
    paths = [path for path in row["report"]["paths"] if (path["layer"], path["head"]) != first]
    return frozenset("{reader} -> {read}".format(**path) for path in paths)


def loses(row, kind, names):
    """Return whether the full model loses all of these symbols without some path of this kind."""
    full, level = row["report"]["full_model"], row["flags"].problem.learned_below
    paths = [p for p in row["report"]["paths"] if "{reader} -> {read}".format(**p) == kind]
    return any(all(full[n][0] + p["necessary"][n][0] >= level for n in names) for p in paths)


def section_8():
    solved = [
        row for row in committed("*") if row["flags"].task == "chain" and circuits.searched(row)
    ]
    faithful = [row for row in solved if "not faithful" not in row["report"]["verdict"]]
    validated = [row["report"]["validated"] for row in solved]
    tests = [row["report"]["paper"] for row in solved if "paper" in row["report"]]
    held = [test["held"] < 0.05 for test in tests]
    removed = [all(0.17 <= loss <= 0.89 for loss in test["removed"]) for test in tests]
    uniform = [0.05 <= test["first_uniform"] <= 0.1 for test in tests]
    useless = [
        2 * len(heads_of(row)) < row["flags"].layers * row["flags"].heads for row in faithful
    ]
    pairs = [
        (a, b) for a, b in itertools.combinations(faithful, 2) if a["settings"] == b["settings"]
    ]
    differ = [later_kinds(a) != later_kinds(b) for a, b in pairs]
    fewest = [len(heads_of(row)) > max(least_layers(row["flags"].problem)) for row in faithful]
    ours, literal = (
        [row["mse"] < 0.01 for row in committed(*names)]
        for names in (("[ABC]", "adamw/*"), ("literal/no_aid_*",))
    )
    split = f": ours {sum(ours)} of {len(ours)}, literal settings {sum(literal)} of {len(literal)}"
    every = [
        row
        for row in committed("*")
        if row["flags"].task == "chain"
        and row["flags"].ic
        and not row["flags"].targets
        and row["mse"] < 0.05
    ]
    older = [row["older_test"] < 0.05 for row in every if "older_test" in row and not row["report"]]
    more = (
        f" searched, of {len(every)} solved; {sum(older)} of {len(older)} more passed an older test"
    )
    return [
        claim("8.2", "A to C end below an MSE of 0.01", ours + literal, split, "paper"),
        claim("8.2", "most heads do nothing useful", useless, " faithful circuits"),
        claim(
            "8.2", "the first useful head reads the token before", [*map(first_goes_back, faithful)]
        ),
        claim(
            "8.2",
            "after the first head, circuits differ in what is read",
            differ,
            " pairs of seeds",
        ),
        claim("8.2", "no circuit has as few heads as possible", fewest),
        claim("8.2", "the circuit can be found and validated", validated, more),
        claim("E", "the MSE stays below 0.05 with all ablations", held),
        claim("E", "it is 0.17 to 0.89 without any one path", removed),
        claim("E", "it is 0.05 to 0.1 if the first useful head is uniform", uniform),
    ]


# ---- Section 9 and 10


def head_steps(row):
    """Return {(layer, head): (step, kind)} of the first path of each head that passes 0.5."""
    steps = {}
    for step, head, kind in order.path_steps(row, 0.5):
        steps.setdefault(head, (step, kind))
    return steps


def one_at_a_time(row):
    """Return whether no two heads of a run emerge between the same two checkpoints, but for those
    of the induction head."""
    later = [step for step, kind in head_steps(row).values() if kind not in order.HEADS]
    return len({bisect.bisect(row["emergence"]["steps"], step) for step in later}) == len(later)


def section_9():
    rows = committed(*sum(order.EMERGED.values(), []))
    rows = [row for row in rows if row["emergence"]]
    first = [
        [order.is_first(order.first_steps(row, level)) for row in rows] for level in order.LEVELS
    ]
    levels = "; at {} and {} instead of 0.5: {} and {}".format(
        order.LEVELS[0], order.LEVELS[2], sum(first[0]), sum(first[2])
    )
    induction = order.load_induction()[1]
    lost = [all(row["loss"] + row["kinds"][k][0] >= 0.5 for k in order.HEADS) for row in induction]
    kinds = [item for row in induction for item in row["kinds"].items()]
    other = max(rise for kind, (rise, _) in kinds if kind not in order.HEADS)
    other = f"; any other kind of read raises its loss by at most {other:.2f}"
    solved = [
        row for row in committed("*") if row["flags"].task == "chain" and circuits.searched(row)
    ]
    faithful = [row for row in solved if "not faithful" not in row["report"]["verdict"]]
    reused = [loses(row, "1b -> 1a", row["flags"].target_names[1:]) for row in faithful]
    pair = "{0}b -> {0}a".format
    control = [loses(row, pair(row["flags"].D), ["x_1"]) for row in faithful]
    control = (
        f" lose them all without 1b -> 1a; {sum(control)} lose x_1 without 3b -> 3a (D: 4b -> 4a)"
    )
    D = committed("D", "rope/D_s0", "literal/D_s0")
    slow = [row["learned"]["x_1"] >= 3600 for row in D]
    at = ": x_1 at steps " + ", ".join(f"{row['learned']['x_1']:.0f}" for row in D)
    ends = [row["mse"] <= 0.0315 for row in D]
    mse = ": " + ", ".join(f"{row['mse']:.3f}" for row in D)
    held = D[0]["report"]["paper"]["held"]
    heads = sorted(step for step, _ in head_steps(D[0]).values())
    *gaps, last = [b - a for a, b in itertools.pairwise(heads)]
    late = f": {last:.0f} steps after the one before, the largest gap else {max(gaps):.0f}"
    ordered = [order.reads_in_order(order.first_steps(row, 0.5)) for row in rows]
    page = "emergence"
    return [
        claim("9.2 i", "D learns x_1 after 3600 slow steps", slow, at, page),
        claim(
            "9.2 i", "a path of an induction head is the first above 0.5", first[1], levels, page
        ),
        claim("9.2 i", "x_1 needs both reads of an induction head", lost, other, page),
        claim("9.2 ii", "later symbols reuse the induction head", reused, control, page),
        claim("9.2 iii", "the query comes to read 1b, 2b, ... in this order", ordered, "", page),
        claim("9.2 iii", "heads emerge one at a time", [*map(one_at_a_time, rows)], "", page),
        claim("9.2 iv", "D's last head comes much later", [last > max(gaps)], late, page),
        claim("9.2", "D ends at an MSE of 0.031 or less", ends, mse, page),
        claim(
            "9.2", "D's MSE is 0.045 or less with all ablations", [held <= 0.0455], f": {held:.3f}"
        ),
    ]


def not_tested():
    """Return the rows that no run of ours decides."""
    return [
        claim(
            "4",
            "large language models solve the problem",
            [],
            "two small ones",
            "../extras/llm/README",
        ),
        claim("5", "x_D needs log3(2D) layers", [], "", "depth"),
        claim("10.1", "too few layers: not learned by any metric", [], "", "depth"),
        claim("10.2", "natural language has such a curriculum", [], "", "curriculum"),
    ]


def table(short=False):
    """Return the table of all claims for their page, or of the most important for the README."""
    rows = [*section_7(), *section_8(), *section_9(), *not_tested()]
    chosen = {"7.2": 4, "8.2": 6, "9.2 i": 3, "9.2 iv": 1}
    rows = [row for row in rows if row[0] in chosen] if short else rows
    folder = "results/" if short else ""
    lines = [[*row, f"[{page}]({folder}{page}.md)"] for *row, page in rows]
    return markdown(
        ["", "the paper", "ours, of the runs that could refute it", "verdict", ""], *lines
    )


if __name__ == "__main__":
    print(table())
