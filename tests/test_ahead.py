"""Which circuits read ahead twice, of some made by hand."""

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
    "texts, twice",
    [(LINEAR, 0), (UNUSED, 0), (ONE, 0), (BEHIND, 0), (TWO, 1), (AGAIN, 1), (WALK, 1)],
)
def test_which_circuits_take_a_second_round(texts, twice):
    paths = [path._asdict() for path in paths_from(*texts)]
    assert ahead.reads_twice(dict(report=dict(paths=paths), task=Task(D=7))) == twice


def test_what_reaches_the_query_within_some_steps():
    reached = [ahead.reached_within(paths_from(*TWO), Task(D=7), steps) for steps in (0, 1, 3)]
    assert reached == [{*range(3)}, {*range(6)}, {*range(8)}]
