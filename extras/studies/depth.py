"""How many layers the problem needs: trained models beside the law of reading by content and the
law with heads (Section 7.2), and how those that pass the law of content do it.

    python -m extras.studies.depth                    # draws the figures from the committed rows
    python -m extras.studies.depth out/*              # measures runs, and adds them to these rows
    python -m extras.studies.depth --preset law       # trains the runs that sweep.py compares
"""

import collections
import functools
import itertools
import math
import statistics
import sys
from pathlib import Path

import analyze
import sweep
import train
from data import command_line, held_out, make_batch, partial_losses, program
from extras.studies import committed, load_rows, markdown, span, spread
from extras.studies.theory import (
    DEPTH_LAWS,
    PREDICTED,
    address_error,
    causal_depth,
    constructed,
    gates_error,
    in_order,
    least_layers,
    shuffled_depths,
)
from train import Flags

import matplotlib.pyplot as plt
import torch


ROWS = Path("results/runs/depth_width.jsonl")
MATTERS = 0.05  # a rise of the loss of x_D by which an ablation counts as one that matters
LAW = [  # a preset of sweep.py
    (sweep.WITH_IC, range(1, 6), 3),
    (f"{sweep.LAPTOP} --D 5 --steps 2000 --no-causal --rotary qk", range(2, 5), 2),
]


# ---- runs of a sweep beside the law of content


def chains(folders):
    """Return the runs to which the law applies, with implicit curriculum, of sweeps."""
    rows = [row for row in load_rows(folders) if row["task"] == "chain" and row["ic"]]
    return [row for row in rows if not (row["targets"] or row["init"])]


def learned(row, k):
    """Return whether a run ended with x_k learned."""
    return row[f"x_{k}"] < Flags(**row).problem.learned_below


def least_depths(rows, k):
    """Return the least number of layers in which each seed learned x_k, a list by seed; infinite
    where it did in none of those tried."""
    depths = {}
    for row in rows:
        depth = row["layers"] if learned(row, k) else math.inf
        depths[row["seed"]] = min(depth, depths.get(row["seed"], math.inf))
    return [depths[seed] for seed in sorted(depths)]


def with_attention(rows, causal, frozen):
    """Return the runs with this mask, and with attention frozen at a minimal circuit or learned."""
    wanted = causal, "minimal" if frozen else ""
    return [row for row in rows if (row["causal"], row.get("circuit", "")) == wanted]


def too_shallow(rows):
    """Return (runs, at the limit, beyond): how many runs have fewer layers than the law for one of
    their symbols; how many of these learned all that the law allows, if it allows any; and the
    names of those that learned more."""
    shallow, limit, beyond = 0, 0, []
    for row in rows:
        law = DEPTH_LAWS[row["causal"]]
        known = {k for k in range(1, row["D"] + 1) if learned(row, k)}
        allowed = {k for k in range(1, row["D"] + 1) if law(k) <= row["layers"]}
        if row["layers"] < law(row["D"]):
            shallow += 1
            limit += bool(allowed) and known >= allowed
            beyond += [row["run"]] if known - allowed else []
    return shallow, limit, beyond


def count_exact(rows, causal):
    """Return for how many symbols and seeds the fewest layers that learned the symbol, with frozen
    attention, are those of the law, and for how many not, as text."""
    rows, exact = with_attention(rows, causal, True), []
    for k in range(1, 1 + max([row["D"] for row in rows], default=0)):
        exact += [depth == DEPTH_LAWS[causal](k) for depth in least_depths(rows, k)]
    return f"{sum(exact)} of {len(exact)}"


# ---- one run of the diagram


