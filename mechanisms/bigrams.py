"""The bigram task (Bietti's slides): in which order the memories of an induction head arise.

    python -m mechanisms.bigrams                           # about 4 minutes of one core

Characters follow Shakespeare's bigrams, but each of K triggers is followed by an output of the
sequence's own; scored is what follows a trigger that occurred before. Outputs that are triggers
can make a sequence run in a cycle, easy to foretell: accuracy is also given without such ones.
"""

import csv
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, embedding

from mechanisms import COLORS, command, draw_seeds, markdown, mean


N, K = 65, 5  # characters, triggers
MEMORIES = ("W_OV2", "W_KQ2", "W_KQ1")  # in the order of the slides
COLUMNS = ("step", "accuracy", "without cycles", *MEMORIES, "head 1", "head 2")
RUNS = {  # triggers; size of W_OV1; which memories are frozen until step 60
    "random triggers": ("random", 1.0, ()),
    "fixed triggers": ("fixed", 1.0, ()),
    "W_OV1 a third": ("random", 1 / 3, ()),
    "keys frozen to step 60": ("random", 1.0, ("W_KQ2", "W_KQ1")),
    "W_OV2 frozen to step 60": ("random", 1.0, ("W_OV2",)),
}


def read_bigrams():
    """Characters, the chances (N, N) of the next in each row, and the frequency (N,) of each."""
    with open(Path(__file__).with_name("shakespeare_bigrams.csv"), newline="") as file:
        rows = [(json.loads(a), json.loads(b), int(n)) for a, b, n in list(csv.reader(file))[1:]]
    characters = sorted({row[0] for row in rows})
    counts = torch.zeros(N, N)
    for first, second, count in rows:
        counts[characters.index(first), characters.index(second)] = count
    return characters, counts / counts.sum(1, keepdim=True), counts.sum(1) / counts.sum()


def sample(B, T, triggers, chances, frequency, generator):
    """Tokens (B, T + 1), scored (B, T), cyclic (B,), rule (B, N): outputs, -1 if not a trigger.

    triggers "fixed": the K most frequent tokens; "random": drawn by frequency per sequence."""
    chosen = frequency.topk(K).indices.expand(B, K)
    if triggers == "random":
        chosen = torch.multinomial(frequency.expand(B, N), K, generator=generator)
    outputs = torch.randint(N, (B, K), generator=generator)
    rule = torch.full((B, N), -1).scatter(1, chosen, outputs)

    # every token from the one before: its output, or drawn from its row of chances
    below = chances.cumsum(1) / chances.sum(1, keepdim=True)
    uniform = torch.rand(B, T, generator=generator)
    tokens = torch.multinomial(frequency, B, replacement=True, generator=generator)[:, None]
    for t in range(T):
        own = rule.gather(1, tokens[:, t:])
        drawn = (below[tokens[:, t]] <= uniform[:, t : t + 1]).sum(1, keepdim=True)
        tokens = torch.cat([tokens, torch.where(own < 0, drawn, own)], 1)

    # a walk from trigger to output that goes on after K + 1 steps never ends
    walk, now = chosen, tokens[:, :-1]
    for _ in range(K + 1):
        walk = torch.where(walk < 0, walk, rule.gather(1, walk.clamp(min=0)))
    before = (now[:, :, None] == now[:, None]).tril(-1).any(2)
    return tokens, before & (rule.gather(1, now) >= 0), (walk >= 0).any(1), rule


