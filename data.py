"""The retrieval problem (Section 6): chains of symbols, their shuffled token sequences, and the depth laws.

    python data.py --D 3         # one worked sequence: tokens, roles, targets
    python data.py --depths 20   # how many layers each number of retrieval steps needs (Section 5)
"""
import argparse
import functools
import math
from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """B sequences of N chains with D steps; T = N(2D+1) tokens, the last N of them the queries."""
    inputs: torch.Tensor     # (B, T, K), or (B, T, 2K) with rotary="input"
    targets: torch.Tensor    # (B, N, D*K) x_1..x_D of each query in token order; (B, N, K) x_D alone without ic
    positions: torch.Tensor  # (B, N, 2D+1) the token where each role of each chain stands, in the order of roles(D)


def roles(D):
    """The 2D+1 roles of a chain, each reachable from the one before it: q, 1a, 1b, 2a, ..., Db.

    Role i holds symbol x_{i//2}: the query and 1a hold x_0, 1b and 2a hold x_1, and so on (Definition 1)."""
    return ["q"] + [f"{k}{side}" for k in range(1, D + 1) for side in "ab"]


# ---- random numbers: a hash of (seed, index, draw), so any example can be made alone, in any order, on any device

def signed(constant):
    return constant - (constant >> 63 << 64)  # torch has no uint64 arithmetic; int64 wraps around to the same bits


def mix(x):
    """Finaliser of splitmix64: int64 in, int64 out, every output bit depends on every input bit."""
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        x = (x ^ x >> shift & (1 << 64 - shift) - 1) * signed(factor)  # the mask makes >> a logical shift
    return x ^ x >> 31 & (1 << 33) - 1


def random_bits(seed, index, draws):
    """(B, draws) int64 random bits for examples `index` (B,); the same numbers on every device."""
    golden = signed(0x9E3779B97F4A7C15)
    stream = mix(mix(torch.as_tensor(seed, device=index.device) + golden) ^ index * golden)
    return mix(stream[:, None] + torch.arange(1, draws + 1, device=index.device) * golden)


def standard_normal(bits):
    """int64 random bits -> N(0, 1) float32 numbers, one each, always finite: 23 bits make a uniform number in
    (-1, 1) that float32 holds exactly, and the inverse error function does the rest."""
    uniform = ((bits >> 41 & 0x7FFFFF).float() + 0.5) / 2 ** 22 - 1
    return uniform.erfinv() * math.sqrt(2)


# ---- the problem

def rotary_angles(T, dimensions, device=None):
    """(T, dimensions/2) angle of each token index at the RoPE frequencies 10000^(-2i/dimensions)."""
    frequencies = 10000.0 ** (-torch.arange(0, dimensions, 2, device=device) / dimensions)
    return torch.arange(T, device=device)[:, None] * frequencies


