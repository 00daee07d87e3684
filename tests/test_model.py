"""Sequences; the weights of the transformer, optimizers, devices."""

import itertools
import math
from functools import partial

import train
from data import Task
from extras.studies import places, tables
from model import Muon, Transformer, make_optimizers
from tests.common import TINY

import pytest
import torch
from torch._subclasses import FakeTensorMode


def test_batches_stay_what_they_are():
    """By a sum that depends on the order of all numbers, within their last bits."""
    cases = [partial(places.random20, N=2, D=1), partial(places.fixed6, N=2, D=1)]
    cases += [partial(tables.Shuffled, D=2), tables.Conditional]
    for D in range(1, 9):
        cases += [partial(Task, N=4, D=D), partial(Task, 3, D, K=2, targets=[D])]
    total = 0.0
    for task, seed in itertools.product(cases, (0, 7)):
        for tensor in task(seed=seed).draw("training", 7):
            weights = torch.arange(tensor.numel(), dtype=torch.float64).cos()
            total += (tensor.flatten().double() @ weights).item()
    assert total == pytest.approx(202.859, abs=0.01)


@pytest.mark.parametrize(
    "name, G, N, D",
    [("random20", 20, 2, 1), ("fixed20", 20, 2, 1), ("random6", 6, 4, 1), ("random9", 9, 2, 3)],
)
def test_pairs_stand_whole_among_distractors(name, G, N, D):
    """Who equals whom, what is asked, where pairs stand."""
    B, block = 1000, 2 * N + G
    task = getattr(places, name)(N=N, D=D, seed=3)
    batch = task.draw("training", B)
    shown, sequence = batch.inputs, torch.arange(B)[:, None]
    query, *ends = batch.places.unbind(-1)  # (B, N)
    assert query.min() == D * block
    before, answers = query, batch.answers[sequence, query - D * block].unflatten(-1, (D, -1))
    for k, (key, value) in enumerate(zip(ends[::2], ends[1::2], strict=True)):
        start = (D - 1 - k) * block
        assert torch.equal(value, key + 1) and start <= key.min() and value.max() < start + block
        assert torch.equal(shown[sequence, before], shown[sequence, key])
        assert torch.equal(answers[:, :, k], shown[sequence, value])
        expected = {5, 17} if name == "fixed20" else {*range(start, start + block - 1)}
        assert {*key.flatten().tolist()} == expected
        before = value
    for tokens, numbers in zip(shown.tolist(), batch.symbols.tolist(), strict=True):
        assert len({*map(tuple, tokens)}) == len({*numbers}) == D * block - (D - 1) * N


def test_the_first_pairs_may_come_first():
    """The pairs of step 1, then of step 2, then of step 3."""
    batch, roles = tables.Forward(D=3).draw("training", 100), [*tables.Forward(D=3).roles]
    order = [roles.index(role) for role in ("1b", "2b", "3b", "q")]
    assert (batch.places[..., order].diff() > 0).all() and not (batch.places[..., 0] < 24).any()


def test_what_a_head_reads_may_be_changed_in_place():
    model, x = Transformer(12, 2, 6, 5, 3, 2, 16, 8), torch.randn(4, 12, 6)

    def in_place(pattern, values):
        return pattern.fill_(0) @ values

    _, expected = model(x, return_patterns=True)
    _, patterns = model(x, {(0, 0): in_place}, return_patterns=True)
    assert torch.equal(patterns[0], expected[0])


def test_weights_start_as_gpt_2s():
    """Their standard deviation is 0.02, less where they add to the residual stream; --qk-std."""
    shape = "--layers 4 --heads 2 --K 64 --qk-std 0.05 --D 1 --dtype float32 --device cpu"
    for name, parameter in train.build(train.parse_flags(shape.split())).named_parameters():
        if parameter.ndim == 2:
            adds = ".out." in name or ".down." in name
            expected = [0.05, 0.05, 0.02] if "qkv" in name else [0.02 / math.sqrt(8 if adds else 1)]
            deviations = [part.std().item() for part in parameter.chunk(len(expected))]
            assert deviations == pytest.approx(expected, rel=0.05), name
        assert not name.endswith("bias") or not parameter.any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_pytorchs_own():
    """Which computes in bfloat16 alone, matrix by matrix."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape) / 9) for shape in ((16, 16), (64, 16), (16, 64))]
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours]
    same = dict(lr=0.1, weight_decay=0.5, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    muons = Muon(ours, 0.1, 0.5, torch.bfloat16), torch.optim.Muon(theirs, **same)
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape)
        for optimizer in muons:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_vectors_never_decay(optimizer):
    """With a zero gradient only matrices change, by the share lr * decay."""
    model = train.build(train.parse_flags(TINY))
    for parameter in model.parameters():
        parameter.data.fill_(1)
        parameter.grad = torch.zeros_like(parameter)
    for part in make_optimizers(model, optimizer, 0.1, 0.99, 2):
        part.step()
    for parameter in model.parameters():
        expected = torch.full_like(parameter, 0.8 if parameter.ndim == 2 else 1)
        torch.testing.assert_close(parameter.data, expected)


def test_no_tensor_is_on_a_wrong_device(monkeypatch):
    """A GPU without a GPU: under FakeTensorMode tensors have a device and a shape, and no numbers.
    The device is "meta", which every build of PyTorch can index."""
    words = "--dtype", "bfloat16", "--positions", "rope", "--targets", "last"
    flags = train.parse_flags([*TINY, *words])
    task = train.task_of(flags)
    autocast, batch = torch.autocast, task.draw("training", 8)
    monkeypatch.setattr(torch, "autocast", lambda kind, *more, **how: autocast("cpu", *more, **how))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = train.build(flags)
        batch = batch.to("meta")
        task.losses(model(batch.inputs), batch).mean().backward()
        assert {parameter.grad.device.type for parameter in model.parameters()} == {"meta"}
