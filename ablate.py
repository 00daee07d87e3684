"""Find the circuit of a trained transformer, and validate it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A path (the paper's word; others say attention edge) is a layer, a head, a reader and what it reads.
L6H0: q -> 1b says that in layer 6, head 0, both counted from 0, the query reads token 1b of its own
chain. q -> 1b* is a star: the query reads the tokens 1b of all chains. A circuit is a set of paths.

To ablate tokens that a head reads is to replace their part of the sum of attention * value by the
same part in held-out sequences, whose chains stand elsewhere: by its mean over these for a reader
at this token (mean ablation), or by that of one other sequence, drawn for each sequence and the
same for all heads. (Where a distractor stands there, which has no such paths, it is another part.)

A circuit is tested by ablating, in all heads at once, what tokens read of others outside of its
paths; of a token without a path in a head, also the weight on itself, which would tell how much it
reads of others. Later heads attend from what is left: so one loss tells whether the paths carry the
answer, and whether they find what they read.

A circuit is faithful if the loss of each symbol then stays below 0.05 and at most 1% of its answers
are lost, two standard errors included. An answer is lost if its loss is above half of the plateau,
0.375 for N = 4, where that of the full model is not.

The candidates are the paths along which the full model attends. The search starts with all of them,
and drops paths as long as the others are still faithful; here a symbol has to stay below 0.045, so
that the result has a margin. What is left is validated if
  1. on fresh sequences it is faithful, and the full model with its paths at their mean is not;
  2. its paths lead from each symbol to the query (Section 5).
The circuit is asked to be faithful under both ablations or, if none is validated, under mean
ablation alone. Nothing else that tokens read of each other is needed beside a validated one, and
the search could drop none of its paths. What a token keeps of itself, MLPs and the residual stream
stay open.
"""

import functools
import itertools
import pathlib
import re
from typing import NamedTuple

from data import (
    LOSS,
    UserError,
    command_line,
    held_out,
    number,
    partial_losses,
    program,
    progress,
    show,
)
from train import keep_freed_memory, load, precision, read_file, sequences, write_file

import torch


MEAN, ANOTHER = "mean", "another sequence"  # what replaces what is ablated
BOTH = MEAN, ANOTHER
SHARES = 0.4, 0.1  # of 1/N: the least attention of a candidate; the second if the first fails
REACH = 4  # intermediate tokens are at most so far before or after a chain's slot
LOST = 0.01  # of the answers on a symbol may be lost
MARGIN = 0.9  # of the threshold: the search keeps below, so that fresh sequences do too
FEW, MANY, SHOWN = 64, 512, 256  # sequences to reject a circuit, to accept it, to measure a path
REMOVAL = 0.17  # the lowest loss after the removal of a path in Appendix E


# ---- paths


class Path(NamedTuple):
    """In this layer and head, the token `reader` reads the token `read`. Each has the name of its
    role, 3b; 3b+1 and 3a-1 are intermediate tokens, so many after or before it, where a model may
    put what it reads; and 3b* is read in all chains."""

    layer: int
    head: int
    reader: str
    read: str

    @classmethod
    def parse(cls, text):
        """Return the Path that is printed like this, "L6H0: q -> 1b"; ValueError for other text."""
        end = r"\w+(?:[+-]\d+)?"
        match = re.fullmatch(rf"L(\d+)H(\d+): ({end}) -> ({end}\*?)", text)
        if not match:
            raise ValueError(f"a path is written like L6H0: q -> 1b, not {text}")
        return cls(int(match[1]), int(match[2]), match[3], match[4])

    def __str__(self):
        return f"L{self.layer}H{self.head}: {self.reader} -> {self.read}"

    @property
    def star(self):
        """Whether the token is read in all chains."""
        return self.read.endswith("*")

    @property
    def token(self):
        """What is read, without the star."""
        return self.read.rstrip("*")

    def marks(self, problem, positions):
        """Return two (B, N, T) of 0 and 1: which token of each chain reads, and what it reads.
        positions (B, N, roles) as in a Batch."""
        reader = marks_of(self.reader, problem, positions)
        read = marks_of(self.read, problem, positions)
        if self.star:
            read = read.sum(1, keepdim=True).expand_as(read)
        return reader, read


def parts_of(end):
    """Return (role, offset) of an end of a path: ("3b", 1) of 3b+1, ("3b", 0) of 3b*."""
    role, offset = re.fullmatch(r"(\w+)([+-]\d+)?\*?", end).groups()
    return role, int(offset or 0)


