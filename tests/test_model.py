"""The transformer against PyTorch's own, against itself by hand, and with patched patterns."""

import itertools
import math

from parts import config

import pytest
import torch

import data
import train
from model import Transformer, rotate
from tests.common import TINY


def tiny_model(layers=3, heads=2, width=16, causal=True, mlp=True, qk=False, head_size=8):
    """A model of 12 tokens of 6 numbers, 2 of them queries, and 4 sequences for it."""
    torch.manual_seed(0)
    angles = data.rotary_angles(12, head_size) if qk else None
    model = Transformer(12, 2, 6, 5, layers, heads, width, head_size, mlp, causal, angles)
    for p in model.parameters():  # biases and gains away from 0 and 1, patterns from uniform
        p.data += 0.3 * torch.randn_like(p)
    return model, torch.randn(4, 12, 6)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_model_equals_pytorchs_own_encoder(causal):
    model, x = tiny_model(causal=causal)
    mask = torch.full((12, 12), -math.inf).triu(1) if causal else None
    h = model.embed(x)
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(
            16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True
        )
        theirs = {
            "self_attn.in_proj_": block.qkv,
            "self_attn.out_proj.": block.out,
            "linear1.": block.up,
            "linear2.": block.down,
            "norm1.": block.ln1,
            "norm2.": block.ln2,
        }
        weights = {name + "weight": ours.weight for name, ours in theirs.items()}
        layer.load_state_dict(weights | {name + "bias": ours.bias for name, ours in theirs.items()})
        h = layer(h, src_mask=mask)
    close(model(x), model.head(model.ln(h))[:, -2:])


def test_pattern_path_equals_fast_path():
    switches = (True, False)
    for causal, mlp, qk, heads in itertools.product(switches, switches, switches, (1, 3)):
        model, x = tiny_model(heads=heads, causal=causal, mlp=mlp, qk=qk)
        predictions, patterns = model(x, return_patterns=True)
        close(model(x), predictions)
        assert [pattern.shape for pattern in patterns] == [(4, heads, 12, 12)] * 3
        pairs = itertools.product(range(3), range(heads))
        again = {(layer, head): patterns[layer][:, head] for layer, head in pairs}
        close(model(x, patterns=again), predictions)
        for pattern in patterns:
            close(pattern.sum(-1), torch.ones(4, heads, 12))


