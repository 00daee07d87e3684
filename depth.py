"""How deep a transformer must be: the information flow of Section 5 and the laws that follow.

    python depth.py --D 20     # layers needed for 1 to 20 retrieval steps: laws and simulation

Every role starts with pieces of information: its symbol, and where its pair stands. In each layer
it may attend to a role with which it shares a piece (Assumption 1), and then holds all that this
one held (Assumption 2).
"""

import argparse

import torch

from data import chain


# ---- the information flow


def starting_information(task):
    """(roles, pieces) bool, what each role holds before any layer: x_0, x_1, ..., then, for each
    block, where the chain's slot in it is (both tokens of a pair hold it)."""
    symbols, blocks = torch.arange(task.symbols), torch.arange(len(task.blocks))
    holds_symbol = task.column("symbol")[:, None] == symbols
    holds_slot = task.column("block")[:, None] == blocks
    return torch.cat([holds_symbol, holds_slot], 1)


def attend(known, allowed):
    """One layer: every role takes all that is known to the roles that it may attend to (allowed,
    (roles, roles) bool) and shares a piece with."""
    shared = known.float() @ known.float().T > 0
    return known | ((shared & allowed).float() @ known.float() > 0)


def may_attend(task, causal=True):
    """(roles, roles) bool: attending role, attended role. Causal: only what was read before."""
    count = len(task.roles)
    read_at = torch.empty(count, dtype=torch.long)
    read_at[task.in_reading_order] = torch.arange(count)
    return (read_at[:, None] >= read_at) | torch.tensor(not causal)


def symbols_reached(task, paths, layers):
    """(symbols-1,) bool, which of x_1, x_2, ... the query holds after all layers if attention
    follows these paths alone, (layer, head, source, target), roles by number: source attends to
    target, so information moves from target to source."""
    known = starting_information(task)
    for layer in range(layers):
        allowed = torch.zeros(len(task.roles), len(task.roles), dtype=torch.bool)
        for path in paths:
            if path[0] == layer:
                allowed[path[2], path[3]] = True
        known = attend(known, allowed)
    return known[0, 1 : task.symbols]


def simulated_depth(task, causal=True):
    """The fewest layers after which the query can hold the last symbol."""
    known, allowed, layers = starting_information(task), may_attend(task, causal), 0
    while not known[0, task.symbols - 1]:
        known, layers = attend(known, allowed), layers + 1
    return layers


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


def minimal_circuit(D, layers, causal=True):
    """[(layer, head, source, target), ...], paths along which the query comes to hold as many of
    x_1..x_D as the information flow allows in so many layers; roles by number in chain(N, D).
    One head per layer with a causal mask, two without."""
    paths, last = [], 2 * D  # by number 0 is q, 2k-1 is ka, 2k is kb
    for layer in range(layers):
        if not causal:
            # what a role holds triples, up and down the chain
            step = 3**layer
            paths += [(layer, 0, role, min(role + step, last)) for role in range(last)]
            paths += [(layer, 1, role, max(role - step, 0)) for role in range(1, last + 1)]
        elif layer == 0:
            # every b takes its a
            paths += [(0, 0, b, b - 1) for b in range(2, last + 1, 2)]
        else:
            # what a b, or the query, holds doubles
            step = 2**layer
            paths += [(layer, 0, b, b + step) for b in range(0, last + 1 - step, 2)]
    return paths


# ---- the command line


def depth_table(most):
    """The laws for 1..most retrieval steps, as text; each exact law beside its simulation."""
    lines = [
        "Layers needed to retrieve x_D              no mask               causal mask",
        "   D   paper's bound, ceil(log3 2D)   ceil(log3(4D+1))  simulated   "
        "floor(log2 D)+2  simulated",
    ]
    for D in range(1, most + 1):
        task = chain(1, D)
        unmasked, causal = simulated_depth(task, causal=False), simulated_depth(task)
        lines.append(
            f"{D:4d}   {paper_bound(D):^27d}   {unmasked_depth(D):^16d}  {unmasked:^9d}   "
            f"{causal_depth(D):^15d}  {causal:^9d}"
        )
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.error = lambda message: p.exit(2, f"depth.py: {message}\n")
    p.add_argument("--D", type=int, default=20, help="retrieval steps, at most (default: 20)")
    D = p.parse_args().D
    if not 1 <= D <= 200:
        p.error(f"--D must be from 1 to 200, not {D}")
    print(depth_table(D))


if __name__ == "__main__":
    main()
