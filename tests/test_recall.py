"""mechanisms/recall.py against models with a time axis, loops, and small-step gradient descent."""

import math

import pytest
import torch

from mechanisms import recall


def sequences(S, R, noise, length, batch=6, seed=0):
    """Counts (B, V), and tokens (B, length) that have them, in random order but EOS last."""
    generator = torch.Generator().manual_seed(seed)
    subject, relation = (torch.randint(n, (batch,), generator=generator) for n in (S, R))
    counts = recall.draw_counts(subject, relation, S, R, noise, length, generator)
    rows = []
    for row in counts.long():
        tokens = torch.arange(len(row)).repeat_interleave(row)
        rows.append(torch.cat([tokens[:-1][torch.randperm(length - 1)], tokens[-1:]]))
    return subject, relation, counts, torch.stack(rows)


# ---- the data


def test_every_answer_is_right_for_as_many_subjects():
    facts = recall.draw_facts(12, 5, 4, torch.Generator().manual_seed(0))
    assert facts.shape == (12, 5)
    for r in range(5):
        assert facts[:, r].bincount(minlength=20)[4 * r : 4 * r + 4].tolist() == [3] * 4
    assert any((facts[:, 0] % 4 != facts[:, r] % 4).any() for r in range(1, 5))


def test_counts_hold_subject_relation_noise_and_eos():
    S, R, noise, length = 6, 3, 4, 13
    generator = torch.Generator().manual_seed(0)
    subject, relation = torch.arange(600) % S, torch.arange(600) % R
    counts = recall.draw_counts(subject, relation, S, R, noise, length, generator)
    assert (counts[:, :S] == torch.nn.functional.one_hot(subject, S)).all()
    assert (counts[:, S : S + R] == torch.nn.functional.one_hot(relation, R)).all()
    assert (counts[:, -1] == 1).all() and (counts.sum(1) == length).all()
    torch.testing.assert_close(
        counts[:, S + R : -1].mean(0), torch.full((4,), 2.5), atol=0.2, rtol=0
    )


# ---- the models, against explicit ones with a time axis


