"""Find the circuit of a trained transformer, and validate it (Section 8).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A path (the paper's word; others say attention edge) is a layer, a head, a reader and what it reads.
L6H0: q -> 1b says that in layer 6, head 0, both counted from 0, the query reads token 1b of its own
chain; q -> 1b* is a star: the query reads the tokens 1b of all chains. A circuit is a set of paths.

To test a circuit, all else that tokens read of others is ablated, in all heads at once: replaced by
what they read in other sequences, whose chains stand elsewhere. Mean ablation takes the mean of 256
sequences, resample ablation another sequence, the same for all heads. Later heads attend from what
is left: so one loss tells whether the paths carry the answer, and whether they find what they read.
This leaves open what a token keeps of itself, the MLPs, the residual stream, what the denominator
of a softmax tells and, in a model of your own, what moves between tokens outside of its heads.

A circuit is faithful if the loss of each symbol then stays below 0.05 and at most 1% of its answers
are lost. An answer is lost if its loss is above half of the plateau, 0.375 for N = 4, and that of
the full model is not. The search takes the paths along which the full model attends most (first of
roles, then of intermediate tokens, 3b+1, then stars) until they are faithful, and drops paths as
long as the others still are; under both ablations or, if that fails, under mean ablation alone. The
circuit is validated if on fresh sequences it is faithful, the full model with its paths at their
mean is not, and its paths lead from each symbol to the query.
"""

import functools
import itertools
import pathlib
import re
from typing import NamedTuple

import train
from data import LOSS, command_line, held_out, partial_losses, show

import torch


MEAN, ANOTHER = "mean", "another sequence"  # what replaces what is ablated
SOLVED = 0.05  # the loss of a symbol below which it is solved
LOST = 0.01  # of the answers on a symbol may be lost
MARGIN = 0.9  # of both limits: the search keeps below, so that fresh sequences do too
FLOOR = 0.1  # of 1/N: the least attention of a candidate
REACH = 4  # intermediate tokens are at most so far behind a chain's pair
SEARCHED = 256  # sequences to search on


# ---- paths


class Path(NamedTuple):
    """In this layer and head, the token `reader` reads the token `read`, of its own chain or, if
    that is a star, of all."""

    layer: int
    head: int
    reader: str  # a role, 3b, or an intermediate token so many behind it, 3b+1
    read: str  # the same, or a star: 3b* in all chains

    def __str__(self):
        return f"L{self.layer}H{self.head}: {self.reader} -> {self.read}"

    @property
    def star(self):
        return self.read.endswith("*")

    @property
    def token(self):
        """What is read, without the star."""
        return self.read.rstrip("*")


def parts_of(end):
    """Return (role, offset) of an end of a path: ("3b", 1) of 3b+1, ("3b", 0) of 3b and 3b*."""
    role, offset = re.fullmatch(r"(\w+)(\+\d+)?\*?", end).groups()
    return role, int(offset or 0)


def marks_of(end, problem, positions):
    """Return (B, N, T) of 0 and 1: which token of each chain is this end of a path; of a star, the
    tokens of all chains; no mark where it would stand behind the sequence. positions (B, N, roles)
    as in a Batch."""
    role, offset = parts_of(end)
    tokens = positions[:, :, [*problem.roles].index(role)] + offset  # (B, N)
    marks = (tokens[..., None] == torch.arange(problem.T, device=tokens.device)).float()
    if end.endswith("*"):
        marks = marks.sum(1, keepdim=True).expand_as(marks)
    return marks


def mask_of(paths, problem, positions):
    """Return (B, T, T) bool, True where a reader of these paths reads what it reads."""
    count = torch.zeros(len(positions), problem.T, problem.T, device=positions.device)
    for path in paths:
        reader = marks_of(path.reader, problem, positions)
        count += reader.mT @ marks_of(path.read, problem, positions)
    return count > 0


