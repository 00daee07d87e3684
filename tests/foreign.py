"""A model of your own, here of PyTorch's own layers, behind the contract of ablate.find_circuit."""

import torch
import torch.nn.functional as F
from torch import nn


class Mine(nn.Module):
    def __init__(self, N, width=64, layers=2, heads=2):
        super().__init__()
        self.embed, self.unembed = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            self.blocks.append(nn.TransformerEncoderLayer(width, heads, 4 * width, **options))
        self.N, self.heads = N, heads

    def forward(self, x, heads={}):  # noqa: B006
        x = self.embed(x)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        for layer, block in enumerate(self.blocks):
            own = block.self_attn
            qkv = F.linear(block.norm1(x), own.in_proj_weight, own.in_proj_bias)
            q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 3, 0, 1, 4)
            patterns = (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1)  # (heads, B, T, T)
            written = []
            for head, (pattern, values) in enumerate(zip(patterns, v)):  # noqa: B905
                f = heads.get((layer, head), torch.matmul)  # the one line that makes it readable
                written.append(f(pattern, values))
            x = x + own.out_proj(torch.cat(written, -1))
            x = x + block.linear2(F.gelu(block.linear1(block.norm2(x))))
        return self.unembed(x[:, -self.N :])
