"""Two theorems on the bigram task (Bietti's slides): one layer fails, three gradient steps suffice.

    python mechanisms/theorems.py                          # about 5 minutes on 2 cores
    python mechanisms/theorems.py --plot-only              # the figure again, from theorems.json

A generic transformer of 1 or 2 layers is trained to foretell all tokens; held against it is a
reader who knows the bigrams and counts. Then the simplified model of bigrams.py, at zero, takes
one long gradient step for each of its memories, in the order of the theorem.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from bigrams import MEMORIES, K, N, Simplified, accuracies, read_bigrams, sample
from torch.nn.functional import cross_entropy, one_hot


sys.path.append(str(Path(__file__).parents[1]))
from intervals import bootstrap
from runs import save_figure, write_file


WIDTH, SEQUENCES = 256, 4096  # of the three steps, while the other varies
SIZES = [(d, SEQUENCES) for d in (64, 128, 256, 512)] + [(WIDTH, n) for n in (256, 1024, 8192)]
KINDS = {"Shakespeare": "s--", "uniform": "o-", "uniform, no cycles": "^:"}  # how drawn
COLORS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7")  # all readers can tell these apart


class Generic(torch.nn.Module):
    """A pre-norm transformer with MLPs and learnt positions; all of it learns."""

    def __init__(self, layers, d, heads, T):
        super().__init__()
        block = torch.nn.TransformerEncoderLayer(
            d, heads, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(block, layers, torch.nn.LayerNorm(d), False)
        self.E, self.P = torch.nn.Embedding(N, d), torch.nn.Embedding(T, d)  # of variance 1
        self.U = torch.nn.Linear(d, N)

    def forward(self, tokens):
        """Logits (B, T, N) of tokens (B, T)."""
        future = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.U(self.blocks(self.E(tokens) + self.P.weight, future, is_causal=True))


def train(seed, layers, triggers, steps, lr=6e-3, T=64, B=64):
    """Rows of step and accuracies, of all sequences and of those without cycles."""
    generator = torch.Generator().manual_seed(seed)
    _, chances, frequency = read_bigrams()
    held_out = sample(512, T, triggers, chances, frequency, generator)[:3]
    torch.manual_seed(seed)
    model = Generic(layers, 64, 2, T)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    rows = []
    for step in range(steps + 1):
        if step % 40 == 0 or step == steps:
            with torch.no_grad():
                logits = model(held_out[0][:, :-1])
            rows.append([step, *accuracies(logits, *held_out)])
        # up over 50 steps, down to zero over the second half
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 50, 1, 2 - 2 * step / steps)
        tokens = sample(B, T, triggers, chances, frequency, generator)[0]
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
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
    held_out = sample(2048, T, triggers, chances, frequency, generator)[:3]
    return accuracies(read_by_counts(held_out[0], chances, prior), *held_out)


def three_steps(seed, kind, d, sequences, T=32):
    """Recall of each memory when each took one gradient step from zero, in the order MEMORIES.

    The loss is that of the last scored token of each sequence; triggers are random, bigrams of the
    kind. A step's length, the size of its largest entry, is the power of 4 that lowers the loss of
    256 of the sequences most.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.full((N, N), 1 / N), torch.full((N,), 1 / N)
    bigrams = read_bigrams()[1:] if kind == "Shakespeare" else uniform
    model = Simplified(d, T, 1.0, generator)
    batches = []
    for _ in range(sequences // 256):
        tokens, scored, cyclic, _ = sample(256, T, "random", *bigrams, generator)
        last = scored & (scored.flip(1).cumsum(1).flip(1) == 1)
        left_out = cyclic & (kind == "uniform, no cycles")
        batches.append((tokens, last & ~left_out[:, None]))

    def loss(tokens, last):
        return cross_entropy(model(tokens[:, :-1])[0][last], tokens[:, 1:][last], reduction="sum")

    for name in MEMORIES:
        memory = model.get_parameter(name)
        gradient = sum(torch.autograd.grad(loss(*batch), memory)[0] for batch in batches)
        with torch.no_grad():
            losses = {}
            for length in (4.0**-i for i in range(7)):
                memory.copy_(-length * gradient / gradient.abs().max())
                losses[float(loss(*batches[0]))] = length
            memory.copy_(-losses[min(losses)] * gradient / gradient.abs().max())
    return model.recalls(range(N))[:3]


def measure(args):
    """{name of a function: rows of its arguments and "values", one a seed}."""
    tasks = [(1, reader, dict(triggers=kind)) for kind in ("fixed", "random")]  # rough seconds
    for kind in KINDS:
        for d, n in SIZES:
            tasks.append((1 + n * d / 1e5, three_steps, dict(kind=kind, d=d, sequences=n)))
    for kind in ("fixed", "random"):
        for layers in (1, 2):
            arguments = dict(layers=layers, triggers=kind, steps=args.steps)
            tasks.append((layers * args.steps / 30, train, arguments))

    results, done, start = {}, 0, time.time()
    for seconds, function, arguments in tasks:
        values = [function(seed, **arguments) for seed in range(args.seed, args.seed + args.seeds)]
        results.setdefault(function.__name__, []).append(arguments | dict(values=values))
        done += seconds
        left = (time.time() - start) * (sum(task[0] for task in tasks) / done - 1)
        print(f"{function.__name__} {arguments}: about {left:.0f} s left", flush=True)
    return dict(seconds=time.time() - start, processor=time.process_time()) | results


def draw_steps(axes, rows, x, other, same):
    """Recall after one step against x, "d" or "sequences", of the rows whose other size is same."""
    rows = sorted([row for row in rows if row[other] == same], key=lambda row: row[x])
    for kind, style in KINDS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        values = torch.tensor([row["values"] for row in chosen])  # (sizes, seeds, MEMORIES)
        for i, name in enumerate(MEMORIES):
            means, seeds = values[:, :, i].mean(1), values[:, :, i]
            bounds = [bootstrap(some, torch.Generator().manual_seed(0)) for some in seeds]
            spread = (torch.tensor(bounds).T - means).abs()
            looks = dict(fmt=style, color=COLORS[i + 1], capsize=2, label=f"{name}, {kind}")
            axes.errorbar([row[x] for row in chosen], means, spread, **looks)
    sizes = sorted({row[x] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, sizes)
    axes.set_xticks([], minor=True)
    axes.set(xlabel=x, ylabel="recall", ylim=(0, 1.03))
    axes.set_title(f"After one gradient step each; {other} = {same}")


def draw(results, path):
    """Accuracy of 1 and 2 layers; recall after the three steps, against d and the sequences."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5.5), layout="constrained")
    for color, row in zip(COLORS, results["train"], strict=False):
        steps, _, values = torch.tensor(row["values"]).movedim(2, 0)  # each (seeds, times)
        label = f"{row['layers']} layer{'s'[: row['layers'] - 1]}, {row['triggers']} triggers"
        left.plot(steps[0], values.T, color=color, alpha=0.3)
        left.plot(steps[0], values.mean(0), color=color, label=label)
    level = torch.tensor(results["reader"][1]["values"])[:, 1].mean()
    left.axhline(level, color=COLORS[4], ls="--", label="reader by counts, random triggers")
    left.set(xlabel="training step", ylabel="accuracy without cycles")
    left.set_title(f"Generic transformers, {len(values)} seeds")
    draw_steps(middle, results["three_steps"], "d", "sequences", SEQUENCES)
    draw_steps(right, results["three_steps"], "sequences", "d", WIDTH)
    for axes in (left, middle):
        axes.legend(fontsize="small")
    save_figure(figure, path)


def main():
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.error = lambda message: p.exit(2, f"theorems.py: {message}\n")
    p.add_argument("--steps", type=int, default=400, help="training steps of 1 and 2 layers")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds")
    p.add_argument("--seed", type=int, default=0, help="the first of them")
    p.add_argument("--out", type=Path, default=Path("results/mechanisms"), help="folder")
    p.add_argument("--plot-only", action="store_true", help="draw what theorems.json holds")
    args = p.parse_args()
    if min(args.steps, args.seeds) < 1:
        p.error("--steps and --seeds must be at least 1")
    path = args.out / "theorems.json"
    try:
        if not args.plot_only:
            args.out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(dict(command=sys.argv[1:]) | measure(args))
            write_file(path, lambda temporary: temporary.write_text(text))
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
    except (OSError, ValueError, KeyError) as error:
        p.error(f"{path} cannot be written, or is no result of this script: {error}")


if __name__ == "__main__":
    main()