def attention_on(pattern, path, problem, positions):
    """Return the attention (..., B, N) of each chain's reader to what it reads along a path, in
    patterns (..., B, T, T)."""
    given = marks_of(path.reader, problem, positions) @ pattern  # (..., B, N, T)
    return (given * marks_of(path.read, problem, positions)).sum(-1)


def by_head(paths):
    """Return {(layer, head): (path, ...)}, the paths of each head, sorted."""
    heads = {}
    for path in sorted(paths):
        head = path.layer, path.head
        heads[head] = (*heads.get(head, ()), path)
    return heads


def read_report(run, name="circuit.json"):
    """Return the report of find_circuit in a run directory, or another that has its paths; {} if
    there is none. ValueError if the run has been given other weights since."""
    report = train.read_file(pathlib.Path(run, name), {})
    if "weights" in report and report["weights"] != train.weights_hash(run):
        raise ValueError(f"{run}/{name} was made of other weights: make it anew, or delete it")
    return report


def paths_in(report):
    """Return {Path: its row} of the circuit in a report."""
    rows = {}
    for row in report.get("paths", []):
        rows[Path(row["layer"], row["head"], row["reader"], row["read"])] = row
    return rows


# ---- ablation


@torch.no_grad()
def reads_of(model, flags, batch):
    """Return what each head reads in a batch, {(layer, head): (pattern (B, T, T), values (B, T,
    size))}. ValueError if the model does not call each f once with such a pattern and values."""
    shape, reads, heads = batch.inputs.shape[:2], {}, {}

    def record(pattern, values, head):
        if head in reads or pattern.shape != (*shape, shape[1]) or values.shape[:2] != shape:
            text = "once, with a pattern (B, T, T) and values (B, T, size)"
            raise ValueError(f"the model must call f of {head} {text}")
        # copies, since a model may use the same memory again
        reads[head] = pattern.float().clone(), values.float().clone()
        return pattern @ values

    for head in itertools.product(range(flags.layers), range(flags.heads)):
        heads[head] = functools.partial(record, head=head)
    with train.precision(flags):
        model(batch.inputs, heads=heads)
    if reads.keys() != heads.keys():
        raise ValueError(f"the model never calls f of {heads.keys() - reads.keys()}")
    return reads


class PatchedModel:
    """A model on a batch of B sequences, with some of what its heads read replaced by what they
    read in others, a Batch, by default of 256 held-out sequences. ANOTHER takes one of these for
    each of ours, drawn at random or, if `aligned`, of the same number (clean/corrupted patching).
    Gradients flow unless the caller forbids them. For a metric of your own, set `score` first:
    `baseline` is kept."""

    def __init__(self, model, flags, batch, others=None, aligned=False):
        self.model, self.flags, self.batch, self.problem = model, flags, batch, flags.problem
        self.others = others or train.sequences(flags, held_out("means", 256, flags.device))
        self.others_reads = reads_of(model, flags, self.others)
        n, generator = len(self.others.inputs), torch.Generator().manual_seed(0)
        self.drawn = torch.randint(n, (len(batch.inputs),), generator=generator)
        if aligned:
            self.drawn = torch.arange(len(batch.inputs))

    def losses(self, heads):
        """Return the losses (B, N, targets) with these head functions, {(layer, head): f}."""
        with train.precision(self.flags):
            predictions = self.model(self.batch.inputs, heads=heads)
        shape = self.batch.targets.shape
        if predictions.shape != shape or not predictions.isfinite().all():
            raise ValueError(f"the model must return finite predictions {tuple(shape)}")
        return self.score(predictions)

    def score(self, predictions):
        """Return the losses (B, N, targets) of predictions (B, N, targets*K)."""
        return partial_losses(predictions, self.batch.targets, self.flags.K)

    @functools.cached_property
    def baseline(self):
        return self.losses({})

    def ablate(self, head, paths, keep=True, by=MEAN):
        """Return the f of a head that replaces (by MEAN or ANOTHER) what tokens read of others
        outside of these paths, a tuple; with keep=False, what they read along these paths."""
        # True where a weight stays as it is, here (B, T, T) and in the others (n, T, T)
        along = mask_of(paths, self.problem, self.batch.positions)
        along_there = mask_of(paths, self.problem, self.others.positions)
        itself = torch.eye(self.problem.T, dtype=torch.bool, device=along.device)
        stays, stays_there = ~along, ~along_there
        if keep:
            stays, stays_there = along | itself, along_there | itself

        # what the others read with all other weights: ours get its mean, or one sequence each
        weights, values = self.others_reads[head]
        replacement = (weights * ~stays_there) @ values  # (n, T, size)
        if by == MEAN:
            replacement, weights = replacement.mean(0), weights.mean(0)
        else:
            replacement, weights = replacement[self.drawn], weights[self.drawn]

        # attention sums to 1, so a token's weight on itself tells that on others: where a token has
        # no path, this weight is replaced too, but not the value that it weighs
        alone = itself & ~along.any(-1, keepdim=True) & keep

        def write(pattern, values):
            pattern = torch.where(alone, weights.to(pattern), pattern * stays)
            return pattern @ values + replacement.to(values)

        return write

    def circuit(self, paths, by=MEAN):
        """Return the losses with all outside of these paths ablated."""
        groups = dict.fromkeys(self.others_reads, ()) | by_head(paths)  # of every head
        return self.losses({head: self.ablate(head, groups[head], by=by) for head in groups})

    def knock_out(self, paths, by=MEAN):
        """Return the losses of the full model with only these paths ablated."""
        groups = by_head(paths)
        return self.losses(
            {head: self.ablate(head, groups[head], keep=False, by=by) for head in groups}
        )

    def measure(self, losses):
        """Return the means of such losses, {symbol: loss}, and {symbol: share of lost answers}."""
        bound = self.problem.lost_above
        lost = (losses > bound) & (self.baseline <= bound)
        return means(losses, self.flags), means(lost.float(), self.flags)


