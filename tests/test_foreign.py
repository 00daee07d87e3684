"""Models that are none of ours: the circuit that is validated is the true one, or none is; what
cannot be searched is refused in one line that says why."""

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
    flags = settings(1, 2)
    report = ablate.find_circuit(model.eval(), flags, count=256)
    assert report["validated"], report["verdict"]
    circuit = {*paths_from("0 1b 1a", "1 q 1b")}
    assert {*ablate.paths_in(report)} == circuit


@pytest.mark.parametrize("model, circuit, verdict", adversaries.ALL)
def test_the_only_circuit_of_an_adversary_is_found_if_it_has_one(model, circuit, verdict):
    flags = settings(1, getattr(model, "layers", 2), getattr(model, "heads", 2))
    report = ablate.find_circuit(model, flags, count=512)
    assert verdict in report["verdict"] and report["validated"] == bool(circuit), report["verdict"]
    if circuit:
        assert {*ablate.paths_in(report)} == {*paths_from(*circuit.split(", "))}


@pytest.mark.parametrize("pattern", [torch.eye(12), torch.full((12, 12), 1 / 12)])
def test_a_model_without_attended_paths_is_not_validated(pattern):
    """It solves the problem by itself; its heads read each token itself, or all tokens alike."""

    def model(x, heads):
        written = [f(pattern.expand(len(x), 12, 12), x[..., :4])[:, -4:] for f in heads.values()]
        return planted(x, {}) + 1e-3 * sum(written)

    report = ablate.find_circuit(model, settings(1, 2), count=256)
    assert not report["validated"] and not report["paths"]
    assert "no path leads to x_1" in report["verdict"]


# ---- what cannot be searched


def unused(x, heads):
    """Calls f of layer 1, head 0, and goes on with what it would have written itself."""

    def ignored(pattern, values):
        heads.get((1, 0), torch.matmul)(pattern, values)
        return pattern @ values

    return planted(x, heads | {(1, 0): ignored})


def by_layer(x, heads):
    """Gives f the patterns of all heads together, (B, 1, T, T)."""

    def wrap(f):
        return lambda pattern, values: f(pattern[:, None], values[:, None]).squeeze(1)

    return planted(x, {head: wrap(f) for head, f in heads.items()})


REFUSED = [  # model, heads, what the line says
    (unused, 1, "the model does not use what f of layer 1, head 0 returns"),
    (planted, 2, "the model never calls f of layer 0, head 1"),
    (lambda x, heads: planted(x, heads)[:, :1], 1, "a tensor of shape (16, 4, 4)"),
    (lambda x, heads: (planted(x, heads), 0), 1, "a tensor of shape (16, 4, 4)"),
    (lambda x, heads: planted(x, heads) * torch.nan, 1, "predictions that are not finite"),
    (lambda x: planted(x, {}), 1, "takes 1 positional argument but 2 were given"),
    (by_layer, 1, "a pattern (B, T, T)"),
    (lambda x, heads: F.dropout(planted(x, heads)), 1, "the model answers otherwise the second"),
]


@pytest.mark.parametrize("model, heads, says", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_searched_is_refused_in_one_line(model, heads, says):
    with pytest.raises(UserError) as refusal:
        ablate.find_circuit(model, settings(1, 2, heads))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
