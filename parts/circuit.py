"""What a path is, what heads do in the mean, and how a model is held to paths.

    patterns = hold(paths, task, positions)             # {(layer, head): (B, T, T)}
    predictions = model(x, patterns)
    paths = paths_in(read_report("results/A"), task)    # {Path: mean attention}, of ablate.py

A circuit gives every head a mechanism, {(layer, head): mechanism}: a tuple of Paths, or one of
FILLS. Layers, heads and roles are numbers from 0; circuit.json and all that is printed names the
roles and counts layers and heads from 1.
"""

import pathlib
from typing import NamedTuple

from parts import runs

import torch
import torch.nn.functional as F

from data import partial_losses


class Path(NamedTuple):
    """In layer `layer`, head `head`, role `source` attends to `target`, of its own chain."""

    layer: int
    head: int
    source: int  # of task.roles
    target: int  # of task.roles


def fields_of(path, task):
    """A path as it is written: counted from 1, its roles by name."""
    source, target = task.names[path.source], task.names[path.target]
    return dict(layer=path.layer + 1, head=path.head + 1, source=source, target=target)


def name_of(fields):
    """layer 7 head 1, q -> 1b: a path as it is printed, from what fields_of wrote."""
    return "layer {layer} head {head}, {source} -> {target}".format(**fields)


def path_name(path, task):
    return name_of(fields_of(path, task))


def to_the_token_before(path, task):
    """Whether source and target are neighbours in one slot, the target first."""
    source, target = task.roles[path.source], task.roles[path.target]
    return (target.block, target.place + 1) == (source.block, source.place)


# ---- circuits


def paths_of(circuit):
    """[Path, ...] of all heads, in the order of the layers."""
    return sorted(path for own in circuit.values() if not isinstance(own, str) for path in own)


def with_paths(circuit, paths):
    """The circuit with these paths added."""
    for path in paths:
        own = circuit[path[:2]]
        own = () if isinstance(own, str) else own
        circuit = circuit | {path[:2]: tuple(sorted({*own, path}))}
    return circuit


def without(circuit, paths, fill):
    """The circuit without these paths; a head that loses all becomes the fill."""
    for path in paths:
        left = tuple(other for other in circuit[path[:2]] if other != path)
        circuit = circuit | {path[:2]: left or fill}
    return circuit


def check_roles(task, batch, K):
    """ValueError unless the sequences of a batch are of the task: its roles stand where the table
    says, and share a symbol where it says. Else every figure would be wrong."""
    roles, symbol, right = batch.positions.shape[2], task.column("symbol"), False
    if roles == len(task.roles):
        tokens = batch.positions.flatten(1)[..., None].expand(-1, -1, K)
        held = batch.inputs[..., :K].gather(1, tokens).unflatten(1, (-1, roles))  # (B, N, roles, K)
        same = (held[:, :, :, None] == held[:, :, None]).all(-1)
        right = torch.equal(task.positions(task.slots(batch.positions)), batch.positions)
        right = right and (same == (symbol[:, None] == symbol)).all()
    if not right:
        raise ValueError("the sequences are not of the table of roles in runs.task_of: change one")


# ---- attention read


def read_paths(pattern, task, positions):
    """(B, T, T) attention -> (B, N, roles, roles): how much each role attends to each role of its
    own chain."""
    count = len(task.roles)
    attending = pattern[:, None].expand(-1, task.N, -1, -1)
    attending = attending.gather(2, positions[..., None].expand(-1, -1, -1, task.T))
    return attending.gather(3, positions[:, :, None].expand(-1, -1, count, -1))


def tokens_of(task, role):
    """(slots,) the tokens where a role can stand, slot by slot."""
    start, size, slots = task.blocks[task.roles[role].block]
    return start + size * torch.arange(slots) + task.roles[role].place


class MeanAttention(NamedTuple):
    """What one head does, chain by chain and in the mean over sequences."""

    direct: torch.Tensor  # (B, N, roles, roles) how much each role attends to each of its own chain
    by_way: torch.Tensor  # the same shape: how much to tokens of other chains that took it before
    to_targets: torch.Tensor  # (roles, roles) the mean of `direct`
    surplus: torch.Tensor  # (roles, roles) how much more than to that role of another chain
    by_position: torch.Tensor  # (T, T) where a token attends, but for the others of its own slot
    by_slot: torch.Tensor  # (blocks, slots, T, T) to add for a token whose chain has this slot of
    # this block; in the token's own block: its attention to the other tokens of its slot


