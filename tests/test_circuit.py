"""Paths, attention read and written along them, and mean ablation: against loops."""

import itertools
import json

import pytest
import torch

import ablate
import train
from ablate import End, PatchedModel, Path, attention_on, mask_of
from data import chain, conditional, held_out, make_batch, partial_losses
from extras.studies import theory
from tests.common import TINY
from tests.other_tasks import MIXED, TRIPLES, sequences_of
from tests.planted import find_positions


TASKS = [chain(4, 3), TRIPLES, MIXED, conditional(3)]
each_task = pytest.mark.parametrize("task", TASKS, ids=["chain", "triples", "mixed", "conditional"])


def positions_of(task, B):
    """The tokens of every role in B sequences, (B, N, roles)."""
    if task.crossed:
        return make_batch(0, torch.arange(B), task.N, task="conditional").positions
    return sequences_of(task, B).positions


def places(task):
    for role, offset in itertools.product(range(len(task.roles)), range(-2, 3)):
        yield End(role, offset)


def token_of(place, positions, b, n, T):
    """The token of a place in sequence b and chain n, or None if there is none."""
    token = positions[b, n, place.role].item() + place.offset
    return token if 0 <= token < T else None


# ---- paths


@each_task
def test_attention_on_a_path_is_that_between_its_tokens(task):
    positions, pattern = positions_of(task, 4), torch.rand(4, task.T, task.T)
    pairs = itertools.islice(itertools.product(places(task), places(task)), 0, 999, 7)
    for source, target in pairs:
        given = attention_on(pattern, Path(0, 0, source, target), task, positions)
        for b, n in itertools.product(range(4), range(task.N)):
            ends = [token_of(place, positions, b, n, task.T) for place in (source, target)]
            assert given[b, n] == (0 if None in ends else pattern[b, ends[0], ends[1]])


@each_task
def test_hard_attention_is_shared_among_the_targets_that_exist(task):
    positions, T = positions_of(task, 4), task.T
    ends = [
        (End(0), End(1)),
        (End(0), End(2, 1)),
        (End(2), End(1)),
        (End(1, 1), End(2, -1)),
    ]
    paths = [Path(0, 0, *pair) for pair in ends]
    mask = mask_of(paths, task, positions)
    written = theory.frozen_heads(paths, task, positions)[0, 0](None, torch.eye(T).expand(4, T, T))
    for b in range(4):
        expected = torch.zeros(T, T)
        for n, pair in itertools.product(range(task.N), ends):
            source, target = (token_of(place, positions, b, n, T) for place in pair)
            if None not in (source, target):
                expected[source, target] = 1
        assert torch.equal(mask[b].float(), expected)
        shared = expected / expected.sum(-1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(written[b], shared)


@each_task
def test_paths_are_read_as_they_were_written(task):
    for source, target in itertools.product(places(task), places(task)):
        path = Path(3, 1, source, target)
        row = json.loads(json.dumps(ablate.to_row(path, task)))
        assert ablate.path_from(row, task) == path
    name = ablate.path_name(Path(3, 1, End(0), End(2, 1)), task)
    assert name == f"L3H1: q -> {task.names[2]}+1"


def test_positions_are_found_by_symbols_alone():
    for task, more in (chain(4, 3), {}), (conditional(4), dict(task="conditional")):
        batch = make_batch(0, torch.arange(20), **more)
        positions = find_positions(batch.inputs, task, 4)
        order = batch.positions[:, :, 0].argsort(1)[..., None].expand_as(positions)
        assert torch.equal(positions, batch.positions.gather(1, order))


# ---- mean ablation, against a loop over sequences, tokens and targets


@pytest.fixture(scope="module")
def patched():
    """A transformer with random weights, whose attention is far from uniform, on 6 sequences."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, "--D", "2", "--N", "3"])
    torch.manual_seed(0)
    model = train.build(flags).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return PatchedModel(model, flags, train.sequences(flags, held_out("validation", 6)))


def reads(patched, head, paths, kept):
    """What a head reads in the full model, (B, T, size), split by a loop: along the paths, and of
    the token itself, if kept; or all the rest."""
    (pattern, values), positions, T = patched.reads[head], patched.batch.positions, patched.task.T
    total = torch.zeros_like(values)
    for b in range(len(values)):
        named = {(t, t) for t in range(T)}
        for path, n in itertools.product(paths, range(patched.task.N)):
            named.add(tuple(token_of(place, positions, b, n, T) for place in path[2:]))
        for t, s in itertools.product(range(T), range(T)):
            if ((t, s) in named) == kept:
                total[b, t] += pattern[b, t, s] * values[b, s]
    return total


def losses(patched, heads):
    with torch.no_grad():
        predictions = patched.model(patched.batch.inputs, heads)
    return partial_losses(predictions, patched.batch.targets, patched.flags.K)


PATHS = [
    Path(0, 1, End(0), End(2, 1)),
    Path(0, 1, End(2), End(1)),
    Path(1, 0, End(0), End(4)),
]


def test_a_circuit_keeps_its_paths_and_the_token_itself(patched):
    """In layer 0 attention is that of the full model; above, the function gets what is computed."""
    reference, heads = patched.reference, {}
    for head in patched.heads:
        paths = [path for path in PATHS if path[:2] == head]
        mean = reads(reference, head, paths, kept=False).mean(0)
        if head[0] == 0:
            written = reads(patched, head, paths, kept=True) + mean
            heads[head] = lambda _, values, written=written: written
        else:
            kept = mask_of(paths, patched.task, patched.batch.positions)
            kept |= torch.eye(patched.task.T, dtype=torch.bool)
            heads[head] = lambda p, v, kept=kept, mean=mean: (p * kept) @ v + mean
    torch.testing.assert_close(patched.circuit(PATHS), losses(patched, heads))


def test_a_path_is_knocked_out_and_the_layers_above_respond(patched):
    task, seen = patched.task, patched.reads
    removed = mask_of(PATHS[:2], task, patched.batch.positions)
    there = mask_of(PATHS[:2], task, patched.reference.batch.positions)
    pattern, values = patched.reference.reads[0, 1]
    mean = ((pattern * there) @ values).mean(0)
    heads = {(0, 1): lambda p, v: (p * ~removed) @ v + mean}
    expected = losses(patched, heads)
    torch.testing.assert_close(patched.knock_out(PATHS[:2]), expected)

    # frozen: all attention, that of the layer above too, is that of the full model
    for head in patched.heads:
        write = heads.get(head, torch.matmul)
        heads[head] = lambda _, v, write=write, p=seen[head][0]: write(p, v)
    frozen = patched.knock_out(PATHS[:2], frozen=True)
    torch.testing.assert_close(frozen, losses(patched, heads))
    assert not torch.allclose(frozen, expected)
