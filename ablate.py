"""Find the circuit of a trained transformer, and validate it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A path (the paper's word; others say attention edge) is (layer, head, reader, read), all counted
from 0. L6H0: q -> 1b says that in layer 6, head 0, the query reads token 1b of its own chain; the
paper's arrow points to what is read. q -> 1b* is a star: the query reads the tokens 1b of all
chains. A circuit is a set of paths. What heads read outside of it is ablated: replaced by its mean
over reference sequences at that position, or by what all heads read in another one, drawn at
random. What a token reads of itself moves nothing between tokens, and stays. Attention is computed
under the ablation: so one loss tells both whether the paths carry the answer and whether they
suffice to find what they read. A validated circuit is

    faithful     with all else ablated, the loss of every symbol stays below 0.05, and at most 1% of
                 the sequences lose a symbol that the full model has
    minimal      without any one path it is not, on the sequences of the search
    connected    along its paths every symbol can reach the query (Section 5)

It is complete if it is faithful under both ablations, else validated at the mean alone. Losses are
mean squared errors over sequences, of which the upper end, two standard errors above, is compared.
"""

import functools
import itertools
import json
import pathlib
import re
from typing import NamedTuple

from data import UserError, command_line, held_out, number, partial_losses, program, progress
from train import keep_freed_memory, load, precision, read_file, sequences, write_file

import torch


ATTENDED = 0.4  # of 1/N: by how much more a reader attends to its own chain, or at all for a star
REACH = 4  # tokens from the slot of a chain within which intermediate tokens are looked for
LOST = 0.01  # of the sequences may lose a symbol
MARGIN = 0.9  # of the threshold is the limit of the search, which fresh sequences then keep
MATTERS = 0.01  # a rise of a symbol's loss from which on a path is a candidate
SIZES = 64, 256, 1024  # sequences to reject a circuit, to search, and to end the search on
REMOVAL = 0.17  # the lowest loss after the removal of a path in Appendix E
MEAN, ANOTHER, NOTHING = "the mean", "another sequence", "nothing"  # instead of the ablated


# ---- paths


class Path(NamedTuple):
    """In this layer and head, the token `reader` reads the token `read`. Each has the name of its
    role, 3b; an intermediate token is 3b+1, so many after it; and 3b* is read in all chains."""

    layer: int
    head: int
    reader: str
    read: str

    def __str__(self):
        return "L{}H{}: {} -> {}".format(*self)

    def pairs(self, task, positions):
        """Return the numbers of the sequences, the tokens of reader and read, and whether both
        exist. They broadcast to (B, N, 1) or, for a star, to (B, N, N)."""
        sequence = torch.arange(len(positions), device=positions.device)[:, None, None]
        (reader, exists), (read, exists_too) = (
            [x[..., None] for x in tokens_of(end, task, positions)] for end in self[2:]
        )
        if self.read.endswith("*"):
            read, exists_too = read.mT, exists_too.mT  # (B, 1, N)
        return sequence, reader, read, exists & exists_too


def parts_of(end):
    """Return (role, offset) of an end of a path: ("3b", 1) of 3b+1, ("3b", 0) of 3b*."""
    role, offset = re.fullmatch(r"(\w+)([+-]\d+)?\*?", end).groups()
    return role, int(offset or 0)


def tokens_of(end, task, positions):
    """Return the token of each chain (B, N), and a mask (B, N) of where it exists, from the
    positions of all roles (B, N, roles)."""
    role, offset = parts_of(end)
    tokens = positions[:, :, task.names.index(role)] + offset
    return tokens.clamp(0, task.T - 1), (tokens >= 0) & (tokens < task.T)


def read_report(run):
    """Return the report of find_circuit in a run directory; {} if there is none."""
    file = pathlib.Path(run, "circuit.json")
    return read_file(file) if file.exists() else {}


def paths_in(report, kind="paths"):
    """Return {Path: its row} of the circuit in a report; with kind="candidates", of all that the
    search began with and that matter."""
    return {Path(*(row[name] for name in Path._fields)): row for row in report.get(kind, [])}


# ---- attention along paths


def mask_of(paths, task, positions):
    """Return (B, T, T) bool, True where a reader of these paths reads what it reads."""
    named = torch.zeros(len(positions), task.T, task.T, device=positions.device)
    for path in paths:
        *index, exist = path.pairs(task, positions)
        named.index_put_(index, exist.float(), accumulate=True)
    return named > 0


