"""Weights as associative memories (Bietti's slides): gradient lemma, one step, capacity, scaling.

    python mechanisms/memories.py                          # about 3 minutes on 2 cores
    python mechanisms/memories.py --plot-only              # the figure again, from memories.json

A memory W answers token z with the k of the largest u_k' W e_z, e and u random unit vectors of d
numbers. The fact is always z -> z: among random vectors any one-to-one map is this one renamed.
"""

import math

from parts.intervals import bootstrap
from parts.runs import measure_and_draw, measure_each, save_figure

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, normalize


LOADS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08)  # facts / d^2 after one step
WIDTHS = {"one step": (32, 64, 128, 256), "matrix": (8, 16, 23, 32, 45), "MLP": (8, 12, 16)}
ZIPF_WIDTHS = (10, 20, 50, 100, 200, 500, 1000)
COLORS = ("#0072B2", "#D55E00", "#009E73")  # all readers can tell these apart


def lemma_gradient(W, U, E, joint):
    """Gradient (d, d) of the cross-entropy by the lemma: sums of u_k e_z'; joint = p(z, y)."""
    predicted = (E @ W.T @ U.T).softmax(1)  # (N, M) as joint, of tokens E (N, d), answers U (M, d)
    return U.T @ (predicted * joint.sum(1, keepdim=True) - joint).T @ E


def lemma_error(seed):
    """Largest difference between the lemma and autograd, as a share of the largest gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((16, 16), (20, 16), (30, 16), (30, 20))
    W, U, E, joint = (torch.randn(s, generator=generator, dtype=torch.double) for s in shapes)
    joint = joint.exp() / joint.exp().sum()
    loss = -(joint * (E @ W.requires_grad_().T @ U.T).log_softmax(1)).sum()
    (gradient,) = torch.autograd.grad(loss, W)
    lemma = lemma_gradient(W.detach(), U, E, joint)
    return float((gradient - lemma).abs().max() / gradient.abs().max())


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
    """(Gaussian, on the sphere) expectations of one_step_recall, nothing fitted [derived].

    N times the right logit is 1 + g sqrt(N-1)/d, g ~ N(0, 1), up to a shift. Gaussian: the N-1
    wrong ones are independent, of variance (N-2)/d^2 + 2/d. On the sphere: they are |w| times the
    cosines of random directions with w, which holds the right answer: |w| grows with its logit.
    """
    g = torch.special.ndtri((torch.arange(4000, dtype=torch.double) + 0.5) / 4000)
    right = 1 + g * math.sqrt(facts - 1) / d
    gaussian = torch.special.ndtr(right / math.sqrt((facts - 2) / d**2 + 2 / d))
    threshold = right / (right**2 + (facts - 2) / d + 1).sqrt()
    cosine = torch.linspace(-1, 1, 100001, dtype=torch.double)
    below = (1 - cosine**2).pow((d - 3) / 2).cumsum(0)
    on_sphere = (below / below[-1])[((threshold + 1) * 50000).round().long()]
    return [float((beats_one ** (facts - 1)).mean()) for beats_one in (gaussian, on_sphere)]


def learns(facts, d, hidden, steps, generator):
    """Whether full-batch AdamW gets more than 99% of the facts right; hidden = 0: W is a matrix."""
    U, E = normalize(torch.randn(2, facts, d, generator=generator), dim=2)
    shapes = [(d, hidden), (hidden, d)] if hidden else [(d, d)]
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    rate = 0.1 if hidden else 0.3  # three times the steps store up to 6% more
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


def zipf_errors(seed, d, tokens=1000, answers=5, alpha=2):
    """Error of W = sum_x q(x) u_f(x) e_x' for q = 1, p, 1{x <= d/8}; p ~ x^-alpha, f = x mod 5."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.arange(1, tokens + 1)
    p = rank.float() ** -alpha / (rank.float() ** -alpha).sum()
    E = normalize(torch.randn(tokens, d, generator=generator), dim=1)
    U = normalize(torch.randn(answers, d, generator=generator), dim=1)
    overlap, errors = U @ U[rank % answers].T, []  # (answers, tokens)
    for q in (torch.ones(tokens), p, (rank <= d / 8).float()):
        logits = (overlap * q) @ E @ E.T  # = U W E', without forming W
        errors.append(float(p[logits.argmax(0) != rank % answers].sum()))
    return errors


