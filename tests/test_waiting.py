"""The wait for x_1: exponents and medians of planted runs."""

import itertools

import pytest

from studies import waiting
from tests.common import HERE


def test_exponents_of_the_wait(tmp_path):
    """Of planted waits that grow as N^2 and N^3, a run that never learns left out; medians count it
    as longer than all others."""
    rows = []
    for N, seed in itertools.product((2, 3, 4, 6, 8, 12), range(3)):
        found = waiting.BASE | dict(N=N, seed=seed, optimizer="muon", rotary="input")
        rows.append(found | dict(wait=None if (N, seed) == (12, 2) else 5 * N ** (2 + seed)))
    slopes, censored = waiting.exponents(rows, ("muon", "input"), "N")
    assert slopes == pytest.approx([2, 3]) and censored == 1
    assert waiting.cell(waiting.waits(rows, ("muon", "input"), N=12)) == "8640 (1 of 3 never)"
    assert (
        waiting.cell({0: None, 1: None, 2: 7}) == "never (2 of 3 never)" and waiting.cell({}) == ""
    )
    assert waiting.exponent_cell(rows, ("adamw", "qk"), "N") == "n=0"
    [file] = waiting.draw([HERE / "results/A"], tmp_path)  # most points have no run
    assert file.exists()
    table = waiting.table(rows, "wait", dict(two=dict(N=2))).splitlines()
    assert table[-1] == "| two | 40 |  |  |  | 3, 0, 0, 0 |"
