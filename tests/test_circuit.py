"""Places, paths, flow, attention read and written: against loops and hand-made attention."""

import itertools
import json

from parts import circuit
from parts.circuit import PatchedModel, one_hot, paths_in, places_attended, read_path
from parts.theory import Path, Place

import pytest
import torch

from data import chain, conditional, make_batch, partial_losses
from studies.order import to_the_token_before
from tests.other_tasks import MIXED, TRIPLES
from tests.planted import CIRCUITS, find_positions, paths_from, plant, settings


TASKS = [chain(4, 3), TRIPLES, MIXED, conditional(3)]
IDS = ["chain", "triples", "mixed", "conditional"]
each_task = pytest.mark.parametrize("task", TASKS, ids=IDS)


def random_positions(task, B):
    """(B, N, roles) the tokens of every role."""
    if task.crossed:
        return make_batch(0, torch.arange(B), task.N, task="conditional").positions
    generator = torch.Generator().manual_seed(0)
    return task.positions(torch.rand(B, task.N, len(task.blocks), generator=generator).argsort(1))


def random_patterns(B, T, seed=0):
    pattern = torch.rand(B, T, T, generator=torch.Generator().manual_seed(seed)).tril()
    return pattern / pattern.sum(-1, keepdim=True)


def places(task, reach=2):
    for role, behind in itertools.product(range(len(task.roles)), range(-reach, reach + 1)):
        yield Place(role, behind)


def token_of(place, tokens, T):
    """The token of a place in a list of the roles' tokens, None if there is none."""
    token = tokens[place.role] + place.offset
    return token if 0 <= token < T else None


# ---- places and paths


@each_task
def test_attention_along_a_path_is_that_between_its_tokens(task):
    positions, pattern = random_positions(task, 4), random_patterns(4, task.T)
    for source, target in itertools.islice(
        itertools.product(places(task), places(task)), 0, 999, 7
    ):
        read = read_path(pattern, Path(0, 0, source, target), task, positions)
        for b, n in itertools.product(range(4), range(task.N)):
            ends = [token_of(end, positions[b, n].tolist(), task.T) for end in (source, target)]
            assert read[b, n] == (0 if None in ends else pattern[b, ends[0], ends[1]])


@each_task
def test_written_attention_is_shared_among_the_targets_that_are_there(task):
    positions, T = random_positions(task, 4), task.T
    ends = [
        (Place(0), Place(1)),
        (Place(0), Place(2, 1)),
        (Place(2), Place(1)),
        (Place(1, 1), Place(2, -1)),
    ]
    written = one_hot([Path(0, 0, *pair) for pair in ends], task, positions)
    for b in range(4):
        targets = {}
        for n, pair in itertools.product(range(task.N), ends):
            source, target = (token_of(end, positions[b, n].tolist(), T) for end in pair)
            if None not in (source, target):
                targets.setdefault(source, set()).add(target)
        expected = torch.zeros(T, T)
        for source, own in targets.items():
            expected[source, [*own]] = 1 / len(own)
        torch.testing.assert_close(written[b], expected)


def test_heads_are_held_to_their_own_paths():
    batch, task = make_batch(0, torch.arange(8)), chain(4, 3)
    paths = paths_from(task, "1 1b 1a", "1 1b 2b", "3.2 q 1b+1")
    held = circuit.frozen_patterns(paths, task, batch.positions)
    assert held.keys() == {(0, 0), (2, 1)}
    assert torch.equal(held[0, 0], one_hot(paths[:2], task, batch.positions))
    assert torch.equal(held[2, 1], one_hot(paths[2:], task, batch.positions))


@each_task
def test_paths_are_read_as_they_were_written(task):
    for source, target in itertools.product(places(task), places(task)):
        path = Path(3, 1, source, target)
        assert (
            circuit.path_from(json.loads(json.dumps(circuit.fields_of(path, task))), task) == path
        )
    path = Path(3, 1, Place(0), Place(2, 1))
    assert circuit.path_name(path, task) == f"layer 4 head 2, q -> {task.names[2]}+1"


@each_task
def test_the_token_before_is_so_in_every_sequence(task):
    positions = random_positions(task, 50)
    for source, target in itertools.product(places(task), places(task)):
        path = Path(0, 0, source, target)
        apart = (
            positions[..., source.role]
            + source.offset
            - positions[..., target.role]
            - target.offset
        )
        assert to_the_token_before(path, task) == (apart == 1).all().item(), path


def test_positions_are_found_by_symbols_alone():
    for task, more in (chain(4, 3), {}), (conditional(4), dict(task="conditional")):
        batch = make_batch(0, torch.arange(20), **more)
        found = find_positions(batch.inputs, task, 4)
        order = batch.positions[:, :, 0].argsort(1)[..., None].expand_as(found)
        assert torch.equal(found, batch.positions.gather(1, order))


def test_a_report_is_read_as_paths(tmp_path):
    task, file = chain(4, 3), tmp_path / "circuit.json"
    assert circuit.read_report(tmp_path) == {} and paths_in({}, task) == {}
    row = dict(layer=1, head=2, source="3b+1", target="3b", attention=0.9)
    report = dict(verdict="certified", certified=True, paths=[row], uses=[row | dict(source="q")])
    file.write_text(json.dumps(report))
    read = circuit.read_report(tmp_path)
    assert paths_in(read, task) == {Path(0, 1, Place(6, 1), Place(6)): row}
    assert [*paths_in(read, task, "uses")] == [Path(0, 1, Place(0), Place(6))]


