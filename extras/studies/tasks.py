"""A task of the studies, which extras.studies adds to data.TASKS."""

import functools

import data

import torch


@functools.lru_cache
def shuffled(N, D):
    """The retrieval problem with the pairs of all steps shuffled together: a place says nothing
    about the step."""
    x = torch.arange(N * (D + 1)).view(N, D + 1)
    pairs = torch.stack([x[:, :-1], x[:, 1:]], 2).flatten(0, 1)  # slot n * D + k - 1: step k of n
    roles = []
    for k in range(1, D + 1):
        roles += [f"{k}a", f"{k}b"]
    blocks = [data.Block(roles, pairs, torch.arange(N * D).view(N, D)), data.Block(["q"], x[:, :1])]
    return data.Task(f"shuffled D={D}", N, D + 1, blocks)


data.TASKS["shuffled"] = shuffled
