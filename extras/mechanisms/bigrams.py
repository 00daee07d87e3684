"""The bigram task (Bietti's slides): the memories of an induction head, and one layer beside two.

    python -m extras.mechanisms bigrams                           # about 13 minutes on one core

Characters follow Shakespeare's bigrams, but K triggers are each followed by an output drawn for the
sequence. Scored are triggers that occurred before. If outputs are triggers, the sequence can run in
a cycle, which is easy to predict; accuracy is therefore also given without such sequences.
"""

import csv
import json
from pathlib import Path

from analyze import panels
from extras.mechanisms import COLORS, draw_seeds, mean
from model import make_optimizers
from train import Flags, schedule

import torch
from torch.nn.functional import cross_entropy, embedding


N, K = 65, 5  # characters, triggers
MEMORIES = ("W_OV2", "W_KQ2", "W_KQ1")  # of layers 1 and 2, as the slides count them
COLUMNS = ("step", "accuracy", "accuracy without cycles", *MEMORIES, "L0H0", "L1H0")
RUNS = {  # triggers, scale of W_OV1, memories that are frozen until step 60
    "random triggers": ("random", 1.0, ()),
    "fixed triggers": ("fixed", 1.0, ()),
    "W_OV1 a third": ("random", 1 / 3, ()),
    "keys frozen to step 60": ("random", 1.0, ("W_KQ2", "W_KQ1")),
    "W_OV2 frozen to step 60": ("random", 1.0, ("W_OV2",)),
}


def read_bigrams():
    """The probabilities (N, N) of the next character, a row for each, and the unigram (N,)."""
    path = Path(__file__).with_name("shakespeare_bigrams.csv")
    with open(path, newline="", encoding="utf-8") as file:
        rows = [(json.loads(a), json.loads(b), int(n)) for a, b, n in list(csv.reader(file))[1:]]
    characters = sorted({row[0] for row in rows})
    counts = torch.zeros(N, N)
    for first, second, count in rows:
        counts[characters.index(first), characters.index(second)] = count
    return counts / counts.sum(1, keepdim=True), counts.sum(1) / counts.sum()


def continue_tokens(tokens, probabilities, outputs, uniform):
    """Continue tokens (B,) to (B, T + 1). outputs (T, B, V): what follows each token at each step;
    -1 stands for a draw from its row of probabilities (V, V), made with uniform (T, B)."""
    cumulative = probabilities.cumsum(1)
    cumulative /= cumulative[:, -1:].clone()
    sequence = [tokens]
    for output, u in zip(outputs, uniform, strict=True):
        output = output.gather(1, sequence[-1][:, None])[:, 0]
        drawn = (cumulative[sequence[-1]] <= u[:, None]).sum(1)
        sequence.append(torch.where(output < 0, drawn, output))
    return torch.stack(sequence, 1)


def sample(B, T, triggers, bigrams, generator):
    """Draw tokens (B, T + 1), scored (B, T), cyclic (B,) and the outputs (B, N), -1 for characters
    that are no triggers. These are the K most frequent characters ("fixed") or drawn ("random")."""
    probabilities, unigram = bigrams
    chosen = unigram.topk(K).indices.expand(B, K)
    if triggers == "random":
        chosen = torch.multinomial(unigram.expand(B, N), K, generator=generator)
    drawn = torch.randint(N, (B, K), generator=generator)
    outputs = torch.full((B, N), -1).scatter(1, chosen, drawn)
    uniform = torch.rand(B, T, generator=generator).T
    first = torch.multinomial(unigram, B, replacement=True, generator=generator)
    tokens = continue_tokens(first, probabilities, outputs.expand(T, B, N), uniform)

    # a walk from trigger to output that still goes on after K + 1 steps is a cycle
    walk, inputs = chosen, tokens[:, :-1]
    for _ in range(K + 1):
        walk = torch.where(walk < 0, walk, outputs.gather(1, walk.clamp(min=0)))
    repeated = (inputs[:, :, None] == inputs[:, None]).tril(-1).any(2)
    return tokens, repeated & (outputs.gather(1, inputs) >= 0), (walk >= 0).any(1), outputs


def accuracies(logits, tokens, scored, cyclic):
    """The accuracy at scored positions of all sequences, and of those that cannot cycle."""
    right = (logits.argmax(2) == tokens[:, 1:]).float()
    return [float(right[where].mean()) for where in (scored, scored & ~cyclic[:, None])]


# ---- the order of the memories