def means(values, flags):
    """Return {symbol: mean} of values (B, N, targets)."""
    rounded = [round(mean, 5) for mean in values.mean((0, 1)).tolist()]
    return dict(zip(flags.target_names, rounded, strict=True))


# ---- search: candidates, the most attended first, without what can go


def candidates(patched, floor):
    """Return {Path: attention} of all paths with at least `floor`. That of a plain path is what its
    reader gives to its own chain, less what it gives to an average other one; that of a star is the
    sum over all chains. Paths between roles come first, then those of intermediate tokens, which
    may be roles of other chains, then stars; of each kind the most attended first."""
    # mark the tokens of all roles and, after these, the intermediate tokens behind each slot
    problem = patched.problem
    ends, roles = list(problem.roles), len(problem.roles)
    for block in problem.blocks:
        last = block.roles[block.size - 1 :: block.size]  # of each slot of a chain
        for offset in range(1, REACH + 1):
            ends += [f"{role}+{offset}" for role in last]
    positions = patched.others.positions
    marks = torch.stack([marks_of(end, problem, positions) for end in ends], 2)  # (B, N, ends, T)

    # the mean attention of end i to end j of its own chain, and to end j summed over all chains
    plain, stars = {}, {}
    for head, (pattern, _) in patched.others_reads.items():
        of_others = pattern * (1 - torch.eye(problem.T))  # what a token reads of itself has no path
        given = marks @ of_others[:, None]  # (B, N, ends, T) what each end attends to
        own_chain = (given @ marks.mT).mean((0, 1))  # (ends, ends)
        all_chains = (given @ marks.sum(1, keepdim=True).mT).mean((0, 1))
        surplus = own_chain - (all_chains - own_chain) / (problem.N - 1)  # above another chain
        for i, j in (surplus >= floor).nonzero().tolist():
            plain[Path(*head, ends[i], ends[j])] = surplus[i, j].item()
        for i, j in (all_chains[:roles, :roles] >= floor).nonzero().tolist():
            stars[Path(*head, ends[i], ends[j] + "*")] = all_chains[i, j].item()

    # an intermediate token must have read in an earlier layer, and be read in a later one
    def connected(path):
        written = any(path.read == other.reader and path.layer > other.layer for other in plain)
        used = any(path.reader == other.read and path.layer < other.layer for other in plain)
        return (written or path.read in problem.roles) and (used or path.reader in problem.roles)

    while loose := [path for path in plain if not connected(path)]:
        for path in loose:
            del plain[path]

    attention = plain | stars

    def rank(path):
        intermediate = not {path.reader, path.token} <= problem.roles.keys()
        return path.star, intermediate, -attention[path]

    return {path: attention[path] for path in sorted(attention, key=rank)}


