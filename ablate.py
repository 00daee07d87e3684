"""Find the circuit of a trained transformer by machine, and certify it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0     # prints the table, writes circuit.json and ablation.csv into the run

A path is (layer, head, from role, to role): "in layer 7, q attends to 1b"; a role may also attend to whatever token
stands before it, as first layers do. A head's mechanism is identity, uniform, zero, or
a list of paths; a circuit gives every head one. Layers and heads are counted from 1 in all that is printed or written.
"""
import argparse
import csv
import json
import time
from pathlib import Path

import torch

from data import attend, causal_depth, roles, starting_information, validation_index
from train import load, partial_losses, precision, sequences, write_file


RULES = ["zero", "uniform", "identity"]  # what a useful head's tokens without a path do; zero is the paper's

# ---- measuring

def targets_of(positions):
    """positions (B, N, roles) -> (B, N, roles, roles+1) where each role finds its possible targets: the roles of its own
    chain and, last, the token before it, whatever that is (the first token has only itself)."""
    chain = positions[:, :, None].expand(-1, -1, positions.shape[-1], -1)
    return torch.cat([chain, (positions - 1).clamp(min=0)[..., None]], -1)


def read_paths(patterns, positions):
    """(B, T, T) attention -> (B, N, roles, roles+1): how much each role attends to each of its targets."""
    rows = positions[..., None].expand(-1, -1, -1, patterns.shape[-1])
    return patterns[:, None].expand(-1, positions.shape[1], -1, -1).gather(2, rows).gather(3, targets_of(positions))


def write_pattern(mechanism, positions, causal, rest="zero"):
    """The attention pattern of a mechanism, (T, T) or (B, T, T): one where a path leads. `rest` says what the tokens
    without a path do: attend to nothing (zero, as the paper), to themselves (identity), or to all (uniform)."""
    B, N, R = positions.shape
    identity, uniform = torch.eye(N * R), torch.ones(N * R, N * R)
    uniform = uniform.tril() if causal else uniform
    whole = dict(zero=torch.zeros(N * R, N * R), identity=identity, uniform=uniform / uniform.sum(-1, keepdim=True))
    if isinstance(mechanism, str):
        return whole[mechanism]
    pattern, targets = torch.zeros(B, N * R, N * R), targets_of(positions)
    for source, target in mechanism:
        pattern[torch.arange(B)[:, None], positions[:, :, source], targets[:, :, source, target]] = 1
    leads = pattern.sum(-1, keepdim=True)
    return torch.where(leads > 0, pattern / leads.clamp(min=1), whole[rest])


@torch.no_grad()
def measure(model, config, batch, circuit, rest="zero"):
    """(B, symbols) squared error of each sequence on each symbol, with the heads in `circuit` replaced by their
    mechanisms and all others computing their patterns from what they then find."""
    errors = []
    for inputs, targets, positions in zip(*(tensor.split(256) for tensor in batch)):
        patterns = {head: write_pattern(mechanism, positions, config["causal"], rest)
                    for head, mechanism in circuit.items()}
        with precision(config):
            predictions = model(inputs, patterns=patterns)
        errors.append(partial_losses(predictions, targets, config["K"]))
    return torch.cat(errors)


@torch.no_grad()
def mean_attention(model, config, batch):
    """{(layer, head): (roles, roles+1)} how much each role attends to each of its targets, the mean over chains."""
    with precision(config):
        patterns = model(batch.inputs, return_patterns=True)[1]
    return {(layer, head): read_paths(pattern[:, head], batch.positions).mean((0, 1))
            for layer, pattern in enumerate(patterns) for head in range(pattern.shape[1])}


# ---- searching

def useless_heads(loss, limit, order):
    """{head: identity or uniform, whichever costs less} of the heads that are not needed; one is replaced after the
    other in the given order, as long as the loss stays below the limit. All other heads stay alive."""
    circuit = {}
    for head in order:
        cost = {mechanism: loss(circuit | {head: mechanism}) for mechanism in ("identity", "uniform")}
        cheapest = min(cost, key=cost.get)
        if cost[cheapest] < limit:
            circuit[head] = cheapest
    return circuit


