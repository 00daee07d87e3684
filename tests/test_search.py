"""The search: along which paths a model attends, against loops; what is dropped, against all
subsets."""

import itertools

import pytest
import torch

from ablate import End, PatchedModel, Path, attended, preference, prune, reached
from data import chain, make_batch
from tests.planted import CIRCUITS, paths_from, plant, settings


def test_preference_against_loops():
    task, positions = chain(4, 2), make_batch(0, torch.arange(6), D=2).positions
    patterns = torch.rand(2, 6, task.T, task.T)
    for source, target in itertools.product((End(0), End(2), End(1, 1)), repeat=2):
        surplus = preference(patterns, source, target, task, positions)
        for head, b in itertools.product(range(2), range(6)):
            own, others = [], []
            for n, m in itertools.product(range(4), range(4)):
                row = positions[b, n, source.role].item() + source.offset
                column = positions[b, m, target.role].item() + target.offset
                exists = max(row, column) < task.T
                given = patterns[head, b, row, column].item() if exists else 0.0
                (own if n == m else others).append(given)
            expected = sum(own) / len(own) - sum(others) / len(others)
            assert surplus[head, b].item() == pytest.approx(expected, abs=1e-5)


def test_an_intermediate_token_is_read_after_it_has_read_something():
    model, task, paths = plant(2, CIRCUITS[-1][2], layers=4)
    batch = make_batch(0, torch.arange(32), D=2)
    assert {*paths} <= {*attended(PatchedModel(model, settings(2, 4), batch))}
    model.attend = plant(2, ["3 q 2b+2"], layers=4)[0].attend  # nothing that it could have read
    assert not attended(PatchedModel(model, settings(2, 4), batch))


def test_a_set_is_left_from_which_nothing_can_be_dropped():
    """Of 6 paths, each with its loss if it is missing, and one pair that can replace each other."""
    paths = [Path(layer, 0, End(0), End(1)) for layer in range(6)]
    costs = {path: torch.tensor([0.01 * number]) for number, path in enumerate(paths)}
    tried = []

    def faithful(kept):
        tried.append(kept)
        missing = {path.layer for path in paths if path not in kept}
        return 4 not in missing and not {2, 3} <= missing

    kept = prune(costs, frozenset(), faithful)
    assert {path.layer for path in kept} == {3, 4}
    assert faithful(kept) and not any(faithful(kept - {path}) for path in kept)
    assert {path.layer for path in prune(costs, {paths[0]}, faithful)} == {0, 3, 4}
    assert len(tried) < 2**6 / 2


@pytest.mark.parametrize("D, heads, texts", CIRCUITS)
def test_every_symbol_is_reached_along_the_whole_circuit(D, heads, texts):
    """And without one path the symbols that a planted model then cannot predict are missing."""
    layers = 1 + max(int(text[0]) for text in texts)
    batch = make_batch(0, torch.arange(16), D=D)
    assert {*range(1, D + 1)} <= reached(paths_from(chain(4, D), *texts), chain(4, D))
    for text in texts:
        others = [other for other in texts if other != text]
        model, task, paths = plant(D, others, layers, heads)
        error = (
            (model(batch.inputs) - batch.targets).square().unflatten(-1, (D, -1)).mean((0, 1, 3))
        )
        predicted = {k for k in range(1, D + 1) if error[k - 1] < 0.1}
        assert predicted <= reached(paths, task)
