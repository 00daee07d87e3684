"""What a path is, how attention is read and written, and how a model is held to paths.

    patterns = frozen_patterns(paths, task, positions)             # {(layer, head): (B, T, T)}
    predictions = model(x, patterns)
    paths = paths_in(read_report("results/A"), task)    # [Path, ...], of ablate.py

A circuit gives every head a mechanism, {(layer, head): mechanism}: a tuple of Paths, or one of
MECHANISMS. Layers, heads and roles are numbers from 0; circuit.json and all that is printed names
the roles and counts layers and heads from 1.
"""

import itertools
import pathlib
import re
from typing import NamedTuple

from parts import UserError, config

import torch
import torch.nn.functional as F

from data import partial_losses


# ---- paths


class Place(NamedTuple):
    """A token of a chain: the one with a role, or so many tokens behind it, which has no role in
    this chain (before it, if negative)."""

    role: int  # of task.roles
    offset: int = 0

    def name(self, task):
        """3b, 3b+1, ..."""
        return task.names[self.role] + (f"{self.offset:+d}" if self.offset else "")

    def tokens(self, task, positions):
        """Where it stands (B, N), from positions (B, N, roles), and whether it does: there may be
        no token so far behind."""
        tokens = positions[:, :, self.role] + self.offset
        return tokens.clamp(0, task.T - 1), (tokens >= 0) & (tokens < task.T)


class Path(NamedTuple):
    """In layer `layer`, head `head`, the token at `source` attends to that at `target`, both of its
    own chain."""

    layer: int
    head: int
    source: Place
    target: Place


def fields_of(path, task):
    """A path as it is written: its places by name."""
    source, target = path.source.name(task), path.target.name(task)
    return dict(layer=path.layer, head=path.head, source=source, target=target)


def path_from(fields, task):
    """The Path of what fields_of wrote."""
    ends = []
    for name in (fields["source"], fields["target"]):
        role, behind = re.fullmatch(r"(\w+)([+-]\d+)?", name).groups()
        ends.append(Place(task.names.index(role), int(behind or 0)))
    return Path(fields["layer"], fields["head"], *ends)


def name_of(fields):
    """L6H0: q -> 1b, a path as it is printed, from what fields_of wrote."""
    return "L{layer}H{head}: {source} -> {target}".format(**fields)


def path_name(path, task):
    return name_of(fields_of(path, task))


def symbol_names(symbols):
    """(symbols,) bool -> [x_1, ...], the names of those that are True."""
    return [f"x_{k}" for k, there in enumerate(symbols, 1) if there]


# ---- circuits


def paths_of(circuit):
    """[Path, ...] of all heads, in the order of the layers."""
    return sorted(path for own in circuit.values() if not isinstance(own, str) for path in own)


def with_path(circuit, path):
    """The circuit with one path more."""
    own = circuit[path[:2]]
    return circuit | {path[:2]: tuple(sorted({path, *(() if isinstance(own, str) else own)}))}


def without(circuit, path, otherwise):
    """The circuit without a path; a head that loses its last does what `otherwise` says of it."""
    left = tuple(other for other in circuit[path[:2]] if other != path)
    return circuit | {path[:2]: left or otherwise[path[:2]]}


def flow(paths, task, positions):
    """(symbols-1,) bool, which of x_1, x_2, ... every query holds, of its chain, if each token
    starts with what it shows and, layer by layer, takes all that the targets of its paths hold
    (Section 5); in sequences with these positions, (B, N, roles)."""
    sequence, chains = torch.arange(len(positions))[:, None, None], torch.arange(task.N)
    holds = torch.zeros(len(positions), task.T, task.N, task.symbols)
    holds[sequence, positions, chains[:, None]] = task.shown.float()
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        taken = one_hot(layer, task, positions) @ holds.flatten(2)
        holds = (holds + taken.view_as(holds)).clamp(max=1)
    return (holds[sequence[..., 0], positions[:, :, 0], chains, 1:] > 0).all(0).all(0)


def check_model(model, flags, inputs):
    """UserError unless a model attends as it is told to, and returns how it did; inputs (B, T, ...):
    else no circuit would be its."""
    T = inputs.shape[1]
    planted = uniform(T, causal=True) ** 2
    for layer, head in itertools.product(range(flags.layers), range(flags.heads)):
        seen = model(inputs, patterns={(layer, head): planted}, return_patterns=True)[1]
        if not torch.allclose(seen[layer][:, head].float(), planted, atol=0.01):
            raise UserError(f"the model does not use, or return, what layer {layer} is given")


# ---- attention read


def read_path(pattern, path, task, positions):
    """(B, N) how much each chain's source attends to its target, of one head's (B, T, T); nothing
    where one of them is not there."""
    sequence = torch.arange(len(positions))[:, None]
    (source, there), (target, too) = (end.tokens(task, positions) for end in path[2:])
    return pattern[sequence, source, target] * (there & too)


def places_attended(pattern, task, positions, source):
    """{Place: how much more of the source's attention goes to this place of its own chain than to
    that of other chains, in the mean}, of one head's pattern (B, T, T)."""
    sequence, T = torch.arange(len(positions))[:, None], task.T
    tokens, there = source.tokens(task, positions)
    given = (pattern[sequence, tokens] * there[..., None])[:, :, None]  # (B, N, 1, T)
    given = F.pad(given, (T, T)).expand(-1, -1, task.N, -1)
    found = {}
    for number, (start, size, _) in enumerate(task.blocks):
        # from every chain to what stands around the slot of every chain, (N, N, 2T)
        slots = start + size * task.slots(positions)[:, None, :, number, None]
        around = (slots + torch.arange(2 * T)).expand(-1, task.N, -1, -1)
        to = given.gather(3, around).mean(0)
        own = to.diagonal().mean(-1)
        surplus = own - (to.sum((0, 1)) / task.N - own) / max(1, task.N - 1)
        for index, more in enumerate(surplus.tolist()):
            found[place_at(task, number, index - T)] = more
    return {place: more for place, more in found.items() if place != source}


