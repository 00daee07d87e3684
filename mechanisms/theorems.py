"""Three gradient steps make an induction head (Bietti's slides): where the theorem holds.

    python -m mechanisms.theorems                          # about 2 minutes on one core

The simplified model of bigrams.py starts at zero and takes one long gradient step for each of its
memories, in the order of the theorem.
"""

import torch
from torch.nn.functional import cross_entropy

from mechanisms import command
from mechanisms.bigrams import MEMORIES, N, Simplified, read_bigrams, sample


SIZES = ((64, 2048), (128, 2048), (256, 2048), (512, 2048), (256, 512), (256, 8192))  # d, sequences
KINDS = ("uniform", "Shakespeare")  # bigrams


def three_steps(seed, kind, d, sequences, T=32):
    """The recall of each memory after one gradient step for each of MEMORIES, with random triggers.

    The loss is that of the last scored token of each sequence. The length of a step is the size of
    its largest entry: the power of 4 that gives the first 256 sequences the lowest loss."""
    generator = torch.Generator().manual_seed(seed)
    bigrams = torch.full((N, N), 1 / N), torch.full((N,), 1 / N)
    if kind == "Shakespeare":
        bigrams = read_bigrams()
    model = Simplified(d, T, 1.0, generator)
    batches = []
    for _ in range(sequences // 256):
        tokens, scored, _, _ = sample(256, T, "random", bigrams, generator)
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


TASKS = [(three_steps, dict(kind=kind, d=d, sequences=n)) for kind in KINDS for d, n in SIZES]


def table(results):
    """The mean recall, a row for each kind of bigrams and memory."""
    rows = [("bigrams", "memory", *(f"d = {d}, {n}" for d, n in SIZES))]
    for kind in KINDS:
        values = [row["values"] for row in results["three_steps"] if row["kind"] == kind]
        means = torch.tensor(values).mean(1)  # (sizes, MEMORIES)
        for name, shares in zip(MEMORIES, means.T, strict=True):
            rows.append((kind, name, *(f"{share:.2f}" for share in shares)))
    return rows


if __name__ == "__main__":
    command(__file__, __doc__, TASKS, table, seeds=3)
