"""Transformers compiled by Tracr (compiled.py): they solve the problem along the paths that their
programs say, and ablate.find_circuit finds these paths and no others.

    python -m tests.test_compiled    # writes results/figures/compiled.jsonl, for circuits.md
"""

import copy
import functools
import itertools
import time

import pytest


pytest.importorskip("tracr", reason="tests/compiled.py says how to install Tracr")

import torch  # noqa: E402

import ablate  # noqa: E402
import train
from data import held_out, make_batch, partial_losses  # noqa: E402
from tests.common import HERE  # noqa: E402
from tests.compiled import Compiled  # noqa: E402
from tests.planted import settings  # noqa: E402


compiled = functools.cache(Compiled)
CASES = [(1, False), (2, False), (3, False), (4, False), (3, True)]  # D, doubling


def paths_of(D, doubling):
    """The paths of a program: {(layer, head, reader, read)}."""
    paths = {(0, 0, f"{k}b", f"{k}a") for k in range(1, D + 1)} | {(1, 0, "q", "1b")}
    if doubling:  # D = 3
        return paths | {(1, 0, "2b", "3b"), (2, 0, "q", "2b"), (2, 1, "q", "2b")}
    return paths | {(k, 0, "q", f"{k}b") for k in range(2, D + 1)}


def measure(model, heads=None):
    """The loss of each symbol (D,) on 64 held-out sequences, the patterns, and the Batch."""
    batch = make_batch(0, held_out("search", 64), model.task.N, model.task.symbols - 1)
    with torch.no_grad():
        predictions, patterns = model(batch.inputs, heads=heads, return_patterns=True)
    return partial_losses(predictions, batch.targets, model.K).mean(0), patterns, batch


@pytest.mark.parametrize("case", CASES)
def test_solves_the_problem_along_its_paths(case):
    model = compiled(*case)
    loss, patterns, batch = measure(model)
    assert loss.max() < 0.01
    assert not any(pattern.triu(1).any() for pattern in patterns)
    sequence, names = torch.arange(64)[:, None], model.task.names
    for layer, head, reader, read in paths_of(*case):
        rows, columns = (batch.positions[:, :, names.index(role)] for role in (reader, read))
        assert patterns[layer][sequence, head, rows, columns].min() > 0.99

    # without attention in a head that has paths, and in no other, a symbol is lost
    for head in itertools.product(range(model.layers), range(model.heads)):
        lost = measure(model, {head: lambda pattern, values: 0 * pattern @ values})[0]
        assert (lost.max() > 0.5) == (head in {path[:2] for path in paths_of(*case)})


def test_doubling_solves_seven_steps_in_four_layers():
    model = compiled(7, True)
    assert model.layers == 4 and measure(model)[0].max() < 0.01


# with noise of size 0.2 the loss of the model itself is 0.12
NOISY = [(case, noise) for case in ((3, False), (3, True)) for noise in (0.02, 0.05, 0.1)]
SEARCHES = [(case, 0) for case in CASES] + NOISY
SLOW = [pytest.param(*search, marks=pytest.mark.slow) for search in SEARCHES[2:]]


def search(case, noise):
    """The compiled model, the report on it with Gaussian noise, in units of the standard deviation
    of each weight matrix, and the paths that were found."""
    model, generator = copy.deepcopy(compiled(*case)), torch.Generator().manual_seed(0)
    for weights in model.parameters():
        weights.data += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    report = ablate.find_circuit(model, settings(case[0], model.layers, model.heads))
    names = "layer", "head", "reader", "read"
    return model, report, {tuple(row[name] for name in names) for row in report["paths"]}


@pytest.mark.parametrize("case, noise", [*SEARCHES[:2], *SLOW])
def test_find_circuit_finds_the_compiled_paths(case, noise):
    _, report, paths = search(case, noise)
    assert report["validated"], report["verdict"]
    assert paths == paths_of(*case)


def main():
    """Write precision, recall and seconds of the search in every case, and in noise."""
    rows = []
    for case, noise in [*SEARCHES, ((3, False), 0.2), ((3, True), 0.2)]:
        began, truth = time.time(), paths_of(*case)
        model, report, paths = search(case, noise)
        row = dict(program=f"{'doubling' if case[1] else 'chain'}, D={case[0]}", noise=noise)
        row |= dict(shape=f"{model.layers} x {model.heads}", paths=len(truth))
        row |= dict(precision=len(paths & truth) / max(1, len(paths)))
        row |= dict(recall=len(paths & truth) / len(truth))
        row |= dict(validated=report["validated"], seconds=round(time.time() - began))
        rows.append(row)
    train.write_rows(HERE / "results/figures/compiled.jsonl", rows)


if __name__ == "__main__":
    main()
