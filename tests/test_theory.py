"""Section 5: the information flow against sets on real sequences, and the depth laws against it;
circuits made by hand, how far they read ahead and what later tokens bring."""

import itertools
import math

from data import Task
from extras.studies import ahead, later, tables, theory
from tests.planted import Planted, paths_from

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
    theory.draw_flow(tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 10_000


# ---- circuits


PAIRS = [f"0 {k}b {k}a" for k in range(1, 8)]
LINEAR = [*PAIRS, *(f"{k} q {k}b" for k in range(1, 8))]
UNUSED = [*LINEAR, "1 2b 3b", "2 1b 2b"]  # 1b holds x_3, which the query has from 3b too
ONE = [*PAIRS, "1 1b 2b", "1 3b 4b", "1 5b 6b", "2 q 1b", "3 q 3b", "4 q 5b", "5 q 7b"]
BEHIND = [*PAIRS, "1 2b+1 2b", "2 2b+1 3b", "3 q 1b", "4 q 2b+1"]  # intermediate tokens
FIRST = [f"1 {k}b {k + 1}b" for k in range(1, 7)]
TWO = [*PAIRS, *FIRST, "1 q 1b", "2 4b 6b", "2 q 2b", "3 q 4b"]  # 4b holds x_7
AGAIN = [*PAIRS, "1 2b 3b", "2 1b 2b", "3 q 1b"]  # 1b reads 2b, which has read ahead
WALK = [*PAIRS, "1 1b 2b", "2 1b 3b", "3 1b 4b", "4 1b 5b", "5 q 1b"]  # 1b holds x_5


@pytest.mark.parametrize(
    "texts, rounds",
    [(LINEAR, 0), (UNUSED, 1), (ONE, 1), (BEHIND, 1), (TWO, 2), (AGAIN, 2), (WALK, 3)],
)
def test_rounds_that_bring_all_symbols_to_the_query(texts, rounds):
    assert ahead.rounds_of(paths_from(*texts), Task(D=7)) == rounds


def test_steps_ahead_of_a_pair():
    ends = [("1b", {0, 1, 3}), ("2a", {1}), ("2b+1", {2, 3}), ("q", {0, 7}), ("3b+1", set())]
    assert [ahead.steps_ahead(*end) for end in ends] == [2, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "reads, lost", [(["0 1b 1a", "1 q 1b"], False), (["0 1a 1b", "1 q 1a"], True)]
)
def test_what_later_tokens_bring_is_lost_without_it(reads, lost):
    """By its a a pair is found as well, if the a has read its b, which comes later."""
    row = later.measure(Planted(Task(D=1), reads, layers=2), Task(D=1), ["x_1"])
    assert row["full"]["x_1"] < 0.01
    assert [loss > 0.5 for loss in row["by_place"]] == [lost] * 4
    assert (row["without"]["x_1"] > 0.5) == lost
