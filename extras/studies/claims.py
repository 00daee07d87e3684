"""The paper, claim by claim, and what our committed runs say of each.

    python -m extras.studies.claims    # prints the table

A run counts once: of repeats of the same settings and seed the first one alone (rows.once).
"""

import itertools
import math

from ablate import by_head, parts_of, paths_in
from data import Task, command_line
from extras import studies
from extras.studies import circuits, depth, metrics, order
from extras.studies.order import count
from extras.studies.rows import (
    committed,
    flags_of,
    name_of,
    once,
    replaced,
    settings_text,
)
from extras.studies.theory import causal_depth, least_layers, paper_bound
from train import DEFAULTS, task_of


# name | section | page | the claim; below it, what would refute it
CLAIMS = """
layers | 5 | depth | x_k needs log3(2k) layers
x_k known with fewer layers (models that learn some symbol)
alone | 7.2 | curriculum | x_D alone is not learned, the loss stays above 0.7
a loss of 0.7 or below
later | 7.2 | depth | later symbols need more layers
a symbol first known with no more layers than the one before (pairs of symbols)
order | 7.2 | emergence | the losses of x_1, x_2, ... pass 0.5 in this order
any other order
solved | 8.2 | paper | A, B and C end with an MSE below 0.01
0.01 or more at the end (all runs of their flags that ended)
previous | 8.2 i | circuits | the first useful head reads the token before
it has a path to another token
four | 8.2 ii | circuits | the circuits have four heads (D=3)
another number
hard | E 5, 6 | circuits | with hard attention the MSE is low, without a later path high
0.05 or more with all paths, or below 0.17 without one
slow | 9.2 i | emergence | transformer D learns x_1 after 3600 slow steps
x_1 below 0.5 before step 3600
needs | 9.2 i | emergence | x_1 is learned with an induction head
half of what is learned stays without q -> 1b, or without 1b -> 1a, in all heads
reuse | 9.2 ii | emergence | later symbols reuse one induction head
one stays below 0.5 without any one q -> 1b, or without any one 1b -> 1a (heads may share it)
reads | 9.2 iii | emergence | one new head for each later symbol reads 1b, 2b, ... in this order
another order, or none or several new heads between two symbols
last | 9.2 iv | emergence | D's last head emerges much later
a longer gap between two earlier paths
metrics | 10.1 | paper | with too few layers no metric shows learning
one is above chance by 3 standard errors (symbols of models in which one shows some)
"""


def budget(answers):
    """Return "0.2-1.6", how many millions of sequences these runs were given at most."""
    return studies.span([flags.steps * flags.batch / 1e6 for flags, _ in answers], "{:.1f}")


def by_N(answers):
    """Return "N = 2: 0 of 5 (5 seeds); N = 4: 15 of 15 (8 seeds)"."""
    numbers = sorted({flags.N for flags, _ in answers})
    groups = {N: [answer for answer in answers if answer[0].N == N] for N in numbers}
    return "; ".join(f"N = {N}: {count(group)}" for N, group in groups.items())


def asked(row):
    """Return the flags of a row of a table that names some of them."""
    return flags_of({name: row[name] for name in row if name in DEFAULTS and name != "init"})


# ---- Sections 5 and 7


def bounded():
    """Return [(flags, whether it learns no symbol for which Theorem 1 asks for more layers), ...],
    of each run of chains with such a symbol that learns something, from fresh weights or led; of
    runs that differ in nothing but their steps the longest one."""
    runs = []
    for flags, learned, _ in order.all_chains():
        names = [name for name, step in learned.items() if step is not None]
        if order.asks_all(flags):
            runs.append((flags, "", names))
    for (other, *_), rows in depth.cells().items():
        for row in rows if "--task" not in other else []:
            flags = replaced(asked(row), rotary="qk" if "qk" in other else "input")
            names = task_of(flags).target_names
            names = [name for name in names if row[name] < row["threshold"]]
            runs.append((flags, other, names))
    answers = {}
    for flags, other, names in sorted(runs, key=lambda run: run[0].steps):
        beyond = {f"x_{k}" for k in range(1, flags.D + 1) if paper_bound(k) > flags.layers}
        if names and beyond:
            key = settings_text(replaced(flags, steps=1, stop_below=0)), other, flags.seed
            answers[key] = flags, not {*names} & beyond
    return [*answers.values()]