def search(patched, ranked, ablations):
    """Return a set of these paths that is faithful under these ablations, and without any one of
    them is not; None if all together are not. ranked: those to take first, and to drop last."""

    @functools.cache
    def faithful(paths):
        show(f"search: {len(paths)} paths")
        for by in ablations:
            if not is_faithful(*patched.measure(patched.circuit(paths, by)), MARGIN):
                return False
        return True

    # twice as many each time, until they are faithful
    count = 1
    while not faithful(frozenset(ranked[:count])):
        if count >= len(ranked):
            return None
        count *= 2
    return prune(ranked[:count], faithful)


def prune(ranked, test):
    """Return what is left of these paths, which pass a test, when none of them can go alone: delta
    debugging (Zeller and Hildebrandt, 2002)."""

    def drop(group, paths):
        """Return paths without those of a group that can go: all at once, or else by halves, the
        last half first."""
        if test(paths.difference(group)):
            return paths.difference(group)
        if len(group) == 1:
            return paths  # this one stays
        half = len(group) // 2
        return drop(group[:half], drop(group[half:], paths))

    paths, before = frozenset(ranked), None
    while paths != before:  # a path that had to stay may go once others went
        before = paths
        paths = drop([path for path in ranked if path in paths], paths)
    return paths


def is_faithful(losses, lost, margin=1.0):
    """Return whether what PatchedModel.measure returns is that of a faithful circuit."""
    return max(losses.values()) < margin * SOLVED and max(lost.values()) <= margin * LOST


# ---- the report, on fresh sequences


def verdict(fresh, paths, ablations):
    """Return what the report says of a circuit as a whole."""
    part, reasons = dict(lost={}), []
    for by in MEAN, ANOTHER:
        losses, lost = fresh.measure(fresh.circuit(paths, by))
        part[by], part["lost"][by] = losses, lost
        if by in ablations and not is_faithful(losses, lost):
            reasons.append(f"with {by} for all else, {worst_of_both(losses, lost)}")
    part["knocked_out"], lost = fresh.measure(fresh.knock_out(paths))
    if is_faithful(part["knocked_out"], lost):
        reasons.append("the full model does as well without it")
    for k in sorted(set(fresh.flags.target_symbols) - reached(paths, fresh.problem)):
        reasons.append(f"no paths lead from x_{k} to the query")

    kind = "both ablations" if ANOTHER in ablations else "mean ablation alone"
    said = f"not validated: {'; '.join(reasons)}" if reasons else f"validated under {kind}"
    return dict(part, validated=not reasons, verdict=said)


def reached(paths, problem):
    """Return the k of all x_k that reach the query along these paths (Section 5). A role holds the
    symbol that it shows; layer by layer, each reader also gets what the token that it reads held
    before."""
    holds = {role: {k} for role, k in problem.roles.items()}
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        taken = [(path.reader, holds.get(path.token, set())) for path in layer]
        for reader, symbols in taken:
            holds[reader] = holds.get(reader, set()) | symbols
    return holds["q"]


def worst_of(values):
    """Return the symbol with the highest loss, or share of lost answers, as text."""
    worst = max(values, key=values.get)
    return f"{worst} {values[worst]:.3f}"


def worst_of_both(losses, lost):
    return f"loss of {worst_of(losses)}, answers lost of {worst_of(lost)}"


