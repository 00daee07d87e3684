"""Tasks in which the pairs of one step stand whole among distractors, symbols that no chain has.

    --task random20    # among 20 distractors, anywhere: of two pairs a 1b has one of 23 places
    --task fixed20     # the same tokens, with the pairs at the same places in every sequence

The pairs of a sequence are shuffled over their places, and the queries come last.
"""

import functools

import data
from data import random_bits
from extras.studies.tables import Block, Task

import torch


def places(kind, G, N, D):
    """The task before its tokens are moved: the pairs, the distractors, the queries."""
    if D != 1:
        raise ValueError(f"--task {kind}{G} has one step: set --D 1")
    x = torch.arange(2 * N + G)
    chains, none = x[: 2 * N].view(N, 2), torch.empty(N, 0, dtype=torch.long)
    blocks = [Block(["1a", "1b"], chains), Block([], x[2 * N :, None], none)]
    names = [f"D{i + 1}" for i in range(G)]
    return Task(f"{kind}{G} D=1", N, 2, [*blocks, Block(["q"], chains[:, :1])], names)


TASKS = {}
for G in (4, 6, 8, 12, 20):
    for kind in ("random", "fixed"):
        TASKS[f"{kind}{G}"] = functools.partial(places, kind, G)
data.TASKS.update(TASKS)
make_chains = data.make_batch


def make_batch(seed, index, N=4, D=3, K=4, ks=None, rotary="input", task="chain"):
    """data.make_batch, which moves the tokens before the queries in these tasks."""
    batch = make_chains(seed, index, N, D, K, ks, rotary, task)
    if task not in TASKS:
        return batch

    # tokens are sorted by a key, those of a pair by the same one: random, or such that pair n comes
    # after (n + 1/2) G/N distractors
    B, T = batch.symbols.shape
    G = T - 3 * N
    if task.startswith("random"):
        keys = random_bits(~seed, index, N + G)  # ~seed is no seed of sequences
    else:
        keys = torch.cat([(torch.arange(N) + 0.5) * G / N, torch.arange(G) + 0.5]).expand(B, -1)
    keys = torch.cat([keys[:, :N].repeat_interleave(2, 1), keys[:, N:]], 1).to(index.device)
    order = keys.argsort(dim=1, stable=True)  # (B, 2N + G)
    queries = torch.arange(2 * N + G, T, device=index.device).expand(B, -1)
    order = torch.cat([order, queries], 1)  # (B, T)

    # symbols move, the numbers of the positions stay
    sequence = torch.arange(B, device=index.device)[:, None]
    inputs = torch.cat([batch.inputs[sequence, order, :K], batch.inputs[:, :, K:]], 2)
    positions = order.argsort(1)[sequence[:, :, None], batch.positions]
    return data.Batch(inputs, batch.targets, positions, batch.symbols[sequence, order])


data.make_batch = make_batch
