"""The weights of the transformer, optimizers, devices."""

import math
import subprocess
import sys

import train
from model import Muon, make_optimizers
from tests.common import HERE, TINY, random_model

import pytest
import torch
from torch._subclasses import FakeTensorMode


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
    x, said = task.draw("validation", 64).inputs, []

    def reads(pattern, values):
        torch.testing.assert_close(pattern.sum(-1), torch.ones(64, task.T))
        assert values.dtype == torch.float32
        return pattern @ values

    for model.dtype in torch.float32, torch.bfloat16:
        said.append(model(x, dict.fromkeys(model.heads, reads)))
    difference = (said[0] - said[1]).norm() / said[0].norm()
    assert 1e-4 < difference < 0.05


@pytest.mark.skipif(not torch.set_flush_denormal(True), reason="this processor cannot")
def test_the_smallest_numbers_are_zero():
    """Those with which a processor computes slowly, on a tensor for which it takes all threads."""
    code = "import torch, model; print((torch.full([10**7], 1e-30) * 1e-10).count_nonzero().item())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=HERE) == b"0\n"


def test_hook_points_are_what_is_read_and_written():
    """PyTorch's hooks may replace patterns, values, and what heads write."""
    model, task, _ = random_model("--positions", "rope")
    x = task.draw("validation", 5).inputs

    def silent(pattern, values):
        return 0 * values

    silenced = model(x, {(0, 0): silent, (0, 1): silent})
    for name in "pattern", "v", "z":
        point = getattr(model.blocks[0], name)
        handle = point.register_forward_hook(lambda _, __, y: 0 * y)
        torch.testing.assert_close(model(x), silenced)
        handle.remove()
    with pytest.raises(ValueError, match="must write"):  # and not be broadcast
        model(x, {(0, 0): lambda pattern, values: values[:, :1]})
    with pytest.raises(ValueError, match="no head"):
        model(x, {(0, 2): silent})


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
