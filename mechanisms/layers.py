"""One layer fails on the bigram task, two solve it (Bietti's slides): generic transformers.

    python mechanisms/layers.py                            # about 3 minutes on 2 cores
    python mechanisms/layers.py --plot-only                # the figure again, from layers.json

Fixed triggers can be known, so all tokens are foretold. Random ones cannot: whoever foretells all
tokens well must doubt what followed a token once, as the reader does who knows the bigrams and
counts. There the loss is that of the scored tokens alone.
"""

from parts.flags import DEFAULTS
from parts.runs import measure_and_draw, measure_each, save_figure

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy, one_hot

from mechanisms.bigrams import K, N, accuracies, read_bigrams, sample
from train import learning_rate, optimizers


FLAGS = DEFAULTS | dict(  # Muon and AdamW
    dtype="float32", lr=0.02, warmup=20, beta2=0.95, weight_decay=0.1
)
COLORS = ("black", "#0072B2", "#D55E00", "#009E73")  # all readers can tell these apart


class Generic(torch.nn.Module):
    """A pre-norm transformer with MLPs of width 2d and learnt positions; all of it learns."""

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
        future = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.U(self.blocks(self.E(tokens) + self.P.weight, future, is_causal=True))


def train(seed, layers, triggers, steps, d=64, T=64, B=64):
    """Rows of step and accuracies, of all sequences and of those without cycles."""
    generator = torch.Generator().manual_seed(seed)
    _, chances, frequency = read_bigrams()
    held_out = sample(512, T, triggers, chances, frequency, generator)[:3]
    torch.manual_seed(seed)
    model, flags = Generic(layers, d, 2, T), FLAGS | dict(steps=steps)
    parts, rows = optimizers(model, flags), []
    for step in range(steps + 1):
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                logits = model(held_out[0][:, :-1])
            rows.append([step, *accuracies(logits, *held_out)])
        tokens, scored, _, _ = sample(B, T, triggers, chances, frequency, generator)
        learnt = scored if triggers == "random" else torch.ones_like(scored)
        model.zero_grad()
        cross_entropy(model(tokens[:, :-1])[learnt], tokens[:, 1:][learnt]).backward()
        for optimizer in parts:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, flags)
            optimizer.step()
    return rows


def read_by_counts(tokens, chances, prior):
    """Chances (B, T, N) of the next token for a reader who knows the bigrams, and of every token
    the prior (N,) that it is a trigger; it weighs each token by itself, by what followed before."""
    now, following = tokens[:, :-1], one_hot(tokens[:, 1:], N).float()
    same = (now[:, :, None] == now[:, None]).tril(-1).float()
    counts = same @ following  # (B, T, N)
    seen, only = counts.sum(2, keepdim=True), (counts > 0).sum(2, keepdim=True) == 1
    usual, prior = chances[now], prior[now][..., None]
    other = (1 - prior) * usual.gather(2, counts.argmax(2, keepdim=True)) ** seen
    trigger = torch.where(seen > 0, prior / N * only, prior)
    weight = trigger / (trigger + other)  # its chance of being a trigger
    return weight * torch.where(seen > 0, counts / seen, 1 / N) + (1 - weight) * usual


def reader(seed, triggers, T=64):
    """Accuracies of read_by_counts, of all sequences and of those without cycles."""
    generator = torch.Generator().manual_seed(seed)
    _, chances, frequency = read_bigrams()
    prior = torch.zeros(N).index_fill(0, frequency.topk(K).indices, 1.0)
    if triggers == "random":
        draws = torch.multinomial(frequency.expand(100000, N), K, generator=generator)
        prior = torch.bincount(draws.flatten(), minlength=N).clamp(min=1) / 100000
    held_out = sample(1024, T, triggers, chances, frequency, generator)[:3]
    return accuracies(read_by_counts(held_out[0], chances, prior), *held_out)


def measure(args):
    """{name of a function: rows of its arguments and "values", one a seed}."""
    seeds, tasks = range(args.seed, args.seed + args.seeds), []
    for triggers in ("fixed", "random"):
        tasks.append((10, "reader", reader, dict(triggers=triggers), seeds))
        for layers in (1, 2):
            arguments = dict(layers=layers, triggers=triggers, steps=args.steps)
            tasks.append((layers * args.steps, "train", train, arguments, seeds))
    return measure_each(tasks)


def draw(results, path):
    """Accuracy against steps, of all sequences and of those without cycles."""
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    panels[0].set_title("All sequences")
    panels[1].set_title("Without sequences that can cycle")
    for i, axes in enumerate(panels, 1):
        for color, row in zip(COLORS, results["train"], strict=True):
            values = torch.tensor(row["values"])  # (seeds, times, step and accuracies)
            steps, values = values[0, :, 0], values[:, :, i]
            who = f"{row['layers']} layer{'s'[: row['layers'] - 1]}, {row['triggers']} triggers"
            label = f"{who}: {values[:, -1].mean():.3f}"
            axes.plot(steps, values.T, color=color, alpha=0.3)
            axes.plot(steps, values.mean(0), color=color, label=label)
        level = torch.tensor(results["reader"][1]["values"])[:, i - 1].mean()
        label = f"reader, random triggers: {level:.3f}"
        axes.axhline(level, color="0.5", ls="--", label=label)
        axes.set(xlabel="training step", ylabel="share of scored tokens foretold", ylim=(0, 1.03))
        legend = f"{len(values)} seeds and their mean, at the end"
        axes.legend(fontsize="small", title=legend, loc="center right", bbox_to_anchor=(1, 0.75))
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, steps=300, seeds=3)


if __name__ == "__main__":
    main()
