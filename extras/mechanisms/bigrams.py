"""The bigram task (Bietti's slides): the memories of an induction head, and one layer beside two.

Characters follow Shakespeare's bigrams, but K triggers are each followed by an output drawn for the
sequence. Scored are triggers that occurred before.
"""

import csv
import json
from argparse import Namespace
from pathlib import Path
from string import ascii_letters

from analyze import panels
from extras.mechanisms import COLORS, descend, draw_seeds, seeds_table
from extras.studies import spread
from model import Transformer, make_optimizers
from train import schedule

import torch
from torch.nn.functional import cross_entropy, embedding, one_hot


CHARACTERS = sorted("\n !$&',-.3:;?" + ascii_letters)
N, K = len(CHARACTERS), 5  # characters, triggers
MEMORIES = ("W_OV2", "W_KQ2", "W_KQ1")  # of layers 1 and 2, as the slides count them
COLUMNS = ("step", "accuracy", "accuracy without cycles", *MEMORIES)


def read_bigrams():
    """The probabilities (N, N) of the next character, a row for each, and the unigram (N,)."""
    path = Path(__file__).with_name("shakespeare_bigrams.csv")
    with open(path, newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    counts = torch.zeros(N, N)
    for first, second, count in rows:
        place = CHARACTERS.index(json.loads(first)), CHARACTERS.index(json.loads(second))
        counts[place] = int(count)
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
    """Draw tokens (B, T + 1), scored (B, T) and cyclic (B,). Triggers are the K most frequent
    characters ("fixed") or drawn ("random")."""
    probabilities, unigram = bigrams
    chosen = unigram.topk(K).indices.expand(B, K)
    if triggers == "random":
        chosen = torch.multinomial(unigram.expand(B, N), K, generator=generator)
    drawn = torch.randint(N, (B, K), generator=generator)
    outputs = torch.full((B, N), -1).scatter(1, chosen, drawn)  # -1 for what is no trigger
    uniform = torch.rand(B, T, generator=generator).T
    first = torch.multinomial(unigram, B, replacement=True, generator=generator)
    tokens = continue_tokens(first, probabilities, outputs.expand(T, B, N), uniform)

    # a walk from trigger to output that still goes on after K + 1 steps is a cycle
    walk, inputs = chosen, tokens[:, :-1]
    for _ in range(K + 1):
        walk = torch.where(walk < 0, walk, outputs.gather(1, walk.clamp(min=0)))
    repeated = (inputs[:, :, None] == inputs[:, None]).tril(-1).any(2)
    return tokens, repeated & (outputs.gather(1, inputs) >= 0), (walk >= 0).any(1)


def accuracies(logits, tokens, scored, cyclic):
    """The accuracy at scored positions of all sequences, and of those that cannot cycle."""
    right = (logits.argmax(2) == tokens[:, 1:]).float()
    return [float(right[where].mean()) for where in (scored, scored & ~cyclic[:, None])]


# ---- the order of the memories


class Simplified(torch.nn.Module):
    """Two layers of one head, without MLP or LayerNorm. Only MEMORIES (d, d) are trained, from
    zero; E, P, U and W_OV1 are random and frozen."""

    def __init__(self, d, T, generator):
        super().__init__()
        self.E = torch.randn(N, d, generator=generator)
        self.P = torch.randn(T, d, generator=generator)
        self.U = torch.randn(N, d, generator=generator) / d**0.5
        self.W_OV1 = torch.randn(d, d, generator=generator) / d**0.5
        for name in MEMORIES:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(d, d)))

    def forward(self, tokens):
        """Logits (B, T, N) of tokens (B, T), and the attention of both heads, (B, T, T) each, where
        a row is that of one reading token."""

        def read(W):  # x W with x = E + P, for all tokens and positions before they are paired
            return embedding(tokens, self.E @ W) + self.P @ W

        d, T = len(self.W_OV1), tokens.shape[1]
        x, mask = read(torch.eye(d)), torch.full((T, T), -torch.inf).triu(1)
        first = (read(self.W_KQ1) @ x.mT / d**0.5 + mask).softmax(2)  # (B, T, T)
        x = x + first @ read(self.W_OV1.T)
        second = (x @ self.W_KQ2 @ x.mT / d**0.5 + mask).softmax(2)
        return x @ self.U.T + second @ (x @ (self.U @ self.W_OV2).T), [first, second]

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


