"""Models with a known truth whose answer travels otherwise than a too simple circuit would say: the
circuit that is validated is the true one, or none is validated."""

import pytest
import torch

import ablate
from tests import adversaries
from tests.planted import settings


COMPLETE = "validated, complete"
KEY, DIRECT = "L0H0: 1b -> 1a", "L1H0: q -> 1b"
BY_NEXT = KEY, "L0H0: 1b+1 -> 1b"  # the token after 1b reads it
STARS = [f"L0H{head}: q -> 1b*" for head in (1, 2, 3, 4)]
IN_NAMED_HEAD = KEY, "L1H0: 2b -> 2a", "L1H1: q -> 1b", "L2H0: q -> 2b"
CASES = [  # model, its only circuit, what the verdict says
    (adversaries.one_intermediate_token(), [*BY_NEXT, "L1H0: q -> 1b+1"], COMPLETE),
    (
        adversaries.quarters_over_layers(),
        [KEY, *(f"L{n}H0: q -> 1b" for n in range(1, 5))],
        COMPLETE,
    ),
    (adversaries.head_that_carries_nothing(), [KEY, "L2H0: q -> 1b"], COMPLETE),
    (adversaries.decoy(), [*BY_NEXT, "L1H1: q -> 1b+1"], COMPLETE),
    (
        adversaries.direct_and_by_an_intermediate_token(),
        [*BY_NEXT, DIRECT, "L1H0: q -> 1b+1"],
        COMPLETE,
    ),
    (adversaries.gate(), [*BY_NEXT, DIRECT, "L1H1: q -> 1b+1"], COMPLETE),
    # the wrong candidate is in the first slot, or what cancels is outside, in any sequence
    (adversaries.canceller(torch.ones_like), [KEY, DIRECT + "*", "L1H1: q -> 1b*"], COMPLETE),
    (adversaries.canceller(adversaries.of_another_chain), [KEY, DIRECT], COMPLETE),
    (adversaries.canceller_in_a_head_that_is_named(), [*IN_NAMED_HEAD], COMPLETE),
    (adversaries.exclusion(), [KEY, DIRECT + "*", "L1H1: q -> 1b*"], COMPLETE),
    # one would do, if the other brought nothing wrong
    (adversaries.twin(), [KEY, DIRECT, "L1H1: q -> 1b"], COMPLETE),
    (adversaries.copy_without_attention(), None, "no path leads to x_1"),
    (adversaries.averages_and_a_pointer(), None, "not faithful"),
    # of the two ablations one does not see
    (adversaries.key_that_is_harmless_at_its_mean, [KEY, DIRECT, "L1H1: q -> 1a"], COMPLETE),
    (adversaries.star_with_a_checksum, ["L0H0: q -> 1a", *STARS], "validated, at the mean alone"),
    (adversaries.another_way_in_two_of_a_hundred, None, "% of sequences lost"),
    (adversaries.carrier_and_its_stand_in, [KEY, DIRECT], COMPLETE),
    (adversaries.two_that_must_agree, [KEY, DIRECT, "L1H1: q -> 1b"], COMPLETE),
]


@pytest.mark.parametrize("model, circuit, verdict", CASES, ids=range(len(CASES)))
def test_the_only_circuit_is_found_or_none(model, circuit, verdict):
    layers, heads = getattr(model, "layers", 2), getattr(model, "heads", 2)
    D = model.task.symbols - 1 if hasattr(model, "task") else 1
    report = ablate.find_circuit(model, settings(D, layers, heads), count=512)
    assert verdict in report["verdict"] and report["validated"] == bool(circuit), report["verdict"]
    if circuit:
        paths = map("L{layer}H{head}: {reader} -> {read}".format_map, report["paths"])
        assert sorted(paths) == sorted(circuit)
