"""The search's looks at the free model: paths taken away and values replaced, against loops."""

import itertools
from unittest import mock

from parts import config
from parts.circuit import PatchedModel
from parts.search import attended, attention_knockout, resample_values
from parts.theory import Path, Place

import pytest
import torch

import train
from data import held_out, make_batch, partial_losses
from tests.common import TINY
from tests.planted import CIRCUITS, plant, settings


@pytest.fixture(scope="module")
def free():
    """A transformer with random weights, whose patterns are far from uniform."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, "--D", "2", "--N", "3"])
    torch.manual_seed(0)
    model = config.build(flags).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return PatchedModel(model, flags, config.sequences(flags, held_out("validation", 8)))


def token_of(free, place, b, n):
    token = free.batch.positions[b, n, place.role].item() + place.offset
    return token if 0 <= token < free.task.T else None


def errors_of(free, changed):
    with torch.no_grad():
        said = free.model(free.batch.inputs, changed)
    return partial_losses(said, free.batch.targets, free.flags.K)


def test_paths_are_knocked_out_and_what_is_above_responds(free):
    paths = [
        Path(0, 1, Place(0), Place(2, 1)),
        Path(0, 1, Place(2), Place(1)),
        Path(1, 0, Place(0), Place(4)),
    ]
    changed = {}
    for layer in (0, 1):
        with torch.no_grad():
            seen = free.model(free.batch.inputs, changed, return_patterns=True)[1][layer]
        for path in (path for path in paths if path.layer == layer):
            pattern = changed.setdefault(path[:2], seen[:, path.head].clone())
            for b, n in itertools.product(range(8), range(3)):
                source, target = (token_of(free, end, b, n) for end in path[2:])
                if None not in (source, target):
                    pattern[b, source, target] = 0
    torch.testing.assert_close(attention_knockout(free, paths), errors_of(free, changed))


@pytest.mark.parametrize("others", [False, True])
def test_values_are_replaced_and_attention_is_not(free, others):
    """Every share of attention moves to the same place of another slot, those of targets or all
    others; with others none goes to where a target stands."""
    paths, task = [Path(1, 1, Place(0), Place(2)), Path(1, 1, Place(0), Place(2, 1))], free.task
    given = {}

    def kept(inputs, patterns=None, return_patterns=False):
        given.update(patterns or {})
        return torch.zeros(8, 3, 2 * free.flags.K)

    with mock.patch.object(free, "model", kept):
        resample_values(free, paths, others)
    ((head, after),) = given.items()
    before = free.attention()[head]
    assert head == (1, 1)
    block, place = task.tokens.block, task.tokens.place
    targets = {}
    for b, n in itertools.product(range(8), range(3)):
        own = [token_of(free, path.target, b, n) for path in paths]
        targets[b, token_of(free, Place(0), b, n)] = [token for token in own if token is not None]
    for b, t in itertools.product(range(8), range(task.T)):
        own = targets.get((b, t), [])
        stays = torch.full((task.T,), others is False)
        stays[own] = others
        if (b, t) not in targets:
            stays[:] = True
        arrived = after[b, t] - before[b, t] * stays
        assert (arrived > -1e-6).all()
        for number, where in {*zip(block.tolist(), place.tolist(), strict=True)}:
            alike = (block == number) & (place == where)
            left = (before[b, t] * ~stays)[alike].sum()
            assert arrived[alike].sum() == pytest.approx(left.item(), abs=1e-5)

        # the first target is in the block of pairs, and gets nothing back
        assert not own or arrived[own[0]] < 1e-6


def test_a_relay_is_attended_to_after_it_took_something():
    model, task, paths = plant(2, CIRCUITS[-1][2], layers=4)
    held = PatchedModel(model, settings(2, 4), make_batch(0, torch.arange(32), D=2))
    (alike,) = [own for own in attended(held, Place(0)) if own[0].target == Place(4, 2)]
    assert alike == [paths[-1]]
    model.attend = plant(2, ["4 q 2b+2"], layers=4)[0].attend  # nothing that it could have taken
    held = PatchedModel(model, settings(2, 4), make_batch(0, torch.arange(32), D=2))
    assert not [own for own in attended(held, Place(0)) if own[0].target.offset]