class Simplified(torch.nn.Module):
    """Two layers of one head, no MLP, no norm. MEMORIES (d, d) learn, from zero. Embeddings E, P, U
    and W_OV1 are random and stay: W_OV1 keeps the length of a vector but for the factor remap."""

    def __init__(self, d, T, remap, generator):
        super().__init__()
        self.E, self.P, U, W = (torch.randn(n, d, generator=generator) for n in (N, T, N, d))
        self.U, self.W_OV1 = U / d**0.5, W * remap / d**0.5
        zeros = (torch.nn.Parameter(torch.zeros(d, d)) for _ in MEMORIES)
        self.W_OV2, self.W_KQ2, self.W_KQ1 = zeros

    def forward(self, tokens):
        """Logits (B, T, N) of tokens (B, T), and the attention (B, T, T) of both layers."""

        def read(W):  # x W, where x = E + P: few tokens and positions, many pairs of them
            return embedding(tokens, self.E @ W) + self.P @ W

        d, T = self.W_OV1.shape[0], tokens.shape[1]
        x, future = read(torch.eye(d)), torch.full((T, T), -torch.inf).triu(1)
        first = (read(self.W_KQ1) @ x.mT / d**0.5 + future).softmax(2)
        x = x + first @ read(self.W_OV1.T)
        second = (x @ self.W_KQ2 @ x.mT / d**0.5 + future).softmax(2)
        return x @ self.U.T + second @ (x @ (self.U @ self.W_OV2).T), (first, second)

    def recalls(self, queries):
        """Shares of its associations that each memory recalls; for W_KQ2, of these triggers'."""
        E, P, tokens = self.E, self.P, torch.arange(N)
        output = (self.U @ self.W_OV2 @ E.T).argmax(0) == tokens
        trigger = (E @ self.W_KQ2 @ self.W_OV1 @ E.T).argmax(1) == tokens
        previous = (P @ self.W_KQ1 @ P.T)[1:].argmax(1) == torch.arange(len(P) - 1)
        return [float(each.float().mean()) for each in (output, trigger[queries], previous)]


def accuracies(logits, tokens, scored, cyclic):
    """Shares of the scored tokens foretold: of all, and without sequences that can cycle."""
    right = (logits.argmax(2) == tokens[:, 1:]).float()
    return [float(right[some].mean()) for some in (scored, scored & ~cyclic[:, None])]


def attention_kept(tokens, scored, first, second):
    """Attention of head 1 to the place before, of head 2 to the places after the query's token."""
    after = tokens[:, :-1, None] == tokens[:, None, :-2]  # (B, T, T - 1)
    induction = (second[:, :, 1:] * after).sum(2)[scored]
    return [float(first.diagonal(-1, 1, 2).mean()), float(induction.mean())]


def train(seed, label, steps, d=128, T=64, B=128):
    """Rows of COLUMNS, one every 10 steps, of one of RUNS."""
    triggers, remap, frozen = RUNS[label]
    generator = torch.Generator().manual_seed(seed)
    _, chances, frequency = read_bigrams()
    queries = frequency.topk(K if triggers == "fixed" else N).indices
    model = Simplified(d, T, remap, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    tokens, scored, cyclic, _ = sample(512, T, triggers, chances, frequency, generator)
    rows = []
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                logits, maps = model(tokens[:, :-1])
            shares = accuracies(logits, tokens, scored, cyclic) + model.recalls(queries)
            rows.append([step, *shares, *attention_kept(tokens, scored, *maps)])
        for name in frozen:
            model.get_parameter(name).requires_grad_(step >= 60)
        some, asked, _, _ = sample(B, T, triggers, chances, frequency, generator)
        optimizer.zero_grad()
        cross_entropy(model(some[:, :-1])[0][asked], some[:, 1:][asked]).backward()
        optimizer.step()
    return rows


def tasks(seeds, steps):
    return [(1, train, dict(label=label, steps=steps), seeds) for label in RUNS]


def table(results):
    """Mean steps to half recall and to accuracy 0.9; at the end accuracy, and the heads' shares."""
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
    return markdown(*rows)


def draw(results):
    """Recall and accuracy against steps, with random and with fixed triggers."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    colors = dict(zip(COLUMNS[2:6], ("black", *COLORS), strict=False))
    for panel, row in zip(panels, results["train"], strict=False):
        values = torch.tensor(row["values"])  # (seeds, times, COLUMNS)
        for i, (name, color) in enumerate(colors.items(), 2):
            label = "accuracy " * (i == 2) + name
            draw_seeds(panel, values[0, :, 0], values[:, :, i], label, color=color)
        panel.set(xlabel="training step", ylabel="share recalled, or foretold", ylim=(-0.03, 1.03))
        panel.set_title(f"{row['label']}: mean of {len(values)} seeds, lowest to highest")
        panel.legend(fontsize="small", loc="lower right")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, draw, steps=160, seeds=5)
