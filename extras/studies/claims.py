"""The paper, claim by claim: in how many of our committed runs each is true.

    python -m extras.studies.claims    # prints the counts

A run stands in a count if it could refute the claim, among the runs that the function of the claim
names. Of repeats of the same settings and seed the first one alone stands there (rows.once), but in
8.2, where the repeat on another machine is the point.
"""

import math

from ablate import by_head, paths_in, split_token
from data import command_line
from extras import studies
from extras.studies import circuits, depth, layers, metrics, order
from extras.studies.circuits import with_circuit
from extras.studies.order import count
from extras.studies.rows import committed, flags_of, name_of, once, replaced, settings_text
from train import DEFAULTS


# the row of the table: what would refute the claim
CLAIMS = {
    "5": "x_2 known in one layer",
    "7.2, alone": "a loss of 0.7 or below",
    "7.2, layers": "fewer layers than that law",
    "7.2, order": "another order",
    "8.2": "0.01 or more at the end",
    "8.2 i": "another read in that head",
    "8.2 ii, four": "another number",
    "E 5, 6": "0.05 with all, or below 0.17 without one",
    "9.2 i, slow": "x_1 before step 3600",
    "9.2 i, head": "half of x_1 stays without a read",
    "9.2 ii": "a symbol stays without any one",
    "9.2 iii": "none or several between two",
    "9.2 iv": "a longer gap before",
    "10.1": "3 standard errors above chance",
}


# ---- Sections 5, 7 and 10.1


def bound():
    """Return the cell of Theorem 1: in how many models of one layer of 16 heads that know x_1, of
    those asked for x_2 too, x_2 stays unknown; and the losses of x_2 of led ones."""
    texts = []
    for N, steps in (2, 10_000), (4, 4000):
        rows = [row for row in depth.rows_of(1, 16, N, 2, steps) if row["x_1"] < row["threshold"]]
        texts.append(f"N = {N}: {studies.share(row['x_2'] >= row['threshold'] for row in rows)}")
    _, three, four = map(depth.median_of, depth.led_to_x2())
    led = f"led to N = 3 and 4: losses {three:.2f} and {four:.2f} (chance 0.67 and 0.75)"
    return "; ".join([*texts, led])


def few_layers_show():
    """Return the cell of Section 10.1: of symbols that Theorem 1 excludes, in models that know
    another one; those of led models by their loss alone, which must be as low as chance."""
    rows = metrics.load_metrics()
    learners = {row["run"] for row in rows if metrics.shown(row)}
    few = [row for row in rows if row["run"] in learners and metrics.too_few_layers(row)]
    nothing = {N: [not metrics.shown(row) for row in few if row["N"] == N] for N in (2, 4)}
    _, three, four = depth.led_to_x2()
    led = [row["x_2"] > 0.95 * (1 - 1 / row["N"]) for row in three + four]
    scratch = "; ".join(f"N = {N}: {studies.share(group)}" for N, group in nothing.items())
    return f"{scratch}; led to N = 3 and 4: {studies.share(led)}"


def alone():
    """Return ([(flags, whether the loss stays above 0.7), ...] of the runs that ask for x_D alone,
    left out). A run counts if some run of the same settings and seed, but perhaps of other D and
    steps, learned x_D in no more steps, asked for all symbols; the others are left out."""
    single, curricula = [], {}
    for flags, learned, losses, _ in order.all_chains():
        key = settings_text(replaced(flags, targets="all", D=1, steps=1, stop_below=0)), flags.seed
        if order.asks_all(flags):
            for name, step in learned.items():
                if step is not None:
                    curricula.setdefault((*key, name), []).append(step)
        elif flags.targets == "last" and not flags.init:
            name = f"x_{flags.D}"
            single.append((flags, (*key, name), losses[name]))
    answers = []
    for flags, key, loss in single:
        if min(curricula.get(key, [math.inf])) <= flags.steps:
            answers.append((flags, loss > 0.7))
    return answers, len(single) - len(answers)


def fewest_layers():
    """Return "2, 3, 3, 4 and 4": the fewest layers of a run of sweeps that knows x_1, x_2, ..."""
    fewest = {}
    for run in layers.long_chains():
        if run.flags.heads == 8:
            for name in run.known:
                fewest[name] = min(run.flags.layers, fewest.get(name, math.inf))
    *first, last = [str(fewest[name]) for name in sorted(fewest)]
    return f"{', '.join(first)} and {last}"


# ---- Sections 8 and 9


def first_goes_back(row):
    """Return whether all paths of the first useful head lead to the token before."""
    heads, names = by_head(paths_in(row["report"])), [*row["task"].roles]
    for path in heads[min(heads)]:
        reader, read = (names.index(role) + offset for role, offset in map(split_token, path[2:]))
        if reader != read + 1 or "*" in path.read:
            return False
    return True


