"""Models that are none of ours: the circuit that is validated is the true one, or none is."""

import ablate
from data import Task
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
