"""Places that say nothing: one step of retrieval among G distractors, symbols that no chain has.

    --task random20    # 20 distractors; the pairs stand anywhere among them, each pair whole
    --task fixed20     # the same tokens; the pairs stand at the same places in every sequence

In both the pairs of a sequence are shuffled over their places, and the queries come last.
"""

import functools

import data
from data import Block, Task, UserError, random_bits

import torch


DISTRACTORS = 4, 6, 8, 20  # of two chains, 7, 9, 11 and 23 places where a pair may begin
make_chains = data.make_batch


@functools.lru_cache
def places(kind, G, N, D):
    """Return the task before its tokens are moved: the pairs, the distractors, the queries."""
    if D != 1:
        raise UserError(f"--task {kind}{G} has one step: set --D 1")
    x = torch.arange(2 * N + G)
    chains, none = x[: 2 * N].view(N, 2), torch.empty(N, 0, dtype=torch.long)
    blocks = [Block(["1a", "1b"], chains), Block([], x[2 * N :, None], none)]
    names = [f"D{i + 1}" for i in range(G)]
    return Task(f"{kind}{G} D=1", N, 2, [*blocks, Block(["q"], chains[:, :1])], names)


def make_batch(seed, index, N=4, D=3, K=4, targets=None, rotary="input", task="chain"):
    """data.make_batch, which moves the tokens before the queries in these tasks."""
    batch = make_chains(seed, index, N, D, K, targets, rotary, task)
    kind, G = task.rstrip("0123456789"), len(data.TASKS[task](N, D).distractors)
    if kind not in ("random", "fixed"):
        return batch

    # the tokens are sorted by a key, those of a pair by the same one: drawn, or pair n after
    # (n + 1/2) G/N distractors
    keys = torch.cat([(torch.arange(N) + 0.5) * G / N, torch.arange(G) + 0.5]).expand(len(index), -1)
    if kind == "random":
        keys = random_bits(~seed, index, N + G)  # ~seed is no seed of sequences
    keys = torch.cat([keys[:, :N].repeat_interleave(2, 1), keys[:, N:]], 1).to(index.device)
    order = keys.argsort(dim=1, stable=True)  # (B, 2N + G)
    queries = torch.arange(2 * N + G, batch.inputs.shape[1], device=index.device)
    order = torch.cat([order, queries.expand(len(index), -1)], 1)  # (B, T)

    # symbols move, the numbers of the positions stay
    sequence = torch.arange(len(index), device=index.device)[:, None]
    inputs = torch.cat([batch.inputs[sequence, order, :K], batch.inputs[:, :, K:]], 2)
    positions = order.argsort(1)[sequence[:, :, None], batch.positions]
    return data.Batch(inputs, batch.targets, positions, batch.symbols[sequence, order])


data.make_batch = make_batch
for kind in ("random", "fixed"):
    for G in DISTRACTORS:
        data.TASKS[f"{kind}{G}"] = functools.partial(places, kind, G)
