"""Targets, patterns written and read, mean attention: against loops and hand-made attention."""

import itertools
import json

from parts import circuit
from parts.circuit import Path, hold, mean_attention, read_paths, write_pattern

import pytest
import torch

from data import Role, Task, chain, conditional, make_batch
from tests.planted import find_positions


TRIPLES = (
    Task(  # groups of three tokens, which follow each other at once; the query has two symbols
        3,
        (
            Role("q", symbol=0, block=1, place=0),
            Role("1a", symbol=0, block=0, place=0),
            Role("1b", symbol=1, block=0, place=1),
            Role("1c", symbol=2, block=0, place=2),
        ),
    )
)


IDS = ["chain", "triples", "conditional"]


def random_positions(task, B):
    """(B, N, blocks) slots and the (B, N, roles) tokens that follow from them."""
    if task.crossed:
        positions = make_batch(0, torch.arange(B), task.N, task="conditional").positions
        return task.slots(positions), positions
    generator = torch.Generator().manual_seed(0)
    slots = torch.rand(B, task.N, len(task.blocks), generator=generator).argsort(1)
    return slots, task.positions(slots)


def random_patterns(B, T, seed=0):
    pattern = torch.rand(B, T, T, generator=torch.Generator().manual_seed(seed)).tril()
    return pattern / pattern.sum(-1, keepdim=True)


# ---- targets and paths


@pytest.mark.parametrize("task", [chain(4, 3), TRIPLES, conditional(3)], ids=IDS)
def test_every_role_finds_its_targets(task):
    (_, positions), pattern = random_positions(task, 5), random_patterns(5, task.T)
    read, roles = read_paths(pattern, task, positions), range(len(task.roles))
    assert read.shape == (5, task.N, len(roles), len(roles))
    for b, n, source, target in itertools.product(range(5), range(task.N), roles, roles):
        token, found = positions[b, n, source], positions[b, n, target]
        assert read[b, n, source, target] == pattern[b, token, found]


@pytest.mark.parametrize("task", [chain(4, 3), TRIPLES, conditional(3)], ids=IDS)
def test_tokens_of_a_role_are_where_it_can_stand(task):
    _, positions = random_positions(task, 200)
    for role in range(len(task.roles)):
        tokens = circuit.tokens_of(task, role).tolist()
        assert tokens == sorted(set(positions[:, :, role].flatten().tolist()))


def test_positions_are_found_by_symbols_alone():
    batch = make_batch(0, torch.arange(20))
    found = find_positions(batch.inputs, chain(4, 3), 4)
    order = batch.positions[:, :, 0].argsort(1)[..., None].expand_as(found)
    assert torch.equal(found, batch.positions.gather(1, order))


def test_neighbours_in_a_slot_are_told_from_other_pairs():
    before = []
    for source, target in itertools.product(range(4), range(4)):
        if circuit.to_the_token_before(Path(0, 0, source, target), TRIPLES):
            before.append((TRIPLES.names[source], TRIPLES.names[target]))
    assert before == [("1b", "1a"), ("1c", "1b")]


def test_written_patterns_are_read_back():
    batch, task = make_batch(0, torch.arange(8)), chain(4, 3)
    paths = [Path(0, 0, 2, 1), Path(0, 0, 0, 2), Path(0, 0, 3, 5)]
    pattern = write_pattern(paths, task, batch.positions, True)
    read = read_paths(pattern, task, batch.positions)
    for path in paths:
        assert (read[:, :, path.source, path.target] == 1).all()
    assert pattern.sum() == 3 * 4 * 8
    for fill in ("identity", "uniform"):
        filled = write_pattern(paths[:1], task, batch.positions, True, fill)
        torch.testing.assert_close(filled.sum(-1), torch.ones(8, 28))
        assert (filled.triu(1) == 0).all()


def test_heads_are_held_to_their_own_paths():
    """Two targets of one role share its attention; a head without paths is left alone."""
    batch, task = make_batch(0, torch.arange(8)), chain(4, 3)
    held = hold([Path(0, 0, 2, 1), Path(0, 0, 2, 4), Path(2, 1, 0, 2)], task, batch.positions)
    assert held.keys() == {(0, 0), (2, 1)} and held[0, 0].sum() == held[2, 1].sum() == 4 * 8
    for b, n in itertools.product(range(8), range(4)):
        q, _, b1, _, b2, *_ = tokens = batch.positions[b, n].tolist()
        assert held[0, 0][b, b1, tokens[1]] == held[0, 0][b, b1, b2] == 0.5
        assert held[2, 1][b, q, b1] == 1


def test_a_report_is_read_as_paths(tmp_path):
    task = chain(4, 3)
    assert circuit.read_report(tmp_path) == {} and circuit.paths_in({}, task) is None
    paths = [
        dict(source="1b", target="1a", attention=0.9),
        dict(source="q", target="3b", attention=0.8),
    ]
    heads = [dict(layer=1, head=2, mechanism=paths), dict(layer=2, head=1, mechanism="uniform")]
    (tmp_path / "circuit.json").write_text(json.dumps(dict(heads=heads)))
    report = circuit.read_report(tmp_path)
    found = circuit.paths_in(report, task)
    assert found == {Path(0, 1, 2, 1): 0.9, Path(0, 1, 0, 6): 0.8}
    assert [circuit.path_name(path, task) for path in found] == [
        "layer 1 head 2, 1b -> 1a",
        "layer 1 head 2, q -> 3b",
    ]
    paths[0]["target"] = "4b"
    with pytest.raises(ValueError, match="of another task"):
        circuit.paths_in(dict(heads=heads), task)