def marks_of(end, problem, positions):
    """Return (B, N, T), one-hot: which token of each chain is this end of a path. All are 0 if it
    is an intermediate token that would stand outside of the sequence."""
    role, offset = parts_of(end)
    tokens = positions[:, :, problem.names.index(role)] + offset  # (B, N)
    return (tokens[..., None] == torch.arange(problem.T, device=tokens.device)).float()


def by_head(paths):
    """Return {(layer, head): (path, ...)}, the paths of each head, sorted."""
    heads = {}
    for path in sorted(paths):
        head = path.layer, path.head
        heads[head] = (*heads.get(head, ()), path)
    return heads


def mask_of(paths, problem, positions):
    """Return (B, T, T) bool, True where a reader of these paths reads what it reads."""
    count = torch.zeros(len(positions), problem.T, problem.T, device=positions.device)
    for path in paths:
        reader, read = path.marks(problem, positions)
        count += reader.mT @ read
    return count > 0


def attention_on(pattern, path, problem, positions):
    """Return how much the reader of each chain attends to what it reads along a path, (..., B, N),
    in patterns (..., B, T, T)."""
    reader, read = path.marks(problem, positions)
    return ((reader @ pattern) * read).sum(-1)


def read_report(run):
    """Return the report of find_circuit in a run directory; {} if there is none."""
    return read_file(pathlib.Path(run, "circuit.json"), {})


def paths_in(report):
    """Return {Path: its row} of the circuit in a report."""
    rows = {}
    for row in report.get("paths", []):
        rows[Path(row["layer"], row["head"], row["reader"], row["read"])] = row
    return rows


# ---- a model with parts of what its heads read ablated


class Reference:
    """What the heads of a model read in a batch, by default n held-out sequences: reads {(layer,
    head): (pattern (n, T, T), values (n, T, size))}. It replaces what is ablated."""

    @torch.no_grad()
    def __init__(self, model, flags, batch=None, n=256):
        self.batch = batch or sequences(flags, held_out("means", n, flags.device))
        reads = {}

        def record(pattern, values, head):
            if head in reads:
                raise UserError(f"the model calls f of {head} twice")
            # copies, since a model may use the same memory again
            reads[head] = pattern.float().clone(), values.float().clone()
            return pattern @ values

        every_head = itertools.product(range(flags.layers), range(flags.heads))
        heads = {head: functools.partial(record, head=head) for head in every_head}
        with precision(flags):
            model(self.batch.inputs, heads=heads)
        for head in heads:
            if head not in reads:
                raise UserError(f"the model never calls f of {head}")
        self.reads = dict(sorted(reads.items()))  # in whatever order the model calls them