def mean_attention(patterns, task, positions):
    """{(layer, head): MeanAttention} from the patterns of all layers, a list of (B, heads, T, T),
    with positions (B, N, roles)."""
    # which slot of each block the chain of each token has, none if it has no chain; how often
    blocks, sequence = len(task.blocks), torch.arange(len(positions))[:, None, None]
    slots = torch.full((len(positions), task.T, blocks), -1)
    slots[sequence, positions] = task.slots(positions)[:, :, None]
    most = max(block.slots for block in task.blocks)
    has_slot = F.one_hot(slots + 1, 1 + most)[..., 1:].float()  # (B, T, blocks, most)
    times = torch.einsum("btks->kst", has_slot)[..., None]

    # which tokens stand in the block of a token, and which beside it in one slot
    block_of, slot_of = task.tokens.block, task.tokens.slot
    own_block = torch.arange(blocks)[:, None] == block_of  # (blocks, T)
    beside = (block_of[:, None] == block_of) & (slot_of[:, None] == slot_of)
    beside = beside & ~torch.eye(task.T, dtype=torch.bool)

    # which tokens can have which role, how many, and which belong to the chain of a token
    tokens = [tokens_of(task, role) for role in range(len(task.roles))]
    has_role = torch.stack([F.one_hot(own, task.T).sum(0) for own in tokens]).float()  # (roles, T)
    others = (has_role.sum(1) - 1).clamp(min=1)
    chain_of = torch.full(slots.shape[:2], -1)
    chain_of[sequence, positions] = torch.arange(task.N)[:, None]
    stranger = chain_of[:, :, None] != chain_of[:, None]

    means, taken = {}, torch.zeros(1)  # the most that a token took from another so far
    for layer, heads in enumerate(patterns):
        for head, pattern in enumerate(heads.float().unbind(1)):
            # to each role of the own chain, and how much more than to that role of another
            direct = read_paths(pattern, task, positions)
            to_targets = direct.mean((0, 1))
            attending = pattern.gather(1, positions.view(len(slots), -1, 1).expand(-1, -1, task.T))
            to_all = (attending @ has_role.T).unflatten(1, positions.shape[1:]).mean((0, 1))
            surplus = to_targets - (to_all - to_targets) / others

            # to tokens of other chains that took from that role in a layer before
            by_way = (pattern * stranger) @ taken.expand_as(pattern)
            by_way = read_paths(by_way, task, positions)

            # by position alone, and what the slots of the own chain add to that
            in_slot = pattern.mean(0) * beside
            pattern = pattern * ~beside
            by_position = pattern.mean(0)
            known = torch.einsum("btu,btks->kstu", pattern, has_slot) / times.clamp(min=1)
            added = (known - by_position) * (times > 0)
            by_slot = torch.where(own_block[:, None, :, None], in_slot, added)
            own = direct, by_way, to_targets, surplus, by_position, by_slot
            means[layer, head] = MeanAttention(*own)
        taken = torch.maximum(taken, heads.float().amax(1))
    return means


def relays(patterns, task, positions, path, least=0.05):
    """[(offset, attention), ...]: the tokens of other chains, so far behind the target, to which
    the source attends and which took as much from the target in an earlier layer; those that get
    at least so much in the mean, the most important first."""
    sequence, T = torch.arange(len(positions))[:, None], task.T
    taken = torch.zeros(len(positions), T, T)
    for heads in patterns[: path.layer]:
        taken = torch.maximum(taken, heads.float().amax(1))

    # (B, N, T) what each chain's source takes of its target by way of each token
    source, target = positions[:, :, path.source], positions[:, :, path.target]
    by_way = patterns[path.layer][sequence, path.head, source].float() * taken.mT[sequence, target]
    by_way.scatter_(2, positions, 0)  # what goes by the own chain is a path of its own
    behind = T + torch.arange(T) - target[..., None]
    share = torch.zeros(2 * T).index_add_(0, behind.flatten(), by_way.flatten())
    share = share / target.numel()
    order = share.argsort(descending=True).tolist()
    return [(i - T, share[i].item()) for i in order if share[i] >= least]


# ---- attention written