# ---- mean attention


@pytest.mark.parametrize("task", [chain(2, 2), TRIPLES, conditional(2)], ids=IDS)
def test_mean_attention_against_loops(task):
    """Each mean is taken again, token by token, over the sequences to which it belongs."""
    (slots, positions), pattern = random_positions(task, 30), random_patterns(30, task.T)
    mean = mean_attention([pattern[:, None]], task, positions)[0, 0]
    torch.testing.assert_close(mean.to_targets, read_paths(pattern, task, positions).mean((0, 1)))

    # whose token it is, and which tokens are beside it in its slot
    chain_of = torch.full((30, task.T), -1)
    for b, n in itertools.product(range(30), range(task.N)):
        chain_of[b, positions[b, n]] = n
    block_of, beside = {}, {}
    for number, (start, size, count) in enumerate(task.blocks):
        for token in range(start, start + count * size):
            first = token - (token - start) % size
            block_of[token] = number
            beside[token] = [other for other in range(first, first + size) if other != token]

    for token in range(task.T):
        own = pattern[:, token].clone()
        own[:, beside[token]] = 0
        torch.testing.assert_close(mean.by_position[token], own.mean(0))
        for block, slot in itertools.product(range(len(task.blocks)), range(task.N)):
            if block == block_of[token]:
                expected = torch.zeros(task.T)
                expected[beside[token]] = pattern[:, token, beside[token]].mean(0)
            else:
                owned = [b for b in range(30) if chain_of[b, token] >= 0]
                there = [b for b in owned if slots[b, chain_of[b, token], block] == slot]
                expected = own[there].mean(0) - own.mean(0) if there else torch.zeros(task.T)
            torch.testing.assert_close(mean.by_slot[block, slot, token], expected)


def test_groups_of_three_are_written_from_their_means():
    """1c takes from both others of its slot, q from its own 1c; the means write both again."""
    slots, positions = random_positions(TRIPLES, 500)
    pattern = torch.eye(TRIPLES.T).repeat(500, 1, 1)
    for b, n in itertools.product(range(500), range(3)):
        q, a, _, c = positions[b, n].tolist()
        pattern[b, c], pattern[b, q] = 0, 0
        pattern[b, c, a], pattern[b, c, a + 1], pattern[b, c, c] = 0.6, 0.3, 0.1
        pattern[b, q, c] = 1
    assert torch.equal(slots, TRIPLES.slots(positions))
    mean = mean_attention([pattern[:, None]], TRIPLES, positions)[0, 0]
    torch.testing.assert_close(mean.to_targets[3, 1:4], torch.tensor([0.6, 0.3, 0.1]))
    to_a, to_b = Path(0, 0, 3, 1), Path(0, 0, 3, 2)
    for own in ([to_a], [to_b], [to_a, to_b]):  # the slot is said once, by one path or by two
        again = write_pattern([Path(0, 0, 0, 3), *own], TRIPLES, positions, True, "slot", mean)
        torch.testing.assert_close(again, pattern, atol=1e-5, rtol=0)


def test_mean_attention_is_what_was_written():
    """One head attends as the position says. In another q looks for pair 1 and takes x_1 from 1b in
    two slots and from the token after it in the others, and every 1b attends to its 1a. The means
    alone write both again."""
    batch, task = make_batch(0, torch.arange(3000), D=2), chain(4, 2)
    by_position = random_patterns(1, 20)[0]
    second = by_position.repeat(3000, 1, 1)
    for b, n in itertools.product(range(3000), range(4)):
        q, a1, b1, _, _ = batch.positions[b, n].tolist()
        second[b, q], second[b, b1] = 0, 0
        second[b, q, b1 if b1 in (9, 13) else b1 + 1] = 1
        second[b, b1, a1], second[b, b1, 0] = 0.7, 0.3
    written = torch.stack([by_position.expand(3000, -1, -1), second], 1)
    means = mean_attention([written], task, batch.positions)

    # the second head
    mean = means[0, 1]
    assert mean.to_targets[0, 2] > 0.45 and mean.to_targets[2, 1] > 0.6
    paths = [Path(0, 1, 0, 2), Path(0, 1, 2, 1)]
    again = write_pattern(paths, task, batch.positions, True, "slot", mean)
    torch.testing.assert_close(again.sum(-1), torch.ones(3000, 20))
    looking = batch.positions[:, :, [0, 2]].flatten(1)[..., None].expand(-1, -1, 20)
    assert (again - second).gather(1, looking).abs().max() < 1e-4

    # the first
    b = torch.arange(1, 16, 2)
    by_position[b, b - 1] = 0  # else a b would carry its a's symbol
    again = write_pattern("position", task, batch.positions, True, "position", means[0, 0])
    torch.testing.assert_close(again, by_position / by_position.sum(-1, keepdim=True))
