"""Find the circuit of a trained transformer by machine, and certify it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0    # prints the certificate, writes circuit.json

A path is (layer, head, source, target): "in layer 7, q attends to 1b". A circuit gives some heads
paths, which their sources follow and nothing else; all other tokens of these heads do one simple
thing (zero, identity or uniform rows), all other heads another (uniform, identity, or attention by
position). It is certified if it answers four questions about fresh sequences:

    sufficient   held to it in all heads, does the model still solve the task?
    complete     can the heads without a path be held while the rest is free, alone and together?
                 all tokens without a path in any head, and each path that is left out be
                 removed, and every symbol is still solved?
    carried      is it the targets whose values matter to the free model, not what else is read?
    needed       does the free model miss each path, where no head is left that has it?

Literal: no head attends by position. Layers and heads are counted from 1 in all that is printed or
written.
"""

import json
import pathlib
import time

from parts import UserError, command_line, config, program
from parts.circuit import (
    PatchedModel,
    check_model,
    fields_of,
    flow,
    name_of,
    paths_of,
    read_path,
    symbol_names,
    without,
)
from parts.search import (
    FAINT,
    attention_knockout,
    candidates,
    groups_of,
    resample_values,
    search,
    simple_heads,
)
from parts.stats import studentised

import torch

from data import held_out


FILLS = ["zero", "identity", "uniform"]  # what tokens without a path do; the paper's first
PAPERS_LEAST = 0.17  # the lowest MSE after the removal of a path in Appendix E


# ---- the four questions


def interval(errors, generator):
    """errors (B, symbols) -> dict: their mean, its 95% interval over sequences, and the mean of
    each symbol."""
    low, high = studentised(errors.mean(1), generator)
    return dict(mse=errors.mean().item(), low=low, high=high, partial=errors.mean(0).tolist())


def certify(free, every, circuit, uses, fill, generator):
    """What is measured of a circuit, a dict. every: errors of the free model and of the model held
    to it, on all sequences, a pair of (B, symbols); uses: the paths that the free model misses; the
    rest is measured with `free`, PatchedModel, by how much the errors of the free model rise:

    complete: when heads without a path do what the circuit says, each alone and all together, and
    when all other tokens without a path do too, while those with one attend as they did (rest); and
    without each path that the circuit leaves out;
    paths: of each path, its mean attention; without it in this head (alone: a stand-in costs
    nothing) and in any head that has it (everywhere); when the values that its source reads at its
    targets in this head are replaced (carried), and when all others are (others)."""
    task, positions, intact = free.task, free.batch.positions, free.free

    def rise(errors):
        return interval(errors - intact, generator)

    def destroyed(risen):
        lost = torch.tensor(risen["partial"]) + intact.mean(0) > task.lost
        return symbol_names(lost & (intact.mean(0) < task.lost))

    # sufficient and complete
    found = dict(intact=interval(every[0], generator), sufficient=interval(every[1], generator))
    idle, alone = {head: own for head, own in circuit.items() if isinstance(own, str)}, []
    for (layer, head), own in sorted(idle.items()):
        costs = rise(free.errors({(layer, head): own}))
        alone.append(dict(layer=layer, head=head, mechanism=own, **costs))
    rest = rise(free.errors_of_rest(circuit, fill))
    rest["destroys"] = destroyed(rest)
    found["complete"] = dict(alone=alone, together=rise(free.errors(idle)), rest=rest, left_out=[])
    for path in sorted({*uses} - {*paths_of(circuit)}):
        row = fields_of(path, task) | rise(attention_knockout(free, [path]))
        found["complete"]["left_out"].append(row | dict(destroys=destroyed(row)))

    # carried and needed
    found["paths"] = []
    for group in (group for own in circuit.values() for group in groups_of(own)):
        carried, others = resample_values(free, group), resample_values(free, group, others=True)
        values = dict(carried=rise(carried), others=rise(others))
        values["more"] = interval(carried - others, generator)
        for path in group:
            share = {}
            for head, pattern in free.attention().items():
                same = path._replace(layer=head[0], head=head[1])
                share[same] = read_path(pattern, same, task, positions).mean().item()
            heads = {path, *(same for same, given in share.items() if given >= FAINT)}
            row = fields_of(path, task) | dict(attention=share[path]) | values
            row["alone"] = rise(attention_knockout(free, [path]))
            row["everywhere"] = (
                rise(attention_knockout(free, heads)) if len(heads) > 1 else row["alone"]
            )
            row["destroys"] = destroyed(row["everywhere"])
            found["paths"].append(row)
    found["paper"] = papers_test(free, circuit, generator)
    return found


