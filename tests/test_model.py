"""Sequences; the weights of the transformer, optimizers, devices."""

import itertools
import math

import train
from data import Task
from model import Muon, make_optimizers
from tests.common import TINY, random_model

import pytest
import torch
from torch._subclasses import FakeTensorMode


def test_batches_stay_what_they_are():
    """By a sum that depends on the order of all numbers, within their last bits."""
    total = 0.0
    for D, K in itertools.product((1, 3, 8), (2, 4)):
        for tensor in Task(4, D, K, targets=[D], seed=7).draw("training", 7):
            weights = torch.arange(tensor.numel(), dtype=torch.float64).cos()
            total += (tensor.flatten().double() @ weights).item()
    assert total == pytest.approx(-612.5669, abs=0.01)


def test_weights_start_as_gpt_2s():
    """Their standard deviation is 0.02, less where they add to the residual stream; --qk-std."""
    shape = "--layers 4 --heads 2 --K 64 --qk-std 0.05 --D 1 --device cpu"
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


def test_vectors_never_decay():
    """With a zero gradient only matrices change, by the share lr * decay."""
    model = train.build(train.parse_flags(TINY))
    for parameter in model.parameters():
        parameter.data.fill_(1)
        parameter.grad = torch.zeros_like(parameter)
    for part in make_optimizers(model, "muon", 0.1, 0.99, 2):
        part.step()
    for parameter in model.parameters():
        expected = torch.full_like(parameter, 0.8 if parameter.ndim == 2 else 1)
        torch.testing.assert_close(parameter.data, expected)


def test_products_are_bfloat16_if_asked_but_attention_is_not():
    """A head reads rows that sum to 1 within float32; predictions differ, by a few percent."""
    model, task, _ = random_model("--positions", "rope")
    x, said, sums = task.draw("validation", 64).inputs, [], []

    def reads(pattern, values):
        sums.append(pattern.sum(-1))
        assert pattern.dtype == values.dtype == torch.float32
        return pattern @ values

    for model.dtype in torch.float32, torch.bfloat16:
        said.append(model(x, dict.fromkeys(model.heads, reads)))
    torch.testing.assert_close(torch.stack(sums), torch.ones(8, 64, task.T))
    difference = (said[0] - said[1]).norm() / said[0].norm()
    assert 1e-4 < difference < 0.05


def test_hook_points_are_what_is_read_and_written():
    """PyTorch's hooks see the pattern and the values that a head's function gets, and what it
    writes; they may replace them."""
    model, task, _ = random_model("--positions", "rope")
    x, seen, read, layer = task.draw("validation", 5).inputs, {}, [], model.blocks[0]

    def silent(pattern, values):
        read.append((pattern, values))
        return 0 * values

    for name in "pattern", "v", "z":
        point = getattr(layer, name)
        point.register_forward_hook(lambda _, __, y, n=name: seen.update({n: y.clone()}))
    silenced = model(x, {(0, 0): silent, (0, 1): silent})
    for name, expected in zip(("pattern", "v"), zip(*read, strict=True), strict=True):
        torch.testing.assert_close(seen[name], torch.stack(expected, 1))
    assert not seen["z"].any()
    for point in layer.pattern, layer.z:
        handle = point.register_forward_hook(lambda _, __, y: 0 * y)
        torch.testing.assert_close(model(x), silenced)
        handle.remove()
    with pytest.raises(ValueError, match="must write"):  # and not be broadcast
        model(x, {(0, 0): lambda pattern, values: values[:, :1]})


def test_no_tensor_is_on_a_wrong_device(monkeypatch):
    """A GPU without a GPU: under FakeTensorMode tensors have a device and a shape, and no numbers.
    The device is "meta", which every build of PyTorch can index."""
    flags = train.parse_flags([*TINY, "--positions", "rope", "--targets", "last"])
    task = train.task_of(flags)
    autocast, batch = torch.autocast, task.draw("training", 8)
    monkeypatch.setattr(torch, "autocast", lambda kind, *more, **how: autocast("cpu", *more, **how))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = train.build(flags)
        batch = batch.to("meta")
        task.losses(model(batch.inputs), batch).mean().backward()
        assert {parameter.grad.device.type for parameter in model.parameters()} == {"meta"}
