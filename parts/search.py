"""The search for a circuit: which paths the model itself vouches for, and the fewest that will do.

    costs = candidates(model, flags, batch, patterns, means)
    found = search(Held(model, flags, means, batch), "zero", costs, means, limit=0.045)

ablate.py says what for, and certifies what is found.
"""

import itertools
import math
from typing import NamedTuple

from parts import runs
from parts.circuit import (
    Path,
    mean_attention,
    paths_of,
    relays,
    with_paths,
    without,
)
from parts.flow import symbols_reached

import torch

from data import partial_losses


SIMPLE = {  # by fill: what a head without paths may become
    "zero": ["uniform", "identity"],
    "identity": ["uniform", "identity"],
    "uniform": ["uniform", "identity"],
    "position": ["position"],
    "slot": ["position"],
}
PRICE = 0.002  # the loss that a path must save while the heads are chosen
NEARLY_ALL = 0.9  # of the attention of a source, to the targets between which it splits it
SURPLUS = 0.8  # of the attention in one slot of N: more to a target than to its like elsewhere
COST = 0.01  # the loss that the removal of a path must cost the model as it is
FAINT = 0.05  # a head with less mean attention is not said to attend


# ---- paths that the model itself vouches for


@torch.no_grad()
def own_patterns(model, flags, inputs, patterns=None):
    """The attention of every layer, a list of (B, heads, T, T)."""
    with runs.precision(flags):
        return model(inputs, patterns=patterns, return_patterns=True)[1]


@torch.no_grad()
def knocked_out(model, flags, batch, patterns, paths, offsets=(0,)):
    """(B, symbols) squared error of the model as it is, but that along these paths no attention
    goes to the targets, nor to the tokens at the other offsets from them. patterns: its own."""
    held, sequence = {}, torch.arange(len(batch.inputs))[:, None]
    for path in sorted(paths):
        if path[:2] not in held:  # what the head does after what was taken away below
            below = any(layer < path.layer for layer, _ in held)
            own = own_patterns(model, flags, batch.inputs, held) if below else patterns
            held[path[:2]] = own[path.layer][: len(sequence), path.head].clone()
        source, target = batch.positions[:, :, path.source], batch.positions[:, :, path.target]
        for offset in offsets:
            tokens = target + offset
            inside = (tokens >= 0) & (tokens < batch.inputs.shape[1])
            at = sequence.expand_as(tokens)[inside], source[inside], tokens[inside]
            held[path[:2]][at] = 0
    with runs.precision(flags):
        predictions = model(batch.inputs, held)
    return partial_losses(predictions, batch.targets, flags.K)


def candidates(model, flags, batch, patterns, means):
    """{Path: how much the MSE of the model rises without it}, the paths that a circuit may have.
    The head must attend to the target, rather than to the same role of other chains, in about one
    slot of N at least; and without the path the MSE must rise by COST, either with all other heads
    as they are or where no other head with this path is left."""
    task, found = flags.problem, {}

    def loss(paths):
        return knocked_out(model, flags, batch, patterns, paths).mean().item()

    intact = loss([])
    for pair in itertools.permutations(range(len(task.roles)), 2):
        heads = [head for head in sorted(means) if means[head].surplus[pair] >= SURPLUS / task.N]
        alike = [Path(*head, *pair) for head in heads]
        cost = {path: loss([path]) - intact for path in alike}
        if len(alike) > 1 and min(cost.values()) < COST:
            nothing_left = loss(alike)
            for path in alike:
                alone_left = loss([other for other in alike if other != path])
                cost[path] = max(cost[path], nothing_left - alone_left)
        found |= {path: cost[path] for path in alike if cost[path] >= COST}
    return found


class Support(NamedTuple):
    """What the attention of the model as it is says for a path of a circuit, in the mean over
    chains and sequences."""

    direct: float  # of the source's attention: what the target gets
    relayed: float  # what relays of the target get
    splits: bool  # whether the source splits its attention in this head between several targets
    enough: bool  # whether the path may belong to a circuit


def support(path, circuit, means):
    """The Support of a path. Of all heads that have the path in the circuit each chain counts in
    that which gives it most: heads share work by slot.

    A target must get half of the attention. What goes to relays counts, if it is no more than what
    the target gets: else it is they that should be named. A head that looks for several symbols at
    once may split its attention between their targets."""
    heads = [means[other[:2]] for other in in_any_head(path, circuit)]
    direct = torch.stack([head.direct[..., path.source, path.target] for head in heads]).amax(0)
    by_way = torch.stack([head.by_way[..., path.source, path.target] for head in heads]).amax(0)
    direct, relayed = direct.mean().item(), by_way.mean().item()
    split = splits(path, circuit, means)
    enough = split or direct >= 0.5 or direct >= relayed >= 0.5 - direct
    return Support(direct, relayed, split, enough)


def splits(path, circuit, means):
    """Whether the source splits its attention between several targets in this head: together they
    get nearly all of it, and the target of this path at least half of an even share."""
    shares = {}
    for other in paths_of(circuit):
        if other[:3] == path[:3]:
            shares[other] = means[path[:2]].to_targets[other[2:]].item()
    even = sum(shares.values()) / len(shares)
    return len(shares) > 1 and sum(shares.values()) >= NEARLY_ALL and shares[path] >= even / 2


def in_any_head(path, circuit):
    """The paths of the circuit between the same two roles, in any head."""
    return [other for other in paths_of(circuit) if other[2:] == path[2:]]