def rows_of(fresh, paths, by):
    """Return the rows of the report on each path: its attention in the full model; `cost`, the rise
    of the full model's loss with the path at its mean; `without`, the loss of the circuit without
    it under this ablation."""
    reads = reads_of(fresh.model, fresh.flags, fresh.batch)
    rows = []
    for path in sorted(paths):
        show(f"measured: {len(rows)} of {len(paths)} paths")
        pattern, _ = reads[path.layer, path.head]
        given = attention_on(pattern, path, fresh.problem, fresh.batch.positions)
        row = dict(path._asdict(), attention=round(given.mean().item(), 4))
        row["cost"] = means(fresh.knock_out([path]) - fresh.baseline, fresh.flags)
        row["without"] = means(fresh.circuit(paths - {path}, by), fresh.flags)
        rows.append(row)
    show()
    return rows


@torch.no_grad()
def find_circuit(model, flags, count=512):
    """Find the circuit of a model, validate it on `count` sequences, and return the report, which
    is the dict in circuit.json:

    full_model, mean, another sequence, knocked_out: {symbol: loss} of the full model, of the
        circuit under each ablation, of the full model with its paths ablated
    lost: {ablation: {symbol: share of lost answers}}
    paths: as rows_of says; ablation: that of their `without`
    validated, verdict, dtype, sequences

    model: anything on the CPU that can be called like model.Transformer, with heads={(layer, head):
    f}, and returns predictions (B, N, targets*K) of x_1, x_2, ... at the last N tokens. flags: from
    train.load or train.parse_flags([...])."""
    flags = flags.replace(device="cpu")
    if flags.N < 2 or flags.target_symbols != list(range(1, flags.problem.symbols)):
        raise ValueError("a circuit needs two chains or more, and predictions of all symbols")

    # sequences to search on, and fresh ones for what is reported
    batch = train.sequences(flags, held_out("search", SEARCHED))
    searched = PatchedModel(model, flags, batch)
    batch = train.sequences(flags, held_out("circuits", count))
    fresh = PatchedModel(model, flags, batch)
    full = means(fresh.baseline, flags)
    report = dict(validated=False, dtype=flags.dtype, sequences=count)
    report.update(full_model=full, lost={}, paths=[])
    if not max(full.values()) < MARGIN * SOLVED:
        said = f"not searched: the full model has {worst_of(full)}"
        return dict(report, verdict=f"{said}, not below {MARGIN * SOLVED:.3f}")

    # under both ablations or, if no circuit is validated, under mean ablation alone
    found, ranked = None, list(candidates(searched, FLOOR / flags.N))
    for ablations in (MEAN, ANOTHER), (MEAN,):
        paths = search(searched, ranked, ablations)
        if paths is not None:
            found = paths
            report.update(verdict(fresh, paths, ablations), ablation=ablations[-1])
        if report["validated"]:
            break
    show()
    if found is None:
        said = worst_of_both(*searched.measure(searched.circuit(ranked)))
        return dict(report, verdict=f"not validated: all {len(ranked)} candidates leave a {said}")
    return dict(report, paths=rows_of(fresh, found, report["ablation"]))


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    print(f"{LOSS} on {report['sequences']} fresh sequences, {report['dtype']}")
    for key in "full_model", MEAN, ANOTHER, "knocked_out":
        if key in report:
            cells = [f"{name} {loss:.4f}" for name, loss in report[key].items()]
            print(f"  {key:16s}", *cells, sep="  ")

    if report["paths"]:
        print(f"\nthe worst symbol, if one path is ablated ({report['ablation']} for the circuit):")
        print("path                 attention   full model loses   circuit without it")
    for path, row in paths_in(report).items():
        cost, without = max(row["cost"].values()), max(row["without"].values())
        print(f"{path!s:21s}{row['attention']:9.2f}{cost:19.3f}{without:20.3f}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory of train.py")
    run = p.parse_args().run
    train.keep_freed_memory()
    model, flags = train.load(run)
    report = find_circuit(model, flags)
    print_report(report)
    train.write_file(run / "circuit.json", dict(report, weights=train.weights_hash(run)))


if __name__ == "__main__":
    main()