def without(circuit, head, path):
    return circuit | {head: [other for other in circuit[head] if other != path]}


def find_circuit(loss, attention, threshold, order):
    """(circuit, its loss), or (None, why not).

    loss: circuit -> mean squared error with these heads replaced. attention: {head: (roles, roles+1) mean attention}.
    First the heads that can be identity or uniform. Then, from the first layer to the last, so that the layers above
    still need what a path enables, each head becomes a one-hot map on the target that each role attends to most, and
    loses path after path, the weakest first, as long as the loss stays below the threshold."""
    baseline = loss({})
    if baseline >= threshold:
        return None, f"the model itself has a loss of {baseline:.3f}, not below {threshold:g}"
    circuit = useless_heads(loss, (baseline + threshold) / 2, order)
    for head in sorted(attention.keys() - circuit.keys()):
        candidates = attention[head].clone().fill_diagonal_(-1)  # to stay where one is leads nowhere
        candidates[2::2, -1] = -1  # before kb stands ka, named so already
        strength, target = candidates.max(-1)
        circuit[head] = [(source, target[source].item()) for source in range(len(target))]
        current = loss(circuit)
        for source in strength.argsort().tolist():
            smaller = without(circuit, head, (source, target[source].item()))
            cost = loss(smaller)
            if cost < max(threshold, current):
                circuit, current = smaller, cost
        circuit[head] = circuit[head] or "zero"
        if current >= threshold:
            return None, (f"layer {head[0] + 1} head {head[1] + 1} cannot be replaced: its simplest one-hot map leaves a "
                          f"loss of {current:.3f}, not below {threshold:g}")
    return circuit, current


def target_names(D):
    return [*roles(D), "previous token"]


def paths_of(circuit):
    """[(head, (from, to)), ...] in the order of the layers."""
    return [(head, path) for head in sorted(circuit) if not isinstance(circuit[head], str) for path in circuit[head]]


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


def interval(errors, generator, resamples=1000):
    """The mean of errors (B, symbols) and its 95% bootstrap interval over sequences: dict of mse, low, high, and the
    partial losses."""
    each = errors.mean(1)
    means = torch.stack([each[torch.randint(len(each), each.shape, generator=generator)].mean()
                         for _ in range(resamples)])
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return dict(mse=each.mean().item(), low=low, high=high, partial=errors.mean(0).tolist())