class PatchedModel:
    """A model on a batch of B sequences, with some of what its heads read replaced by that of a
    reference, by default 256 held-out sequences. Gradients flow unless the caller forbids them.

    aligned: ANOTHER sequence is the one of the same number in the reference, such as a corrupted
    twin; else one is drawn for each. metric: a function of the predictions (B, N, targets*K), whose
    value is returned in place of the losses of every answer (B, N, targets); `lost` needs these."""

    def __init__(self, model, flags, batch, reference=None, aligned=False, metric=None):
        self.model, self.flags, self.batch, self.problem = model, flags, batch, flags.problem
        self.reference = reference or Reference(model, flags)
        self.metric = metric or self.losses_of_answers
        B, n = len(batch.inputs), len(self.reference.batch.inputs)
        drawn = torch.randint(n, (B,), generator=torch.Generator().manual_seed(0))
        self.drawn = torch.arange(B) if aligned else drawn  # for ANOTHER
        # cached, since the next circuit differs in few heads: both ablations of all heads, and 64
        self.ablate = functools.lru_cache(64 + 2 * len(self.reference.reads))(self.ablate)

    def losses_of_answers(self, predictions):
        # (B, N, 1, targets*K): an axis of one, over which partial_losses takes the mean
        answers, targets = predictions[:, :, None], self.batch.targets[:, :, None]
        return partial_losses(answers, targets, self.flags.K)

    def losses(self, heads):
        """Return the losses with these head functions, {(layer, head): f}."""
        with precision(self.flags):
            predictions = self.model(self.batch.inputs, heads=heads)
        return self.metric(predictions)

    @functools.cached_property
    def baseline(self):
        """The losses of the full model."""
        return self.losses({})

    def ablate(self, head, paths, keep=True, by=MEAN):
        """Return the f of a head that replaces (by MEAN or ANOTHER) what tokens read of others
        outside of these paths, a tuple, and the weight on itself of a token without one; with
        keep=False, what they read along these paths, and nothing else."""
        if head not in self.reference.reads:
            raise ValueError(f"the model has no head {head} (both count from 0)")

        # the weights that are replaced in ours, and those of the reference that replace them
        along = mask_of(paths, self.problem, self.batch.positions)  # (B, T, T)
        along_there = mask_of(paths, self.problem, self.reference.batch.positions)  # (n, T, T)
        replaced, replacing = along, along_there
        if keep:
            itself = torch.eye(self.problem.T, dtype=torch.bool, device=along.device)
            replaced, replacing = ~(along | itself), ~(along_there | itself)
            # attention sums to 1, so a token's weight on itself tells that on others: without a
            # path it is replaced too; the value that it weighs stays the token's own
            pathless = itself & ~along.any(-1, keepdim=True)
        kept = ~replaced

        # what each sequence of the reference would write instead; ours take that of their donors,
        # or the mean, which is one for all
        pattern, values = self.reference.reads[head]
        replacement = (pattern * replacing) @ values  # (n, T, size)
        self_weight = pattern.diagonal(dim1=1, dim2=2)[..., None]  # (n, T, 1)
        donor = {ANOTHER: self.drawn, MEAN: slice(None)}[by]
        if by == MEAN:
            replacement, self_weight = replacement.mean(0, True), self_weight.mean(0, True)

        def write(pattern, values):
            pattern = pattern * kept
            if keep:
                pattern = torch.where(pathless, self_weight[donor].to(pattern), pattern)
            return pattern @ values + replacement[donor].to(values)

        return write

    def circuit(self, paths, by=MEAN, changed=None):
        """Return the losses with all outside of these paths ablated; changed {head: f}: instead."""
        groups = dict.fromkeys(self.reference.reads, ())  # of paths, of every head
        groups.update(by_head(paths))
        heads = {head: self.ablate(head, group, by=by) for head, group in groups.items()}
        heads.update(changed or {})
        return self.losses(heads)

    def knock_out(self, paths, by=MEAN):
        """Return the losses of the full model with only these paths ablated."""
        heads = {}
        for head, group in by_head(paths).items():
            heads[head] = self.ablate(head, group, keep=False, by=by)
        return self.losses(heads)

    def lost(self, losses):
        """Return (B, N, targets) 1 where an answer is lost that the full model has, else 0."""
        bound = self.problem.lost_above
        return ((losses > bound) & (self.baseline <= bound)).float()


# ---- candidates: the paths along which the full model attends, the most attended first


def candidates(reference, problem, floor):
    """Return {Path: attention} of all paths with at least `floor`, the largest first. That of a
    plain path is what its reader gives to its own chain, less what it gives to an average other
    one; that of a star is the sum over all chains, and stars come last."""
    # mark the tokens of all roles and, after these, the intermediate tokens around each slot
    ends, named = list(problem.names), len(problem.names)
    for block in problem.blocks:
        size = block.symbols.shape[1]  # so many tokens a slot, and roles for each slot of a chain
        for offset in range(1, REACH + 1):
            ends += [f"{role}-{offset}" for role in block.roles[::size]]  # before its first token
            ends += [f"{role}+{offset}" for role in block.roles[size - 1 :: size]]  # after its last
    positions = reference.batch.positions
    marks = torch.stack([marks_of(end, problem, positions) for end in ends], 2)  # (B, N, ends, T)

    # the mean attention of end i to end j of its own chain, and to end j summed over all chains
    count = len(marks) * problem.N  # of chains in all sequences
    plain, stars = {}, {}
    itself = torch.eye(problem.T, device=marks.device)
    for (layer, head), (pattern, _) in reference.reads.items():
        of_others = pattern * (1 - itself)  # what a token reads of itself has no path
        given = marks @ of_others[:, None]  # (B, N, ends, T) what each end attends to
        own_chain = torch.einsum("bnit,bnjt->ij", given, marks) / count
        all_chains = torch.einsum("bnit,bjt->ij", given, marks.sum(1)) / count
        surplus = own_chain - (all_chains - own_chain) / (problem.N - 1)  # above another chain
        for i, j in (surplus >= floor).nonzero().tolist():
            plain[Path(layer, head, ends[i], ends[j])] = surplus[i, j].item()
        for i, j in (all_chains[:named, :named] >= floor).nonzero().tolist():
            stars[Path(layer, head, ends[i], ends[j] + "*")] = all_chains[i, j].item()

    # keep a path that reads an intermediate token only if a path of an earlier layer writes to it,
    # and a path that writes to one only if a path of a later layer reads it
    def connected(path):
        fed = any(path.read == other.reader and path.layer > other.layer for other in plain)
        used = any(path.reader == other.read and path.layer < other.layer for other in plain)
        return (fed or path.read in problem.names) and (used or path.reader in problem.names)

    while loose := [path for path in plain if not connected(path)]:
        for path in loose:
            del plain[path]

    ranked = {}
    for group in plain, stars:
        for path in sorted(group, key=group.get, reverse=True):
            ranked[path] = group[path]
    return ranked


