"""How deep a transformer must be: the information flow of Section 5, and the laws that follow.

    python -m extras.studies.theory    # the laws for 1 to 20 retrieval steps, beside the simulation

Every token starts with two pieces of information: its symbol, and the slot in which it stands. In
each layer a token may attend to every token with which it shares a piece (Assumption 1), and then
holds all the pieces of that token as well (Assumption 2). Where several slots show the same symbol,
the shared pieces must tell the attended token apart from the tokens at the same place of the other
slots. In a chain they always do.
"""

import collections
import functools
import itertools
import math
import pathlib

from ablate import Path
from analyze import save_figure
from data import Block, Task, UserError, chain, command_line, program, rotary_numbers
from model import Transformer

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure


# ---- the information flow


def attend(known, allowed, rivals=(), same_slot=None):
    """Return what every token holds after one more layer, (tokens, pieces) bool.

    known: what it holds before, of the same shape; allowed: which token may attend to which,
    (tokens, tokens) bool, the attending token first; rivals: [(token, other), ...]: a token is
    attended to only with a shared piece that the other does not hold; same_slot: (tokens, tokens)
    bool, for the flow with width, in which whoever may attend to a token reads its whole slot."""
    shared = known.float() @ known.float().T > 0
    for token, other in rivals:
        shared[:, token] &= (known & known[token] & ~known[other]).any(1)
    if same_slot is not None:
        shared = (shared & allowed).float() @ same_slot.float() > 0
    return known | ((shared & allowed).float() @ known.float() > 0)


def may_attend(task, causal=True):
    """Return which role may attend to which, (roles, roles) bool, the attending role first: with a
    causal mask only to those that are read before it, and to itself."""
    order = [role for block in task.blocks for role in block.roles]
    read_at = torch.tensor([order.index(role) for role in task.names])
    return (read_at[:, None] >= read_at) | (not causal)


@functools.lru_cache
def whole_sequence(task):
    """Return what the tokens of a sequence hold before any layer, (T, pieces) bool, the role of
    each, (T,), and the rivals: all pairs of tokens at the same place of two slots of a block."""
    slots, roles = [], []
    for block in task.blocks:
        for _ in block.symbols:
            slot = slots[-1] + 1 if slots else 0
            for place in range(block.symbols.shape[1]):
                slots.append(slot)
                roles.append(task.names.index(block.roles[place]))
    symbols = torch.cat([block.symbols.flatten() for block in task.blocks])
    known = torch.cat([F.one_hot(symbols), F.one_hot(torch.tensor(slots))], 1).bool()
    roles = torch.tensor(roles)
    same_role = (roles[:, None] == roles).fill_diagonal_(False)
    return known, roles, same_role.nonzero().tolist()


def known_to_query(task, layers, wide=False):
    """Yield which of x_1, x_2, ... the query of the first chain holds after each layer,
    (symbols-1,) bool; layers: of each layer, which role may attend to which, (roles, roles); wide:
    whoever may attend to one token of a slot reads both."""
    known, roles, rivals = whole_sequence(task)
    slots = known[:, -sum(len(block.symbols) for block in task.blocks) :].float()
    same_slot, query = slots @ slots.T > 0 if wide else None, roles.tolist().index(0)
    for allowed in layers:
        known = attend(known, allowed[roles[:, None], roles], rivals, same_slot)
        yield known[query, 1 : task.symbols]


def least_layers(task, causal=True, wide=False):
    """Return [layers, ...], the smallest depth at which the query can hold x_1, x_2, ..."""
    depths = torch.ones(task.symbols - 1, dtype=torch.long)
    layers = [may_attend(task, causal)] * len(task.roles)
    for reached in known_to_query(task, layers, wide):
        depths += ~reached
    return depths.tolist()


def in_order(steps):
    """Return one chain whose pairs are read in this order of their steps: (3, 2, 1) is ours."""
    x = torch.arange(len(steps) + 1)[None]
    blocks = [Block([f"{k}a", f"{k}b"], x[:, k - 1 : k + 1]) for k in steps]
    return Task("in order", 1, len(steps) + 1, [*blocks, Block(["q"], x[:, :1])])


