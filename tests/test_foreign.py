"""Models that are none of ours: the circuit that is validated is the true one, or none is."""

import functools

import ablate
from data import UserError, make_batch
from test_all import planted
from tests import adversaries
from tests.foreign import Mine
from tests.planted import paths_from, settings

import pytest
import torch
import torch.nn.functional as F


def test_a_model_of_your_own_is_trained_found_and_validated():
    torch.manual_seed(0)
    model, steps = Mine(), 500
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, 2 * (1 - step / steps))
        batch = make_batch(0, torch.arange(64 * step, 64 * (step + 1)), D=1)
        optimizer.zero_grad()
        (model(batch.inputs) - batch.targets).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    report = ablate.find_circuit(model.eval(), settings(1, 2), count=256)
    assert report["validated"], report["verdict"]
    assert {*ablate.paths_in(report)} == {*paths_from("0 1b 1a", "1 q 1b")}


@pytest.mark.parametrize("model, circuit, verdict", adversaries.ALL)
def test_the_only_circuit_of_an_adversary_is_found_if_it_has_one(model, circuit, verdict):
    flags = settings(1, getattr(model, "layers", 2), getattr(model, "heads", 2))
    report = ablate.find_circuit(model, flags, count=512)
    assert verdict in report["verdict"] and report["validated"] == bool(circuit), report["verdict"]
    if circuit:
        assert {*ablate.paths_in(report)} == {*paths_from(*circuit.split(", "))}


# ---- what cannot be searched


def wrapped(write):
    """The planted model, whose heads write what write(f, pattern, values) returns."""

    def model(x, heads):
        return planted(x, {head: functools.partial(write, f) for head, f in heads.items()})

    return model


def unused(f, pattern, values):
    f(pattern, values)
    return pattern @ values


def half(f, pattern, values):
    return (f(pattern, values) + pattern @ values) / 2


def of_all_heads_together(f, pattern, values):
    return f(pattern[:, None], values[:, None]).squeeze(1)


def by_itself(x, heads):
    """Solves the problem in its own way, beside heads that carry next to nothing."""
    written, pattern = 0, torch.eye(12).expand(len(x), 12, 12)
    for layer in 0, 1:
        written = written + heads.get((layer, 0), torch.matmul)(pattern, x[..., :4])
    return planted(x, {}) + 1e-3 * written[:, -4:]


def twice(x, heads):
    """Calls f of layer 0, head 0 again, after it has used what came first."""
    return planted(x, heads) + 0 * planted(x, heads)


def at_random(x, heads):
    return F.dropout(planted(x, heads))


SHAPE = "finite predictions, of shape (16, 4, 4)"
REFUSED = [  # model, heads, what the line says
    (wrapped(unused), 1, "does not use what f of (0, 0) returns"),
    (planted, 2, "the model never calls f of (0, 1)"),
    (lambda x, heads: planted(x, heads)[:, :1], 1, SHAPE),
    (lambda x, heads: (planted(x, heads), 0), 1, SHAPE),
    (lambda x, heads: planted(x, heads) * torch.nan, 1, SHAPE),
    (wrapped(of_all_heads_together), 1, "a pattern (B, T, T)"),
    (by_itself, 1, "knows other tokens although each f returns 0"),
    (wrapped(half), 1, "knows other tokens although each f returns 0"),
    (twice, 1, "the model calls f of (0, 0) twice"),
    (at_random, 1, "the model answers otherwise the second time"),
]


@pytest.mark.parametrize("model, heads, says", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_searched_is_refused_in_one_line(model, heads, says):
    with pytest.raises(UserError) as refusal:
        ablate.find_circuit(model, settings(1, 2, heads))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_error_in_a_model_keeps_its_traceback():
    def model(x, heads):
        return planted(x, heads)[{}["no such key"]]

    with pytest.raises(KeyError) as error:
        ablate.find_circuit(model, settings(1, 2))
    assert error.traceback[-1].name == "model"


def test_a_model_that_uses_its_memory_again_is_recorded_as_it_was():
    """A buffer that holds the pattern of each layer in turn."""
    buffer = torch.zeros(256, 12, 12)

    def reusing(f, pattern, values):
        buffer[: len(pattern)] = pattern
        return f(buffer[: len(pattern)], values)

    models = wrapped(reusing), planted
    assert torch.equal(*(ablate.Reference(m, settings(1, 2)).reads[0, 0][0] for m in models))