def row_of(run):
    """Return the row of a finished run: what it was, its losses at the end, and how, if it passes
    the law of content."""
    flags, log = train.read_flags(run), train.read_log(run)
    other = {"--no-mlp": not flags.mlp, "--rotary qk": flags.rotary == "qk"}
    other |= {"--task shuffled": flags.task == "shuffled", "--init frozen": bool(flags.init)}
    other |= {"--steps 10000": flags.steps == 10000, "frozen": bool(getattr(flags, "circuit", ""))}
    names = "layers", "heads", "N", "D", "seed", "steps", "git", "hardware"
    row = dict(run=run.name) | {name: getattr(flags, name) for name in names}
    row |= dict(other=" ".join(name for name in other if other[name]), ended=log[-1]["step"])
    row |= {name: round(log[-1][name], 5) for name in flags.target_names}
    row["threshold"] = flags.problem.learned_below

    # what x_D fell by in the last third of the steps that were taken: is the run decided?
    before = [step[f"x_{flags.D}"] for step in log if step["step"] <= log[-1]["step"] * 2 / 3]
    row["fell"] = round(before[-1] - row[f"x_{flags.D}"], 5)
    if passes(row) or flags.layers == flags.D == 1:
        row["how"] = mechanism(run)
    return row


@functools.cache
def needed(other, k):
    """Return the layers that the law of content demands for x_k, with pairs read from step D to
    step 1, or, if steps are shuffled, in the best order."""
    return min(shuffled_depths(k)[-1]) if "shuffled" in other else causal_depth(k)


def knows(row, k):
    return row[f"x_{k}"] < row["threshold"]


def passes(row):
    """Return whether a run learned a symbol for which the law of content demands more layers."""
    beyond = [k for k in range(1, row["D"] + 1) if needed(row["other"], k) > row["layers"]]
    return any(knows(row, k) for k in beyond)


def reaches(row):
    """Return whether a run learned all symbols that the law of content allows, and there are any;
    None if there are none."""
    allowed = [k for k in range(1, row["D"] + 1) if needed(row["other"], k) <= row["layers"]]
    return all(knows(row, k) for k in allowed) if allowed else None


# ---- how a model does it


def by_place(pattern, values):
    """Attend as on the average over the sequences: a function of the places alone."""
    return pattern.mean(0) @ values


def mean_written(pattern, values):
    """Write what is written on the average over the sequences."""
    return (pattern @ values).mean(0).expand_as(values)


def from_the_next(pattern, values):
    """Write what is written in the next sequence of the batch."""
    return (pattern @ values).roll(-1, 0)


def of_the_next_query(N):
    """Return a function that lets each of the last N tokens write what the next of them writes."""

    def write(pattern, values):
        written = pattern @ values
        return torch.cat([written[:, :-N], written[:, -N:].roll(-1, 1)], 1)

    return write