def has_four_heads(row):
    return len(by_head(paths_in(row["report"]))) == 4


def needs_both():
    """Return [(flags, whether x_1 needs both reads of an induction head), ...] of induction.jsonl,
    at the first checkpoint that knows x_1."""
    answers = []
    for row in order.load_induction():
        named = {name: row[name] for name in row if name in DEFAULTS}
        flags = replaced(flags_of(named), seed=int(row["run"].rpartition("s")[2]))
        answers.append((flags, all(order.needed(row, kind) for kind in order.HEADS)))
    return answers


def emergences():
    """Return the rows of runs whose paths were measured in training."""
    return once([row for row in committed(*order.EMERGED) if row["emergence"]])


def reads_one_by_one(row):
    """Return whether the query comes to read 1b, 2b, ... in this order, and one new head emerges
    between any two symbols."""
    return order.reads_in_order(row, 0.5) is not False and {*order.new_heads(row, 0.5)} == {1}


# ---- the pages


def induction():
    """Return what the page on circuits says of the induction head."""
    return [f"loses half of what it knows ({studies.share(both for _, both in needs_both())})"]


def alone_claim():
    """Return what the page on the curriculum says of the last symbol alone."""
    answers, left_out = alone()
    return [
        f"learns it in no more steps ({studies.share(answer for _, answer in answers)})",
        f"leaves out {left_out} without this control",
    ]


def answers_of():
    """Return {row of CLAIMS: [(flags of a run that could refute it, whether it does not), ...]}."""
    same = [row for row in committed("[ABC]", "adamw/*") if order.ended(row)]
    found, emerged = with_circuit(), emergences()
    of_three = [row for row in found if row["flags"].D == 3]
    tested, _ = circuits.one_hot()
    D = committed("D", "literal/D_s0", "rope/D_s0")
    late = {level: gap > longest for level, _, gap, longest in order.last_paths(D[0])}

    def answers(rows, test):
        return [(row["flags"], test(row)) for row in rows]

    return {
        "7.2, alone": alone()[0],
        "7.2, layers": layers.obey_the_flow(),
        "7.2, order": order.count_orders()[0],
        "8.2": answers(same, lambda row: row["mse"] < 0.01),
        "8.2 i": answers(found, first_goes_back),
        "8.2 ii, four": answers(of_three, has_four_heads),
        "E 5, 6": answers(tested, lambda row: row["report"]["paper"]["passed"]),
        "9.2 i, slow": answers(D, lambda row: row["learned"]["x_1"] >= 3600),
        "9.2 i, head": needs_both(),
        "9.2 ii": answers(found, circuits.reuses),
        "9.2 iii": answers(emerged, reads_one_by_one),
        "9.2 iv": [(D[0]["flags"], late[0.5])],
    }


def table():
    """Return a row per claim: AdamW with appended positions beside all others."""
    lines, found = [], answers_of()
    for name, refuted in CLAIMS.items():
        ours = [[], []]
        for flags, answer in found.get(name, []):
            papers = flags.optimizer == "adamw" and flags.positions == "appended"
            ours[not papers].append((flags, answer))
        cells = [count(part) for part in ours]
        if name == "8.2":
            literal = [row["mse"] < 0.01 for row in committed("literal/no_aid_*")]
            cells[0] += f"; literal: {studies.share(literal)}"
        if name == "7.2, layers":
            obeyed = [not beyond for beyond in depth.beyond_the_flow()]
            cells[1] = f"D of 5 or more, N = 4: {cells[1]}; others: {studies.share(obeyed)}"
        if name in ("5", "10.1"):
            cells[1] = bound() if name == "5" else few_layers_show()
        lines.append([name, *cells, refuted])
    head = "section", "AdamW, positions appended", "Muon, RoPE, or both", "refuted by"
    return studies.markdown(head, *lines)


def lowest_loss(*names):
    """Return the lowest validation loss of these runs at any step."""
    return min(entry["val"] for row in committed(*names) for entry in row["log"])


def verdicts():
    """Return the numbers in the table of verdicts."""
    [D], [A_again] = committed("D"), committed("adamw/s0")
    four = [name_of(row) for row in committed("[ABC]") if has_four_heads(row)]
    others = [name_of(row) for row in emergences() if order.reads_in_order(row, 0.5) is False]
    return [
        f"Of A, B and C only {' and '.join(four)} has four",
        f"1b, 2b, ... in this order in all but {' and '.join(others)}",
        f"x_1 to x_5 first appear with {fewest_layers()} layers",
        f"Ours knows it at step {D['learned']['x_1']:.0f}",
        f"A's flags and seed, on another machine, end at {A_again['mse']:.2f}",
        f"models fall, one to {lowest_loss('literal/no_aid_*'):.3f}",
    ]


if __name__ == "__main__":
    command_line("python -m extras.studies.claims", __doc__).parse_args()
    print(table())