class Simplified(torch.nn.Module):
    """Two layers of one head, without MLP or LayerNorm. Only MEMORIES (d, d) are trained, from
    zero; the embeddings E, P, U and W_OV1 are random and frozen."""

    def __init__(self, d, T, scale, generator):
        super().__init__()
        self.E, self.P, U, W = (torch.randn(n, d, generator=generator) for n in (N, T, N, d))
        self.U, self.W_OV1 = U / d**0.5, W * scale / d**0.5
        zeros = (torch.nn.Parameter(torch.zeros(d, d)) for _ in MEMORIES)
        self.W_OV2, self.W_KQ2, self.W_KQ1 = zeros

    def forward(self, tokens):
        """Logits (B, T, N) of tokens (B, T), and the attention (B, T, T) of both layers."""

        def read(W):  # x W with x = E + P, for all tokens and positions before they are paired
            return embedding(tokens, self.E @ W) + self.P @ W

        d, T = self.W_OV1.shape[0], tokens.shape[1]
        x, mask = read(torch.eye(d)), torch.full((T, T), -torch.inf).triu(1)
        first = (read(self.W_KQ1) @ x.mT / d**0.5 + mask).softmax(2)
        x = x + first @ read(self.W_OV1.T)
        second = (x @ self.W_KQ2 @ x.mT / d**0.5 + mask).softmax(2)
        return x @ self.U.T + second @ (x @ (self.U @ self.W_OV2).T), (first, second)

    def scores(self):
        """What each memory answers, (questions, answers), right on the diagonal: the logits of each
        attended token; the attention scores of each trigger to what follows each token, and of each
        position but the first to each position."""
        E, P, d = self.E, self.P, len(self.W_OV1)
        output, trigger = E @ self.W_OV2.T @ self.U.T, E @ self.W_KQ2 @ self.W_OV1 @ E.T
        return output, trigger / d**0.5, P[1:] @ self.W_KQ1 @ P.T / d**0.5

    def recalls(self, triggers=range(N)):
        """The share of its associations that each memory recalls; W_KQ2 for these triggers."""
        right = [x.argmax(1) == torch.arange(len(x)) for x in self.scores()]
        right[1] = right[1][triggers]
        return [float(x.float().mean()) for x in right]


def train_memories(seed, label, steps, d=128, T=64, B=128):
    """Train one of RUNS; one row of COLUMNS for every 10 steps. The last two are the attention of
    L0H0 to the previous token, and of L1H0 to what followed the trigger before."""
    triggers, scale, frozen = RUNS[label]
    generator, bigrams = torch.Generator().manual_seed(seed), read_bigrams()
    probed = bigrams[1].topk(K if triggers == "fixed" else N).indices
    model = Simplified(d, T, scale, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    held_out, scored_out, cyclic, _ = sample(512, T, triggers, bigrams, generator)
    follows, rows = held_out[:, :-1, None] == held_out[:, None, :-2], []  # (512, T, T - 1)
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                logits, (first, second) = model(held_out[:, :-1])
            induction = (second[:, :, 1:] * follows).sum(2)[scored_out]
            attention = [float(x.mean()) for x in (first.diagonal(-1, 1, 2), induction)]
            shares = accuracies(logits, held_out, scored_out, cyclic) + model.recalls(probed)
            rows.append([step, *shares, *attention])
        for name in frozen:
            model.get_parameter(name).requires_grad_(step >= 60)
        tokens, scored, _, _ = sample(B, T, triggers, bigrams, generator)
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1])[0][scored], tokens[:, 1:][scored]).backward()
        optimizer.step()
    return rows