def measure(args):
    """{name of a function: rows of its arguments and "values", one a seed, 20 of Zipf data}."""
    seeds = range(args.seed, args.seed + args.seeds)
    many = range(args.seed, args.seed + 20 * args.seeds)
    runs = [(1, lemma_error, {}, seeds)]  # shares of the time: rough guesses
    for d in ZIPF_WIDTHS:
        runs.append((d / 100, zipf_errors, dict(d=d), many))
    for d in WIDTHS["one step"]:
        for facts in [max(2, round(load * d * d)) for load in LOADS]:
            runs.append((facts * d / 1e5, one_step_recall, dict(facts=facts, d=d), seeds))
    for memory, widths in WIDTHS.items():
        for d in widths:
            share = d * d / (1000 if memory == "one step" else 20)
            runs.append((share, capacity, dict(memory=memory, d=d, steps=args.steps), seeds))
    return measure_each([(run[0], run[1].__name__, *run[1:]) for run in runs])


def points(axes, x, values, **style):
    """Means over seeds of values (len(x), seeds) with 95% intervals."""
    values = torch.as_tensor(values, dtype=torch.float)
    bounds = [bootstrap(some, torch.Generator().manual_seed(0)) for some in values]
    spread = (torch.tensor(bounds).T - values.mean(1)).abs()
    axes.errorbar(x, values.mean(1), spread, capsize=2, fmt="o", ms=4, **style)


def draw(results, path):
    """Recall after one step against load, facts stored per parameter, error on Zipf data."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    for i, d in enumerate(sorted({row["d"] for row in results["one_step_recall"]})):
        color = plt.get_cmap("viridis")(i / 4)
        rows = [row for row in results["one_step_recall"] if row["d"] == d]
        loads, values = [row["facts"] / d**2 for row in rows], [row["values"] for row in rows]
        points(left, loads, values, color=color, label=f"d = {d}")
        expected = torch.tensor([predicted_recall(row["facts"], d) for row in rows])
        left.plot(loads, expected[:, 0], ":", loads, expected[:, 1], "-", color=color)
    left.set(xlabel="facts / $d^2$", ylabel="share of facts recalled")
    left.plot([], [], "k-", label="expected")
    left.plot([], [], "k:", label="expected, crudely")
    left.set_title(f"After one gradient step, {len(values[0])} seeds")

    # p parameters hold N facts: measured, in proportion (dotted), and p ~ N ln N (solid)
    for memory, color in zip(WIDTHS, COLORS, strict=True):
        rows = [row for row in results["capacity"] if row["memory"] == memory]
        p = torch.tensor([[row["d"] ** 2 * (4 if memory == "MLP" else 1)] for row in rows])
        facts = torch.tensor([row["values"] for row in rows])
        c = (p / (facts * facts.log())).mean()
        label = f"{memory}: $N = {(facts / p).mean():.3f} p$ (dotted), $p = {c:.2f} N \\ln N$"
        points(middle, p[:, 0], facts / p, color=color, label=label)
        middle.plot(p, (facts / p).mean().expand(len(p)), ":", color=color)
        line = torch.linspace(facts.min(), facts.max(), 99)
        middle.loglog(c * line * line.log(), 1 / (c * line.log()), color=color)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.4)
    middle.set_yticks(ticks, ticks)
    middle.set_yticks([], minor=True)
    middle.set(xlabel="parameters p", ylabel="N / p, facts stored per parameter")
    middle.set_title(f"N facts at 99%, {facts.shape[1]} seeds")

    # errors of the three ways to weigh a token, and the laws of the last two
    for i, q in enumerate(("1", "p(x)", "1{x <= d/8}")):
        errors = [[trial[i] for trial in row["values"]] for row in results["zipf_errors"]]
        points(right, ZIPF_WIDTHS, errors, color=COLORS[i], label=f"q(x) = {q}")
    d = torch.tensor(ZIPF_WIDTHS)
    right.loglog(d, 0.4 * d**-0.25, "k:", label="$d^{-1/4}$")
    right.loglog(d, 4 / d, "k--", label="$d^{-1}$")
    right.set(xlabel="d", ylabel="error", title=f"Zipf data, {len(errors[0])} trials")
    for axes in (left, middle, right):
        axes.legend(fontsize="small")
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, steps=1000, seeds=5)


if __name__ == "__main__":
    main()