def place_at(task, block, offset):
    """The Place so many tokens behind the first of a slot."""
    size = task.blocks[block].size
    inside = min(max(offset, 0), size - 1)
    return Place(task.roles.index(task.role_at(block, inside)), offset - inside)


def mean_pattern(pattern, task):
    """(T, T) where each token attends in the mean of (B, T, T), but for the other tokens of its own
    slot, which would bring the symbol of a pair without any path."""
    block, slot = task.tokens.block, task.tokens.slot
    beside = (block[:, None] == block) & (slot[:, None] == slot) & ~torch.eye(task.T).bool()
    mean = pattern.mean(0) * ~beside
    return mean / mean.sum(-1, keepdim=True).clamp(min=1e-9)


# ---- attention written


def one_hot(paths, task, positions):
    """(B, T, T) attention: shared equally among the targets of a source's paths, zero without."""
    sequence = torch.arange(len(positions))[:, None]
    pattern = torch.zeros(len(positions), task.T, task.T)
    for _, _, *ends in paths:
        (source, there), (target, too) = (end.tokens(task, positions) for end in ends)
        pattern[sequence, source, target] += (there & too).float()
    pattern = (pattern > 0).float()
    return pattern / pattern.sum(-1, keepdim=True).clamp(min=1)


def frozen_patterns(paths, task, positions):
    """{(layer, head): (B, T, T)} the patterns of all heads that have paths."""
    heads = {}
    for path in paths:
        heads.setdefault(path[:2], []).append(path)
    return {head: one_hot(own, task, positions) for head, own in heads.items()}


def uniform(T, causal):
    """(T, T) every token attends equally to all that it may attend to."""
    allowed = torch.ones(T, T).tril() if causal else torch.ones(T, T)
    return allowed / allowed.sum(-1, keepdim=True)


MECHANISMS = {  # what a head without paths does, or with them a token without: (T, causal, mean)
    "zero": lambda T, causal, mean: torch.zeros(T, T),  # the paper's
    "uniform": lambda T, causal, mean: uniform(T, causal),
    "identity": lambda T, causal, mean: torch.eye(T),
    "position": lambda T, causal, mean: mean,
}


# ---- a model held to a circuit


class PatchedModel:
    """A model, free or held to circuits, on one batch. means: {(layer, head): (T, T)} of
    mean_pattern."""

    def __init__(self, model, flags, batch, means=None):
        self.model, self.flags, self.batch, self.task = model, flags, batch, flags.problem
        self.own, self.written = None, {}
        self.means = means or {}
        if not means:
            for head, pattern in self.attention().items():
                self.means[head] = mean_pattern(pattern, self.task)
        self.free = self.errors({})  # (B, symbols) of the free model
        self.intact = self.free.mean(0)

    @torch.no_grad()
    def attention(self, patterns=None):
        """{(layer, head): (B, T, T)} of the free model, or with some heads replaced."""
        if patterns or self.own is None:
            with config.precision(self.flags):
                layers = self.model(self.batch.inputs, patterns=patterns, return_patterns=True)[1]
            found = {}
            for layer, heads in enumerate(layers):
                found |= {(layer, head): one for head, one in enumerate(heads.float().unbind(1))}
            if patterns:
                return found
            self.own = found
        return self.own

    def pattern(self, head, mechanism, fill):
        """(T, T) or (B, T, T), of a head that does this; fill: what tokens without a path do."""
        T, causal = self.task.T, self.flags.causal
        if isinstance(mechanism, str):
            return MECHANISMS[mechanism](T, causal, self.means[head])
        key = fill, *(path[2:] for path in mechanism)  # heads held alike share it
        if key not in self.written:
            along = one_hot(mechanism, self.task, self.batch.positions)
            rest = MECHANISMS[fill](T, causal, None)
            self.written[key] = torch.where(along.sum(-1, keepdim=True) > 0, along, rest)
        return self.written[key]

    def errors_of_rest(self, circuit, fill):
        """(B, symbols) squared error of the free model where all tokens without a path, in all
        heads, do what the circuit says; those with one attend as they did."""
        patterns = {head: self.pattern(head, own, fill) for head, own in circuit.items()}
        for head in (head for head, own in circuit.items() if not isinstance(own, str)):
            there = one_hot(circuit[head], self.task, self.batch.positions).sum(-1, keepdim=True)
            patterns[head] = torch.where(there > 0, self.attention()[head], patterns[head])
        return self.errors_with(patterns)

    def errors(self, circuit, fill="zero"):
        """(B, symbols) squared error of each sequence on each symbol; heads that are not in the
        circuit compute their patterns from what they then find."""
        patterns = {head: self.pattern(head, own, fill) for head, own in circuit.items()}
        return self.errors_with(patterns)

    @torch.no_grad()
    def errors_with(self, patterns):
        with config.precision(self.flags):
            predictions = self.model(self.batch.inputs, patterns)
        return partial_losses(predictions, self.batch.targets, self.flags.K)


# ---- what ablate.py found


def read_report(run):
    """The report of ablate.find_circuit in a run directory; {} if it was never looked for."""
    file = pathlib.Path(run, "circuit.json")
    return config.read_json(file) if file.exists() else {}


def paths_in(report, task, kind="paths"):
    """{Path: the row on it} of a report, {} if it holds no circuit; kind: "uses" for all paths that
    the free model misses."""
    return {path_from(row, task): row for row in report.get(kind, [])}
