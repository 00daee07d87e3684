"""Section 5: the information flow against sets on real sequences, and the depth laws against it."""

import itertools
import math

from data import Task
from extras.studies import tables, theory

import pytest


def test_depth_laws_against_the_simulation():
    for D in range(1, 65):
        task = Task(1, D)
        unmasked, causal = theory.least_layers(task, causal=False), theory.least_layers(task)
        assert unmasked[-1] == theory.unmasked_depth(D) == math.ceil(math.log(4 * D + 1, 3) - 1e-9)
        assert causal == [math.floor(math.log2(k)) + 2 for k in range(1, D + 1)]
        assert causal[-1] == theory.causal_depth(D)
        assert theory.paper_bound(D) == math.ceil(math.log(2 * D, 3) - 1e-9) <= unmasked[-1]


def slots_of(task):
    """[(number of the block, of the slot, of the place in the slot), ...] of all tokens."""
    found = []
    for number, slot in enumerate(task.slots):
        found += itertools.product([slot.group], [number], range(len(slot.shows)))
    return found


def layers_by_sets(task, batch, causal):
    """The layers after which the first query holds each target symbol, token by token (Section 5).
    With distractors no other token of its place may hold all that is shared."""
    distractors = len(task.labels) > task.N * (task.D + 1)
    slots = slots_of(task)
    known = []
    for symbol, (block, slot, _) in zip(batch.inputs[0].tolist(), slots, strict=True):
        known.append({tuple(symbol), (block, slot)})
    query, layers = task.T - task.N, {}
    for layer in range(1, 9):
        after = [set(pieces) for pieces in known]
        for token, read in itertools.product(range(task.T), repeat=2):
            shared = known[token] & known[read]
            for other in range(task.T):
                same_place = slots[other][::2] == slots[read][::2]
                if distractors and same_place and other != read and shared <= known[other]:
                    shared = set()
            if shared and (read <= token or not causal):
                after[token] |= known[read]
        known = after
        for symbol in batch.answers[0, 0].split(4):
            if tuple(symbol.tolist()) in known[query]:
                layers.setdefault(tuple(symbol.tolist()), layer)
    return [layers[tuple(symbol.tolist())] for symbol in batch.answers[0, 0].split(4)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "make, N, D",
    [*((Task, 2, D) for D in (1, 2, 3, 4, 5, 8)), (tables.Conditional, 3, 3)],
)
def test_least_layers_against_sets_on_a_real_sequence(make, N, D, causal):
    task = make(N=N, D=D)
    for number in range(3):
        batch = task.draw("training", 1, number)
        assert layers_by_sets(task, batch, causal) == theory.least_layers(task, causal)


def test_the_figure_is_drawn(tmp_path):
    """Before any layer only the tokens of a slot and neighbours in the chain share a piece."""
    known, roles, rivals = theory.whole_sequence(Task(1, 5))
    assert known.shape == (11, 6 + 6) and roles.unique().tolist() == list(range(11)) and not rivals
    shared = (known.float() @ known.float().T > 0).nonzero().tolist()
    assert {abs(roles[a] - roles[b]).item() for a, b in shared} == {0, 1}
    theory.draw_flow(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 10_000
