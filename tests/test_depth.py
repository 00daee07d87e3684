"""The depth law: counts of planted runs."""

import math

from studies import depth


def test_least_depths_are_counted_by_seed():
    rows = [
        dict(seed=seed, layers=layers, x_1=loss, task="chain", N=4, D=1)
        for seed, layers, loss in (
            (0, 1, 0.9),
            (0, 2, 0.1),
            (0, 3, 0.0),
            (1, 2, 0.7),
            (1, 3, 0.4),
            (2, 3, None),
        )
    ]
    assert depth.least_depths(rows, 1) == [2, 3] and depth.least_depths(rows[:1], 1) == [math.inf]
    assert depth.least_depths(rows[2:3], 1) == [3] and depth.least_depths(rows, 2) == []


def test_the_claims_are_counted():
    def row(run, layers, *learned, ic=True, causal=True, **losses):
        fixed = dict(seed=0, D=2, N=4, task="chain", targets=[], circuit="", ic=ic)
        steps = {f"x_{k}_learned": step for k, step in enumerate(learned, 1)}
        return dict(run=run, layers=layers, causal=causal, **fixed, **losses, **steps)

    rows = [
        row("one", 2, 10.0, 20.0, x_1=0.1, x_2=0.2),
        row("two", 2, 30.0, None, x_1=0.1, x_2=0.8),
        row("three", 3, 40.0, 35.0, x_1=0.1, x_2=0.1),
        row("four", 3, None, None, x_1=0.8, x_2=0.8),
        row("five", 3, None, None, causal=False, x_1=0.9, x_2=0.9),
        row("six", 1, ic=False, val=0.74),
        row("seven", 1, ic=False, val=0.65),
    ]
    lines = depth.counted([row for row in rows if row["causal"]])
    assert lines == [
        "learned by (median step):",
        "2 layers, 2 runs: x_1 2 (20), x_2 1 (20)",
        "3 layers, 2 runs: x_1 1 (40), x_2 1 (35)",
        "x_1, x_2, ... learned in this order: 1 of 2 runs",
        "without the implicit curriculum above 0.7: 1 of 2",
    ]
    lines = depth.counted_by_law(rows)
    assert lines[1].endswith("causal mask, attention learned: x_1 2 (law 2), x_2 2 (law 3)")
    assert lines[3].endswith("no mask, attention learned: x_1 - (law 2), x_2 - (law 2)")
    assert lines[4].endswith(": one (x_2)") and len(lines) == 5