# ---- search: all candidates, without what can go


def search(few, many, ranked, ablations, limit):
    """Return a set of the ranked paths that is faithful under these ablations on the sequences of
    `many`, and without any one of them is not; None if all paths together are not. What is done on
    the sequences of `few` saves time: it guesses the circuit, and rejects most sets at once."""

    @functools.cache
    def faithful_on_few(paths):  # without standard errors, which are large here
        return all(is_faithful(measure(few, few.circuit(paths, by), 0), limit) for by in ablations)

    @functools.cache
    def faithful(paths):
        if few.circuit(paths, ablations[0]).mean((0, 1)).max() > 2 * limit:
            return False  # by far
        return all(is_faithful(measure(many, many.circuit(paths, by)), limit) for by in ablations)

    if not faithful(frozenset(ranked)):
        return None

    # on `few`: add paths, one or a quarter at a time, until they are faithful, and prune them. If
    # they never are, this is a poor guess, and the search takes longer
    count = 0
    while count < len(ranked) and not faithful_on_few(frozenset(ranked[:count])):
        count += 1 + count // 4
    guess = prune(ranked[:count], 1, faithful_on_few)

    # on `many`: drop first the paths outside of the guess, if possible at once, then those inside;
    # of either kind the least attended first
    ranked = sorted(ranked, key=lambda path: path not in guess)
    return prune(ranked, len(ranked) - len(guess), faithful)


def prune(ranked, size, test):
    """Return what is left of these paths, which pass a test, when none can go alone. They are tried
    from the last one on, `size` at once; after a group that went the next is twice as large, and
    one that could not go is halved, down to one path."""
    paths, before, size = frozenset(ranked), None, max(size, 1)
    while paths != before:  # a path that had to stay may go once others went
        before = paths
        left = [path for path in reversed(ranked) if path in paths]  # to be tried
        while left:
            show(f"search: {len(before) - len(left)} of {len(before)} paths tried")
            group = left[:size]
            if test(paths.difference(group)):
                paths = paths.difference(group)
                left = left[size:]
                size = 2 * len(group)
            elif len(group) > 1:
                size = len(group) // 2
            else:
                left = left[1:]  # this path stays
        size = 1  # later passes mostly confirm
    show()
    return paths


def measure(patched, losses, sigmas=2):
    """Return the intervals of these losses of a circuit (B, N, targets), and of the shares of
    answers that are lost."""
    lost = patched.lost(losses)
    return intervals(losses, patched.flags, sigmas), intervals(lost, patched.flags, sigmas)


def is_faithful(measured, limit):
    """Return whether what `measure` returns is that of a faithful circuit."""
    losses, lost = measured
    return highest_end(losses) < limit and highest_end(lost) <= LOST


def intervals(values, flags, sigmas=2):
    """Return {symbol: [mean, low, high]} of values (B, N, targets), so many standard errors below
    and above, over sequences, since the answers in one are not independent. They are rounded, so
    that the report shows what was compared."""
    values = values.mean(1)
    mean, half = values.mean(0), sigmas * values.std(0) / len(values) ** 0.5
    ends = torch.stack([mean, mean - half, mean + half], 1).tolist()
    rows = {}
    for name, row in zip(flags.target_names, ends, strict=True):
        rows[name] = [round(end, 5) for end in row]
    return rows


def highest_end(rows):
    """Return the highest upper end of such rows."""
    return max(high for _, _, high in rows.values())


