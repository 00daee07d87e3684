"""Rounds of reading ahead, of circuits made by hand."""

from data import Task
from extras.studies import ahead
from tests.planted import paths_from

import pytest


PAIRS = [f"0 {k}b {k}a" for k in range(1, 8)]
LINEAR = [*PAIRS, *(f"{k} q {k}b" for k in range(1, 8))]
ONE = [*PAIRS, "1 1b 2b", "1 3b 4b", "1 5b 6b", "1 q 1b", "2 q 2b", "3 q 4b", "4 q 6b", "5 q 7b"]
FIRST = [f"1 {k}b {k + 1}b" for k in range(1, 7)]
TWO = [*PAIRS, *FIRST, "1 q 1b", "2 2b 4b", "2 4b 6b", "2 q 2b", "3 q 4b"]
WALK = [*PAIRS, "1 1b 2b", "2 1b 3b", "3 1b 4b", "4 1b 5b", "5 q 1b"]  # 1b alone, step by step


AGAIN = [*PAIRS, "1 1b 2b", "1 2b 3b", "2 1b 2b", "3 q 1b"]  # 1b reads 2b, which has read ahead
BEHIND = [*PAIRS, "1 2b+1 2b", "2 2b+1 3b", "3 q 2b+1"]


@pytest.mark.parametrize(
    "texts, furthest, rounds",
    [
        (LINEAR, {}, 0),
        (ONE, {"1b": 1, "3b": 1, "5b": 1}, 1),
        (BEHIND, {"2b+1": 1}, 1),
        (AGAIN, {"1b": 2, "2b": 1}, 2),
        (TWO, {"1b": 1, "2b": 3, "3b": 1, "4b": 3, "5b": 1, "6b": 1}, 2),
        (WALK, {"1b": 4}, 3),
    ],
)
def test_rounds_by_what_tokens_of_pairs_hold(texts, furthest, rounds):
    paths, task = paths_from(*texts), Task(D=7)
    assert ahead.steps_ahead(paths, task) == furthest
    assert ahead.rounds_of(paths, task) == rounds
