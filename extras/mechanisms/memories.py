"""Weights as associative memories (Bietti's slides): what one gradient step and training store.

    python -m extras.mechanisms memories                          # about 2 minutes on one core

A memory W answers token z with the k of the largest u_k' W e_z, where e and u are random unit
vectors of d numbers. The fact is always z -> z: with random vectors any other one-to-one map only
renames the answers.
"""

import math

from extras.mechanisms import COLORS, interval, mean

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, normalize


WIDTHS = {"one step": (32, 64, 128, 256), "matrix": (8, 16, 23, 32, 45), "MLP": (8, 12, 16)}


def one_step_recall(seed, facts, d):
    """The share of facts recalled after one gradient step from zero, over enough draws of the
    embeddings for 4000 facts."""
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
        optimizer.zero_grad()
        cross_entropy(logits, torch.arange(facts)).backward()
        optimizer.step()
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


def capacities(rows):
    """{memory: (parameters (widths, 1), facts stored (widths, seeds))}."""
    stored = {}
    for memory, widths in WIDTHS.items():
        parameters = [[d**2 * (4 if memory == "MLP" else 1)] for d in widths]
        facts = torch.tensor([row["values"] for row in rows if row["memory"] == memory]).float()
        stored[memory] = torch.tensor(parameters), facts
    return stored


def table(rows):
    """The capacity of each memory at each of its widths."""
    cells = [("memory", "widths d", "facts N recalled to 99%", "parameters / (N ln N)")]
    for memory, (p, facts) in capacities(rows).items():
        means = ", ".join(f"{value:.0f}" for value in facts.mean(1))
        ratio = mean((p / (facts * facts.log())).mean(0))
        cells.append((memory, ", ".join(map(str, WIDTHS[memory])), means, ratio))
    return cells


SIZES = [dict(memory=memory, d=d) for memory, widths in WIDTHS.items() for d in widths]
TASKS = [(capacity, 5, [size | dict(steps=1000) for size in SIZES], table)]


def draw(results):
    """Plot the facts stored per parameter: points are measured, lines are p ~ N ln N."""
    figure, panel = plt.subplots(figsize=(5.4, 4.2), layout="constrained")
    stored = capacities(results["capacity"])
    for color, (memory, (p, facts)) in zip(COLORS, stored.items(), strict=False):
        c, per_parameter = (p / (facts * facts.log())).mean(), facts / p
        means, intervals = per_parameter.mean(1), [interval(seeds) for seeds in per_parameter]
        errors = (torch.tensor(intervals).T - means).abs()
        style = dict(fmt="o", ms=4, capsize=3, color=color)
        panel.errorbar(p[:, 0], means, errors, label=f"{memory}; line: p = {c:.2f} N ln N", **style)
        line = torch.linspace(facts.min(), facts.max(), 99)
        panel.loglog(c * line * line.log(), 1 / (c * line.log()), color=color)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.4)
    panel.set_yticks(ticks, ticks)
    panel.set_yticks([], minor=True)
    panel.set(xlabel="parameters p", ylabel="N / p, facts stored per parameter")
    panel.set_title(f"N facts are recalled to 99%, {facts.shape[1]} seeds")
    panel.legend(fontsize="small")
    return figure
