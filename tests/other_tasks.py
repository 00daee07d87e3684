"""Tasks whose roles are not those of a chain of pairs, their sequences, and a circuit by hand."""

import json
from unittest import mock

import data
from data import Block, Task, chain

import torch


def spans(task):
    """Return [(first token, tokens per slot, slots), ...] of the blocks."""
    found, start = [], 0
    for block in task.blocks:
        slots, size = block.symbols.shape
        found.append((start, size, slots))
        start += slots * size
    return found


x = torch.arange(6).view(2, 3)  # x_0, x_1, x_2 of two chains
QUERIES = Block(["q"], x[:, :1])
TRIPLES = Task("triples", 2, 3, [Block(["1a", "1b", "1c"], x), QUERIES])
# the pairs (x_0, x_1) and (x_2, x_1): one key stands before its value, the other after it
PAIRS = Block(["1a", "1b"], x[:, :2]), Block(["2b", "2a"], x[:, [2, 1]])
MIXED = Task("mixed", 2, 3, [*PAIRS, QUERIES])
TASKS = {"chain": chain(2, 2), "triples": TRIPLES, "mixed": MIXED}


def distracted(N, D):
    """A chain of two steps, between whose pairs stands a block of distractors."""
    steps, names = chain(N, 2).blocks, [f"D{n}" for n in range(2 * N)]
    between = Block(["da", "db"], 3 * N + torch.arange(2 * N).view(N, 2))
    return Task("distracted", N, 3, [steps[0], between, *steps[1:]], names)


def sequences_of(task, B):
    """The Batch of B sequences of the task, without numbers of positions."""
    with mock.patch.dict(data.TASKS, mine=lambda N, D: task):
        return data.make_batch(0, torch.arange(B), task.N, rotary="qk", task="mine")


def write_circuit(run, *paths):
    """Write circuit.json with these paths, validated: layer, head, reader, read, attention."""
    symbols, rows = ("x_1", "x_2", "x_3"), []
    losses, rises = dict.fromkeys(symbols, [0.01, 0.005, 0.02]), dict.fromkeys(symbols, [0.5] * 3)
    for *path, attention in paths:
        row = dict(zip(("layer", "head", "reader", "read"), path, strict=True))
        rows.append(row | dict(attention=attention, spare=False, cost=rises, without=rises))
    report = dict(validated=True, verdict="validated under both ablations", sequences=1024)
    report |= dict(threshold=0.05, path_sequences=256, paths=rows, attended=[], lost={})
    report |= {"full_model": losses, "mean": losses, "another sequence": losses}
    (run / "circuit.json").write_text(json.dumps(report))
