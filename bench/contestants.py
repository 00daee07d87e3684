"""The contestants of peers.py: one training step of ours and of five libraries, in one shape, and
the matrix products that no one can avoid.
"""

import math

from parts.config import build

import torch
import torch.nn as nn
import torch.nn.functional as F

from data import chain
from train import parse_flags


N, K = 4, 4


def tokens(shape):
    return chain(N, shape["D"]).T


# ---- each returns a module (B, T, 2K) -> (B, N or more, D*K), or None if it cannot have this shape


class Wrapped(nn.Module):
    """A library's stack of layers, called by `run`, between our input and output maps."""

    def __init__(self, shape, body, run):
        super().__init__()
        self.embed, self.body, self.run = nn.Linear(2 * K, shape["width"]), body, run
        self.head = nn.Linear(shape["width"], shape["D"] * K)

    def forward(self, x):
        return self.head(self.run(self.body, self.embed(x))[:, -N:])


def ours(shape, fused):
    return None if fused else build(parse_flags([]).but(**shape))


def transformers_gpt2(shape, fused):
    from transformers import GPT2Config, GPT2Model

    if not shape["mlp"] or shape["heads"] * shape["head_size"] != shape["width"]:
        return None
    body = GPT2Model(
        GPT2Config(
            vocab_size=1,
            n_positions=tokens(shape),
            n_embd=shape["width"],
            n_layer=shape["layers"],
            n_head=shape["heads"],
            activation_function="gelu",
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            use_cache=False,
            attn_implementation="sdpa" if fused else "eager",
        )
    )
    return Wrapped(shape, body, lambda body, x: body(inputs_embeds=x).last_hidden_state)


def x_transformers(shape, fused):
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(
        dim=shape["width"],
        depth=shape["layers"],
        heads=shape["heads"],
        attn_dim_head=shape["head_size"],
        attn_flash=fused,
        attn_project_out=True,
        **({} if shape["mlp"] else dict(custom_layers=("a",) * shape["layers"])),
    )
    return ContinuousTransformerWrapper(
        dim_in=2 * K,
        dim_out=shape["D"] * K,
        max_seq_len=tokens(shape),
        use_abs_pos_emb=False,
        attn_layers=layers,
    )


def transformer_lens(shape, fused):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    if fused:
        return None
    body = HookedTransformer(
        HookedTransformerConfig(
            n_layers=shape["layers"],
            d_model=shape["width"],
            n_heads=shape["heads"],
            d_head=shape["head_size"],
            n_ctx=tokens(shape),
            d_vocab=1,
            d_vocab_out=shape["D"] * K,
            act_fn="gelu",
            normalization_type="LN",
            attn_only=not shape["mlp"],
            device="cpu",
        )
    )
    wrapped = Wrapped(
        shape, body, lambda body, x: body(x, start_at_layer=0)
    )  # x is a residual stream, not words
    wrapped.head = nn.Identity()  # its own output map serves
    return wrapped


def torch_encoder(shape, fused):
    if fused or not shape["mlp"] or shape["heads"] * shape["head_size"] != shape["width"]:
        return None
    layer = nn.TransformerEncoderLayer(
        shape["width"],
        shape["heads"],
        4 * shape["width"],
        dropout=0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    body = nn.TransformerEncoder(
        layer, shape["layers"], norm=nn.LayerNorm(shape["width"]), enable_nested_tensor=False
    )
    mask = nn.Transformer.generate_square_subsequent_mask(tokens(shape))
    return Wrapped(shape, body, lambda body, x: body(x, mask=mask, is_causal=True))


TORCH = {
    "ours": ours,
    "transformers GPT2Model": transformers_gpt2,
    "x-transformers": x_transformers,
    "transformer-lens": transformer_lens,
    "torch.nn.TransformerEncoder": torch_encoder,
}
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.99), 0.1, 0.1


