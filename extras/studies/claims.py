"""The paper, claim by claim, and what our committed runs say of each.

python -m extras.studies.claims    # prints the table
"""

import bisect
import itertools
import math

from ablate import by_head, parts_of, paths_in
from data import command_line, program
from extras import studies
from extras.llm import weights
from extras.studies import circuits, curriculum, depth, markdown, onset, order
from extras.studies.rows import committed, settings_of
from extras.studies.theory import least_layers, paper_bound
from train import Flags


KIND = "{reader} -> {read}".format


def claim(text, answers, more="", page="circuits"):
    """Return a row: a claim of the paper, in how many of the runs that could refute it it is True,
    and what else there is to say; the verdict, and the page. answers: [bool, ...]"""
    yes, n = sum(answers), len(answers)
    verdict = "mixed" if 0 < yes < n else "holds" if yes else "does not hold"
    counts = f"{yes} of {n}" + f" ({n - yes} not)" * (verdict == "mixed")
    return text, counts * bool(n) + more, verdict if n else "not tested", page


# ---- Sections 5 and 7


def bounded():
    """Return whether no symbol is learned in fewer layers than Theorem 1 asks for, of each run
    (settings and seed) that has so few layers, learns its attention and learns something."""
    answers = {}
    for flags, learned, _ in order.all_chains():
        if not (flags.init or getattr(flags, "circuit", "")):
            known = {int(name[2:]) for name, step in learned.items() if step is not None}
            beyond = {k for k in range(1, flags.D + 1) if paper_bound(k) > flags.layers}
            if known and beyond:
                answers[settings_of(flags), flags.seed] = not known & beyond
    return [*answers.values()]


def alone():
    """Return ([whether the loss stays above 0.7, of each run that asks for x_D alone], left out). A
    run counts if some run of the same settings and seed, but perhaps of other D and steps, learned
    x_D, asked for all symbols; the others are left out."""
    single, curricula = [], {}
    for flags, learned, loss in order.all_chains():
        started = flags.init or flags.targets or getattr(flags, "circuit", "")
        if flags.causal and not (started or getattr(flags, "mixture", False)):
            key = settings_of(flags.replace(ic=True, D=1, steps=1, stop_below=0)), flags.seed
            if flags.ic:
                known = {name for name, step in learned.items() if step is not None}
                curricula.setdefault(key, set()).update(known)
            else:
                single.append((f"x_{flags.D}", key, loss))
    answers = [loss > 0.7 for name, key, loss in single if name in curricula.get(key, ())]
    return answers, len(single) - len(answers)


def section_5_and_7():
    gaps, left_out = curriculum.learned_despite_gap(committed("curriculum/*"))
    gaps = [not answer for answer in sum(gaps.values(), [])]
    earlier = []
    for row in studies.load_rows(studies.committed("sweep")):
        flags = Flags(**row)
        if flags.causal and flags.ic and not getattr(flags, "circuit", ""):
            known = [row[name] < flags.problem.learned_below for name in flags.target_names]
            earlier += [sorted(known, reverse=True) == known] if any(known) else []
    steps = " with 1500 steps, not 10,000"
    more = "; these learn nothing beyond a symbol that is not asked for"
    more += f"; {left_out} left out, whose seed fails with all symbols too"
    few = " runs of few layers that learn something"
    single, not_counted = alone()
    asked = " whose seed learns x_D when all symbols are asked for"
    asked += f"; {not_counted} left out, whose seed does not, or was not asked"
    return [
        claim("5: x_D needs log3(2D) layers", bounded(), few, "depth"),
        claim("x_D alone is not learned: the loss stays above 0.7", single, asked, "curriculum"),
        claim("the implicit curriculum is essential", gaps, more, "curriculum"),
        claim("no run knows a later symbol without the earlier ones", earlier, steps, "depth"),
        claim("x_1 is learned first, ...", order.count_orders()["resolved"], "", "emergence"),
    ]


# ---- Section 8 and Appendix E


def searched_and_faithful():
    """Return the rows of solved chain models whose circuit was searched, and those of them whose
    circuit is faithful, so that all else can be ablated. Models of one layer, which were chosen
    because they need their heads, are none of them."""
    rows = [row for row in committed("*") if row["flags"].task == "chain"]
    rows = [row for row in rows if row["flags"].layers > 1]
    searched = [*filter(circuits.searched, rows)]
    return searched, [row for row in searched if "not faithful" not in row["report"]["verdict"]]


