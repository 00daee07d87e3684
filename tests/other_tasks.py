"""Tasks whose roles are not those of a chain of pairs, with sequences made token by token."""

import itertools
import json

import torch

from data import Batch, Role, Task, chain


def table(title, N, *rows):
    """The Task of these roles, each (name, symbol, block, place)."""
    return Task(title, N, tuple(Role(*row) for row in rows))


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


def sequences_of(task, B, K=4):
    """A Batch of the task, made token by token, with zeros as its targets."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.rand(B, task.N, len(task.blocks), generator=generator).argsort(1)
    symbols = torch.randn(B, task.N, task.symbols, K, generator=generator)
    inputs = torch.zeros(B, task.T, K)
    positions = torch.zeros(B, task.N, len(task.roles), dtype=torch.long)
    sizes = [[role.block for role in task.roles].count(k) for k in range(len(task.blocks))]
    for b, n, (number, role) in itertools.product(range(B), range(task.N), enumerate(task.roles)):
        start, slot = task.N * sum(sizes[: role.block]), slots[b, n, role.block].item()
        token = start + slot * sizes[role.block] + role.place
        positions[b, n, number] = token
        inputs[b, token] = symbols[b, n, role.symbol]
    return Batch(inputs, torch.zeros(B, task.N, 2 * K), positions)


def write_circuit(run, *paths):
    """Write circuit.json with these paths, validated: layer, head, reader, read, attention."""
    symbols, rows = ("x_1", "x_2", "x_3"), []
    losses, rises = dict.fromkeys(symbols, [0.01, 0.005, 0.02]), dict.fromkeys(symbols, [0.5] * 3)
    for *path, attention in paths:
        row = dict(zip(("layer", "head", "reader", "read"), path, strict=True))
        rows.append(row | dict(attention=attention, necessary=rises, minimal=rises))
    report = dict(validated=True, verdict="validated, complete", threshold=0.05, sequences=1024)
    report |= dict(attention_sequences=256, paths=rows, candidates=rows, lost=dict(faithful=0.0))
    report |= dict(full_model=losses, faithful=losses, resampled=losses)
    (run / "circuit.json").write_text(json.dumps(report))