def worst_of(rows):
    """Return the symbol with the highest mean as text: x_3 0.061."""
    name = max(rows, key=lambda name: rows[name][0])
    return f"{name} {rows[name][0]:.3f}"


# ---- verdict, on fresh sequences


def verdict(fresh, paths, ablations, threshold):
    """Return what the report says of a circuit as a whole."""
    part, reasons = dict(lost={}), []
    for by in BOTH:
        measured = measure(fresh, fresh.circuit(paths, by))
        part[by], part["lost"][by] = measured
        if by in ablations and not is_faithful(measured, threshold):
            reasons.append(f"with {by} for all else, {failure(measured)}")
    without = measure(fresh, fresh.knock_out(paths))
    part["knocked_out"], _ = without
    if is_faithful(without, threshold):
        reasons.append("the full model does as well without it")
    for k in sorted(set(fresh.flags.target_symbols) - reached(paths, fresh.problem)):
        reasons.append(f"no paths lead from x_{k} to the query")

    kind = "both ablations" if ablations == BOTH else "mean ablation alone"
    said = f"not validated: {'; '.join(reasons)}" if reasons else f"validated under {kind}"
    return dict(part, validated=not reasons, verdict=said)


def failure(measured):
    """Return the symbols of the highest mean loss and the most lost answers as text."""
    losses, lost = measured
    name = max(lost, key=lambda name: lost[name][0])
    return f"{worst_of(losses)}, {lost[name][0]:.1%} of the answers on {name} lost"


def reached(paths, problem):
    """Return the k of all x_k that reach the query along these paths. A role holds the symbol that
    it shows; layer by layer, a path adds to its reader what the token that it reads held before
    (Section 5)."""
    holds = {role: {symbol} for role, symbol in problem.roles.items()}
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        taken = [(path.reader, holds.get(path.token, set())) for path in layer]
        for reader, symbols in taken:
            holds[reader] = holds.get(reader, set()) | symbols
    return holds[problem.names[0]]


def rows_of(shown, paths, ablations, threshold):
    """Return the rows of the report on each path: its attention in the full model; `cost`, how much
    the loss of the full model rises when it is ablated by its mean; `without`, the loss of the
    circuit without it, under the last of the ablations; `spare`, whether the circuit without it is
    still faithful on these sequences."""
    patterns = Reference(shown.model, shown.flags, shown.batch).reads
    rows = []
    for path in progress("paths of the circuit", sorted(paths)):
        pattern, _ = patterns[path.layer, path.head]
        given = attention_on(pattern, path, shown.problem, shown.batch.positions)
        cost = intervals(shown.knock_out([path]) - shown.baseline, shown.flags)
        measured = [measure(shown, shown.circuit(paths - {path}, by)) for by in ablations]
        spare = all(is_faithful(each, threshold) for each in measured)
        without, _ = measured[-1]
        row = dict(path._asdict(), attention=round(given.mean().item(), 4), spare=spare)
        rows.append(dict(row, cost=cost, without=without))
    return rows


def papers_test(few, fresh, paths, threshold):
    """Return steps 5 and 6 of Appendix E, as mean losses. held: heads with paths attend hard along
    them, every other head is uniform or the identity, whichever hurts less on `few`.
    first_uniform: as held, but the head of the first path is uniform. removed: as held, without a
    path of a later layer, one by one. passed: held < threshold, and all of removed >= 0.17."""
    problem, positions, first = fresh.problem, fresh.batch.positions, min(paths)
    allowed = torch.ones(problem.T, problem.T).tril(0 if fresh.flags.causal else problem.T)
    uniform = attend(allowed / allowed.sum(-1, keepdim=True))
    identity = attend(torch.eye(problem.T))

    # the f of a head of which no path is kept: nothing if it has any in the circuit
    default, circuit_heads = {}, by_head(paths)
    for head in few.reference.reads:
        if head in circuit_heads:
            default[head] = lambda _, values: 0 * values
        else:
            default[head] = min((uniform, identity), key=lambda f: few.losses({head: f}).mean())

    def loss(kept, others):
        heads = {**others, **frozen_heads(kept, problem, positions)}
        return round(fresh.losses(heads).mean().item(), 5)

    held = loss(paths, default)
    removed = sorted(loss(paths - {path}, default) for path in paths if path.layer > first.layer)
    first_head = first.layer, first.head
    kept = paths.difference(circuit_heads[first_head])
    first_uniform = loss(kept, {**default, first_head: uniform})
    passed = held < threshold and min(removed, default=0) >= REMOVAL
    return dict(held=held, first_uniform=first_uniform, removed=removed, passed=passed)