def heads_of(row):
    return by_head(paths_in(row["report"]))


def first_goes_back(row):
    """Return whether all paths of the first useful head lead to the token before."""
    heads, names = heads_of(row), row["flags"].problem.names
    for path in heads[min(heads)]:
        reader, read = (names.index(role) + offset for role, offset in map(parts_of, path[2:]))
        if reader != read + 1 or "*" in path.read:
            return False
    return True


def later_kinds(row):
    """Return {"q -> 1b", ...}, what is read in a circuit after its first head."""
    paths, first = row["report"]["paths"], min(heads_of(row))
    return {KIND(**path) for path in paths if (path["layer"], path["head"]) != first}


def section_8():
    searched, faithful = searched_and_faithful()
    tests = [row["report"]["paper"] for row in searched if "paper" in row["report"]]
    removed = [all(0.17 <= loss <= 0.89 for loss in test["removed"]) for test in tests]
    uniform = [0.05 <= test["first_uniform"] <= 0.1 for test in tests]
    heads = [(len(heads_of(row)), row["flags"]) for row in faithful]
    useless = [2 * count < flags.layers * flags.heads for count, flags in heads]
    fewest = [count > max(least_layers(flags.problem)) for count, flags in heads]
    pairs = itertools.combinations(faithful, 2)
    pairs = [(a, b) for a, b in pairs if a["settings"] == b["settings"]]
    pairs = [(a, b) for a, b in pairs if a["flags"].seed != b["flags"].seed]
    differ = [later_kinds(a) != later_kinds(b) for a, b in pairs]
    started = committed("[ABC]", "adamw/*")
    ours = [row["mse"] < 0.01 for row in started if order.ended(row)]
    literal = [row["mse"] < 0.01 for row in committed("literal/no_aid_*")]
    split = f": ours {sum(ours)} of {len(ours)}, literal settings {sum(literal)} of {len(literal)}"
    split += f"; left out, as stopped by hand: {len(started) - len(ours)}"
    chains, conditional = (
        [row["report"] for row in rows]
        for rows in (searched, filter(circuits.searched, committed("conditional/*")))
    )
    mean = sum("mean alone" in report["verdict"] for report in chains)
    found = f", {mean} of them at the mean alone; conditional retrieval "
    found += f"{sum(r['validated'] for r in conditional)} of {len(conditional)}"
    validated = [report["validated"] for report in chains]
    return [
        claim("A to C end below an MSE of 0.01", ours + literal, split, "paper"),
        claim("most heads do nothing useful", useless, " faithful circuits"),
        claim("the first useful head reads the token before", [*map(first_goes_back, faithful)]),
        claim("after it, circuits differ in what is read", differ, " pairs of seeds"),
        claim("no circuit has as few heads as possible", fewest),
        claim("the circuit can be found and validated", validated, found),
        claim("E: the MSE stays below 0.05 with all ablations", [t["held"] < 0.05 for t in tests]),
        claim("E: it is 0.17 to 0.89 without any one path", removed),
        claim("E: it is 0.05 to 0.1 if the first useful head is uniform", uniform),
    ]


# ---- Section 9


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


def loses(row, kind, names):
    """Return whether the full model loses all of these symbols without some path of this kind."""
    full, level = row["report"]["full_model"], row["flags"].problem.learned_below
    paths = [path for path in row["report"]["paths"] if KIND(**path) == kind]
    return any(all(full[n][0] + p["necessary"][n][0] >= level for n in names) for p in paths)


