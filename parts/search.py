"""The search for a circuit: the paths that the free model misses, and the fewest that will do.

    costs = candidates(held)
    simple, prices = simple_heads(held, costs, threshold=0.05)
    for circuit, loss in search(held, ["zero"], costs, simple, prices, limit=0.045, threshold=0.05):

ablate.py says what for, and certifies what is found. Free: no head is held.
"""

import collections
import functools
import itertools

from parts.circuit import Path, Place, flow, paths_of, places_attended, with_path, without

import torch


SURPLUS = 0.8  # of the attention in one slot of N: more to a place than to its like elsewhere
COST = 0.01  # the loss that the removal of a path must cost the free model
FAINT = 0.1  # a head with less mean attention is not said to attend


# ---- the free model, disturbed


def attention_knockout(held, paths):
    """(B, symbols) squared error of the free model, but that along these paths no attention goes to
    the targets."""
    changed = {}
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        own = held.attention(changed)  # what heads do after what was taken away below
        for path in layer:
            tokens = [end.tokens(held.task, held.batch.positions) for end in path[2:]]
            (source, there), (target, too) = tokens
            rows = torch.arange(len(source))[:, None].expand_as(source)[there & too]
            pattern = changed.setdefault(path[:2], own[path[:2]].clone())
            pattern[rows, source[there & too], target[there & too]] = 0
    return held.errors_with(changed)


def resample_values(held, paths, others=False, seed=0):
    """(B, symbols) squared error of the free model, but that what the source of these paths, of one
    head and source, reads at their targets (with others: at all other tokens) is what stands at the
    same place of another slot, of a chain as independent as one of another sequence. The attention
    that each value gets is left alone."""
    task, positions, (head, source) = held.task, held.batch.positions, (paths[0][:2], paths[0][2])
    sequence, generator = torch.arange(len(positions))[:, None], torch.Generator().manual_seed(seed)
    tokens, _ = source.tokens(task, positions)
    own = held.attention()[head]
    rows, named = own[sequence, tokens], torch.zeros(*tokens.shape, task.T).bool()  # (B, N, T)
    for path in paths:
        target, there = path.target.tokens(task, positions)
        named.scatter_(2, target[..., None], there[..., None])

    # to which slot each token's attention moves: not its own, nor one where a target stands
    block, slot, place, _ = task.tokens
    start, size, slots = torch.tensor(task.blocks)[block].T
    wanted = torch.rand(*rows.shape, int(slots.max()), generator=generator)  # (B, N, T, slots)
    numbers = torch.arange(wanted.shape[-1])
    wanted = wanted.masked_fill(numbers >= slots[:, None], -3) - (numbers == slot[:, None]).float()
    for path in paths if others else []:
        target, _ = path.target.tokens(task, positions)
        here = (block[target][..., None] == block)[..., None]  # (B, N, T, 1)
        wanted -= 2.0 * (here & (numbers == slot[target][..., None, None]))
    moved_to = start + size * wanted.argmax(-1) + place

    # what is moved, and what stays
    moves = ~named if others else named
    changed = (rows * ~moves).scatter_add(2, moved_to, rows * moves)
    pattern = own.clone()
    pattern[sequence, tokens] = changed
    return held.errors_with({head: pattern})


# ---- what a circuit may have


def candidates(held):
    """{Path: (symbols,) by how much each error of the free model rises without it}, the paths that
    a circuit may have: the source attends to the target, rather than to that place of other chains,
    in about one slot of N at least; and without the path the MSE rises by COST, in this head alone
    or where no other head with this path is left; and the values at the targets of a source matter
    more than all others. A token without a role is a target where it is a relay: in a layer before
    it attends to its slot, or to a relay nearer to that."""
    found, sources = {}, [Place(role) for role in range(len(held.task.roles))]
    for source in sources:  # grows
        for alike in attended(held, source):
            cost = {path: attention_knockout(held, [path]).mean(0) - held.intact for path in alike}
            if len(alike) > 1 and min(rise.mean() for rise in cost.values()) < COST:
                nothing_left = attention_knockout(held, alike).mean(0)
                for path in alike:
                    alone_left = attention_knockout(
                        held, [other for other in alike if other != path]
                    )
                    cost[path] = torch.maximum(cost[path], nothing_left - alone_left.mean(0))
            own = {path: rise for path, rise in cost.items() if rise.mean() >= COST}
            found |= own
            target = alike[0].target
            if own and target.offset and target not in sources:
                sources.append(target)

    # what attention without a value does is not the work of a path
    kept = {}
    for _, group in itertools.groupby(sorted(found), key=lambda path: path[:3]):
        group = [*group]
        if (
            resample_values(held, group) - resample_values(held, group, others=True)
        ).mean() >= COST / 2:
            kept |= {path: found[path] for path in group}
    return kept