def attention_on(pattern, path, task, positions):
    """Return how much the reader of each chain attends along a path in patterns (..., B, T, T), as
    (..., B, N, 1), or (..., B, N, N) to each chain along a star; 0 where an end does not exist."""
    *index, exist = path.pairs(task, positions)
    return pattern[(..., *index)] * exist


def by_head(paths):
    """Return {(layer, head): [its paths]}."""
    groups = itertools.groupby(sorted(paths), key=lambda path: path[:2])
    return {head: [*group] for head, group in groups}


def frozen_heads(paths, task, positions):
    """Return {(layer, head): f} for heads with paths, which attend hard: every reader to what it
    reads alone, to each of it equally, and all other tokens to nothing."""
    heads = {}
    for head, group in by_head(paths).items():
        mask = mask_of(group, task, positions).float()
        pattern = mask / mask.sum(-1, keepdim=True).clamp(min=1)
        heads[head] = lambda _, values, pattern=pattern: pattern.to(values) @ values
    return heads


# ---- a model with parts of it ablated


class Reference:
    """What the heads of a model read in n held-out sequences, which replaces what is ablated:
    reads {(layer, head): (pattern (n, T, T), values (n, T, size))}."""

    @torch.no_grad()
    def __init__(self, model, flags, n=256):
        self.batch = sequences(flags, held_out("means", n, flags.device))
        # in this order, in whichever a model calls them
        self.reads = dict.fromkeys(itertools.product(range(flags.layers), range(flags.heads)))

        def record(pattern, values, head):
            self.reads[head] = pattern.float(), values.float()
            return pattern @ values

        heads = {head: functools.partial(record, head=head) for head in self.reads}
        with precision(flags):
            model(self.batch.inputs, heads)


class PatchedModel:
    """A model on one batch, with some of what its heads read replaced by that of a reference, by
    default 256 held-out sequences. Losses are the squared errors of each sequence, (B, symbols)."""

    def __init__(self, model, flags, batch, reference=None):
        self.model, self.flags, self.batch, self.task = model, flags, batch, flags.problem
        self.reference = reference or Reference(model, flags)
        generator, count = torch.Generator().manual_seed(0), len(self.reference.batch.inputs)
        self.drawn = torch.randint(count, (len(batch.inputs),), generator=generator)  # for ANOTHER
        self.baseline = self.losses({})  # of the full model

    @torch.no_grad()
    def losses(self, heads):
        """Return the losses with these head functions, {(layer, head): f}."""
        with precision(self.flags):
            predictions = self.model(self.batch.inputs, heads)
        return partial_losses(predictions, self.batch.targets, self.flags.K)

    def ablate(self, head, paths, keep=True, by=MEAN):
        """Return a function for a head that ablates what it reads, except along these paths and of
        the token itself; with keep=False, only along these paths. by: MEAN, ANOTHER or NOTHING."""
        batches = self.batch, self.reference.batch
        here, there = (mask_of(paths, self.task, batch.positions) for batch in batches)
        itself = torch.eye(self.task.T, dtype=torch.bool, device=here.device)
        here, there = (here | itself, there | itself) if keep else (~here, ~there)

        pattern, values = self.reference.reads[head]
        ablated = (pattern * ~there) @ values  # (R, T, size)
        instead = ablated[self.drawn] if by == ANOTHER else ablated.mean(0) * (by == MEAN)
        return lambda pattern, values: (pattern * here) @ values + instead.to(values)

    def circuit(self, paths, by=MEAN, changed=None):
        """Return the losses with all outside of these paths ablated, and with changed {head: f}."""
        groups, reads = by_head(paths), self.reference.reads
        heads = {head: self.ablate(head, groups.get(head, ()), by=by) for head in reads}
        return self.losses(heads | (changed or {}))

    def knock_out(self, paths):
        """Return the losses of the full model with only these paths ablated."""
        groups = by_head(paths).items()
        return self.losses({head: self.ablate(head, group, keep=False) for head, group in groups})

    def lost(self, losses):
        """Return the share of sequences that lose a symbol that the full model has."""
        bound = self.task.lost_above
        return ((losses > bound) & (self.baseline <= bound)).any(1).float().mean().item()


# ---- the search