@torch.no_grad()
def vouch(model, flags, batch, circuit):
    """{Path: dict}, what the model as it is says of each path, on a batch that the search never
    saw: the mean attention in this head, and in all heads that have the path in the circuit (see
    support), to the target and to relays; whether the head splits it between several targets;
    whether all this is enough; where it is not split and less than half, the relays; and by how
    much each error rises, (B, symbols), if the target and its relays get no attention in this head
    (alive), and in any head that gives the target 0.05 or more (alive_everywhere)."""
    task, said = flags.problem, {}
    patterns = own_patterns(model, flags, batch.inputs)
    means = mean_attention(patterns, task, batch.positions)
    intact = knocked_out(model, flags, batch, patterns, [])
    for path in paths_of(circuit):
        # where its attention goes
        attention, by_way = means[path[:2]].to_targets[path[2:]].item(), []
        supported = support(path, circuit, means)
        if attention < 0.5 and not supported.splits:
            by_way = relays(patterns, task, batch.positions, path)

        # what the model misses without
        everywhere = []
        for head, mean in means.items():
            if mean.to_targets[path[2:]] >= FAINT:
                everywhere.append(Path(*head, *path[2:]))
        offsets = [0, *(offset for offset, _ in by_way)]
        alive = knocked_out(model, flags, batch, patterns, [path], offsets)
        every = alive
        if everywhere != [path]:
            every = knocked_out(model, flags, batch, patterns, everywhere, offsets)
        said[path] = dict(
            attention=attention,
            in_all_heads=supported.direct,
            relayed=supported.relayed,
            splits=supported.splits,
            well_attended=supported.enough,
            relays=[dict(behind_target=offset, attention=share) for offset, share in by_way],
            alive=alive - intact,
            alive_everywhere=every - intact,
        )
    return said


# ---- searching


def descend(loss, sound, circuit, paths, simple, order):
    """Head after head, in the given order, takes the mechanism with which the loss and the price of
    its paths are least: a simple one, one path less, one more, or one that other heads had; until a
    round changes little."""

    def cost(circuit):
        return loss(circuit) + PRICE * len(paths_of(circuit))

    before = math.inf
    while cost(circuit) < before - PRICE / 2:
        before = cost(circuit)
        for head in order:
            own = [path for path in paths if path[:2] == head]
            there = set(own) & set(paths_of(circuit))
            options = [circuit | {head: fill} for fill in simple]
            options += [without(circuit, [path], simple[0]) for path in sorted(there)]
            for path in own:
                options.append(with_paths(circuit, [path]))
                elsewhere = without(circuit, in_any_head(path, circuit), simple[0])
                options.append(with_paths(elsewhere, [path]))
            best = min([circuit, *filter(sound, options)], key=cost)
            if best != circuit:
                circuit = best
    return circuit


def prune(loss, sound, circuit, simple, limit):
    """The circuit without what can be spared: path after path, or the same path in all heads at
    once, each time what is missed least, as long as the loss stays below the limit."""
    while True:
        options = []
        for path, fill in itertools.product(paths_of(circuit), simple):
            options.append(without(circuit, [path], fill))
            options.append(without(circuit, in_any_head(path, circuit), fill))
        best = min(filter(sound, options), key=loss, default=None)
        if best is None or loss(best) >= limit:
            return circuit
        circuit = best


def settle(loss, sound, circuit, costs, simple, limit):
    """The circuit with each path in that head, of those which do at little cost, in which the model
    as it is would miss it most: which of parallel heads is named is no accident."""
    limit = min(limit, loss(circuit) + COST)
    for path in paths_of(circuit):
        options = {path: circuit}
        for other in costs.keys() - set(paths_of(circuit)):
            if other[2:] == path[2:]:
                moved = with_paths(without(circuit, [path], simple[0]), [other])
                if sound(moved) and loss(moved) < limit:
                    options[other] = moved
        circuit = options[max(options, key=costs.get)]
    return circuit


def search(held, fill, costs, means, limit):
    """{order: (circuit, its loss)} by coordinate descent with one fill, from the circuit of all
    candidate paths, through the heads in several orders. Only sound circuits are looked at: along
    their paths the information flow reaches every symbol that the model has learned, and every path
    is well attended. {} if all candidates together are not sound."""
    task, simple, losses, soundness = held.flags.problem, SIMPLE[fill], {}, {}
    paths = sorted(costs)
    learned = held.errors({}).mean(0) < task.destroyed

    def loss(circuit):
        key = tuple(circuit[head] for head in sorted(circuit))
        if key not in losses:
            losses[key] = held.errors(circuit, fill).mean().item()
        return losses[key]

    def sound(circuit):
        key = tuple(paths_of(circuit))
        if key not in soundness:
            reached = symbols_reached(task, key, held.flags.layers)
            flows = bool(reached[learned].all())
            soundness[key] = flows and all(support(path, circuit, means).enough for path in key)
        return soundness[key]

    bare = dict.fromkeys(sorted(means), simple[0])
    start = with_paths(bare, paths)
    start = with_paths(bare, [path for path in paths if support(path, start, means).enough])
    if not sound(start):
        return {}
    most = {head: mean.to_targets.max().item() for head, mean in means.items()}
    orders = {
        "last layer first": sorted(means, reverse=True),
        "first layer first": sorted(means),
        "least attention first": sorted(means, key=most.get),
    }
    found = {}
    for name, order in orders.items():
        circuit = descend(loss, sound, start, paths, simple, order)
        if loss(circuit) < limit:
            circuit = prune(loss, sound, circuit, simple, limit)
            circuit = settle(loss, sound, circuit, costs, simple, limit)
        found[name] = circuit, loss(circuit)
    return found
