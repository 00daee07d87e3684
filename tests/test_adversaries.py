"""Models with a known truth whose answer travels otherwise than a too simple circuit would say: the
circuit that is validated is the true one, or none is validated."""

import contextlib
import io

import pytest

import ablate
from ablate import paths_in, to_row
from tests import adversaries as planted
from tests.planted import settings


def report_on(model):
    """The report on a model, and its circuit, ["1.0 q 1b", ...]."""
    flags = settings(model.task.symbols - 1, model.layers, model.heads)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        report = ablate.find_circuit(model, flags)
    text = "{layer}.{head} {reader} {read}"
    return report, [text.format(**to_row(p, model.task)) for p in paths_in(report, model.task)]


KEY, DIRECT = "0.0 1b 1a", "1.0 q 1b"
BY_NEXT = ["0.0 1b 1a", "0.0 1b+1 1b"]  # the token after 1b reads it
VALIDATED = [  # model, its only circuit
    (planted.one_intermediate_token, [*BY_NEXT, "1.0 q 1b+1"]),
    (planted.quarters_over_layers, [KEY, *(f"{layer}.0 q 1b" for layer in (1, 2, 3, 4))]),
    (planted.quarters_over_heads, [KEY, *(f"1.{head} q 1b" for head in (0, 1, 2, 3))]),
    (planted.halves_of_the_sequences, [KEY, "1.0 q 1b", "1.1 q 1b"]),
    (planted.half_in_each_of_two_layers, [KEY, DIRECT, "2.0 q 1b"]),
    (planted.head_that_carries_nothing, [KEY, "2.0 q 1b"]),
    (planted.decoy, [*BY_NEXT, "1.1 q 1b+1"]),
    (planted.direct_and_by_an_intermediate_token, [*BY_NEXT, DIRECT, "1.0 q 1b+1"]),
    (planted.gate, [*BY_NEXT, DIRECT, "1.1 q 1b+1"]),
    (planted.gate_with_key, [*BY_NEXT, DIRECT, "1.1 q 1b+1"]),
    (planted.canceller_of_the_next_slot, [KEY, DIRECT]),
    (planted.canceller_of_the_first_slot, [KEY, DIRECT]),
    (planted.two_cancellers, [KEY, DIRECT]),
    (
        planted.canceller_in_a_head_that_is_named,
        ["0.0 1b 1a", "1.0 2b 2a", "1.1 q 1b", "2.0 q 2b"],
    ),
]
REDUNDANT = [  # model, what all its circuits have, of what they have so many
    (planted.twin, [KEY], [DIRECT, "1.1 q 1b"], 1),
    (planted.two_of_three, [KEY], [DIRECT, "1.1 q 1b", "1.2 q 1b"], 2),
]
REFUSED = [  # model, what the verdict says
    (planted.canceller, "not minimal: L1H1: q-3 -> 1b can go"),
    (planted.exclusion, "not faithful"),
    (planted.copy_without_attention, "no path leads to x_1"),
    (planted.averages_and_a_pointer, "not faithful"),
]


@pytest.mark.parametrize("make, circuit", VALIDATED)
def test_the_only_circuit_is_found(make, circuit):
    report, paths = report_on(make())
    assert report["verdict"] == "validated" and report["validated"]
    assert sorted(paths) == sorted(circuit)


@pytest.mark.parametrize("make, always, choices, count", REDUNDANT)
def test_one_of_several_circuits_is_found(make, always, choices, count):
    report, paths = report_on(make())
    assert report["validated"] and {*always} <= {*paths} <= {*always, *choices}
    assert len(paths) == len(always) + count


@pytest.mark.parametrize("make, verdict", REFUSED)
def test_what_no_circuit_explains_is_not_validated(make, verdict):
    report, _ = report_on(make())
    assert not report["validated"] and verdict in report["verdict"], report["verdict"]
