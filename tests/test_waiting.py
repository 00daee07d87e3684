"""The wait for x_1: exponents and medians of planted runs."""

import itertools

from parts import config

import pytest
import torch

from data import held_out
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
    assert waiting.cell(waiting.waits(rows, ("muon", "input"), N=12)) == "8640 (1/3 never)"
    assert waiting.cell({0: None, 1: None, 2: 7}) == "2/3 never" and waiting.cell({}) == ""
    assert waiting.exponent_cell(rows, ("adamw", "qk"), "N") == "n=0"
    [file] = waiting.draw([HERE / "results/A"], tmp_path)  # most points have no run
    assert file.exists()
    table = waiting.table(rows, "wait", dict(two=dict(N=2))).splitlines()
    assert table[-1] == "| two | 40 |  |  |  | 3, 0, 0, 0 |"


@torch.no_grad()
def test_where_queries_look():
    """Of A token by token; then the medians of planted looks."""
    model, flags = config.load(HERE / "results/A")
    batch = config.sequences(flags, held_out("validation", 64))
    layers = model(batch.inputs, None, True)[1]
    for role, name in enumerate(flags.problem.names):
        given = []
        for pattern in layers:
            one = [
                pattern[row, 0, query, batch.positions[row, :, role]].sum()
                for row in range(64)
                for query in range(flags.problem.T - flags.N, flags.problem.T)
            ]
            given.append(torch.stack(one).mean().item())
        assert waiting.looks(HERE / "results/A")["looks"][name] == pytest.approx(
            max(given), abs=1e-4
        )

    planted = waiting.BASE | dict(D=2, wait=None)
    rows = [planted | dict(seed=seed, looks={"1b": 0.1, "2a": seed / 10}) for seed in (7, 8, 9)]
    assert waiting.looks_table(rows).endswith("| D=2: 20 tokens | never | 3 | 0.10 | 0.80 |")
