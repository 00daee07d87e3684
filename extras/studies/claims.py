"""What the pages claim of our runs, a function for each claim, those of the paper among them.

    python -m extras.studies results/depth.md    # prints the tables of a page

A claim is a function of a row (rows.py) and its flags. It returns whether the run agrees, and None
of a run that it is not about, or that could not disagree. Its docstring says the claim, and then
which runs it counts. Repeats of the same settings and seed, on another machine or in another
precision, are one run, which agrees if all of them do.
"""

import itertools
import math
import statistics
from functools import cache

import analyze
from ablate import mark_edges, paths_in
from extras.studies import RESULTS, rows_by
from extras.studies.rows import SOLVED, all_runs, continuations, knows, load, name_of, same_run
from extras.studies.theory import causal_depth


CLAIMS = []
FRESH = 110  # --qk-std was chosen on seeds below it
INDUCTION = RESULTS / "figures/induction.jsonl"  # what x_1 needs when it is learned
SHAPE = "layers", "D", "places", "positions"  # of runs that can be compared
SIX = {"1b reads 1a", "2b reads 2a", "3b reads 3a", "q reads 1b", "2b reads 3b", "q reads 2b"}


def claim(pages, by="", of=all_runs):
    """Make the function below a claim on these pages (README 1: with its first finding), or of
    these sections of the paper, about these runs, of which those that disagree are told apart by
    these flags."""

    def add(agrees):
        agrees.pages, agrees.by, agrees.of = pages.split(", "), by.split(), of
        agrees.text, _, runs = agrees.__doc__.partition(":\n")
        agrees.runs = runs.strip()
        CLAIMS.append(agrees)
        return agrees

    return add


# ---- circuits.md


def is_circuit(row, flags):
    """Return whether a circuit of more than one layer was validated."""
    return flags.task == "chain" and row["circuit"] and flags.layers > 1


def is_validated_under_both(row):
    return row["verdict"].startswith("validated under both")


def heads_of(row):
    """Return {"q reads 1b": {(layer, head), ...}, ...}, which heads of a circuit read so."""
    heads = {}
    for path in paths_in(row["report"]):
        heads.setdefault(f"{path.reader} reads {path.read}", set()).add(path[:2])
    return heads


def asks_for_all(row, flags):
    """Return whether a run asks for all symbols, and begins anew, or goes on from one that did."""
    alone = not flags.init or row["name"] in continuations()
    return flags.task == "chain" and flags.targets == "all" and alone


@claim("circuits, README 1", by="optimizer positions qk_std")
def holds_six_reads(row, flags):
    """Validated circuits of 12 one-head layers and three steps hold the six reads:
    under both ablations or the mean alone"""
    if is_circuit(row, flags) and (flags.layers, flags.heads, flags.D) == (12, 1, 3):
        return heads_of(row).keys() >= SIX


def is_fresh(row):
    """Return whether a run is the main command, with a seed on which nothing was chosen."""
    return not row["settings"] and row["seed"] >= FRESH


def is_larger(row):
    """Return whether a run is the main command in float32, but for its larger first weights."""
    return row["settings"] == ("qk_std=0.1",) and row["dtype"] == "float32"


@claim("circuits, README 1", by="seed")
def fresh_is_validated(row, flags):
    """The main command ends with a circuit validated under both ablations:
    seeds on which no setting was chosen; the condition that refused 119 was then changed"""
    return is_validated_under_both(row) if is_fresh(row) else None


@claim("circuits, README 1", by="seed")
def fresh_has_six_reads(row, flags):
    """The validated circuits of the main command hold the six reads:
    seeds on which no setting was chosen"""
    if is_fresh(row) and row["circuit"]:
        return heads_of(row).keys() >= SIX


@claim("circuits, README 1", by="seed")
def fresh_reads_pair_by_pair(row, flags):
    """In its other validated circuits q reads 1b, 2b and 3b itself:
    seeds on which no setting was chosen"""
    if is_fresh(row) and row["circuit"] and not heads_of(row).keys() >= SIX:
        return heads_of(row).keys() >= {"q reads 1b", "q reads 2b", "q reads 3b"}


