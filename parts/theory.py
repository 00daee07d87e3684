"""How deep a transformer must be: the information flow of Section 5 and the laws that follow.

    python -m parts.theory              # 1 to 20 retrieval steps: laws and simulation

Every role starts with pieces of information: its symbol, and where its slot stands. In each layer
it may attend to a role with which it shares a piece (Assumption 1), and then holds all that this
one held (Assumption 2). Where several slots show the same symbol, what is shared must tell the one
attended to from each of the others: in a chain it always does.
"""

import functools

from parts import UserError
from parts.circuit import Path, Place

import torch
import torch.nn.functional as F

from data import chain, conditional


# ---- the information flow


def attend(known, allowed, rivals=()):
    """One layer: every token takes all that is known to the tokens that it may attend to (allowed,
    (tokens, tokens) bool) and shares a piece with. rivals: [(token, other), ...], where what is
    shared with the token must not all be known to the other."""
    shared = known.float() @ known.float().T > 0
    for token, other in rivals:
        shared[:, token] &= (known & known[token] & ~known[other]).any(1)
    return known | ((shared & allowed).float() @ known.float() > 0)


def may_attend(task, causal=True):
    """(roles, roles) bool: attending role, attended role. Causal: only what was read before."""
    count = len(task.roles)
    read_at = torch.empty(count, dtype=torch.long)
    read_at[task.in_reading_order] = torch.arange(count)
    return (read_at[:, None] >= read_at) | (not causal)


@functools.lru_cache
def whole_sequence(task):
    """What the tokens of a sequence hold before any layer (T, pieces), the number of their role
    (T,), and the rivals: those at the same place of two slots."""
    block, slot, place, symbol = task.tokens
    first = torch.tensor([0, *(block.slots for block in task.blocks)]).cumsum(0)
    slot = first[block] + slot
    known = torch.cat([F.one_hot(symbol), F.one_hot(slot)], 1).bool()
    places = torch.stack([block, place], 1).tolist()
    roles = torch.tensor([task.roles.index(task.role_at(*at)) for at in places])
    alike = (roles[:, None] == roles).fill_diagonal_(False)
    return known, roles, alike.nonzero().tolist()


def known_to_query(task, allowed):
    """Yield which of x_1, x_2, ... the first chain's query holds, (symbols-1,) bool, after each
    layer; allowed: for each layer which role may attend to which, (roles, roles) bool."""
    known, roles, rivals = whole_sequence(task)
    query = roles.tolist().index(0)
    for own in allowed:
        known = attend(known, own[roles[:, None], roles], rivals)
        yield known[query, 1 : task.symbols]


def least_layers(task, causal=True):
    """[layers, ...] the fewest after which the query can hold x_1, x_2, ..."""
    needed = torch.ones(task.symbols - 1, dtype=torch.long)
    for reached in known_to_query(task, [may_attend(task, causal)] * len(task.roles)):
        needed += ~reached
    return needed.tolist()


# ---- the laws


def least_power(base, bound):
    """The smallest t with base^t >= bound, in whole numbers: math.log would round."""
    t = 0
    while base**t < bound:
        t += 1
    return t


def paper_bound(D):
    """Theorem 1: at least log3(2D) layers."""
    return least_power(3, 2 * D)


def unmasked_depth(D):
    """ceil(log3(4D+1)): exact for the information flow without a mask."""
    return least_power(3, 4 * D + 1)


def causal_depth(D):
    """floor(log2 D) + 2: exact with a causal mask and the order of tokens of Section 6."""
    return D.bit_length() + 1  # bit_length is floor(log2 D) + 1


DEPTH_LAWS = {True: causal_depth, False: unmasked_depth}  # by causal


def minimal_circuit(D, layers, causal):
    """[Path, ...] along which the query comes to hold as many of x_1..x_D as the information flow
    allows in so many layers. One head per layer with a causal mask, two without."""
    ends, last = [], 2 * D  # (layer, head, source, target), by number 0 is q, 2k-1 ka, 2k kb
    for layer in range(layers):
        if not causal:
            # what a role holds triples, up and down the chain
            step = 3**layer
            ends += [(layer, 0, role, min(role + step, last)) for role in range(last)]
            ends += [(layer, 1, role, max(role - step, 0)) for role in range(1, last + 1)]
        elif layer == 0:
            # every b takes its a
            ends += [(0, 0, b, b - 1) for b in range(2, last + 1, 2)]
        else:
            # what a b, or the query, holds doubles
            step = 2**layer
            ends += [(layer, 0, b, b + step) for b in range(0, last + 1 - step, 2)]
    return [Path(layer, head, Place(a), Place(b)) for layer, head, a, b in ends]


def conditional_circuit(D, layers, causal):
    """The paths along which the query of conditional retrieval comes to hold x and y with two
    layers, z with three, with a mask and without; two heads per layer, of which one looks for x and
    one for y."""
    names = conditional(1).names
    steps = ["0 1b 1a", "0 3c 3a", "1 2b 2a", "1 3c 3b"], ["0 q 1b", "1 q 2b"], ["0 q 3c"]
    paths = []
    for layer, texts in enumerate(steps[:layers]):
        for head, *ends in map(str.split, texts):
            source, target = (Place(names.index(name)) for name in ends)
            paths.append(Path(layer, int(head), source, target))
    return paths


# (circuit, task): (D, layers, causal) -> [Path, ...], what --circuit holds attention at
CIRCUITS = {
    ("minimal", "chain"): minimal_circuit,
    ("minimal", "conditional"): conditional_circuit,
}


def frozen_paths(flags):
    """The paths that these flags hold attention at, [] without --circuit."""
    if not flags.circuit:
        return []
    if (flags.circuit, flags.task) not in CIRCUITS:
        what = f"no circuit {flags.circuit} of --task {flags.task} is known"
        raise UserError(f"{what}: add it to CIRCUITS in parts/theory.py")
    return CIRCUITS[flags.circuit, flags.task](flags.D, flags.layers, flags.causal)


def main():
    """The laws; each exact one beside its simulation."""
    row = "{:>4} {:>18} {:>18} {:>10} {:>18} {:>10}".format
    print(row("", "Theorem 1", "no mask", "", "causal mask", ""))
    laws = "ceil(log3 2D)", "ceil(log3(4D+1))", "simulated", "floor(log2 D)+2", "simulated"
    print(row("D", *laws))
    for D in range(1, 21):
        unmasked, causal = (least_layers(chain(1, D), mask)[-1] for mask in (False, True))
        print(row(D, paper_bound(D), unmasked_depth(D), unmasked, causal_depth(D), causal))


if __name__ == "__main__":
    main()
