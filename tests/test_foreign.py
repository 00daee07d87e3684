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
    model, steps = Mine(), 500
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
def test_the_only_circuit_of_an_adversary_is_found_if_it_has_one(
    model, layers, heads, circuit, verdict
):
    report = ablate.find_circuit(model, TASK)
    assert verdict in report["verdict"] and report["validated"] == bool(circuit), report["verdict"]
    if circuit:
        assert {*ablate.paths_in(report)} == {*paths_from(*circuit.split(", "))}


@pytest.mark.parametrize("fault", ["never", "twice", "pattern", "values", "answers", "not finite"])
def test_a_model_that_would_be_measured_wrongly_is_refused(fault):
    def wrong(x, heads):
        f = heads.get((1, 0), torch.matmul)
        if fault == "never":
            heads = {head: heads[head] for head in heads if head != (1, 0)}
        if fault == "twice":
            planted(x, heads)
        if fault == "pattern":
            heads = heads | {(1, 0): lambda pattern, values: f(pattern[:, -4:], values)}
        if fault == "values":
            heads = heads | {(1, 0): lambda pattern, values: f(pattern, values[:, -4:])}
        answers = planted(x, heads)
        if fault == "not finite":
            answers[0] = torch.nan
        return answers[:, :1] if fault == "answers" else answers

    wrong.heads = planted.heads
    with pytest.raises(ValueError, match="the model"):
        ablate.find_circuit(wrong, TASK)


def test_a_model_may_use_its_memory_again():
    """One buffer holds the pattern of each layer in turn: it is recorded as it was."""
    buffer = torch.zeros(9, 12, 12)

    def reusing(x, heads):
        def through_buffer(f):
            def write(pattern, values):
                buffer[: len(pattern)] = pattern
                return f(buffer[: len(pattern)], values)

            return write

        return planted(x, {head: through_buffer(f) for head, f in heads.items()})

    reusing.heads, inputs = planted.heads, TASK.draw("validation", 9).inputs
    assert torch.equal(*(ablate.record_reads(m, inputs)[0, 0][0] for m in (reusing, planted)))