@claim("circuits", by="seed")
def larger_is_validated(row, flags):
    """With --qk-std 0.1, it ends with a circuit validated under both ablations:
    in float32"""
    return is_validated_under_both(row) if is_larger(row) else None


@claim("circuits", by="seed")
def larger_has_six_reads(row, flags):
    """With --qk-std 0.1, the validated circuits hold the six reads:
    in float32"""
    if is_larger(row) and row["circuit"]:
        return heads_of(row).keys() >= SIX


@claim("circuits", by="N heads")
def one_head_does_both(row, flags):
    """One head reads both 1b for q and 3b for 2b:
    circuits with both reads"""
    heads = heads_of(row)
    if is_circuit(row, flags) and heads.keys() >= {"q reads 1b", "2b reads 3b"}:
        return bool(heads["q reads 1b"] & heads["2b reads 3b"])


@claim("circuits, README 4, 7.2")
def in_order(row, flags):
    """Symbols are learned in the order of the chain:
    asked for all, learn several, no two between the same evaluations"""
    steps = [step for step in row["learned"].values() if step is not None]
    evaluations = {math.ceil(step / flags.eval_every) for step in steps}
    if asks_for_all(row, flags) and len(steps) == len(evaluations) > 1:
        return steps == sorted(steps) == [*row["learned"].values()][: len(steps)]


@claim("circuits, 9.2 i", by="positions seed", of=lambda: load([INDUCTION]))
def needs_both_reads(row, flags):
    """When x_1 is learned, it needs both reads of an induction head:
    12 layers of one head, D 3, with checkpoints; without either, half of the gain is lost"""
    learned = row["task"].chance - row["losses"]["x_1"]
    rises = row["config"]["kinds"]
    return min(rises["q reads 1b"], rises["1b reads 1a"]) >= learned / 2


@claim("circuits", by="positions")
def is_validated(row, flags):
    """A circuit is validated under both ablations:
    searched after the search was chosen, whose model knows all symbols"""
    was_searched = not row["verdict"].startswith("not searched")
    knows_all = len(row["known"]) == len(row["task"].targets)
    if flags.task == "chain" and flags.seed >= 10 and was_searched and knows_all:
        return is_validated_under_both(row)


# ---- depth.md


def obeys(row, flags):
    """Return whether a model that knows all symbols that its layers allow by content knows no
    other; None if it does not know all these, or is not asked for another."""
    allowed = [k for k in range(1, flags.D + 1) if causal_depth(k) <= flags.layers]
    too_few = flags.causal and 1 < flags.layers < causal_depth(flags.D)
    if too_few and asks_for_all(row, flags) and all(knows(row, k) for k in allowed):
        return len(row["known"]) == len(allowed)


@claim("depth, README 2", by="steps init")
def long_chains_obey(row, flags):
    """Four chains of five steps or more: models learn no more than the law allows:
    that know all that the law allows, and are asked for more"""
    if flags.N == 4 and flags.D >= 5 and row["name"] not in continuations().values():
        return obeys(row, flags)


@claim("depth, README 2", by="head_dimension heads")
def other_chains_obey(row, flags):
    """Fewer or shorter chains: models learn no more than the law allows:
    without distractors, that know all that the law allows, and are asked for more"""
    if not (flags.N == 4 and flags.D >= 5):
        return obeys(row, flags)


@claim("depth", by="steps")
def longer_training_decides(row, flags):
    """Of these, four chains of three or four steps: they learn no more than it allows:
    asked as above"""
    if flags.N == 4 and flags.D in (3, 4):
        return obeys(row, flags)


@claim("depth, README 2", by="D heads")
def learns_the_last(row, flags):
    """With exactly the law's layers, models of five steps or more learn the last symbol:
    asked for all"""
    deep_enough = flags.D >= 5 and flags.layers == causal_depth(flags.D)
    if deep_enough and flags.causal and asks_for_all(row, flags):
        return knows(row, flags.D)


