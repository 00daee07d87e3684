"""Find the circuit of a trained transformer by machine, and certify it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0  # prints the certificate, writes circuit.json, ablation.csv

A path is (layer, head, source, target): "in layer 7, q attends to 1b". A circuit holds every
head: the useless ones to a simple pattern, the others to their paths, and a fill says what all
their other tokens do. The grade of a circuit says how much of this was fitted to the model:

    literal       nothing: paths are one-hot, all else attends to nothing (as in the paper), to
                  itself, or to everything alike
    positional    tokens without a path attend as in the mean over sequences (but not to their own
                  slot, which would carry the symbol of a pair without any path)
    by slot       tokens with a path attend as in the mean over those sequences in which what they
                  look for stands in this slot

Layers and heads are counted from 1 in all that is printed or written.
"""

import csv
import itertools
import json
import math
import pathlib
import sys
import time

from parts import runs
from parts.circuit import (
    Held,
    Path,
    check_roles,
    fields_of,
    mean_attention,
    name_of,
    paths_of,
    to_the_token_before,
    with_paths,
    without,
)
from parts.flags import command_line
from parts.flow import least_possible, may_attend, symbols_reached
from parts.intervals import bootstrap
from parts.search import SIMPLE, candidates, own_patterns, search, vouch

import torch

from data import held_out


GRADES = {  # the strictest first, and the fills that each allows
    "literal": ["zero", "identity", "uniform"],
    "positional": ["position"],
    "by slot": ["slot"],
}
PAPERS_LEAST = 0.17  # the lowest MSE after the removal of a path in Appendix E


# ---- certifying


def measure(model, flags, means, batch, circuits, fill):
    """[(B, symbols), ...] the errors of several circuits that have most in common with the first,
    on 256 sequences at a time: more would fill the memory."""
    measured = []
    for tensors in zip(*(tensor.split(256) for tensor in batch), strict=True):
        held = Held(model, flags, means, type(batch)(*tensors))
        measured.append([held.errors(circuit, fill) for circuit in circuits])
    return [torch.cat(parts) for parts in zip(*measured, strict=True)]


def interval(errors, generator):
    """errors (B, symbols) -> dict: their mean, its 95% bootstrap interval over sequences, and the
    mean of each symbol."""
    low, high = bootstrap(errors.mean(1), generator)
    mse = errors.mean(1).mean().item()
    return dict(mse=mse, low=low, high=high, partial=errors.mean(0).tolist())


def simplified(circuit, fill):
    """The circuit with useless heads that are allowed with this fill."""
    changed = {}
    for head, own in circuit.items():
        allowed = not isinstance(own, str) or own in SIMPLE[fill]
        changed[head] = own if allowed else SIMPLE[fill][0]
    return changed


def can_travel(task, paths, fill):
    """Whether x_1, x_2, ... all come to the query if every path takes all that its target holds;
    with the fill "slot" it may take what all tokens beside the target hold."""
    holds = task.column("symbol")[:, None] == torch.arange(task.symbols)
    blocks = task.column("block")
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        before = holds.clone()
        for path in layer:
            taken = before[path.target]
            if fill == "slot":
                taken = before[blocks == blocks[path.target]].any(0)
            holds[path.source] |= taken
    return bool(holds[0].all())


def control_sets(task, causal, circuit, fill, seed, draws=100):
    """{control: [paths, ...]}, sets of paths with which a model should know little: random ones, as
    many as the circuit has, by which the symbols cannot all come to the query; its own, but to the
    wrong step; from its sources to all but its targets; none. A kind of which there can be no set
    stays an empty list: to have no path is a control of its own."""
    paths, generator = paths_of(circuit), torch.Generator().manual_seed(seed)
    legal = may_attend(task, causal).fill_diagonal_(False).nonzero().tolist()
    every = [Path(*head, *pair) for head in sorted(circuit) for pair in legal]
    sets = dict(random=[], wrong_step=[], complement=[], no_path=[()])
    for _ in range(10 * draws):  # in a tiny task few are of use
        order = torch.randperm(len(every), generator=generator)[: len(paths)]
        drawn = [every[i] for i in order.tolist()]
        if not can_travel(task, drawn, fill):
            sets["random"].append(drawn)
        if len(sets["random"]) == draws:
            break

    # to the same place of another block, where the source may look there
    for shift in range(1, len(task.blocks)):
        moved = set()
        for path in paths:
            block = (task.roles[path.target].block + shift) % len(task.blocks)
            for target, role in enumerate(task.roles):
                if (role.block, role.place) == (block, task.roles[path.target].place):
                    moved.add(path._replace(target=target))
        moved &= set(every)
        if moved:
            sets["wrong_step"].append(moved)

    # whatever stands beside a target is no other target: the slot is the same
    looked_for = {(path[:3], task.roles[path.target].block) for path in paths}
    sources = {path[:3] for path in paths}
    rest = [path for path in every if path[:3] in sources]
    rest = [path for path in rest if (path[:3], task.roles[path.target].block) not in looked_for]
    if rest:
        sets["complement"].append(rest)
    return sets