def alone():
    """Return ([(flags, whether the loss stays above 0.7), ...] of the runs that ask for x_D alone,
    left out). A run counts if some run of the same settings and seed, but perhaps of other D and
    steps, learned x_D in no more steps, asked for all symbols; the others are left out."""
    single, curricula = [], {}
    for flags, learned, loss in order.all_chains():
        key = settings_text(replaced(flags, ic=True, D=1, steps=1, stop_below=0)), flags.seed
        if order.asks_all(flags):
            for name, step in learned.items():
                if step is not None:
                    curricula.setdefault((*key, name), []).append(step)
        elif not (flags.ic or flags.init):
            single.append((flags, (*key, f"x_{flags.D}"), loss))
    answers = []
    for flags, key, loss in single:
        if min(curricula.get(key, [math.inf])) <= flags.steps:
            answers.append((flags, loss > 0.7))
    return answers, len(single) - len(answers)


def fewest_layers():
    """Return {x_k: the flags of the run with the fewest layers, of sweeps, that knows it}."""
    fewest = {}
    for row in studies.load_rows(studies.committed("*")):
        flags = flags_of(row)
        if order.asks_all(flags) and flags.causal:
            task = task_of(flags)
            for name in task.target_names:
                known = row[name] < task.learned_below
                if known and flags.layers < getattr(fewest.get(name), "layers", math.inf):
                    fewest[name] = flags
    return dict(sorted(fewest.items()))


# ---- Sections 8 and 9, and Appendix E


def with_circuit():
    """Return the rows of chain models of more than one layer with a validated circuit, without
    which the model was seen to fail."""
    rows = [row for row in committed("*") if row["report"].get("validated")]
    rows = [row for row in rows if "knocked_out" in row["report"] and row["flags"].layers > 1]
    return once([row for row in rows if row["flags"].task == "chain"])


def first_goes_back(row):
    """Return whether all paths of the first useful head lead to the token before."""
    heads, names = by_head(paths_in(row["report"])), [*row["task"].roles]
    for path in heads[min(heads)]:
        reader, read = (names.index(role) + offset for role, offset in map(parts_of, path[2:]))
        if reader != read + 1 or "*" in path.read:
            return False
    return True


def hard():
    """Return [(flags, whether its circuit passes steps 5 and 6 of Appendix E), ...]."""
    tests = [(row["flags"], row["report"].get("paper")) for row in with_circuit()]
    return [(flags, test["passed"]) for flags, test in tests if test]


def reuses(row):
    """Return whether the full model of a run loses x_2 and all later symbols without some path of
    either kind that an induction head needs."""
    full, kinds = row["report"]["full_model"], set()
    for path in row["report"]["paths"]:
        names = row["task"].target_names[1:]
        losses = [full[name] + path["cost"][name] for name in names]
        if min(losses) >= row["task"].learned_below:
            kinds.add(f"{path['reader']} -> {path['read']}")
    return kinds >= {*order.HEADS}


def needs_both():
    """Return [(flags, whether x_1 needs both reads of an induction head), ...] of induction.jsonl,
    at the first checkpoint that knows x_1."""
    answers = []
    for row in order.load_induction():
        flags = replaced(asked(row), seed=int(row["run"].rpartition("s")[2]))
        answers.append((flags, all(order.needed(row, kind) for kind in order.HEADS)))
    return answers


# ---- the table


