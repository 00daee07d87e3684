"""Three gradient steps make an induction head (Bietti's slides): how far the theorem carries.

    python mechanisms/theorems.py                          # about 3 minutes on 2 cores
    python mechanisms/theorems.py --plot-only              # the figure again, from theorems.json

The simplified model of bigrams.py, at zero, takes one long gradient step for each of its memories,
in the order of the theorem.
"""

from parts.intervals import bootstrap
from parts.runs import measure_and_draw, measure_each, save_figure

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from mechanisms.bigrams import MEMORIES, N, Simplified, read_bigrams, sample


WIDTH, SEQUENCES = 256, 2048  # while the other varies
SIZES = [(d, SEQUENCES) for d in (64, 128, 256, 512)] + [(WIDTH, n) for n in (512, 8192)]
KINDS = {"Shakespeare": "s--", "uniform": "o-"}  # bigrams, how drawn
COLORS = ("#0072B2", "#D55E00", "#009E73")  # all readers can tell these apart


def three_steps(seed, kind, d, sequences, T=32):
    """Recall of each memory when each took one gradient step from zero, in the order MEMORIES.

    The loss is that of the last scored token of each sequence, if any; triggers are random, bigrams
    of the kind. A step's length, the size of its largest entry, is the power of 4 that lowers the
    loss of the first 256 sequences most.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.full((N, N), 1 / N), torch.full((N,), 1 / N)
    bigrams = read_bigrams()[1:] if kind == "Shakespeare" else uniform
    model = Simplified(d, T, 1.0, generator)
    batches = []
    for _ in range(sequences // 256):
        tokens, scored, _, _ = sample(256, T, "random", *bigrams, generator)
        last = scored & (scored.flip(1).cumsum(1).flip(1) == 1)
        batches.append((tokens[last.any(1)], last[last.any(1)]))

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
    """{"three_steps": rows of its arguments and "values", one a seed}."""
    seeds, tasks = range(args.seed, args.seed + args.seeds), []
    for kind in KINDS:
        for d, n in SIZES:
            arguments = dict(kind=kind, d=d, sequences=n)
            tasks.append((n * (d + 300) ** 2, "three_steps", three_steps, arguments, seeds))
    return measure_each(tasks)


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
            looks = dict(fmt=style, color=COLORS[i], capsize=2, label=f"{name}, {kind}")
            axes.errorbar([row[x] for row in chosen], means, spread, **looks)
    sizes = sorted({row[x] for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(sizes, sizes)
    axes.set_xticks([], minor=True)
    axes.set(xlabel=x, ylabel="share of associations recalled", ylim=(0, 1.03))
    axes.set_title(f"After one gradient step each; {other} = {same}, {seeds.shape[1]} seeds")


def draw(results, path):
    """Recall of each memory after the three steps, against d and against the sequences."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True, layout="constrained")
    draw_steps(left, results["three_steps"], "d", "sequences", SEQUENCES)
    draw_steps(right, results["three_steps"], "sequences", "d", WIDTH)
    left.legend(fontsize="small")
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, seeds=3)


if __name__ == "__main__":
    main()