def controls(held, circuit, fill, seed):
    """({control: its lowest MSE}, the same of those sets alone by which the symbols cannot all come
    to the query: they must not pass). None where there is no set."""
    bare = without(circuit, paths_of(circuit), bare_head(fill))
    task, lowest, must_fail = held.flags.problem, {}, {}
    sets = control_sets(task, held.flags.causal, circuit, fill, seed)
    for name, several in sets.items():
        every, powerless = [], []
        for chosen in several:
            mse = held.errors(with_paths(bare, chosen), fill).mean().item()
            every.append(mse)
            if not can_travel(task, chosen, fill):
                powerless.append(mse)
        lowest[name] = min(every, default=None)
        must_fail[name] = min(powerless, default=None)
    return lowest, must_fail


def bare_head(fill):
    """What a head that has lost all its paths does."""
    return "position" if fill == "slot" else fill


def certify(model, flags, means, circuit, fill, batch, seed):
    """What is measured of a circuit, a dict:

    intact: no head held; replaced: all of them; fills: with each other fill; first_head_uniform and
    removals, `frozen`: the paper's step 6, the first useful head made uniform or one path removed
    while all else is held; of each path also what vouch says, and which of the learned symbols the
    flow says are lost without it in any head (predicted), which the model loses (destroyed);
    controls and controls_that_must_fail. Intact and replaced are of all sequences of the batch,
    what vouch says of the first 256, controls of the first 32, the rest of an eighth."""
    task, generator = flags.problem, torch.Generator().manual_seed(seed)
    paths, eighth = paths_of(circuit), part(batch, fewer(len(batch.inputs)))

    # the model as it is, and held to the circuit
    found = {}
    for name, mechanisms in (("intact", {}), ("replaced", circuit)):
        (errors,) = measure(model, flags, means, batch, [mechanisms], fill)
        found[name] = interval(errors, generator)
    found["fills"] = {}
    for other in SIMPLE:
        (errors,) = measure(model, flags, means, eighth, [simplified(circuit, other)], other)
        found["fills"][other] = interval(errors, generator)

    # the paper's step 6
    changed = [circuit, circuit | {paths[0][:2]: "uniform"}]
    changed += [without(circuit, [path], bare_head(fill)) for path in paths]
    _, uniform, *frozen = measure(model, flags, means, eighth, changed, fill)
    found["first_head_uniform"] = interval(uniform, generator)

    # every path in the model as it is
    said, found["removals"] = vouch(model, flags, part(batch, 256), circuit), []
    intact = torch.tensor(found["intact"]["partial"])
    learned = intact < task.destroyed
    for path, errors in zip(paths, frozen, strict=True):
        others = [other for other in paths if other[2:] != path[2:]]
        predicted = learned & ~symbols_reached(task, others, flags.layers)
        rises = {
            what: interval(said[path][what], generator) for what in ("alive", "alive_everywhere")
        }
        partial = torch.tensor(rises["alive_everywhere"]["partial"]) + intact
        lost = learned & (partial > task.destroyed)
        found["removals"].append(
            fields_of(path, task)
            | dict(frozen=interval(errors, generator))
            | said[path]
            | rises
            | dict(predicted=symbol_names(predicted), destroyed=symbol_names(lost))
        )

    # circuits that should fail
    held = Held(model, flags, means, part(batch, 32))
    found["controls"], found["controls_that_must_fail"] = controls(held, circuit, fill, seed)
    return found


def part(batch, count):
    return type(batch)(*(tensor[:count] for tensor in batch))