@torch.no_grad()
def mechanism(run, n=512):
    """Return what interventions on a trained model say, a dict; losses are those of x_1, ..., x_D
    on n sequences, heads have names like L0H3.

    place, mean: of each head, the losses if its pattern is its mean over sequences, or what it
    writes; place_others: if the patterns of all heads that are not by content are their means at
    once; place_layers: if those of all heads of a layer are; mlp: if what the MLP of a layer adds
    is its mean.
    moved: the errors of x_D [to that of the next query, to the own one] if the content heads of the
    last layer write for the next query; moved_rest: if all its other heads do; moved_alone: if one
    content head of the last layer does.
    reads: of each head, its mean attention from the queries to all tokens; spread: over how many
    tokens it is spread, exp(entropy); own: to the own 1a. For one step in one layer see `one_step`
    too."""
    model, flags = train.load(run)
    batch = train.sequences(flags, held_out("circuits", n))

    def losses(heads=None):
        with train.precision(flags):
            predictions = model(batch.inputs, heads)
        return [
            round(x, 5)
            for x in partial_losses(predictions, batch.targets, flags.K).mean(0).tolist()
        ]

    layers = range(flags.layers)
    heads = {f"L{layer}H{head}": (layer, head) for layer in layers for head in range(flags.heads)}
    how = dict(n=n, full=losses())
    how["place"] = {name: losses({head: by_place}) for name, head in heads.items()}
    how["mean"] = {name: losses({head: mean_written}) for name, head in heads.items()}
    content = {head for name, head in heads.items() if kind_of(how, name) == "content"}
    others = [head for head in heads.values() if head not in content]
    how["place_others"] = losses(dict.fromkeys(others, by_place))
    how["place_layers"] = [
        losses({(layer, head): by_place for head in range(flags.heads)}) for layer in layers
    ]
    own = batch.targets[..., -flags.K :]

    def moved(chosen):
        """Return the errors [to the next query's x_D, to the own] if these write for it."""
        with train.precision(flags):
            changed = dict.fromkeys(chosen, of_the_next_query(flags.N))
            answers = model(batch.inputs, changed)[..., -flags.K :].float()
        return [round((answers - x).square().mean().item(), 4) for x in (own.roll(-1, 1), own)]

    last = {name: head for name, head in heads.items() if head[0] == flags.layers - 1}
    how["moved"] = moved([head for head in last.values() if head in content])
    how["moved_rest"] = moved([head for head in last.values() if head not in content])
    how["moved_alone"] = {name: moved([head]) for name, head in last.items() if head in content}
    how["mlp"] = []
    for block in model.blocks if flags.mlp else []:
        hook = block.down.register_forward_hook(lambda _, __, out: out.mean(0).expand_as(out))
        how["mlp"].append(losses())
        hook.remove()

    # attention from the queries, and how much of it to the own 1a
    _, patterns = model(batch.inputs, return_patterns=True)
    query, key = batch.positions[:, :, 0], batch.positions[:, :, 1]  # (n, N)
    how |= dict(reads={}, own={}, spread={})
    for name, (layer, head) in heads.items():
        rows = patterns[layer][torch.arange(n)[:, None], head, query]  # (n, N, T)
        how["reads"][name] = [round(x, 3) for x in rows.mean((0, 1)).tolist()]
        entropy = -torch.special.xlogy(rows, rows).sum(-1).mean()
        how["spread"][name] = round(entropy.exp().item(), 1)
        how["own"][name] = round(rows.gather(2, key[:, :, None]).mean().item(), 3)
    return how | (one_step(model, flags, batch, how) if flags.layers == flags.D == 1 else {})


def one_step(model, flags, batch, how):
    """Return more of a model of one layer that predicts x_1 alone. by_slot: the loss of queries
    whose pair stands in this slot. address: the heads with more than half of their attention on the
    own 1a. If there are any, two swaps: `swap`, in which these heads write what they write in the
    next sequence, should fetch the value of the slot where the next sequence has its pair;
    `swap_rest`, in which all other heads do, the next sequence's value at the own slot. Each has
    the mean squared errors [to this value, to the unswapped one]. Only queries count whose slot is
    another in the next sequence."""
    order = batch.positions[:, :, 0].argsort(1)
    slots = batch.positions[:, :, 1].gather(1, order) // 2  # (n, N) of each query
    values = batch.inputs[:, 1 : 2 * flags.N : 2, : flags.K]  # (n, N, K) by slot
    rows = torch.arange(len(slots))[:, None]

    def errors(expected, changed=()):
        """Return the errors (n, N) of the answers if these heads write for the next sequence."""
        with train.precision(flags):
            answers = model(batch.inputs, {(0, int(head[3:])): from_the_next for head in changed})
        return (answers.float() - expected).square().mean(-1)

    old, elsewhere = values[rows, slots], slots != slots.roll(-1, 0)
    by_slot = [errors(old)[slots == slot].mean().item() for slot in range(flags.N)]
    address = [head for head in how["own"] if how["own"][head] > 0.5]
    result = dict(address=address, by_slot=[round(error, 4) for error in by_slot])
    rest = [head for head in how["own"] if head not in address]
    new_slot, new_value = values[rows, slots.roll(-1, 0)], values.roll(-1, 0)[rows, slots]
    for name, heads, new in ("swap", address, new_slot), ("swap_rest", rest, new_value):
        means = [errors(value, heads)[elsewhere].mean().item() for value in (new, old)]
        result |= {name: [round(mean, 4) for mean in means]} if address else {}
    return result


