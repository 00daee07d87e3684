"""Sequences; the transformer with heads replaced, RoPE, weights, optimizers, dtypes, devices."""

import itertools
import math

import ablate
import data
import train
from model import Muon, Transformer, make_optimizers
from tests.common import TINY, output_of

import pytest
import torch
from torch._subclasses import FakeTensorMode


# ---- data


def test_batches_are_those_of_the_first_release():
    """By a sum that depends on the order of all numbers, within their last bits."""
    cases = [dict(task="conditional", rotary="qk")]
    for D in range(1, 9):
        cases += [dict(N=4, D=D), dict(N=3, D=D, K=2, ks=[D], rotary="qk")]
    index, total = torch.tensor([0, 1, 5, 12345, -1, -2, -1048577]), 0.0
    for how, seed in itertools.product(cases, (0, 7)):
        for tensor in data.make_batch(seed, index, **how):
            weights = torch.arange(tensor.numel(), dtype=torch.float64).cos()
            total += (tensor.flatten().double() @ weights).item()
    assert total == pytest.approx(-652.106, abs=0.01)


def test_batches_are_the_same_whatever_the_default_dtype():
    expected = data.make_batch(0, torch.arange(9))
    torch.set_default_dtype(torch.float64)
    try:
        batch = data.make_batch(0, torch.arange(9))
        assert Transformer(28, 4, 8, 4, 1, 1, 8, 8)(batch.inputs).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    for tensor, other in zip(expected, batch, strict=True):
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype


def test_normal_numbers_are_finite():
    extremes = data.standard_normal(torch.tensor([-1, 0, 2**63 - 1, -(2**63)]))
    assert extremes.isfinite().all() and 5 < extremes.max() == -extremes.min() < 6


def test_plateaus_are_what_averaging_gives():
    """On z of conditional retrieval: zero, the mean of all z, or of all z of the right x."""
    N, batch = 4, data.make_batch(0, torch.arange(3000), task="conditional")
    x, z = (batch.inputs[:, place : 3 * N * N : 3, :4] for place in (0, 2))  # (B, 16, 4)
    targets = batch.targets[..., 8:]
    fits = (x[:, None] == batch.targets[:, :, None, :4]).all(-1).float()  # (B, N, 16)
    means = [torch.zeros_like(targets), z.mean(1, keepdim=True).expand_as(targets), fits @ z / N]
    for predictions, n in zip(means, (math.inf, N * N, N), strict=True):
        assert abs((predictions - targets).square().mean() - data.average_loss(n)) < 0.02


def test_a_worked_sequence_can_be_solved_from_its_text():
    lines = output_of(data, "--N", 3, "--D", 2, "--seed", 5).splitlines()
    follows = {}
    for line in lines[3:5]:
        names = line[10:].split()
        follows |= zip(names[::2], names[1::2], strict=True)
    for name in lines[5][10:].split():
        assert f"  {name}: {follows[name]} {follows[follows[name]]}" in lines
    words = " ".join(output_of(data, "--task", "conditional", "--seed", 5).split())
    assert " B3 C3 D3 " in words and " B3 C1 D3.1 " in words


