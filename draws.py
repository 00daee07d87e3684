"""Random numbers that are a hash of (seed, example, draw): any example can be made alone, in any
order, on any device."""

import math

import torch


def signed(constant):
    """torch has no uint64 arithmetic; int64 wraps around to the same bits."""
    return constant - (constant >> 63 << 64)


def shift_right(x, bits):
    """A logical shift: torch's >> of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x):
    """Finaliser of splitmix64: int64 in, int64 out, every output bit depends on every input bit."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def random_bits(seed, index, draws):
    """(B, draws) int64 random bits for the examples `index` (B,); the same on every device."""
    golden = signed(0x9E3779B97F4A7C15)
    seed = torch.as_tensor(seed, device=index.device)
    stream = mix(mix(seed + golden) ^ (index * golden))
    return mix(stream[:, None] + torch.arange(1, draws + 1, device=index.device) * golden)


def standard_normal(bits):
    """int64 random bits -> N(0, 1) float32 numbers, one each, always finite: 23 bits make a uniform
    number in (-1, 1) that float32 holds exactly, and the inverse error function does the rest."""
    uniform = (((bits >> 41) & 0x7FFFFF).float() + 0.5) / 2**22 - 1
    return uniform.erfinv() * math.sqrt(2)
