"""The transformer (Sections 7.1, 8.1, 9.1): GPT-2 style, pre-LN, over continuous tokens. Its
attention patterns can be read and replaced: all that reverse-engineering its circuits needs.

    model = Transformer(28, 4, inputs=8, outputs=12, layers=12, heads=1, width=128, head_size=128)
    predictions = model(x)                                    # (B, 28, 8) -> (B, 4, 12)
    predictions, patterns = model(x, return_patterns=True)    # patterns[layer]: (B, heads, 28, 28)
    predictions = model(x, patterns={(6, 0): torch.eye(28)})  # layer 6, head 0 attends to itself
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate(x, angles):
    """Turn each pair of numbers (i, i + size/2) of x (..., T, size) by angles (T, size/2): RoPE
    (Su et al., 2023)."""
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


class Block(nn.Module):
    """One layer: attention, then (unless mlp is off) an MLP of 4x the width; each reads the
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

    def attention(self, x, mask, angles, rows, replaced):
        """What the last `rows` tokens take from all T, (B, rows, width), and the pattern,
        (B, heads, rows, T). replaced: {head: (T, T) or (B, T, T)} used instead of its own."""
        B, T, _ = x.shape
        A = self.heads * self.head_size

        # queries, keys and values; where few rows are asked for, the others are read, never asked
        if rows == T:
            q, k, v = self.qkv(x).chunk(3, -1)
        else:
            q = F.linear(x[:, -rows:], self.qkv.weight[:A], self.qkv.bias[:A])
            k, v = F.linear(x, self.qkv.weight[A:], self.qkv.bias[A:]).chunk(2, -1)
        q, k, v = (
            z.view(B, -1, self.heads, self.head_size).transpose(1, 2).float() for z in (q, k, v)
        )
        if angles is not None:  # all of them (B, heads, T, head_size)
            q, k = rotate(q, angles[-rows:]), rotate(k, angles)
        q, k, v = (z.reshape(B * self.heads, -1, self.head_size) for z in (q, k, v))

        # Explicit batched products: on a CPU, at T < 100, they beat the fused attention op. In
        # float32, whatever the rest is: they are a few percent of the arithmetic, and bfloat16
        # rounds a score of 50 to a multiple of 0.25
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.baddbmm(mask[-rows:], q, k.mT, alpha=self.head_size**-0.5)
            pattern = scores.softmax(-1).view(B, self.heads, rows, T)
            if replaced:
                heads = list(pattern.unbind(1))
                for head, given in replaced.items():
                    heads[head] = given[..., -rows:, :].to(pattern).expand(B, rows, T)
                pattern = torch.stack(heads, 1)
            taken = pattern.view(B * self.heads, rows, T) @ v
        taken = taken.view(B, self.heads, rows, self.head_size).transpose(1, 2).reshape(B, rows, A)
        return self.out(taken), pattern

    def forward(self, x, mask, angles, rows, replaced):
        """x (B, T, width) -> the residual stream of the last `rows` tokens (B, rows, width), and
        the pattern."""
        taken, pattern = self.attention(self.ln1(x), mask, angles, rows, replaced)
        x = x[:, -rows:] + taken
        if self.mlp:
            x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return x, pattern


class Transformer(nn.Module):
    """Reads T tokens of `inputs` numbers and predicts `outputs` numbers at each of the last N, the
    queries.

    rotary (T, head_size/2): the angles by which RoPE turns the queries and keys of each token;
    None: not. qk_std: the first standard deviation of W_Q and W_K, that of the scores is its square
    times the width; 0.02 elsewhere."""

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

        # as GPT-2: what adds to the residual stream starts smaller, the more additions there are
        adding = [block.out for block in self.blocks]
        adding += [block.down for block in self.blocks if mlp]
        for module in self.modules():
            if isinstance(module, nn.Linear):
                small = math.sqrt(len(adding)) if module in adding else 1
                nn.init.normal_(module.weight, std=0.02 / small)
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            block.qkv.weight.data[: 2 * heads * head_size] *= qk_std / 0.02

    def forward(self, x, patterns=None, return_patterns=False):
        """x (B, T, inputs) -> predictions (B, N, outputs); with return_patterns also every layer's
        attention pattern after softmax, a list of (B, heads, T, T), rows the attending token.

        patterns: {(layer, head): (T, T) or (B, T, T)} to use instead of what those heads compute;
        ValueError for a head that is not there."""
        replaced = [{} for _ in self.blocks]
        for (layer, head), pattern in (patterns or {}).items():
            if not (0 <= layer < len(self.blocks) and 0 <= head < self.blocks[layer].heads):
                raise ValueError(f"there is no head {head} in layer {layer} (both count from 0)")
            replaced[layer][head] = pattern

        x, seen = self.embed(x), []
        for layer, block in enumerate(self.blocks):
            # in the last layer only what the queries hold reaches the loss
            last = layer == len(self.blocks) - 1 and not return_patterns
            rows = self.N if last else x.shape[1]
            x, pattern = block(x, self.mask, self.rotary, rows, replaced[layer])
            seen.append(pattern)
        predictions = self.head(self.ln(x[:, -self.N :]))
        return (predictions, seen) if return_patterns else predictions
