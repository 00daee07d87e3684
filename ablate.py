"""Find the circuit of a trained transformer, and validate it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A circuit is a set of attention paths such as "L6H0: q -> 1b". Everything that a head reads outside
of them is ablated to its mean (parts/circuit.py), while attention is what the model itself
computes. So one loss tells both whether the paths carry the answer and whether they suffice to find
their targets. A circuit is validated if it is

    faithful     with all else ablated, the loss of every symbol stays below 0.05
    minimal      without any one of its paths it is not faithful, or the path is a stand-in: the
                 circuit is not faithful without it and one other path, which replaces it

The report also gives what decides nothing but helps to judge a circuit:

    necessary    how much the full model loses if only this path is ablated
    complete     how alike circuit and full model remain without the same two paths (Wang et al.,
                 2023)
    null         how many other sets of as many paths, drawn at random, are faithful too
    paper        the paper's own test: hard attention along the paths, nothing else in these heads,
                 uniform attention or the identity in all others; a removal costs 0.17 or more
    stability    how often the same paths are found from other sequences
    itself       the heads whose reading of the token itself the circuit needs

Losses are mean squared errors over sequences, with 95% intervals.
"""

import functools
import itertools
import json
import pathlib
import random

from parts import UserError, command_line, config, program
from parts.circuit import (
    PatchedModel,
    attention_on,
    by_head,
    check_model,
    frozen_heads,
    path_name,
    to_row,
)
from parts.search import attended, prune, reached
from parts.stats import studentised

import torch

from data import held_out


SIZES = 64, 256, 1024  # sequences: more only while it is not clear whether a loss is too high
MATTERS = 0.01  # a rise of a symbol's loss from which on a path counts as a candidate
REMOVAL = 0.17  # the lowest loss after the removal of a path in Appendix E


# ---- measuring


class Sample:
    """A model on held-out sequences, index (n,). A measurement uses the first of these sizes, and
    the next ones only while it is not clear on which side of the threshold a loss is."""

    def __init__(self, model, flags, reference, index, threshold, sizes=SIZES):
        def part(number):
            begin, end = [0, *sizes][number : number + 2]
            return PatchedModel(model, flags, config.sequences(flags, index[begin:end]), reference)

        self.flags, self.reference, self.sizes = flags, reference, sizes
        self.part, self.few = functools.cache(part), part(0)
        self.limit(threshold)

    def limit(self, threshold):
        """Let a circuit count as faithful below this threshold."""
        self.threshold, self.faithful = threshold, functools.cache(self.is_faithful)

    def measure(self, losses_of):
        """Return losses_of(patched), (sequences, symbols), on as many sequences as are needed."""
        losses = torch.empty(0, len(self.flags.target_names))
        for number, n in enumerate(self.sizes):
            losses = torch.cat([losses, losses_of(self.part(number))])
            mean, error = losses.mean(0), losses.std(0) / n**0.5
            low, high = mean - 3 * error, mean + 3 * error
            if (low > self.threshold).any() or (high < self.threshold).all():
                break
        return losses

    def circuit(self, paths):
        """Return the losses of a circuit."""
        return self.measure(lambda patched: patched.circuit(paths))

    def rises(self, paths, frozen=False):
        """Return by how much the losses of the full model rise if these paths are ablated."""
        return self.measure(lambda patched: patched.knock_out(paths, frozen) - patched.baseline)

    def is_faithful(self, paths):
        """Return whether all losses of a circuit are two standard errors below the threshold."""
        losses = self.circuit(paths)
        error = losses.std(0) / len(losses) ** 0.5
        return bool((losses.mean(0) + 2 * error < self.threshold).all())

    def intervals(self, losses):
        """Return {symbol: [mean, low, high]}, 95% intervals, of losses (sequences, symbols)."""
        generator, rows = torch.Generator().manual_seed(0), {}
        for name, column in zip(self.flags.target_names, losses.unbind(1), strict=True):
            rows[name] = [column.mean().item(), *studentised(column, generator)]
        return rows


