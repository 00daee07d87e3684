"""Factual recall (Bietti's slides): the hallucination plateau, its gradient flow, who stores facts.

    python mechanisms/recall.py                            # about 4 minutes on 2 cores
    python mechanisms/recall.py --plot-only                # the figure again, from recall.json

A sequence holds a subject s, a relation r, noise tokens and EOS; the fact a*(s, r) is asked. Each
relation has D answers of its own, A_r, each right for S/D subjects. Nothing has a position and EOS
alone attends: all that a model sees of a sequence is how often each of the V tokens occurs.
"""

import math

from parts.intervals import bootstrap
from parts.runs import measure_and_draw, measure_each, save_figure

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy


SWEEPS = {  # what is varied: {its value: (S, R, D, initial weight)}
    "S / R (S R = 128, D = 4)": {128 / R**2: (128 // R, R, 4, 1e-5) for R in (2, 4, 8, 16, 32)},
    "D (S = 16, R = 4)": {D: (16, 4, D, 1e-5) for D in (2, 4, 8, 16)},
    "initial weight (S = 16, R = 4, D = 8)": {10**-i: (16, 4, 8, 10**-i) for i in range(1, 7)},
}
HEADS, HIDDEN = (1, 2, 4, 8, 16), (0, 16, 32, 64, 128)
COLORS = ("#0072B2", "#D55E00", "#009E73", "black")  # all readers can tell these apart


def draw_facts(S, R, D, generator):
    """a*(s, r), (S, R); A_r = rD ... rD + D-1, in random order and equally often."""
    return torch.stack([torch.randperm(S, generator=generator) % D + r * D for r in range(R)], 1)


def draw_counts(subject, relation, S, R, noise, length, generator):
    """How often each of V = S + R + noise + 1 tokens occurs, (B, V); EOS, the last, always once."""
    B, V = len(subject), S + R + noise + 1
    others = S + R + torch.randint(noise, (B, length - 3), generator=generator)
    eos = torch.full((B, 1), V - 1)
    tokens = torch.cat([subject[:, None], S + relation[:, None], others, eos], 1)  # (B, length)
    return torch.zeros(B, V).scatter_add_(1, tokens, torch.ones(tokens.shape))


def linear_attention(counts, w, output):
    """Logits (B, A) of one-hot tokens: sums over z of counts (B, V) w (V) output (A, V)."""
    return (counts * w) @ output.T


def measures(logits, subject, relation, facts, D):
    """Means of three losses, -log of p(a*), p(A_r) and p(any fact about s), and of 1 - p(a*)."""
    log_p = logits.log_softmax(1)
    right = log_p.gather(1, facts[subject, relation][:, None])
    of_relation = log_p.unflatten(1, (-1, D)).logsumexp(2).gather(1, relation[:, None])
    values = -right, -of_relation, -log_p.gather(1, facts[subject]).logsumexp(1), 1 - right.exp()
    return [round(float(x.mean()), 5) for x in values]


def train_linear(seed, S, R, D, init, steps, lr=0.1, batch=1024, rows=200, noise=20, length=32):
    """About `rows` rows of (steps x lr, *measures) of linear attention under SGD."""
    generator = torch.Generator().manual_seed(seed)
    facts, found = draw_facts(S, R, D, generator), []
    w = torch.full((S + R + noise + 1,), init, requires_grad=True)
    output = torch.full((R * D, len(w)), init, requires_grad=True)
    for step in range(steps + 1):
        subject, relation = (torch.randint(n, (batch,), generator=generator) for n in (S, R))
        counts = draw_counts(subject, relation, S, R, noise, length, generator)
        logits = linear_attention(counts, w, output)
        if step % math.ceil(steps / rows) == 0 or step == steps:
            found.append([step * lr, *measures(logits.detach(), subject, relation, facts, D)])
        loss = cross_entropy(logits, facts[subject, relation])
        for x, slope in zip((w, output), torch.autograd.grad(loss, (w, output)), strict=True):
            x.data -= lr * slope
    return found


def flow(tokens, classes, class_size, init, end=math.inf):
    """Yield (time, loss) of one kind of token under gradient flow, by small Euler steps [derived].

    `tokens` tokens, equally frequent, tell `classes` classes of class_size answers apart: w is
    their attention, X the output for right less that for wrong answers, w X the margin in logits.
    """
    now, w, X, dt = 0.0, init, 0.0, 0.002 * tokens * math.sqrt(class_size)
    while now < end:
        yield now, math.log1p((classes - 1) * math.exp(-w * X))
        rate = (classes - 1) / (math.exp(w * X) + classes - 1) / tokens  # p(wrong) p(token)
        growth = rate * w * classes / ((classes - 1) * class_size)
        now, w, X = now + dt, w + dt * rate * X, X + dt * growth


def plateau(seed, table):
    """[entry, exit, both by the flow]: relation loss at 0.1 ln R, subject loss at 0.9 ln D."""
    S, R, D, init = table
    levels, kinds = (0.1 * math.log(R), 0.9 * math.log(D)), ((R, R, D), (S, D, R))
    flows = [next(t for t, loss in flow(*kinds[i], init) if loss < levels[i]) for i in (0, 1)]
    rows = train_linear(seed, *table, round(2.6 * max(flows)), lr=0.5, batch=256, rows=1000)
    return [next((r[0] for r in rows if r[2 + i] < levels[i]), math.nan) for i in (0, 1)] + flows


def softmax_attention(counts, E, U, Q, K, V, output, first, second):
    """Logits (B, A) at EOS: heads, Q to output (H, d_h, d); then an MLP (m, d) with a residual."""
    scores = (E @ K.mT @ (Q @ E[-1])[..., None])[..., 0] / math.sqrt(Q.shape[1])  # (H, V)
    attention = (scores + counts.log()[:, None]).softmax(-1)  # (B, H, V), 0 where a token is not
    x = attention.flatten(1) @ (E @ V.mT @ output).flatten(0, 1)  # (B, d)
    return (x + (x @ first.T).relu() @ second) @ U.T


def stored_share(seed, H, m, steps, S=16, R=16, D=8, d=16, head_size=4, noise=8, length=16):
    """Share of the S R facts right after training on all of them, each step in fresh noise."""
    generator = torch.Generator().manual_seed(seed)
    facts = draw_facts(S, R, D, generator).flatten()
    subject, relation = torch.cartesian_prod(torch.arange(S), torch.arange(R)).T
    shapes = [(S + R + noise + 1, d), (R * D, d)] + [(H, head_size, d)] * 4 + [(m, d)] * 2
    E, U, *weights = [torch.randn(s, generator=generator) / math.sqrt(d) for s in shapes]
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights])
    recent = []  # shares of the last 20 steps
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.04 * (1 - step / steps)
        counts = draw_counts(subject, relation, S, R, noise, length, generator)
        logits = softmax_attention(counts, E, U, *weights)
        recent = [*recent[-19:], float((logits.argmax(1) == facts).float().mean())]
        if sum(recent) == 20:
            break
        optimizer.zero_grad()
        cross_entropy(logits, facts).backward()
        optimizer.step()
    return sum(recent) / len(recent)