def fewer(sequences):
    """An eighth of the sequences, enough for large effects."""
    return max(2, sequences // 8)


def symbol_names(symbols):
    """(symbols,) bool -> [x_1, ...], the names of those that are True."""
    return [f"x_{k}" for k, there in enumerate(symbols, 1) if there]


def objections(certificate, threshold):
    """[text, ...] why a circuit cannot be certified; [] if nothing speaks against it."""
    against = []
    if certificate["replaced"]["high"] >= threshold:
        against.append(f"the loss is {certificate['replaced']['mse']:.4f} on fresh sequences")
    for name, mse in certificate["controls_that_must_fail"].items():
        if mse is not None and mse < threshold:
            against.append(f"a control passes: {name}, with a loss of {mse:.4f}")
    for removal in certificate["removals"]:
        name = name_of(removal)
        if not removal["well_attended"]:
            gets = "{in_all_heads:.3f} of the attention, relays {relayed:.3f}".format(**removal)
            against.append(f"{name} gets {gets}")
        if removal["alive_everywhere"]["low"] <= 0:
            against.append(f"{name} can be taken from the model at no cost")
    return against


def summary(task, causal, circuit, certificate, threshold):
    """What the certificate says in numbers, a dict."""
    paths, removals = paths_of(circuit), certificate["removals"]
    losses = [removal["frozen"]["mse"] for removal in removals]
    first = [path for path in paths if path.layer == paths[0].layer]
    learned = torch.tensor(certificate["intact"]["partial"]) < task.destroyed
    return dict(
        sufficient=certificate["replaced"]["high"] < threshold,
        paths=len(paths),
        layers_with_paths=len({path.layer for path in paths}),
        **least_possible(task, causal, learned),
        first_useful_layer_is_previous_token=all(to_the_token_before(path, task) for path in first),
        removals_above_threshold=sum(loss >= threshold for loss in losses),
        removals_at_the_papers_least=sum(loss >= PAPERS_LEAST for loss in losses),
        removals_that_cost_the_model=sum(row["alive"]["low"] > 0 for row in removals),
        predictions_right=sum(row["predicted"] == row["destroyed"] for row in removals),
    )


# ---- all of it


def heads_of(circuit, removals, task):
    """[{layer, head, mechanism}, ...] as they are written, paths with their mean attention."""
    attention = [removal["attention"] for removal in removals]
    attention = dict(zip(paths_of(circuit), attention, strict=True))
    heads = []
    for (layer, head), own in sorted(circuit.items()):
        if not isinstance(own, str):
            own = [fields_of(path, task) | dict(attention=attention[path]) for path in own]
        heads.append(dict(layer=layer + 1, head=head + 1, mechanism=own))
    return heads


def check(flags, threshold, sequences, seed):
    """ValueError with one line for what cannot be."""
    if not 0 < threshold < math.inf:
        raise ValueError(f"--threshold must be above 0 and finite, not {threshold}")
    if sequences < 2:
        raise ValueError(f"--sequences must be at least 2, not {sequences}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be from 0 to {2**63 - 1}, not {seed}")
    if flags.N < 2:
        raise ValueError("the run was trained with --N 1: one chain leaves nothing to look for")
    if flags.circuit:
        known = "its attention is known, there is nothing to find"
        raise ValueError(f"the run was trained with --circuit: {known}")
    if flags.mixture:
        one = "its queries say one symbol each"
        raise ValueError(f"the run was trained with --mixture: {one}, choose one that says all")
    if flags.targets or not flags.ic:
        typed = "--targets" if flags.targets else "--no-ic"
        raise ValueError(f"the run was trained with {typed}: choose one that predicts all symbols")


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, sequences=4096, seed=0):
    """The circuit of a model and its certificate: the dict that main writes into circuit.json.

    model: anything on the CPU, ready to evaluate, that can be called like model.Transformer:
    model(x, patterns={(layer, head): (T, T) or (B, T, T)}, return_patterns=False), with x (B, T,
    inputs), returns predictions (B, N, symbols*K) of x_1, x_2, ... at the last N tokens; the heads
    named in `patterns`, numbers from 0, attend so instead of as they would. With return_patterns it
    returns (predictions, [attention after softmax (B, heads, T, T) of each layer]). With arguments
    `start` and `stop` as model.Transformer has them it is searched several times as fast.
    flags: the flags of a run, as runs.load gives them, or train.parse_flags(["--D", "2"]).
    threshold: the highest MSE of a sufficient circuit; sequences: fresh ones for the certificate;
    seed: of the bootstrap and of random circuits. ValueError for what cannot be; FloatingPointError
    for a model whose loss is not finite."""
    check(flags, threshold, sequences, seed)
    flags = flags.but(device="cpu")
    task, fresh = flags.problem, runs.sequences(flags, held_out("certificate", sequences))
    report = dict(grade=None, fill=None, threshold=threshold, sequences=sequences)
    report |= dict(searches={}, objections={})
    began = time.time()

    # what its heads do
    own = runs.sequences(flags, held_out("means", 512))
    check_roles(task, own, flags.K)
    patterns = own_patterns(model, flags, own.inputs)
    means = mean_attention(patterns, task, own.positions)
    held = Held(model, flags, means, runs.sequences(flags, held_out("search", 128)))

    # nothing to find in a model that has not learned enough
    losses = held.errors({}).mean(0)
    nothing = why_not_searched(task, losses, threshold)
    if nothing:
        return report | dict(no_circuit=nothing)

    # the paths that it would miss
    costs = candidates(model, flags, part(own, 64), patterns, means)
    report["candidates"] = len(costs)
    print(f"{time.time() - began:5.1f} s  {len(costs)} paths may belong to the circuit", flush=True)

    # the strictest grade with a circuit to which nothing can be objected, the fewest paths first;
    # fresh sequences may say a little more than those of the search
    limit = 0.9 * threshold + 0.1 * losses.mean().item()
    for grade, fills in GRADES.items():
        found, tried = search_fills(held, fills, costs, means, limit, report, began), []
        alike = [(fill, paths_of(circuit)) for fill, circuit in found]
        for (fill, circuit), this in zip(found, alike, strict=True):
            if this in tried:
                continue
            tried.append(this)
            certificate = certify(model, flags, means, circuit, fill, fresh, seed)
            against = objections(certificate, threshold)
            if against:
                report["objections"][f"{grade}, fill {fill}, circuit {len(tried)}"] = against
                continue
            report |= dict(grade=grade, fill=fill, orders_that_agree=alike.count(this))
            report |= summary(task, flags.causal, circuit, certificate, threshold)
            report["heads"] = heads_of(circuit, certificate["removals"], task)
            return report | certificate

    why = why_none(task, report["searches"], costs, flags.layers)
    return report | dict(no_circuit=why, relays=through_relays(task, means))