def section_9():
    rows = committed(*sum(order.EMERGED.values(), []))
    rows = [row for row in rows if row["emergence"]]
    steps = {level: [order.first_steps(row, level) for row in rows] for level in order.LEVELS}
    first = {level: [*map(order.is_first, steps[level])] for level in steps}
    others = [f"{sum(first[level])} at {level}" for level in first if level != 0.5]
    known = order.load_induction()
    lost = [all(r["loss"] + r["kinds"][k][0] >= 0.5 for k in order.HEADS) for r in known]
    kinds = [item for row in known for item in row["kinds"].items()]
    other_rise = max(rise for kind, (rise, _) in kinds if kind not in order.HEADS)
    least = min(rise for kind, (rise, _) in kinds if kind in order.HEADS)
    other = f"; ablated in all heads, each raises its loss by {least:.4f} or more, any other by"
    other += f" {other_rise:.4f} or less"
    _, faithful = searched_and_faithful()
    reused = [loses(row, "1b -> 1a", row["flags"].target_names[1:]) for row in faithful]
    control = [loses(row, "{0}b -> {0}a".format(row["flags"].D), ["x_1"]) for row in faithful]
    control = f" lose them without 1b -> 1a; {sum(control)} lose x_1 without the last kb -> ka"
    D = committed("D", "rope/D_s0", "literal/D_s0")
    at = ": x_1 at steps {:.0f}, {:.0f}, {:.0f}".format(*(row["learned"]["x_1"] for row in D))
    mse = ": {:.3f}, {:.3f}, {:.3f}".format(*(row["mse"] for row in D))
    lasts = order.last_paths(D[0])
    latest = [gap > before for _, gap, before in lasts.values()]
    late = ", ".join(f"{gap:.0f} at {level}" for level, (_, gap, _) in lasts.items())
    late = f" thresholds, n = 1 run: steps from the path before to the last: {late}"
    held, page = D[0]["report"]["paper"]["held"], "emergence"
    onsets = [row["onsets"] for rotary in ("input", "qk") for row in onset.load_onsets(rotary)[0]]
    begun = [
        all((steps[kind] or math.inf) < steps["x_1"] for kind in order.HEADS) for steps in onsets
    ]
    in_order = [*map(order.reads_in_order, steps[0.5])]
    slow = [row["learned"]["x_1"] >= 3600 for row in D]
    return [
        claim("D learns x_1 after 3600 slow steps", slow, at, page),
        claim(
            "the first path above 0.5 is of an induction head",
            first[0.5],
            "; " + ", ".join(others),
            page,
        ),
        claim("x_1 needs both q -> 1b and 1b -> 1a", lost, other, page),
        claim("both reads begin before the knowledge of x_1", begun, "", page),
        claim("later symbols reuse the induction head", reused, control, page),
        claim("the query comes to read 1b, 2b, ... in this order", in_order, "", page),
        claim("heads emerge one at a time", [*map(one_at_a_time, rows)], "", page),
        claim("D's last head comes much later", latest, late, page),
        claim("D ends at an MSE of 0.031", [row["mse"] <= 0.0315 for row in D], mse, page),
        claim("D's MSE is 0.045 with all ablations", [held <= 0.0455], f": {held:.3f}"),
    ]


def other_sections():
    rows = [row for row in depth.plain_rows() if row["layers"] < paper_bound(row["D"])]
    few, content = [not depth.solves(row) for row in rows], depth.bound_rows()
    beyond = f" with fewer; {sum(map(depth.solves, content))} of {len(content)} with fewer than"
    beyond += " reading by content takes solve x_D"
    llm, cells = "../extras/llm/README", itertools.product((False, True), weights.MODELS)
    hops = [weights.count_marks(model, beyond) for beyond, model in cells]
    small = "two small ones: one step above chance in {} and {} settings, more in {} and {}"
    return [
        claim("4: large language models solve the problem", [], small.format(*hops), llm),
        claim("10.1: no model solves x_D in fewer layers than log3(2D)", few, beyond, "depth"),
        claim("10.1: with too few layers no metric shows learning", [], "", "depth"),
        claim("10.2: natural language has such a curriculum", [], "", "curriculum"),
    ]


def table():
    """Return the table of all claims for their page."""
    rows = []
    for section, claims in ("7.2", section_5_and_7()), ("8.2", section_8()), ("9.2", section_9()):
        rows += [(section, *row) for row in claims]
    rows += [("", *row) for row in other_sections()]
    lines = [
        [section, f"[{text}]({page}.md)", counts, verdict]
        for section, text, counts, verdict, page in rows
    ]
    return markdown(["", "the paper", "ours, of the runs that could refute it", "verdict"], *lines)


def short_table():
    """Return the table of the most important claims for the README, without what follows the first
    semicolon of a count."""
    _, _, essential, _, ordered = section_5_and_7()
    (_, _, _, _, _, validated, *_), last = section_8(), section_9()
    rows = [ordered, essential, last[2], last[1], last[0], validated]
    lines = [
        [f"[{text}](results/{page}.md)", counts.split(";")[0], verdict]
        for text, counts, verdict, page in rows
    ]
    return markdown(["the paper", "ours, of the runs that could refute it", "verdict"], *lines)


if __name__ == "__main__":
    with program("python -m extras.studies.claims"):
        command_line("python -m extras.studies.claims", __doc__).parse_args()
        print(table())
