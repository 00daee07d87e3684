"""The transformer (Sections 7.1, 8.1, 9.1): GPT-2 style, pre-LN, over continuous tokens. The
attention of every head can be read and what it writes can be replaced, which is all that finding
its circuits needs.

    model = Transformer(28, 4, inputs=8, outputs=12, layers=12, heads=1, width=128, head_size=128)
    predictions = model(x)                                    # (B, 28, 8) -> (B, 4, 12)
    predictions, patterns = model(x, return_patterns=True)    # patterns[layer]: (B, heads, 28, 28)
    zero = lambda pattern, values: 0 * values                 # zero ablation
    predictions = model(x, heads={(6, 0): zero})              # of layer 6, head 0 (L6H0)
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate(x, angles):
    """Rotate each pair of numbers (i, i + size/2) of x (..., T, size) by angles (T, size/2): RoPE
    (Su et al., 2023)."""
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


class Block(nn.Module):
    """One layer: attention, then (unless mlp is off) an MLP of 4 times the width. Each reads the
    normalised residual stream and adds to it."""

    def __init__(self, width, heads, head_size, mlp):
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * head_size)
        self.out = nn.Linear(heads * head_size, width)
        if mlp:
            self.ln2 = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)
        self.mlp = mlp

    def attention(self, x, mask, angles, rows, changed):
        """Return what the last `rows` tokens read from all T, (B, rows, width), and the pattern,
        (B, heads, rows, T). changed: {head: f} as in Transformer.forward, with rows = T."""
        B, T, _ = x.shape
        A = self.heads * self.head_size

        # queries, keys and values; of tokens before the last `rows` only keys and values are used
        if rows == T:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            q = F.linear(x[:, -rows:], self.qkv.weight[:A], self.qkv.bias[:A])
            k, v = F.linear(x, self.qkv.weight[A:], self.qkv.bias[A:]).chunk(2, -1)
        q, k, v = (
            z.view(B, -1, self.heads, self.head_size).transpose(1, 2).float() for z in (q, k, v)
        )  # (B, heads, rows or T, head_size) each
        if angles is not None:
            q, k = rotate(q, angles[-rows:]), rotate(k, angles)
        q, k, v = (z.reshape(B * self.heads, -1, self.head_size) for z in (q, k, v))

        # Explicit batched products: on a CPU, at T < 100, they beat the fused attention op. They
        # are float32 whatever the dtype: they are a few percent of the arithmetic, and bfloat16
        # rounds a score of 50 to a multiple of 0.25
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.baddbmm(mask[-rows:], q, k.mT, alpha=self.head_size**-0.5)
            pattern = scores.softmax(-1)  # (B * heads, rows, T)
            written = (pattern @ v).view(B, self.heads, rows, self.head_size)
            pattern, v = (z.view(B, self.heads, *z.shape[1:]) for z in (pattern, v))
            if changed:
                heads = list(written.unbind(1))
                for head, write in changed.items():
                    heads[head] = write(pattern[:, head], v[:, head])
                written = torch.stack(heads, 1)
        written = written.transpose(1, 2).reshape(B, rows, A)
        return self.out(written), pattern

    def forward(self, x, mask, angles, rows, changed):
        """x (B, T, width) -> the residual stream of the last `rows` tokens (B, rows, width), and
        the pattern (B, heads, rows, T)."""
        written, pattern = self.attention(self.ln1(x), mask, angles, rows, changed)
        x = x[:, -rows:] + written
        if self.mlp:
            x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return x, pattern


class Transformer(nn.Module):
    """A transformer that reads T tokens of `inputs` numbers and predicts `outputs` numbers at each
    of the last N tokens, the queries.

    rotary (T, head_size/2): the angles by which RoPE rotates queries and keys of each token, or
    None for no RoPE. qk_std: standard deviation of W_Q and W_K at the start; that of the attention
    scores is its square times the width. All other weights start with 0.02."""

    def __init__(
        self,
        T,
        N,
        inputs,
        outputs,
        layers,
        heads,
        width,
        head_size,
        mlp=True,
        causal=True,
        rotary=None,
        qk_std=0.02,
    ):
        super().__init__()
        self.N = N
        self.embed = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width, heads, head_size, mlp) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)
        mask = torch.full((T, T), -math.inf).triu(1) if causal else torch.zeros(T, T)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("rotary", rotary, persistent=False)

        # as in GPT-2, weights that write to the residual stream start smaller in a deeper model
        adding = [block.out for block in self.blocks]
        adding += [block.down for block in self.blocks if mlp]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                small = math.sqrt(len(adding)) if module in adding else 1
                nn.init.normal_(module.weight, std=0.02 / small)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            block.qkv.weight.data[: 2 * heads * head_size] *= qk_std / 0.02

    def forward(self, x, heads=None, return_patterns=False):
        """x (B, T, inputs) -> predictions (B, N, outputs). With return_patterns also the attention
        pattern of every layer after softmax, a list of (B, heads, T, T); a row is the attention of
        one reading token.

        heads: {(layer, head): f}, both from 0; f(pattern (B, T, T), values (B, T, head_size)) ->
        (B, T, head_size) replaces what this head writes, which is pattern @ values. ValueError for
        a head that does not exist."""
        changed = [{} for _ in self.blocks]
        for (layer, head), write in (heads or {}).items():
            if not (0 <= layer < len(self.blocks) and 0 <= head < self.blocks[layer].heads):
                raise ValueError(f"there is no head {head} in layer {layer} (both count from 0)")
            changed[layer][head] = write

        x, patterns = self.embed(x), []
        for layer, block in enumerate(self.blocks):
            # in the last layer only the queries reach the loss
            last = layer == len(self.blocks) - 1 and not (return_patterns or changed[layer])
            rows = self.N if last else x.shape[1]
            x, pattern = block(x, self.mask, self.rotary, rows, changed[layer])
            patterns.append(pattern)
        predictions = self.head(self.ln(x[:, -self.N :]))
        return (predictions, patterns) if return_patterns else predictions