def shuffled_depths(D):
    """Return [{layers: share of the reading orders}, ...] for x_1, ..., x_D with a causal mask if
    every order of the D steps is as likely, as in --task shuffled."""
    orders = [*itertools.permutations(range(1, D + 1))]
    columns = zip(*(least_layers(in_order(order)) for order in orders), strict=True)
    counts = map(collections.Counter, columns)
    return [{layers: n / len(orders) for layers, n in sorted(count.items())} for count in counts]


# ---- the laws


def least_power(base, bound):
    """Return the smallest t with base^t >= bound, in integers, where math.log would round."""
    return next(t for t in itertools.count() if base**t >= bound)


def paper_bound(D):
    """Return the bound of Theorem 1: at least log3(2D) layers."""
    return least_power(3, 2 * D)


def unmasked_depth(D):
    """Return ceil(log3(4D+1)), exact for the information flow without a mask, in any order.

    Number the roles along the chain, q = 0, 1a = 1, 1b = 2, ..., Db = 2D, and the pieces x_0 = 0,
    p_1 = 1, x_1 = 2, ..., x_D = 2D; role i starts with the pieces i - 1 and i.
    At most: after t layers role i holds only pieces from i - 1 - a_t to i + a_t, with a_0 = 0 and
    a_(t+1) = 3 a_t + 1. Two roles i < j share a piece only if j - 1 - a_t <= i + a_t, and then j
    holds nothing above j + a_t <= i + 3 a_t + 1; and the same downward. So the query, i = 0, holds
    piece 2D only if 2D <= a_t = (3^t - 1) / 2.
    At least: in layer t + 1 role i attends to i + 3^t and i - 3^t, clipped to 0 and 2D, with which
    it shares a piece; what it holds grows without a gap, by 2 a_t + 1 on both sides or to the end.
    """
    return least_power(3, 4 * D + 1)


def causal_depth(D):
    """Return floor(log2 D) + 2, exact with a causal mask and Section 6's token order, in which the
    pairs of step D come first.

    At the start ka and kb hold x_(k-1) and x_k, and both hold the slot p_k; the query is 0b.
    At most: ka sees only pairs j > k, which hold x_k, p_(k+1) and higher: it learns nothing, so kb
    gets x_(k-1) from ka alone. Let r_t(k) = k + 2^(t-1) - 1. After t >= 1 layers kb holds no x_m
    with m > r_t(k) and no p_j with j > r_t(k) + 1. For t = 1, kb attends to ka (shared p_k) and to
    (k+1)a (shared x_k), which bring x_(k-1) and p_(k+1). From t to t + 1, let R = r_t(k). What kb
    shares with ja or jb is x_(j-1), p_j or higher, so j <= R + 1. ja brings x_(j-1) and p_j; jb
    brings nothing above r_t(j) <= r_t(R+1) = r_(t+1)(k). So x_D needs 2^(t-1) - 1 >= D.
    At least: in layer 1 kb attends to ka; in layer t + 1 it attends to jb with j = k + 2^(t-1), or
    nowhere if j > D. jb holds x_(j-1), which kb holds too, and brings the rest.
    """
    return D.bit_length() + 1  # bit_length is floor(log2 D) + 1


def wide_depth(D):
    """Return floor(log2 D) + 1, which is exact with a causal mask, Section 6's token order, and the
    flow with width: one layer less, that in which every kb attends to its ka. It is no bound for
    transformers, of which 2ND heads could read all by place in one layer.

    Let s_t(k) = k + 2^t - 1, so that s_t(s_t(k) + 1) = s_{t+1}(k).
    At most: after t layers kb holds nothing above x and p of s_t(k), as at the start. ka, which is
    read before kb and all lower pairs, shares nothing that would bring it more. What kb shares with
    slot j is x_(j-1) or higher, so j <= s_t(k) + 1, and the slot brings nothing above s_t(j), which
    is at most s_{t+1}(k). The query is 0b, so x_D needs 2^t - 1 >= D.
    At least: in layer t + 1 kb attends to ja with j = s_t(k) + 1, which holds the last symbol that
    kb holds, and reads jb's x_(j-1), ..., x_(s_t(j)) too.
    """
    return D.bit_length()


# ---- one layer by hand


