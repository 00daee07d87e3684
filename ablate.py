"""Find the circuit of a trained transformer by machine, and certify it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0     # prints the table, writes circuit.json and ablation.csv into the run

A path is (layer, head, from role, to role): "in layer 7, q attends to 1b"; a role may also attend to the token before it,
as first layers do. A head's mechanism is identity, uniform, zero, mean or a list of paths; a circuit gives every head one.
The search is the paper's, with one-hot maps. Where it fails, a second one lets a token attend as heads do in the mean: over
all sequences (the mechanism mean: its position alone decides) or, along a path, over those in which the pair that it looks
for stands at the same place. Layers and heads are counted from 1 in all that is printed or written.
"""
import argparse
import csv
import itertools
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch

from data import attend, causal_depth, roles, starting_information, unmasked_depth, validation_index
from train import load, partial_losses, precision, sequences, write_file


RULES = ["zero", "uniform", "identity", "mean"]  # what a useful head's tokens without a path do; zero is the paper's
SIMPLE = dict(zero=["identity", "uniform"], mean=["mean"])  # the rules to search with, and what useless heads become
MOST_PATHS = 20  # of which all subsets are looked through
FAINT = 0.05  # what moves less of the mean attention is no candidate for a path

# ---- measuring

def target_names(D):
    """What a role may attend to: the roles of its own chain and the token before it, whatever that is."""
    return [*roles(D), "previous token"]


def targets_of(positions):
    """positions (B, N, roles) -> (B, N, roles, targets) the token where each role finds each of target_names."""
    chain = positions[:, :, None].expand(-1, -1, positions.shape[-1], -1)
    return torch.cat([chain, (positions - 1).clamp(min=0)[..., None]], -1)  # the first token has only itself


