"""Three gradient steps make an induction head (Bietti's slides): how far the theorem carries.

    python -m mechanisms.theorems                          # about 2 minutes of one core

The simplified model of bigrams.py, at zero, takes one long gradient step for each of its memories,
in the order of the theorem.
"""

import torch
from torch.nn.functional import cross_entropy

from mechanisms import command, markdown
from mechanisms.bigrams import MEMORIES, N, Simplified, read_bigrams, sample


SIZES = ((64, 2048), (128, 2048), (256, 2048), (512, 2048), (256, 512), (256, 8192))  # d, sequences
KINDS = ("uniform", "Shakespeare")  # bigrams


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
    return model.recalls(range(N))


def tasks(seeds):
    every = [dict(kind=kind, d=d, sequences=n) for kind in KINDS for d, n in SIZES]
    return [(a["sequences"] * (a["d"] + 300) ** 2, three_steps, a, seeds) for a in every]


def table(results):
    found = {(row["kind"], row["d"], row["sequences"]): row for row in results["three_steps"]}
    rows = [("bigrams", "memory", *(f"d = {d}, {n}" for d, n in SIZES))]
    for kind in KINDS:
        values = torch.tensor([found[kind, d, n]["values"] for d, n in SIZES])
        for i, name in enumerate(MEMORIES):  # values: (sizes, seeds, MEMORIES)
            rows.append((kind, name, *(f"{share:.2f}" for share in values[:, :, i].mean(1))))
    return markdown(*rows)


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, seeds=3)