@torch.no_grad()
def constructed(N, scale=100.0, sharpness=1e4, K=4):
    """Return a Transformer of one layer and N + 1 heads that solves D = 1 by an address and a
    memory and whose weights all come from this formula, tested for N from 2 to 16.

    Half of the residual stream is the negative of the other half, and it holds a constant, `scale`:
    LayerNorm divides all tokens by nearly the same number. The relative error of that falls with
    scale**-2. In float32 the scores are rounded to sharpness * scale**2 * 6e-8."""
    T, width, head_size = 3 * N, 2 * (5 + N) * K, 16
    model = Transformer(T, N, 2 * K, K, layers=1, heads=N + 1, width=width, head_size=head_size)
    block, half = model.blocks[0], width // 2
    for parameter in model.parameters():
        parameter.zero_()
    for norm in (block.ln1, block.ln2, model.ln):
        norm.weight.fill_(scale / half**0.5)

    # the numbers of the residual stream
    constant, symbol, place, address, answer, *memory = torch.arange(half).split(K)
    constant = constant[0]

    def write(parameter, where, values):
        """Let a layer write these values to these numbers, and their negatives."""
        parameter[where], parameter[where + half] = values, -values

    write(model.embed.bias, constant, torch.tensor(scale))
    write(model.embed.weight, torch.cat([symbol, place]), torch.eye(2 * K))
    q, k, v = block.qkv.weight.view(3, N + 1, head_size, width)
    q_bias = block.qkv.bias.view(3, N + 1, head_size)[0]
    unit = torch.eye((N + 1) * head_size).view(N + 1, head_size, -1)[:, :K]  # what each head reads
    first, loud = torch.arange(K), head_size**0.5  # attention divides scores by the root

    # the memory: head i attends to the 1b of slot i, by place
    places = rotary_numbers(T, K)
    for i in range(N):
        q_bias[i, :K] = 4000 * loud * places[2 * i + 1]
        k[i, first, place] = v[i, first, symbol] = 1
        write(block.out.weight, memory[i], unit[i])

    # the address: the last head attends to the token with the symbol of the query, the nearest in
    # content; this is the own 1a and not the query, since scores fall with the place, of which the
    # last number, the sine of the slowest angle, is nearly linear
    q[N, first, symbol] = sharpness * loud
    q[N, K, constant] = sharpness * loud * (1 + K / 2 / scale**2)  # K/2: the square of a place
    k[N, first, symbol] = k[N, K, constant] = v[N, first, place] = 1
    q_bias[N, K + 1] = -1500 * loud
    k[N, K + 1, place[-1]] = 1
    write(block.out.weight, address, unit[N])

    # the MLP: GELU(v + 10) - GELU(-v + 10) is 2v, and 0 with -10 or less; the address is most like
    # the place of its own slot, by `margin` more than like any other
    keys = places[0 : 2 * N : 2]
    margin = K / 2 - (keys @ keys.T - 2 * K * torch.eye(N)).max()
    for i, sign in itertools.product(range(N), (1, -1)):
        units = first + K * (2 * i + (sign > 0))
        block.up.weight[units, memory[i]] = sign
        block.up.weight[units[:, None], address] = 20 / margin * keys[i]
        block.up.bias[units] = 10 - 20 / margin * K / 2
        block.down.weight[answer, units] = sign / 2
        block.down.weight[answer + half, units] = -sign / 2
    model.head.weight[first, answer] = 1
    return model.eval()


# ---- circuits for --circuit


def minimal_circuit(D, layers, causal):
    """Return the paths along which the query comes to hold as many of x_1, ..., x_D as the
    information flow allows at this depth: one head per layer with a causal mask, two without."""
    ends, last = [], 2 * D  # (layer, head, source, target); the roles are 0 = q, 2k-1 = ka, 2k = kb
    for layer in range(layers):
        if not causal:
            # each layer triples what a role holds, in both directions along the chain
            step = 3**layer
            ends += [(layer, 0, role, min(role + step, last)) for role in range(last)]
            ends += [(layer, 1, role, max(role - step, 0)) for role in range(1, last + 1)]
        elif layer == 0:
            # every kb attends to its ka
            ends += [(0, 0, b, b - 1) for b in range(2, last + 1, 2)]
        else:
            # each further layer doubles what the query, or a kb, holds
            step = 2**layer
            ends += [(layer, 0, b, b + step) for b in range(0, last + 1 - step, 2)]
    names = chain(1, D).names
    return [Path(layer, head, names[a], names[b]) for layer, head, a, b in ends]


