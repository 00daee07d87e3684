"""Common bigrams or the context (Bietti's slides): what an MLP learns first, and its truncation.

Characters follow Shakespeare's bigrams, but a space is followed by an output that is drawn for the
sequence or, half the time, by the noise token ("the" in "in the"). The test has no noise.
"""

import statistics

from analyze import panels
from extras.mechanisms import COLORS, descend, draw_seeds, pivot, seeds_table
from extras.mechanisms.bigrams import N, continue_tokens, read_bigrams
from extras.studies import spread

import torch
from torch.nn.functional import cross_entropy


NOISE, NOISE_SHARE = N, 0.5  # the token after the N characters, and how often it follows a space
KNOWN = 0.9  # the accuracy from which the answer counts as known
RANKS = (0, 1, 2, 4, 8, 13, 26, 64, 128)  # of the truncated second MLP; 128 is the full rank


def sample(B, T, noise_share, bigrams, generator):
    """Draw tokens (B, T + 1), scored (B, T), the triggers after the first one, and output (B,)."""
    probabilities, unigram = bigrams  # (N, N), (N,)
    trigger, N = unigram.argmax(), len(unigram)
    output = torch.randint(N - 1, (B,), generator=generator)
    output += output >= trigger  # any character but the trigger

    # after a space comes the output or the noise; after the noise a character from the unigram
    uniform, coin = torch.rand(2, T, B, generator=generator)
    after = torch.full((T, B, N + 1), -1)
    after[:, :, trigger] = torch.where(coin < noise_share, N, output)
    first = torch.multinomial(unigram, B, replacement=True, generator=generator)
    tokens = continue_tokens(first, torch.cat([probabilities, unigram[None]]), after, uniform)
    triggers = tokens[:, :-1] == trigger
    return tokens, triggers & (triggers.cumsum(1) > 1), output


