"""The search for a circuit: the paths along which a model attends, and the fewest of them with
which it still answers.

    paths = attended(patched)                        # all along which the full model attends
    circuit = prune(costs, protected, faithful)  # the fewest that are faithful
    symbols = reached(circuit, task)                 # what can reach the query along them
"""

import itertools

from parts.circuit import Path, Place

import torch


ATTENDED = 0.4  # of 1/N: by how much more a source attends to its own chain than to others
REACH = 4  # tokens from the slot of a chain within which intermediate tokens are looked for


def places_of(task):
    """Return [Place, ...]: all roles, and the intermediate tokens up to REACH from their slots."""
    places = []
    for number, role in enumerate(task.roles):
        first = -REACH if role.place == 0 else 0
        last = REACH if role.place == task.blocks[role.block].size - 1 else 0
        places += [Place(number, offset) for offset in range(first, last + 1)]
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
        earlier = (other for other in paths if other.source == path.target)
        return not path.target.offset or any(other.layer < path.layer for other in earlier)

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
    holds = {Place(number): {role.symbol} for number, role in enumerate(task.roles)}
    for _, layer in itertools.groupby(sorted(paths), key=lambda path: path.layer):
        taken = [(path.source, holds.get(path.target, set())) for path in layer]
        for source, symbols in taken:
            holds[source] = holds.get(source, set()) | symbols
    return holds[Place(0)]
