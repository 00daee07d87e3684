"""Models with a known truth whose answer travels otherwise than a too simple circuit would say: the
circuit that is validated is the true one, or none is validated."""

import contextlib
import io

import pytest

import ablate
from tests import adversaries as planted
from tests.planted import settings


def report_on(model, D=1, layers=2, heads=2):
    """The report on a model, and its circuit, ["1.0 q 1b", ...]."""
    flags = settings(D, layers, heads)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        report = ablate.find_circuit(model, flags, count=512)
    text = "{layer}.{head} {reader} {read}"
    return report, [text.format(**row) for row in report["paths"]]


def shape_of(model):
    return model, model.task.symbols - 1, model.layers, model.heads


COMPLETE = "validated, complete"
KEY, DIRECT = "0.0 1b 1a", "1.0 q 1b"
BY_NEXT = ["0.0 1b 1a", "0.0 1b+1 1b"]  # the token after 1b reads it
VALIDATED = [  # model, its only circuit
    (planted.one_intermediate_token, [*BY_NEXT, "1.0 q 1b+1"]),
    (planted.quarters_over_layers, [KEY, *(f"{layer}.0 q 1b" for layer in (1, 2, 3, 4))]),
    (planted.halves_of_the_sequences, [KEY, "1.0 q 1b", "1.1 q 1b"]),
    (planted.head_that_carries_nothing, [KEY, "2.0 q 1b"]),
    (planted.decoy, [*BY_NEXT, "1.1 q 1b+1"]),
    (planted.direct_and_by_an_intermediate_token, [*BY_NEXT, DIRECT, "1.0 q 1b+1"]),
    (planted.gate, [*BY_NEXT, DIRECT, "1.1 q 1b+1"]),
    (planted.canceller_of_the_first_slot, [KEY, DIRECT + "*", "1.1 q 1b*"]),
    (planted.canceller, [KEY, DIRECT]),  # what cancels is outside, and cancels in any sequence
    (planted.exclusion, [KEY, DIRECT + "*", "1.1 q 1b*"]),
    (planted.twin, [KEY, DIRECT, "1.1 q 1b"]),  # one would do, if the other brought nothing wrong
    (
        planted.canceller_in_a_head_that_is_named,
        ["0.0 1b 1a", "1.0 2b 2a", "1.1 q 1b", "2.0 q 2b"],
    ),
]
REFUSED = [  # model, what the verdict says
    (planted.copy_without_attention, "no path leads to x_1"),
    (planted.averages_and_a_pointer, "not faithful"),
]
FUNCTIONS = [  # model, layers, heads, its only circuit, what the verdict says
    (planted.key_that_is_harmless_at_its_mean, 2, 2, [KEY, DIRECT, "1.1 q 1a"], COMPLETE),
    (
        planted.star_with_a_checksum,
        1,
        6,
        ["0.0 q 1a", *(f"0.{head} q 1b*" for head in (1, 2, 3, 4))],
        "validated, at the mean alone",
    ),
    (planted.another_way_in_two_of_a_hundred, 2, 2, [], "% of sequences lost"),
    (planted.carrier_and_its_stand_in, 2, 2, [KEY, DIRECT], COMPLETE),
    (planted.two_that_must_agree, 2, 2, [KEY, DIRECT, "1.1 q 1b"], COMPLETE),
]


@pytest.mark.parametrize("make, circuit", VALIDATED)
def test_the_only_circuit_is_found(make, circuit):
    report, paths = report_on(*shape_of(make()))
    assert report["verdict"] == COMPLETE and report["validated"]
    assert sorted(paths) == sorted(circuit)


@pytest.mark.parametrize("make, verdict", REFUSED)
def test_what_no_circuit_explains_is_not_validated(make, verdict):
    report, _ = report_on(*shape_of(make()))
    assert not report["validated"] and verdict in report["verdict"], report["verdict"]


@pytest.mark.parametrize("model, layers, heads, circuit, verdict", FUNCTIONS)
def test_two_ablations_see_what_one_does_not(model, layers, heads, circuit, verdict):
    report, paths = report_on(model, 1, layers, heads)
    assert verdict in report["verdict"] and report["validated"] == bool(circuit), report["verdict"]
    assert sorted(paths) == sorted(circuit)