def attend(pattern):
    """Return the function of a head that attends like this pattern (B or none, T, T)."""
    return lambda _, values: pattern.to(values) @ values


def frozen_heads(paths, problem, positions):
    """Return {(layer, head): f} for heads with paths, which attend hard: a reader equally to the
    tokens that it reads, all other tokens to nothing."""
    heads = {}
    for head, group in by_head(paths).items():
        mask = mask_of(group, problem, positions).float()
        heads[head] = attend(mask / mask.sum(-1, keepdim=True).clamp(min=1))
    return heads


# ---- the whole story


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, count=1024):
    """Find the circuit of a model, validate it, and return the report: the dict in circuit.json.

    full_model, mean, another sequence, knocked_out: {symbol: [mean, low, high]}, the losses of the
        full model, of the circuit under each ablation, of the full model with its paths ablated
    lost: {ablation: {symbol: [mean, low, high]}}, the shares of lost answers
    paths: as rows_of says, on path_sequences sequences; ablation: that of their `without`
    attended: the candidates of the last try, but for stars, with an attention above 0.5
    validated, verdict, threshold, dtype, sequences; paper: as papers_test says

    model: anything on the CPU that can be called like model.Transformer, with heads={(layer, head):
    f}, and returns predictions (B, N, targets*K) of x_1, x_2, ... at the last N tokens. flags: of a
    run, as train.load gives them, or train.parse_flags([...]). threshold: the loss below which a
    symbol is solved; count: the sequences to validate on. UserError for a run with one chain or
    without some target symbols, or a model that cannot be searched; its own errors keep their
    traceback."""
    flags, limit = flags.replace(device="cpu"), MARGIN * threshold
    if flags.N < 2:
        raise UserError("the run has --N 1, and one chain leaves nothing to look for")
    if flags.target_symbols != list(range(1, flags.problem.symbols)):
        raise UserError("the run predicts some symbols only: choose one that predicts all of them")
    check_model(model, flags)

    # sequences to search on, and fresh ones with fresh donors; those of `shown` are the first
    reference = Reference(model, flags)
    donors = Reference(model, flags, sequences(flags, held_out("means", 512)[256:]))
    search_index, fresh_index = held_out("search", FEW + MANY), held_out("circuits", count)
    few = PatchedModel(model, flags, sequences(flags, search_index[:FEW]), reference)
    many = PatchedModel(model, flags, sequences(flags, search_index[FEW:]), reference)
    fresh = PatchedModel(model, flags, sequences(flags, fresh_index), donors)
    shown = PatchedModel(model, flags, sequences(flags, fresh_index[:SHOWN]), donors)
    full = intervals(fresh.baseline, flags)
    report = dict(validated=False, threshold=threshold, dtype=flags.dtype, sequences=count)
    report.update(path_sequences=len(shown.batch.inputs), full_model=full, lost={}, paths=[])
    if not highest_end(full) < limit:
        said = f"not searched: the full model has {worst_of(full)}, not surely below {limit:.3f}"
        report["verdict"] = said
        return report

    # four tries: under both ablations, then under the mean alone, each with few candidates and then
    # with more. The first validated circuit ends them, or else the last that was found is reported
    found = None
    for ablations, share in itertools.product((BOTH, (MEAN,)), SHARES):
        attention = candidates(reference, flags.problem, share / flags.N)
        ranked = list(attention)
        attended = [path for path in ranked if attention[path] > 0.5 and not path.star]
        report["attended"] = [str(path) for path in attended]
        paths = search(few, many, ranked, ablations, limit)
        if paths is not None:
            found, found_under = paths, ablations
            report["ablation"] = ablations[-1]
            report.update(verdict(fresh, paths, ablations, threshold))
            if report["validated"]:
                break
        elif found is None:  # a later try overwrites it
            said = failure(measure(many, many.circuit(ranked)))
            report["verdict"] = f"not validated: all {len(ranked)} candidates leave {said}"

    # what is said of each path; the paper's test, not of stars, which hard attention would average
    if found:
        report["paths"] = rows_of(shown, found, found_under, threshold)
        if not any(path.star for path in found):
            report["paper"] = papers_test(few, fresh, found, threshold)
    return report