def attended(held, source):
    """[[Path, ...], ...] from a source to each place that it attends to, in all heads that do."""
    task, by_target = held.task, {}
    for head, pattern in held.attention().items():
        for target, more in places_attended(pattern, task, held.batch.positions, source).items():
            if more >= SURPLUS / task.N and (nearer(target, source, task) or not source.offset):
                by_target.setdefault(target, []).append(Path(*head, source, target))
    for target, alike in list(by_target.items()):
        if target.offset and not source.offset:
            since = [path.layer for own in attended(held, target) for path in own]
            by_target[target] = [path for path in alike if min(since, default=99) < path.layer]
    return [alike for alike in by_target.values() if alike]


def nearer(place, other, task):
    """Whether a place is in the slot from which the other counts, or nearer to it."""
    block = task.roles[place.role].block
    same = block == task.roles[other.role].block and place.offset * other.offset >= 0
    return same and abs(place.offset) < abs(other.offset)


def simple_heads(held, costs, threshold):
    """{head: mechanism}, what a head without paths does, and {head: by how much the MSE of the free
    model rises when it alone is held to that}: the cheaper of uniform and identity; heads without
    candidates attend by position where otherwise all of them together would cost too much."""

    def cost(mechanisms):
        return (held.errors(mechanisms).mean(0) - held.intact).mean().item()

    @functools.cache
    def price(head, name):
        return cost({head: name})

    simple = {}
    for head in held.means:
        simple[head] = min(("uniform", "identity"), key=lambda name: price(head, name))

    # the dearest first
    idle = sorted(held.means.keys() - {path[:2] for path in costs})
    left = [*idle]
    while left and cost({head: simple[head] for head in idle}) >= 0.8 * threshold:
        dearest = max(left, key=lambda head: price(head, simple[head]) - price(head, "position"))
        left.remove(dearest)
        simple[dearest] = "position"
    for head in held.means.keys() - {*idle}:
        if price(head, simple[head]) >= threshold > price(head, "position"):
            simple[head] = "position"
    return simple, {head: price(head, simple[head]) for head in simple}


# ---- searching


def search(held, fills, costs, simple, prices, limit, threshold):
    """Yields (circuit, its loss) for each fill. From all candidate paths one after the other is
    taken away, that which the free model misses least first, as long as the loss stays below the
    limit or falls, and the circuit stays whole: along its paths the flow reaches every symbol that
    is learned, no path is missing without which the free model loses one, nor one of several from a
    source that costs the threshold, heads without paths cost the free model less than that, alone
    and together, and what is left of a head carries.
    Nothing if all candidates together are not whole."""
    task, lost = held.task, held.task.lost
    learned = held.intact < lost
    core = {path for path in costs if (learned & (held.intact + costs[path] > lost)).any()}
    targets = collections.Counter(path[:3] for path in costs)
    for path in costs:  # else a source would seem to take from one target what others bring it
        if targets[path[:3]] > 1:
            alone = attention_knockout(held, [path]).mean(0) - held.intact
            core |= {path} if alone.mean() >= threshold else set()

    @functools.cache
    def flows(paths):
        return bool(flow(paths, task, held.batch.positions[:8])[learned].all())

    @functools.cache
    def complete(heads):
        idle = {head: simple[head] for head in heads}
        return (held.errors(idle).mean(0) - held.intact).mean() < 0.8 * threshold

    @functools.cache
    def carries(paths):
        target, others = resample_values(held, paths), resample_values(held, paths, others=True)
        return target.mean() > others.mean()

    def whole(circuit, head):
        if not flows(tuple(paths_of(circuit))):
            return False
        if isinstance(circuit[head], str):
            idle = tuple(sorted(head for head, own in circuit.items() if isinstance(own, str)))
            return prices[head] < threshold and complete(idle)
        return all(carries(group) for group in groups_of(circuit[head]))

    every = functools.reduce(with_path, costs, simple)
    for fill in fills if flows(tuple(paths_of(every))) else ():
        # from all candidates, one after the other
        circuit, now, before = every, held.errors(every, fill).mean().item(), None
        while circuit != before:
            before = circuit
            for path in sorted({*paths_of(circuit)} - core, key=lambda path: costs[path].mean()):
                fewer = without(circuit, path, simple)
                if whole(fewer, path[:2]):
                    then = held.errors(fewer, fill).mean().item()
                    if then < max(limit, now):
                        circuit, now = fewer, then
        yield circuit, now


def groups_of(paths):
    """The paths of one head by source, tuples; none of a mechanism that is a word."""
    if isinstance(paths, str):
        return []
    by_source = itertools.groupby(sorted(paths), key=lambda path: path[:3])
    return [tuple(group) for _, group in by_source]