def why_not_searched(task, losses, threshold):
    """Why there is nothing to find in a model with these losses of x_1, x_2, ..., or None.

    FloatingPointError for a loss that is not finite."""
    mean = losses.mean().item()
    if not math.isfinite(mean):
        raise FloatingPointError("the loss of the model is not finite")
    if mean >= threshold:
        return f"the model itself has a loss of {mean:.3f}, not below {threshold:g}"
    if not (losses < task.destroyed).any():
        return "the model has learned no symbol"
    return None


def why_none(task, searches, costs, layers):
    """Why no circuit was certified, as text."""
    if searches:
        return "nothing found was below the threshold and vouched for"
    reached = " ".join(symbol_names(symbols_reached(task, sorted(costs), layers))) or "nothing"
    carried = f"the flow along all of these paths reaches only {reached}"
    return f"{carried}, or a target gets less than half of the attention"


def through_relays(task, means):
    """[{layer, head, source, target, attention}, ...] where a token looks for what its target
    holds, but gives most of its attention to tokens of other chains that took from the target
    before."""
    found = []
    for head, mean in sorted(means.items()):
        relayed = mean.by_way.mean((0, 1))
        for pair in (relayed >= 0.5).nonzero().tolist():
            share = round(relayed[tuple(pair)].item(), 3)
            found.append(fields_of(Path(*head, *pair), task) | dict(attention=share))
    return found


def search_fills(held, fills, costs, means, limit, report, began):
    """[(fill, circuit), ...] found with any of these fills and in any order, those with the fewest
    paths first, of these the strictest. What came out is noted in the report."""
    found = []
    for number, fill in enumerate(fills):
        for order, (circuit, loss) in search(held, fill, costs, means, limit).items():
            said = f"{len(paths_of(circuit))} paths, loss {loss:.4f}"
            report["searches"][f"{fill}, {order}"] = said
            print(f"{time.time() - began:5.1f} s  {fill}, {order}: {said}", flush=True)
            if loss < limit:
                found.append((len(paths_of(circuit)), number, loss, circuit))
    found.sort(key=lambda entry: entry[:3])
    return [(fills[number], circuit) for _, number, _, circuit in found]


