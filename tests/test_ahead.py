"""Rounds of reading ahead, of circuits made by hand."""

from data import Task
from extras.studies import ahead
from tests.planted import paths_from

import pytest


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