# ---- the model


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_what_no_head_can_write_is_refused():
    model, x = Transformer(12, 2, 6, 5, 3, 2, 16, 8), torch.randn(4, 12, 6)
    for shape in ((1, 12, 8), (4, 12, 1), (12, 8)):  # all of which can be broadcast
        with pytest.raises(ValueError, match="a head writes"):
            model(x, {(0, 0): lambda pattern, values, shape=shape: torch.zeros(shape)})
    for nowhere in ((3, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="there is no head"):
            model(x, heads={nowhere: torch.matmul})


def test_an_encoding_may_bias_scores():
    """By head: with -1000 everywhere but on the token itself, a head reads itself alone."""
    bias = torch.stack([torch.zeros(12, 12), 1000 * torch.eye(12) - 1000])
    model = Transformer(12, 2, 6, 5, 2, 2, 16, 8, bias=bias)
    _, patterns = model(torch.randn(4, 12, 6), return_patterns=True)
    for layer in patterns:
        close(layer[:, 1], torch.eye(12).expand(4, 12, 12))
        assert (layer[:, 0, 1:, 0] > 0.01).all() and model(torch.randn(4, 12, 6)).isfinite().all()


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
        close(a, b, 0.01)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_shared_weights_are_trained_once_and_gains_never_decay(optimizer):
    """With a zero gradient only matrices change, unless frozen, by the share lr * decay."""
    words = "--optimizer", optimizer, "--weight-decay", "2", "--layers", "3", "--lr", "0.1"
    flags = train.parse_flags([*TINY, *words])
    model = train.build(flags)
    first, second, third = model.blocks
    second.up, third.qkv.weight = first.up, first.qkv.weight
    first.gain = torch.nn.Parameter(torch.ones(flags.heads))
    for parameter in model.parameters():
        parameter.data.fill_(1)
        parameter.grad = torch.zeros_like(parameter)
    third.up.weight.grad = third.up.bias.grad = None
    for part in make_optimizers(model, flags):
        part.step()
    for name, parameter in model.named_parameters():
        decays = name.endswith("weight") and ".ln" not in f".{name}" and "2.up" not in name
        close(parameter.data, torch.full_like(parameter, 0.8 if decays else 1))


@pytest.mark.parametrize(
    "text",
    [
        "--dtype bfloat16",
        "--rotary qk --no-causal --no-mlp --optimizer adamw --ema 0 --clip 0",
        "--targets 2 --examples 0 --head-size 6",
        "--task conditional --D 3 --rotary qk",
    ],
)
def test_no_tensor_is_on_a_wrong_device(text, monkeypatch):
    """A GPU without a GPU: under FakeTensorMode tensors have a device and a shape, and no numbers.
    The device is "meta", which every build of PyTorch can index; "cuda" only one linked to CUDA."""
    small = "--layers 2 --heads 2 --width 16 --N 3 --batch 4 --D 2 --steps 1 --device cpu"
    flags = train.parse_flags([*small.split(), *text.split()]).replace(device="meta")
    task, index = flags.problem, data.batch_index(flags.seed, 0, flags.batch, flags.examples)
    autocast, adamw, build, outcomes = torch.autocast, torch.optim.AdamW, train.build, []

    def build_there(flags):
        with torch.device("meta"):
            return build(flags)

    def log_row(flags, state, intervene):
        outcomes.append(train.predict(state.averaged.module, flags, index)[0])
        return dict(step=state.step, val=0, train=0)

    # what PyTorch refuses on "meta", and what needs numbers: here, in the log and in files
    monkeypatch.setattr(train, "build", build_there)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch, "autocast", lambda kind, *more, **how: autocast("cpu", *more, **how))
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, fused, **how: adamw(*a, **how))
    monkeypatch.setattr(data, "batch_index", lambda *_: index)
    monkeypatch.setattr(train, "log_row", log_row)
    for name in "write_file", "print_row":
        monkeypatch.setattr(train, name, lambda *_: None)

    with FakeTensorMode(allow_non_fake_inputs=True):
        # a training step between two evaluations of the averaged model
        state = train.State(flags)
        assert train.train(flags, state)
        outcomes += [*state.model.parameters(), state.train_loss]

        # attention, and every kind of ablation
        batch = train.sequences(flags, data.held_out("search", 4, flags.device))
        reference = ablate.Reference(state.model, flags, n=4)
        patched = ablate.PatchedModel(state.model, flags, batch, reference)
        pairs = itertools.product(("q", "1b", "1a+1"), ("q", "1b", "1a+1", "1b*"))
        paths = [ablate.Path(0, 0, *pair) for pair in pairs]
        outcomes += [patched.circuit(paths, by) for by in (ablate.MEAN, ablate.ANOTHER)]
        frozen = ablate.frozen_heads(paths, task, batch.positions)
        outcomes += [patched.knock_out(paths), patched.losses(frozen)]
        for path in paths:
            pattern, _ = reference.reads[path[:2]]
            outcomes.append(ablate.attention_on(pattern, path, task, batch.positions))
    assert {tensor.device.type for tensor in outcomes} == {"meta"}
