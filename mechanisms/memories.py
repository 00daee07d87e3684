"""Weights as associative memories (Bietti's slides): what one step stores, and training.

    python -m mechanisms.memories                          # about 2 minutes of one core

A memory W answers token z with the k of the largest u_k' W e_z, e and u random unit vectors of d
numbers. The fact is always z -> z: among random vectors any one-to-one map is this one renamed.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, normalize

from mechanisms import COLORS, command, draw_means, markdown, mean


LOADS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08)  # facts / d^2 after one step
WIDTHS = {"one step": (32, 64, 128, 256), "matrix": (8, 16, 23, 32, 45), "MLP": (8, 12, 16)}


def one_step(U, E):
    """W (d, d) after one gradient step of rate 1 from zero, in closed form; U, E (N, d)."""
    return (U - U.mean(0)).T @ E / len(E)


def one_step_recall(seed, facts, d):
    """Share of the facts right after one step, over as many draws as ask 4000 questions."""
    generator = torch.Generator().manual_seed(seed)
    right, draws = 0, math.ceil(4000 / facts)
    for _ in range(draws):
        U, E = normalize(torch.randn(2, facts, d, generator=generator), dim=2)
        answers = (E @ one_step(U, E).T @ U.T).argmax(1)
        right += int((answers == torch.arange(facts)).sum())
    return right / (draws * facts)


def predicted_recall(facts, d):
    """The expectation of one_step_recall, nothing fitted [derived].

    N times the right logit is 1 + g sqrt(N-1)/d, g ~ N(0, 1), up to a shift. The N-1 wrong ones are
    |w| times the cosines of random directions with w, which holds the right answer: |w| grows with
    its logit."""
    g = torch.special.ndtri((torch.arange(4000, dtype=torch.double) + 0.5) / 4000)
    right = 1 + g * math.sqrt(facts - 1) / d
    threshold = right / (right**2 + (facts - 2) / d + 1).sqrt()
    cosine = torch.linspace(-1, 1, 100001, dtype=torch.double)
    below = (1 - cosine**2).pow((d - 3) / 2).cumsum(0)
    beats_one = (below / below[-1])[((threshold + 1) * 50000).round().long()]
    return float((beats_one ** (facts - 1)).mean())


def learns(facts, d, hidden, steps, generator):
    """Whether full-batch AdamW gets more than 99% of the facts right; hidden = 0: W is a matrix."""
    U, E = normalize(torch.randn(2, facts, d, generator=generator), dim=2)
    shapes = [(d, hidden), (hidden, d)] if hidden else [(d, d)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    rate = 0.1 if hidden else 0.3
    optimizer = torch.optim.AdamW([w.requires_grad_() for w in weights], lr=rate, weight_decay=0)
    for _ in range(steps):
        logits = ((E @ weights[0]).relu() @ weights[1] if hidden else E @ weights[0]) @ U.T
        if (logits.argmax(1) == torch.arange(facts)).float().mean() > 0.99:
            return True
        optimizer.zero_grad()
        cross_entropy(logits, torch.arange(facts)).backward()
        optimizer.step()
    return False


def capacity(seed, memory, d, steps):
    """Number of facts, to 2%, that "one step", a trained "matrix" or "MLP" recalls to over 99%."""
    generator, hidden = torch.Generator().manual_seed(seed), 2 * d if memory == "MLP" else 0
    low, high = 2, d * max(d, 2 * hidden)  # bisection between these
    while high > 1.02 * low + 1:
        middle = round(math.sqrt(low * high))
        if memory == "one step":
            recalled = one_step_recall(seed, middle, d) > 0.99
        else:
            recalled = learns(middle, d, hidden, steps, generator)
        low, high = (middle, high) if recalled else (low, middle)
    return low


def capacities(results):
    """{memory: (parameters (widths, 1), facts stored (widths, seeds))}."""
    found = {}
    for memory in WIDTHS:
        rows = [row for row in results["capacity"] if row["memory"] == memory]
        p = torch.tensor([[row["d"] ** 2 * (4 if memory == "MLP" else 1)] for row in rows])
        found[memory] = p, torch.tensor([row["values"] for row in rows]).float()
    return found


def tasks(seeds, steps):
    todo = []
    for d in WIDTHS["one step"]:
        for facts in [max(2, round(load * d * d)) for load in LOADS]:
            todo.append((facts * d / 1e5, one_step_recall, dict(facts=facts, d=d), seeds))
    for memory, widths in WIDTHS.items():
        for d in widths:
            share = d * d / (1000 if memory == "one step" else 20)
            todo.append((share, capacity, dict(memory=memory, d=d, steps=steps), seeds))
    return todo


def table(results):
    rows = [("memory", "widths d", "facts N recalled to 99%", "parameters / (N ln N)")]
    for memory, (p, facts) in capacities(results).items():
        stored = ", ".join(f"{some:.0f}" for some in facts.mean(1))
        ratio = mean((p / (facts * facts.log())).mean(0))
        rows.append((memory, ", ".join(map(str, WIDTHS[memory])), stored, ratio))
    return markdown(*rows)


def draw(results):
    """Recall after one step against load, and facts stored per parameter."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for i, d in enumerate(sorted({row["d"] for row in results["one_step_recall"]})):
        color = plt.get_cmap("viridis")(i / 4)
        rows = [row for row in results["one_step_recall"] if row["d"] == d]
        loads, values = [row["facts"] / d**2 for row in rows], [row["values"] for row in rows]
        draw_means(left, loads, torch.tensor(values), fmt="o", ms=4, color=color, label=f"d = {d}")
        left.plot(loads, [predicted_recall(row["facts"], d) for row in rows], color=color)
    left.plot([], [], "k-", label="expected, nothing fitted")
    left.set(xlabel="facts N / $d^2$", ylabel="share of facts recalled")
    left.set_title(f"W after one gradient step, {len(values[0])} seeds")

    # points are measured, lines p ~ N ln N
    for i, (memory, (p, facts)) in enumerate(capacities(results).items()):
        c = (p / (facts * facts.log())).mean()
        label = f"{memory}; line: p = {c:.2f} N ln N"
        draw_means(right, p[:, 0], facts / p, fmt="o", ms=4, color=COLORS[i], label=label)
        line = torch.linspace(facts.min(), facts.max(), 99)
        right.loglog(c * line * line.log(), 1 / (c * line.log()), color=COLORS[i])
    ticks = (0.02, 0.05, 0.1, 0.2, 0.4)
    right.set_yticks(ticks, ticks)
    right.set_yticks([], minor=True)
    right.set(xlabel="parameters p", ylabel="N / p, facts stored per parameter")
    right.set_title(f"N facts are recalled to 99%, {facts.shape[1]} seeds")
    left.legend(fontsize="small")
    right.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, draw, steps=1000, seeds=5)
