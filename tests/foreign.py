"""A model of your own, here of PyTorch's layers, that can be called as ablate.find_circuit says."""

import torch
import torch.nn.functional as F
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        layers = [nn.TransformerEncoderLayer(64, 1, 256, **options) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.embed, self.unembed = nn.Linear(4, 64), nn.Linear(64, 4)
        self.positions = nn.Parameter(0.1 * torch.randn(12, 64))
        self.heads = [(0, 0), (1, 0)]  # all that find_circuit needs, and ...

    def forward(self, x, heads=None):
        x, mask = self.embed(x) + self.positions, torch.full((12, 12), -torch.inf).triu(1)
        for number, layer in enumerate(self.layers):
            own = layer.self_attn
            q, k, v = F.linear(layer.norm1(x), own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
            pattern = (q @ k.mT / 8 + mask).softmax(-1)
            f = (heads or {}).get((number, 0), torch.matmul)  # ... this
            x = x + own.out_proj(f(pattern, v))
            x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
        return self.unembed(x[:, -4:])