def one_hot(paths, task, positions):
    """(B, T, T) attention: shared equally among the targets of a role's paths, zero without."""
    B, T, sequence = len(positions), task.T, torch.arange(len(positions))[:, None]
    pattern = positions.new_zeros(B, T, T, dtype=torch.float)
    for _, _, source, target in paths:
        pattern[sequence, positions[:, :, source], positions[:, :, target]] = 1
    return pattern / pattern.sum(-1, keepdim=True).clamp(min=1)


def hold(paths, task, positions):
    """{(layer, head): (B, T, T)} the patterns of all heads that have paths."""
    heads = {}
    for path in paths:
        heads.setdefault(path[:2], []).append(path)
    return {head: one_hot(own, task, positions) for head, own in heads.items()}


def shared_out(pattern):
    """Attention of which every token gives 1 in all, or none."""
    return pattern / pattern.sum(-1, keepdim=True).clamp(min=1e-9)


def uniform(T, causal):
    """(T, T) every token attends equally to all that it may attend to."""
    allowed = torch.ones(T, T)
    return shared_out(allowed.tril() if causal else allowed)


FILLS = {  # what a token without a path does: (T, causal, MeanAttention) -> (T, T)
    "zero": lambda T, causal, mean: torch.zeros(T, T),  # the paper's
    "identity": lambda T, causal, mean: torch.eye(T),
    "uniform": lambda T, causal, mean: uniform(T, causal),
    "position": lambda T, causal, mean: shared_out(mean.by_position),
}


def write_pattern(mechanism, task, positions, causal, fill="zero", mean=None):
    """The attention of a head, (T, T) or (B, T, T). mechanism: one of FILLS, or Paths; then `fill`
    says what tokens without a path do. With the fill "slot" a token with a path is not one-hot: it
    attends as in the mean over those sequences in which what it looks for has the same slot."""
    if isinstance(mechanism, str):
        return FILLS[mechanism](task.T, causal, mean)
    if fill != "slot":
        pattern = one_hot(mechanism, task, positions)
        has_path = pattern.sum(-1, keepdim=True) > 0
        return torch.where(has_path, pattern, FILLS[fill](task.T, causal, mean))

    pattern, slots = mean.by_position.repeat(len(positions), 1, 1), task.slots(positions)
    sequence = torch.arange(len(positions))[:, None]
    for source, block in {(path.source, task.roles[path.target].block) for path in mechanism}:
        tokens = positions[:, :, source]
        pattern[sequence, tokens] += mean.by_slot[block, slots[:, :, block], tokens]
    return shared_out(pattern.clamp(min=0))


# ---- a model held to a circuit


class Held:
    """A model held to circuits on one batch. A pattern is written once."""

    def __init__(self, model, flags, means, batch):
        self.model, self.flags, self.means, self.batch = model, flags, means, batch
        self.patterns = {}

    def pattern(self, head, mechanism, fill):
        """Heads held alike share one pattern, unless it is read off a head's own mean attention."""
        rule, steps = mechanism, ()
        if not isinstance(mechanism, str):
            rule, steps = fill, tuple(path[2:] for path in mechanism)
        key = rule, steps, head if rule in ("position", "slot") else None
        if key not in self.patterns:
            how = self.flags.problem, self.batch.positions, self.flags.causal
            self.patterns[key] = write_pattern(mechanism, *how, fill, self.means[head])
        return self.patterns[key]

    @torch.no_grad()
    def errors(self, circuit, fill="zero"):
        """(B, symbols) squared error of each sequence on each symbol; heads that are not in the
        circuit compute their patterns from what they then find."""
        patterns = {head: self.pattern(head, own, fill) for head, own in circuit.items()}
        with runs.precision(self.flags):
            predictions = self.model(self.batch.inputs, patterns)
        return partial_losses(predictions, self.batch.targets, self.flags.K)


# ---- what ablate.py found


def read_report(run):
    """The report of ablate.find_circuit in a run directory; {} if it was never looked for."""
    file = pathlib.Path(run, "circuit.json")
    return runs.read_json(file) if file.exists() else {}


def paths_in(report, task):
    """{Path: mean attention} of a report; None if it holds no circuit. ValueError with one line if
    it is of another task."""
    if "heads" not in report:
        return None
    found = {}
    try:
        for head in report["heads"]:
            for row in head["mechanism"] if isinstance(head["mechanism"], list) else []:
                source, target = task.names.index(row["source"]), task.names.index(row["target"])
                path = Path(head["layer"] - 1, head["head"] - 1, source, target)
                found[path] = row["attention"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("circuit.json is of another task: run ablate.py again") from None
    return found