def test_linear_attention_is_that_of_a_sequence():
    """One-hot tokens x_t: logits = W_OV sum_t x_t (x_t' W_KQ x_T)."""
    _, _, counts, tokens = sequences(S=5, R=3, noise=4, length=11)
    w, output = torch.randn(13, requires_grad=True), torch.randn(7, 13, requires_grad=True)
    x = torch.nn.functional.one_hot(tokens, 13).float()  # (B, T, V)
    W_KQ = torch.cat([torch.randn(13, 12), w[:, None]], 1)  # only the column of EOS is asked
    scores = x @ W_KQ @ x[:, -1, :, None]  # (B, T, 1)
    explicit = (x * scores).sum(1) @ output.T
    logits = recall.linear_attention(counts, w, output)
    torch.testing.assert_close(logits, explicit)
    weight = torch.randn(logits.shape)
    for ours, theirs in zip(
        torch.autograd.grad((logits * weight).sum(), (w, output)),
        torch.autograd.grad((explicit * weight).sum(), (w, output)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_softmax_attention_is_that_of_a_sequence():
    """Against PyTorch's own attention, head by head, and torch.nn.Linear layers."""
    _, _, counts, tokens = sequences(S=5, R=3, noise=4, length=11)
    E, U = torch.randn(13, 6), torch.randn(7, 6)
    Q, K, V, output = (torch.randn(3, 2, 6) for _ in range(4))
    first, second = torch.randn(9, 6), torch.randn(9, 6)
    x = E[tokens]  # (B, T, d)
    total = 0
    for q, k, v, o in zip(Q, K, V, output, strict=True):
        attention = torch.nn.functional.scaled_dot_product_attention
        total = total + attention(x[:, -1:] @ q.T, x @ k.T, x @ v.T)[:, 0] @ o
    hidden = torch.nn.functional.linear(total, first).clamp(min=0)
    explicit = torch.nn.functional.linear(total + hidden @ second, U)
    logits = recall.softmax_attention(counts, E, U, Q, K, V, output, first, second)
    torch.testing.assert_close(logits, explicit, rtol=1e-4, atol=1e-4)


def test_measures_against_loops():
    S, R, D = 4, 3, 2
    facts = recall.draw_facts(S, R, D, torch.Generator().manual_seed(1))
    subject, relation = torch.tensor([0, 3, 2]), torch.tensor([2, 0, 1])
    logits = torch.randn(3, R * D)
    sums = [0.0] * 4
    for i in range(3):
        s, r = int(subject[i]), int(relation[i])
        p = [math.exp(x) for x in logits[i].tolist()]
        p = [x / sum(p) for x in p]
        sums[0] -= math.log(p[facts[s, r]])
        sums[1] -= math.log(sum(p[r * D + j] for j in range(D)))
        sums[2] -= math.log(sum(p[facts[s, other]] for other in range(R)))
        sums[3] += 1 - p[facts[s, r]]
    found = recall.measures(logits, subject, relation, facts, D)
    assert found == pytest.approx([x / 3 for x in sums], abs=1e-5)


# ---- the gradient flow


@pytest.mark.parametrize("S,R,D", [(8, 3, 4), (4, 6, 2)])
def test_flow_is_small_step_gradient_descent(S, R, D):
    """All facts at once, each beside the same noise, all weights free: nothing of the symmetry
    that the two equations of the flow rest on is put in."""
    init, lr = 0.01, 0.05
    facts = recall.draw_facts(S, R, D, torch.Generator().manual_seed(0))
    subject, relation = torch.cartesian_prod(torch.arange(S), torch.arange(R)).T
    noise = torch.ones(S * R, 3)
    kinds = [torch.nn.functional.one_hot(x, n).double() for x, n in ((subject, S), (relation, R))]
    counts = torch.cat([*kinds, noise], 1)
    w = torch.full((S + R + 3,), init, dtype=torch.double, requires_grad=True)
    output = torch.full((R * D, S + R + 3), init, dtype=torch.double, requires_grad=True)
    curve = []
    for _ in range(6000):
        logits = recall.linear_attention(counts, w, output)
        curve.append(recall.measures(logits.detach(), subject, relation, facts, D)[1:3])
        loss = torch.nn.functional.cross_entropy(logits, facts.flatten())
        for x, gradient in zip((w, output), torch.autograd.grad(loss, (w, output)), strict=True):
            x.data -= lr * gradient
    assert curve[0][0] > 0.9 * math.log(R) and curve[-1][0] < 0.1 * math.log(R)
    assert curve[0][1] > 0.9 * math.log(D) and curve[-1][1] < 0.1 * math.log(D)
    for i, kind in enumerate([(R, R, D), (S, D, R)]):
        for now, loss in list(recall.flow(*kind, init, end=5900 * lr))[::50]:
            assert curve[round(now / lr)][i] == pytest.approx(loss, abs=0.02)


def test_flow_grows_at_the_rate_of_its_linearisation():
    """With a tiny start the margin grows as exp(2 rate t), rate = sqrt((n-1) / (n c)) / tokens."""
    points = list(recall.flow(tokens=4, classes=4, class_size=8, init=1e-6, end=130))
    margins = {t: math.log((4 - 1) / math.expm1(loss)) for t, loss in points if t > 60}
    (first, low), *_, (last, high) = margins.items()
    rate = math.sqrt(3 / (4 * 8)) / 4
    assert high < 0.01 and math.log(high / low) / (last - first) == pytest.approx(
        2 * rate, rel=0.01
    )


# ---- training


def test_training_passes_through_the_plateau():
    """Entry before exit, as the flow says; between them the loss is ln D and p(a*) is 1 / D."""
    S, R, D = 16, 2, 4
    entry, left, *expected = recall.plateau(0, (S, R, D, 1e-3))
    assert [entry, left] == pytest.approx(expected, rel=0.08) and entry < left
    rows = recall.train_linear(0, S, R, D, 1e-3, steps=round(left / 0.5), lr=0.5, batch=512)
    start, middle = rows[0], min(rows, key=lambda row: abs(row[0] - (entry + left) / 2))
    assert start[1:] == pytest.approx([math.log(R * D), math.log(R), math.log(D), 7 / 8], abs=1e-3)
    assert middle[1:] == pytest.approx([math.log(D), 0, math.log(D), 3 / 4], abs=0.06)


def test_many_relations_turn_the_order_round():
    entry, left, *expected = recall.plateau(0, (4, 16, 4, 1e-2))
    assert entry > left and expected[0] > expected[1]


def test_facts_are_stored_where_there_is_room():
    small = dict(S=4, R=4, D=2, d=8, head_size=4, noise=2, length=6)
    assert recall.stored_share(0, 4, 32, steps=400, **small) > 0.97
    assert recall.stored_share(0, 1, 0, steps=20, **small) < 0.6