def rows():
    """Return {name of CLAIMS: (answers, what the row says besides)}; answers: [(flags of a run that
    could refute it, whether it does not), ...]"""
    bound = bounded()
    single, left_out = alone()
    depths = studies.span([flags.layers for flags, _ in single], "{}")
    fewest = [*fewest_layers().values()]
    pairs = [(later, first.layers < later.layers) for first, later in itertools.pairwise(fewest)]
    same = committed("[ABC]", "adamw/*")
    ended = [row for row in same if order.ended(row)]
    stopped = [f"step {row['steps']} at {row['mse']:.2f}" for row in same if not order.ended(row)]
    literal = committed("literal/no_aid_*")
    once_below = sum(min(entry["val"] for entry in row["log"]) < 0.01 for row in literal)

    # circuits
    found, tested = with_circuit(), hard()
    heads = [
        (row["flags"], len(by_head(paths_in(row["report"]))))
        for row in found
        if row["flags"].D == 3
    ]

    # emergence, and metrics
    D = committed("D", "literal/D_s0", "rope/D_s0")
    late = {level: gap > longest for level, _, gap, longest in order.last_paths(D[0])}
    emerged = once([row for row in committed(*order.EMERGED) if row["emergence"]])
    in_order = [(row["flags"], order.reads_in_order(row, 0.5)) for row in emerged]
    known = [(flags, answer) for flags, answer in in_order if answer is not None]
    exceptions = [name_of(row) for row in emerged if order.reads_in_order(row, 0.5) is False]
    new = [{*order.new_heads(row, 0.5)} == {1} for row in emerged]
    one = [(flags, a is not False and b) for (flags, a), b in zip(in_order, new, strict=True)]
    back = [(row["flags"], first_goes_back(row)) for row in found]
    rope = [answer for answer in back if answer[0].rotary == "qk"]
    measured = metrics.load_metrics()
    learners = {row["run"] for row in measured if metrics.shown(row)}
    few = [row for row in measured if row["run"] in learners and metrics.too_few_layers(row)]
    nothing = [(asked(row), not metrics.shown(row)) for row in few]
    return dict(
        layers=(bound, by_N(bound)),
        alone=(
            single,
            f"{depths} layers; {left_out} left out: no run of their seed and flags, but perhaps of "
            "other D, asked for all, learns it so soon",
        ),
        later=(pairs, f"in sweeps: {', '.join(str(flags.layers) for flags in fewest)}"),
        order=(order.count_orders()[0], ""),
        solved=(
            [(row["flags"], row["mse"] < 0.01) for row in ended],
            f"two ran twice, one was stopped ({', '.join(stopped)}); literal settings: "
            f"{sum(row['mse'] < 0.01 for row in literal)} of 3 at the end, {once_below} before",
        ),
        previous=(back, f"RoPE: {count(rope)}"),
        four=([(flags, n == 4) for flags, n in heads], studies.span([n for _, n in heads], "{}")),
        hard=(tested, f"{len(found) - len(tested)} left out, with stars"),
        slow=([(row["flags"], row["learned"]["x_1"] >= 3600) for row in D], ""),
        needs=(needs_both(), ""),
        reuse=([(row["flags"], reuses(row)) for row in found], ""),
        reads=(one, f"the order alone: {count(known)}, not {', '.join(exceptions)}"),
        last=([(D[0]["flags"], late[0.5])], f"at {sum(late.values())} of {len(late)} thresholds"),
        metrics=(nothing, by_N(nothing)),
    )


def table():
    """Return a row per claim."""
    found, lines = rows(), []
    texts = CLAIMS.strip().splitlines()
    for claim, refuted in zip(texts[::2], texts[1::2], strict=True):
        name, section, page, text = claim.split(" | ")
        answers, more = found[name]
        ours = [[], []]
        for flags, answer in answers:
            ours[(flags.optimizer, flags.rotary) != ("adamw", "input")].append((flags, answer))
        cells = [count(part) for part in ours]
        share = "" if name in ("needs", "metrics") else budget(answers)  # no steps in their rows
        beside = f"*{refuted}*" + f"; {more}" * bool(more)
        lines.append([section, f"[{text}]({page}.md)", *cells, share, beside])
    head = "", "the paper", "AdamW, positions appended", "all others", "sequences, millions"
    return studies.markdown([*head, "*refuted if*; beside"], *lines)


# ---- the README


def findings():
    """Return what came out, as bullets in Markdown."""
    agree = [least_layers(Task(1, k))[-1] == causal_depth(k) for k in range(1, 21)]
    fresh = circuits.seeds("main command")[1]
    return [
        f"""\
- **[Depth](results/depth.md)**: with a causal mask, if a token may attend only to its own pair and
  to tokens that know a symbol that it knows, x_k takes floor(log2 k) + 2 layers (simulated:
  {sum(agree)} of {len(agree)} k). Theorem 1's log3(2k) held in some models that learn a symbol and
  could break it ({by_N(bounded())}).""",
        f"""\
- **[Order](results/emergence.md)**: the losses of x_1, x_2, ... fell below 0.5 in this order in
  {count(order.count_orders()[0])} runs.""",
        f"""\
- **[Induction](results/emergence.md)**: when x_1 was learned, it needed both reads of an induction
  head, q -> 1b and 1b -> 1a, in {count(needs_both())} runs.""",
        f"""\
- **[Circuits](results/circuits.md)**: the search validated a circuit under both ablations in
  {circuits.both(fresh)} seeds of the main command on which it was not fitted.""",
        f"""\
- **[Heads](results/depth.md)**: where pairs stand at few places, enough heads replace a layer. One
  layer of 2N heads or more, asked for x_1 alone, solved it in {depth.solved_of(depth.wide())} runs
  of the first table; of 23 places, 8 to 32 heads in {depth.solved_of(depth.far())}.""",
        f"""\
- **What did not hold**: the paper's circuits still answer with one-hot attention, and no longer if
  then one later path is removed (Appendix E). Of ours {count(hard())} circuits pass both.""",
    ]


if __name__ == "__main__":
    command_line("python -m extras.studies.claims", __doc__).parse_args()
    print(table())
