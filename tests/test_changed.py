"""Circuits of trained models, changed: none may pass for the model's own."""

import random

from parts import config
from parts.circuit import (
    PatchedModel,
    path_name,
    paths_in,
    paths_of,
    read_report,
    with_path,
    without,
)
from parts.theory import Path, Place, may_attend

import pytest
import torch

import ablate
from data import held_out
from tests.common import HERE


RUNS = ["A", "B", "runs/rope/s4"]
TRIES = 12  # of each model: one without each path, then others; with 100 too none passed


def committed(run):
    """A model on 128 fresh sequences, its circuit, the fill, and the paths that it misses."""
    model, flags = config.load(HERE / "results" / run)
    report, task = read_report(HERE / "results" / run), flags.problem
    circuit = {(row["layer"] - 1, row["head"] - 1): row["mechanism"] for row in report["heads"]}
    for path in paths_in(report, task):
        circuit = with_path(circuit, path)
    free = PatchedModel(model, flags, config.sequences(flags, held_out("certificate", 128)))
    return free, circuit, report["fill"], paths_in(report, task, "uses")


def objections(free, circuit, fill, uses):
    """[text, ...] what is said against a circuit; where it does not suffice, that alone."""
    errors = free.errors(circuit, fill)
    if errors.mean() >= 0.05:
        return ["not sufficient"]
    generator = torch.Generator().manual_seed(0)
    found = ablate.certify(free, (free.errors({}), errors), circuit, uses, fill, generator)
    return ablate.why_not(found, 0.05)


def changed(circuit, task, draw):
    """(what was done, circuit), ...: every path left out; then, in turns, as many random paths in
    the same heads, and one path moved to another head or between other roles. A head that is left
    without a path is uniform."""
    simple = dict.fromkeys(circuit, "uniform")
    paths, allowed = paths_of(circuit), may_attend(task).fill_diagonal_(False).nonzero().tolist()
    for path in paths:
        yield f"without {path_name(path, task)}", without(circuit, path, simple)
    while True:
        ends = draw.sample(allowed, len(paths))
        drawn = [Path(*path[:2], *map(Place, pair)) for path, pair in zip(paths, ends, strict=True)]
        other = circuit | {path[:2]: simple[path[:2]] for path in paths}
        for path in drawn:
            other = with_path(other, path)
        yield "random paths", other
        path = draw.choice(paths)
        head, pair = draw.choice([*circuit]), map(Place, draw.choice(allowed))
        moved = Path(*head, *path[2:]) if draw.random() < 0.5 else Path(*path[:2], *pair)
        if moved not in paths:
            text = f"{path_name(path, task)} moved: {path_name(moved, task)}"
            yield text, with_path(without(circuit, path, simple), moved)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@torch.no_grad()
def test_no_changed_circuit_is_certified(run):
    free, circuit, fill, uses = committed(run)
    assert objections(free, circuit, fill, uses) == []
    tries, passed = changed(circuit, free.task, random.Random(0)), []
    for _, (text, other) in zip(range(TRIES), tries, strict=False):
        if not objections(free, other, fill, uses):
            passed.append(text)
    assert not passed