def kind_of(how, name):
    """Return what a head does for x_D: "idle" if its mean may stand for what it writes, "place" if
    its mean pattern may stand for its pattern, "content" if not."""
    if how["mean"][name][-1] < how["full"][-1] + MATTERS:
        return "idle"
    return "place" if how["place"][name][-1] < how["full"][-1] + MATTERS else "content"


# ---- tables


def cells():
    """Return {(other flags, layers, N, heads, D): [row, ...]} of the committed rows, sorted."""
    groups, names = collections.defaultdict(list), ("other", "layers", "N", "heads", "D")
    for row in sorted(train.read_file(ROWS), key=lambda row: row["seed"]):
        groups[tuple(row[name] for name in names)].append(row)
    return {cell: groups[cell] for cell in sorted(groups) if cell[0] != "frozen"}


def prediction(cell, group):
    """Return (inside, text): whether the median loss of a cell is where it was predicted, and what
    was; None if nothing was."""
    other, layers, N, heads, D = cell
    if (layers, heads, N, D, other) not in PREDICTED:
        return None
    low, high = PREDICTED[layers, heads, N, D, other]
    inside = low <= statistics.median(row[f"x_{D}"] for row in group) <= high
    return inside, f"{name_of(cell)} ({low:g} to {high:g})"


def name_of(cell):
    """Return 2/4/4 `--task shuffled`, layers/heads/N, with D if it is not the number of layers."""
    other, layers, N, heads, D = cell
    return f"{layers}/{heads}/{N}" + f" D={D}" * (layers != D) + f" `{other}`" * bool(other)


def diagram_table():
    """Return the table of the losses of x_D by heads, median and range, and the number of runs if
    it is not five, with a star if one above 0.05 fell by as much in the last third of its steps,
    and bold where the median is not as predicted."""
    groups = cells()
    counts = sorted({heads for _, _, _, heads, _ in groups})
    rows = []
    for other, layers, N, D in dict.fromkeys((*cell[:3], cell[4]) for cell in groups):
        row = [layers, N, f"x_{D}", f"`{other}`" if other else ""]
        for cell in ((other, layers, N, heads, D) for heads in counts):
            runs = groups.get(cell, [])
            losses = [run[f"x_{D}"] for run in runs]
            falls = [min(run["fell"], loss) for run, loss in zip(runs, losses, strict=True)]
            text = spread(losses, "{:.3f}") if runs else ""
            text += "*" * (max(falls, default=0) > MATTERS)
            text += f", n = {len(runs)}" * (len(runs) not in (0, 5))
            inside = not runs or (prediction(cell, runs) or [True])[0]
            row.append(text if inside else f"**{text}**")
        rows.append(row)
    heads = [f"{count} head{'s' * (count > 1)}" for count in counts]
    return markdown(("layers", "N", "loss of", "other flags", *heads), *rows)