def attended(reference, task):
    """Return ({Path, ...}, {star, ...}): where the full model attends more to its own chain than to
    others, or much to a role of all. Intermediate tokens must have read before they are read."""
    # all roles, and the intermediate tokens before and after their slots
    ends = [*task.names]
    for block in task.blocks:
        size = block.symbols.shape[1]
        for place, role in enumerate(block.roles):
            if place % size == 0:
                ends += [f"{role}{-offset}" for offset in range(1, REACH + 1)]
            if place % size == size - 1:
                ends += [f"{role}+{offset}" for offset in range(1, REACH + 1)]

    heads, patterns = [*reference.reads], torch.stack([p for p, _ in reference.reads.values()])
    N, plain, stars = task.N, set(), set()
    for reader, read in progress("pairs of ends", [*itertools.product(ends, ends)]):
        # (heads, chains of the reader, chains of what it reads); to the own chain, to all others
        star = Path(0, 0, reader, read + "*")
        given = attention_on(patterns, star, task, reference.batch.positions).mean(1)
        own = given.diagonal(dim1=1, dim2=2).mean(1)
        others = given.sum(2).mean(1) - own

        surplus = (own - others / (N - 1)) * (reader != read)
        for index in (surplus >= ATTENDED / N).nonzero().flatten().tolist():
            plain.add(Path(*heads[index], reader, read))
        share = others + own * (reader != read)
        if reader in task.names and read in task.names:
            for index in (share >= ATTENDED / N).nonzero().flatten().tolist():
                stars.add(Path(*heads[index], reader, read + "*"))

    def idle(path):
        fed = {*task.names, *(other.reader for other in plain if other.layer < path.layer)}
        used = {*task.names, *(other.read for other in plain if other.layer > path.layer)}
        return path.read not in fed or path.reader not in used

    while found := {path for path in plain if idle(path)}:
        plain -= found
    return plain, stars


def prune(ranked, faithful, dropped=()):
    """Drop `dropped` together, then the first paths first, while any can go; return the rest."""
    remaining, groups, before = frozenset(ranked), [ranked, dropped], None
    while remaining != before:
        before = remaining
        while groups:  # drop all of a group, or else of each half of it what can go
            group = [path for path in groups.pop() if path in remaining]
            if faithful(remaining - {*group}):
                remaining -= {*group}
            elif half := len(group) // 2:
                groups += group[half:], group[:half]
        groups = [ranked]
    return remaining


def reached(paths, task):
    """Return the set of k for which x_k can reach the query along these paths, if every role starts
    with the symbol that it shows, and takes all that a token holds when it reads it (Section 5)."""
    holds = {role: {symbol} for role, symbol in task.roles.items()}
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        taken = [(path.reader, holds.get(path.read.rstrip("*"), set())) for path in layer]
        for reader, symbols in taken:
            holds[reader] = holds.get(reader, set()) | symbols
    return holds[task.names[0]]


# ---- what is said of a circuit


def intervals(losses, flags):
    """Return {symbol: [mean, mean - 2 errors, mean + 2 errors]} of losses (sequences, symbols)."""
    mean, error = losses.mean(0), losses.std(0) / len(losses) ** 0.5
    rows = torch.stack([mean, mean - 2 * error, mean + 2 * error], 1).tolist()
    return dict(zip(flags.target_names, rows, strict=True))


def worst_of(rows):
    """Return the symbol with the highest mean as text: x_3 0.061."""
    name = max(rows, key=lambda name: rows[name][0])
    return f"{name} {rows[name][0]:.3f}"


def is_faithful(patched, losses, limit):
    """Return whether these losses of a circuit are those of a faithful one."""
    highest = max(high for *_, high in intervals(losses, patched.flags).values())
    return highest < limit and patched.lost(losses) <= LOST


def passes(patched, paths, ablations, limit):
    """Return whether a circuit is faithful under each of these ablations."""
    return all(is_faithful(patched, patched.circuit(paths, by), limit) for by in ablations)


