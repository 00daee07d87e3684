"""Tasks whose roles are not those of a chain of pairs, and their sequences."""

from unittest import mock

import data
from extras.studies.tables import Block, Task

import torch


x = torch.arange(6).view(2, 3)  # x_0, x_1, x_2 of two chains
QUERIES = Block(["q"], x[:, :1])
TRIPLES = Task("triples", 2, 3, [Block(["1a", "1b", "1c"], x), QUERIES])
# the pairs (x_0, x_1) and (x_2, x_1): one key stands before its value, the other after it
PAIRS = Block(["1a", "1b"], x[:, :2]), Block(["2b", "2a"], x[:, [2, 1]])
MIXED = Task("mixed", 2, 3, [*PAIRS, QUERIES])


def distracted(N, D):
    """A chain of two steps, between whose pairs stands a block of distractors."""
    x, y = torch.arange(3 * N).view(N, 3), 3 * N + torch.arange(2 * N).view(N, 2)
    blocks = [Block(["2a", "2b"], x[:, 1:]), Block(["da", "db"], y)]
    blocks += [Block(["1a", "1b"], x[:, :2]), Block(["q"], x[:, :1])]
    return Task("distracted", N, 3, blocks, [f"D{n}" for n in range(2 * N)])


def sequences_of(task, B):
    """The Batch of B sequences of the task, without numbers of positions."""
    with mock.patch.dict(data.TASKS, mine=lambda N, D: task):
        return data.make_batch(0, torch.arange(B), task.N, rotary="qk", task="mine")
