"""The bigram task (Bietti's slides): the order in which an induction head learns its memories.

    python -m mechanisms.bigrams                           # about 4 minutes on one core

Characters follow Shakespeare's bigrams, except that K triggers are each followed by an output that
is drawn for the sequence. The scored positions are those of a trigger that occurred before. If
outputs are triggers, the sequence can run in a cycle, which is easy to predict; accuracy is
therefore also given without such sequences.
"""

import csv
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, embedding

from mechanisms import COLORS, command, draw_seeds, mean


N, K = 65, 5  # characters, triggers
MEMORIES = ("W_OV2", "W_KQ2", "W_KQ1")  # in the order of the slides
COLUMNS = ("step", "accuracy", "accuracy without cycles", *MEMORIES, "head 1", "head 2")
RUNS = {  # triggers, scale of W_OV1, memories that are frozen until step 60
    "random triggers": ("random", 1.0, ()),
    "fixed triggers": ("fixed", 1.0, ()),
    "W_OV1 a third": ("random", 1 / 3, ()),
    "keys frozen to step 60": ("random", 1.0, ("W_KQ2", "W_KQ1")),
    "W_OV2 frozen to step 60": ("random", 1.0, ("W_OV2",)),
}


def read_bigrams():
    """The probabilities (N, N) of the next character, a row for each, and the unigram (N,)."""
    with open(Path(__file__).with_name("shakespeare_bigrams.csv"), newline="") as file:
        rows = [(json.loads(a), json.loads(b), int(n)) for a, b, n in list(csv.reader(file))[1:]]
    characters = sorted({row[0] for row in rows})
    counts = torch.zeros(N, N)
    for first, second, count in rows:
        counts[characters.index(first), characters.index(second)] = count
    return counts / counts.sum(1, keepdim=True), counts.sum(1) / counts.sum()


def sample(B, T, triggers, bigrams, generator):
    """Draw tokens (B, T + 1), scored (B, T), cyclic (B,) and the outputs (B, N), -1 for characters
    that are no triggers.

    Triggers are the K most frequent characters ("fixed") or drawn from the unigram ("random")."""
    probabilities, unigram = bigrams
    chosen = unigram.topk(K).indices.expand(B, K)
    if triggers == "random":
        chosen = torch.multinomial(unigram.expand(B, N), K, generator=generator)
    drawn = torch.randint(N, (B, K), generator=generator)
    outputs = torch.full((B, N), -1).scatter(1, chosen, drawn)

    # the output of the last token or, if it is no trigger, a draw from its row of probabilities
    cumulative = probabilities.cumsum(1) / probabilities.sum(1, keepdim=True)
    uniform = torch.rand(B, T, generator=generator)
    tokens = torch.multinomial(unigram, B, replacement=True, generator=generator)[:, None]
    for t in range(T):
        output = outputs.gather(1, tokens[:, t:])
        drawn = (cumulative[tokens[:, t]] <= uniform[:, t : t + 1]).sum(1, keepdim=True)
        tokens = torch.cat([tokens, torch.where(output < 0, drawn, output)], 1)

    # a walk from trigger to output that still goes on after K + 1 steps is a cycle
    walk, inputs = chosen, tokens[:, :-1]
    for _ in range(K + 1):
        walk = torch.where(walk < 0, walk, outputs.gather(1, walk.clamp(min=0)))
    repeated = (inputs[:, :, None] == inputs[:, None]).tril(-1).any(2)
    return tokens, repeated & (outputs.gather(1, inputs) >= 0), (walk >= 0).any(1), outputs


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

    def recalls(self, triggers):
        """The share of its associations that each memory recalls; W_KQ2 for these triggers."""
        E, P, tokens = self.E, self.P, torch.arange(N)
        output = (self.U @ self.W_OV2 @ E.T).argmax(0) == tokens
        trigger = (E @ self.W_KQ2 @ self.W_OV1 @ E.T).argmax(1) == tokens
        previous = (P @ self.W_KQ1 @ P.T)[1:].argmax(1) == torch.arange(len(P) - 1)
        return [float(right.float().mean()) for right in (output, trigger[triggers], previous)]


def accuracies(logits, tokens, scored, cyclic):
    """The accuracy at scored positions of all sequences, and of those that cannot cycle."""
    right = (logits.argmax(2) == tokens[:, 1:]).float()
    return [float(right[where].mean()) for where in (scored, scored & ~cyclic[:, None])]


def train(seed, label, steps, d=128, T=64, B=128):
    """Train one of RUNS; one row of COLUMNS for every 10 steps. The last two are the attention of
    head 1 to the previous token, and of head 2 to what followed the trigger before."""
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


TASKS = [(train, dict(label=label, steps=160)) for label in RUNS]


def table(results):
    """The mean steps to half recall and to accuracy 0.9, and the measures after the last step."""
    half = [f"{name} half" for name in MEMORIES]
    rows = [("run", *half, "accuracy 0.9", "without cycles", "head 1", "head 2")]
    for row in results["train"]:
        curves, cells = torch.tensor(row["values"]), []  # (seeds, times, COLUMNS)
        for column, level in (3, 0.5), (4, 0.5), (5, 0.5), (2, 0.9):
            reached = curves[:, :, column] >= level
            steps = curves[0, reached.int().argmax(1), 0][reached.any(1)]
            never = len(curves) - len(steps)
            cells.append(f"{steps.mean():.0f}" + f" ({never} never)" * (never > 0))
        rows.append((row["label"], *cells, *(mean(curves[:, -1, i]) for i in (2, 6, 7))))
    return rows


def draw(results):
    """Plot recall and accuracy during training, with random and with fixed triggers."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for panel, row in zip(panels, results["train"], strict=False):
        values = torch.tensor(row["values"])  # (seeds, times, COLUMNS)
        for i, color in enumerate(("black", *COLORS[:3]), 2):
            draw_seeds(panel, values[0, :, 0], values[:, :, i], COLUMNS[i], color=color)
        panel.set(xlabel="training step", ylabel="share recalled, or foretold", ylim=(-0.03, 1.03))
        panel.set_title(f"{row['label']}: mean of {len(values)} seeds, lowest to highest")
        panel.legend(fontsize="small", loc="lower right")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, TASKS, table, draw, seeds=5)
