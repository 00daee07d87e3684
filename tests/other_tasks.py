"""Tasks whose roles are not those of a chain of pairs, with sequences made token by token."""

import itertools
import json

import torch

from data import Batch, Role, Task, chain


TRIPLES = Task(  # x_0, x_1, x_2 side by side
    title="triples",
    N=2,
    roles=(
        Role("q", symbol=0, block=1, place=0),
        Role("1a", symbol=0, block=0, place=0),
        Role("1b", symbol=1, block=0, place=1),
        Role("1c", symbol=2, block=0, place=2),
    ),
)
MIXED = Task(  # pairs (x_0, x_1) and (x_2, x_1): one key before its value, one behind
    title="mixed",
    N=2,
    roles=(
        Role("q", symbol=0, block=2, place=0),
        Role("1a", symbol=0, block=0, place=0),
        Role("1b", symbol=1, block=0, place=1),
        Role("2a", symbol=1, block=1, place=1),
        Role("2b", symbol=2, block=1, place=0),
    ),
)
TASKS = {"chain": chain(2, 2), "triples": TRIPLES, "mixed": MIXED}


def sequences_of(task, B, K=4):
    """A Batch of the task, made token by token. Its queries are asked for nothing."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.rand(B, task.N, len(task.blocks), generator=generator).argsort(1)
    symbols = torch.randn(B, task.N, task.symbols, K, generator=generator)
    inputs = torch.zeros(B, task.T, K)
    positions = torch.zeros(B, task.N, len(task.roles), dtype=torch.long)
    for b, n, (number, role) in itertools.product(range(B), range(task.N), enumerate(task.roles)):
        sizes = [
            1 + max(r.place for r in task.roles if r.block == k) for k in range(role.block + 1)
        ]
        token = task.N * sum(sizes[:-1]) + slots[b, n, role.block].item() * sizes[-1] + role.place
        positions[b, n, number] = token
        inputs[b, token] = symbols[b, n, role.symbol]
    return Batch(inputs, torch.zeros(B, task.N, 2 * K), positions)


def write_circuit(run, *paths):
    """circuit.json with these paths, certified: layer, head, source, target, attention."""
    names, cost = ["carried", "others", "more", "alone", "everywhere"], dict(mse=0.5, low=0.4)
    costs = dict.fromkeys(names, cost | dict(high=0.6, partial=[0.5]))
    rows, heads = [], [dict(layer=2, head=2, mechanism="uniform")]
    for layer, head, source, target, attention in paths:
        row = dict(layer=layer, head=head, source=source, target=target, attention=attention)
        rows.append(row | costs | dict(destroys=["x_1"]))
        heads.append(dict(layer=layer, head=head, mechanism="paths"))
    report = dict(certified=True, verdict="certified", sequences=4096, fill="zero", literal=True)
    report["sufficient"] = costs["more"]
    (run / "circuit.json").write_text(json.dumps(report | dict(heads=heads, paths=rows, uses=[])))
