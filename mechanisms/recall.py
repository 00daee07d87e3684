"""Factual recall (Bietti's slides): the hallucination plateau, its gradient flow, who stores facts.

    python -m mechanisms.recall                            # about 3 minutes of one core

A sequence holds a subject s, a relation r, noise tokens and EOS; the fact a*(s, r) is asked. Each
relation has D answers of its own, A_r, each right for S/D subjects. Nothing has a position and EOS
alone attends: all that a model sees of a sequence is how often each of the V tokens occurs.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from mechanisms import COLORS, command, draw_means, draw_seeds, markdown


TABLES = [(128 // R, R, 4, 1e-5) for R in (2, 4, 8, 16, 32)]  # S, R, D, initial weight
HEADS, HIDDEN = (1, 2, 4, 8, 16), (0, 16, 32, 64, 128)


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


def ends(R, D, *losses):
    """When the plateau begins and ends: the relation loss at 0.1 ln R, the subject loss at 0.9 ln
    D; losses: of both, (time, loss), ..."""
    levels = 0.1 * math.log(R), 0.9 * math.log(D)
    pairs = zip(losses, levels, strict=True)
    return [next((t for t, loss in rows if loss < level), math.nan) for rows, level in pairs]


def plateau(seed, table):
    """[entry, exit, both by the flow]."""
    S, R, D, init = table
    flows = ends(R, D, flow(R, R, D, init), flow(S, D, R, init))
    rows = train_linear(seed, *table, round(2.6 * max(flows)), lr=0.5, batch=256, rows=1000)
    return ends(R, D, *([(row[0], row[i]) for row in rows] for i in (2, 3))) + flows


def hallucinates(row):
    """[entry, exit, how often it errs between], means over the seeds of a row of train_linear."""
    found = []
    for run in row["values"]:
        entry, leaves = ends(
            row["R"], row["D"], *([(one[0], one[i]) for one in run] for i in (2, 3))
        )
        errs = [one[4] for one in run if entry <= one[0] <= leaves]
        found.append([entry, leaves, sum(errs) / len(errs)])
    return torch.tensor(found).mean(0).tolist()


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


def tasks(seeds, steps):
    todo = [(5, train_linear, dict(S=16, R=4, D=8, init=1e-5, steps=steps), seeds)]
    todo += [(0.5, plateau, dict(table=table), seeds) for table in TABLES]
    sizes = [dict(H=H, m=m, steps=math.ceil(steps / 8)) for H in HEADS for m in HIDDEN]
    return todo + [(2, stored_share, size, seeds) for size in sizes]


def table(results):
    times = torch.tensor([row["values"] for row in results["plateau"]]).mean(1).T  # (4, tables)
    rows = [("subjects / relations", *(f"{S / R:g}" for S, R, _, _ in TABLES))]
    for i, what in enumerate(["relation known", "facts begin"]):
        rows.append((f"{what}, steps x lr", *(f"{x:.0f}" for x in times[i])))
        rows.append((f"{what}, by the flow", *(f"{x:.0f}" for x in times[i + 2])))
    return markdown(*rows)


def draw(results):
    """Losses beside the flow, entry and exit of the plateau, share of facts stored."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.6, 3.4), layout="constrained")
    row = results["train_linear"][0]
    S, R, D, curves = row["S"], row["R"], row["D"], torch.tensor(row["values"])
    names = "loss", "relation loss, -ln p($A_r$)", "subject loss", "1 - p(a*), a probability"
    for i, name in enumerate(names):  # curves: (seeds, times, time and measures)
        color = (*COLORS[:3], "black")[i]
        draw_seeds(left, curves[0, :, 0], curves[:, :, i + 1], name, color=color, lw=2.5)
    for kind in (R, R, D), (S, D, R):
        left.plot(*zip(*flow(*kind, row["init"], curves[0, -1, 0]), strict=True), "k--", lw=1)
    left.plot([], [], "k--", lw=1, label="gradient flow (two losses)")
    levels = {"0": 0, "1 - 1/D": 1 - 1 / D, "ln R": math.log(R), "ln D": math.log(D)}
    left.set_yticks([*levels.values(), math.log(R * D)], [*levels, "ln RD"])
    left.set(xlabel="steps x lr (learning rate)", ylabel="loss, nats; black: probability")
    left.set_title(f"S = {S}, R = {R}, D = {D}, {len(curves)} seeds")

    # points are measured, lines are the flow's, between them is the plateau
    values, x = torch.tensor([row["values"] for row in results["plateau"]]), range(len(TABLES))
    flows = values[:, 0, 2:].T
    for i, label in enumerate(["entry: relation known", "exit: facts begin"]):
        draw_means(middle, x, values[:, :, i], fmt="o", color=COLORS[i + 1], label=label)
        middle.plot(x, flows[i], color=COLORS[i + 1])
    middle.fill_between(x, *flows, flows[0] < flows[1], interpolate=True, color="0.9")
    middle.set_xticks(x, [f"{S / R:g}" for S, R, _, _ in TABLES])
    middle.set(xlabel="S / R (S R = 128, D = 4)", ylabel="steps x lr", ylim=0)
    middle.set_title(f"Plateau, {values.shape[1]} seeds; lines: flow")

    shares = torch.tensor([row["values"] for row in results["stored_share"]]).mean(1)
    shape = len(HEADS), len(HIDDEN)
    right.imshow(shares.view(shape), cmap="cividis", clim=(0, 1), origin="lower", aspect="auto")
    for i, row in enumerate(results["stored_share"]):
        text, ink = f"{shares[i]:.2f}\n{256 * row['H'] + 32 * row['m']}", "wk"[shares[i] > 0.6]
        right.text(i % shape[1], i // shape[1], text, ha="center", va="center", color=ink)
    right.set_xticks(range(shape[1]), HIDDEN)
    right.set_yticks(range(shape[0]), HEADS)
    right.set(xlabel="MLP width", ylabel="heads")
    right.set_title(f"Facts stored; parameters; {len(curves)} seeds")
    left.legend(fontsize="small")
    middle.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, draw, steps=8192, seeds=5)