def papers_test(patched, paths, threshold):
    """Return steps 5 and 6 of Appendix E: heads with paths attend hard along them alone, others are
    uniform or the identity, whichever costs the full model less; then every later path is removed,
    and the first useful head is made uniform. passed: below the threshold, then at least 0.17."""
    task, positions, first = patched.task, patched.batch.positions, min(paths)
    allowed = torch.ones(task.T, task.T).tril(0 if patched.flags.causal else task.T)
    uniform, identity = (
        lambda _, values, pattern=pattern: pattern.to(values) @ values
        for pattern in (allowed / allowed.sum(-1, keepdim=True), torch.eye(task.T))
    )
    heads = dict.fromkeys(by_head(paths), lambda _, values: 0 * values)  # if no path is left
    for head in progress("heads without a path", [*{*patched.reference.reads} - heads.keys()]):
        heads[head] = min((uniform, identity), key=lambda f: patched.losses({head: f}).mean())

    def loss(paths, changed=None):
        useful = frozen_heads(paths, task, positions)
        return patched.losses(heads | useful | (changed or {})).mean().item()

    held = loss(paths)
    removed = sorted(loss(paths - {path}) for path in paths if path.layer > first.layer)
    passed = held < threshold and all(mse >= REMOVAL for mse in removed)
    first_uniform = loss(paths, {first[:2]: uniform})
    return dict(held=held, first_uniform=first_uniform, removed=removed, passed=passed)


