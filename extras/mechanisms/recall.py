"""Factual recall (Bietti's slides): the hallucination plateau and its gradient flow.

    python -m extras.mechanisms recall                            # about a minute on one core

A sequence holds a subject s, a relation r, noise tokens and EOS; the target is the fact a*(s, r).
Each relation has a set A_r of D answers, and each of them is right for S/D subjects. There are no
positions and only EOS attends, so a model sees only how often each of the V tokens occurs.
"""

import math

from extras.mechanisms import COLORS, draw_seeds

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy


SETTINGS = [(128 // R, R, 4, 1e-5) for R in (2, 4, 8, 16, 32)]  # S, R, D, initial weight


def draw_facts(S, R, D, generator):
    """Draw a*(s, r), (S, R); A_r = rD ... rD + D-1 in random order, each equally often."""
    return torch.stack([torch.randperm(S, generator=generator) % D + r * D for r in range(R)], 1)


def draw_counts(subject, relation, S, R, noise, length, generator):
    """Draw how often each of V = S + R + noise + 1 tokens occurs, (B, V); EOS is the last one."""
    B, V = len(subject), S + R + noise + 1
    others = S + R + torch.randint(noise, (B, length - 3), generator=generator)
    eos = torch.full((B, 1), V - 1)
    tokens = torch.cat([subject[:, None], S + relation[:, None], others, eos], 1)  # (B, length)
    return torch.zeros(B, V).scatter_add_(1, tokens, torch.ones(tokens.shape))


def measures(logits, subject, relation, facts, D):
    """The means of -log p(a*), -log p(A_r), -log p(any fact about s), and 1 - p(a*)."""
    log_p = logits.log_softmax(1)
    right = log_p.gather(1, facts[subject, relation][:, None])
    in_relation = log_p.unflatten(1, (-1, D)).logsumexp(2).gather(1, relation[:, None])
    about_subject = log_p.gather(1, facts[subject]).logsumexp(1)
    values = -right, -in_relation, -about_subject, 1 - right.exp()
    return [round(float(x.mean()), 5) for x in values]


def train_linear(seed, S, R, D, init, steps, lr=0.1, batch=1024, rows=200, noise=20, length=32):
    """Train linear attention on one-hot tokens; about `rows` rows of [steps x lr, *measures].

    The logits are sums over tokens z of counts (B, V) w (V) output (A, V)."""
    generator = torch.Generator().manual_seed(seed)
    facts, curve = draw_facts(S, R, D, generator), []
    w = torch.full((S + R + noise + 1,), init, requires_grad=True)
    output = torch.full((R * D, len(w)), init, requires_grad=True)
    for step in range(steps + 1):
        subject, relation = (torch.randint(n, (batch,), generator=generator) for n in (S, R))
        logits = draw_counts(subject, relation, S, R, noise, length, generator) * w @ output.T
        if step % math.ceil(steps / rows) == 0 or step == steps:
            curve.append([step * lr, *measures(logits.detach(), subject, relation, facts, D)])
        loss = cross_entropy(logits, facts[subject, relation])
        for x, slope in zip((w, output), torch.autograd.grad(loss, (w, output)), strict=True):
            x.data -= lr * slope
    return curve


def flow(tokens, classes, class_size, init, end=math.inf):
    """Yield (time, loss) of subjects or relations under gradient flow, in Euler steps [derived].

    The equally frequent `tokens` tell `classes` classes of class_size answers apart. w is their
    attention, X the output for right answers less that for wrong ones, and w X the logit margin."""
    now, w, X, dt = 0.0, init, 0.0, 0.002 * tokens * math.sqrt(class_size)
    while now < end:
        yield now, math.log1p((classes - 1) * math.exp(-w * X))
        rate = (classes - 1) / (math.exp(w * X) + classes - 1) / tokens  # p(wrong) p(token)
        growth = rate * w * classes / ((classes - 1) * class_size)
        now, w, X = now + dt, w + dt * rate * X, X + dt * growth


def plateau_of(R, D, relation_losses, subject_losses):
    """The times at which the plateau begins, with a relation loss of 0.1 ln R, and ends, with a
    subject loss of 0.9 ln D; losses are pairs (time, loss)."""
    levels = (relation_losses, 0.1 * math.log(R)), (subject_losses, 0.9 * math.log(D))
    return [next((t for t, loss in pairs if loss < level), math.nan) for pairs, level in levels]


def plateau(seed, setting):
    """[entry, exit, both by the flow] of a row of SETTINGS."""
    S, R, D, init = setting
    flows = plateau_of(R, D, flow(R, R, D, init), flow(S, D, R, init))
    curve = train_linear(seed, *setting, round(2.6 * max(flows)), lr=0.5, batch=256, rows=1000)
    times, _, relation, subject, _ = zip(*curve, strict=True)
    pairs = zip(times, relation, strict=True), zip(times, subject, strict=True)
    return plateau_of(R, D, *pairs) + flows


def hallucinates(row):
    """The means [entry, exit, error rate between them] over the seeds of a row of train_linear."""
    plateaus = []
    for curve in torch.tensor(row["values"], dtype=torch.double):
        times, _, relation, subject, errors = curve.T
        pairs = zip(times, relation, strict=True), zip(times, subject, strict=True)
        entry, leaves = plateau_of(row["R"], row["D"], *pairs)
        plateaus.append([entry, leaves, errors[(entry <= times) & (times <= leaves)].mean()])
    return torch.tensor(plateaus).mean(0).tolist()


def table(rows):
    """The mean times at which relations, then facts, are learned, and those by the flow."""
    times = torch.tensor([row["values"] for row in rows]).mean(1).T  # (4, SETTINGS)
    cells = [("subjects / relations", *(f"{S / R:g}" for S, R, _, _ in SETTINGS))]
    for i, event in enumerate(["relation known", "facts begin"]):
        cells.append((f"{event}, steps x lr", *(f"{time:.0f}" for time in times[i])))
        cells.append((f"{event}, by the flow", *(f"{time:.0f}" for time in times[i + 2])))
    return cells


TASKS = [
    (train_linear, 5, [dict(S=16, R=4, D=8, init=1e-5, steps=8192)], None),
    (plateau, 5, [dict(setting=setting) for setting in SETTINGS], table),
]


def draw(results):
    """Plot the losses beside those of the flow."""
    figure, panel = plt.subplots(figsize=(6, 4.2), layout="constrained")
    row = results["train_linear"][0]
    S, R, D, curves = row["S"], row["R"], row["D"], torch.tensor(row["values"])
    names = "loss", "relation loss, -ln p($A_r$)", "subject loss", "1 - p(a*), a probability"
    for i, color in enumerate((*COLORS[:3], "black")):  # curves: (seeds, times, time and measures)
        draw_seeds(panel, curves[0, :, 0], curves[:, :, i + 1], names[i], color=color, lw=2.5)
    for kind in (R, R, D), (S, D, R):
        panel.plot(*zip(*flow(*kind, row["init"], curves[0, -1, 0]), strict=True), "k--", lw=1)
    panel.plot([], [], "k--", lw=1, label="gradient flow (two losses)")
    levels = {"0": 0, "1 - 1/D": 1 - 1 / D, "ln R": math.log(R), "ln D": math.log(D)}
    panel.set_yticks([*levels.values(), math.log(R * D)], [*levels, "ln RD"])
    panel.set(xlabel="steps x lr (learning rate)", ylabel="loss, nats; black: probability")
    panel.set_title(f"S = {S}, R = {R}, D = {D}, {len(curves)} seeds")
    panel.legend(fontsize="small")
    return figure
