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


FEW, MANY = 64, 256  # sequences: the first is enough unless a loss is near the threshold
MARGIN = (
    0.8  # of the threshold is where the search stops, as fresh sequences may give a little more
)
MATTERS = 0.01  # a rise of a symbol's loss from which on a path counts as a candidate
REMOVAL = 0.17  # the lowest loss after the removal of a path in Appendix E


# ---- measuring


class Sample:
    """A model on one sample of held-out sequences, of which a few are used first and many only
    where a loss is near the threshold."""

    def __init__(self, model, flags, reference, index, threshold):
        self.model, self.flags, self.reference, self.index = model, flags, reference, index
        self.threshold, self.worst = threshold, functools.cache(self.highest_loss)

    @functools.cached_property
    def few(self):
        return self.patched(self.index[:FEW])

    @functools.cached_property
    def many(self):
        return self.patched(self.index)

    def patched(self, index):
        batch = config.sequences(self.flags, index)
        return PatchedModel(self.model, self.flags, batch, self.reference)

    def adaptive(self, measure):
        """Return measure(patched), losses (sequences, symbols), on few sequences or on many."""
        losses = measure(self.few)
        if self.threshold / 2 < losses.mean(0).max() < 2 * self.threshold:
            losses = measure(self.many)
        return losses

    def circuit(self, paths):
        """Return the losses of a circuit."""
        return self.adaptive(lambda patched: patched.circuit(paths))

    def rises(self, paths, frozen=False):
        """Return by how much the losses of the full model rise if these paths are ablated."""
        return self.adaptive(lambda patched: patched.knock_out(paths, frozen) - patched.baseline)

    def highest_loss(self, paths):
        """Return the highest loss of a symbol in a circuit, a frozenset of paths."""
        return self.circuit(paths).mean(0).max().item()


def intervals(losses, names, generator):
    """Return {symbol: [mean, low, high]} with 95% intervals, from losses (sequences, symbols)."""
    rows = {}
    for name, column in zip(names, losses.unbind(1), strict=True):
        rows[name] = [column.mean().item(), *studentised(column, generator)]
    return rows


def on_fresh_sequences(sample, paths, sequences, generator):
    """Return the rows on the full model and on the circuit, each {symbol: [mean, low, high]}, and
    the number of fresh sequences: 1024, or all if that is too few to tell."""
    losses, names = [], sample.flags.target_names
    for part in held_out("validate", sequences).split(MANY):
        patched = sample.patched(part)
        losses.append(torch.stack([patched.baseline, patched.circuit(paths)]))
        full, circuit = torch.cat(losses, 1)
        rows = intervals(circuit, names, generator)
        undecided = any(low < sample.threshold <= high for _, low, high in rows.values())
        if len(full) >= 1024 and not undecided:
            break
    return intervals(full, names, generator), rows, len(full)


def is_faithful(rows, threshold):
    """Return whether the upper end of every symbol's interval is below the threshold."""
    return all(high < threshold for _, _, high in rows.values())


def worst_of(rows):
    """Return the name of the symbol with the highest loss."""
    return max(rows, key=lambda name: rows[name][0])


# ---- what is said of each path, and of all together


def rows_on_paths(sample, paths, threshold, generator):
    """Return a row for each path of a circuit: its attention, what the full model loses without it
    (necessary), the loss of the circuit without it (minimal) and, where that is low, its
    stand-in."""
    rows, names = [], sample.flags.target_names
    task, positions = sample.flags.problem, sample.many.batch.positions
    alone = {path: sample.worst(paths - {path}) for path in paths}
    for path in config.progress("paths", sorted(paths)):
        pattern = sample.many.attention()[path[:2]]
        row = to_row(path, task) | dict(
            attention=attention_on(pattern, path, task, positions).mean().item(),
            necessary=intervals(sample.rises([path]), names, generator),
            minimal=intervals(sample.circuit(paths - {path}), names, generator),
            stand_in=None,
        )

        # another path that costs little alone either, but much together with this one
        if is_faithful(row["minimal"], threshold):
            others = [other for other in paths - {path} if alone[other] < threshold]
            without_both = {other: sample.worst(paths - {path, other}) for other in others}
            partner = max(without_both, key=without_both.get, default=None)
            if partner and without_both[partner] >= threshold:
                row["stand_in"] = path_name(partner, task)
        rows.append(row)
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
        fewer = groups | {path[:2]: groups[path[:2]] - {path}}
        removed.append(losses(fewer).mean().item())
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
    if not MANY <= sequences <= 2**20:
        raise UserError(f"--sequences must be from {MANY} to {2**20}, not {sequences}")
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
        for index in held_out("search", 6 * MANY).split(MANY)
    )
    loss = sample.many.baseline.mean().item()
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

    # the fewest that are faithful
    everything = sample.worst(frozenset(costs))
    for margin in (MARGIN, MARGIN / 2):
        limit = max(margin * threshold, 1.05 * everything)
        paths = prune(costs, protected, sample.worst, limit)
        full, faithful, n = on_fresh_sequences(sample, paths, sequences, generator)
        say(f"{len(paths)} of {len(costs)} paths; worst symbol {sample.worst(paths):.3f}")
        if is_faithful(faithful, threshold):
            break
    candidates = [path for path in costs if costs[path].max() >= MATTERS or path in paths]
    report |= dict(
        sequences=n,
        full_model=full,
        faithful=faithful,
        worst=worst_of(faithful),
        paths=rows_on_paths(sample, paths, threshold, generator),
        candidates=[rows[path] for path in candidates],
    )

    # the verdict
    reasons = []
    if not is_faithful(faithful, threshold):
        mean, low, high = faithful[report["worst"]]
        reasons.append(f"not faithful: {report['worst']} {mean:.3f} [{low:.3f}, {high:.3f}]")
    missing = {*flags.target_symbols} - reached(paths, task)
    reasons += [f"no path leads to x_{k}" for k in sorted(missing)]
    for path, row in zip(sorted(paths), report["paths"], strict=True):
        if is_faithful(row["minimal"], threshold) and not row["stand_in"]:
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
    same = []
    for other in config.progress("other samples of sequences", others):
        same.append(prune(costs, protected, other.worst, limit) == paths)
    report["stability"] = dict(samples=len(same), same=sum(same))
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
        print("{same} of {samples} other samples give the same paths".format(**report["stability"]))
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