def conditional_circuit(D, layers, causal):
    """Return the paths along which the query of conditional retrieval comes to hold x and y in two
    layers and z in three, with a mask or without. One head of each layer finds x, the other y."""
    steps = ["0 1b 1a", "0 3c 3a", "1 2b 2a", "1 3c 3b"], ["0 q 1b", "1 q 2b"], ["0 q 3c"]
    paths = []
    for layer, texts in enumerate(steps[:layers]):
        for head, *pair in map(str.split, texts):
            paths.append(Path(layer, int(head), *pair))
    return paths


CIRCUITS = {  # (--circuit, --task): (D, layers, causal) -> [Path, ...]
    ("minimal", "chain"): minimal_circuit,
    ("minimal", "conditional"): conditional_circuit,
}


def frozen_paths(flags, circuit):
    """Return the paths of a circuit by its name; UserError if there is none for the task or its
    heads."""
    if (circuit, flags.task) not in CIRCUITS:
        raise UserError(f"no circuit {circuit} of --task {flags.task} is known: add it to CIRCUITS")
    paths = CIRCUITS[circuit, flags.task](flags.D, flags.layers, flags.causal)
    heads = 1 + max(path.head for path in paths)
    if flags.heads < heads:
        raise UserError(f"circuit {circuit} needs --heads {heads} or more")
    return paths


def main():
    """Print the laws, each exact one beside its simulation."""
    row = "{:>4} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12} {:>12}".format
    names = "Theorem 1", "no mask", "simulated", "causal mask", "simulated", "with width"
    print(row("D", *names, "simulated"))
    for D in range(1, 21):
        unmasked, causal = (least_layers(chain(1, D), mask)[-1] for mask in (False, True))
        laws = paper_bound(D), unmasked_depth(D), unmasked, causal_depth(D), causal
        print(row(D, *laws, wide_depth(D), least_layers(chain(1, D), wide=True)[-1]))


def draw_flow(path, D=5):
    """Draw Figures 3 and 8, the roles of a chain that share a symbol (above) or a slot (below)
    before any layer, and after how many layers each role holds each symbol (Section 5)."""
    task = chain(1, D)
    known, roles, rivals = whole_sequence(task)
    order, names = roles.argsort(), task.names  # along the chain: q, 1a, 1b, ..., Db
    figure = Figure(figsize=(14, 4), layout="constrained")
    shared, *panels = figure.subplots(1, 3)
    kinds, arc = known[order].float().split([task.symbols, D + 1], 1), np.linspace(0, 1, 50)
    for pieces, side, word in zip(kinds, (1, -1), ("symbol", "slot"), strict=True):
        for i, j in (pieces @ pieces.T).triu(1).nonzero().tolist():
            shared.plot(i + (j - i) * arc, side * (0.3 + 2 * arc * (1 - arc)), f"C{side % 3}")
        shared.text(D, side, f"the same {word}", color=f"C{side % 3}", ha="center", va="center")
    for place, name in enumerate(names):
        shared.text(place, 0, f"{name}\n$x_{task.roles[name]}$", ha="center", va="center")
    shared.set(ylim=(-1.2, 1.2), title=f"Figures 3 and 8: shared before any layer, D = {D}")
    shared.axis("off")

    # without a mask, then with one
    for panel, causal in zip(panels, (False, True), strict=True):
        held, layers = known, torch.zeros(len(names), task.symbols)
        for _ in names:
            layers += ~held[order, : task.symbols]
            held = attend(held, may_attend(task, causal)[roles[:, None], roles], rivals)
        layers[~held[order, : task.symbols]] = math.nan
        panel.imshow(layers.T.numpy(), origin="lower", aspect="auto", cmap="Blues", vmin=-3, vmax=8)
        for role, k in layers.isfinite().nonzero().tolist():
            panel.text(role, k, f"{layers[role, k]:.0f}", ha="center", va="center")
        panel.set_xticks(range(len(names)), names)
        panel.set_yticks(range(task.symbols), [f"$x_{k}$" for k in range(task.symbols)])
        panel.set(xlabel="role", ylabel="symbol")
        mask = "causal mask (white: never)" if causal else "no mask"
        panel.set_title(f"Layers until a role holds a symbol\n{mask}")
    save_figure(figure, path)


if __name__ == "__main__":
    with program("python -m extras.studies.theory"):
        p = command_line("python -m extras.studies.theory", __doc__)
        p.add_argument("--figure", type=pathlib.Path, help="draw Figures 3 and 8 into this file")
        figure = p.parse_args().figure
        draw_flow(figure) if figure else main()