def print_counts(out):
    """Print in how many cells the median is where it was predicted, how many runs passed the law of
    content, and how many of one layer end below the least of fixed mixtures."""
    groups = cells()
    found = [prediction(*item) for item in groups.items()]
    found = [item for item in found if item]
    outside = [text for inside, text in found if not inside]
    inside = len(found) - len(outside)
    out(f"The median is where it was predicted in {inside} of {len(found)} cells,")
    out(f"and not in {', '.join(outside) or 'none'}.")
    rows, bound = all_rows(), bound_rows()
    solved, passed = sum(map(solves, bound)), sum(map(passes, bound))
    out(f"Of {len(bound)} runs with fewer layers than the law of content demands for x_D,")
    out(f"{passed} passed it, and {solved} solved x_D (below {MATTERS}).")
    deep = [passes(row) for row in bound if row["D"] > 2 and "--init" not in row["other"]]
    out(f"Of those with D above 2 that began from the start {sum(deep)} of {len(deep)} passed it.")
    ends = [(row["x_1"], gates_error(row["N"], row["heads"])) for row in one_layer_rows()]
    below = [loss < least - MATTERS for loss, least in ends if least > 0]
    out(f"Where 1 - H/N is above 0, {sum(below)} of {len(below)} runs of one layer end more than")
    out("0.05 below it.")
    lent = [row for row in rows if "NVIDIA" in row.get("hardware", "")]
    stopped = [row for row in rows if row.get("stopped")]
    share = max((1 - row["ended"] / row["steps"] for row in stopped), default=0)
    out(f"{len(lent)} of the {len(rows)} runs are of one H100 in bfloat16, the others of CPUs;")
    out(f"{len(stopped)} were stopped in the last {100 * share:.0f}% of their steps.")


def all_rows():
    """Return the committed rows, sorted."""
    return [row for group in cells().values() for row in group]


def bound_rows():
    """Return the rows with fewer layers than the law of content demands for x_D."""
    return [row for row in all_rows() if needed(row["other"], row["D"]) > row["layers"]]


def one_layer_rows():
    """Return the rows of one layer, one step and the default recipe; each says how."""
    return [row for row in all_rows() if row["layers"] == row["D"] == 1 and not row["other"]]


def solves(row):
    """Return whether a run solved x_D."""
    return row[f"x_{row['D']}"] < MATTERS


def print_bound(out):
    """Print the cells in which no run passed the law of content, how many of their runs know a part
    all the same, and how many learned all that it allows, if it allows anything."""
    groups, nothing, something, parts = cells(), [], [], []
    for cell, group in groups.items():
        other, layers, N, _, D = cell
        if needed(other, D) > layers and not any(map(passes, group)):
            parts += [row[f"x_{D}"] < 1 - 1 / N - MATTERS for row in group]
            reached = [reaches(row) for row in group]
            if None in reached:
                nothing.append(name_of(cell))
            else:
                something.append(f"{name_of(cell)} ({sum(reached)} of {len(group)})")
    out(f"In {len(nothing + something)} of {len(groups)} cells no run passed, though {sum(parts)}")
    out(f"of their {len(parts)} runs end more than {MATTERS} below 1 - 1/N.")
    out(f"The law allows nothing in {', '.join(nothing)}.")
    out("It allows something in these, and as many runs learned all of it:")
    out(f"{', '.join(something)}.")


def print_held(out):
    """Print, for each shape with which it was done, how many runs passed the law of content from
    the start, while one head of each layer was held on the minimal circuit, and once freed."""
    kinds = {"": "from the start", "frozen": "held", "--init frozen": "freed"}
    groups = collections.defaultdict(list)
    for row in train.read_file(ROWS):
        shape = tuple(row[name] for name in ("layers", "heads", "N", "D"))
        groups[row["other"], shape].append(row)
    for layers, heads, N, D in sorted(shape for other, shape in groups if other == "frozen"):
        texts = []
        for kind, name in kinds.items():
            group = groups[kind, (layers, heads, N, D)]
            texts.append(f"{sum(map(passes, group))} of {len(group)} {name}")
        lost = sum(not knows(row, 1) for row in group)
        out(f"- {layers}/{heads}/{N}, D = {D}: {', '.join(texts)}, {lost} of which lost x_1")


def described():
    """Return the rows that say how a model does it, sorted."""
    return [row for row in all_rows() if "how" in row]


def heads_of_kind(row, kind):
    """Return how many heads of a kind a model has in each layer, a list."""
    found = [[] for _ in range(row["layers"])]
    for name in row["how"]["reads"]:
        layer, _ = name[1:].split("H")
        found[int(layer)].append(kind_of(row["how"], name) == kind)
    return [*map(sum, found)]