# ---- flow


def flow_by_sets(paths, task, tokens, layers):
    """What the query of each chain holds of its own chain in the end: tokens of one sequence."""
    holds = {
        (n, token): {(n, task.roles[role].symbol)}
        for n in range(task.N)
        for role, token in enumerate(tokens[n])
    }
    known = [set() for _ in range(task.T)]
    for (_, token), own in holds.items():
        known[token] |= own
    for layer in range(layers):
        before = [set(own) for own in known]
        for n, path in itertools.product(range(task.N), paths):
            ends = [token_of(end, tokens[n], task.T) for end in path[2:]]
            if path.layer == layer and None not in ends:
                known[ends[0]] |= before[ends[1]]
    return [{k for m, k in known[tokens[n][0]] if m == n} for n in range(task.N)]


@pytest.mark.parametrize("D, heads, texts", CIRCUITS)
def test_the_flow_against_sets(D, heads, texts):
    task, positions = chain(4, D), random_positions(chain(4, D), 6)
    for left_out in [None, *texts]:
        paths = paths_from(task, *(text for text in texts if text != left_out))
        held = [own for one in positions.tolist() for own in flow_by_sets(paths, task, one, 5)]
        expected = [all(k in own for own in held) for k in range(1, D + 1)]
        assert circuit.flow(paths, task, positions).tolist() == expected
        assert left_out or all(expected)


# ---- attention read: which places get more than their like


@pytest.mark.parametrize("task", TASKS[:3], ids=IDS[:3])
def test_places_attended_against_loops(task):
    positions, pattern, B = random_positions(task, 6), random_patterns(6, task.T), 6
    for source in Place(0), Place(2), Place(1, 1):
        found = places_attended(pattern, task, positions, source)
        assert source not in found
        for place in (place for place in places(task) if place in found):
            own, others = [], []
            for b, n, m in itertools.product(range(B), range(task.N), range(task.N)):
                row = token_of(source, positions[b, n].tolist(), task.T)
                column = token_of(place, positions[b, m].tolist(), task.T)
                given = 0.0 if None in (row, column) else pattern[b, row, column].item()
                (own if n == m else others).append(given)
            expected = sum(own) / len(own) - sum(others) / len(others)
            assert abs(found[place] - expected) < 1e-5, place


def test_the_mean_pattern_has_no_token_beside_in_the_slot():
    task, pattern = chain(4, 2), random_patterns(30, 20)
    mean = circuit.mean_pattern(pattern, task)
    expected = pattern.mean(0)
    for first in range(0, 16, 2):
        expected[first, first + 1] = expected[first + 1, first] = 0
    torch.testing.assert_close(mean, expected / expected.sum(-1, keepdim=True))


# ---- a model held


def test_a_model_is_held_to_what_a_circuit_says():
    model, task, paths = plant(2, CIRCUITS[1][2], layers=4)
    flags, batch = settings(2, 4), make_batch(0, torch.arange(8), D=2)
    held = PatchedModel(model, flags, batch)
    mean = circuit.mean_pattern(held.attention()[3, 0], task)
    own = {(0, 0): tuple(paths[:2]), (1, 0): "uniform", (2, 0): "identity", (3, 0): "position"}
    for fill, rest in ("zero", torch.zeros(20, 20)), ("identity", torch.eye(20)):
        pattern = torch.stack([rest] * 8)
        for b, n in itertools.product(range(8), range(4)):
            _, a1, b1, a2, b2 = batch.positions[b, n].tolist()
            pattern[b, b1], pattern[b, b2] = torch.eye(20)[a1], torch.eye(20)[a2]
        uniform = torch.ones(20, 20).tril() / torch.arange(1, 21)[:, None]
        given = {(0, 0): pattern, (1, 0): uniform, (2, 0): torch.eye(20), (3, 0): mean}
        expected = partial_losses(model(batch.inputs, given), batch.targets, 4)
        torch.testing.assert_close(held.errors(own, fill), expected)

        # held to the same, but for the tokens with a path
        given[0, 0] = held.attention()[0, 0].clone()
        for b, t in itertools.product(range(8), range(20)):
            if t not in batch.positions[b][:, [2, 4]]:
                given[0, 0][b, t] = rest[t]
        expected = partial_losses(model(batch.inputs, given), batch.targets, 4)
        torch.testing.assert_close(held.errors_of_rest(own, fill), expected)


def test_a_path_is_taken_from_its_head():
    task = chain(4, 1)
    first, second = paths_from(task, "1 1b 1a", "1 q 1b")
    whole, otherwise = {(0, 0): (first, second), (1, 0): "zero"}, {(0, 0): "uniform"}
    left = circuit.without(whole, first, otherwise)
    assert left == {(0, 0): (second,), (1, 0): "zero"}
    assert circuit.without(left, second, otherwise) == {(0, 0): "uniform", (1, 0): "zero"}
    assert circuit.paths_of(whole) == [second, first]
