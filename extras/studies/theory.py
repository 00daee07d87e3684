"""How deep a transformer must be: the information flow of Section 5, and the laws that follow.

    python -m extras.studies.theory --figure out/flow.png    # Figures 3 and 8

Every token starts with two pieces of information: its symbol, and the slot in which it stands. In
each layer a token may attend to every token with which it shares a piece (Assumption 1), and then
holds all the pieces of that token as well (Assumption 2).
"""

import itertools
import math
import pathlib

from analyze import panels, save_figure
from data import Task, command_line

import numpy as np
import torch
import torch.nn.functional as F


# ---- the information flow


def before_any_layer(task):
    """Return what the roles of a chain hold at first, (roles, pieces) bool: x_0 to x_D, then the
    slots."""
    slots = {role: i for i, slot in enumerate(task.chain_slots) for role in slot}
    slots = torch.tensor([slots[role] for role in task.roles])
    symbols = torch.tensor([*task.roles.values()])
    return torch.cat([F.one_hot(symbols), F.one_hot(slots)], 1).bool()


def layers_until_held(task, causal=True):
    """Return after how many layers each role can hold each symbol of its chain, (roles, D + 1), inf
    if never; the first role is the query. With a causal mask a role attends only to those that are
    read before it, and to itself."""
    known, order = before_any_layer(task), [role for slot in task.chain_slots for role in slot]
    read_at = torch.tensor([order.index(role) for role in task.roles])
    allowed = (read_at[:, None] >= read_at) | (not causal)
    layers = torch.zeros(len(known), task.D + 1)
    for _ in task.roles:
        layers += ~known[:, : task.D + 1]
        shared = known.float() @ known.float().T > 0
        known |= (shared & allowed).float() @ known.float() > 0
    return layers.masked_fill(~known[:, : task.D + 1], math.inf)


# ---- the laws


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
    return next(t for t in itertools.count() if 3**t >= 4 * D + 1)


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


def draw_flow(path, D=5):
    """Draw Figures 3 and 8, the roles of a chain that share a symbol (above) or a slot (below)
    before any layer, and after how many layers each role holds each symbol (Section 5)."""
    task = Task(1, D)
    names = [*task.roles]  # along the chain: q, 1a, 1b, ..., Db
    figure, (shared, *flows) = panels(3, 3, 14 / 3, 3)
    kinds, arc = before_any_layer(task).float().split(D + 1, 1), np.linspace(0, 1, 50)
    for pieces, side, word in zip(kinds, (1, -1), ("symbol", "slot"), strict=True):
        for i, j in (pieces @ pieces.T).triu(1).nonzero().tolist():
            shared.plot(i + (j - i) * arc, side * (0.3 + 2 * arc * (1 - arc)), f"C{side % 3}")
        shared.text(D, side, f"the same {word}", color=f"C{side % 3}", ha="center", va="center")
    for place, name in enumerate(names):
        shared.text(place, 0, f"{name}\n$x_{task.roles[name]}$", ha="center", va="center")
    shared.set(ylim=(-1.2, 1.2), title=f"Figures 3 and 8: shared before any layer, D = {D}")
    shared.axis("off")

    # without a mask, then with one
    for panel, causal in zip(flows, (False, True), strict=True):
        layers = layers_until_held(task, causal)
        panel.imshow(layers.T.numpy(), origin="lower", aspect="auto", cmap="Blues", vmin=-3, vmax=8)
        for role, k in layers.isfinite().nonzero().tolist():
            panel.text(role, k, f"{layers[role, k]:.0f}", ha="center", va="center")
        panel.set_xticks(range(len(names)), names)
        panel.set_yticks(range(D + 1), [f"$x_{k}$" for k in range(D + 1)])
        panel.set(xlabel="role", ylabel="symbol")
        mask = "causal mask (white: never)" if causal else "no mask"
        panel.set_title(f"Layers until a role holds a symbol\n{mask}")
    save_figure(figure, path)


if __name__ == "__main__":
    p = command_line("python -m extras.studies.theory", __doc__)
    p.add_argument("--figure", type=pathlib.Path, required=True, help="the file of the figure")
    draw_flow(p.parse_args().figure)