@torch.no_grad()
def check_model(model, flags):
    """Raise UserError, in one line, if a model cannot be called as find_circuit calls it."""
    B, T = 16, flags.problem.T

    def predict(heads):
        with precision(flags):
            return model(reference.batch.inputs, heads)

    try:
        reference = Reference(model, flags, B)
        predictions, again = predict({}), predict({})
        shape = (*reference.batch.targets.shape,)
        if getattr(predictions, "shape", None) != shape:
            raise UserError(f"the model must return its predictions, a tensor of shape {shape}")
        if not predictions.isfinite().all():
            raise UserError("the model returns predictions that are not finite")
        if not torch.allclose(predictions.float(), again.float(), atol=0.01):
            raise UserError("the model answers otherwise the second time: call eval(), no dropout")

        # each head alone: what is given to its function, and whether what it returns is used
        for head, read in reference.reads.items():
            f = "f of layer {}, head {}".format(*head)
            if not read:
                raise UserError(f"the model never calls {f}")
            pattern, values = read
            if pattern.shape != (B, T, T) or values.shape[:2] != (B, T):
                raise UserError(f"the model must give {f} a pattern (B, T, T), values (B, T, size)")
            other = predict({head: lambda _, values: values + 100 * torch.randn_like(values)})
            if values.any() and torch.equal(other, predictions):
                raise UserError(f"the model does not use what {f} returns (or give it values 0)")
    except UserError:
        raise
    except Exception as error:  # a model of others may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"the model cannot be called as find_circuit says: {reason}") from None


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, count=1024):
    """Find the circuit of a model, validate it, and return the report: the dict in circuit.json.

    model: anything on the CPU that can be called like model.Transformer, with heads={(layer, head):
    f}, and returns predictions (B, N, symbols*K) of x_1, x_2, ... at the last N tokens. flags: of a
    run, as train.load gives them, or train.parse_flags([...]). threshold: the loss below which a
    symbol is solved; count: the sequences to validate on. UserError for a run in which no circuit
    can be found, or a model that cannot be called so."""
    if flags.N < 2:
        raise UserError("the run has --N 1, and one chain leaves nothing to look for")
    if flags.target_symbols != [*range(1, flags.problem.symbols)]:
        raise UserError("the run predicts some symbols only: choose one that predicts all of them")
    flags, task = flags.replace(device="cpu"), flags.problem
    check_model(model, flags)

    # sequences to search on, and fresh ones to validate on
    reference = Reference(model, flags)
    index = [*held_out("search", sum(SIZES)).split(SIZES), held_out("circuits", count)]
    few, many, most, fresh = (
        PatchedModel(model, flags, sequences(flags, examples), reference) for examples in index
    )
    full = intervals(fresh.baseline, flags)
    report = dict(validated=False, threshold=threshold, sequences=count, full_model=full, paths=[])
    if not all(mean < threshold for mean, _, _ in full.values()):
        return report | dict(verdict=f"not searched: the full model has {worst_of(full)}")

    # all paths along which it attends, and the most ablations that they pass: the first that do
    (plain, stars), both, limit = attended(reference, task), (MEAN, ANOTHER), MARGIN * threshold
    for ablations, paths in itertools.product((both, both[:1]), (plain, plain | stars)):
        if passes(most, paths, ablations, limit):
            break
    else:
        losses = most.circuit(paths)
        left = f"{worst_of(intervals(losses, flags))}, {most.lost(losses):.1%} of sequences lost"
        verdict = f"not faithful: all {len(paths)} paths along which the model attends leave {left}"
        if enough := [by for by in (ANOTHER, NOTHING) if passes(most, paths, [by], limit)]:
            verdict += f"; the mean is at fault, since with {enough[0]} in its place they suffice"
        return report | dict(verdict=verdict)

    # drop stars first, then what costs the full model least: these lists compare by their means
    costs = {}
    for path in progress("paths along which it attends", sorted(paths)):
        costs[path] = intervals(few.knock_out([path]) - few.baseline, flags)

    def hopeless(paths):
        return few.circuit(paths).mean(0).max() > 2 * threshold

    def faithful(paths, patched):
        return not hopeless(paths) and passes(patched, paths, ablations, limit)

    ranked, dropped = sorted(costs, key=lambda p: ("*" not in p.read, max(costs[p].values()))), []
    for patched in many, most:
        decide = functools.cache(functools.partial(faithful, patched=patched))
        paths = prune(ranked, decide, dropped)
        dropped = [path for path in ranked if path not in paths]  # all at once on more sequences

    # what is said of each path that matters, and of each path of the circuit
    rows = {path: path._asdict() | dict(necessary=costs[path]) for path in costs}
    matters = [path for path in costs if max(costs[path].values())[0] >= MATTERS or path in paths]
    report["candidates"], spare = [rows[path] for path in matters], []
    for path in progress("paths of the circuit", sorted(paths)):
        given = attention_on(reference.reads[path[:2]][0], path, task, reference.batch.positions)
        fewer = paths - {path}
        patched = few if hopeless(fewer) else fresh
        minimal = intervals(patched.circuit(fewer, ablations[-1]), flags)
        attention = given.sum(-1).mean().item()
        report["paths"].append(rows[path] | dict(attention=attention, minimal=minimal))
        if passes(patched, fewer, ablations, limit):
            spare.append(f"fresh sequences can do without {path}")

    # the verdict, on fresh sequences
    missing = {*flags.target_symbols} - reached(paths, task)
    report["lost"], reasons = {}, [f"no path leads to x_{k}" for k in sorted(missing)]
    for by, name in (MEAN, "faithful"), (ANOTHER, "resampled"):
        losses = fresh.circuit(paths, by)
        report[name], report["lost"][name] = intervals(losses, flags), fresh.lost(losses)
        if by in ablations and not is_faithful(fresh, losses, threshold):
            text = f"{worst_of(report[name])}, {report['lost'][name]:.1%} of sequences lost"
            reasons.append(f"not faithful with {by} for all else: {text}")
    kind = "complete" if ablations == both else "at the mean alone"
    verdict = "; ".join(reasons or [f"validated, {kind}", *spare])
    report |= dict(validated=not reasons, verdict=verdict)
    if paths:
        report["paper"] = papers_test(few, paths, threshold)
    return report | dict(attention_sequences=len(reference.batch.inputs))


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    print(f"MSE on {report['sequences']} fresh sequences, with two standard errors")
    titles = dict(full_model="full model", faithful="all else at its mean", resampled="of another")
    for key in [key for key in titles if key in report]:
        form = "{} {:.4f} [{:.4f}, {:.4f}]".format
        cells = [form(name, *row) for name, row in report[key].items()]
        lost = f"  {report['lost'][key]:.1%} lost" if key in report.get("lost", {}) else ""
        print(f"  {titles[key]:22s}{'  '.join(cells)}{lost}")
    if report["paths"]:
        print("\npath                 attention   full model loses   MSE of the circuit without it")
        for path, row in paths_in(report).items():
            rise, loss = (max(row[key].values())[0] for key in ("necessary", "minimal"))
            print(f"{path!s:21s}{row['attention']:9.2f}{rise:19.3f}{loss:32.3f}")
        print("\nthe paper's test: MSE {held:.3f}, passed: {passed}".format(**report["paper"]))
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
    threshold, count = number(float, 1e-6, 1), number(int, 100, 10**5)
    p.add_argument("--threshold", type=threshold, default=0.05, help="loss of a solved symbol")
    p.add_argument("--sequences", type=count, default=1024, help="fresh ones to validate on")
    args = p.parse_args()
    with program("ablate.py"):
        keep_freed_memory()
        model, flags = load(args.run)
        text = json.dumps(find_circuit(model, flags, args.threshold, args.sequences))
        report = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.5g}"))
        write_file(args.run / "circuit.json", report)
        print_report(report)
        print(f"circuit: {args.run / 'circuit.json'}")


if __name__ == "__main__":
    main()