def all_below(rows, threshold):
    """Return whether the upper end of every symbol's interval is below the threshold."""
    return all(high < threshold for _, _, high in rows.values())


# ---- what is said of each path, and of all together


def rows_on_paths(sample, fresh, paths):
    """Return a row for each path of a circuit: its attention, what the full model loses without it
    (necessary), what the circuit loses without it (minimal; on fresh sequences if that is close)
    and, if the circuit can do without it, its stand-in: another path that can go as well, but not
    both."""
    rows, task, reference = [], sample.flags.problem, sample.reference
    for path in config.progress("paths", sorted(paths)):
        pattern, fewer = reference.attention()[path[:2]], paths - {path}
        attention = attention_on(pattern, path, task, reference.batch.positions).mean().item()
        necessary = sample.intervals(sample.rises([path]))
        minimal = sample.intervals(sample.circuit(fewer))
        if all_below(minimal, fresh.threshold):
            minimal = fresh.intervals(fresh.circuit(fewer))
        row = dict(attention=attention, necessary=necessary, minimal=minimal, stand_in=None)
        rows.append(to_row(path, task) | row)
        for other in sorted(fewer) if all_below(minimal, fresh.threshold) else ():
            if sample.faithful(paths - {other}) and not sample.faithful(fewer - {other}):
                rows[-1]["stand_in"] = path_name(other, task)
    return rows


def completeness(sample, paths):
    """Return how much the losses of circuit and full model differ without the same two paths, over
    all pairs (IOI completeness)."""
    differences, few = {}, sample.few
    for pair in config.progress("pairs of paths", [*itertools.combinations(sorted(paths), 2)]):
        circuit, full = few.circuit(paths - {*pair}).mean(), few.knock_out(pair).mean()
        differences[pair] = abs(circuit - full).item()
    mean = sum(differences.values()) / max(1, len(differences))
    return dict(pairs=len(differences), mean=mean, largest=max(differences.values(), default=0))


def papers_test(sample, paths):
    """Return steps 5 and 6 of Appendix E word for word: heads with paths attend hard along them and
    to nothing else, each other head is uniform or the identity, whichever costs the full model
    less; then every later path is removed, and the first useful head is made uniform. passed: below
    the threshold at first, and at least 0.17 after every removal."""
    few, task, first = sample.few, sample.flags.problem, min(paths)
    allowed = torch.ones(task.T, task.T).tril(0 if sample.flags.causal else task.T)
    patterns = allowed / allowed.sum(-1, keepdim=True), torch.eye(task.T)
    simple = [lambda _, values, fixed=fixed: fixed.to(values) @ values for fixed in patterns]

    heads = dict.fromkeys(by_head(paths), lambda _, values: 0 * values)  # if no path is left
    for head in config.progress("heads without a path", [*{*few.heads} - heads.keys()]):
        heads[head] = min(simple, key=lambda write: few.losses({head: write}).mean())

    def loss(paths, changed=None):
        useful = frozen_heads(paths, task, few.batch.positions)
        return few.losses(heads | useful | (changed or {})).mean().item()

    held = loss(paths)
    removed = sorted(loss(paths - {path}) for path in paths if path.layer > first.layer)
    return dict(
        held=held,
        first_uniform=loss(paths, {first[:2]: simple[0]}),
        removed=removed,
        passed=held < sample.threshold and all(mse >= REMOVAL for mse in removed),
    )


def stability(others, paths, costs, protected):
    """Return how many other samples give the same paths, and how many paths all of them give."""
    samples = config.progress("other samples of sequences", others)
    circuits = [prune(costs, protected, other.faithful) for other in samples]
    always = paths.intersection(*circuits)
    return dict(samples=len(circuits), same=circuits.count(paths), always=len(always))


