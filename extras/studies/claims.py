"""The paper, claim by claim, and what our committed runs say of each.

    python -m extras.studies.claims    # prints the table

A run counts once: of repeats of the same settings and seed the first one alone (rows.once).
"""

import itertools
import math

from ablate import by_head, parts_of, paths_in
from data import command_line, program
from extras import studies
from extras.studies import metrics, order
from extras.studies.rows import RESULTS, committed, once, settings_of
from extras.studies.theory import least_layers, paper_bound
from train import DEFAULTS, Flags, read_file


COLUMNS = "AdamW", "Muon", "RoPE"
PAPER_SEQUENCES = 10_000 * 512  # that a run of Figure 4 sees
KIND = "{reader} -> {read}".format

# name | section | page | the claim; below it, what would refute it
CLAIMS = """
layers | 5 | depth | x_k needs log3(2k) layers
x_k known with fewer layers
alone | 7.2 | curriculum | x_D alone is not learned, the loss stays above 0.7
0.7 or below; in no more steps the same seed learns x_D if all are asked for
later | 7.2 | depth | later symbols need more layers: none is known without the earlier ones
a symbol known without the earlier ones
order | 7.2 | emergence | the losses of x_1, x_2, ... pass 0.5 in this order
any other order
solved | 8.2 | paper | A, B and C end with an MSE below 0.01
0.01 or more at the end
useless | 8.2 | circuits | most heads do nothing useful
half or more have a path in the circuit
previous | 8.2 i | circuits | the first useful head reads the token before
it has a path to another token
differ | 8.2 ii | circuits | after it, the circuits differ
two seeds with the same kinds of reads (pairs of seeds)
four | 8.2 ii | circuits | the circuits have four heads (D=3)
another number (beside: the range)
hard | E 5 | circuits | the MSE stays below 0.05 with all ablations
0.05 or more, attention 1 along the paths
range | E 6 | circuits | it is 0.17 to 0.89 without any one later path
a path outside this range
uniform | E 6 | circuits | it is 0.05 to 0.1 if the first useful head is uniform
a loss outside this range
slow | 9.2 i | emergence | transformer D learns x_1 after 3600 slow steps
x_1 below 0.5 before step 3600
abrupt | 9.2 i | emergence | then abruptly
from 90% to 10% of its plateau in no fewer steps (beside) than to 90%
first | 9.2 i | emergence | the circuit's first path above 0.5 is of an induction head
neither q -> 1b nor kb -> ka of any k
needs | 9.2 i | emergence | x_1, once learned, needs both reads of an induction head
just below 0.5, more than half of what is learned stays without one of them in all heads
reuse | 9.2 ii | emergence | later symbols reuse the induction head
one stays below 0.5 without 1b -> 1a
reads | 9.2 iii | emergence | the query comes to read 1b, 2b, ... in this order
a later one passes 0.5 first
one | 9.2 iii | emergence | one new head for each later symbol
none or several pass 0.5 between two symbols
last | 9.2 iv | emergence | D's last head emerges much later
a longer gap between two earlier paths
metrics | 10.1 | paper | with too few layers no metric shows learning
one is above chance by 3 standard errors (symbols)
"""
SHORT = "order", "alone", "needs", "first", "hard", "slow"  # in the README


def column_of(flags):
    """Return the column of a run: the paper's optimizer and its encoding as we read it, Muon with
    that encoding, or RoPE with either optimizer."""
    return "RoPE" if flags.rotary == "qk" else {"adamw": "AdamW", "muon": "Muon"}[flags.optimizer]


def count(answers):
    """Return "3 of 5", of [(flags, bool), ...]."""
    return f"{sum(answer for _, answer in answers)} of {len(answers)}" if answers else ""


def by_column(values):
    """Return {"AdamW": [(flags, value), ...], ...} of [(flags, value), ...]."""
    return {name: [pair for pair in values if column_of(pair[0]) == name] for name in COLUMNS}


# ---- Sections 5 and 7