def train_memories(seed, **settings):
    """Train the memories; rows of COLUMNS."""
    rows = train_simplified(seed, **settings)[1]
    return [[round(value, 4) for value in row] for row in rows]


def train_simplified(
    seed, triggers, steps, frozen=(), until=0, lr=0.1, every=10, d=128, T=64, B=128
):
    """The trained model and the rows of train_memories, one for so many steps. Frozen memories are
    zero until a step."""
    generator, bigrams = torch.Generator().manual_seed(seed), read_bigrams()
    probed = bigrams[1].topk(K if triggers == "fixed" else N).indices
    model, rows = Simplified(d, T, generator), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    held_out, scored_out, cyclic = sample(512, T, triggers, bigrams, generator)
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                logits, _ = model(held_out[:, :-1])
            predicted = accuracies(logits, held_out, scored_out, cyclic)
            rows.append([step, *predicted, *model.recalls(probed)])
        for name in frozen:
            model.get_parameter(name).requires_grad_(step >= until)
        tokens, scored, _ = sample(B, T, triggers, bigrams, generator)
        logits, _ = model(tokens[:, :-1])
        descend(optimizer, cross_entropy(logits[scored], tokens[:, 1:][scored]))
    return model, rows


def take_steps(seed, bigrams, d, B, T=32, chunk=128):
    """The recall of each memory after one gradient step from zero on each of them, in the order of
    MEMORIES and with B new sequences for each, so long that its largest score is 10."""
    generator = torch.Generator().manual_seed(seed)
    table = read_bigrams()
    if bigrams == "uniform":
        table = [torch.full_like(x, 1 / N) for x in table]
    model = Simplified(d, T, generator)
    for i, name in enumerate(MEMORIES):
        weight, step = model.get_parameter(name), 0
        for _ in range(B // chunk):
            tokens, scored, _ = sample(chunk, T, "random", table, generator)
            logits, _ = model(tokens[:, :-1])
            loss = cross_entropy(logits[scored], tokens[:, 1:][scored])
            step = step - torch.autograd.grad(loss, weight)[0]
        with torch.no_grad():
            weight += step
            weight *= 10 / model.scores()[i].abs().max()
    return model.recalls()


def step_table(rows):
    lines = []
    for row in sorted(rows, key=lambda row: (row["bigrams"], row["d"], row["B"])):
        means = torch.tensor(row["values"]).mean(0)
        lines.append((row["bigrams"], row["d"], row["B"], *(f"{mean:.2f}" for mean in means)))
    return seeds_table(rows, ("characters", "d", "sequences a step", *MEMORIES), lines)


def name_of(row):
    """The triggers of a row of train_memories, or, in joint.py, which memories were frozen."""
    if "frozen" not in row:
        return f"{row['triggers']} triggers"
    return f"{' and '.join(row['frozen']) or 'all'} from step {row['until']}"


def memory_table(rows):
    """The steps to half recall and to accuracy 0.9, median and range (inf is never), the number of
    seeds with an order of the first three, and the mean accuracy at the end, without cycles."""
    half, lines = [f"{name} half" for name in MEMORIES], []
    head = "trained", *half, "0.9", "slides' order", "W_KQ2 first", "accuracy"
    for row in rows:
        curves = torch.tensor(row["values"])  # (seeds, times, COLUMNS)
        reached = curves[:, :, [3, 4, 5, 2]] >= torch.tensor([0.5, 0.5, 0.5, 0.9])
        steps = curves[0, :, 0][reached.int().argmax(1)]  # (seeds, 4), of the first time
        times = torch.where(reached.any(1), steps, torch.inf).T
        cells = [spread(steps) for steps in times.tolist()]
        output, trigger, previous, _ = times
        slides = int(((output < trigger) & (trigger < previous)).sum())
        trigger_first = int((trigger < output).sum())
        accuracy = f"{curves[:, -1, 2].mean():.2f}"
        lines.append((name_of(row), *cells, slides, trigger_first, accuracy))
    return seeds_table(rows, head, lines)


def draw(results, columns=2, width=5, height=3.2):
    """Plot recall and accuracy during training; dashed, the step at which frozen memories start."""
    rows = results["train_memories"]
    figure, grid = panels(len(rows), columns, width, height, sharey=True)
    for panel, row in zip(grid, rows, strict=True):
        values = torch.tensor(row["values"])  # (seeds, times, COLUMNS)
        for i, color in enumerate(("black", *COLORS[:3]), 2):
            draw_seeds(panel, values[0, :, 0], values[:, :, i], COLUMNS[i], color=color)
        panel.set(xlabel="training step", ylabel="share recalled or predicted", ylim=(-0.03, 1.03))
        panel.label_outer()
        if row.get("until"):
            panel.axvline(row["until"], color="0.5", ls="--", lw=1)
        panel.set_title(f"{name_of(row)}\nmean and range of {len(values)} seeds", size="medium")
    grid[0].legend(fontsize="small", loc="lower right")
    return figure


# ---- one layer or two


def train_layers(seed, layers, triggers, steps, d=64, T=64, B=64):
    """Train model.py's transformer; the two accuracies after the last step. The loss of random
    triggers is that of scored tokens alone: a model that predicts all tokens well must doubt what
    followed a token only once."""
    generator, bigrams = torch.Generator().manual_seed(seed), read_bigrams()
    held_out = sample(512, T, triggers, bigrams, generator)
    torch.manual_seed(seed)
    model = Transformer(T, T, N + T, N, layers, 2, d, d // 2)
    torch.nn.init.normal_(model.embed.weight)  # of one-hot characters and positions
    flags = Namespace(lr=0.02, warmup=20, steps=steps, decay=0.5)
    optimizers = make_optimizers(model, "muon", flags.lr, beta2=0.95, weight_decay=0.1)

    def predict(tokens):
        positions = torch.eye(T).expand(len(tokens), T, T)
        return model(torch.cat([one_hot(tokens[:, :-1], N), positions], 2))

    for step in range(steps):
        tokens, scored, _ = sample(B, T, triggers, bigrams, generator)
        trained = scored if triggers == "random" else torch.ones_like(scored)
        model.zero_grad()
        cross_entropy(predict(tokens)[trained], tokens[:, 1:][trained]).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = flags.lr * schedule(step, flags)
            optimizer.step()
    with torch.no_grad():
        return accuracies(predict(held_out[0]), *held_out)


def layer_table(rows):
    lines = []
    for row in rows:
        cells = (spread(values, "{:.3f}") for values in zip(*row["values"], strict=True))
        lines.append((row["layers"], row["triggers"], *cells))
    return seeds_table(rows, ("layers", "triggers", "accuracy", "without cycles"), lines)


SIZES = [(128, 2048), (256, 2048), (512, 2048), (256, 8192), (256, 32768)]  # d, sequences a step
SLOW = dict(steps=400, lr=0.01, every=1)  # so that their order can be seen
ORDER = [dict(triggers=triggers, **SLOW) for triggers in ("random", "fixed")]
STEPS = [dict(bigrams=name, d=d, B=B) for name in ("uniform", "Shakespeare") for d, B in SIZES]
LAYERS = [dict(layers=n, triggers=t, steps=300) for t in ("fixed", "random") for n in (1, 2)]
TASKS = [
    (train_memories, 5, ORDER, memory_table),
    (take_steps, 3, STEPS, step_table),
    (train_layers, 3, LAYERS, layer_table),
]
