"""Factual recall (Bietti's slides): the hallucination plateau and its gradient flow.

A sequence holds a subject s, a relation r, noise tokens and EOS; the target is the fact a*(s, r).
Each relation has a set A_r of D answers, and each of them is right for S/D subjects. There are no
positions and only EOS attends, so a model sees only how often each of the V tokens occurs.
"""

import math

from analyze import panels
from extras.mechanisms import COLORS, descend, draw_seeds, seeds_table

import torch
from torch.nn.functional import cross_entropy


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
    """The means of -log p(a*), -log p(A_r) and -log p(any fact about s)."""
    log_p = logits.log_softmax(1)
    right = log_p.gather(1, facts[subject, relation][:, None])
    in_relation = log_p.unflatten(1, (-1, D)).logsumexp(2).gather(1, relation[:, None])
    about_subject = log_p.gather(1, facts[subject]).logsumexp(1)
    return [round(-float(x.mean()), 5) for x in (right, in_relation, about_subject)]


def train_linear(seed, S, R, D, init, steps, lr=0.1, batch=1024, rows=200, noise=20, length=32):
    """Train linear attention on one-hot tokens; about `rows` rows of [steps x lr, *measures]. The
    logits are sums over tokens z of counts (B, V) w (V) output (A, V)."""
    generator = torch.Generator().manual_seed(seed)
    facts, curve = draw_facts(S, R, D, generator), []
    w = torch.full((S + R + noise + 1,), init, requires_grad=True)
    output = torch.full((R * D, len(w)), init, requires_grad=True)
    for step in range(steps + 1):
        subject = torch.randint(S, (batch,), generator=generator)
        relation = torch.randint(R, (batch,), generator=generator)
        logits = draw_counts(subject, relation, S, R, noise, length, generator) * w @ output.T
        if step % math.ceil(steps / rows) == 0 or step == steps:
            curve.append([step * lr, *measures(logits.detach(), subject, relation, facts, D)])
        loss = cross_entropy(logits, facts[subject, relation])
        for x, slope in zip((w, output), torch.autograd.grad(loss, (w, output)), strict=True):
            x.data -= lr * slope
    return curve


def flow(tokens, classes, class_size, init, end=math.inf):
    """Yield (time, loss) of subjects or relations under gradient flow, in Euler steps. The equally
    frequent `tokens` tell `classes` classes of class_size answers apart. w is their attention, X
    the output for right answers less that for wrong ones, and w X the logit margin."""
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


def plateau(seed, S, R, D, init):
    """[entry, exit, both by the flow] for a shape and an initial weight."""
    flows = plateau_of(R, D, flow(R, R, D, init), flow(S, D, R, init))
    steps = round(2.6 * max(flows))
    curve = train_linear(seed, S, R, D, init, steps, lr=0.5, batch=256, rows=1000)
    losses = ([(row[0], row[i]) for row in curve] for i in (2, 3))  # of relations, of subjects
    return plateau_of(R, D, *losses) + flows


def table(rows):
    """The mean times at which relations, then facts, are learned, and those by the flow."""
    times = torch.tensor([row["values"] for row in rows]).mean(1).T  # (4, rows)
    head = "subjects / relations", *(f"{row['S']} / {row['R']}" for row in rows)
    lines = []
    for i, event in enumerate(["relation known", "facts begin"]):
        lines.append((f"{event}, steps x lr", *(f"{time:.0f}" for time in times[i])))
        lines.append((f"{event}, by the flow", *(f"{time:.0f}" for time in times[i + 2])))
    phases = int((times[0] < times[1]).sum())
    said = f"The phase exists in {phases} of these {len(rows)} shapes (D = {rows[0]['D']})."
    return f"{seeds_table(rows, head, lines)}\n\n{said}"


# ---- how many facts one layer stores


class OneLayer(torch.nn.Module):
    """Softmax attention of EOS with H heads of head_size, and an MLP of m ReLU units if m > 0,
    between random frozen embeddings of d numbers; only the MLP has a residual connection."""

    def __init__(self, V, answers, d, head_size, H, m, generator):
        super().__init__()
        self.E = torch.randn(V, d, generator=generator) / d**0.5
        self.U = torch.randn(answers, d, generator=generator) / d**0.5
        per_head = (H, head_size, d)
        shapes = dict(query=per_head, key=per_head, value=per_head)
        shapes.update(out=(d, H * head_size), up=(m, d), down=(d, m))
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) / max(shape[-1], 1) ** 0.5
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, counts):
        """Logits (B, answers) of how often each token occurs, (B, V)."""
        read = (self.query @ self.E[-1])[:, None] @ self.key  # (H, 1, d)
        scores = (read @ self.E.T)[:, 0] / self.query.shape[1] ** 0.5  # (H, V)
        attention = (scores + counts[:, None].log()).softmax(2)
        heads = attention.transpose(0, 1) @ (self.E @ self.value.mT)  # (H, B, head_size)
        x = heads.transpose(0, 1).flatten(1) @ self.out.T
        return (x + (x @ self.up.T).relu() @ self.down.T) @ self.U.T