def make_batch(seed, index, N=4, D=3, K=4, ic=True, rotary="input"):
    """The sequences `index` (B,) of dataset `seed`: a pure function of both, made on the device of `index`.

    Tokens run from the deepest step to the first, then the queries; the N pairs of a step are shuffled among
    themselves and so are the queries. rotary="input" appends the rotary encoding of the token index (K numbers)."""
    B, T, device = len(index), N * (2 * D + 1), index.device
    bits = random_bits(seed, index, N * (D + 1) * (K + 1))
    symbols = standard_normal(bits[:, N * (D + 1):]).view(B, N, D + 1, K)
    # slot[b, n, k]: where chain n stands within its step k (the query is step 0)
    slot = bits[:, :N * (D + 1)].view(B, N, D + 1).argsort(1).argsort(1)

    step = torch.arange(1, D + 1, device=device)
    a = 2 * N * (D - step) + 2 * slot[:, :, 1:]                                   # (B, N, D) position of ka
    q = 2 * N * D + slot[:, :, :1]                                                # (B, N, 1)
    positions = torch.cat([q, torch.stack([a, a + 1], -1).flatten(2)], -1)        # (B, N, 2D+1)

    held = symbols[:, :, torch.arange(2 * D + 1, device=device) // 2]             # (B, N, 2D+1, K) symbol of each role
    inputs = symbols.new_empty(B, T, K)
    inputs.scatter_(1, positions.view(B, T, 1).expand(-1, -1, K), held.reshape(B, T, K))
    if rotary == "input":
        angles = rotary_angles(T, K, device)
        inputs = torch.cat([inputs, torch.cat([angles.cos(), angles.sin()], -1).expand(B, T, K)], -1)

    answers = symbols[:, :, 1:] if ic else symbols[:, :, -1:]                     # (B, N, D or 1, K)
    chain = slot[:, :, 0].argsort(1)                                              # the chain that each query asks for
    targets = answers.flatten(2).gather(1, chain[:, :, None].expand(-1, -1, answers[0, 0].numel()))
    return Batch(inputs, targets, positions)


def validation_index(n, first=0, device="cpu"):
    """n examples from -1-first down: never among those trained on, which count up from 0."""
    return -1 - torch.arange(first, first + n, device=device)


@functools.lru_cache(maxsize=32)
def epoch_order(seed, epoch, examples):
    return random_bits(~seed, torch.tensor([epoch]), examples)[0].argsort()  # ~seed: no dataset's own stream


def batch_index(seed, step, batch, examples):
    """(batch,) which examples step `step` trains on: every example once per epoch in a fresh order; with
    examples=0, examples never seen before."""
    place = torch.arange(step * batch, (step + 1) * batch)
    if not examples:
        return place
    epochs = place // examples
    return torch.cat([epoch_order(seed, epoch, examples)[place[epochs == epoch] % examples]
                      for epoch in epochs.unique().tolist()])


def solve(inputs, N, D, K):
    """What the targets must be, found the slow and obvious way: follow each query through the pairs by comparing
    symbols. inputs (T, K or more) of one sequence -> (N, D*K)."""
    tokens = [tuple(token[:K].tolist()) for token in inputs]
    pairs, queries = tokens[:-N], tokens[-N:]
    follows = {first: second for first, second in zip(pairs[0::2], pairs[1::2])}
    answers = []
    for symbol in queries:
        chain = []
        for _ in range(D):
            symbol = follows[symbol]
            chain.extend(symbol)
        answers.append(chain)
    return torch.tensor(answers)


# ---- how deep a transformer must be: the information flow of Section 5 and Appendix B

def starting_information(D):
    """(2D+1, 2D+2) bool, which pieces of information each role holds before any layer. The pieces in order are
    p_0, x_0, p_1, x_1, ..., p_D, x_D (p_k: where pair k stands); role i holds pieces i and i+1."""
    role, piece = torch.arange(2 * D + 1)[:, None], torch.arange(2 * D + 2)
    return (piece == role) | (piece == role + 1)


def attend(known, allowed):
    """One layer: every role takes all that is known to the roles it may attend to (allowed, a (2D+1, 2D+1) bool)
    and shares a piece with (Assumptions 1 and 2)."""
    shared = known.float() @ known.float().T > 0
    return known | ((shared & allowed).float() @ known.float() > 0)


def may_attend(D, causal=True):
    """(2D+1, 2D+1) bool: attending role, attended role. Causal: pair D is read first, then D-1, ..., 1, then q."""
    read_at = torch.tensor([2 * D] + [2 * (D - k) + b for k in range(1, D + 1) for b in (0, 1)])
    return read_at[:, None] >= read_at if causal else torch.ones(2 * D + 1, 2 * D + 1, dtype=torch.bool)


def simulated_depth(D, causal=True):
    """The fewest layers after which the query can hold x_D, by running the information flow."""
    known, allowed, layers = starting_information(D), may_attend(D, causal), 0
    while not known[0, -1]:
        known, layers = attend(known, allowed), layers + 1
    return layers


def least_power(base, bound):
    """The smallest t with base^t >= bound, in whole numbers: math.log would round."""
    t = 0
    while base ** t < bound:
        t += 1
    return t


def paper_bound(D):
    """Theorem 1: at least log3(2D) layers."""
    return least_power(3, 2 * D)


def unmasked_depth(D):
    """ceil(log3(4D+1)): exact for the paper's model of information flow without a mask."""
    return least_power(3, 4 * D + 1)


def causal_depth(D):
    """floor(log2 D) + 2: exact with a causal mask and the order of tokens of Section 6."""
    return D.bit_length() + 1


def minimal_circuit(D, layers, causal=True):
    """{(layer, head): [(from role, to role), ...]}: paths along which the query comes to hold as many of x_1..x_D as the
    information flow of Section 5 allows in so many layers. One head per layer with a causal mask, two without."""
    circuit = {}
    for layer in range(layers):
        if causal:  # every b first takes its a, then what it holds doubles with each layer
            step = 2 ** layer // 2
            paths = [(2 * k, 2 * (k + step)) for k in range(1, D - step + 1)] if layer else [
                (2 * k, 2 * k - 1) for k in range(1, D + 1)]
            circuit[layer, 0] = paths + ([(0, 2 * step)] if 0 < step <= D else [])
        else:  # what a role holds triples, up and down the chain
            step = 3 ** layer
            circuit[layer, 0] = [(role, min(role + step, 2 * D)) for role in range(2 * D)]
            circuit[layer, 1] = [(role, max(role - step, 0)) for role in range(1, 2 * D + 1)]
    return circuit


def one_hot(paths, positions):
    """(B, T, T) attention: one from role to role along the paths, pairs of indices, and zero elsewhere."""
    B, T = len(positions), positions[0].numel()
    pattern = torch.zeros(B, T, T, device=positions.device)
    for source, target in paths:
        pattern[torch.arange(B)[:, None], positions[:, :, source], positions[:, :, target]] = 1
    return pattern


# ---- the command line

def name_symbol(n, k):
    """B2 for x_1 of chain 2, as in the paper's A, B, C; chains are counted from 1."""
    return f"{chr(ord('A') + k)}{n + 1}" if k < 26 else f"x{k}.{n + 1}"


def token_names(positions):
    """The names of all T tokens of one sequence, in order; positions (N, 2D+1) of its roles."""
    names = [""] * positions.numel()
    for n, place in enumerate(positions.tolist()):
        for role, token in enumerate(place):
            names[token] = name_symbol(n, role // 2)
    return names


def describe(seed, N, D, K):
    """One worked sequence, as text."""
    index = torch.arange(1)
    batch = make_batch(seed, index, N, D, K)
    names = token_names(batch.positions[0])
    lines = [f"{N} chains of {D} steps, {K} numbers per symbol: {len(names)} tokens.",
             f"Chain 1 is {' -> '.join(name_symbol(0, k) for k in range(D + 1))}; the letter is the place in the "
             "chain, the number the chain.", ""]
    for block, k in enumerate(range(D, 0, -1)):
        start = 2 * N * block
        pairs = "   ".join(f"{names[t]} {names[t + 1]}" for t in range(start, start + 2 * N, 2))
        lines.append(f"tokens {start:3d}-{start + 2 * N - 1:<3d}  {pairs}   the pairs of step {k}, roles {k}a {k}b")
    start = 2 * N * D
    lines += [f"tokens {start:3d}-{start + N - 1:<3d}  {'   '.join(f'{name:{2 * len(name) + 1}}' for name in names[start:])}"
              "   the queries, role q", "", "What the model must say at each query, and how it can be found:"]
    for slot, name in enumerate(names[start:]):
        n = int(batch.positions[0, :, 0].tolist().index(start + slot))
        place = batch.positions[0, n].tolist()
        lines.append(f"  {name}: {' '.join(name_symbol(n, k) for k in range(1, D + 1))}    " + ", ".join(
            f"{name_symbol(n, k - 1)} stands at {place[2 * k - 1]} before {name_symbol(n, k)}" for k in range(1, D + 1)))
    numbers = " ".join(f"{x:.2f}" for x in batch.inputs[0, 0].tolist())
    lines += ["", f"Token 0 ({names[0]}) as numbers, the symbol's {K} and the {K} of its position: {numbers}"]
    return "\n".join(lines)


def depth_table(most):
    """The depth laws for 1..most retrieval steps, as text; each exact law stands beside its simulation."""
    lines = ["Layers needed to retrieve x_D              no mask               causal mask",
             "   D   paper's bound, ceil(log3 2D)   ceil(log3(4D+1))  simulated   floor(log2 D)+2  simulated"]
    for D in range(1, most + 1):
        lines.append(f"{D:4d}   {paper_bound(D):^27d}   {unmasked_depth(D):^16d}  {simulated_depth(D, False):^9d}   "
                     f"{causal_depth(D):^15d}  {simulated_depth(D, True):^9d}")
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"data.py: {message}\n")
    p.add_argument("--N", type=int, default=4, help="chains per sequence (default: 4)")
    p.add_argument("--D", type=int, default=3, help="retrieval steps per chain (default: 3)")
    p.add_argument("--K", type=int, default=4, help="dimensions per symbol, even (default: 4)")
    p.add_argument("--seed", type=int, default=0, help="which sequence to show (default: 0)")
    p.add_argument("--depths", type=int, metavar="D", help="print the depth laws for 1..D retrieval steps instead")
    flags = p.parse_args()
    if min(flags.N, flags.D, flags.K - 1, 1 if flags.depths is None else flags.depths) < 1 or flags.K % 2:
        p.error("--N, --D and --depths must be at least 1, and --K even and at least 2")
    print(depth_table(flags.depths) if flags.depths else describe(flags.seed, flags.N, flags.D, flags.K))


if __name__ == "__main__":
    main()
