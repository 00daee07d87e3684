"""Weights as associative memories (Bietti's slides): what one gradient step and training store.

    python -m mechanisms.memories                          # about 2 minutes on one core

A memory W answers token z with the k of the largest u_k' W e_z, where e and u are random unit
vectors of d numbers. The fact is always z -> z: with random vectors any other one-to-one map only
renames the answers.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, normalize

from mechanisms import COLORS, command, draw_means, mean


LOADS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08)  # facts / d^2 after one step
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


def predicted_recall(facts, d):
    """The expectation of one_step_recall without a fitted parameter [derived].

    N times the right logit is 1 + g sqrt(N-1)/d with g ~ N(0, 1), up to a shift. The wrong ones are
    |w| times the cosines between w and random directions; |w| grows with the right logit."""
    g = torch.special.ndtri((torch.arange(4000, dtype=torch.double) + 0.5) / 4000)
    right = 1 + g * math.sqrt(facts - 1) / d
    threshold = right / (right**2 + (facts - 2) / d + 1).sqrt()
    cosine = torch.linspace(-1, 1, 100001, dtype=torch.double)
    below = (1 - cosine**2).pow((d - 3) / 2).cumsum(0)
    beats_one = (below / below[-1])[((threshold + 1) * 50000).round().long()]
    return float((beats_one ** (facts - 1)).mean())


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


LOADED = [dict(facts=round(load * d * d), d=d) for d in WIDTHS["one step"] for load in LOADS]
SIZES = [dict(memory=memory, d=d) for memory, widths in WIDTHS.items() for d in widths]
TASKS = [(one_step_recall, size) for size in LOADED]
TASKS += [(capacity, size | dict(steps=1000)) for size in SIZES]


def capacities(results):
    """{memory: (parameters (widths, 1), facts stored (widths, seeds))}."""
    stored = {}
    for memory in WIDTHS:
        rows = [row for row in results["capacity"] if row["memory"] == memory]
        parameters = [[row["d"] ** 2 * (4 if memory == "MLP" else 1)] for row in rows]
        facts = torch.tensor([row["values"] for row in rows]).float()
        stored[memory] = torch.tensor(parameters), facts
    return stored


def table(results):
    """The capacity of each memory at each of its widths."""
    rows = [("memory", "widths d", "facts N recalled to 99%", "parameters / (N ln N)")]
    for memory, (p, facts) in capacities(results).items():
        means = ", ".join(f"{value:.0f}" for value in facts.mean(1))
        ratio = mean((p / (facts * facts.log())).mean(0))
        rows.append((memory, ", ".join(map(str, WIDTHS[memory])), means, ratio))
    return rows


def draw(results):
    """Plot the recall after one step by load, and the facts stored per parameter."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for i, d in enumerate(WIDTHS["one step"]):
        color = plt.get_cmap("viridis")(i / 4)
        rows = [row for row in results["one_step_recall"] if row["d"] == d]
        loads, values = [row["facts"] / d**2 for row in rows], [row["values"] for row in rows]
        draw_means(left, loads, torch.tensor(values), fmt="o", ms=4, color=color, label=f"d = {d}")
        left.plot(loads, [predicted_recall(row["facts"], d) for row in rows], color=color)
    left.plot([], [], "k-", label="expected, nothing fitted")
    left.set(xlabel="facts N / $d^2$", ylabel="share of facts recalled")
    left.set_title(f"W after one gradient step, {len(values[0])} seeds")

    # points are measured, lines are p ~ N ln N
    for color, (memory, (p, facts)) in zip(COLORS, capacities(results).items(), strict=False):
        c = (p / (facts * facts.log())).mean()
        label = f"{memory}; line: p = {c:.2f} N ln N"
        draw_means(right, p[:, 0], facts / p, fmt="o", ms=4, color=color, label=label)
        line = torch.linspace(facts.min(), facts.max(), 99)
        right.loglog(c * line * line.log(), 1 / (c * line.log()), color=color)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.4)
    right.set_yticks(ticks, ticks)
    right.set_yticks([], minor=True)
    right.set(xlabel="parameters p", ylabel="N / p, facts stored per parameter")
    right.set_title(f"N facts are recalled to 99%, {facts.shape[1]} seeds")
    left.legend(fontsize="small")
    right.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, TASKS, table, draw, seeds=5)
