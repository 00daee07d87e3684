"""mechanisms/memories.py against autograd, sums written out, simulations and planted capacities."""

import json
import math
from unittest import mock

import numpy as np
import pytest
import torch

from mechanisms import memories
from tests.common import assert_refused, contents, run_main


TINY = {"one step": (8, 12), "matrix": (4, 6), "MLP": (4, 6)}


def embeddings(facts, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(2, facts, d, generator=generator, dtype=torch.double)
    return torch.nn.functional.normalize(vectors, dim=2)


# ---- the gradient lemma and one step


def test_lemma_is_the_gradient():
    """Against autograd through PyTorch's own cross-entropy with soft targets."""
    U, E = embeddings(12, 7)[0][:9], embeddings(12, 7)[1]
    joint = torch.rand(12, 9, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    joint /= joint.sum()
    W = torch.randn(7, 7, dtype=torch.double, requires_grad=True)
    marginal = joint.sum(1)
    targets = joint / marginal[:, None]
    loss = torch.nn.functional.cross_entropy(E @ W.T @ U.T, targets, reduction="none")
    (loss * marginal).sum().backward()
    torch.testing.assert_close(memories.lemma_gradient(W.detach(), U, E, joint), W.grad)
    assert all(memories.lemma_error(seed) < 1e-12 for seed in range(3))


def test_lemma_error_sees_a_wrong_lemma():
    right = memories.lemma_gradient
    with mock.patch.object(memories, "lemma_gradient", lambda W, *rest: 1.001 * right(W, *rest)):
        assert memories.lemma_error(0) > 1e-4


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


def simulated_recall(facts, d, on_sphere, draws=20000):
    """The model behind predicted_recall, drawn with numpy instead of integrated."""
    random = np.random.default_rng(0)
    right = 1 + random.normal(size=draws) * math.sqrt(facts - 1) / d
    if not on_sphere:
        scale = math.sqrt((facts - 2) / d**2 + 2 / d)
        return np.mean(right > scale * random.normal(size=(facts - 1, draws)).max(0))
    norm = np.sqrt(right**2 + (facts - 2) / d + 1)
    largest = np.full(draws, -np.inf)
    for _ in range(facts - 1):
        direction = random.normal(size=(d, draws))
        largest = np.maximum(largest, norm * direction[0] / np.linalg.norm(direction, axis=0))
    return np.mean(right > largest)


@pytest.mark.parametrize("on_sphere", [False, True])
def test_predicted_recall_is_the_mean_of_its_model(on_sphere):
    expected = memories.predicted_recall(40, 16)[on_sphere]
    assert simulated_recall(40, 16, on_sphere) == pytest.approx(expected, abs=0.015)


def test_prediction_on_the_sphere_meets_real_memories():
    measured = [memories.one_step_recall(seed, facts=123, d=64) for seed in range(4)]
    gaussian, on_sphere = memories.predicted_recall(123, 64)
    assert abs(np.mean(measured) - on_sphere) < 0.006 < abs(np.mean(measured) - gaussian)


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


# ---- Zipf data


def test_zipf_errors_against_memories_formed_explicitly():
    d, tokens, answers = 20, 60, 5
    generator = torch.Generator().manual_seed(3)
    E = torch.randn(tokens, d, generator=generator).numpy().astype(float)
    U = torch.randn(answers, d, generator=generator).numpy().astype(float)
    E /= np.linalg.norm(E, axis=1)[:, None]
    U /= np.linalg.norm(U, axis=1)[:, None]
    p = np.array([x**-2.0 for x in range(1, tokens + 1)])
    p /= p.sum()
    expected = []
    for q in (np.ones(tokens), p, np.arange(1, tokens + 1) <= d / 8):
        W = sum(q[x] * np.outer(U[(x + 1) % answers], E[x]) for x in range(tokens))
        wrong = [np.argmax(U @ W @ E[x]) != (x + 1) % answers for x in range(tokens)]
        expected.append(p[wrong].sum())
    assert memories.zipf_errors(3, d, tokens, answers) == pytest.approx(expected, abs=1e-6)
    assert min(expected) > 0 and max(expected) < 1


# ---- the command


def run_tiny(*arguments):
    tiny = dict(WIDTHS=TINY, ZIPF_WIDTHS=(10, 20), LOADS=(0.05, 0.08))
    with mock.patch.multiple(memories, **tiny):
        return run_main(memories, *arguments)


def test_command_measures_draws_and_redraws(tmp_path):
    code, out, err = run_tiny("--steps", 5, "--seeds", 2, "--seed", 7, "--out", tmp_path / "new")
    assert (code, err) == (0, "") and "s left" in out
    assert sorted(path.name for path in contents(tmp_path)) == ["memories.json", "memories.png"]
    results = json.loads((tmp_path / "new/memories.json").read_text())
    assert [row["d"] for row in results["capacity"]] == [8, 12, 4, 6, 4, 6]
    assert all(len(row["values"]) == 2 for row in results["capacity"])
    row = results["one_step_recall"][0]
    assert row["values"] == [memories.one_step_recall(seed, row["facts"], 8) for seed in (7, 8)]

    # the figure alone, from the file alone
    before = contents(tmp_path)
    (tmp_path / "new/memories.png").unlink()
    with mock.patch.object(memories, "measure", side_effect=AssertionError):
        assert run_tiny("--plot-only", "--out", tmp_path / "new")[0] == 0
    assert contents(tmp_path) == before


def test_refusals(tmp_path):
    assert_refused(memories, "--steps", 0, says="must be at least 1")
    assert_refused(memories, "--seeds", 0, says="must be at least 1")
    assert_refused(memories, "--see", 2, says="unrecognized arguments")
    assert_refused(memories, "--plot-only", "--out", tmp_path, says="memories.json")
    for text in ("[", "[]", "{}"):
        (tmp_path / "memories.json").write_text(text)
        assert_refused(memories, "--plot-only", "--out", tmp_path, says="memories.json")
    assert_refused(memories, "--out", tmp_path / "memories.json", says="memories.json")
