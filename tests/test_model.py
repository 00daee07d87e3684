"""The transformer against PyTorch's own, against itself by hand, and with heads replaced."""

import itertools
import math

import pytest
import torch

import data
import train
from model import Transformer, rotate


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
    names = "self_attn.in_proj_ self_attn.out_proj. linear1. linear2. norm1. norm2.".split()
    h = model.embed(x)
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(
            16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True
        )
        weights = {}
        parts = block.qkv, block.out, block.up, block.down, block.ln1, block.ln2
        for name, part in zip(names, parts, strict=True):
            weights |= {f"{name}weight": part.weight, f"{name}bias": part.bias}
        layer.load_state_dict(weights)
        h = layer(h, src_mask=mask)
    close(model(x), model.head(model.ln(h))[:, -2:])


def test_functions_that_write_what_heads_write_change_nothing():
    given = {}
    for causal, mlp, qk, heads in itertools.product(*[(True, False)] * 3, (1, 3)):
        model, x = tiny_model(heads=heads, causal=causal, mlp=mlp, qk=qk)
        predictions, patterns = model(x, return_patterns=True)
        close(model(x), predictions)
        assert [pattern.shape for pattern in patterns] == [(4, heads, 12, 12)] * 3
        for layer, head in itertools.product(range(3), range(heads)):

            def write(pattern, values, layer=layer, head=head):
                given[layer, head] = pattern
                return pattern @ values

            close(model(x, {(layer, head): write}), predictions)
            assert torch.equal(given[layer, head], patterns[layer][:, head])


def test_what_a_head_writes_is_replaced_and_the_layers_above_respond():
    model, x = tiny_model()
    first = {(1, 0): lambda _, values: values[:, :1].expand(-1, 12, -1)}  # the value of token 0
    before, after = (model(x, heads, return_patterns=True)[1] for heads in ({}, first))
    assert all(torch.equal(before[layer], after[layer]) for layer in (0, 1))
    assert not torch.allclose(before[2], after[2])
    for nowhere in ((3, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="there is no head"):
            model(x, heads={nowhere: torch.matmul})

    # by hand, for one layer and head
    model, x = tiny_model(layers=1, heads=1, mlp=False, head_size=16)
    block, h = model.blocks[0], model.embed(x)
    value = block.qkv(block.ln1(h))[:, :, -16:]
    written = block.out(value[:, :1].expand(4, 12, 16))
    predictions = model(x, {(0, 0): lambda _, values: values[:, :1].expand(-1, 12, -1)})
    close(predictions, model.head(model.ln(h + written))[:, -2:])


@pytest.mark.parametrize("qk", [False, True])
def test_a_future_token_has_no_effect_at_all(qk):
    model, x = tiny_model(qk=qk)
    changed = x.clone()
    changed[:, 11] += 100  # the second query
    assert torch.equal(model(changed)[:, 0], model(x)[:, 0])
    assert not torch.equal(model(changed)[:, 1], model(x)[:, 1])
    for pattern in model(x, return_patterns=True)[1]:
        assert (pattern.triu(1) == 0).all()
        close(pattern.sum(-1), torch.ones(4, 2, 12))


def test_rotary_turns_pairs_of_numbers_as_complex_multiplication():
    """As in Su et al. (2023). Then nothing changes when all tokens move by 5 positions."""
    x, angles = torch.randn(20, 8), data.rotary_angles(20, 8)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(20, 4), angles)
    close(rotate(x, angles), torch.cat([turned.real, turned.imag], -1))
    model, x = tiny_model(qk=True)
    before, model.rotary = model(x), data.rotary_angles(17, 8)[5:]
    close(model(x), before, 1e-4)
    model.rotary = torch.zeros(12, 4)
    assert (model(x) - before).abs().max() > 0.01


def test_the_position_appended_to_a_token():
    """With K = 4, four numbers, of frequencies 1 and 0.01."""
    appended = data.make_batch(0, torch.arange(1)).inputs[0, :, 4:]
    angles = [(t, 0.01 * t) for t in range(28)]
    expected = [[math.cos(a), math.cos(b), math.sin(a), math.sin(b)] for a, b in angles]
    close(appended, torch.tensor(expected))


def test_weights_start_as_gpt_2s():
    """Their standard deviation is 0.02, divided by the root of the number of additions where they
    add to the residual stream; qk_std for queries and keys. Biases are 0."""
    shape = dict(layers=4, heads=2, width=128, head_size=64, qk_std=0.05)
    for name, parameter in Transformer(12, 2, 64, 64, **shape).named_parameters():
        if parameter.ndim == 2:
            adds = ".out." in name or ".down." in name
            expected = [0.05, 0.05, 0.02] if "qkv" in name else [0.02 / math.sqrt(8 if adds else 1)]
            deviations = [part.std().item() for part in parameter.chunk(len(expected))]
            assert deviations == pytest.approx(expected, rel=0.05), name
        assert not name.endswith("bias") or not parameter.any()


# ---- the flags of the model


def test_bfloat16_is_float32_within_its_rounding():
    """Loss and gradient of one step: bfloat16 keeps 8 bits, so about 1% of either may differ."""
    losses, gradients = [], []
    for dtype in ("float32", "bfloat16"):
        small = "--layers 4 --heads 2 --width 64 --device cpu --dtype".split()
        flags = train.parse_flags([*small, dtype])
        torch.manual_seed(0)
        model = train.build(flags)
        loss = data.partial_losses(*train.predict(model, flags, torch.arange(32)), 4).mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)
    assert (gradients[0] - gradients[1]).norm() < 0.03 * gradients[0].norm()