def stores(seed, S, R, d, head_size, H, m, steps=2000, D=8, noise=20, length=16):
    """Whether OneLayer learns to recall 99% of the S R facts."""
    generator = torch.Generator().manual_seed(seed)
    facts = draw_facts(S, R, D, generator)
    model = OneLayer(S + R + noise + 1, R * D, d, head_size, H, m, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    every = torch.cartesian_prod(torch.arange(S), torch.arange(R)).repeat(4, 1).T  # other noise
    for step in range(steps + 1):
        if step % 100 == 0:
            with torch.no_grad():
                answers = model(draw_counts(*every, S, R, noise, length, generator)).argmax(1)
            if (answers == facts[every[0], every[1]]).float().mean() >= 0.99:
                return True
        subject = torch.randint(S, (256,), generator=generator)
        relation = torch.randint(R, (256,), generator=generator)
        logits = model(draw_counts(subject, relation, S, R, noise, length, generator))
        descend(optimizer, cross_entropy(logits, facts[subject, relation]))
    return False


def least_heads(seed, S, R, d, head_size, m):
    """The smallest power of two of heads, to 64, with which OneLayer stores the facts, or inf."""
    heads = (2**i for i in range(7))
    return next((H for H in heads if stores(seed, S, R, d, head_size, H, m)), math.inf)


def capacity_table(rows):
    """The least number of heads of every seed, and the facts for each parameter at the median."""
    head = "facts", "width d", "head size", "MLP units", "least heads", "facts per parameter"
    lines = []
    for row in rows:
        facts, d, head_size, m = row["S"] * row["R"], row["d"], row["head_size"], row["m"]
        heads = sorted(row["values"])
        parameters = 4 * d * head_size * heads[len(heads) // 2] + 2 * d * m
        least = "/".join(map(str, heads))
        lines.append((facts, d, head_size, m, least, f"{facts / parameters:.2f}"))
    return seeds_table(rows, head, lines)


def draw(results):
    """Plot the losses beside those of the flow."""
    figure, [panel] = panels(1, 1, 7, 3.2)
    row = results["train_linear"][0]
    S, R, D, curves = row["S"], row["R"], row["D"], torch.tensor(row["values"])
    times = curves[0, :, 0]  # curves: (seeds, times, time and measures)
    names = "loss", "of the relation, -ln p($A_r$)", "of the subject"
    for i, color in enumerate(COLORS[:3]):
        draw_seeds(panel, times, curves[:, :, i + 1], names[i], color=color, lw=2.5)
    flows = [[*flow(*kind, row["init"], times[-1])] for kind in ((R, R, D), (S, D, R))]
    for points, label in zip(flows, ("gradient flow (two losses)", None), strict=True):
        panel.plot(*zip(*points, strict=True), "k--", lw=1, label=label)
    phase = plateau_of(R, D, *flows)
    panel.axvspan(*phase, color="0.9", zorder=0)
    panel.text(sum(phase) / 2, 0.6, "any answer of $A_r$:\nhallucination", ha="center")
    panel.set_yticks([0, *map(math.log, (R, D, R * D))], ["0", "ln R", "ln D", "ln RD"])
    panel.set(xlabel="steps x lr (learning rate)", ylabel="loss (nats)")
    panel.set_title(f"S = {S}, R = {R}, D = {D}, {len(curves)} seeds")
    panel.legend(fontsize="small")
    return figure


RATIOS = [dict(S=128 // R, R=R, D=4, init=1e-5) for R in (2, 4, 8, 16, 32)]
SIZES = [(16, 16, 4), (16, 16, 8), (16, 32, 4), (16, 32, 8), (32, 32, 8)]  # S, d, head_size
CAPACITIES = [dict(S=S, R=16, d=d, head_size=h, m=m) for S, d, h in SIZES for m in (0, 64)]
TASKS = [
    (train_linear, 5, [dict(S=16, R=4, D=8, init=1e-5, steps=8192)], None),
    (plateau, 5, RATIOS, table),
    (least_heads, 3, CAPACITIES, capacity_table),
]
