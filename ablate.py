"""Find the circuit of a trained transformer, and validate it (Section 8, Appendix E).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A path (the paper's word; others say attention edge) is (layer, head, source, target), all counted
from 0. L6H0: q -> 1b says that in layer 6, head 0, the query reads token 1b of its own chain. A
circuit is a set of paths.

There is one ablation: what a head reads outside of the paths is replaced by its mean over reference
sequences at that position, which says nothing about the sequence at hand. What a token reads of
itself moves nothing between tokens, and stays. Attention is what the model computes under the
ablation. So one loss tells both whether the paths carry the answer and whether they suffice to find
their targets. A circuit is validated if it is

    faithful     with all else ablated, the loss of every symbol stays below 0.05
    minimal      without any one of its paths it is not faithful
    connected    along its paths every symbol can reach the query (Section 5)

The report also gives what decides nothing but helps to judge a path: its attention, and how much
the full model loses if only this path is ablated (necessary). Losses are mean squared errors over
sequences, with two standard errors of the mean on either side.

    model, flags = train.load("results/A")
    patched = PatchedModel(model, flags, batch)              # a model on one batch of sequences
    patched.circuit(paths)                                   # its losses with all else ablated
    patched.knock_out(paths)                                 # its losses with these paths ablated
    paths = paths_in(read_report("results/A"), flags.problem)  # the circuit that was found
"""

import functools
import itertools
import json
import pathlib
import re
from typing import NamedTuple

import torch

from data import UserError, command_line, held_out, partial_losses, program
from train import load, precision, sequences, write_text


ATTENDED = 0.4  # of 1/N: by how much more a source attends to its own chain than to others
REACH = 4  # tokens from the slot of a chain within which intermediate tokens are looked for
MATTERS = 0.01  # a rise of a symbol's loss from which on a path counts as a candidate
FEW, MANY = 64, 512  # sequences of the search; what is found is validated on fresh ones


# ---- paths


class End(NamedTuple):
    """A token of a chain: the one with a role or, with an offset, an intermediate token so many
    tokens after it (before it, if negative)."""

    role: int  # an index of task.roles
    offset: int = 0

    def name(self, task):
        """Return 3b, 3b+1, ..."""
        return task.names[self.role] + (f"{self.offset:+d}" if self.offset else "")

    def tokens(self, task, positions):
        """Return the token of each chain (B, N), and a mask (B, N) of where it exists, from the
        positions of all roles (B, N, roles)."""
        tokens = positions[:, :, self.role] + self.offset
        return tokens.clamp(0, task.T - 1), (tokens >= 0) & (tokens < task.T)


class Path(NamedTuple):
    """In this layer and head, the token at `source` reads the token at `target`."""

    layer: int
    head: int
    source: End
    target: End

    def tokens(self, task, positions):
        """Return the tokens of source and target and a mask of where both exist, (B, N) each."""
        (source, exists), (target, exists_too) = (end.tokens(task, positions) for end in self[2:])
        return source, target, exists & exists_too


def to_row(path, task):
    """Return a path as it is written into JSON."""
    source, target = path.reader.name(task), path.read.name(task)
    return dict(layer=path.layer, head=path.head, reader=source, read=target)


def path_from(row, task):
    """Return the Path that to_row wrote."""
    ends = []
    for name in (row["reader"], row["read"]):
        role, offset = re.fullmatch(r"(\w+)([+-]\d+)?", name).groups()
        ends.append(End(task.names.index(role), int(offset or 0)))
    return Path(row["layer"], row["head"], *ends)


def path_name(path, task):
    """Return a path as it is printed: L6H0: q -> 1b."""
    return "L{layer}H{head}: {reader} -> {read}".format(**to_row(path, task))


