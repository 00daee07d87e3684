"""The bigram task (Bietti's slides): in which order the memories of an induction head arise.

    python mechanisms/bigrams.py                           # about 3 minutes on 2 cores
    python mechanisms/bigrams.py --plot-only               # the figure again, from bigrams.json

Characters follow Shakespeare's bigrams, but each of K triggers is followed by an output of the
sequence's own; scored is what follows a trigger that occurred before. Outputs that are triggers
can make a sequence run in a cycle, easy to foretell: accuracy is also given without such ones.
"""

import csv
import json
import time
from pathlib import Path

from parts.runs import measure_and_draw, save_figure

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, embedding


N, K = 65, 5  # characters, triggers
MEMORIES = ("W_OV2", "W_KQ2", "W_KQ1")  # in the order of the slides
COLUMNS = ("step", "accuracy", "without cycles", *MEMORIES, "W_KQ1, first half", "head 1", "head 2")
COLORS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7")  # all readers can tell these apart
RUNS = {  # what differs from jointly trained memories and triggers drawn for each sequence
    "random triggers": {},
    "fixed triggers": dict(triggers="fixed"),
    "W_OV1 a third": dict(remap=1 / 3),
    "keys frozen to step 60": dict(frozen=("W_KQ2", "W_KQ1"), until=60),
    "W_OV2 frozen to step 60": dict(frozen=("W_OV2",), until=60),
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
        recalled = (output, trigger[queries], previous, previous[: len(P) // 2])
        return [float(each.float().mean()) for each in recalled]


def accuracies(logits, tokens, scored, cyclic):
    """Shares of the scored tokens foretold: of all, and without sequences that can cycle."""
    right = (logits.argmax(2) == tokens[:, 1:]).float()
    return [float(right[some].mean()) for some in (scored, scored & ~cyclic[:, None])]


def attention_kept(tokens, scored, first, second):
    """Attention of head 1 to the place before, of head 2 to the places after the query's token."""
    after = tokens[:, :-1, None] == tokens[:, None, :-2]  # (B, T, T - 1)
    induction = (second[:, :, 1:] * after).sum(2)[scored]
    return [float(first.diagonal(-1, 1, 2).mean()), float(induction.mean())]


def train(seed, steps, triggers="random", remap=1.0, frozen=(), until=0, d=128, T=64, B=128):
    """Rows of COLUMNS; 32 tokens of a sequence without a cycle; both heads' attention there, %."""
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
            model.get_parameter(name).requires_grad_(step >= until)
        some, asked, _, _ = sample(B, T, triggers, chances, frequency, generator)
        optimizer.zero_grad()
        cross_entropy(model(some[:, :-1])[0][asked], some[:, 1:][asked]).backward()
        optimizer.step()
    shown = int(cyclic.int().argmin())
    percent = (100 * torch.stack(maps)[:, shown, :32, :32]).round().int()
    return rows, tokens[shown, :32].tolist(), percent.tolist()


def measure(args):
    """{label of RUNS: rows of COLUMNS for each seed}, and "shown": one run's tokens and maps."""
    runs = [(label, seed) for label in RUNS for seed in range(args.seed, args.seed + args.seeds)]
    results, start = {}, time.time()
    for done, (label, seed) in enumerate(runs, 1):
        rows, *shown = train(seed, args.steps, **RUNS[label])
        results.setdefault(label, []).append(rows)
        if label == "fixed triggers":
            results["shown"] = shown
        left = (time.time() - start) * (len(runs) / done - 1)
        print(f"{label}, seed {seed}: {rows[-1][2]:.3f}, about {left:.0f} s left", flush=True)
    return results


def draw(results, path):
    """Recall against steps, accuracy of all runs, and the attention of the two heads."""
    grid = dict(mosaic="AABBCC;DDDEEE", height_ratios=(2, 3))
    figure, axes = plt.subplot_mosaic(**grid, figsize=(15, 13), layout="constrained")
    curves = {label: torch.tensor(results[label]) for label in RUNS}  # (seeds, times, COLUMNS)
    names = ["accuracy without cycles", *COLUMNS[3:7]]
    lines = [("A", "random triggers", i, name) for i, name in enumerate(names, 2)]
    lines += [("B", "fixed triggers", i, name) for i, name in enumerate(names, 2)]
    lines += [("C", label, 2, label) for label in RUNS]
    for i, (key, label, column, name) in enumerate(lines):
        steps, values = curves[label][0, :, 0], curves[label][:, :, column]
        axes[key].plot(steps, values.T, color=COLORS[i % 5], alpha=0.3)
        axes[key].plot(steps, values.mean(0), color=COLORS[i % 5], label=name)
        axes[key].set(xlabel="training step", ylabel="share recalled, or foretold", title=label)
        axes[key].set(ylim=(-0.03, 1.03))
        axes[key].legend(fontsize="small", loc="lower right")
    axes["C"].set(ylabel="accuracy without cycles", title=f"{len(values)} seeds and their mean")

    # the attention of one run, tokens as they are written
    characters, _, frequency = read_bigrams()
    written = [{"\n": "\u21b5", " ": "\u2423"}.get(some, some) for some in characters]
    names = [written[token] for token in results["shown"][0]]
    triggers = [written[token] for token in frequency.topk(K).indices]
    rows = [f"\u25b8 {name}" if name in triggers else name for name in names]
    for i, place in enumerate(("at the token before", "after the same trigger")):
        panel, share = axes["DE"[i]], curves["fixed triggers"][:, -1, 7 + i].mean()
        image = panel.imshow(results["shown"][1][i], cmap="cividis", vmin=0, vmax=100)
        panel.set(xticks=range(32), xticklabels=names, xlabel="attended token")
        panel.set(yticks=range(32), yticklabels=rows, ylabel="attending token, \u25b8 a trigger")
        panel.set_title(f"Head {i + 1}, fixed triggers: on average {share:.0%} is {place}")
    figure.colorbar(image, ax=axes["E"], label="attention, %")
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, steps=160, seeds=5)


if __name__ == "__main__":
    main()