def bounded():
    """Return [(flags, whether it learns no symbol for which Theorem 1 asks for more layers), ...],
    of each run (settings and seed) with such a symbol that learns its attention, and something."""
    runs = []
    for flags, learned, _ in order.all_chains():
        runs.append((flags, [name for name, step in learned.items() if step is not None]))
    for row in read_file(RESULTS / "runs/depth_width.jsonl"):
        flags = Flags(**(DEFAULTS | {name: row[name] for name in row if name in DEFAULTS}))
        flags = flags.replace(rotary="qk" if "qk" in row["other"] else "input")
        known = [name for name in flags.target_names if row[name] < row["threshold"]]
        if not {"frozen", "shuffled"} & {*row["other"].split()}:
            runs.append((flags, known))
    answers = {}
    for flags, names in runs:
        beyond = {f"x_{k}" for k in range(1, flags.D + 1) if paper_bound(k) > flags.layers}
        if order.asks_all(flags) and names and beyond:
            answers[settings_of(flags), flags.seed] = flags, not {*names} & beyond
    return [*answers.values()]


def alone():
    """Return ([(flags, whether the loss stays above 0.7), ...] of the runs that ask for x_D alone,
    left out). A run counts if some run of the same settings and seed, but perhaps of other D and
    steps, learned x_D in no more steps, asked for all symbols; the others are left out."""
    single, curricula = [], {}
    for flags, learned, loss in order.all_chains():
        key = settings_of(flags.replace(ic=True, D=1, steps=1, stop_below=0)), flags.seed
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


def budget(answers):
    shares = [flags.steps * flags.batch / PAPER_SEQUENCES for flags, _ in answers]
    return f"{studies.span(shares)} of the paper's sequences"


def earlier_too():
    """Return ([(flags, whether it knows no symbol without the earlier ones), ...] of the runs of
    sweeps, like Figure 4, that know any; "2, 3, 3", the fewest layers in which some run knows x_1,
    x_2, ...)."""
    answers, fewest = {}, {}
    for row in studies.load_rows(studies.committed("*")):
        flags = Flags(**row)
        known = [row[name] < flags.problem.learned_below for name in flags.target_names]
        if order.asks_all(flags) and flags.causal and any(known):
            key = settings_of(flags), flags.seed
            answers[key] = flags, sorted(known, reverse=True) == known
            for name in itertools.compress(flags.target_names, known):
                fewest[name] = min(flags.layers, fewest.get(name, math.inf))
    return [*answers.values()], ", ".join(str(fewest[name]) for name in sorted(fewest))


def sections_5_and_7():
    """Return {name: (answers, what the row says besides)} of CLAIMS, as do the functions below;
    answers: [(flags of a run that could refute it, whether it does not), ...]"""
    single, left_out = alone()
    earlier, fewest = earlier_too()
    return dict(
        layers=(bounded(), ""),
        alone=(single, f"{budget(single)}; {left_out} without such a seed left out"),
        later=(earlier, f"fewest layers, x_1 to x_5: {fewest}; {budget(earlier)}"),
        order=(order.count_orders()[0], ""),
    )


# ---- Section 8 and Appendix E


def with_circuit():
    """Return the rows of chain models of more than one layer with a validated circuit."""
    rows = [row for row in committed("*") if row["report"].get("validated")]
    rows = [row for row in rows if row["flags"].task == "chain" and row["flags"].layers > 1]
    return once(rows)


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


def different_pairs(rows):
    """Return [(flags, whether two circuits differ after their first head), ...], of all pairs of
    seeds with the same settings."""
    answers = []
    for a, b in itertools.combinations(rows, 2):
        if a["settings"] == b["settings"]:
            answers.append((a["flags"], later_kinds(a) != later_kinds(b)))
    return answers


