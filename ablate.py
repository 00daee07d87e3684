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
import math
import pathlib
import random
import time

from parts import UserError, command_line, config, program
from parts.circuit import (
    PatchedModel,
    attention_on,
    by_head,
    check_model,
    one_hot,
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
    """A model on one sample of held-out sequences, (1024,) examples, of which a measurement uses as
    many as it needs to tell on which side of the threshold a loss is."""

    def __init__(self, model, flags, reference, index, threshold):
        self.model, self.flags, self.reference, self.index = model, flags, reference, index
        self.patched = functools.cache(self.patch)
        self.few = self.patched(SIZES[0])
        self.limit(threshold)

    def limit(self, threshold):
        """Let a circuit count as faithful below this threshold."""
        self.threshold, self.faithful = threshold, functools.cache(self.is_faithful)

    def patch(self, n):
        batch = config.sequences(self.flags, self.index[:n])
        return PatchedModel(self.model, self.flags, batch, self.reference)

    def measure(self, losses_of):
        """Return losses_of(patched), (sequences, symbols), on as many sequences as are needed."""
        for n in SIZES:
            losses = losses_of(self.patched(n))
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
        """Return whether the losses of all symbols in a circuit, a frozenset of paths, are below
        the threshold, by two standard errors."""
        losses = self.circuit(paths)
        return bool(
            (losses.mean(0) + 2 * losses.std(0) / len(losses) ** 0.5 < self.threshold).all()
        )


def intervals(losses, names, generator):
    """Return {symbol: [mean, low, high]} with 95% intervals, from losses (sequences, symbols)."""
    rows = {}
    for name, column in zip(names, losses.unbind(1), strict=True):
        rows[name] = [column.mean().item(), *studentised(column, generator)]
    return rows


def on_fresh_sequences(sample, paths, sequences, threshold, generator):
    """Return what the circuit and the full model lose on fresh sequences, each {symbol: [mean, low,
    high]}, and the number of sequences: 1024, or all if those are too few to tell."""
    losses, names = [], sample.flags.target_names
    for part in held_out("validate", sequences).split(SIZES[1]):
        batch = config.sequences(sample.flags, part)
        patched = PatchedModel(sample.model, sample.flags, batch, sample.reference)
        losses.append(torch.stack([patched.baseline, patched.circuit(paths)]))
        full, circuit = torch.cat(losses, 1)
        rows = intervals(circuit, names, generator)
        clear = all(high < threshold or low > threshold for _, low, high in rows.values())
        if clear and len(full) >= SIZES[2]:
            break
    return rows, intervals(full, names, generator), len(full)


def all_below(rows, threshold):
    """Return whether the upper end of every symbol's interval is below the threshold."""
    return all(high < threshold for _, _, high in rows.values())


# ---- what is said of each path, and of all together


def rows_on_paths(sample, paths, threshold, on_fresh, generator):
    """Return a row for each path of a circuit: its attention, what the full model loses without it
    (necessary), what the circuit loses without it (minimal) and, if that is still faithful, its
    stand-in: another path that can go as well, but not both. on_fresh(paths): losses on fresh
    sequences, for what is close."""
    rows, task, reference = [], sample.flags.problem, sample.reference
    for path in config.progress("paths", sorted(paths)):
        attention = reference.attention()[path[:2]]
        attention = attention_on(attention, path, task, reference.batch.positions)
        necessary = intervals(sample.rises([path]), sample.flags.target_names, generator)
        minimal = intervals(sample.circuit(paths - {path}), sample.flags.target_names, generator)
        if all_below(minimal, threshold):
            minimal = on_fresh(paths - {path})
        row = dict(attention=attention.mean().item(), necessary=necessary, minimal=minimal)
        rows.append(to_row(path, task) | row | dict(stand_in=None))

        # what replaces a path with which the circuit can do without
        for other in sorted(paths - {path}) if all_below(minimal, threshold) else ():
            alone, both = paths - {other}, paths - {path, other}
            if sample.faithful(alone) and not sample.faithful(both):
                rows[-1]["stand_in"] = path_name(other, task)
    return rows


def completeness(sample, paths):
    """Return how much the losses of circuit and full model differ without the same two paths, over
    all pairs (IOI completeness)."""
    differences, few = {}, sample.few
    for pair in config.progress("pairs of paths", [*itertools.combinations(sorted(paths), 2)]):
        circuit, full = few.circuit(paths - {*pair}).mean(), few.knock_out(pair).mean()
        differences[pair] = abs(circuit - full).item()
    if not differences:
        return dict(pairs=0)
    largest = max(differences, key=differences.get)
    return dict(
        pairs=len(differences),
        mean=sum(differences.values()) / len(differences),
        largest=differences[largest],
        largest_without=[path_name(path, sample.flags.problem) for path in largest],
    )


def papers_test(sample, paths):
    """Return steps 5 and 6 of Appendix E word for word: heads with paths attend hard along them and
    to nothing else, each other head is uniform or the identity, whichever costs the full model
    less; then the first useful head is made uniform, and every later path is removed. passed: below
    0.05 at first, and at least 0.17 after every removal."""
    few, task, groups = sample.few, sample.flags.problem, by_head(paths)
    allowed = torch.ones(task.T, task.T).tril(0 if sample.flags.causal else task.T)
    uniform = allowed / allowed.sum(-1, keepdim=True)

    def attending(pattern):
        return lambda _, values: pattern.to(values) @ values

    def losses(groups):
        hard = {head: one_hot(group, task, few.batch.positions) for head, group in groups.items()}
        useful = {head: attending(pattern) for head, pattern in hard.items()}
        return few.losses(simple | useful)

    simple = {}
    for head in config.progress("heads without a path", [h for h in few.heads if h not in groups]):
        choices = [attending(uniform), attending(torch.eye(task.T))]
        simple[head] = min(choices, key=lambda write: few.losses({head: write}).mean())
    held = losses(groups).mean().item()
    first, removed = min(paths), []
    for path in (path for path in paths if path.layer > first.layer):
        left = [other for other in groups[path[:2]] if other != path]
        removed.append(losses(groups | {path[:2]: left}).mean().item())
    others = {head: group for head, group in groups.items() if head != first[:2]}
    simple[first[:2]] = attending(uniform)
    return dict(
        held=held,
        first_uniform=losses(others).mean().item(),
        removed=sorted(removed),
        passed=held < sample.threshold and all(loss >= REMOVAL for loss in removed),
    )


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
    if len(flags.target_symbols) < flags.problem.symbols - 1:
        raise UserError("the run predicts some symbols only: choose one that predicts all of them")


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, sequences=4096, seed=0):
    """Find the circuit of a model, validate it, and return the report, the dict that main writes
    into circuit.json.

    model: anything on the CPU that can be called like model.Transformer: model(x, heads={(layer,
    head): f}, return_patterns=False) with x (B, T, inputs) returns predictions (B, N, symbols*K) of
    x_1, x_2, ... at the last N tokens. What a head writes is f(pattern (B, T, T), values (B, T,
    size)) -> (B, T, size) where a function is given for it, else pattern @ values. With
    return_patterns it returns (predictions, [pattern (B, heads, T, T) of each layer]).
    flags: of a run, as config.load gives them, or train.parse_flags(["--D", "2"]).
    threshold: the loss below which a symbol is solved; sequences: fresh ones to validate on, at
    most; seed: of what is drawn at random. UserError for what cannot be."""
    check(flags, threshold, sequences)
    flags, task, began = flags.replace(device="cpu"), flags.problem, time.monotonic()
    generator, draws = torch.Generator().manual_seed(seed), random.Random(seed)
    report = dict(validated=False, verdict="", threshold=threshold, candidates=[], paths=[])

    def say(text):
        print(f"{time.monotonic() - began:5.1f} s  {text}", flush=True)

    # the mean of what each head reads, and six samples of sequences: one for the search, five to
    # see whether others give the same paths
    batch = config.sequences(flags, held_out("means", 2))
    check_model(model, flags, batch.inputs)
    reference = PatchedModel(model, flags, batch).reference
    sample, *others = (
        Sample(model, flags, reference, index, threshold)
        for index in held_out("search", 6 * SIZES[2]).split(SIZES[2])
    )
    loss = sample.patched(SIZES[2]).baseline.mean().item()
    if loss >= threshold:
        return report | dict(verdict=f"not searched: the full model has a loss of {loss:.3f}")

    # all paths along which the model attends, and what each of them costs
    costs, protected, rows = {}, set(), {}
    for path in config.progress("paths along which it attends", attended(reference)):
        rise = sample.rises([path]).mean(0)
        costs[path] = rise.maximum(sample.rises([path], frozen=True).mean(0))
        protected |= {path} if rise.max() >= threshold else set()
        by_symbol = dict(zip(flags.target_names, costs[path], strict=True))
        rows[path] = to_row(path, task) | dict(cost=by_symbol)

    # the fewest that are faithful, or if all together are not, as good as all; what just passes on
    # the sequences of the search may fail on fresh ones, so then the search stops earlier
    def on_fresh(paths):
        return on_fresh_sequences(sample, paths, sequences, threshold, generator)[0]

    highest = sample.circuit(frozenset(costs)).mean(0).max().item()
    for share in (1, 0.95, 0.9):
        for part in (sample, *others):
            part.limit(max(share * threshold, 1.2 * highest))
        paths = prune(costs, protected, sample.faithful)
        faithful, full, n = on_fresh_sequences(sample, paths, sequences, threshold, generator)
        if all_below(faithful, threshold):
            break
    candidates = [path for path in costs if costs[path].max() >= MATTERS or path in paths]
    worst = max(faithful, key=lambda name: faithful[name][0])
    say(f"{len(paths)} of {len(costs)} paths, with which {worst} has {faithful[worst][0]:.3f}")
    report |= dict(
        sequences=n,
        attention_sequences=len(reference.batch.inputs),
        full_model=full,
        faithful=faithful,
        worst=worst,
        paths=rows_on_paths(sample, paths, threshold, on_fresh, generator),
        candidates=[rows[path] for path in candidates],
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
    report |= dict(validated=not reasons, verdict="; ".join(reasons) or "validated")
    say(report["verdict"])

    # what helps to judge it
    report["complete"] = completeness(sample, paths)
    subsets = {frozenset(draws.sample(candidates, len(paths))) for _ in range(100)} - {paths}
    losses = []
    for subset in config.progress("random sets of paths", sorted(subsets, key=sorted)):
        losses.append(sample.few.circuit(subset).mean(0).max().item())
    faithful = sum(loss < threshold for loss in losses)
    report["null"] = dict(subsets=len(subsets), faithful=faithful)
    report["paper"] = papers_test(sample, paths)
    circuits = []
    for other in config.progress("other samples of sequences", others):
        circuits.append(prune(costs, protected, other.faithful))
    report["stability"] = dict(
        samples=len(circuits),
        same=circuits.count(paths),
        always=len(paths.intersection(*circuits)),
    )
    report["itself"] = []
    for head in config.progress("heads that read their own token", sample.few.heads):
        if sample.few.circuit(paths, [head]).mean(0).max() >= threshold:
            report["itself"].append("L{}H{}".format(*head))
    return report


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    if report["paths"]:
        print(f"\nMSE on {report['sequences']} fresh sequences, with 95% intervals")
        for title, key in ("full model", "full_model"), ("circuit, all else ablated", "faithful"):
            losses = ["{} {:.4f} [{:.4f}, {:.4f}]".format(k, *v) for k, v in report[key].items()]
            print(f"  {title:26s}{'  '.join(losses)}")
        print("\npath                 attention   rise in full model   MSE of circuit")
        print("                                 if ablated           without it   (worst symbol)")
    for row in report["paths"]:
        name = "L{layer}H{head}: {source} -> {target}".format(**row)
        rise, loss = (max(row[key].values())[0] for key in ("necessary", "minimal"))
        stand_in = f"   stand-in: {row['stand_in']}" if row["stand_in"] else ""
        print(f"{name:21s}{row['attention']:9.2f}{rise:21.3f}{loss:17.3f}{stand_in}")
    if report["paths"]:
        complete, null, paper = report["complete"], report["null"], report["paper"]
        print(f"\nwithout the same two paths, circuit and model differ by {complete['mean']:.3f}")
        print("of {subsets} other sets of as many paths {faithful} are faithful".format(**null))
        stability = f"{report['stability']['always']} of {len(report['paths'])} paths"
        print(f"{stability} are found from each of five other samples of sequences too")
        lowest = min(paper["removed"], default=math.nan)
        verdict = "passed" if paper["passed"] else "not passed"
        print(f"the paper's test {verdict}: {paper['held']:.3f}, after a removal {lowest:.3f}")
        print(f"heads whose own token the circuit needs: {' '.join(report['itself']) or 'none'}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def rounded(value):
    """Return any part of a report with five digits of its numbers: no sample is large enough for
    more."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, (float, torch.Tensor)) else value


def main():
    with program("ablate.py"):
        p = command_line("ablate.py", __doc__)
        p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
        text = "loss below which a symbol counts as solved (default: 0.05)"
        p.add_argument("--threshold", type=float, default=0.05, help=text)
        text = "fresh sequences to validate on, at most (default: 4096)"
        p.add_argument("--sequences", type=int, default=4096, help=text)
        args = p.parse_args()
        model, flags = config.load(args.run)
        with config.alone_in(args.run):
            report = rounded(find_circuit(model, flags, args.threshold, args.sequences))
            config.write_text(args.run / "circuit.json", json.dumps(report, indent=1) + "\n")
        print_report(report)
        print(f"circuit: {args.run / 'circuit.json'}")


if __name__ == "__main__":
    main()
