"""Circuits of trained models, changed: none may be validated in the place of the model's own."""

import random

import pytest
import torch

import train
from ablate import End, PatchedModel, Path, path_name, paths_in, read_report
from data import held_out
from extras.studies.theory import may_attend
from tests.common import HERE


RUNS = ["A", "B", "C"]
TRIES = 40


def changed(circuit, heads, task, draw):
    """Yield (what was done, paths): each path left out, then, in turns, as many random paths in the
    same heads, and one path moved to another head or between other roles."""
    allowed = may_attend(task).fill_diagonal_(False).nonzero().tolist()
    for path in circuit:
        yield f"without {path_name(path, task)}", circuit - {path}
    while True:
        ends = draw.sample(allowed, len(circuit))
        pairs = zip(sorted(circuit), ends, strict=True)
        yield "random", frozenset(Path(*path[:2], *map(End, pair)) for path, pair in pairs)
        path, head, pair = draw.choice(sorted(circuit)), draw.choice(heads), draw.choice(allowed)
        moved = Path(*head, *path[2:]) if draw.random() < 0.5 else Path(*path[:2], *map(End, pair))
        if moved not in circuit:
            yield f"{path_name(path, task)} moved", circuit - {path} | {moved}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@torch.no_grad()
def test_no_changed_circuit_is_faithful(run):
    model, flags = train.load(HERE / "results" / run)
    task, threshold = flags.problem, 0.05
    circuit = frozenset(paths_in(read_report(HERE / "results" / run), task))
    patched = PatchedModel(model, flags, train.sequences(flags, held_out("validate", 256)))
    assert patched.circuit(circuit).mean(0).max() < threshold
    tries, faithful = changed(circuit, patched.heads, task, random.Random(0)), []
    for _, (text, paths) in zip(range(TRIES), tries, strict=False):
        if patched.circuit(paths).mean(0).max() < threshold:
            faithful.append(text)
    assert not faithful