def certify(model, config, circuit, batch, seed, rest="zero"):
    """The rows of the ablation table, each a dict: the model as it is; all heads replaced, with each rule for the rows
    without a path, first the one that the circuit was found with; and, with that one, every path removed alone, first
    with all other heads replaced (the paper's test), then with the useful heads of the layers above alive, so that they
    must find their targets without it (on a quarter of the sequences, as the other rules: these effects are large)."""
    generator, names, paths = torch.Generator().manual_seed(seed), target_names(config["D"]), paths_of(circuit)
    lost = 0.5 * (1 - 1 / config["N"])  # half way to the plateau of a model that averages the candidates

    def symbols(flags):
        return [f"x_{k}" for k, flag in enumerate(flags, 1) if flag]

    fewer = type(batch)(*(tensor[:max(2, len(tensor) // 4)] for tensor in batch))

    def row(what, circuit, rest=rest, batch=batch, **more):
        row = dict(what=what, sequences=len(batch.inputs), **more,
                   **interval(measure(model, config, batch, circuit, rest), generator))
        print(f"{what:48s} {row['mse']:7.4f} [{row['low']:.4f}, {row['high']:.4f}]  "
              + " ".join(f"{loss:6.3f}" for loss in row["partial"]), flush=True)
        return row

    print(f"{'':48s}     MSE [95% interval]     " + " ".join(f"{name:>6s}" for name in symbols([True] * config["D"])))
    rows = [row("the model as it is", {})]
    rows += [row(f"all heads replaced, rows without a path: {rule}", circuit, rule, batch if rule == rest else fewer)
             for rule in [rest, *(rule for rule in RULES if rule != rest)]]
    for head, (source, target) in paths:
        path = dict(layer=head[0] + 1, head=head[1] + 1, source=names[source], target=names[target])
        smaller = without(circuit, head, (source, target))
        alive = {at: mechanism for at, mechanism in smaller.items() if at[0] <= head[0] or isinstance(mechanism, str)}
        what = f"without layer {path['layer']} head {path['head']}, {path['source']} -> {path['target']}"
        rows.append(row(what, smaller, **path))
        reached = symbols_reached([p for p in paths if p != (head, (source, target))], config["D"], config["layers"])
        rows.append(row("    and the layers above alive", alive, batch=fewer, **path, predicted=symbols(~reached)))
        rows[-1]["destroyed"] = symbols(loss > lost for loss in rows[-1]["partial"])
    return rows


def verdict(config, circuit, rows, threshold):
    """What the certificate says, a dict: is the circuit sufficient, is every path necessary, how small is it, and does
    each removal destroy what the information flow predicts."""
    replaced, removals, D = rows[1], rows[4:], config["D"]
    pairs = list(zip(removals[0::2], removals[1::2]))
    in_chain = [(head, path) for head, path in paths_of(circuit) if path[1] <= 2 * D]
    useful = {head[0] for head, _ in in_chain}
    return dict(
        sufficient=replaced["high"] < threshold,
        all_necessary=all(max(frozen["low"], alive["low"]) > replaced["mse"] for frozen, alive in pairs),
        necessary_in_the_papers_test=sum(frozen["low"] > replaced["mse"] for frozen, _ in pairs),
        necessary_with_layers_above_alive=sum(alive["low"] > replaced["mse"] for _, alive in pairs),
        paths=len(in_chain), least_paths=2 * D, rows_on_the_previous_token=len(pairs) - len(in_chain),
        layers_with_paths=len(useful), least_layers=causal_depth(D),
        first_useful_layer_is_previous_token=all(target + 1 == source and source % 2 == 0
                                                 for (layer, _), (source, target) in in_chain if layer == min(useful)),
        predictions_right=sum(alive["predicted"] == alive["destroyed"] for _, alive in pairs))


# ---- the command line

def write_table(path, rows):
    """ablation.csv: one row per measurement, partial losses in columns of their own."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        symbols = [f"x_{k}" for k in range(1, len(rows[0]["partial"]) + 1)]
        table.writerow(["what", "layer", "head", "source", "target", "mse", "low", "high", *symbols, "predicted",
                        "destroyed"])
        for row in rows:
            table.writerow([row["what"].strip(), *(row.get(key, "") for key in ("layer", "head", "source", "target")),
                            row["mse"], row["low"], row["high"], *row["partial"],
                            *(" ".join(row.get(key, [])) for key in ("predicted", "destroyed"))])


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
    if not flags.threshold > 0 or flags.sequences < 2 or not config["ic"]:
        p.error("--threshold must be above 0, --sequences at least 2, and the run one that was trained with IC")

    began, search = time.time(), sequences(config, validation_index(128, first=2 ** 20))
    attention = mean_attention(model, config, search)
    orders = {"first layer first": sorted(attention), "last layer first": sorted(attention, reverse=True),
              "least attention first": sorted(attention, key=lambda head: attention[head].max().item())}
    measured = {}  # the orders ask for much the same circuits

    def loss(circuit, rest):
        key = json.dumps([rest, [[head, circuit[head]] for head in sorted(circuit)]])
        if key not in measured:
            measured[key] = measure(model, config, search, circuit, rest).mean().item()
        return measured[key]

    found, report = [], dict(threshold=flags.threshold, sequences=flags.sequences, orders={})
    for rest in RULES:
        for name, order in orders.items():
            circuit, result = find_circuit(lambda circuit: loss(circuit, rest), attention, flags.threshold, order)
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
        rows = certify(model, config, best, fresh, flags.seed, rest)
        report |= verdict(config, best, rows, flags.threshold)
        report["orders_that_agree"] = sum(paths_of(circuit) == paths_of(best) for circuit in found)
        report["heads"] = [dict(layer=layer + 1, head=head + 1, mechanism=mechanism if isinstance(mechanism, str) else
                                [dict(source=names[source], target=names[target],
                                      attention=attention[layer, head][source, target].item())
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