def section_8():
    found, solved = with_circuit(), []
    for rows in committed("[ABC]"), committed("adamw/*"), committed("literal/no_aid_*"):
        solved.append([(row["flags"], row["mse"] < 0.01) for row in rows if order.ended(row)])
    again, literal = map(count, solved[1:])

    # heads
    heads = [(row["flags"], len(heads_of(row))) for row in found]
    four = [(flags, n == 4) for flags, n in heads if flags.D == 3]
    ranges = {}
    for name, pairs in by_column(heads).items():
        ranges[name] = f" ({studies.span([n for flags, n in pairs if flags.D == 3], '{}')})"
    more = [(flags, n > max(least_layers(flags.problem))) for flags, n in heads]

    # the paper's test
    tests = [(row["flags"], row["report"]["paper"]) for row in found if "paper" in row["report"]]
    hard = [(flags, test["held"] < 0.05) for flags, test in tests]
    needed = [(flags, all(0.17 <= x <= 0.89 for x in test["removed"])) for flags, test in tests]
    both = [pair for pair, (_, low) in zip(needed, hard, strict=True) if low]
    uniform = [(flags, 0.05 <= test["first_uniform"] <= 0.1) for flags, test in tests]
    return dict(
        solved=(solved[0], f"two repeated elsewhere: {again}; literal settings: {literal}"),
        useless=([(flags, 2 * n < flags.layers * flags.heads) for flags, n in heads], ""),
        previous=([(row["flags"], first_goes_back(row)) for row in found], ""),
        differ=(different_pairs(found), ""),
        four=(four, f"above the least number: {count(more)}", ranges),
        hard=(hard, ""),
        range=(needed, f"of those below 0.05 above: {count(both)}"),
        uniform=(uniform, ""),
    )


# ---- Sections 9 and 10


def needs_both():
    """Return [(flags, whether x_1 needs both reads of an induction head), ...] of induction.jsonl,
    at the first checkpoint that knows x_1."""
    answers = []
    for row in order.load_induction():
        recipe = {name: row[name] for name in ("rotary", "optimizer")}
        needed = [order.needed(row, kind) for kind in order.HEADS]
        answers.append((Flags(**{**DEFAULTS, **recipe}), all(needed)))
    return answers


def lost_without(row, kind, names):
    """Return (flags, whether the full model of a run loses all of these symbols without some path
    of this kind)."""
    full, flags = row["report"]["full_model"], row["flags"]
    answers = []
    for path in row["report"]["paths"]:
        if KIND(**path) == kind:
            cost = path["cost"]
            losses = [full[name][0] + cost[name][0] for name in names]
            answers.append(min(losses) >= flags.problem.learned_below)
    return flags, any(answers)


def scan(rows, decide):
    """Return (answers at a threshold of 0.5, how many runs answer so at any threshold)."""
    counts = [sum(decide(row, level) for row in rows) for level in order.LEVELS]
    text = f"{studies.span(counts, '{}')} of {len(rows)} by threshold, 0.2 to 0.9"
    return [(row["flags"], decide(row, 0.5)) for row in rows], text