class TwoLayers(torch.nn.Module):
    """Two layers of one head and a ReLU MLP with residual connections, without LayerNorm or biases,
    between random frozen embeddings E, P, U."""

    def __init__(self, d, T, generator):
        super().__init__()
        self.E = torch.randn(N + 1, d, generator=generator)
        self.P = torch.randn(T, d, generator=generator)
        self.U = torch.randn(N + 1, d, generator=generator) / d**0.5
        self.layers = torch.nn.ModuleList()
        shapes = dict(value=(d, d), out=(d, d), up=(4 * d, d), down=(d, 4 * d))
        for _ in range(2):
            weights = dict(key=torch.zeros(d, d))
            for name, shape in shapes.items():
                weights[name] = (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5
            self.layers.append(torch.nn.ParameterDict(weights))

    def before_last_mlp(self, tokens, first_mlp=True):
        """The input (B, T, d) of the second MLP, with or without the first one."""
        x, T = self.E[tokens] + self.P[: tokens.shape[1]], tokens.shape[1]
        mask = torch.full((T, T), -torch.inf).triu(1)
        for i, layer in enumerate(self.layers):
            if i == 1 and first_mlp:
                x = x + (x @ self.layers[0].up.T).relu() @ self.layers[0].down.T
            attention = (x @ layer.key @ x.mT / x.shape[2] ** 0.5 + mask).softmax(2)
            x = x + attention @ (x @ (layer.out @ layer.value).T)
        return x

    def read(self, x, rank=None):
        """The logits (..., N + 1) of the input of the second MLP, its first matrix truncated."""
        up = self.layers[1].up
        if rank is not None:
            left, size, right = torch.linalg.svd(up, full_matrices=False)
            up = (left[:, :rank] * size[:rank]) @ right[:rank]
        return (x + (x @ up.T).relu() @ self.layers[1].down.T) @ self.U.T


@torch.no_grad()
def measures(model, tokens, scored, output):
    """[accuracy, p(noise)] for each of RANKS, and without the first MLP."""
    right, rows = output[:, None].expand(scored.shape)[scored], []
    for rank in (*RANKS, None):
        x = model.before_last_mlp(tokens[:, :-1], first_mlp=rank is not None)[scored]
        p = model.read(x, rank).softmax(1)
        values = (p.argmax(1) == right).float(), p[:, NOISE]
        rows.append([round(float(value.mean()), 5) for value in values])
    return rows


def train(seed, steps, d=128, T=64, B=64):
    """Train on sequences with noise; rows of [step, measures], one for every 10 steps."""
    generator, bigrams = torch.Generator().manual_seed(seed), read_bigrams()
    model = TwoLayers(d, T, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    clean, rows = sample(256, T, 0, bigrams, generator), []
    for step in range(steps + 1):
        if step % 10 == 0:
            rows.append([step, measures(model, *clean)])
        tokens, scored, _ = sample(B, T, NOISE_SHARE, bigrams, generator)
        logits = model.read(model.before_last_mlp(tokens[:, :-1]))
        descend(optimizer, cross_entropy(logits[scored], tokens[:, 1:][scored]))
    return rows


def contexts(layer, n, N, generator):
    """Draw what a layer reads at the last trigger of at least n sequences of 2N uniform characters,
    (n, inputs), and what follows, (n,). The MLP reads the trigger; attention, with keys of zero,
    the shares of the characters up to it."""
    table, drawn = (torch.full((N, N), 1 / N), torch.full((N,), 1 / N)), []
    while sum(len(following) for _, following in drawn) < n:
        tokens, scored, _ = sample(64, 2 * N, NOISE_SHARE, table, generator)
        tokens, scored = tokens[scored.any(1)], scored[scored.any(1)]
        last = 2 * N - 1 - scored.flip(1).int().argmax(1)
        seen = (torch.arange(2 * N) <= last[:, None]) / (last[:, None] + 1.0)
        read = torch.zeros(len(tokens), N + 1).scatter_add_(1, tokens[:, :-1], seen)
        read = torch.ones(len(tokens), 1) if layer == "MLP" else read
        drawn.append((read, tokens.gather(1, last[:, None] + 1)[:, 0]))
    return [torch.cat(parts) for parts in zip(*drawn, strict=True)]


def samples_online(seed, layer, N, rate):
    """The number of steps of SGD from zero, one for each new sequence, after which a linear layer
    gives the noise token p = 0.25, half of its share."""
    generator, taken = torch.Generator().manual_seed(seed), 0
    held_out, _ = contexts(layer, 64, N, generator)
    weight = torch.zeros(N + 1, held_out.shape[1])
    while True:
        for read, following in zip(*contexts(layer, 64, N, generator), strict=True):
            error = (weight @ read).softmax(0)
            error[following] -= 1
            weight, taken = weight - rate * torch.outer(error, read), taken + 1
            if taken % 4 == 0 and (held_out @ weight.T).softmax(1)[:, N].mean() >= 0.25:
                return taken


def sample_table(rows):
    def layer_of(row):
        return f"{row['layer']}, rate {'N' if row['rate'] > 1 else 1}"

    return pivot(rows, dict(N="characters N"), layer_of, lambda x: f"{statistics.mean(x):.0f}")


def shares(rows):
    """The steps, and [accuracy, p(noise)] (seeds, steps, RANKS and without the first MLP, 2)."""
    seeds = rows[0]["values"]
    return [step for step, _ in seeds[0]], torch.tensor([[row[1] for row in run] for run in seeds])


def table(rows):
    """The median and the range of the seeds for some steps and ranks, and what is learned first."""
    (steps, values), lines = shares(rows), []
    for time, rank in (2, 128), (2, 0), (-1, 128), (-1, 26), (-1, 13), (-1, 0), (-1, None):
        seeds = values[:, time, (*RANKS, None).index(rank)].T.tolist()  # (2, seeds)
        kind = "128, first MLP removed" if rank is None else rank
        lines.append((steps[time], kind, *(spread(each, "{:.2f}") for each in seeds)))
    head = "step", "rank of the second MLP", "accuracy", "p(noise)"
    passed = values[:, :, -2, 1] >= NOISE_SHARE / 2, values[:, :, 0, 0] >= KNOWN  # (seeds, steps)
    noise, answer = (spread([steps[i] for i in each.int().argmax(1)]) for each in passed)
    said = f"p(noise) first passes {NOISE_SHARE / 2} at step {noise}, and the accuracy without"
    said += f" the second MLP first passes {KNOWN} at step {answer} (median and range)."
    return f"{seeds_table(rows, head, lines)}\n\n{said}"


def draw(results):
    """Plot p(noise) and accuracy by step, and by the rank of the second MLP."""
    figure, (left, right) = panels(2, 2, 5, 3.4, sharey=True)
    steps, values = shares(results["train"])
    draw_seeds(left, steps, values[:, :, -2, 1], "p(noise)", color=COLORS[1])
    draw_seeds(left, steps, values[:, :, 0, 0], "accuracy without the second MLP", color=COLORS[0])
    left.plot(steps, values[:, :, -2, 0].mean(0), "--", color=COLORS[0], label="accuracy")
    left.set(xlabel="training step", ylabel="share, tested without noise", ylim=(-0.03, 1.03))
    left.set_title(f"Noise is learned first ({len(values)} seeds: mean, range)")
    left.legend(fontsize="small", loc="lower right")
    for i, name in (1, "p(noise)"), (0, "accuracy"):
        draw_seeds(right, range(len(RANKS)), values[:, -1, :-1, i], name, color=COLORS[i])
    right.set_xticks(range(len(RANKS)), RANKS)
    right.set(xlabel="rank kept of the second MLP; 0: removed, 128: whole")
    right.set_title(f"The second MLP hides the answer (step {steps[-1]})")
    right.legend(fontsize="small", loc="center left")
    return figure


SIZES = (16, 32, 64, 128, 256)
LAYERS = [dict(layer=layer, N=N, rate=1) for layer in ("MLP", "attention") for N in SIZES]
LAYERS += [dict(layer="attention", N=N, rate=N) for N in SIZES]
TASKS = [
    (train, 8, [dict(steps=300)], table),
    (samples_online, 5, LAYERS, sample_table),
]
