"""Models that are none of ours: found and validated, or refused in one line that says why."""

import pytest
import torch

import ablate
import train
from data import UserError, make_batch
from test_all import planted
from tests.foreign import Mine


def flags_of(heads, layers=2):
    shape = f"--layers {layers} --heads {heads} --head-size 8 --D 1 --device cpu --dtype float32"
    return train.parse_flags(shape.split())


def search(model, heads=1):
    """The report on a model of D=1, and the names of the paths of its circuit."""
    flags = flags_of(heads)
    report = ablate.find_circuit(model, flags, count=256)
    return report, [*map("L{layer}H{head}: {reader} -> {read}".format_map, report["paths"])]


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
    report, paths = search(model.eval())
    assert report["validated"], report["verdict"]
    assert paths == ["L0H0: 1b -> 1a", "L1H0: q -> 1b"]


# ---- other ways to call the functions, on two layers with two heads


def two_heads(x, heads):
    """Calls the last head of each layer first. The circuit of `planted` is in L0H1 and L1H0; the
    other two heads bring each token a little of its own symbol."""

    def call(layer, head, pattern, values):
        return heads.get((layer, head), torch.matmul)(pattern, values)

    def writes(layer, here):
        def f(pattern, values):
            itself = torch.eye(x.shape[1]).expand_as(pattern)
            written = {}
            for head in (1, 0):
                written[head] = call(layer, head, pattern if head == here else itself, values)
            return written[here] + 0.01 * written[1 - here]

        return f

    return planted(x, {(0, 0): writes(0, 1), (1, 0): writes(1, 0)})


def test_heads_may_be_called_in_another_order():
    report, paths = search(two_heads, heads=2)
    assert report["verdict"] == "validated, complete"
    assert paths == ["L0H1: 1b -> 1a", "L1H0: q -> 1b"]


def unused(x, heads):
    """Calls f of layer 1, head 0, and goes on with what it would have written itself."""

    def ignored(pattern, values):
        heads.get((1, 0), torch.matmul)(pattern, values)
        return pattern @ values

    return planted(x, heads | {(1, 0): ignored})


class NoAttention:
    """Solves the problem by itself; its heads read all tokens alike, or each itself."""

    def __init__(self, itself):
        self.itself = itself

    def __call__(self, x, heads):
        T = x.shape[1]
        pattern = torch.eye(T) if self.itself else torch.full((T, T), 1 / T)
        answers = planted(x, {})
        for head in heads:
            answers = answers + 1e-3 * heads[head](pattern.expand(len(x), T, T), x[..., :4])[:, -4:]
        return answers


@pytest.mark.parametrize("itself", [True, False])
def test_a_model_without_attended_paths_is_not_validated(itself):
    report, paths = search(NoAttention(itself))
    assert not report["validated"] and not paths and "no path leads to x_1" in report["verdict"]


# ---- what cannot be searched


def by_layer(x, heads):
    """Gives f the patterns of all heads together, (B, 1, T, T)."""
    wrapped = {
        head: lambda p, v, f=f: f(p[:, None], v[:, None]).squeeze(1) for head, f in heads.items()
    }
    return planted(x, wrapped)


class Dropout(Mine):
    def forward(self, x, heads=None):
        return torch.nn.functional.dropout(super().forward(x, heads), 0.1)


REFUSED = [  # model, heads, what the line says
    (unused, 1, "do not depend on what f of layer 1, head 0 returns"),
    (lambda x, heads: planted(x, heads), 2, "the model never calls f of layer 0, head 1"),
    (lambda x, heads: planted(x, {}), 1, "the model never calls f of layer 0, head 0"),
    (lambda x, heads: planted(x, heads)[:, :1], 1, "a tensor of shape (16, 4, 4)"),
    (lambda x, heads: (planted(x, heads), 0), 1, "a tensor of shape (16, 4, 4)"),
    (lambda x, heads: planted(x, heads).argmax(-1), 1, "a tensor of shape (16, 4, 4)"),
    (lambda x, heads: planted(x, heads) * torch.nan, 1, "predictions that are not finite"),
    (lambda x: planted(x, {}), 1, "takes 1 positional argument but 2 were given"),
    (by_layer, 1, "a pattern (B, T, T)"),
    (Mine().bfloat16().eval(), 1, "must have the same dtype"),
    (Mine().to("meta").eval(), 1, "meta"),
    (Dropout(), 1, "the model answers otherwise the second time"),
]


@pytest.mark.parametrize("model, heads, says", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_searched_is_refused_in_one_line(model, heads, says):
    with pytest.raises(UserError) as refusal:
        ablate.find_circuit(model, flags_of(heads))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