def sections_9_and_10():
    D = committed("D", "literal/D_s0", "rope/D_s0")
    learned = studies.steps_text(row["learned"]["x_1"] for row in D)
    lasts = {level: gap > longest for level, _, gap, longest in order.last_paths(D[0])}
    late = f"n = 1; at {sum(lasts.values())} of {len(lasts)} thresholds, 0.2 to 0.9"

    few = [row for row in metrics.load_metrics() if metrics.too_few_layers(row)]
    shallow = f"{len({row['run'] for row in few})} runs, 1 or 2 layers"

    # how x_1 falls
    chains = [row for row in once(committed("*")) if row["flags"].task == "chain"]
    chains = [row for row in chains if order.asks_all(row["flags"]) and row["flags"].D > 1]
    falls = [(row["flags"], order.wait_and_fall(row)) for row in chains]
    falls = [(flags, steps) for flags, steps in falls if steps]
    medians = {}
    for name, pairs in by_column(falls).items():
        medians[name] = f" ({studies.spread([fall for _, (_, fall) in pairs])})"

    # what grows, and what is reused
    rows = once([row for row in committed(*order.EMERGED) if row["emergence"]])
    rows = [row for row in rows if not row["report"] or row["report"]["paths"]]
    older = sum(not row["report"] for row in rows)
    reuse, control = [], []
    for row in with_circuit():
        reuse.append(lost_without(row, "1b -> 1a", row["flags"].target_names[1:]))
        control.append(lost_without(row, "{0}b -> {0}a".format(row["flags"].D), ["x_1"]))
    first, first_by = scan(rows, order.induction_first)
    return dict(
        slow=([(row["flags"], row["learned"]["x_1"] >= 3600) for row in D], f"at steps {learned}"),
        abrupt=([(flags, fall < wait) for flags, (wait, fall) in falls], "", medians),
        first=(first, f"{first_by}; of {older} without a report, all measured paths"),
        needs=(needs_both(), ""),
        reuse=(reuse, f"control: x_1 lost without the last kb -> ka: {count(control)}"),
        reads=scan(rows, order.reads_in_order),
        one=scan(rows, lambda row, level: {*order.new_heads(row, level)} == {1}),
        last=([(D[0]["flags"], lasts[0.5])], late),
        metrics=([(Flags(**DEFAULTS), not metrics.shown(row)) for row in few], shallow),
    )


# ---- the tables


def rows():
    """Return {name: (section, page, claim, refutation, what else there is to say, {column:
    counts})} of CLAIMS."""
    found = sections_5_and_7() | section_8() | sections_9_and_10()
    lines, rows = CLAIMS.strip().splitlines(), {}
    for words, refuted in zip(lines[::2], lines[1::2], strict=True):
        name, section, page, text = words.split(" | ")
        answers, more, *beside = found[name]
        cells = {column: count(pairs) for column, pairs in by_column(answers).items()}
        for column, text_beside in beside[0].items() if beside else ():
            cells[column] += text_beside * bool(cells[column])
        rows[name] = section, page, text, refuted, more, cells
    return rows


def table():
    """Return the table of all claims for their page."""
    lines = []
    for section, page, text, refuted, more, cells in rows().values():
        beside = f"*{refuted}*" + f"; {more}" * bool(more)
        lines.append([section, f"[{text}]({page}.md)", *cells.values(), beside])
    return studies.markdown(["", "the paper", *COLUMNS, "*refuted if*; beside"], *lines)


def short_table():
    """Return six of the claims for the README."""
    lines, found = [], rows()
    for section, page, text, _, _, cells in (found[name] for name in SHORT):
        lines.append([section, f"[{text}](results/{page}.md)", *cells.values()])
    return studies.markdown(["", "the paper", *COLUMNS], *lines)


def repeats_table():
    """Return a row per run of the flags of A, B and C: its machine, and how it ends."""
    lines, rows = [], filter(order.ended, committed("[ABC]", "adamw/*"))
    for row in sorted(rows, key=lambda row: row["flags"].seed):
        config, learned = row["config"], studies.steps_text(row["learned"].values())
        where = "{hardware}, {dtype}, threads: {threads}, commit {git:.7}".format(**config)
        lines.append([row["flags"].seed, where, learned, row["steps"], f"{row['mse']:.3f}"])
    head = "seed", "machine", "x_1, x_2, x_3 learned at step", "ends at", "MSE"
    return studies.markdown(head, *lines)


def literal_table():
    """Return a row per run of the literal settings: what it learned, and knows at its end."""
    lines = []
    for row in committed("literal/*"):
        name, learned = f"{row['name']}, {row['flags'].dtype}", row["learned"].values()
        cells = studies.steps_text(learned), ", ".join(row["known"]) or "none"
        lines.append([name, row["steps"], *cells, f"{row['mse']:.3f}"])
    head = "run", "steps", "learned at step", "known at the end", "MSE"
    return studies.markdown(head, *lines)


if __name__ == "__main__":
    with program("python -m extras.studies.claims"):
        command_line("python -m extras.studies.claims", __doc__).parse_args()
        print(table())