def mechanism_table():
    """Return the table of interventions on the models of more than two chains that learned an x_D
    that is beyond the law of content, a line for each cell: ranges over its runs of the numbers of
    heads, by layer, and of the losses of x_D."""
    lines = []
    for cell, group in cells().items():
        learned = [row for row in group if passes(row) and knows(row, row["D"]) and row["N"] > 2]
        measured = [row for row in learned if "how" in row]
        if not measured:
            continue
        hows = [row["how"] for row in measured]
        few = f", {len(measured)} measured" * (measured != learned)
        line = [name_of(cell), f"{len(learned)}/{len(group)}{few}"]
        for kind in "content", "place":
            counts = zip(*(heads_of_kind(row, kind) for row in measured), strict=True)
            line.append(", ".join(span(layer, "{}") for layer in counts))
        line.append(span([how["full"][-1] for how in hows], "{:.3f}"))
        line.append(span([how["place_others"][-1] for how in hows], "{:.3f}"))
        moved = zip(*(how["moved"] for how in hows), strict=True)
        lines.append([*line, "/".join(span(errors) for errors in moved)])
    head = "layers/heads/N", "learned x_D", "content heads", "place heads", "loss"
    return markdown((*head, "others by place", "moved: next/own"), *lines)


def print_swaps(out):
    """Print what the models that learned x_D lose without content in the last layer; how many have
    address heads; and what becomes of these models when these heads, or all others, write what they
    write in another sequence."""
    hows = [row["how"] for row in described() if knows(row, row["D"])]
    rise = min(how["place_layers"][-1][-1] - how["full"][-1] for how in hows)
    rise = math.floor(100 * rise) / 100  # bounds are rounded outward
    out(f"With all heads of the last layer by place the loss of x_D rises by at least {rise:.2f}")
    out(f"in the {len(hows)} models measured that learned x_D.")
    one = one_layer_rows()
    found = [row for row in one if row["how"]["address"]]
    wide = [row for row in found if row["heads"] > row["N"]]
    memory = sum(sum(heads_of_kind(row, "place")) >= row["N"] for row in wide)
    more = sum(row["heads"] > row["N"] for row in one)
    out("An address head has more than half of its attention on the own 1a. Of the models of one")
    out(
        f"layer {len(wide)} of {more} with more than N heads have one, and {memory} of these have N"
    )
    out("place heads or more; of the others")
    out(f"{len(found) - len(wide)} of {len(one) - more} have an address head.")
    hows = [row["how"] for row in found]
    for name, heads in ("swap", "the address heads"), ("swap_rest", "all others"):
        new, old = zip(
            *((how[name][0] - how["full"][0], how[name][1]) for how in hows), strict=True
        )
        most, least = math.ceil(100 * max(new)) / 100, math.floor(100 * min(old)) / 100
        out(f"With {heads} swapped the error to the new value is at most {most:.2f} above the")
        out(f"model's loss, and to the old one at least {least:.2f} (n = {len(found)}).")


def print_gates(out):
    """Print, of models of one layer, N = 4 and at most four heads, the loss in the best and in the
    worst slot of the own pair."""
    rows = [row for row in one_layer_rows() if row["N"] == 4 >= row["heads"]]
    texts = []
    for heads in sorted({row["heads"] for row in rows}):
        slots = [row["how"]["by_slot"] for row in rows if row["heads"] == heads]
        best, worst = span([*map(min, slots)]), span([*map(max, slots)])
        texts.append(f"{heads} head{'s' * (heads > 1)} {best} and {worst} (n = {len(slots)})")
    out("Losses in the best and in the worst slot:")
    out(";\n".join(texts) + ".")