def take_steps(seed, bigrams, d, B, T=32, chunk=128):
    """The recall of each memory after one gradient step from zero on each of them, in the order of
    MEMORIES and with B new sequences for each, so long that its largest score is 10."""
    generator = torch.Generator().manual_seed(seed)
    table = read_bigrams()
    if bigrams == "uniform":
        table = [torch.full_like(x, 1 / N) for x in table]
    model = Simplified(d, T, 1.0, generator)
    for i, name in enumerate(MEMORIES):
        weight, step = model.get_parameter(name), 0
        for _ in range(B // chunk):
            tokens, scored, _, _ = sample(chunk, T, "random", table, generator)
            loss = cross_entropy(model(tokens[:, :-1])[0][scored], tokens[:, 1:][scored])
            step = step - torch.autograd.grad(loss, weight)[0]
        with torch.no_grad():
            weight += step
            weight *= 10 / model.scores()[i].abs().max()
    return model.recalls()


def step_table(rows):
    """The mean recall of each memory after the three steps."""
    cells = [("characters", "d", "sequences a step", *MEMORIES)]
    for row in sorted(rows, key=lambda row: (row["bigrams"], row["d"], row["B"])):
        means = torch.tensor(row["values"]).mean(0)
        cells.append((row["bigrams"], row["d"], row["B"], *(f"{mean:.2f}" for mean in means)))
    return cells


def memory_table(rows):
    """The median steps to half recall and to accuracy 0.9 (inf is never), the number of seeds with
    an order of the first three, and the means after the last step."""
    half, orders = [f"{name} half" for name in MEMORIES], ["slides' order", "W_KQ2 first"]
    cells = [("run", *half, "accuracy 0.9", *orders, "without cycles", "L0H0", "L1H0")]
    for row in rows:
        curves, times = torch.tensor(row["values"]), []  # (seeds, times, COLUMNS)
        for column, level in (3, 0.5), (4, 0.5), (5, 0.5), (2, 0.9):
            reached = curves[:, :, column] >= level
            steps = curves[0, reached.int().argmax(1), 0]
            times.append(torch.where(reached.any(1), steps, torch.inf))
        output, trigger, previous, _ = times
        found = (output < trigger) & (trigger < previous), trigger < output
        medians = (f"{steps.median():.0f}" for steps in times)
        last = (f"{x:.2f}" for x in curves[:, -1, [2, 6, 7]].mean(0))
        cells.append((row["label"], *medians, *(int(x.sum()) for x in found), *last))
    return cells


def draw(results):
    """Plot recall and accuracy during training, with random and with fixed triggers."""
    figure, grid = panels(2, 2, 5, 3.2, sharey=True)
    for panel, row in zip(grid, results["train_memories"], strict=False):
        values = torch.tensor(row["values"])  # (seeds, times, COLUMNS)
        for i, color in enumerate(("black", *COLORS[:3]), 2):
            draw_seeds(panel, values[0, :, 0], values[:, :, i], COLUMNS[i], color=color)
        panel.set(xlabel="training step", ylabel="share recalled or predicted", ylim=(-0.03, 1.03))
        panel.set_title(f"{row['label']}: mean of {len(values)} seeds, lowest to highest")
        panel.legend(fontsize="small", loc="lower right")
    return figure


# ---- one layer or two


class Generic(torch.nn.Module):
    """A pre-norm transformer with MLPs of width 2d and learned positions; all of it is trained."""

    def __init__(self, layers, d, heads, T):
        super().__init__()
        block = torch.nn.TransformerEncoderLayer(
            d, heads, 2 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(block, layers, torch.nn.LayerNorm(d), False)
        self.E, self.P = torch.nn.Embedding(N, d), torch.nn.Embedding(T, d)  # of variance 1
        self.U = torch.nn.Linear(d, N)

    def forward(self, tokens):
        """Logits (B, T, N) of tokens (B, T)."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.U(self.blocks(self.E(tokens) + self.P.weight, mask, is_causal=True))


def train_layers(seed, layers, triggers, steps, d=64, T=64, B=64):
    """Train with Muon and AdamW; the two accuracies after the last step. With fixed triggers the
    loss is that of all tokens. With random ones it is that of the scored tokens alone: a model
    that predicts all tokens well must doubt what followed a token only once."""
    generator, bigrams = torch.Generator().manual_seed(seed), read_bigrams()
    held_out = sample(512, T, triggers, bigrams, generator)[:3]
    torch.manual_seed(seed)
    model, rates = Generic(layers, d, 2, T), dict(lr=0.02, warmup=20, steps=steps, decay=0.5)
    flags = Flags(optimizer="muon", weight_decay=0.1, beta2=0.95, dtype="float32", **rates)
    optimizers = make_optimizers(model, flags)
    for step in range(steps):
        tokens, scored, _, _ = sample(B, T, triggers, bigrams, generator)
        trained = scored if triggers == "random" else torch.ones_like(scored)
        model.zero_grad()
        cross_entropy(model(tokens[:, :-1])[trained], tokens[:, 1:][trained]).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = flags.lr * schedule(step, flags)
            optimizer.step()
    with torch.no_grad():
        return accuracies(model(held_out[0][:, :-1]), *held_out)


def layer_table(rows):
    """The accuracies after the last step."""
    cells = [("layers", "triggers", "accuracy", "without cycles")]
    for row in rows:
        seeds = torch.tensor(row["values"])  # (seeds, 2)
        cells.append((row["layers"], row["triggers"], *(mean(values, 3) for values in seeds.T)))
    return cells


SIZES = [(128, 2048), (256, 2048), (512, 2048), (256, 8192), (256, 32768)]  # d, sequences a step
ORDER = [dict(label=label, steps=160) for label in RUNS]
STEPS = [dict(bigrams=name, d=d, B=B) for name in ("uniform", "Shakespeare") for d, B in SIZES]
LAYERS = [dict(layers=n, triggers=t, steps=300) for t in ("fixed", "random") for n in (1, 2)]
TASKS = [
    (train_memories, 5, ORDER, memory_table),
    (take_steps, 3, STEPS, step_table),
    (train_layers, 3, LAYERS, layer_table),
]