def measure(args):
    """{group: rows of arguments and "values", one a seed}."""
    seeds = range(args.seed, args.seed + args.seeds)
    system = dict(S=16, R=4, D=8, init=1e-5, steps=args.steps)
    tasks = [(5, "curves", train_linear, system, seeds)]  # 5 = roughly, in seconds
    for name, tables in SWEEPS.items():
        tasks += [(0.5, name, plateau, dict(table=table), seeds) for table in tables.values()]
    for H in HEADS:
        for m in HIDDEN:
            arguments = dict(H=H, m=m, steps=math.ceil(args.steps / 8))
            tasks.append((2, "stored", stored_share, arguments, seeds))
    return measure_each(tasks)


def draw(results, path):
    """Losses beside the flow, share of facts stored, entry and exit of the plateau."""
    figure, axes = plt.subplot_mosaic("AAAABB;CCDDEE", figsize=(15, 9), layout="constrained")
    losses, heat, *sweeps = axes.values()
    S, R, D, init, _, values = results["curves"][0].values()
    curves = torch.tensor(values)  # (seeds, times, time and measures)
    names = "total loss, ln RD", "relation loss, ln R", "subject loss, ln D", "1 - p(a*)"
    for i, name in enumerate(names):
        losses.plot(curves[0, :, 0], curves[:, :, i + 1].T, color=COLORS[i], lw=3, alpha=0.5)
        losses.plot([], [], color=COLORS[i], lw=3, label=name + " at first" * (i < 3))
    for kind in (R, R, D), (S, D, R):
        expected = zip(*flow(*kind, init, end=curves[0, -1, 0]), strict=True)
        losses.plot(*expected, "k--", lw=1)
    losses.plot([], [], "k--", lw=1, label="gradient flow (two of the losses)")
    levels = {"0": 0, "1 - 1/D": 1 - 1 / D, "ln R": math.log(R), "ln D": math.log(D)}
    losses.set_yticks([*levels.values(), math.log(R * D)], [*levels, "ln RD"])
    losses.set(xlabel="steps x lr (learning rate)", ylabel="nats; black: probability")
    where = f"S = {S}, R = {R}, D = {D}, initial weight {init:g}"
    losses.set_title(f"{where}; {len(curves)} seeds")
    losses.legend()

    # facts, and parameters of heads and MLP
    shares = torch.tensor([row["values"] for row in results["stored"]]).mean(1)
    heat.imshow(shares.view(len(HEADS), -1).numpy(), cmap="cividis", clim=(0, 1), origin="lower")
    for i, row in enumerate(results["stored"]):
        text, ink = f"{shares[i]:.2f}\n{256 * row['H'] + 32 * row['m']}", "wk"[shares[i] > 0.6]
        heat.text(i % len(HIDDEN), i // len(HIDDEN), text, ha="center", va="center", color=ink)
    heat.set_xticks(range(len(HIDDEN)), HIDDEN)
    heat.set_yticks(range(len(HEADS)), HEADS)
    heat.set(xlabel="MLP width", ylabel="heads")
    heat.set_title(f"Share of 256 facts stored, {len(curves)} seeds;\nbelow it: parameters")

    # entry and exit: points are measured, lines are the flow's, between them is the plateau
    for panel, name in zip(sweeps, SWEEPS, strict=True):
        values = torch.tensor([row["values"] for row in results[name]]).movedim(2, 0)
        x, means = range(len(SWEEPS[name])), values.mean(2)  # (4, x) of values (4, x, seeds)
        for i, label in (0, "entry: relation known"), (1, "exit: facts begin"):
            bounds = [bootstrap(v, torch.Generator().manual_seed(0)) for v in values[i]]
            spread = (torch.tensor(bounds).T - means[i]).abs()
            panel.errorbar(x, means[i], spread, fmt="o", color=COLORS[i + 1], label=label)
            panel.plot(x, means[i + 2], color=COLORS[i + 1])
        panel.fill_between(x, *means[2:], means[2] < means[3], interpolate=True, color="0.9")
        panel.set_xticks(x, [f"{value:g}" for value in SWEEPS[name]])
        panel.set(xlabel=name, ylabel="steps x lr", ylim=0)
        panel.set_title(f"{len(curves)} seeds; lines: gradient flow")
        panel.legend(fontsize="small")
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, steps=8192, seeds=5)


if __name__ == "__main__":
    main()