def superposition_table():
    """Return the table of the content heads of the last layer of the models that passed the law of
    content with shuffled steps, or with 16 chains, of those whose attention is on one token and of
    the others: over how many tokens it is spread, the losses if what a head writes is its mean, and
    the errors of x_D if it writes for the next query."""
    shuffled = "shuffled, N = 4", lambda row: "shuffled" in row["other"]
    cases, rows = (shuffled, ("in order, N = 16", lambda row: row["N"] == 16)), []
    for (case, belongs), one in itertools.product(cases, (True, False)):
        models = [row["how"] for row in filter(passes, described()) if belongs(row)]
        found = [
            [head for head in how["moved_alone"] if (how["spread"][head] < 1.5) == one]
            for how in models
        ]
        pairs = [(how, head) for how, heads in zip(models, found, strict=True) for head in heads]
        tokens = span([how["spread"][head] for how, head in pairs], "{:.1f}")
        means = zip(*(how["mean"][head] for how, head in pairs), strict=True)
        moved = zip(*(how["moved_alone"][head] for how, head in pairs), strict=True)
        line = case, len(models), span([*map(len, found)], "{}"), tokens
        rows.append((*line, "/".join(map(span, means)), "/".join(map(span, moved))))
    head = "steps", "models", "heads in each", "attention spread over"
    return markdown((*head, "x_1/x_2 if a head writes its mean", "moved: next/own"), *rows)


def measure(folders):
    """Add the rows of these runs to the committed ones. A run that has a row, or has not ended, is
    left out."""
    rows = train.read_file(ROWS) if ROWS.exists() else []
    for run in folders:
        if (run / "model.pt").exists() and run.name not in [row["run"] for row in rows]:
            rows.append(row_of(run))
            train.write_file(ROWS, rows)


# ---- what the page prints of the laws and of the sweep


def print_orders(out):
    """Print the layers by content for some reading orders, and for steps shuffled together."""
    for steps in (4, 3, 2, 1), (1, 2, 4, 3):
        layers = ", ".join(map(str, least_layers(in_order(steps))))
        out(f"- pairs read {', '.join(map(str, steps))}: x_1 to x_4 need {layers} layers")
    texts = []
    for k, depths in enumerate(shuffled_depths(4), 1):
        shares = ", ".join(f"{layers} ({share:.2f})" for layers, share in depths.items())
        texts.append(f"x_{k} {shares}")
    out(f"- steps shuffled together, layers (share of the orders): {'; '.join(texts)}")


def print_constructed(out, n=4096):
    """Print the loss of the constructed model for several of its constants."""
    batch, losses = make_batch(0, torch.arange(n), 4, 1, 4), []
    for scale in (25, 50, 100):
        with torch.no_grad():
            error = (constructed(4, scale)(batch.inputs) - batch.targets).square().mean()
        losses.append(f"{error:.0e} at {scale}")
    out(f"Its loss with N = 4, by `scale`, on {n} sequences: {', '.join(losses)}.")


def print_sweep(out):
    """Print what the runs of sweeps learned, beside the law of content."""
    shallow, limit, beyond = too_shallow(sweep.section_7(chains(committed("*"))))
    out(f"Of {shallow} runs (those of `results/longer` too) that have fewer layers than the law of")
    out(f"content demands for x_D, {len(beyond)} learned more than it allows, and")
    out(f"{limit} all of the one or more symbols that it allows. The others are weak evidence.")


# ---- figures