@claim("depth, README 3", by="head_dimension places")
def two_heads_a_place(row, flags):
    """One layer solves x_1 (below 0.05), given an MLP, appended positions, two heads per place:
    places at which the answer may stand; with as many heads or more, from fresh weights"""
    usual = flags.mlp and flags.positions == "appended" and not flags.init
    if usual and flags.layers == flags.D == 1 and flags.heads >= 2 * row["places"]:
        return row["solved"]


@claim("depth, README 3", by="places heads")
def a_layer_less_fails(row, flags):
    """With fewer heads than places, a layer less than the law does not solve x_1 or x_2:
    with a mask, where models with more heads do; some know it in part"""
    few = flags.D <= 2 and flags.layers == causal_depth(flags.D) - 1 and flags.heads < row["places"]
    for other in all_runs() if few and flags.causal else []:
        more = other["heads"] > row["heads"] and other["causal"]
        if more and other["solved"] and all(other[x] == row[x] for x in SHAPE):
            return not row["solved"]


@claim("depth, README 3", by="places")
def moves_the_answer(row, flags):
    """Without distractors, swapping what place-finding heads write moves the answer of one layer:
    as exactly as its own (within 0.05); runs that solve x_1 and have address heads, as measured"""
    if flags.task == "chain":
        return is_moved(row, flags)


@claim("depth", by="places")
def stays_among_distractors(row, flags):
    """With distractors, it does not as exactly:
    other such runs"""
    moved = None if flags.task == "chain" else is_moved(row, flags)
    return None if moved is None else not moved


def is_moved(row, flags):
    """Return whether the answer of one layer follows what its address heads write in another
    sequence; None if it was not measured."""
    how = row["config"].get("how")
    if flags.layers == flags.D == 1 and how and how["address"] and row["solved"]:
        return how["swap"][0] < how["full"] + SOLVED


@cache
def swaps():
    """Return {run: {role: swap}} of the runs whose finders were swapped, by
    extras/studies/addresses.py of commit dfca674, on 512 fresh sequences. A swap of a role, q or
    kb, has

    heads: its finders, heads of the first layer that has any. They need their own attention
        pattern: its mean over the sequences raises a loss by SOLVED
    pattern, written: if at this role they attend, or write, as in the next sequence, {each known
        x_j after x_k: its error from that of the chain whose next pair stands where the next
        sequence has it}, of the n queries for which this is another place"""
    rows = rows_by(RESULTS / "figures/addresses.jsonl", "run")
    return {run: row["swaps"] for run, row in rows.items()}


def passes_on(swap, task):
    """Return what a finder passes on: a place if the answer follows what it writes in another
    sequence, a symbol if it follows its pattern alone."""
    mean = {how: statistics.fmean(swap[how].values()) for how in ("written", "pattern")}
    if mean["written"] < task.learned_below:
        return "a place"
    return "a symbol" if mean["pattern"] < task.learned_below else "neither"


@claim("depth, README 2", by="layers D")
def passes_on_a_place(row, flags):
    """Models that know x_D beyond the law, where measured, pass on where a pair stands:
    whose finders were swapped"""
    found = swaps().get(name_of(row))
    if found is not None and 1 < flags.layers < causal_depth(flags.D) and knows(row, flags.D):
        return "a place" in [passes_on(swap, row["task"]) for swap in found.values()]


# ---- curriculum.md


def after_a_gap(row, flags):
    """Return the names of the symbols of chains that a run is asked for, but not for all before
    them, if it has the law's layers for them; none if it starts from the weights of another run."""
    targets = row["task"].targets if flags.task == "chain" and not flags.init else []
    deep_enough = [k for k in targets if causal_depth(k) <= flags.layers]
    return [f"x_{k}" for k in deep_enough if {*range(1, k)} - {*targets}]


@claim("curriculum, README 4, 7.2")
def not_learned_after_a_gap(row, flags):
    """Of four chains, no symbol is learned if an earlier one is not asked for:
    that ask for such a symbol, and have the law's layers for it"""
    names = after_a_gap(row, flags)
    if names and flags.N == 4:
        return not {*names} & {*row["known"]}


