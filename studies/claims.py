"""The paper, claim by claim: what our committed runs say, the most important first.

python -m studies.claims    # prints the table
"""

import math

from parts.theory import least_layers

import sweep
from studies import circuits, committed, curriculum, depth, load_row, load_rows, markdown, order


def claim(text, answers, page, more="", condition=""):
    """Return a row: a claim of the paper, in how many of the runs that could refute it it is True,
    what else there is to say of them, the verdict with its condition, and the page."""
    verdict = "holds in part" if any(answers) else "does not hold"
    verdict = "holds" if all(answers) else verdict
    return text, f"{sum(answers)} of {len(answers)}{more}", verdict + condition, page


def first_head_reads_previous_token(row):
    """Return whether the lowest head of a circuit has no other paths than from kb to ka."""
    paths = row["report"]["paths"]
    first = min((path["layer"], path["head"]) for path in paths)
    paths = [path for path in paths if (path["layer"], path["head"]) == first]
    return all(
        path["source"] + path["target"] in ("1b1a", "2b2a", "3b3a", "4b4a") for path in paths
    )


def has_more_heads_than_layers_needed(row):
    heads = {(path["layer"], path["head"]) for path in row["report"]["paths"]}
    return len(heads) > max(least_layers(row["flags"].problem))


def training_claims():
    """Return the rows on what is learned, and when."""
    counts = order.count_all()
    ordered = [number < counts["in_order"] for number in range(counts["several"])]
    above = [number < counts["above"] for number in range(counts["alone"])]
    gaps = curriculum.learned_despite_gap(committed("runs/curriculum/*")).values()
    gaps = [not answer for answers in gaps for answer in answers]

    # the induction head, transformer D, and A to C
    rows = order.load_rows_with_paths(committed(*sum(order.MEASURED.values(), [])))
    rows = [row for row in rows if "there" in row]
    before = [all(row["before"].values()) for row in rows]
    lost = [all(row["lost"].values()) for row in rows if row["run"].parent.name != "default"]
    lost += map(order.is_lost, order.load_first_learned())
    D = [load_row(run) for run in committed("D", "runs/rope/D_s0", "runs/literal/D_s0")]
    steps, ends = [row["learned"]["x_1"] for row in D], [row["mse"] for row in D]
    late = f" (at steps {', '.join(f'{step:.0f}' for step in steps)})"
    end = f" (they end at {', '.join(f'{loss:.3f}' for loss in ends)})"
    solved = [load_row(run)["mse"] < 0.01 for run in committed("[ABC]")]
    literal = [load_row(run)["mse"] < 0.01 for run in committed("runs/literal/no_aid_*")]
    literal = f"; {sum(literal)} of {len(literal)} with the literal settings"
    return [
        claim("x_1 is learned first, then x_2, and so on", ordered, "order"),
        claim("x_D alone is not learned: its loss stays above 0.7", above, "depth"),
        claim(
            "the implicit curriculum is necessary",
            gaps,
            "curriculum",
            " learn nothing above a symbol that is no target",
            ", on few runs for each symbol",
        ),
        claim(
            "an induction head emerges before x_1 is learned",
            before,
            "order",
            f" by its attention; x_1, just learned, needs both paths in {sum(lost)} of {len(lost)}",
        ),
        claim(
            "D learns x_1 after 3600 slow steps",
            [step > 3000 for step in steps],
            "emergence",
            late,
            ": a failed replication",
        ),
        claim(
            "D ends at an MSE of 0.031",
            [loss < 0.0315 for loss in ends],
            "emergence",
            end,
            ": not with the literal settings",
        ),
        claim(
            "A to C end below an MSE of 0.01",
            solved,
            "circuits",
            literal,
            ", with warm-up, clipping and a falling rate",
        ),
    ]


def depth_claims():
    """Return the rows on how many layers are needed."""
    rows = sweep.section_7(depth.chains(committed("*")))
    shallow, limit, beyond = depth.too_shallow(rows)
    law = [number >= len(beyond) for number in range(shallow)]
    bound = [row for row in rows if row["layers"] < math.log(2 * row["D"], 3)]
    bound = [not depth.learned(row, row["D"]) for row in bound]
    frozen = depth.count_exact(depth.chains(committed("sweep")), True)
    limit = f" learn no more; {limit} reach the limit; exact in {frozen} with frozen attention"
    figure_4 = [row for row in sweep.section_7(load_rows(committed("sweep"))) if row["ic"]]
    known = [[depth.learned(row, k) for k in range(1, 6)] for row in figure_4]
    later = [answers == sorted(answers, reverse=True) for answers in known]
    return [
        claim("x_D needs log3(2D) layers or more", bound, "depth", " do not learn x_D"),
        claim("in practice more: by our law floor(log2 D) + 2", law, "depth", limit),
        claim(
            "Figure 4: later symbols need more layers",
            later,
            "depth",
            " learn no later symbol without all earlier ones",
            ", at 1500 of the paper's 10,000 steps",
        ),
        ("Figure 2: language models solve the problem", "0 of 0", "not measured", "../llm/README"),
    ]


def circuit_claims():
    """Return the rows on the circuits that ablate.py found."""
    rows = circuits.load_reports(committed("[ABCD]", "runs/*/*"))
    rows = [row for row in rows if circuits.searched(row) and row["flags"].task == "chain"]
    tests = [row["report"]["paper"] for row in rows]
    removed = [all(0.17 <= loss <= 0.89 for loss in test["removed"]) for test in tests]
    return [
        claim(
            "a circuit explains each solved model",
            [row["report"]["validated"] for row in rows],
            "circuits",
            " are validated by ablation to the mean",
        ),
        claim(
            "with all ablations the MSE stays below 0.05",
            [test["held"] < 0.05 for test in tests],
            "circuits",
        ),
        claim("without any path it is 0.17 to 0.89", removed, "circuits"),
        claim(
            "with the first useful head uniform it is 0.05 to 0.1",
            [0.05 <= test["first_uniform"] <= 0.1 for test in tests],
            "circuits",
        ),
        claim(
            "the first useful head attends to the previous position",
            [first_head_reads_previous_token(row) for row in rows],
            "circuits",
        ),
        claim(
            "no circuit has as few heads as possible",
            [has_more_heads_than_layers_needed(row) for row in rows],
            "circuits",
        ),
    ]


def table(short=True):
    """Return the table of all claims for their page, or of the most important for the README."""
    training, deep, found = training_claims(), depth_claims(), circuit_claims()
    folder = "results/" if short else ""
    rows = [*training[:5], deep[1], found[0]] if short else [*training, *deep, *found]
    rows = [(*row, f"[{page}]({folder}{page}.md)") for *row, page in rows]
    return markdown(["the paper", "ours, of the runs that could refute it", "verdict", ""], *rows)


if __name__ == "__main__":
    print(table(short=False))
