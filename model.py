"""The transformer (Sections 7.1, 8.1, 9.1): GPT-2 style, pre-LN, over continuous tokens. The
attention of every head can be read and what it writes can be replaced, which is all that finding
its circuits needs.

    model = Transformer(28, 4, inputs=8, outputs=12, layers=12, heads=1, width=128, head_size=128)
    predictions = model(x)                                    # (B, 28, 8) -> (B, 4, 12)
    predictions, patterns = model(x, return_patterns=True)    # patterns[layer]: (B, heads, 28, 28)
    predictions = model(x, heads={(6, 0): lambda pattern, values: 0 * values})  # without L6H0
"""

import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# weights are float32, whatever a user has set for new tensors
Linear = functools.partial(nn.Linear, dtype=torch.float32)
LayerNorm = functools.partial(nn.LayerNorm, dtype=torch.float32)


class Layer(nn.Module):
    """Attention, then (unless mlp is off) an MLP of 4 times the width. Each reads the normalised
    residual stream and adds to it."""

    def __init__(self, width, heads, head_size, mlp):
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.ln1 = LayerNorm(width)
        self.qkv = Linear(width, 3 * heads * head_size)
        self.out = Linear(heads * head_size, width)
        if mlp:
            self.ln2 = LayerNorm(width)
            self.up = Linear(width, 4 * width)
            self.down = Linear(4 * width, width)
        self.mlp = mlp

    def split(self, x):
        """(B, T, heads * head_size) -> (B * heads, T, head_size), in float32."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).float().flatten(0, 1)

    def forward(self, x, mask, angles, last, changed):
        """x (B, T, width), the residual stream -> that after this layer (B, last, width), and the
        attention (B, heads, last, T), both of as many last tokens as `last` says. mask (T, T), or
        (heads, T, T), is added to the scores; angles (T, head_size/2) or None; changed: {head: f}
        as in Transformer.forward, empty unless `last` is T."""
        # queries of the last tokens, keys and values of all
        normed = self.ln1(x)
        if last == x.shape[1]:
            q, k, v = self.qkv(normed).chunk(3, -1)
        else:  # in the last layer only the last N tokens are needed
            size, weight, bias = self.heads * self.head_size, self.qkv.weight, self.qkv.bias
            q = F.linear(normed[:, -last:], weight[:size], bias[:size])
            k, v = F.linear(normed, weight[size:], bias[size:]).chunk(2, -1)
        x = x[:, -last:]

        # Explicit products: on a CPU, at T < 100, they beat the fused attention op. They are
        # float32 whatever the dtype: they are a few percent of the arithmetic, and bfloat16 rounds
        # a score of 50 to a multiple of 0.25
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = self.split(q), self.split(k), self.split(v)
            if angles is not None:
                q, k = rotate(q, angles[-last:]), rotate(k, angles)
            mask = mask[..., -last:, :]
            if mask.ndim == 3:
                mask = mask.repeat(len(x), 1, 1)  # (B * heads, last, T)
            scores = torch.baddbmm(mask, q, k.mT, alpha=self.head_size**-0.5)
            pattern = scores.softmax(-1)  # (B * heads, last, T)
            written = pattern @ v  # (B * heads, last, head_size)
            for head, write in changed.items():
                own = slice(head, None, self.heads)  # dimension 0 is sequence * heads + head
                new = write(pattern[own].clone(), v[own])  # f may write into its pattern
                if new.shape != written[own].shape:
                    raise ValueError(f"a head writes {[*written[own].shape]}, not {[*new.shape]}")
                written[own] = new

        written = written.unflatten(0, (-1, self.heads)).transpose(1, 2)
        x = x + self.out(written.flatten(2))
        if self.mlp:
            x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return x, pattern.unflatten(0, (-1, self.heads))


def rotate(x, angles):
    """Rotate each pair of numbers (i, i + size/2) of x (..., T, size) by angles (T, size/2): RoPE
    (Su et al., 2023)."""
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


class Transformer(nn.Module):
    """A transformer that reads T tokens of `inputs` numbers and predicts `outputs` numbers at each
    of the last N tokens, the queries.

    angles (T, head_size/2): those by which RoPE rotates queries and keys of each token, or None
    for no RoPE; bias (heads, T, T): added to the attention scores, as in ALiBi, or None.
    qk_std: standard deviation of W_Q and W_K at the start; that of attention scores is then
    qk_std**2 * width. All other matrices start with 0.02, but for those that add to the residual
    stream."""

    def __init__(
        self, T, N, inputs, outputs, layers, heads, width, head_size,
        mlp=True, causal=True, angles=None, bias=None, qk_std=0.02,
    ):  # fmt: skip
        super().__init__()
        self.N = N
        self.embed = Linear(inputs, width)
        self.blocks = nn.ModuleList(Layer(width, heads, head_size, mlp) for _ in range(layers))
        self.ln = LayerNorm(width)
        self.head = Linear(width, outputs)  # the unembedding, no attention head
        mask = torch.full((T, T), -math.inf if causal else 0, dtype=torch.float32).triu(1)
        self.register_buffer("mask", mask if bias is None else mask + bias, persistent=False)
        self.register_buffer("angles", angles, persistent=False)

        # as in GPT-2, weights of layers that write to the residual stream, which are known by their
        # names, start smaller in a deeper model
        additions = layers * (2 if mlp else 1)
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(additions))
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        for block in self.blocks:
            block.qkv.weight.data[: 2 * heads * head_size] *= qk_std / 0.02

    def forward(self, x, heads=None, return_patterns=False):
        """x (B, T, inputs) -> predictions (B, N, outputs). With return_patterns also the attention
        pattern of every layer after softmax, a list of (B, heads, T, T); a row is the attention of
        one reading token.

        heads: {(layer, head): f}, both from 0; f(pattern (B, T, T), values (B, T, head_size)) ->
        (B, T, head_size) replaces pattern @ values, what this head writes before the output matrix
        (z of TransformerLens). ValueError for a head that does not exist."""
        heads = heads or {}
        for layer, head in heads:
            if not (0 <= layer < len(self.blocks) and 0 <= head < self.blocks[layer].heads):
                raise ValueError(f"there is no head {head} in layer {layer} (both count from 0)")

        x = self.embed(x)
        patterns = []
        for number, block in enumerate(self.blocks):
            changed = {head: heads[layer, head] for layer, head in heads if layer == number}
            last = x.shape[1]  # all tokens
            if number == len(self.blocks) - 1 and not (return_patterns or changed):
                last = self.N  # only the queries reach the loss
            x, pattern = block(x, self.mask, self.angles, last, changed)
            patterns.append(pattern)
        predictions = self.head(self.ln(x[:, -self.N :]))
        return (predictions, patterns) if return_patterns else predictions


# ---- optimizers


def make_optimizers(model, flags):
    """Return [AdamW, Muon] of a Transformer, where Muon has the matrices inside the layers and
    AdamW all other parameters, or [AdamW] with --optimizer adamw; flags: those of a run. Only
    matrices decay."""
    inside = []
    if flags.optimizer == "muon":
        inside = [p for p in model.blocks.parameters() if p.ndim == 2]
    taken = set(inside)
    others = [p for p in model.parameters() if p not in taken]
    groups = [
        dict(params=[p for p in others if p.ndim == 2], weight_decay=flags.weight_decay),
        dict(params=[p for p in others if p.ndim != 2], weight_decay=0.0),
    ]
    optimizers = [torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, flags.beta2), fused=True)]
    if inside:
        dtype = getattr(torch, flags.dtype)
        optimizers.append(Muon(inside, flags.lr, flags.weight_decay, dtype))
    return optimizers


MOMENTUM = 0.95  # of Muon; the default of torch.optim.Muon


class Muon(torch.optim.Optimizer):
    """Momentum whose update of every matrix is made orthogonal (Jordan et al., 2024), and as large
    as an update of AdamW (Liu et al., 2025). It equals torch.optim.Muon with adjust_lr_fn set to
    "match_rms_adamw", but computes in the given dtype: PyTorch's takes bfloat16, which is 17 times
    slower on a processor that does not have it."""

    def __init__(self, matrices, lr, weight_decay, dtype):
        by_shape = {}  # all matrices of one shape are computed together
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [dict(params=group) for group in by_shape.values()]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            # a frozen matrix has no gradient, and stays as it is
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]

            # Nesterov momentum
            gradient = torch.stack(gradients)
            # in the group, so that state.pt has it
            average = group.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp(average, MOMENTUM).to(self.dtype)

            # an orthogonal matrix (r, c) has the root mean square 1 / sqrt(max(r, c)), an update of
            # Adam about 0.2
            update = orthogonalize(update).float()
            rate = group["lr"] * 0.2 * math.sqrt(max(gradient.shape[-2:]))
            for matrix, change in zip(group["params"], update, strict=True):
                if matrix.grad is not None:
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=rate)


def orthogonalize(x):
    """Bring all singular values of x (B, rows, columns) close to 1 by Newton-Schulz iterations."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x
