"""Tasks whose roles are not those of a chain of pairs, their sequences, and a circuit by hand."""

import json
from unittest import mock

import data
from data import Block, Task, chain

import torch


def table(title, N, *rows):
    """The Task of these roles, each (name, symbol, block, place); symbol -1 is a distractor."""
    symbols = 1 + max(row[1] for row in rows)
    x, distractors, blocks = torch.arange(N * symbols).view(N, symbols), [], []
    for number in range(1 + max(row[2] for row in rows)):
        columns, names = [], []
        for name, symbol, _, _ in sorted((r for r in rows if r[2] == number), key=lambda r: r[3]):
            column = x[:, symbol]
            if symbol < 0:
                column = N * symbols + len(distractors) + torch.arange(N)
                distractors += [f"{name}.{n + 1}" for n in range(N)]
            names.append(name)
            columns.append(column)
        blocks.append(Block(names, torch.stack(columns, 1)))
    return Task(title, N, symbols, blocks, distractors)


def spans(task):
    """Return [(first token, tokens per slot, slots), ...] of the blocks."""
    found, start = [], 0
    for block in task.blocks:
        slots, size = block.symbols.shape
        found.append((start, size, slots))
        start += slots * size
    return found


def place_of(role, task):
    """Return the number of the block of a role, and its place there."""
    for number, block in enumerate(task.blocks):
        if role in block.roles:
            return number, block.roles.index(role)


# the symbols x_0, x_1, x_2 side by side
TRIPLES = table("triples", 2, ("q", 0, 1, 0), ("1a", 0, 0, 0), ("1b", 1, 0, 1), ("1c", 2, 0, 2))
# the pairs (x_0, x_1) and (x_2, x_1): one key stands before its value, the other after it
PAIR = ("1a", 0, 0, 0), ("1b", 1, 0, 1)
MIXED = table("mixed", 2, ("q", 0, 2, 0), *PAIR, ("2a", 1, 1, 1), ("2b", 2, 1, 0))
TASKS = {"chain": chain(2, 2), "triples": TRIPLES, "mixed": MIXED}


def distracted(N, D):
    """A chain of two steps, between whose pairs stands a block of distractors."""
    rows = [("q", 0, 3, 0), ("1a", 0, 2, 0), ("1b", 1, 2, 1), ("2a", 1, 0, 0), ("2b", 2, 0, 1)]
    return table("distracted", N, *rows, ("da", -1, 1, 0), ("db", -1, 1, 1))


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