def null(sample, paths, candidates, seed):
    """Return how many other sets of as many paths, drawn from the candidates, are faithful."""
    draws, losses = random.Random(seed), []
    subsets = {frozenset(draws.sample(candidates, len(paths))) for _ in range(100)} - {paths}
    for subset in config.progress("random sets of paths", sorted(subsets, key=sorted)):
        losses.append(sample.few.circuit(subset).mean(0).max().item())
    return dict(subsets=len(losses), faithful=sum(loss < sample.threshold for loss in losses))


def needs_itself(sample, paths):
    """Return the names of heads in which the circuit needs what a token reads of itself."""
    heads = config.progress("heads that read their own token", sample.few.heads)
    losses = {head: sample.few.circuit(paths, [head]).mean(0).max() for head in heads}
    return ["L{}H{}".format(*head) for head, loss in losses.items() if loss >= sample.threshold]


# ---- all of it


def check(flags, threshold, sequences):
    """Raise UserError for a run in which no circuit can be found."""
    if not 0 < threshold < 1:
        raise UserError(f"--threshold must be above 0 and below 1, not {threshold}")
    if not SIZES[2] <= sequences <= 2**20:
        raise UserError(f"--sequences must be from {SIZES[2]} to {2**20}, not {sequences}")
    if flags.N < 2:
        raise UserError("the run has --N 1, and one chain leaves nothing to look for")
    if flags.circuit:
        raise UserError("the run was trained with --circuit, so its attention is known")
    if flags.targets or not flags.ic:
        raise UserError("the run predicts some symbols only: choose one that predicts all of them")


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, sequences=4096, seed=0):
    """Find the circuit of a model, validate it, and return the report, the dict that main writes
    into circuit.json.

    model: anything on the CPU that can be called like model.Transformer: model(x, heads={(layer,
    head): f}, return_patterns=False) returns predictions (B, N, symbols*K) of x_1, x_2, ... at the
    last N tokens; f(pattern (B, T, T), values (B, T, size)) -> (B, T, size) is what the head writes
    instead of pattern @ values. With return_patterns it returns (predictions, [pattern (B, heads,
    T, T) of each layer]). flags: of a run, as config.load gives them, or train.parse_flags([...]).
    threshold: the loss below which a symbol is solved; sequences: the most to validate on; seed: of
    the random sets of paths. UserError for what cannot be."""
    check(flags, threshold, sequences)
    flags, task = flags.replace(device="cpu"), flags.problem
    report = dict(validated=False, verdict="", threshold=threshold, candidates=[], paths=[])

    # the means; six samples to search on, of which five are to see whether others give the same
    # paths; and fresh sequences to validate on
    batch = config.sequences(flags, held_out("means", 2))
    check_model(model, flags, batch.inputs)
    reference = PatchedModel(model, flags, batch).reference
    sample, *others = (
        Sample(model, flags, reference, index, threshold)
        for index in held_out("search", 6 * SIZES[-1]).split(SIZES[-1])
    )
    index, sizes = held_out("validate", sequences), (SIZES[-1], sequences)
    fresh = Sample(model, flags, reference, index, threshold, sizes)
    loss = fresh.few.baseline.mean().item()
    if loss >= threshold:
        return report | dict(verdict=f"not searched: the full model has a loss of {loss:.3f}")

    # all paths along which the model attends, and what each of them costs
    costs, protected = {}, set()
    for path in config.progress("paths along which it attends", attended(reference)):
        rise = sample.rises([path]).mean(0)
        costs[path] = rise.maximum(sample.rises([path], frozen=True).mean(0))
        protected |= {path} if rise.max() >= threshold else set()

    # the fewest that are faithful, or if all together are not, as good as all; what just passes on
    # the sequences of the search may fail on fresh ones, so then the search stops earlier
    highest = sample.circuit(frozenset(costs)).mean(0).max().item()
    for share in (1, 0.95, 0.9):
        for part in (sample, *others):
            part.limit(max(share * threshold, 1.2 * highest))
        paths = prune(costs, protected, sample.faithful)
        losses = fresh.circuit(paths)
        faithful = fresh.intervals(losses)
        if all_below(faithful, threshold):
            break
    sample.limit(threshold)
    full = [fresh.part(number).baseline for number in range(1 + sizes.index(len(losses)))]
    candidates = [path for path in costs if costs[path].max() >= MATTERS or path in paths]
    for path in candidates:
        cost = dict(zip(flags.target_names, costs[path].tolist(), strict=True))
        report["candidates"].append(to_row(path, task) | dict(cost=cost))
    report |= dict(
        sequences=len(losses),
        attention_sequences=len(reference.batch.inputs),
        full_model=fresh.intervals(torch.cat(full)),
        faithful=faithful,
        worst=max(faithful, key=lambda name: faithful[name][0]),
        paths=rows_on_paths(sample, fresh, paths),
    )

    # the verdict
    reasons = []
    for name, (mean, low, high) in faithful.items():
        if high >= threshold:
            reasons.append(f"not faithful: {name} {mean:.3f} [{low:.3f}, {high:.3f}]")
    missing = {*flags.target_symbols} - reached(paths, task)
    reasons += [f"no path leads to x_{k}" for k in sorted(missing)]
    for path, row in zip(sorted(paths), report["paths"], strict=True):
        if all_below(row["minimal"], threshold) and not row["stand_in"]:
            reasons.append(f"not minimal: {path_name(path, task)} can go")
    return report | dict(
        validated=not reasons,
        verdict="; ".join(reasons) or "validated",
        complete=completeness(sample, paths),
        null=null(sample, paths, candidates, seed),
        paper=papers_test(sample, paths),
        stability=stability(others, paths, costs, protected),
        itself=needs_itself(sample, paths),
    )


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    if report["paths"]:
        print(f"\nMSE on {report['sequences']} fresh sequences, with 95% intervals")
        for title, key in ("full model", "full_model"), ("circuit, all else ablated", "faithful"):
            rows = ["{} {:.4f} [{:.4f}, {:.4f}]".format(k, *v) for k, v in report[key].items()]
            print(f"  {title:26s}{'  '.join(rows)}")
        print("\npath                 attention   full model loses   MSE of the circuit without it")
        for row in report["paths"]:
            name = "L{layer}H{head}: {source} -> {target}".format(**row)
            rise, loss = (max(row[key].values())[0] for key in ("necessary", "minimal"))
            stand_in = f"   stand-in: {row['stand_in']}" if row["stand_in"] else ""
            print(f"{name:21s}{row['attention']:9.2f}{rise:19.3f}{loss:32.3f}{stand_in}")
        null, paper, differ = report["null"], report["paper"], report["complete"]["mean"]
        print("\nfound from {samples} other samples: {always}".format(**report["stability"]))
        print("{faithful} of {subsets} other sets of as many paths are faithful".format(**null))
        print(f"circuit and model without the same two paths differ by {differ:.3f}")
        print(f"the paper's test: MSE {paper['held']:.3f}, passed: {paper['passed']}")
        print(f"heads whose own token the circuit needs: {' '.join(report['itself']) or 'none'}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    with program("ablate.py"):
        p = command_line("ablate.py", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        text = "loss below which a symbol is solved (default: 0.05)"
        p.add_argument("--threshold", type=float, default=0.05, help=text)
        text = "fresh sequences to validate on, at most (default: 4096)"
        p.add_argument("--sequences", type=int, default=4096, help=text)
        args = p.parse_args()
        model, flags = config.load(args.run)
        with config.alone_in(args.run):
            text = json.dumps(find_circuit(model, flags, args.threshold, args.sequences))
            report = json.loads(text, parse_float=lambda number: float(f"{float(number):.5g}"))
            config.write_text(args.run / "circuit.json", json.dumps(report, indent=1) + "\n")
        print_report(report)
        print(f"circuit: {args.run / 'circuit.json'}")


if __name__ == "__main__":
    main()