def read_report(run):
    """Return the report of find_circuit in a run directory; {} if there is none."""
    file = pathlib.Path(run, "circuit.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def paths_in(report, task, kind="paths"):
    """Return {Path: its row} of the circuit in a report, {} if it holds none; with
    kind="candidates" of all paths that matter to the full model."""
    return {path_from(row, task): row for row in report.get(kind, [])}


# ---- attention along paths


def mask_of(paths, task, positions):
    """Return (B, T, T) bool, True where a source of these paths reads a target of its own chain."""
    shape = len(positions), task.T, task.T
    mask = torch.zeros(shape, dtype=torch.bool, device=positions.device)
    for path in paths:
        source, target, exist = path.tokens(task, positions)
        sequence, chain = exist.nonzero(as_tuple=True)
        mask[sequence, source[sequence, chain], target[sequence, chain]] = True
    return mask


def attention_on(pattern, path, task, positions):
    """Return (B, N), how much the source of each chain attends to its target in one head's pattern
    (B, T, T); 0 where one of them does not exist."""
    source, target, exist = path.tokens(task, positions)
    return pattern[torch.arange(len(positions))[:, None], source, target] * exist


def by_head(paths):
    """Return {(layer, head): [its paths]}."""
    heads = {}
    for path in paths:
        heads.setdefault(path[:2], []).append(path)
    return heads


# ---- a model with parts of it ablated


class PatchedModel:
    """A model on one batch, with some of what its heads read ablated to the mean.

    reference: a PatchedModel of the same model, over whose batch the means are taken; by default
    over 256 held-out sequences. Losses are (B, symbols): the squared error of each sequence on each
    symbol."""

    def __init__(self, model, flags, batch, reference=None):
        self.model, self.flags, self.batch, self.task = model, flags, batch, flags.problem
        self.heads = [*itertools.product(range(flags.layers), range(flags.heads))]
        self.itself = torch.eye(self.task.T, dtype=torch.bool)
        self.reference, self.cache = reference, {}
        if reference is None:
            means = sequences(flags, held_out("means", 256))
            self.reference = PatchedModel(model, flags, means, reference=self)

    @functools.cached_property
    def baseline(self):
        """The losses of the full model."""
        return self.losses({})

    @functools.cached_property
    def reads(self):
        """{(layer, head): (pattern (B, T, T), values (B, T, size))} of the full model."""
        reads = {}

        def record(pattern, values, head):
            reads[head] = pattern.float(), values.float()
            return pattern @ values

        self.losses({head: functools.partial(record, head=head) for head in self.heads})
        return reads

    @torch.no_grad()
    def losses(self, heads):
        """Return the losses with these head functions, {(layer, head): f}."""
        with precision(self.flags):
            predictions = self.model(self.batch.inputs, heads)
        return partial_losses(predictions, self.batch.targets, self.flags.K)

    def attention(self):
        """Return {(layer, head): pattern (B, T, T)} of the full model."""
        return {head: pattern for head, (pattern, _) in self.reads.items()}

    def mask(self, paths):
        """Return mask_of these paths in this batch."""
        key = frozenset(path[2:] for path in paths)  # heads with the same paths share it
        if key not in self.cache:
            self.cache[key] = mask_of(paths, self.task, self.batch.positions)
        return self.cache[key]

    def ablate(self, head, paths, keep=True):
        """Return a function for a head in which all that it reads is ablated to its mean, but for
        what it reads along these paths and of the token itself; or, with keep=False, in which only
        these paths are ablated."""
        key = head, frozenset(paths), keep
        if key not in self.cache:
            mask, there = (
                patched.mask(paths) | self.itself if keep else ~patched.mask(paths)
                for patched in (self, self.reference)
            )
            pattern, values = self.reference.reads[head]
            self.cache[key] = mask, ((pattern * ~there) @ values).mean(0)  # (T, size)
        mask, mean = self.cache[key]
        return lambda pattern, values: (pattern * mask) @ values + mean.to(values)

    def circuit(self, paths):
        """Return the losses with everything outside of these paths ablated."""
        groups = by_head(paths)
        return self.losses({head: self.ablate(head, groups.get(head, ())) for head in self.heads})

    def knock_out(self, paths, frozen=False):
        """Return the losses of the full model with only these paths ablated. frozen: the attention
        of all heads stays as in the full model, so that no other head can take over."""
        heads = {head: self.ablate(head, group, False) for head, group in by_head(paths).items()}
        if frozen:
            for head, (pattern, _) in self.reads.items():
                write = heads.get(head, torch.matmul)
                heads[head] = lambda _, values, f=write, p=pattern: f(p.to(values), values)
        return self.losses(heads)


# ---- the search


def places_of(task):
    """Return [End, ...]: all roles, and the intermediate tokens up to REACH from their slots."""
    places = []
    for number, role in enumerate(task.roles):
        first = -REACH if role.place == 0 else 0
        last = REACH if role.place == task.blocks[role.block].size - 1 else 0
        places += [End(number, offset) for offset in range(first, last + 1)]
    return places


def preference(patterns, source, target, task, positions):
    """Return (heads, B), how much more a source attends to the target in its own chain than to that
    in other chains, in the mean over chains; patterns (heads, B, T, T)."""
    sequence = torch.arange(len(positions))[:, None]
    (reading, exists), (read, exists_too) = (
        place.tokens(task, positions) for place in (source, target)
    )
    rows = patterns[:, sequence, reading] * exists[..., None]  # (heads, B, N, T)
    index = read[:, None].expand(len(patterns), -1, task.N, -1)
    given = rows.gather(3, index) * exists_too[:, None]  # (heads, B, N source, N target)
    same = given.diagonal(dim1=2, dim2=3).sum(2)
    others = (given.sum((2, 3)) - same) / max(1, task.N - 1)
    return (same - others) / task.N


def attended(patched):
    """Return [Path, ...] along which the full model attends. A path may lead to an intermediate
    token, say from q to 3b+1, if in an earlier layer that token has read something of the chain."""
    task, positions = patched.task, patched.batch.positions
    patterns = torch.stack([*patched.attention().values()])
    places, paths = places_of(task), set()
    sources = [place for place in places if not place.offset]
    for source in sources:  # grows while intermediate tokens are found
        for target in places:
            surplus = preference(patterns, source, target, task, positions).mean(1)
            for number in (surplus >= ATTENDED / task.N).nonzero().flatten().tolist():
                if source != target:
                    paths.add(Path(*patched.heads[number], source, target))
                    sources += [target] if target not in sources else []

    # what an intermediate token holds of the chain it has read before
    def holds(path):
        earlier = (other for other in paths if other.reader == path.read)
        return not path.read.offset or any(other.layer < path.layer for other in earlier)

    while empty := {path for path in paths if not holds(path)}:
        paths -= empty
    return sorted(paths)


def prune(costs, protected, faithful):
    """Return the frozenset of paths that is left of {path: (symbols,) cost} when paths are dropped,
    the cheapest first, as long as faithful(paths). protected: paths that are never dropped."""
    remaining = frozenset(costs)

    def drop(group):
        """Drop all of a group, or else of each half of it what can go."""
        nonlocal remaining
        if faithful(remaining - {*group}):
            remaining -= {*group}
        elif len(group) > 1:
            drop(group[: len(group) // 2])
            drop(group[len(group) // 2 :])

    before = None
    while remaining != before:
        before = remaining
        group = sorted(remaining - protected, key=lambda path: costs[path].max())
        if group:
            drop(group)
    return remaining


def reached(paths, task):
    """Return the set of k for which x_k can reach the query along these paths, if every role starts
    with the symbol that it shows, and a source takes all that its target holds (Section 5)."""
    holds = {End(number): {role.symbol} for number, role in enumerate(task.roles)}
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        taken = [(path.reader, holds.get(path.read, set())) for path in layer]
        for source, symbols in taken:
            holds[source] = holds.get(source, set()) | symbols
    return holds[End(0)]


# ---- the circuit and what is said of it


def intervals(losses, flags):
    """Return {symbol: [mean, low, high]}, two standard errors on either side of the mean, of losses
    (sequences, symbols)."""
    mean, error = losses.mean(0), losses.std(0) / len(losses) ** 0.5
    rows = torch.stack([mean, mean - 2 * error, mean + 2 * error], 1).tolist()
    return dict(zip(flags.target_names, rows, strict=True))


def is_below(threshold, losses):
    """Return whether all losses (sequences, symbols) are two standard errors below a threshold."""
    error = losses.std(0) / len(losses) ** 0.5
    return bool((losses.mean(0) + 2 * error < threshold).all())


@torch.no_grad()
def find_circuit(model, flags, threshold=0.05, count=1024):
    """Find the circuit of a model, validate it, and return the report, the dict that main writes
    into circuit.json.

    model: anything on the CPU that can be called like model.Transformer: model(x, heads={(layer,
    head): f}) returns predictions (B, N, symbols*K) of x_1, x_2, ... at the last N tokens;
    f(pattern (B, T, T), values (B, T, size)) -> (B, T, size) is what the head writes instead of
    pattern @ values. flags: of a run, as train.load gives them, or train.parse_flags([...]).
    threshold: the loss below which a symbol is solved; count: the sequences to validate on.
    UserError for a run in which no circuit can be found."""
    if flags.N < 2:
        raise UserError("the run has --N 1, and one chain leaves nothing to look for")
    if flags.target_symbols != [*range(1, flags.problem.symbols)]:
        raise UserError("the run predicts some symbols only: choose one that predicts all of them")
    flags, task = flags.replace(device="cpu"), flags.problem
    report = dict(validated=False, verdict="", threshold=threshold, candidates=[], paths=[])

    # few and many sequences to search on, and fresh ones to validate on; all with the same means
    reference = PatchedModel(model, flags, sequences(flags, held_out("means", 2))).reference
    index = [*held_out("search", FEW + MANY).split([FEW, MANY]), held_out("validate", count)]
    batches = [sequences(flags, examples) for examples in index]
    few, many, fresh = (PatchedModel(model, flags, batch, reference) for batch in batches)
    loss = fresh.baseline.mean().item()
    if loss >= threshold:
        return report | dict(verdict=f"not searched: the full model has a loss of {loss:.3f}")

    # all paths along which the model attends, and what each of them costs
    costs, protected = {}, set()
    for path in attended(reference):
        rise = (few.knock_out([path]) - few.baseline).mean(0)
        frozen = (few.knock_out([path], frozen=True) - few.baseline).mean(0)
        costs[path] = rise.maximum(frozen)
        protected |= {path} if rise.max() >= threshold else set()

    # the fewest that are faithful, or if all together are not, as good as all; what just passes on
    # the sequences of the search may fail on fresh ones, so then the search stops earlier
    highest = many.circuit(costs).mean(0).max().item()
    for share in (1, 0.95, 0.9):
        level = max(share * threshold, 1.2 * highest)

        def faithful(paths, level=level):
            hopeless = few.circuit(paths).mean(0).max() > 2 * level
            return not hopeless and is_below(level, many.circuit(paths))

        paths = prune(costs, protected, faithful)
        losses = fresh.circuit(paths)
        if is_below(threshold, losses):
            break

    # what is said of each candidate, and of each path of the circuit
    positions, reasons = reference.batch.positions, []
    for path, cost in costs.items():
        if cost.max() >= MATTERS or path in paths:
            row = dict(zip(flags.target_names, cost.tolist(), strict=True))
            report["candidates"].append(to_row(path, task) | dict(cost=row))
    for path in sorted(paths):
        attention = attention_on(reference.attention()[path[:2]], path, task, positions)
        row = to_row(path, task) | dict(attention=attention.mean().item())
        row["necessary"] = intervals(fresh.knock_out([path]) - fresh.baseline, flags)
        without = fresh.circuit(paths - {path})
        row["minimal"] = intervals(without, flags)
        report["paths"].append(row)
        if is_below(threshold, without):
            reasons.append(f"not minimal: {path_name(path, task)} can go")

    # the verdict
    held = intervals(losses, flags)
    for name, (mean, low, high) in held.items():
        if high >= threshold:
            reasons.append(f"not faithful: {name} {mean:.3f} [{low:.3f}, {high:.3f}]")
    missing = {*flags.target_symbols} - reached(paths, task)
    reasons += [f"no path leads to x_{k}" for k in sorted(missing)]
    return report | dict(
        validated=not reasons,
        verdict="; ".join(reasons) or "validated",
        sequences=len(losses),
        attention_sequences=len(positions),
        full_model=intervals(fresh.baseline, flags),
        faithful=held,
        worst=max(held, key=lambda name: held[name][0]),
    )


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    if report["paths"]:
        print(f"MSE on {report['sequences']} fresh sequences, with two standard errors")
        for title, key in ("full model", "full_model"), ("circuit, all else ablated", "faithful"):
            rows = ["{} {:.4f} [{:.4f}, {:.4f}]".format(k, *v) for k, v in report[key].items()]
            print(f"  {title:26s}{'  '.join(rows)}")
        print("\npath                 attention   full model loses   MSE of the circuit without it")
        for row in report["paths"]:
            name = "L{layer}H{head}: {reader} -> {read}".format(**row)
            rise, loss = (max(row[key].values())[0] for key in ("necessary", "minimal"))
            print(f"{name:21s}{row['attention']:9.2f}{rise:19.3f}{loss:32.3f}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory of train.py")
    p.add_argument("--threshold", type=float, default=0.05, help="loss of a solved symbol, at most")
    p.add_argument("--sequences", type=int, default=1024, help="fresh ones to validate on")
    args = p.parse_args()
    if not (0 < args.threshold < 1 and 100 <= args.sequences <= 10**5):
        p.error("--threshold must be between 0 and 1, and --sequences from 100 to 100000")
    with program("ablate.py"):
        model, flags = load(args.run)
        text = json.dumps(find_circuit(model, flags, args.threshold, args.sequences))
        report = json.loads(text, parse_float=lambda number: float(f"{float(number):.5g}"))
        write_text(args.run / "circuit.json", json.dumps(report, indent=1) + "\n")
        print_report(report)
        print(f"circuit: {args.run / 'circuit.json'}")


if __name__ == "__main__":
    main()