def papers_test(free, circuit, generator):
    """Steps 5 and 6 of Appendix E: all heads held, tokens without a path attending to nothing; the
    first useful head made uniform; and each path removed while all else is held, but for those of
    the first useful layer, which the paper excepts."""
    paths, nothing = paths_of(circuit), dict.fromkeys(circuit, "zero")
    later = [path for path in paths if path.layer > paths[0].layer]
    removed = [free.errors(without(circuit, path, nothing)).mean().item() for path in later]
    return dict(
        held=interval(free.errors(circuit), generator),
        first_uniform=interval(free.errors(circuit | {paths[0][:2]: "uniform"}), generator),
        removed=removed,
        at_threshold=sum(mse >= 0.05 for mse in removed),
        at_papers_least=sum(mse >= PAPERS_LEAST for mse in removed),
    )


def why_not(found, threshold):
    """[text, ...] the questions that fail, and by what; [] if none does."""
    fails = []
    if found["sufficient"]["high"] >= threshold:
        fails.append(f"not sufficient: the loss is {found['sufficient']['mse']:.4f}")
    for row in found["complete"]["alone"]:
        if row["mse"] >= threshold:
            fails.append("not complete: L{layer}H{head} costs {mse:.2f}".format(**row))
    together = found["complete"]["together"]["mse"]
    if together >= threshold:
        fails.append(f"not complete: all heads without a path together cost {together:.2f}")
    if lost := found["complete"]["rest"]["destroys"]:
        what = f"tokens without a path, held as it says, cost {' '.join(lost)}"
        fails.append(f"not complete: in all heads, {what}")
    sources = {(row["layer"], row["head"], row["source"]) for row in found["paths"]}
    for row in found["complete"]["left_out"]:
        beside = (row["layer"], row["head"], row["source"]) in sources
        if row["destroys"] or (beside and row["mse"] >= threshold):
            name = name_of(row)
            fails.append(f"not complete: {name}, left out, costs {row['mse']:.2f}")
    for row in found["paths"]:
        name = name_of(row)
        if row["more"]["low"] <= 0:
            by = f"{row['carried']['mse']:.2f} by its targets, {row['others']['mse']:.2f} by others"
            fails.append(f"not carried: {name}: {by}")
        if row["everywhere"]["low"] <= 0:
            fails.append(f"not needed: {name}")
    return fails


# ---- all of it


