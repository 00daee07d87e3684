"""What the pages claim of our runs, a row for each claim, those of the paper among them.

    python -m extras.studies results/depth.md    # prints the tables of a page

A claim selects runs by an expression of their flags (those of train.py) and of what
rows.completed() adds, like `layers==1 and heads>=places`. Of these, those count that could
disagree. Repeats of the same settings and seed, on another machine or in another precision, are one
run, which agrees if all of them do.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from ablate import paths_in
from extras.moved import by_head, split_token
from extras.studies import (
    addresses,
    ahead,
    circuits,
    curriculum,
    depth,
    layers,
    markdown,
    metrics,
    order,
    share,
    span,
    spans,
)
from extras.studies.rows import all_runs, committed
from extras.studies.theory import causal_depth, paper_bound
from train import DEFAULTS


class Claim(NamedTuple):
    pages: str  # "depth, README, 7.2": on which it stands; a section of the paper is on paper.md
    text: str
    runs: str  # which runs, an expression
    who: str  # which of these could disagree, in words
    agrees: Callable  # row -> whether it agrees, None if it could not disagree
    by: str = ""  # flags by which those that disagree are told apart
    loss: str = ""  # the symbol whose losses are shown of those that disagree
    rows: Callable = all_runs  # from which runs it selects
    repeats: bool = False  # whether each repeat counts: another machine is the point


# ---- what they ask of a run


def ends_solved(row):
    """Return whether a run ends below 0.01; None if it was stopped by hand before."""
    ended = row["steps"] == row["flags"].steps or row["mse"] < 0.01
    return row["mse"] < 0.01 if ended else None


def is_solved_on_the_way(row):
    return min(entry["val"] for entry in row["log"]) < 0.01


def solves(row):
    """Return whether the last symbol is asked for and solved."""
    return row["losses"].get(f"x_{row['flags'].D}", 1) < depth.SOLVED


@functools.cache
def solved():
    """Return {(layers, D, places), ...} of the runs that solve the last symbol."""
    flags = [(row["flags"], row["places"]) for row in all_runs() if solves(row)]
    return {(flags.layers, flags.D, places) for flags, places in flags}


def fails_where_others_solve(row):
    case = row["flags"].layers, row["flags"].D, row["places"]
    return not solves(row) if case in solved() else None


def knows_the_last(row):
    return layers.knows(row, row["flags"].D)


def lacks_x_2(row):
    return not layers.knows(row, 2) if layers.knows(row, 1) else None


def stays_at_chance(row):
    """Return whether the losses of all symbols that Theorem 1 excludes are as high as chance; None
    if there is none, or the model knows no symbol."""
    excluded = []
    for name, loss in row["losses"].items():
        if paper_bound(int(name[2:])) > row["flags"].layers:
            excluded.append(loss > 0.95 * row["task"].chance)
    return all(excluded) if excluded and row["known"] else None


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


def learns_x_1_late(row):
    return row["learned"]["x_1"] >= 3600


def brings_one_head(row):
    return {*order.new_heads(row)} == {1}


# ---- the claims

CHAIN = "task=='chain'"
FOUND = f"{CHAIN} and layers>1 and circuit"
ALL = f"{CHAIN} and causal and targets=='all'"
ONE = "layers==1 and D==1"
GAPS = f"{CHAIN} and targets!='all' and not init"
LITERAL = "clip==0 and beta2==0.999"
PAPERS = "layers==12 and optimizer=='adamw' and positions=='appended' and steps==3000"

# fmt: off
CLAIMS = [
    # circuits.md
    Claim("circuits, README", "Circuits hold the six reads of pointer doubling",
          f"{CHAIN} and layers==12 and heads==1 and D==3 and circuit", "",
          circuits.holds_six, "optimizer positions"),
    Claim("circuits", "A head that reads 1b for q reads 3b for 2b",
          FOUND, "with both reads", circuits.reads_ahead_in_the_same_head),
    Claim("circuits", "Circuits of long chains read ahead twice or more",
          f"{FOUND} and D>=5 and layers>=D//2 + 2", "for which one round would do",
          ahead.reads_twice),
    Claim("circuits, README, 7.2", "Symbols are learned in the order of the chain",
          f"{CHAIN} and targets=='all' and not init",
          "that learn several, no two between the same evaluations", order.in_order),
    Claim("circuits, 9.2 i", "When x_1 is learned, it needs both reads of an induction head",
          "D==3", "in `figures/induction.jsonl`", order.needs_both, "positions seed",
          rows=order.induction_runs),
    Claim("circuits", "Circuits answer with one-hot attention",
          f"{CHAIN} and circuit", "that were tested so", circuits.answers_one_hot,
          "optimizer positions D"),
    Claim("circuits", "Circuits that do can spare some later read",
          f"{CHAIN} and circuit", "that do", circuits.can_spare_a_read, "seed"),
    Claim("circuits", "A circuit is validated under both ablations",
          f"{CHAIN} and report and seed>=10", "whose model answers", circuits.validated,
          "positions"),

    # depth.md
    Claim("depth, README, 7.2", "Four long chains: none beats the law",
          f"{ALL} and layers>1 and N==4 and D>=5", "that know all that the law allows",
          layers.obeys, "layers"),
    Claim("depth, README, 7.2", "Shorter, fewer or more chains: none beats the law",
          f"{ALL} and layers>1 and not (N==4 and D>=5)",
          "that know all that the law allows", layers.obeys,
          "layers"),
    Claim("depth, README", "Models with the law's layers learn the last symbol",
          f"{ALL} and D>=5 and layers==law(D)", "", knows_the_last, "D heads"),
    Claim("depth, README", "One layer with two heads a place solves x_1",
          f"{ONE} and heads>=2 * places", "", solves,
          "mlp positions head_dimension places", "x_1"),
    Claim("depth, README", "With fewer heads than places, a layer less than the law fails",
          "D<=2 and layers==law(D) - 1 and heads<places", "where other heads solve x_D",
          fails_where_others_solve, "places heads", "x_1"),
    Claim("depth", "With fewer heads than places, the law's layers solve x_D",
          "D<=2 and layers==law(D) and heads<places", "", solves, "D places heads"),
    Claim("depth", "In one layer, another address moves the answer",
          ONE, "that solve x_1 and were measured", depth.moves_the_answer, "places"),
    Claim("depth, README", "Deeper models that beat the law pass on a place",
          "layers>1 and layers<law(D)", "that know x_D and were measured",
          addresses.passes_on_a_place),

    # curriculum.md
    Claim("curriculum, README, 7.2", "No symbol is learned after one that is not asked for",
          GAPS, "that ask for such a symbol", curriculum.not_learned),
    Claim("curriculum, README, 7.2", "Asked for all, the same seed learns it in no more steps",
          GAPS, "with such a run, of as long a chain or a longer one",
          curriculum.learned_if_asked_for_all, "D layers optimizer"),
    Claim("curriculum", "D alone is not learned by models that knew B and C",
          "targets=='last' and 'targets1-2_' in init", "", lambda row: not knows_the_last(row)),
    Claim("curriculum", "Of x, y and z, z is learned last",
          "task.endswith('Conditional') and targets=='all'", "that learn all three",
          curriculum.z_comes_last),

    # paper.md alone
    Claim("5", "One layer does not learn x_2",
          f"{CHAIN} and layers==1 and D>=2", "that know x_1", lacks_x_2),
    Claim("beyond", "Without a mask, models learn what the law then adds",
          f"{CHAIN} and not causal", "where there is such a symbol", layers.uses_no_mask),
    Claim("README, 8.2", "The main command ends solved", f"{CHAIN} and not settings", "",
          ends_solved),
    Claim("8.2", "A, B, C and repeats end solved", f"{PAPERS} and D==3", "", ends_solved,
          repeats=True),
    Claim("README, 8.2", "Literal settings end solved", LITERAL, "", ends_solved),
    Claim("8.2", "Literal settings are solved on the way", LITERAL, "", is_solved_on_the_way),
    Claim("8.2 i", "The first head reads the token before", FOUND, "", first_goes_back),
    Claim("8.2 ii", "Circuits have four heads", f"{FOUND} and D==3", "", has_four_heads),
    Claim("README, E", "Circuits answer one-hot, and need each later read",
          f"{CHAIN} and circuit", "that were tested so", circuits.passes_the_test),
    Claim("9.2 i", "x_1 is learned after step 3600",
          f"{CHAIN} and layers==24", "", learns_x_1_late),
    Claim("9.2 ii", "Later symbols reuse one induction head", FOUND, "", circuits.reuses),
    Claim("9.2 iii", "Each later symbol brings one new head",
          f"{CHAIN} and emergence", "", brings_one_head),
    Claim("9.2 iii", "The query comes to read 1b, 2b, ... in this order",
          f"{CHAIN} and emergence", "", order.reads_in_order),
    Claim("9.2 iv", "The last path comes after the longest gap",
          "layers==24 and emergence", "", order.last_comes_late),
    Claim("10.1", "Below the bound, losses stay at chance", CHAIN, "that know a symbol",
          stays_at_chance),
    Claim("10.1", "Below the bound, no metric shows a symbol",
          "layers<bound(D)", "in `figures/metrics.jsonl`, that show a symbol",
          metrics.none_shows, rows=metrics.measured_runs),
]
# fmt: on


SECTIONS = "5", "7.2", "8.2", "8.2 i", "8.2 ii", "E", "9.2 i", "9.2 ii", "9.2 iii", "9.2 iv"
SECTIONS += "10.1", "beyond"


# ---- counting


@functools.cache
def count(claim):
    """Return [(row, whether it agrees), ...] of the runs that could disagree. LookupError if there
    is none."""
    chosen, found = compile(claim.runs, claim.text, "eval"), {}
    laws = dict(law=causal_depth, bound=paper_bound)
    for number, row in enumerate(claim.rows()):
        if eval(chosen, laws, row | vars(row["flags"])):
            answer = claim.agrees(row)
            if answer is not None:
                key = number if claim.repeats else (row["settings"], row["flags"].seed)
                first, before = found.get(key, (row, True))
                found[key] = first, before and answer
    if not found:
        raise LookupError(f"no run could disagree with the claim {claim.text!r}: {claim.runs}")
    return [*found.values()]


def value_of(row, name):
    return getattr(row["flags"], name) if name in DEFAULTS else row[name]


NAMES = {  # what may vary between the runs of a claim
    "N": "N", "D": "D", "layers": "layers", "heads": "heads", "head_dimension": "head size",
    "places": "places", "steps": "steps", "seed": "seed", "mlp": "MLPs",
    "positions": "", "optimizer": "",
}  # fmt: skip


USUAL = "MLPs", "appended", "muon"  # named only if nothing else is


def said(name, value):
    """Return "heads 4", "rope" or "no MLPs"."""
    if isinstance(value, bool):
        return NAMES[name] if value else f"no {NAMES[name]}"
    return value if isinstance(value, str) else f"{NAMES[name]} {value:,}"


def which(claim):
    """Return which runs a claim counts: the expression, and what varies among them."""
    rows, texts = [row for row, _ in count(claim)], [f"`{claim.runs}`", claim.who]
    for name in NAMES:
        values = sorted({value_of(row, name) for row in rows})
        if name == "seed":
            texts.append(f"seeds {spans(values)}")
        elif name == "places" and name not in claim.runs:
            continue  # they are N
        elif isinstance(values[0], (str, bool)):
            texts += [" or ".join(said(name, value) for value in values)] * (len(values) > 1)
        elif values != [DEFAULTS.get(name)] and f"{name}==" not in claim.runs:
            texts.append(f"{NAMES[name]} {span(values, '{:,}')}")
    return "; ".join(filter(None, texts))


def fails(claim):
    """Return where runs disagree: "rope, places 4: 10 of 10 (0.23-0.54)"."""
    names, groups, texts = claim.by.split(), {}, []
    for row, agrees in count(claim):
        values = tuple(value_of(row, name) for name in names)
        groups.setdefault(values, []).append((row, agrees))
    for values, group in sorted(groups.items()):
        words = [said(name, value) for name, value in zip(names, values, strict=True)]
        rare = [word for word in words if word not in USUAL]
        failed = [row for row, agrees in group if not agrees]
        if failed:
            text = f"{', '.join(rare or words)}: {len(failed)} of {len(group)}"
            if claim.loss:
                text += f" ({span([row['losses'][claim.loss] for row in failed])})"
            texts.append(text)
    return "; ".join(texts)


def on_page(page):
    return [claim for claim in CLAIMS if page in claim.pages.split(", ")]


def table(page):
    """Return a row per claim of a page."""
    lines = []
    for claim in on_page(page):
        agree = [agrees for _, agrees in count(claim)]
        lines.append([claim.text, which(claim), sum(agree), len(agree), fails(claim)])
    return markdown(["claim", "runs", "agree", "of", "where it fails"], *lines)


def sections():
    """Return a row per claim of the paper: AdamW with appended positions beside all others."""
    lines = []
    for section in SECTIONS:
        for claim in on_page(section):
            ours = [[], []]
            for row, agrees in count(claim):
                flags = row["flags"]
                papers = flags.optimizer == "adamw" and flags.positions == "appended"
                ours[not papers].append(agrees)
            lines.append([section, claim.text, *[share(part) if part else "" for part in ours]])
    head = "section", "claim, as counted", "AdamW, positions appended", "Muon, RoPE, or both"
    return markdown(head, *lines)


def readme_table():
    """Return a row per finding of the README, with the page on which it stands."""
    lines = []
    for claim in on_page("README"):
        page = claim.pages.split(", ")[0].replace("README", "paper")
        agree = [agrees for _, agrees in count(claim)]
        lines.append([claim.text, sum(agree), len(agree), f"[{page}](results/{page}.md)"])
    return markdown(["claim", "agree", "of", "page"], *lines)


def verdicts():
    """Return the numbers in the table of verdicts."""
    [D], [A_again] = committed("D"), committed("adamw/s0")
    rows = [row for row in layers.long_chains() if row["group"] == "sweep"]  # those of Figure 4
    numbers, shares = [], []
    for name in ("x_1", "x_2", "x_3", "x_4", "x_5"):
        fewest = min(row["flags"].layers for row in rows if name in row["known"])
        numbers.append(str(fewest))
        shares.append(share(name in row["known"] for row in rows if row["flags"].layers == fewest))
    lowest = min(entry["val"] for row in committed("literal/*") for entry in row["log"])
    return [
        f"x_1 to x_5 first appear with {', '.join(numbers)} layers ({', '.join(shares)} runs)",
        f"Ours knows it at step {D['learned']['x_1']:.0f}",
        f"A's flags and seed, on another machine, end at {A_again['mse']:.2f}",
        f"one of them falls to {lowest:.3f}",
    ]