# ---- the command line


def write_table(path, report):
    """ablation.csv: one row per measurement, partial losses in columns of their own."""
    rows = [dict(what=name, **report[name]) for name in ("intact", "replaced")]
    rows += [dict(what=f"fill {fill}", **found) for fill, found in report["fills"].items()]
    rows.append(dict(what="first head uniform", **report["first_head_uniform"]))
    for removal in report["removals"]:
        named = {key: removal[key] for key in ("layer", "head", "source", "target", "attention")}
        for what in ("frozen", "alive", "alive_everywhere"):
            rows.append(dict(what=what, **named, **removal[what]))
        for key in ("predicted", "destroyed"):
            rows[-1][key] = " ".join(removal[key])
    for name, mse in report["controls"].items():
        rows.append(dict(what=f"control {name}", mse=mse))

    symbols = symbol_names([True] * len(report["intact"]["partial"]))
    columns = ["what", "layer", "head", "source", "target", "attention", "mse", "low", "high"]
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, [*columns, *symbols, "predicted", "destroyed"])
        table.writeheader()
        for row in rows:
            row |= dict(zip(symbols, row.pop("partial", []), strict=False))
            table.writerow(row)


def print_certificate(report, task):
    """The table of a certificate, a line per measurement."""
    symbols = " ".join(f"{name:>6s}" for name in symbol_names([True] * (task.symbols - 1)))
    print(f"{'':48s}     MSE [95% interval]     {symbols}")

    def line(what, found):
        partial = " ".join(f"{loss:6.3f}" for loss in found["partial"])
        print(
            f"{what:48s} {found['mse']:7.4f} [{found['low']:.4f}, {found['high']:.4f}]  {partial}"
        )

    line("the model as it is", report["intact"])
    line(f"all heads held, fill {report['fill']}", report["replaced"])
    for fill, found in report["fills"].items():
        line(f"    fill {fill}", found)
    line("first useful head uniform", report["first_head_uniform"])
    for removal in report["removals"]:
        name = name_of(removal)
        line(f"without {name}", removal["frozen"])
        line(f"    rise in the model (attention {removal['attention']:.3f})", removal["alive"])
        line("    rise, in no head of the model", removal["alive_everywhere"])
    for name, mse in report["controls"].items():
        print(f"{f'control: {name}, lowest':48s} " + ("" if mse is None else f"{mse:7.4f}"))


def rounded(value):
    """Any part of a report with five digits of its numbers: no sample is large enough for more."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_report(run, report):
    """circuit.json and ablation.csv of a run directory."""
    report = rounded(report)
    if report["grade"]:
        runs.write_file(run / "ablation.csv", lambda path: write_table(path, report))
    else:
        (run / "ablation.csv").unlink(missing_ok=True)  # it belonged to another threshold
    runs.write_text(run / "circuit.json", json.dumps(report, indent=1) + "\n")


def parse_flags():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
    text = "highest MSE of a sufficient circuit (default: 0.05)"
    p.add_argument("--threshold", type=float, default=0.05, help=text)
    text = "fresh sequences for the certificate (default: 4096)"
    p.add_argument("--sequences", type=int, default=4096, help=text)
    text = "of the bootstrap and of random circuits (default: 0)"
    p.add_argument("--seed", type=int, default=0, help=text)
    return p, p.parse_args()


def main():
    p, args = parse_flags()
    try:
        model, flags = runs.load(args.run)
        report = find_circuit(model, flags, args.threshold, args.sequences, args.seed)
    except ValueError as error:
        p.error(error)
    except FloatingPointError:
        p.error(f"the loss of {args.run} is not finite: train it again")

    # what was found is printed, whether it can be written or not
    if report["grade"]:
        print_certificate(report, flags.problem)
    print("---")
    for key, value in report.items():
        if not isinstance(value, (list, dict)):
            print(f"{key}: {value}")
    for circuit, against in report["objections"].items():
        print(f"not certified, {circuit}: {'; '.join(against)}")
    for relay in report.get("relays", []):
        where = "layer {layer} head {head}, {source} gives {attention}".format(**relay)
        print(f"relayed: {where} to tokens that took from its {relay['target']} before")
    try:
        write_report(args.run, report)
    except OSError as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"circuit: {args.run / 'circuit.json' if report['grade'] else 'none'}")


if __name__ == "__main__":
    main()