def draw_diagram(path=Path("results/sweep/law.png")):
    """Draw the loss of x_D of every run of the default recipe by its heads, a panel for each number
    of layers and chains, beside the laws."""
    found, most = collections.defaultdict(list), 16
    for (other, layers, N, _, D), group in cells().items():
        if not other:
            found[layers, N, D].append(group)
    panels = {shape: sum(groups, []) for shape, groups in found.items() if len(groups) > 1}
    figure, axes = analyze.panels(len(panels), 3, 3.2, 2.9, sharey=True)
    for panel, ((layers, N, D), rows) in zip(axes, panels.items(), strict=True):
        points = []
        for count, runs in itertools.groupby(rows, key=lambda row: row["heads"]):
            ends = [row[f"x_{D}"] for row in runs]  # seeds stand side by side
            points += [
                (count * 1.008 ** (2 * n - len(ends) + 1), end) for n, end in enumerate(ends)
            ]
        style = dict(color="tab:blue", zorder=3, label="a trained model (seeds side by side)")
        panel.scatter(*zip(*points, strict=True), s=16, alpha=0.7, **style)
        bound = "law of content: no better than the average of N values"
        panel.axhspan(1 - 1 / N, 1.1, color="0.9", label=bound)
        if layers == D == 1:
            heads = [*range(1, most + 1)]
            address = [address_error(N, H) for H in heads]
            panel.plot(heads, address, "k-", lw=1, label="1 - (H-1)/N: an address and a memory")
            gates = [gates_error(N, H) for H in heads]
            panel.plot(heads, gates, "k:", lw=1, label="1 - H/N: the least of fixed mixtures")
        name = f"{layers} layer{'s' * (layers > 1)}, N = {N}: loss of $x_{D}$, n = {len(rows)}"
        panel.set(title=name, xlabel="heads per layer (H)", xscale="log")
        panel.set(xlim=(0.85, 1.2 * most), ylim=(-0.03, 1.1))
        panel.title.set_fontsize("medium")
        panel.set_xticks([1, 2, 3, 4, 5, 8, most], [1, 2, 3, 4, 5, 8, most])
        panel.minorticks_off()
    for panel in axes[::3]:
        panel.set_ylabel("validation MSE at the end")
    below = dict(loc="outside lower center", ncols=2, fontsize="small")
    figure.legend(*axes[0].get_legend_handles_labels(), **below)
    analyze.save_figure(figure, path)


def draw_address(name="L1_H5_N4_D1_s1", path=Path("results/figures/address.png")):
    """Draw where the queries of one model look: the mean attention of each head to each token of a
    pair, and to the 1a of the own chain, wherever it stands."""
    rows = train.read_file(ROWS)
    row = next(row for row in rows if row["run"] == name)
    how, tokens = row["how"], range(2 * row["N"])
    most = {head: reads.index(max(reads)) for head, reads in how["reads"].items()}
    heads = sorted(most, key=lambda head: (head in how["address"], most[head]))
    size = dict(figsize=(7, 2.8), layout="constrained", width_ratios=[len(tokens), 1.6])
    figure, (left, right) = plt.subplots(1, 2, **size)
    reads = [how["reads"][head][: len(tokens)] for head in heads]
    for panel, table in (left, reads), (right, [[how["own"][head]] for head in heads]):
        image = panel.imshow(table, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for y, values in enumerate(table):
            for x, value in enumerate(values):
                color = "white" if value > 0.5 else "black"
                panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
        panel.set_yticks(range(len(table)), [f"head {head[3:]}" for head in heads])
    names = [f"1{'ab'[token % 2]} of\nslot {token // 2}" for token in tokens]
    left.set_xticks(tokens, names, fontsize=7)
    left.set_title("by place: to the token that stands there", fontsize="medium")
    right.set_xticks([0], ["own 1a"], fontsize=7)
    right.set_title("of these, to", fontsize="medium")
    figure.colorbar(image, label="attention")
    title = f"One layer of {row['heads']} heads, seed {row['seed']}, loss {row['x_1']:.3f}:"
    title += f" mean attention of the queries ({how['n']} sequences)"
    figure.suptitle(title, fontsize="medium")
    analyze.save_figure(figure, path)


if __name__ == "__main__":
    if "--preset" in sys.argv:
        sweep.PRESETS["law"] = LAW
        sweep.main()
    else:
        with program("python -m extras.studies.depth"):
            p = command_line("python -m extras.studies.depth", __doc__)
            p.add_argument("run", type=Path, nargs="*", help="run directories to measure")
            measure(p.parse_args().run)
            draw_diagram()
            draw_address()
