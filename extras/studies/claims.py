"""The paper, claim by claim: what our committed runs say, the most important first.

python -m extras.studies.claims    # prints the table
"""

import itertools
import math

import ablate
import sweep
from extras.llm import weights
from extras.studies import (
    circuits,
    committed,
    curriculum,
    depth,
    load_row,
    load_rows,
    markdown,
    order,
)
from extras.studies.theory import least_layers


def claim(page, text, answers, more="", condition=""):
    """Return a row: a claim of the paper, in how many of the runs that could refute it it is True,
    what else there is to say of them, the verdict with its condition, and the page."""
    verdict = "holds in part" if any(answers) else "does not hold"
    verdict = "holds" if all(answers) else verdict
    return text, f"{sum(answers)} of {len(answers)}{more}", verdict + condition, page


def training_claims():
    """Return the rows on what is learned, and when."""
    counts = order.count_all()
    ordered = [number < counts["in_order"] for number in range(counts["several"])]
    above = [number < counts["above"] for number in range(counts["alone"])]
    gaps = curriculum.learned_despite_gap(committed("runs/curriculum/*"))
    gaps = [not answer for answer in sum(gaps.values(), [])]

    # the induction head
    rows = order.load_rows_with_paths(committed(*sum(order.MEASURED.values(), [])))
    rows = [row for row in rows if "there" in row]
    needed = [all(row["lost"].values()) for row in rows if row["run"].parent.name != "default"]
    needed += map(order.is_lost, order.load_first_learned())
    before = sum(all(row["before"].values()) for row in rows)
    before = f" lose x_1 without its paths; {before} have them before"

    # transformer D with our settings, with RoPE and with the literal settings, and A to C
    D = [load_row(run) for run in committed("D", "runs/rope/D_s0", "runs/literal/D_s0")]
    steps = [row["learned"]["x_1"] for row in D]
    ends = [row["mse"] for row in D if row["flags"].rotary == "input"]  # as the paper
    slow, good = [step > 3000 for step in steps], [loss < 0.0315 for loss in ends]
    at, end = " at steps {:.0f}, {:.0f}, {:.0f}", ": {:.3f}, {:.3f}"
    at, end, failed = at.format(*steps), end.format(*ends), ": a failed replication"
    solved = [load_row(run)["mse"] < 0.01 for run in committed("[ABC]")]
    literal = [load_row(run)["mse"] < 0.01 for run in committed("runs/literal/no_aid_*")]
    literal = f"; literal settings: {sum(literal)} of {len(literal)}"
    nothing = " learn nothing beyond a symbol that is no target"
    first = ", together with x_1 rather than before it"
    not_literal = ", not with the literal settings"
    return [
        claim("order", "x_1 is learned first, then x_2, and so on", ordered),
        claim("depth", "x_D alone is not learned: its loss stays above 0.7", above),
        claim("curriculum", "the implicit curriculum is necessary", gaps, nothing),
        claim("order", "an induction head emerges first", needed, before, first),
        claim("emergence", "D learns x_1 after 3600 slow steps", slow, at, failed),
        claim("emergence", "D ends at an MSE of 0.031", good, end, not_literal),
        claim("cleaning", "A to C end below an MSE of 0.01", solved, literal, not_literal),
    ]


def depth_claims():
    """Return the rows on how many layers are needed."""
    rows = sweep.section_7(depth.chains(committed("*")))
    bound = [row for row in rows if row["layers"] < math.log(2 * row["D"], 3)]
    bound = [not depth.learned(row, row["D"]) for row in bound]
    shallow, limit, beyond = depth.too_shallow(rows)
    law = [number >= len(beyond) for number in range(shallow)]
    frozen = depth.count_exact(depth.chains(committed("sweep")), True)
    limit = f"; {limit} reach the limit; exact in {frozen} with frozen attention"
    figure_4 = [row for row in sweep.section_7(load_rows(committed("sweep"))) if row["ic"]]
    known = [[depth.learned(row, k) for k in range(1, row["D"] + 1)] for row in figure_4]
    later = [sorted(row)[::-1] == row for row in known if any(row)]
    fewer = ", with 1500 steps, not 10,000"
    cells = itertools.product((False, True), weights.MODELS)
    hops = [weights.count_above_chance(model, beyond) for beyond, model in cells]
    small = "two small models: one step above chance in {} and {} settings, more in {} and {}"
    small = small.format(*hops)
    return [
        claim("depth", "x_D needs log3(2D) layers or more", bound),
        claim("depth", "in practice more; our law is floor(log2 D) + 2", law, limit),
        claim("depth", "Figure 4: no later symbol without the earlier ones", later, "", fewer),
        (
            "Figure 2: language models solve the problem",
            small,
            "not measured for large models",
            "../llm/README",
        ),
    ]


def circuit_claims():
    """Return the rows on the circuits of all solved models of a chain (Section 8, Appendix E)."""
    rows = circuits.load_reports(committed("[ABCD]", "runs/*/*"))
    rows = [row for row in rows if circuits.searched(row) and row["flags"].task == "chain"]
    tests, previous, more = [row["report"]["paper"] for row in rows], [], []
    for row in rows:
        heads = ablate.by_head(ablate.paths_in(row["report"], row["flags"].problem))
        ends = [(sum(path.reader), sum(path.read)) for path in heads[min(heads)]]  # role + offset
        previous.append(all(source == target + 1 for source, target in ends))
        more.append(len(heads) > max(least_layers(row["flags"].problem)))
    validated = [row["report"]["validated"] for row in rows]
    held, uniform = ([test[key] for test in tests] for key in ("held", "first_uniform"))
    held, uniform = [loss < 0.05 for loss in held], [0.05 <= loss <= 0.1 for loss in uniform]
    removed = [all(0.17 <= loss <= 0.89 for loss in test["removed"]) for test in tests]
    return [
        claim("circuits", "the circuit of a solved model can be found and validated", validated),
        claim("circuits", "with all ablations the MSE stays below 0.05", held),
        claim("circuits", "it is 0.17 to 0.89 without any path", removed),
        claim("circuits", "it is 0.05 to 0.1 if the first useful head is uniform", uniform),
        claim("circuits", "the first useful head attends to the previous position", previous),
        claim("circuits", "no circuit has as few heads as possible", more),
    ]


def table(short=True):
    """Return the table of all claims for their page, or of the most important for the README."""
    training, deep, last = training_claims(), depth_claims(), circuit_claims()
    rows = [*training[:5], deep[1], last[0]] if short else [*training, *deep, *last]
    folder = "results/" if short else ""
    rows = [(*row, f"[{page}]({folder}{page}.md)") for *row, page in rows]
    return markdown(["the paper", "ours, of the runs that could refute it", "verdict", ""], *rows)


if __name__ == "__main__":
    print(table(short=False))
