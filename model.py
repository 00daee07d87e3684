"""The transformer (Sections 7.1, 8.1, 9.1): GPT-2 style, pre-LN, over continuous tokens. Any head
can be replaced by a function of its attention and values, which is all that reading its attention
and finding its circuits need.

    model = Transformer(28, 4, inputs=4, outputs=12, layers=12, heads=1, width=128, head_size=128)
    predictions = model(x)                                    # (B, 28, 4) -> (B, 4, 12)
    predictions = model(x, heads={(6, 0): lambda pattern, values: 0 * values})  # without L6H0
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# sharp attention has weights and gradients below 1e-38, with which a processor computes so slowly
# that steps may take twice as long: they become 0
torch.set_flush_denormal(True)


class Layer(nn.Module):
    """Attention, then (unless mlp is off) an MLP of 4 times the width. Each reads the normalised
    residual stream and adds to it."""

    def __init__(self, width, heads, head_size, mlp):
        super().__init__()
        self.head_size = head_size
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * head_size)
        self.out = nn.Linear(heads * head_size, width)
        # hook points: see Transformer
        self.q, self.k, self.v = nn.Identity(), nn.Identity(), nn.Identity()
        self.pattern, self.z = nn.Identity(), nn.Identity()
        if mlp:
            self.ln2 = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)
        self.mlp = mlp

    def split(self, x):
        """(B, T, heads * head_size) -> (B, heads, T, head_size), in float32."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2).float()

    def forward(self, x, mask, angles, n_out, functions):
        """x (B, T, width), the residual stream -> the stream after this layer (B, n_out, width),
        for the last n_out tokens alone, which saves time in the last layer. mask (T, T) is added to
        the scores; angles (T, head_size/2) or None; functions {head: f} of this layer, with f as in
        Transformer.forward."""
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)  # (B, T, heads * head_size)
        q, x = q[:, -n_out:], x[:, -n_out:]

        # Attention is written out, which on a CPU, at T < 100, is faster than PyTorch's fused op.
        # It is float32 whatever the dtype: it is a few percent of the arithmetic, and bfloat16
        # would round a score of 50 to a multiple of 0.25
        with torch.autocast(x.device.type, enabled=False):
            q = self.q(self.split(q))  # (B, heads, n_out, head_size)
            k, v = self.k(self.split(k)), self.v(self.split(v))  # (B, heads, T, head_size)
            if angles is not None:
                q, k = rotate(q, angles[-n_out:]), rotate(k, angles)
            # mask + q k^T / sqrt(head_size); baddbmm takes three dimensions, so heads join batches
            q, k = q.flatten(0, 1), k.flatten(0, 1)  # (B * heads, n_out or T, head_size)
            scores = torch.baddbmm(mask[-n_out:], q, k.mT, alpha=self.head_size**-0.5)
            pattern = scores.softmax(-1).unflatten(0, (len(x), -1))  # (B, heads, n_out, T)
            pattern = self.pattern(pattern)
            written = pattern @ v  # (B, heads, n_out, head_size)
            for head, f in functions.items():  # if there are some, forward passes n_out = T
                z = f(pattern[:, head], v[:, head])
                if z.shape != v[:, head].shape:
                    raise ValueError(f"head {head} must write {tuple(v[:, head].shape)}")
                written[:, head] = z
            written = self.z(written)

        x = x + self.out(written.transpose(1, 2).flatten(2))
        if self.mlp:
            x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return x


def rotary_angles(T, size):
    """(T, size/2) the angles of each token at the RoPE frequencies 10000^(-2i/size)."""
    if size % 2:
        raise ValueError(f"positions take pairs: {size} (--K or --head-size) is not even")
    evens = torch.arange(0, size, 2, dtype=torch.float32)
    return torch.arange(T)[:, None] * 10000.0 ** (-evens / size)


def rotate(x, angles):
    """Rotate each pair of numbers (i, i + size/2) of x (..., T, size) by angles (T, size/2): RoPE
    (Su et al., 2023)."""
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