def check_model(model, flags):
    """Raise UserError, in one line, if a model of the user's own cannot be searched."""
    B, T = 16, flags.problem.T
    reference = Reference(model, flags, n=B)
    inputs, shape = reference.batch.inputs, reference.batch.targets.shape
    for head, (pattern, values) in reference.reads.items():
        if pattern.shape != (B, T, T) or values.shape[:2] != (B, T):
            text = f"the model must give f of {head} a pattern (B, T, T) and values (B, T, size)"
            raise UserError(text)

    def predict(heads, inputs=inputs):
        with precision(flags):
            predictions = model(inputs, heads=heads)
        if getattr(predictions, "shape", None) != shape or not predictions.isfinite().all():
            raise UserError(f"the model must return finite predictions, of shape {tuple(shape)}")
        return predictions.float()

    def differ(predictions, others):  # by more than bfloat16 rounds
        return (predictions - others).square().mean() > 1e-3

    # heads that write pattern @ values change nothing
    predictions = predict({})
    if differ(predictions, predict(dict.fromkeys(reference.reads, torch.matmul))):
        raise UserError("the model answers otherwise the second time, when f is pattern @ values")

    # what each f returns is used
    for head, (_, values) in reference.reads.items():
        noise = {head: lambda _, values: values + 100 * torch.randn_like(values)}
        if values.any() and torch.equal(predictions, predict(noise)):
            text = f"the model does not use what f of {head} returns"
            raise UserError(f"{text} (or give it values 0)")

    # nothing goes around the heads: with all of them silent, no answer changes if each chain gets
    # the x_1, x_2, ... of the one before it, at the tokens of its roles
    silent = dict.fromkeys(reference.reads, lambda _, values: 0 * values)
    sequence, others = torch.arange(B)[:, None], inputs.clone()
    for column, k in enumerate(flags.problem.roles.values()):
        if k > 0:  # neither x_0 nor a distractor
            tokens = reference.batch.positions[:, :, column]  # (B, N)
            others[sequence, tokens, : flags.K] = inputs[sequence, tokens.roll(1, 1), : flags.K]
    if differ(predict(silent), predict(silent, others)):
        raise UserError("the model knows other tokens although each f returns 0: let f bring them")


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    n, dtype = report["sequences"], report["dtype"]
    print(f"{LOSS}, {n} fresh sequences, {dtype} [two standard errors below and above]")
    titles = {
        "full_model": "full model",
        MEAN: "all else at its mean",
        ANOTHER: "all else of another",
        "knocked_out": "all but the circuit",
    }
    for key, title in titles.items():
        cells = []
        for name, (mean, low, high) in report.get(key, {}).items():
            cells.append(f"{name} {mean:.4f} [{low:.4f}, {high:.4f}]")
        if key in report["lost"]:
            cells.append(f"at most {highest_end(report['lost'][key]):.1%} of answers lost")
        if cells:
            print(f"  {title:20s}  {'  '.join(cells)}")

    if report["paths"]:
        print(f"\nthe worst symbol of {report['path_sequences']} of them, if one path is ablated:")
        circuit = f"circuit without it ({report['ablation']})"
        print(f"path                 attention   full model loses   {circuit}")
    for path, row in paths_in(report).items():
        cost = max(mean for mean, _, _ in row["cost"].values())
        without = max(mean for mean, _, _ in row["without"].values())
        spare = "  (they can do without)" if row["spare"] else ""
        print(f"{path!s:21s}{row['attention']:9.2f}{cost:19.3f}{without:21.3f}{spare}")
    if "paper" in report:
        held, passed = report["paper"]["held"], report["paper"]["passed"]
        print(f"\nthe paper's test: loss {held:.3f}, passed: {passed}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
    threshold, count = number(float, 1e-6, 0.5), number(int, 100, 10**4)
    p.add_argument("--threshold", type=threshold, default=0.05, help="loss of a solved symbol")
    p.add_argument("--sequences", type=count, default=1024, help="fresh ones to validate on")
    with program("ablate.py"):
        args = p.parse_args()
        keep_freed_memory()
        model, flags = load(args.run)
        report = find_circuit(model, flags, args.threshold, args.sequences)
        write_file(args.run / "circuit.json", report)
        print_report(report)
        print(f"circuit: {args.run / 'circuit.json'}")


if __name__ == "__main__":
    main()