@claim("7.2")
def last_alone_stays_high(row, flags):
    """Asked for the last symbol alone, the final loss is above 0.7, as in the paper:
    of four chains, from fresh weights, with the law's layers for it"""
    if flags.targets == "last" and flags.N == 4 and after_a_gap(row, flags):
        return row["losses"][f"x_{flags.D}"] > 0.7


@claim("curriculum, README 4, 7.2", by="D layers optimizer")
def learned_if_asked_for_all(row, flags):
    """Asked for all symbols, the same seed learns that symbol within as many steps:
    beside which such a run was trained, of as long a chain or a longer one; some share it"""
    names, steps, but = after_a_gap(row, flags), [], ("D", "targets", "steps")
    for other in all_runs() if names else []:
        wanted = other["flags"].targets == "all" and other["flags"].D >= flags.D
        if wanted and not other["flags"].init and same_run(other, *but) == same_run(row, *but):
            steps += [other["learned"][name] or math.inf for name in names]
    return max(steps) <= flags.steps if steps else None


@claim("curriculum")
def the_last_alone_is_not_learned(row, flags):
    """D alone is not learned by models that knew B and C:
    that start from the weights of a run asked for these two"""
    if flags.targets == "last" and "targets1-2_" in flags.init:
        return not knows(row, flags.D)


@claim("curriculum")
def z_is_last(row, flags):
    """Of x, y and z, z is learned last:
    conditional retrieval, that learn all three; one seed counts at two lengths"""
    steps = [*row["learned"].values()]
    if flags.task.endswith("Conditional") and flags.targets == "all" and None not in steps:
        return steps[2] >= max(steps[:2])


# ---- paper.md alone


def lacks_x_2(row, flags):
    """Return whether one layer that knows x_1 does not know x_2."""
    if flags.task == "chain" and flags.layers == 1 and flags.D >= 2 and knows(row, 1):
        return not knows(row, 2)


@claim("5")
def one_layer_lacks_x_2_of_four_chains(row, flags):
    """Of four chains, as in the paper, one layer does not learn x_2:
    that know x_1"""
    return lacks_x_2(row, flags) if flags.N == 4 else None


@claim("5")
def one_layer_lacks_x_2_of_fewer(row, flags):
    """Of two or three chains, one layer does not learn x_2:
    that know x_1"""
    return lacks_x_2(row, flags) if flags.N < 4 else None


@claim("5")
def few_layers_lack_the_rest(row, flags):
    """Where 2k is more than 3 to the power of the layers, and k more than 2, x_k is not learned:
    that know x_1, and are asked for all, and for such a symbol"""
    excluded = [k for k in range(3, flags.D + 1) if 2 * k > 3**flags.layers]
    if excluded and asks_for_all(row, flags) and knows(row, 1):
        return not any(knows(row, k) for k in excluded)


def ends_solved(row):
    """Return whether a run ends below 0.01; None if it was stopped by hand before."""
    last = row["log"][-1]
    low = last.get("confirmed", last["val"]) < 0.01
    return low if low or last["step"] == row["flags"].steps else None


@claim("README 5, 8.2")
def the_main_command_is_solved(row, flags):
    """The main command, with Muon, ends solved:
    seeds on which no setting was chosen"""
    return ends_solved(row) if is_fresh(row) else None


@claim("README 5, 8.2")
def the_papers_optimizer_is_solved(row, flags):
    """Seeds 0 to 2 end solved in every training with A's flags:
    on other machines and sequences, in two precisions; seed 3 was stopped by hand, at chance"""
    shape = flags.layers, flags.D, flags.optimizer, flags.positions, flags.steps
    return ends_solved(row) if shape == (12, 3, "adamw", "appended", 3000) else None


@claim("README 5, 8.2")
def rope_is_solved(row, flags):
    """With RoPE and A's other flags, in 1,600 or 3,000 steps of bfloat16, runs end solved:
    that were to stop below 0.01"""
    shape = flags.layers, flags.D, flags.optimizer, flags.positions, flags.targets, flags.lr
    return ends_solved(row) if shape == (12, 3, "adamw", "rope", "all", 0.001) else None