class Transformer(nn.Module):
    """A transformer that reads T tokens of `inputs` numbers and predicts `outputs` numbers at each
    of the last N tokens, the queries.

    positions: "appended" gives each token as many further numbers, the cos and sin of the angles of
    its position; "rope" rotates queries and keys by such angles; None does neither.
    qk_std: standard deviation of W_Q and W_K at the start; that of attention scores is then
    qk_std**2 * width. All other matrices start with 0.02, but for those that add to the residual
    stream. dtype: that of activations and matrix products, "float32" or "bfloat16"; the weights,
    and attention from scores to z, are float32 in both.

    PyTorch's forward hooks can read and replace blocks[6].q, k, v and z, (B, heads, T, head_size)
    each, and pattern, (B, heads, T, T): q and k before RoPE, and z what heads write, before the
    output matrix. The last layer has q, pattern and z of the N queries only, unless one of its
    heads is replaced."""

    def __init__(
        self, T, N, inputs, outputs, layers, heads, width, head_size,
        mlp=True, causal=True, positions=None, qk_std=0.02, dtype="float32",
    ):  # fmt: skip
        super().__init__()
        self.N, self.dtype = N, getattr(torch, dtype)
        self.heads = [(layer, head) for layer in range(layers) for head in range(heads)]
        angles = rotary_angles(T, inputs) if positions == "appended" else torch.zeros(T, 0)
        appended = torch.cat([angles.cos(), angles.sin()], -1)  # (T, inputs), or nothing
        self.embed = nn.Linear(inputs + appended.shape[1], width)
        # the layers; checkpoints of this repository call them blocks
        self.blocks = nn.ModuleList(Layer(width, heads, head_size, mlp) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)  # the unembedding, no attention head
        mask = torch.full((T, T), -math.inf if causal else 0.0).triu(1)
        angles = rotary_angles(T, head_size) if positions == "rope" else None
        for name, tensor in ("mask", mask), ("appended", appended), ("angles", angles):
            self.register_buffer(name, tensor, persistent=False)

        # as in GPT-2, what writes to the residual stream starts smaller in a deeper model
        additions = layers * (2 if mlp else 1)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                adds = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(additions if adds else 1))
                nn.init.zeros_(module.bias)
        for layer in self.blocks:
            layer.qkv.weight.data[: 2 * heads * head_size] *= qk_std / 0.02

    def forward(self, x, heads=None):
        """x (B, T, inputs) -> predictions (B, N, outputs).

        heads: {(layer, head): f}, both from 0; f(pattern (B, T, T), values (B, T, head_size)) ->
        (B, T, head_size) replaces pattern @ values, the z of this head. A row of its pattern is the
        attention of one reading token, after softmax."""
        heads, n_out = heads or {}, x.shape[1]
        if unknown := heads.keys() - {*self.heads}:
            raise ValueError(f"the model has no head {unknown}")
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            x = self.embed(torch.cat([x, self.appended.expand(len(x), -1, -1)], -1))
            for i, layer in enumerate(self.blocks):
                functions = {head: f for (number, head), f in heads.items() if number == i}
                # nothing reads the other tokens of the last layer
                if layer is self.blocks[-1] and not functions:
                    n_out = self.N
                x = layer(x, self.mask, self.angles, n_out, functions)
            return self.head(self.ln(x[:, -self.N :])).float()


# ---- optimizers


def make_optimizers(model, kind, lr, beta2, weight_decay):
    """The optimizers of a Transformer: [AdamW], or with kind "muon" [AdamW, Muon], where Muon has
    the matrices inside the layers. Only matrices have weight decay."""
    inside = [p for p in model.blocks.parameters() if p.ndim > 1]
    inside = {"muon": inside, "adamw": []}[kind]
    matrices = [p for p in model.parameters() if p.ndim > 1 and p not in {*inside}]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices), dict(params=vectors, weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr, (0.9, beta2), weight_decay=weight_decay, fused=True)
    return [adamw, Muon(inside, lr, weight_decay, model.dtype)] if inside else [adamw]


class Muon(torch.optim.Optimizer):
    """Momentum whose update of every matrix is made orthogonal (Jordan et al., 2024), and as large
    as an update of AdamW (Liu et al., 2025): torch.optim.Muon with "match_rms_adamw", but in the
    given dtype, since its bfloat16 is slow on most processors. W_Q, W_K and W_V of all heads of a
    layer are one matrix here."""

    def __init__(self, matrices, lr, weight_decay, dtype, momentum=0.95):
        by_shape = {}  # all matrices of one shape are computed together
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [dict(params=group) for group in by_shape.values()]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            # Nesterov momentum m of all matrices (r, c) of this shape
            gradient = torch.stack([matrix.grad for matrix in group["params"]])  # (n, r, c)
            if "average" not in group:  # in the group, so that state_dict() saves it
                group["average"] = torch.zeros_like(gradient)
            average = group["average"].lerp_(gradient, 1 - group["momentum"])
            update = orthogonalize(gradient.lerp(average, group["momentum"]).to(self.dtype))

            # the r c squares of an orthogonal matrix (r, c) sum to min(r, c), so that their mean is
            # 1 / max(r, c): scale its root to 0.2, as is usual for an update of Adam
            rate = group["lr"] * 0.2 * math.sqrt(max(gradient.shape[-2:]))
            for matrix, change in zip(group["params"], update.float(), strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=rate)


def orthogonalize(x):
    """Bring the singular values of x (n, rows, columns) near 1 by five Newton-Schulz iterations: x
    becomes a x + b (x x^T) x + c (x x^T)^2 x, with the constants of Jordan et al."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b S + c S S
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