def test_replaced_patterns_are_used():
    model, x = tiny_model()
    planted = torch.zeros(12, 12)
    planted[:, 0] = 1
    _, patterns = model(x, patterns={(1, 0): planted}, return_patterns=True)
    assert torch.equal(patterns[1][:, 0], planted.expand(4, 12, 12))
    assert not torch.equal(patterns[1][:, 1], patterns[1][:, 0])
    for nowhere in ((3, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="there is no head"):
            model(x, patterns={nowhere: planted})

    # by hand, for one layer and head: every token takes the value of token 0
    model, x = tiny_model(layers=1, heads=1, mlp=False, head_size=16)
    block, h = model.blocks[0], model.embed(x)
    value = block.qkv(block.ln1(h))[:, :, -16:]
    taken = block.out(value[:, :1].expand(4, 12, 16))
    close(model(x, patterns={(0, 0): planted}), model.head(model.ln(h + taken))[:, -2:])


@pytest.mark.parametrize("qk", [False, True])
def test_a_future_token_has_no_effect_at_all(qk):
    model, x = tiny_model(qk=qk)
    _, before = model(x, return_patterns=True)
    assert all((pattern.triu(1) == 0).all() for pattern in before)
    for t in (3, 11):
        changed = x.clone()
        changed[:, t] += 100
        _, after = model(changed, return_patterns=True)
        for a, b in zip(after, before, strict=True):
            assert torch.equal(a[:, :, :t], b[:, :, :t])
        assert not torch.equal(after[0][:, :, t], before[0][:, :, t])

    # token 11 is the second query, not the first
    assert torch.equal(model(changed)[:, 0], model(x)[:, 0])
    assert not torch.equal(model(changed)[:, 1], model(x)[:, 1])


def test_rotary_scores_depend_on_distance_alone():
    angles = data.rotary_angles(20, 8)
    q, k = torch.randn(2, 1, 8)
    scores = rotate(q.expand(20, 8), angles) @ rotate(k.expand(20, 8), angles).T  # (20, 20)
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        close(diagonal, diagonal[:1].expand_as(diagonal), 1e-4)
    assert not torch.allclose(scores.diagonal(0)[0], scores.diagonal(1)[0])

    # in the whole model: nothing changes when all tokens move on by 5, much without rotation
    model, x = tiny_model(qk=True)
    before, model.rotary = model(x), data.rotary_angles(17, 8)[5:]
    close(model(x), before, 1e-4)
    model.rotary = torch.zeros(12, 4)
    assert (model(x) - before).abs().max() > 0.01

    # against complex multiplication, as in Su et al. (2023)
    turned = torch.view_as_complex(torch.stack(q.expand(20, 8).chunk(2, -1), -1).contiguous())
    turned = turned * torch.polar(torch.ones(20, 4), angles)
    close(rotate(q.expand(20, 8), angles), torch.cat([turned.real, turned.imag], -1))


def test_weights_start_as_gpt_2s():
    """Normal of deviation 0.02, smaller by the root of the number of additions where they add to
    the residual stream; biases are 0."""
    model = Transformer(12, 2, 64, 64, layers=4, heads=2, width=128, head_size=64)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            adds = ".out." in name or ".down." in name
            expected = 0.02 / math.sqrt(8) if adds else 0.02
            assert abs(parameter.std().item() / expected - 1) < 0.05, name
        elif name.endswith("bias"):
            assert not parameter.any()


def test_qk_std_is_that_of_the_first_queries_and_keys_alone():
    shape = dict(layers=2, heads=2, width=128, head_size=64, qk_std=0.05)
    for block in Transformer(12, 2, 64, 64, **shape).blocks:
        stds = [part.std().item() for part in block.qkv.weight.chunk(3)]
        assert stds == pytest.approx([0.05, 0.05, 0.02], rel=0.05)


# ---- the flags of the model


def test_a_flag_that_the_model_does_not_take_is_a_loud_bug(monkeypatch):
    flag = config.Flag(0.0, "share of activations that are dropped", 0, 1)
    monkeypatch.setitem(config.FLAGS["model"], "dropout", flag)
    monkeypatch.setitem(config.ROWS, "dropout", flag)
    with pytest.raises(TypeError, match="dropout"):
        config.build(train.parse_flags(TINY))


def test_every_choice_has_code_and_nothing_more_can_be_chosen():
    choices = {name: {*flag.choices} for name, flag in config.ROWS.items() if flag.choices}
    dtypes = choices.pop("dtype") - {"auto"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in dtypes)
    code = dict(task=data.TASKS, rotary=data.ENCODINGS, optimizer=train.OPTIMIZERS)
    assert choices == {name: {*table} for name, table in code.items()}


def test_bfloat16_is_float32_within_its_rounding():
    """Loss and gradient of one step: bfloat16 keeps 8 bits, so about 1% of either may differ."""
    steps = []
    for dtype in ("float32", "bfloat16"):
        small = "--layers 4 --heads 2 --width 64 --device cpu --dtype".split()
        flags = train.parse_flags([*small, dtype])
        torch.manual_seed(0)
        model = config.build(flags)
        predictions, targets = train.predict(model, flags, torch.arange(32))
        loss = (predictions.float() - targets).square().mean()
        loss.backward()
        steps.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (loss, gradient), (rounded_loss, rounded_gradient) = steps
    assert loss != rounded_loss and abs(loss - rounded_loss) < 0.01 * loss
    assert (gradient - rounded_gradient).norm() < 0.03 * gradient.norm()
