"""The two tasks of hops.py, a ring of permutations and hops among letters, and its transformer.

Levels count from 0; a task asks hops[level] hops. Both say which model, batch, learning rate and
steps between evaluations they are trained with.
"""

import math

import torch

from model import Block


class Ring:
    """k permutations sigma_i of N numbers; token (i, b) shows sigma_i(b). A hop from number b at
    place i of the ring leads to number sigma_i(pi_i(b)) at place i + 1; pi (1, k, N), drawn once,
    is never shown. Asked at (i, b): the number after 1, 2, 4 ... k hops."""

    width, heads, mlp, causal, batch, lr, every = 64, 2, False, False, 64, 3e-3, 25

    def __init__(self, k, N, hop_token, seed):
        generator = torch.Generator().manual_seed(seed)
        self.k, self.N, self.hop_token = k, N, hop_token
        self.hops = [2**level for level in range(k.bit_length())]
        self.pi = torch.rand(1, k, N, generator=generator).argsort(2)
        self.layers, self.outputs = len(self.hops), N
        self.vocabulary, self.T = N + hop_token * len(self.hops), k * N + hop_token

    def answers(self, sigma):
        """The number after so many hops from each number of each place, (levels, B, k, N)."""
        found = [sigma.gather(2, self.pi.expand_as(sigma))]
        for hops in self.hops[:-1]:
            found.append(found[-1].roll(-hops, 1).gather(2, found[-1]))
        return torch.stack(found)

    def sample(self, levels, B, generator):
        """Tokens (B, T) and what is asked of these levels (readings, B, T), -100 for nothing."""
        sigma = torch.rand(B, self.k, self.N, generator=generator).argsort(2)
        answers = self.answers(sigma).flatten(2)
        if not self.hop_token:
            return sigma.flatten(1), answers[levels]
        asked = torch.tensor(levels)[torch.randint(len(levels), (B,), generator=generator)]
        tokens = torch.cat([self.N + asked[:, None], sigma.flatten(1)], 1)
        none = torch.full((B, 1), -100)
        return tokens, torch.cat([none, answers[asked, torch.arange(B)]], 1)[None]


class Letters:
    """100 of 4 letters after a token that says how many hops, 0 to 16, are asked at each of them. A
    hop from a letter leads to what followed it the last time; where there is no such thing, nothing
    is asked."""

    width, heads, mlp, causal, batch, lr, every = 128, 4, True, True, 32, 1e-3, 100
    hops, hop_token, outputs, vocabulary, T = [*range(17)], True, 4, 21, 101

    def __init__(self, layers):
        self.layers = layers

    def sample(self, levels, B, generator):
        letters = torch.randint(4, (B, self.T - 1), generator=generator)
        asked = torch.tensor(levels)[torch.randint(len(levels), (B,), generator=generator)]

        # the place, from 1, of what followed the last letter that was the same; 0: there is none
        place = torch.arange(1, self.T)
        same = letters[:, :, None] == letters[:, None, :-1]
        followed = (same.tril(-1) * place[1:]).amax(2)
        start = torch.zeros(B, 1, dtype=torch.long)
        hop, now = torch.cat([start, followed], 1), torch.cat([start[0], place]).expand(B, -1)
        for count in range(max(self.hops)):
            now = torch.where(count < asked[:, None], hop.gather(1, now), now)
        named = torch.cat([start - 100, letters], 1).gather(1, now)
        return torch.cat([4 + asked[:, None], letters], 1), named[None]


class Transformer(torch.nn.Module):
    """Blocks of model.py, read after each layer, or after the last where a hop token asks."""

    def __init__(self, task):
        super().__init__()
        self.E = torch.nn.Parameter(torch.randn(task.vocabulary, task.width))
        self.P = torch.nn.Parameter(torch.randn(task.T, task.width))
        shape = task.width, task.heads, task.width // task.heads, task.mlp
        self.blocks = torch.nn.ModuleList(Block(*shape) for _ in range(task.layers))
        self.reads = torch.nn.ModuleList()
        for _ in range(1 if task.hop_token else task.layers):
            read = torch.nn.Linear(task.width, task.outputs)
            self.reads.append(torch.nn.Sequential(torch.nn.LayerNorm(task.width), read))
        future = torch.full((task.T, task.T), -math.inf).triu(1)
        self.mask = future if task.causal else torch.zeros(task.T, task.T)

    def forward(self, tokens, levels, held=()):
        """Logits (readings, B, T, outputs) of the levels, [attention (B, heads, T, T), ...]; held:
        for each layer {head: attention to use instead of its own}."""
        x, states, patterns = self.E[tokens] + self.P, [], []
        for layer, block in enumerate(self.blocks):
            own = held[layer] if held else {}
            x, pattern = block(x, self.mask, None, len(self.P), own)
            states.append(x)
            patterns.append(pattern)
        if len(self.reads) == 1:
            levels, states = [0], [x]
        return torch.stack([self.reads[i](states[i]) for i in levels]), patterns