def check(flags):
    """UserError for a run of which no circuit can be found."""
    if flags.N < 2:
        raise UserError("the run was trained with --N 1: one chain leaves nothing to look for")
    if flags.circuit:
        raise UserError("the run was trained with --circuit: its attention is known")
    if len(flags.target_symbols) < flags.problem.symbols - 1:
        typed = "--targets" if flags.targets else "--no-ic"
        raise UserError(f"the run was trained with {typed}: choose one that predicts all symbols")


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, sequences=4096, seed=0):
    """The circuit of a model and its certificate: the dict that main writes into circuit.json.

    model: anything on the CPU, ready to evaluate, that can be called like model.Transformer:
    model(x, patterns={(layer, head): (T, T) or (B, T, T)}, return_patterns=False), with x (B, T,
    inputs), returns predictions (B, N, symbols*K) of x_1, x_2, ... at the last N tokens; the heads
    named in `patterns`, numbers from 0, attend so instead of as they would. With return_patterns it
    returns (predictions, [attention after softmax (B, heads, T, T) of each layer]).
    flags: of a run, as config.load gives them, or train.parse_flags(["--D", "2"]).
    threshold: the highest MSE of a sufficient circuit, and what heads without a path may cost;
    sequences: fresh ones for the certificate; seed: of what is drawn. UserError for what cannot
    be."""
    check(flags)
    flags, task, began = flags.replace(device="cpu"), flags.problem, time.monotonic()
    report = dict(certified=False, verdict="", threshold=threshold, sequences=sequences, uses=[])

    def held(split, n, means=None):
        return PatchedModel(model, flags, config.sequences(flags, held_out(split, n)), means)

    def say(text):
        print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)

    # what its heads do in the mean; nothing to find in a model that has not learned enough
    own = config.sequences(flags, held_out("means", 512))
    check_model(model, flags, own.inputs[:2])
    means = PatchedModel(model, flags, own).means
    free = held("search", 128, means)
    loss, learned = free.intact.mean().item(), free.intact < task.lost
    if loss >= threshold or not learned.any():
        return report | dict(verdict=f"not searched: the model itself has a loss of {loss:.3f}")

    # the paths that it would miss, and what its other heads may do
    costs = candidates(held("means", 64, means))
    simple, prices = simple_heads(free, costs, threshold)
    for path, cost in sorted(costs.items()):
        report["uses"].append(fields_of(path, task) | dict(cost=cost.tolist()))
    say(f"{len(costs)} paths may belong to the circuit")

    # the fewest that suffice; fresh sequences may say a little more than those of the search
    limit, found, report["searches"] = 0.9 * threshold + 0.1 * loss, [], {}
    results = search(free, FILLS, costs, simple, prices, limit, threshold)
    for number, (circuit, mse) in enumerate(results):
        count, fill = len(paths_of(circuit)), FILLS[number]
        report["searches"][fill] = f"{count} paths, loss {mse:.4f}"
        say(f"rows without a path {fill}: {report['searches'][fill]}")
        found.append((count, number, mse, circuit))
    if not found:
        names = symbol_names(flow(costs, task, free.batch.positions[:8])) or ["nothing"]
        what = f"the flow along all paths reaches {' '.join(names)}"
        return report | dict(verdict=f"no circuit: {what}")

    # the first to which nothing can be objected, those with the fewest paths first
    sufficient = sorted((one for one in found if one[2] < limit), key=lambda one: one[:2])
    tried = sufficient or [min(found, key=lambda one: one[2])]
    fresh = config.sequences(flags, held_out("certificate", sequences))
    batches = zip(*(tensor.split(512) for tensor in fresh), strict=True)
    parts = [PatchedModel(model, flags, type(fresh)(*batch), means) for batch in batches]
    intact, certificates = torch.cat([part.free for part in parts]), []
    for _, number, _, circuit in tried:
        fill, generator = FILLS[number], torch.Generator().manual_seed(seed)
        errors = torch.cat([part.errors(circuit, fill) for part in parts])
        measured = certify(parts[0], (intact, errors), circuit, costs, fill, generator)
        fails = why_not(measured, threshold)
        say(f"rows without a path {fill}: {'; '.join(fails) or 'certified'}")
        certificates.append((len(fails), number, circuit, fails, measured))
        if not fails:
            break
    _, number, circuit, fails, measured = min(certificates, key=lambda one: one[0])
    report |= dict(certified=not fails, verdict="; ".join(fails) or "certified")
    return report | summary(circuit, FILLS[number]) | measured


def summary(circuit, fill):
    """What a circuit is, by head, a dict."""
    heads = []
    for (layer, head), own in sorted(circuit.items()):
        own = own if isinstance(own, str) else "paths"
        heads.append(dict(layer=layer, head=head, mechanism=own))
    literal = all(row["mechanism"] != "position" for row in heads)
    layers = len({path.layer for path in paths_of(circuit)})
    return dict(fill=fill, literal=literal, layers_with_paths=layers, heads=heads)


# ---- the command line


def print_certificate(report):
    """A line for each measurement, then what it comes to."""
    if "paths" in report:
        measured = "{mse:7.4f} [{low:.4f}, {high:.4f}]"
        print(f"the model as it is     {measured.format(**report['intact'])}")
        print(f"held to the circuit    {measured.format(**report['sufficient'])}")
        together = report["complete"]["together"]
        print(f"heads without a path   {measured.format(**together)}  more, held in the free model")
        titles = "attention   by values of   without it: in this"
        print(f"\n{'the free model loses ...':37s}{titles}")
        print(f"{'':46s}targets  others     head, in all heads")
    for row in report.get("paths", []):
        numbers = [row[key]["mse"] for key in ("carried", "others", "alone", "everywhere")]
        cells = "".join(f"{number:9.3f}" for number in numbers)
        print(f"{name_of(row):36s}{row['attention']:9.3f}{cells}")
    print("---")
    for key, value in report.items():
        if not isinstance(value, (list, dict)):
            print(f"{key}: {value}")


def rounded(value):
    """Any part of a report with five digits of its numbers: no sample is large enough for more."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main():
    with program("ablate.py"):
        p = command_line("ablate.py", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        text = "highest MSE of a sufficient circuit (default: 0.05)"
        p.add_argument("--threshold", type=float, default=0.05, help=text)
        text = "fresh sequences for the certificate (default: 4096)"
        p.add_argument("--sequences", type=int, default=4096, help=text)
        args = p.parse_args()
        model, flags = config.load(args.run)
        with config.alone_in(args.run):
            report = rounded(find_circuit(model, flags, args.threshold, args.sequences))
            config.write_text(args.run / "circuit.json", json.dumps(report, indent=1) + "\n")
        print_certificate(report)
        print(f"circuit: {args.run / 'circuit.json'}")


if __name__ == "__main__":
    main()
