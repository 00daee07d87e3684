"""Transformers compiled by Tracr (compiled.py): they solve the problem along the paths of their
programs, and ablate.find_circuit finds these paths and no others.

    python -m tests.test_compiled    # writes results/figures/compiled.jsonl, for circuits.md
"""

import copy
import functools
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


def measure(model, heads=None):
    """The loss of each symbol (D,) on 64 held-out sequences, the patterns, and the Batch."""
    batch = make_batch(0, held_out("search", 64), model.task.N, model.task.symbols - 1)
    with torch.no_grad():
        predictions, patterns = model(batch.inputs, heads=heads, return_patterns=True)
    return partial_losses(predictions, batch.targets, model.K).mean(0), patterns, batch


@pytest.mark.parametrize("D, doubling", CASES)
def test_the_circuit_is_what_the_program_says_in_words(D, doubling):
    paths = {(0, 0, f"{k}b", f"{k}a") for k in range(1, D + 1)} | {(1, 0, "q", "1b")}
    if doubling:
        paths |= {(1, 0, "2b", "3b"), (2, 0, "q", "2b"), (2, 1, "q", "2b")}
    else:
        paths |= {(k, 0, "q", f"{k}b") for k in range(2, D + 1)}
    assert compiled(D, doubling).paths == paths


@pytest.mark.parametrize("case", [*CASES, (7, True)])
def test_solves_the_problem_along_its_paths(case):
    model = compiled(*case)
    loss, patterns, batch = measure(model)
    assert loss.max() < 0.01
    assert not any(pattern.triu(1).any() for pattern in patterns)
    sequence, names = torch.arange(64)[:, None], model.task.names
    for layer, head, source, target in model.paths:
        rows, columns = (batch.positions[:, :, names.index(role)] for role in (source, target))
        assert patterns[layer][sequence, head, rows, columns].min() > 0.99


@pytest.mark.parametrize("case", CASES)
def test_heads_write_what_a_function_says(case):
    model = compiled(*case)
    heads = [(layer, head) for layer in range(model.layers) for head in range(model.heads)]
    loss, patterns, _ = measure(model)
    same = measure(model, dict.fromkeys(heads, lambda pattern, values: pattern @ values))
    assert torch.equal(same[0], loss)
    assert all(map(torch.equal, same[1], patterns))

    # without attention in a head that has paths a symbol is lost
    for head in heads:
        lost = measure(model, {head: lambda pattern, values: 0 * pattern @ values})[0]
        assert (lost.max() > 0.5) == (head in {path[:2] for path in model.paths})

    # later layers compute their attention anew: where no pair is known, queries find no b token
    _, patterns, _ = measure(model, {(0, 0): lambda pattern, values: torch.zeros_like(values)})
    assert patterns[1][:, 0].max() < 0.01


# with noise of size 0.2 the loss of the model itself is 0.12
NOISES = 0.02, 0.05, 0.1


def noisy(model, noise):
    """The model with Gaussian noise, in units of the standard deviation of each weight matrix."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for weights in model.parameters():
        weights.data += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    return model


def search(model):
    """The report on a model, and its paths."""
    report = ablate.find_circuit(model, settings(model.task.symbols - 1, model.layers, model.heads))
    names = "layer", "head", "reader", "read"
    return report, {tuple(row[name] for name in names) for row in report["paths"]}


NOISY = [(case, noise) for case in ((3, False), (3, True)) for noise in NOISES]
SEARCHES = [(case, 0) for case in CASES] + NOISY
SLOW = [pytest.param(*search, marks=pytest.mark.slow) for search in SEARCHES[2:]]


@pytest.mark.parametrize("case, noise", [*SEARCHES[:2], *SLOW])
def test_find_circuit_finds_the_compiled_paths(case, noise):
    report, paths = search(noisy(compiled(*case), noise))
    assert report["validated"], report["verdict"]
    assert paths == compiled(*case).paths


def main():
    """Write precision, recall and seconds of the search in every case, and in noise."""
    rows, most = [], [(case, 0.2) for case in ((3, False), (3, True))]
    for (D, doubling), noise in SEARCHES + most:
        model, began = compiled(D, doubling), time.time()
        report, paths = search(noisy(model, noise))
        row = dict(program=f"{'doubling' if doubling else 'chain'}, D={D}", noise=noise)
        row |= dict(shape=f"{model.layers} x {model.heads}", paths=len(model.paths))
        row |= dict(precision=len(paths & model.paths) / max(1, len(paths)))
        row |= dict(recall=len(paths & model.paths) / len(model.paths))
        row |= dict(validated=report["validated"], seconds=round(time.time() - began))
        rows.append(row)
    train.write_rows(HERE / "results/figures/compiled.jsonl", rows)


if __name__ == "__main__":
    main()
