"""memories.py against autograd, sums written out, a simulation and planted capacities."""

import math
from unittest import mock

import numpy as np
import pytest
import torch

from mechanisms import memories


def embeddings(facts, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, facts, d, generator=generator, dtype=torch.double)
    return torch.nn.functional.normalize(vectors, dim=2)


# ---- one step


def test_one_step_is_a_gradient_step_from_zero():
    U, E = embeddings(15, 6)
    W = torch.zeros(6, 6, dtype=torch.double, requires_grad=True)
    torch.nn.functional.cross_entropy(E @ W.T @ U.T, torch.arange(15)).backward()
    torch.testing.assert_close(memories.one_step(U, E), -W.grad)


def test_one_step_is_the_sum_of_the_slides():
    U, E = embeddings(5, 4)
    W = torch.zeros(4, 4, dtype=torch.double)
    for z in range(5):
        for k in range(5):
            W += ((z == k) - 1 / 5) / 5 * torch.outer(U[k], E[z])
    torch.testing.assert_close(memories.one_step(U, E), W)


def test_one_step_on_orthonormal_embeddings_is_exact():
    U, E = torch.eye(6), torch.eye(6)[torch.randperm(6)]
    readouts = U @ memories.one_step(U, E) @ E.T
    torch.testing.assert_close(readouts, (torch.eye(6) - 1 / 6) / 6)


def test_one_step_recall_from_all_to_few():
    assert memories.one_step_recall(0, facts=3, d=200) == 1
    assert memories.one_step_recall(0, facts=400, d=4) < 0.2


# ---- what one step is expected to recall


def test_predicted_recall_is_the_mean_of_its_model():
    """Drawn with numpy instead of integrated."""
    random, facts, d, draws = np.random.default_rng(0), 40, 16, 20000
    right = 1 + random.normal(size=draws) * math.sqrt(facts - 1) / d
    norm = np.sqrt(right**2 + (facts - 2) / d + 1)
    largest = np.full(draws, -np.inf)
    for _ in range(facts - 1):
        direction = random.normal(size=(d, draws))
        largest = np.maximum(largest, norm * direction[0] / np.linalg.norm(direction, axis=0))
    assert memories.predicted_recall(facts, d) == pytest.approx(np.mean(right > largest), abs=0.015)


def test_prediction_meets_real_memories():
    measured = [memories.one_step_recall(seed, facts=123, d=64) for seed in range(4)]
    assert memories.predicted_recall(123, 64) == pytest.approx(np.mean(measured), abs=0.006)


# ---- capacity


@pytest.mark.parametrize("true_capacity", [3, 50, 137, 700])
@pytest.mark.parametrize("memory", ["one step", "matrix", "MLP"])
def test_bisection_finds_a_planted_capacity(memory, true_capacity):
    recalls = mock.Mock(side_effect=lambda seed, facts, d: float(facts <= true_capacity))
    learns = mock.Mock(side_effect=lambda facts, *rest: facts <= true_capacity)
    with mock.patch.multiple(memories, one_step_recall=recalls, learns=learns):
        found = memories.capacity(0, memory, 40, steps=1)
    assert true_capacity / 1.02 - 1 <= found <= true_capacity
    assert recalls.called == (memory == "one step") and learns.called == (memory != "one step")


@pytest.mark.parametrize("hidden", [0, 16])
def test_learns_few_facts_but_not_many(hidden):
    generator = torch.Generator().manual_seed(0)
    assert memories.learns(6, 8, hidden, 200, generator)
    assert not memories.learns(400, 8, hidden, 50, generator)
