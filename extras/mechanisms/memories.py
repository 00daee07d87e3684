"""Weights as associative memories (Bietti's slides): what one gradient step and training store.

A memory W answers token z with the k of the largest u_k' W e_z, where e and u are random unit
vectors of d numbers. The fact is always z -> z: any other one-to-one map only renames the answers.
"""

import math

from analyze import panels
from extras.mechanisms import COLORS, descend, seeds_table

import torch
from torch.nn.functional import cross_entropy, normalize


WIDTHS = {"one step": (32, 64, 128, 256), "matrix": (8, 16, 23, 32, 45), "MLP": (8, 12, 16)}


def one_step_recall(seed, facts, d):
    """The share of facts recalled after one gradient step from zero, over draws for 4000 facts."""
    generator = torch.Generator().manual_seed(seed)
    right, draws = 0, math.ceil(4000 / facts)
    for _ in range(draws):
        U, E = normalize(torch.randn(2, facts, d, generator=generator), dim=2)
        W = (U - U.mean(0)).T @ E / facts  # the negative gradient, (d, d)
        answers = (E @ W.T @ U.T).argmax(1)
        right += int((answers == torch.arange(facts)).sum())
    return right / (draws * facts)


def learns(facts, d, hidden, steps, generator):
    """Whether full-batch AdamW recalls more than 99% of the facts; hidden = 0 trains a matrix."""
    U, E = normalize(torch.randn(2, facts, d, generator=generator), dim=2)
    shapes = [(d, hidden), (hidden, d)] if hidden else [(d, d)]
    weights = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    optimizer = torch.optim.AdamW(weights, lr=0.1 if hidden else 0.3, weight_decay=0)
    for _ in range(steps):
        x = E @ weights[0]
        logits = (x.relu() @ weights[1] if hidden else x) @ U.T
        if (logits.argmax(1) == torch.arange(facts)).float().mean() > 0.99:
            return True
        descend(optimizer, cross_entropy(logits, torch.arange(facts)))
    return False


def capacity(seed, memory, d, steps):
    """The number of facts, to 2%, of which a memory recalls more than 99%, by bisection."""
    generator, hidden = torch.Generator().manual_seed(seed), 2 * d if memory == "MLP" else 0
    low, high = 2, d * max(d, 2 * hidden)
    while high > 1.02 * low + 1:
        middle = round(math.sqrt(low * high))
        if memory == "one step":
            recalled = one_step_recall(seed, middle, d) > 0.99
        else:
            recalled = learns(middle, d, hidden, steps, generator)
        low, high = (middle, high) if recalled else (low, middle)
    return low


def parameters_of(row):
    """The number of parameters of a memory: an MLP has two matrices, (2d, d) and (d, 2d)."""
    return row["d"] ** 2 * (4 if row["memory"] == "MLP" else 1)


def table(rows):
    head = "memory", "width d", "facts N", "N / parameters", "N ln N / parameters"
    lines = []
    for row in rows:
        facts = torch.tensor(row["values"]).double()
        share = facts / parameters_of(row)
        parts = f"{facts.mean():.0f}", f"{share.mean():.3f}", f"{(share * facts.log()).mean():.2f}"
        lines.append((row["memory"], row["d"], *parts))
    return seeds_table(rows, head, lines)


def draw(results):
    """Plot N and N ln N against the parameters, both on logarithmic axes."""
    figure, [panel] = panels(1, 1, 7, 4)
    for memory, color in zip(WIDTHS, COLORS, strict=False):
        rows = [row for row in results["capacity"] if row["memory"] == memory]
        x = [parameters_of(row) for row in rows]
        facts = torch.tensor([row["values"] for row in rows]).double()  # (widths, seeds)
        panel.plot(x, (facts * facts.log()).mean(1), "o-", color=color, label=f"N ln N, {memory}")
        panel.plot(x, facts.mean(1), "o:", mfc="white", color=color, label=f"N facts, {memory}")
    panel.plot([64, 65536], [64, 65536], "--", color="0.5", label="one for each parameter")
    panel.set(xscale="log", yscale="log", xlabel="trained parameters")
    panel.set_ylabel(f"recalled, mean of {facts.shape[1]} seeds")
    panel.legend(fontsize="small", ncols=2)
    return figure


SIZES = [dict(memory=memory, d=d) for memory, widths in WIDTHS.items() for d in widths]
TASKS = [(capacity, 5, [size | dict(steps=1000) for size in SIZES], table)]