def places(positions):
    """positions (B, N, roles) -> (B, N, D+1) the place of each step of a chain within its block of N: of q, of pair 1, ..."""
    B, N, R = positions.shape
    blocks = 2 * N * torch.arange(R // 2, -1, -1)  # where they begin; q's is the last
    return torch.cat([positions[:, :, :1], positions[:, :, 1::2]], -1).sub(blocks) // torch.tensor([1] + [2] * (R // 2))


def read_paths(patterns, positions):
    """(B, T, T) attention -> (B, N, roles, targets): how much each role attends to each of its targets."""
    rows = positions[..., None].expand(-1, -1, -1, patterns.shape[-1])
    return patterns[:, None].expand(-1, positions.shape[1], -1, -1).gather(2, rows).gather(3, targets_of(positions))


class Mean(NamedTuple):
    """What a head does in the mean over sequences."""
    attention: torch.Tensor  # (roles, targets) how much each role attends to each of its targets
    alone: torch.Tensor      # (T, T) where a token attends by its position alone, but for the other token of its pair
    given: torch.Tensor      # (D+1, N, T, T) what must be added if this step of its chain stands at this place; for its
    #                          own step, the attention to the other token of its pair


def write_pattern(mechanism, positions, causal, rest="zero", mean=None):
    """The attention pattern of a mechanism, (T, T) or (B, T, T). A path is one, and `rest` says what tokens without a
    path do: attend to nothing (zero, as the paper), to themselves (identity), or to all (uniform). With rest="mean" a
    token with a path attends as in the mean over sequences where its target stands where it does; without, over all."""
    B, N, R = positions.shape
    identity, uniform = torch.eye(N * R), torch.ones(N * R, N * R)
    uniform = uniform.tril() if causal else uniform
    whole = dict(zero=torch.zeros(N * R, N * R), identity=identity, uniform=uniform / uniform.sum(-1, keepdim=True),
                 mean=mean and mean.alone / mean.alone.sum(-1, keepdim=True).clamp(min=1e-9))
    if isinstance(mechanism, str):
        return whole[mechanism]
    batch = torch.arange(B)[:, None]
    if rest == "mean":
        pattern, place = mean.alone.repeat(B, 1, 1), places(positions)
        for source, target in (path for path in mechanism if path[1] < R):  # the token before is a matter of position
            step = (target + 1) // 2
            pattern[batch, positions[:, :, source]] += mean.given[step, place[:, :, step], positions[:, :, source]]
        pattern = pattern.clamp(min=0)
        return pattern / pattern.sum(-1, keepdim=True).clamp(min=1e-9)
    pattern, targets = torch.zeros(B, N * R, N * R), targets_of(positions)
    for source, target in mechanism:
        pattern[batch, positions[:, :, source], targets[:, :, source, target]] = 1
    leads = pattern.sum(-1, keepdim=True)
    return torch.where(leads > 0, pattern / leads.clamp(min=1), whole[rest])


@torch.no_grad()
def measure(model, config, batch, circuit, rest="zero", means={}):
    """(B, symbols) squared error of each sequence on each symbol, with the heads in `circuit` replaced by their
    mechanisms and all others computing their patterns from what they then find."""
    errors = []
    for inputs, targets, positions in zip(*(tensor.split(128) for tensor in batch)):
        patterns = {head: write_pattern(mechanism, positions, config["causal"], rest, means.get(head))
                    for head, mechanism in circuit.items()}
        with precision(config):
            predictions = model(inputs, patterns=patterns)
        errors.append(partial_losses(predictions, targets, config["K"]))
    return torch.cat(errors)


@torch.no_grad()
def mean_attention(model, config, batch):
    """{(layer, head): Mean} over the sequences of the batch and their chains."""
    with precision(config):
        patterns = model(batch.inputs, return_patterns=True)[1]
    B, N, R = batch.positions.shape
    D, T = R // 2, N * R
    place = torch.empty(B, T, D + 1, dtype=torch.long)  # of each step of a token's chain
    place[torch.arange(B)[:, None, None], batch.positions] = places(batch.positions)[:, :, None]
    stands = torch.nn.functional.one_hot(place, N).float()                                      # (B, T, D+1, N)
    times = torch.einsum("btks->kst", stands)[..., None]
    step = torch.cat([torch.arange(D, 0, -1).repeat_interleave(2 * N), torch.zeros(N, dtype=torch.long)])  # (T,)
    own = torch.arange(D + 1)[:, None, None, None] == step[:, None]
    token = torch.arange(2 * N * D)
    other = token ^ 1  # of its pair
    means = {}
    for layer, heads in enumerate(patterns):
        for head, pattern in enumerate(heads.float().clone().unbind(1)):
            attention, in_pair = read_paths(pattern, batch.positions).mean((0, 1)), torch.zeros(T, T)
            in_pair[token, other] = pattern[:, token, other].mean(0)
            pattern[:, token, other] = 0
            alone = pattern.mean(0)
            given = torch.einsum("btu,btks->kstu", pattern, stands) / times.clamp(min=1) - alone
            means[layer, head] = Mean(attention, alone, torch.where(own, in_pair, given * (times > 0)))
    return means


# ---- searching

def useless_heads(loss, limit, order, simple):
    """{head: the simple mechanism that costs least} of the heads that are not needed; one is replaced after the other in
    the given order, as long as the loss stays below the limit. All other heads stay alive."""
    circuit = {}
    for head in order:
        cost = {mechanism: loss(circuit | {head: mechanism}) for mechanism in simple}
        cheapest = min(cost, key=cost.get)
        if cost[cheapest] < limit:
            circuit[head] = cheapest
    return circuit


def without(circuit, head, path):
    return circuit | {head: [other for other in circuit[head] if other != path]}


def alive_above(circuit, head):
    """The circuit with the useful heads of the layers above alive: they must find their targets by themselves."""
    return {at: mechanism for at, mechanism in circuit.items() if at[0] <= head[0] or isinstance(mechanism, str)}


def candidates(mean, rest):
    """The paths that a head may turn out to have, the weakest first: from each role to the target that it attends to most
    (a one-hot map), or with rest="mean" to every step whose place moves its attention, there to the role that gets most."""
    attention, R = mean.attention.clone().fill_diagonal_(0), len(mean.attention)  # to stay where one is leads nowhere
    if rest != "mean":
        attention[2::2, -1] = 0  # before kb stands ka, named so already
        strength, target = attention.max(-1)
        return [(source, target[source].item()) for source in strength.argsort().tolist()]
    moved, N = mean.given.clamp(min=0).sum(-1).mean(1), mean.given.shape[1]                 # (D+1, T)
    found = {}
    for step, source in itertools.product(range(len(moved)), range(R)):
        block = 2 * N * (R // 2 - (source + 1) // 2)  # where the tokens of this role begin
        tokens = slice(block + 1 - source % 2, block + 2 * N, 2) if source else slice(block, block + N)
        strength = moved[step, tokens].mean().item()
        roles_there = [2 * step - 1, 2 * step] if step else [0]
        if strength > FAINT:
            found[source, max(roles_there, key=lambda role: attention[source, role])] = strength
    return sorted(found, key=found.get)


def find_circuit(loss, means, threshold, order, rest="zero"):
    """(circuit, its loss), or (None, why not).

    loss: circuit -> mean squared error with these heads replaced, their tokens without a path doing as `rest` says.
    First the heads that can be simple. Then, from the first layer to the last, so that the layers above still need what a
    path enables, each head is replaced by its candidates and loses path after path, the weakest first, as long as the
    loss stays below a limit. The limit rises to the threshold as more heads are replaced: a quarter of the way is for the
    useless heads, the same share for each of the others. Last, what room is left goes to paths that can be spared
    both with all heads held and with the useful ones of the layers above alive."""
    baseline = loss({})
    if baseline >= threshold:
        return None, f"the model itself has a loss of {baseline:.3f}, not below {threshold:g}"
    circuit = useless_heads(loss, baseline + (threshold - baseline) / 4, order, SIMPLE[rest])
    useful = sorted(means.keys() - circuit.keys())
    for head, share in zip(useful, torch.linspace(0.25, 1, len(useful) + 1)[1:].tolist()):
        paths = candidates(means[head], rest)
        circuit[head] = sorted(paths)
        current = loss(circuit)
        for path in paths:
            smaller = without(circuit, head, path)
            cost = loss(smaller)
            if cost < max(baseline + share * (threshold - baseline), current):
                circuit, current = smaller, cost
        circuit[head] = circuit[head] or rest
        if current >= threshold:
            return None, (f"layer {head[0] + 1} head {head[1] + 1} cannot be replaced: its simplest map leaves a loss of "
                          f"{current:.3f}, not below {threshold:g}")
    for head, path in sorted(paths_of(circuit), key=lambda path: means[path[0]].attention[path[1]].item()):
        smaller = without(circuit, head, path)
        smaller[head] = smaller[head] or rest
        if max(loss(smaller), loss(alive_above(smaller, head))) < threshold:
            circuit = smaller
    return circuit, loss(circuit)


def path_name(path, names):
    (layer, head), (source, target) = path
    return f"layer {layer + 1} head {head + 1}, {names[source]} -> {names[target]}"


def paths_of(circuit):
    """[(head, (from, to)), ...] in the order of the layers."""
    return [(head, path) for head in sorted(circuit) if not isinstance(circuit[head], str) for path in circuit[head]]


def minimal_subsets(sufficient, everything):
    """All minimal subsets of a list that suffice, if whatever contains a sufficient set suffices too.
    sufficient: frozenset -> bool."""
    minimal, insufficient = [], []
    for size in range(len(everything), -1, -1):  # from the largest, so that what is found insufficient is maximal
        for subset in map(frozenset, itertools.combinations(everything, size)):
            if any(subset >= other for other in minimal) or any(subset <= other for other in insufficient):
                continue
            if not sufficient(subset):
                insufficient.append(subset)
                continue
            for item in everything:
                if item in subset and sufficient(subset - {item}):
                    subset -= {item}
            minimal.append(subset)
    return minimal


def backups(loss, circuit, means, threshold):
    """Which paths stand in for each other, a dict: all minimal sets that suffice when every head attends along these
    paths and otherwise as the position says (loss: circuit -> loss with rest="mean"). They are looked for among the paths
    of the circuit and all others that get more than half of the attention."""
    last = len(means[0, 0].attention[0]) - 1  # the token before, known by position
    names = target_names(last // 2)
    paths = sorted({path for path in paths_of(circuit) if path[1][1] != last}
                   | {(head, path) for head, mean in means.items() for path in candidates(mean, "mean")
                      if mean.attention[path] > 0.5})
    if len(paths) > MOST_PATHS:
        return dict(minimal_sets=f"not looked for: {len(paths)} paths have too many subsets")

    def suffices(subset):
        return loss({head: [path for at, path in paths if at == head and (at, path) in subset] or "mean"
                     for head in means}) < threshold

    found = minimal_subsets(suffices, paths)
    uses = {path: sum(path in subset for subset in found) for path in paths}
    backed_up = [path_name(path, names) for path in paths if 0 < uses[path] < len(found)]
    return dict(minimal_sets=len(found), paths_in_every_set=sum(count == len(found) > 0 for count in uses.values()),
                paths_with_a_backup=len(backed_up), paths_in_no_set=sum(not count for count in uses.values()),
                backed_up=backed_up,
                sets=[[path_name(path, names) for path in paths if path in subset] for subset in found])


# ---- certifying

def symbols_reached(paths, D, layers):
    """(D,) bool, which x_1..x_D the query holds at the end if information flows along these paths alone (Section 5)."""
    known = starting_information(D)
    for layer in range(layers):
        allowed = torch.zeros(2 * D + 1, 2 * D + 1, dtype=torch.bool)
        for (at, _), (source, target) in paths:
            if at == layer and target <= 2 * D:  # the token before is a stranger's
                allowed[source, target] = True
        known = attend(known, allowed)
    return known[0, 3::2]


def lost(N):
    """The loss from which on a symbol counts as lost: half way to the plateau of a model that averages N candidates."""
    return 0.5 * (1 - 1 / N)


def interval(errors, generator, resamples=1000):
    """The mean of errors (B, symbols) and its 95% bootstrap interval over sequences: dict of mse, low, high, and the
    partial losses."""
    each = errors.mean(1)
    means = torch.stack([each[torch.randint(len(each), each.shape, generator=generator)].mean()
                         for _ in range(resamples)])
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return dict(mse=each.mean().item(), low=low, high=high, partial=errors.mean(0).tolist())


def certify(model, config, circuit, batch, seed, rest="zero", means={}):
    """The rows of the ablation table, each a dict: the model as it is; all heads replaced, with each rule for the rows
    without a path, first the one that the circuit was found with; and, with that one, every path removed alone, first
    with all other heads replaced (the paper's test), then with the useful heads of the layers above alive, so that they
    must find their targets without it (on a quarter of the sequences, as the other rules: these effects are large), which
    is held against the same with no path removed, sequence by sequence."""
    generator, names, paths = torch.Generator().manual_seed(seed), target_names(config["D"]), paths_of(circuit)

    def symbols(flags):
        return [f"x_{k}" for k, flag in enumerate(flags, 1) if flag]

    fewer = type(batch)(*(tensor[:max(2, len(tensor) // 4)] for tensor in batch))

    def row(what, circuit, rest=rest, batch=batch, control=None, **more):
        errors = measure(model, config, batch, circuit, rest, means)
        row = dict(what=what, sequences=len(batch.inputs), **more, **interval(errors, generator))
        if control is not None:
            rise = interval(errors - control, torch.Generator().manual_seed(seed))
            row |= dict(control=control.mean().item(), rise=rise["mse"], rise_low=rise["low"])
        print(f"{what:48s} {row['mse']:7.4f} [{row['low']:.4f}, {row['high']:.4f}]  "
              + " ".join(f"{loss:6.3f}" for loss in row["partial"]), flush=True)
        return row

    print(f"{'':48s}     MSE [95% interval]     " + " ".join(f"{name:>6s}" for name in symbols([True] * config["D"])))
    rows = [row("the model as it is", {})]
    rows += [row(f"all heads replaced, rows without a path: {rule}", circuit, rule, batch if rule == rest else fewer)
             for rule in [rest, *(rule for rule in RULES if rule != rest and (means or rule != "mean"))]]
    controls = {head[0]: measure(model, config, fewer, alive_above(circuit, head), rest, means) for head, _ in paths}
    for head, (source, target) in paths:
        path = dict(layer=head[0] + 1, head=head[1] + 1, source=names[source], target=names[target])
        smaller = without(circuit, head, (source, target))
        rows.append(row(f"without {path_name((head, (source, target)), names)}", smaller, **path))
        reached = symbols_reached([p for p in paths if p != (head, (source, target))], config["D"], config["layers"])
        rows.append(row("    and the layers above alive", alive_above(smaller, head), batch=fewer,
                        control=controls[head[0]], **path, predicted=symbols(~reached)))
        rows[-1]["destroyed"] = symbols(loss > lost(config["N"]) for loss in rows[-1]["partial"])
    return rows


def verdict(config, circuit, rows, threshold):
    """What the certificate says, a dict: is the circuit sufficient, is every path necessary, how small is it, and does
    each removal destroy what the information flow predicts."""
    replaced, removals, D = rows[1], [row for row in rows if "layer" in row], config["D"]
    pairs = list(zip(removals[0::2], removals[1::2]))
    in_chain = [(head, path) for head, path in paths_of(circuit) if target_names(D)[path[1]] != "previous token"]
    useful = {head[0] for head, _ in in_chain}
    return dict(
        sufficient=replaced["high"] < threshold,
        all_necessary=all(frozen["low"] > replaced["mse"] or alive["rise_low"] > 0 for frozen, alive in pairs) and bool(pairs),
        necessary_in_the_papers_test=sum(frozen["low"] > replaced["mse"] for frozen, _ in pairs),
        necessary_with_layers_above_alive=sum(alive["rise_low"] > 0 for _, alive in pairs),
        paths=len(in_chain), least_paths=2 * D, rows_on_the_previous_token=len(pairs) - len(in_chain),
        layers_with_paths=len(useful), least_layers=(causal_depth if config["causal"] else unmasked_depth)(D),
        first_useful_layer_is_previous_token=bool(useful) and all(
            target + 1 == source and source % 2 == 0 for (layer, _), (source, target) in in_chain if layer == min(useful)),
        predictions_right=sum(alive["predicted"] == alive["destroyed"] for _, alive in pairs))


# ---- the command line

def write_table(path, rows):
    """ablation.csv: one row per measurement, partial losses in columns of their own."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        symbols = [f"x_{k}" for k in range(1, len(rows[0]["partial"]) + 1)]
        table.writerow(["what", "layer", "head", "source", "target", "sequences", "mse", "low", "high", *symbols, "predicted",
                        "destroyed", "control", "rise", "rise_low"])
        for row in rows:
            table.writerow([row["what"].strip(), *(row.get(key, "") for key in ("layer", "head", "source", "target")),
                            row["sequences"], row["mse"], row["low"], row["high"], *row["partial"],
                            *(" ".join(row.get(key, [])) for key in ("predicted", "destroyed")),
                            *(row.get(key, "") for key in ("control", "rise", "rise_low"))])


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"ablate.py: {message}\n")
    p.add_argument("run", type=Path, help="run directory of train.py")
    p.add_argument("--threshold", type=float, default=0.05, help="highest MSE of a sufficient circuit (default: 0.05)")
    p.add_argument("--sequences", type=int, default=4096, help="fresh sequences for the certificate (default: 4096)")
    p.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    flags = p.parse_args()
    try:
        model, config = load(flags.run)
    except ValueError as error:
        p.error(error)
    if config.get("circuit"):
        p.error(f"{flags.run} was trained with --circuit: its attention is known, there is nothing to find")
    if not flags.threshold > 0 or flags.sequences < 2 or not config["ic"]:
        p.error("--threshold must be above 0, --sequences at least 2, and the run one that was trained with IC")

    began, search = time.time(), sequences(config, validation_index(128, first=2 ** 20))
    means = mean_attention(model, config, sequences(config, validation_index(1024, first=2 ** 20 + 128)))
    orders = {"first layer first": sorted(means), "last layer first": sorted(means, reverse=True),
              "least attention first": sorted(means, key=lambda head: means[head].attention.max().item())}
    measured = {}  # the orders ask for much the same circuits

    def loss(circuit, rest):
        key = json.dumps([rest, [[head, circuit[head]] for head in sorted(circuit)]])
        if key not in measured:
            measured[key] = measure(model, config, search, circuit, rest, means).mean().item()
        return measured[key]

    found, report = [], dict(threshold=flags.threshold, sequences=flags.sequences, orders={})
    for rest in SIMPLE:
        for name, order in orders.items():
            circuit, result = find_circuit(lambda circuit: loss(circuit, rest), means, flags.threshold, order, rest)
            name = f"{name}, rows without a path: {rest}"
            report["orders"][name] = (f"no circuit: {result}" if circuit is None else
                                      f"{len(paths_of(circuit))} paths, loss {result:.4f} in the search")
            print(f"{time.time() - began:5.1f} s  {name}: {report['orders'][name]}", flush=True)
            found += [circuit] if circuit else []
        if found:
            break  # the simplest rule that will do
    report["rows_without_a_path"] = rest
    if found:
        best, names = min(found, key=lambda circuit: len(paths_of(circuit))), target_names(config["D"])
        fresh = sequences(config, validation_index(flags.sequences, first=2 ** 21))
        rows = certify(model, config, best, fresh, flags.seed, rest, means)
        report |= verdict(config, best, rows, flags.threshold)
        report["orders_that_agree"] = sum(paths_of(circuit) == paths_of(best) for circuit in found)
        report |= backups(lambda circuit: loss(circuit, "mean"), best, means, flags.threshold)
        report["heads"] = [dict(layer=layer + 1, head=head + 1, mechanism=mechanism if isinstance(mechanism, str) else
                                [dict(source=names[source], target=names[target],
                                      attention=means[layer, head].attention[source, target].item())
                                 for source, target in mechanism])
                           for (layer, head), mechanism in sorted(best.items())]
        report["rows"] = rows
        write_file(flags.run / "ablation.csv", lambda path: write_table(path, rows))
    else:
        (flags.run / "ablation.csv").unlink(missing_ok=True)  # it belonged to another threshold
    write_file(flags.run / "circuit.json", lambda path: path.write_text(json.dumps(report, indent=1) + "\n"))
    print("---")
    for key, value in report.items():
        if not isinstance(value, (list, dict)):
            print(f"{key}: {value}")
    print(f"seconds: {time.time() - began:.1f}\ncircuit: {flags.run / 'circuit.json' if found else 'none'}")


if __name__ == "__main__":
    main()
