"""Models that are none of ours: the circuit that is validated is the true one, or none is."""

import ablate
from data import Task
from test_all import planted
from tests import adversaries
from tests.foreign import Mine
from tests.planted import paths_from

import pytest
import torch


TASK = Task(N=4, D=1)


def test_a_model_of_your_own_is_trained_found_and_validated():
    torch.manual_seed(0)
    model, steps = Mine(), 400
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, 2 * (1 - step / steps))
        batch = TASK.draw("training", 64, step)
        optimizer.zero_grad()
        (model(batch.inputs) - batch.answers.flatten(2)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    report = ablate.find_circuit(model.eval(), TASK, count=256)
    assert report["validated"], report["verdict"]
    assert {*ablate.paths_in(report)} == {*paths_from("0 1b 1a", "1 q 1b")}


@pytest.mark.parametrize("model, layers, heads, circuit, verdict", adversaries.ALL)
def test_the_circuit_of_an_adversary_is_found_if_it_has_one(model, layers, heads, circuit, verdict):
    report = ablate.find_circuit(model, TASK)
    said = report["verdict"]
    assert verdict in said and report["validated"] == said.startswith("validated"), said
    if report["validated"]:
        assert {*ablate.paths_in(report)} == {*paths_from(*circuit.split(", "))}


def test_a_model_whose_answers_are_no_numbers_has_no_circuit(monkeypatch):
    """On its last symbol alone."""
    task, losses_of = Task(N=4, D=1), TASK.losses

    def losses(predictions, batch):
        first = losses_of(predictions, batch)
        return torch.cat([first, first * torch.nan], -1)

    monkeypatch.setattr(task, "losses", losses)
    task.target_names = ["x_1", "none"]
    assert not ablate.find_circuit(planted, task, count=64)["validated"]


def test_a_circuit_is_validated_on_fresh_sequences(monkeypatch):
    batches, PatchedModel = [], ablate.PatchedModel

    def spy(model, task, clean, *corrupted):
        batches.append({tuple(x.flatten().tolist()) for x in clean.inputs})
        return PatchedModel(model, task, clean, *corrupted)

    monkeypatch.setattr(ablate, "PatchedModel", spy)
    ablate.find_circuit(planted, TASK, count=256)
    many, few, fresh, measured = batches
    assert len(fresh) == 256 and not (few | many) & (fresh | measured)


def test_a_model_may_use_its_memory_again():
    """One buffer holds the pattern of each layer in turn: it is recorded as it was."""
    buffer = torch.zeros(9, 12, 12)

    def reusing(x, heads):
        def through_buffer(f):
            return lambda pattern, values: f(buffer.copy_(pattern), values)

        return planted(x, {head: through_buffer(f) for head, f in heads.items()})

    reusing.heads, inputs = planted.heads, TASK.draw("validation", 9).inputs
    assert torch.equal(*(ablate.record_reads(m, inputs)[0, 0][0] for m in (reusing, planted)))