def torch_step(module, dtype, compiled):
    """A function (x, y) -> loss that trains the module by one step; its number of parameters."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():  # everyone from the same distribution
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    forward = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(
        module.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            predictions = forward(x)[:, -N:]
        loss = F.mse_loss(predictions.float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, sum(parameter.numel() for parameter in module.parameters())


def flax_step(shape, dtype):
    """The same for a jitted step of flax and optax."""
    import flax.linen as fnn
    import jax
    import jax.numpy as jnp
    import optax

    number = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    weights = dict(kernel_init=fnn.initializers.normal(0.02), dtype=number)

    class Network(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            mask = fnn.make_causal_mask(jnp.ones((1, x.shape[1])))
            x = fnn.Dense(shape["width"], **weights)(x)
            for _ in range(shape["layers"]):
                x += fnn.MultiHeadDotProductAttention(
                    shape["heads"],
                    qkv_features=shape["heads"] * shape["head_size"],
                    out_features=shape["width"],
                    **weights,
                )(fnn.LayerNorm(dtype=number)(x), mask=mask)
                if shape["mlp"]:
                    h = fnn.Dense(4 * shape["width"], **weights)(fnn.LayerNorm(dtype=number)(x))
                    x += fnn.Dense(shape["width"], **weights)(fnn.gelu(h, approximate=False))
            return fnn.Dense(shape["D"] * K, **weights)(fnn.LayerNorm(dtype=number)(x[:, -N:]))

    network = Network()
    parameters = network.init(jax.random.key(0), jnp.zeros((1, tokens(shape), 2 * K)))
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY),
    )
    state = [parameters, optimizer.init(parameters)]

    @jax.jit
    def update(parameters, optimizer_state, x, y):
        def loss_of(parameters):
            return jnp.square(network.apply(parameters, x).astype(jnp.float32) - y).mean()

        loss, gradient = jax.value_and_grad(loss_of)(parameters)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss

    def step(x, y):
        *state[:], loss = update(*state, x.numpy(), y.numpy())
        return loss.item()

    return step, sum(p.size for p in jax.tree.leaves(parameters))


def floor_step(shape, dtype):
    """A function that does the matrix products of one step, nothing else: three for each weight
    (forward, gradient of its input, gradient of itself), six for each attention pattern; in the
    last layer only what the queries need. Those of attention are always in float32: on a CPU,
    batches of such small matrices are slower in bfloat16."""
    B, T, width, A = (
        shape["batch"],
        tokens(shape),
        shape["width"],
        shape["heads"] * shape["head_size"],
    )
    products, outputs = [], {}

    def product(a, b):
        size = (*a.shape[:-1], b.shape[-1])
        products.append((a, b, outputs.setdefault(size, torch.empty(size, dtype=a.dtype))))

    def weight(rows, ins, outs, reads_data=False):
        x, w, y = (
            torch.randn(size).to(getattr(torch, dtype))
            for size in [(rows, ins), (outs, ins), (rows, outs)]
        )
        product(x, w.T)
        product(y.T, x)
        if not reads_data:
            product(y, w)

    def attention(rows):
        q, k, s = (
            torch.randn(B * shape["heads"], *size)
            for size in [(rows, shape["head_size"]), (T, shape["head_size"]), (rows, T)]
        )
        for _ in "scores", "values":
            product(q, k.mT)
            product(s, k)
            product(s.mT, q)

    weight(B * T, 2 * K, width, reads_data=True)
    for layer in range(shape["layers"]):
        rows = T if layer < shape["layers"] - 1 else N
        weight(B * rows, width, A)
        weight(B * T, width, 2 * A)
        attention(rows)
        weight(B * rows, A, width)
        if shape["mlp"]:
            weight(B * rows, width, 4 * width)
            weight(B * rows, 4 * width, width)
    weight(B * N, width, shape["D"] * K)

    def step(x, y):
        for a, b, out in products:
            torch.matmul(a, b, out=out)
        return math.nan

    return step
