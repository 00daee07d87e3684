"""Attention paths, how attention is read and written along them, and a model with paths ablated.

    patched = PatchedModel(model, flags, batch)          # a model on one batch of sequences
    patched.circuit(paths)                               # its losses with all else ablated
    patched.knock_out(paths)                             # its losses with these paths ablated
    paths = paths_in(read_report("results/A"), task)     # the circuit that ablate.py found

A path (the paper's word; others say attention edge) is (layer, head, source, target), all counted
from 0. L6H0: q -> 1b says that in layer 6, head 0, the query reads token 1b of its own chain. There
is one ablation: what a head reads outside of the paths is replaced by its mean over reference
sequences at that position, which says nothing about the sequence at hand. What a token reads of
itself moves nothing between tokens, and stays. Attention is what the model computes under the
ablation.
"""

import functools
import itertools
import pathlib
import re
from typing import NamedTuple

from parts import UserError, config

import torch

from data import held_out, partial_losses


# ---- paths


class Place(NamedTuple):
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
    source: Place
    target: Place

    def tokens(self, task, positions):
        """Return the tokens of source and target and a mask of where both exist, (B, N) each."""
        (source, exists), (target, exists_too) = (end.tokens(task, positions) for end in self[2:])
        return source, target, exists & exists_too


def to_row(path, task):
    """Return a path as it is written into JSON."""
    source, target = path.source.name(task), path.target.name(task)
    return dict(layer=path.layer, head=path.head, source=source, target=target)


def path_from(row, task):
    """Return the Path that to_row wrote."""
    ends = []
    for name in (row["source"], row["target"]):
        role, offset = re.fullmatch(r"(\w+)([+-]\d+)?", name).groups()
        ends.append(Place(task.names.index(role), int(offset or 0)))
    return Path(row["layer"], row["head"], *ends)


def path_name(path, task):
    """Return a path as it is printed: L6H0: q -> 1b."""
    return "L{layer}H{head}: {source} -> {target}".format(**to_row(path, task))


def read_report(run):
    """Return the report of ablate.find_circuit in a run directory; {} if there is none."""
    file = pathlib.Path(run, "circuit.json")
    return config.read_json(file) if file.exists() else {}


def paths_in(report, task, kind="paths"):
    """Return {Path: its row} of the circuit in a report, {} if it holds none; with
    kind="candidates" of all paths that matter to the full model."""
    return {path_from(row, task): row for row in report.get(kind, [])}


# ---- attention read and written along paths


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


def frozen_heads(paths, task, positions):
    """Return {(layer, head): f} for heads with paths, which attend hard: every source to its
    targets alone, to each of them equally, and all other tokens to nothing."""
    heads = {}
    for head, group in by_head(paths).items():
        mask = mask_of(group, task, positions).float()
        pattern = mask / mask.sum(-1, keepdim=True).clamp(min=1)
        heads[head] = lambda _, values, pattern=pattern: pattern.to(values) @ values
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
            means = config.sequences(flags, held_out("means", 256))
            self.reference = PatchedModel(model, flags, means, reference=self)

    @functools.cached_property
    def baseline(self):
        """The losses of the full model."""
        return self.losses({})

    @functools.cached_property
    def reads(self):
        """{(layer, head): (pattern (B, T, T), values (B, T, size))} of the full model."""
        reads = {}

        def recorder(head):
            return lambda pattern, values: reads.setdefault(head, (pattern, values))[0] @ values

        self.losses({head: recorder(head) for head in self.heads})
        return {
            head: (pattern.float(), values.float()) for head, (pattern, values) in reads.items()
        }

    @torch.no_grad()
    def losses(self, heads):
        """Return the losses with these head functions, {(layer, head): f}."""
        with config.precision(self.flags):
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

    def ablate(self, head, paths, keep=True, itself=True):
        """Return a function for a head in which all that it reads is ablated to its mean, but for
        what it reads along these paths and of the token itself; or, with keep=False, in which only
        these paths are ablated."""
        key = head, frozenset(paths), keep, itself
        if key not in self.cache:
            mask, there = (
                patched.mask(paths) | self.itself * itself if keep else ~patched.mask(paths)
                for patched in (self, self.reference)
            )
            pattern, values = self.reference.reads[head]
            self.cache[key] = mask, ((pattern * ~there) @ values).mean(0)  # (T, size)
        mask, mean = self.cache[key]
        return lambda pattern, values: (pattern * mask) @ values + mean.to(values)

    def circuit(self, paths, without_itself=()):
        """Return the losses with everything outside of these paths ablated; in the heads
        without_itself, what a token reads of itself too."""
        groups = by_head(paths)
        heads = {}
        for head in self.heads:
            itself = head not in without_itself
            heads[head] = self.ablate(head, groups.get(head, ()), itself=itself)
        return self.losses(heads)

    def knock_out(self, paths, frozen=False):
        """Return the losses of the full model with only these paths ablated. frozen: the attention
        of all heads stays as in the full model, so that no other head can take over."""
        heads = {head: self.ablate(head, group, False) for head, group in by_head(paths).items()}
        if frozen:
            for head, (pattern, _) in self.reads.items():
                write = heads.get(head, torch.matmul)
                heads[head] = lambda _, values, f=write, p=pattern: f(p.to(values), values)
        return self.losses(heads)


# ---- what a model must be


@torch.no_grad()
def check_model(model, flags, inputs):
    """Raise UserError, in one line, unless a model can be called as find_circuit calls it; inputs
    (B, T, ...)."""
    T, heads, seen = inputs.shape[1], itertools.product(range(flags.layers), range(flags.heads)), {}

    def recorder(head):
        return lambda pattern, values: seen.setdefault(head, pattern) @ values

    with config.precision(flags):
        predictions, layers = model(inputs, return_patterns=True)
        again = model(inputs, {head: recorder(head) for head in heads})
        silent = model(inputs, {head: lambda _, values: 0 * values for head in seen})
    shapes = [(len(inputs), flags.heads, T, T)] * flags.layers
    if [tuple(layer.shape) for layer in layers] != shapes:
        raise UserError(f"the model must return {flags.layers} patterns of shape {shapes[0]}")
    returned = {(i, j): layer[:, j] for i, layer in enumerate(layers) for j in range(flags.heads)}
    used = seen.keys() == returned.keys() and not torch.equal(silent, again)
    if not used or any(not torch.allclose(seen[head], returned[head], atol=0.01) for head in seen):
        raise UserError("the model must write what the function given for a head returns")
    if not torch.allclose(predictions.float(), again.float(), atol=0.01):
        raise UserError("the model answers otherwise the second time: call eval(), no dropout")