@claim("README 5, 8.2")
def literal_settings_end_unsolved(row, flags):
    """Without warm-up, falling rate and clipping, with beta2 0.999, AdamW ends unsolved:
    of A's size; one in float32, in 9,000 steps"""
    if flags.clip == 0 and flags.beta2 == 0.999 and flags.layers == 12:
        solved = ends_solved(row)
        return None if solved is None else not solved


def head_count(row):
    """Return how many heads a circuit has."""
    return len({path[:2] for path in paths_in(row["report"])})


@claim("8.2")
def most_heads_are_useless(row, flags):
    """Fewer than half of the heads are in the circuit:
    one-head layers"""
    if is_circuit(row, flags) and flags.heads == 1:
        return head_count(row) < flags.layers / 2


@claim("8.2 i")
def first_head_goes_back(row, flags):
    """The first head connects the tokens of each pair, and all its reads go one token back:
    circuits of more than one layer"""
    if is_circuit(row, flags):
        paths, places = paths_in(row["report"]), row["task"].draw("circuits", 64).places
        first = [path for path in paths if path[:2] == min(paths)[:2]]
        _, reader, read = mark_edges(first, row["task"], places).nonzero().T
        pairs = {(f"{k}b", f"{k}a") for k in range(1, flags.D + 1)}
        return pairs <= {path[2:] for path in first} and (reader - read == 1).all().item()


@claim("8.2 ii")
def has_four_heads(row, flags):
    """Circuits have four heads:
    D 3, of more than one layer"""
    return head_count(row) == 4 if is_circuit(row, flags) and flags.D == 3 else None


@claim("8.2 ii")
def has_more_than_three_heads(row, flags):
    """They have more than the three that suffice:
    as above"""
    return head_count(row) > 3 if is_circuit(row, flags) and flags.D == 3 else None


def needed_by_all(row):
    """Return the {(reader, read), ...} of single paths that all symbols need."""
    full, needed = row["report"]["full_model"], set()
    for path, each in paths_in(row["report"]).items():
        losses = [full[name] + rise for name, rise in each["cost"].items()]
        if min(losses) >= row["task"].learned_below:
            needed.add(path[2:])
    return needed


@claim("9.2 ii")
def one_read_of_the_key(row, flags):
    """All symbols need one read of 1a by 1b:
    circuits"""
    return ("1b", "1a") in needed_by_all(row) if is_circuit(row, flags) else None


@claim("9.2 ii")
def one_induction_head(row, flags):
    """They need one read of 1b by q too:
    circuits"""
    if is_circuit(row, flags):
        return needed_by_all(row) >= {("q", "1b"), ("1b", "1a")}


def first_steps(row):
    """Return {head: the step at which the mean attention of its first path passes one half}, in the
    order of these steps, and the induction head: the heads that first read 1a for 1b, 1b for q."""
    steps, first, induction = analyze.emergence_steps(row["emergence"]), {}, {}
    emerged = [path for path in paths_in(row["report"]) if steps.get(path) is not None]
    for path in sorted(emerged, key=steps.get):
        first.setdefault(path[:2], steps[path])
        induction.setdefault(path[2:], path[:2])
    return first, {induction.get(("1b", "1a")), induction.get(("q", "1b"))}


def new_heads(row):
    """Return how many heads beside the induction head emerge before x_2, x_3, ... are learned and
    after the symbol before."""
    first, induction = first_steps(row)
    steps = [step for head, step in first.items() if head not in induction]
    between = itertools.pairwise(row["learned"].values())
    return [sum(a < step <= b for step in steps) for a, b in between]


@claim("9.2 iii")
def one_new_head(row, flags):
    """Each later symbol brings one new head, beside the induction head:
    with a circuit and the emergence of its paths"""
    if flags.task == "chain" and row["emergence"] and paths_in(row["report"]):
        return {*new_heads(row)} == {1}
