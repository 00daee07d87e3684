"""The retrieval problem of Section 6: chains of symbols, cut into pairs that are shuffled.

    python data.py --D 3    # shows one worked sequence: tokens, roles, targets

A chain is a list of D+1 symbols, A -> B -> C for D = 2. A sequence shows N chains, cut into pairs
and shuffled, and then the queries, which are the first symbols of the chains. At each query the
model predicts the rest of the chain: it retrieves B with the pair (A, B), then C with (B, C). The
symbols are random vectors, new in every sequence. With N = 3 and D = 2:

    tokens    B3 C3  B2 C2  B1 C1    A2 B2  A1 B1  A3 B3    A3 A1 A2
    roles     2a 2b  2a 2b  2a 2b    1a 1b  1a 1b  1a 1b    q  q  q
    places    0      1      2        0      1      2        0  1  2
    blocks    0: pairs of step 2     1: pairs of step 1     2: queries

    in the code       in the paper
    N, D, K, T        N chains, D retrieval steps, K numbers per symbol, T = N(2D+1) tokens
    symbol k          x_k of a chain: x_0 is A, x_1 is B, x_2 is C, ...
    role q            s_0 of Definition 1: the query, which shows x_0
    roles ka, kb      s_{2k-1} and s_{2k}: the pair of step k, which shows x_{k-1} and x_k
    block, place      the pairs of one step; where a pair stands among them, p_k of Definition 3
    targets           x_1, ..., x_D with the implicit curriculum (IC), x_D alone without it
"""

import argparse
import functools
import math
import os
import sys
from typing import NamedTuple


os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: its waiting threads free a core

import torch


# ---- the problem: which tokens there are, and what they show


class Block(NamedTuple):
    """A part of the sequence: so many slots of `size` tokens each, shuffled to its places."""

    roles: list  # of the tokens of a chain here: 2a and 2b
    size: int
    slots: int


class Task:
    """N chains of D+1 symbols. For a task of your own override __init__ and arrange, and add a row
    to TASKS."""

    def __init__(self, N, D):
        self.title, self.N = f"D={D}", N
        self.symbols = D + 1  # of a chain
        self.keys = N * (D + 1)  # random numbers that `arrange` needs

        # the pairs of each step, the last step first, and the queries
        self.blocks = [Block([f"{k}a", f"{k}b"], 2, N) for k in range(D, 0, -1)]
        self.blocks.append(Block(["q"], 1, N))

        # {role: the k of the x_k that it shows}, the query first
        self.roles = {"q": 0}
        for k in range(1, D + 1):
            self.roles.update({f"{k}a": k - 1, f"{k}b": k})

        # the name of each symbol, as in the paper: x_1 of the first chain is B1
        self.labels = [f"{chr(ord('A') + k)}{n + 1}" for n in range(N) for k in range(D + 1)]

        # the losses on which a model can stay, the highest first, and what it does then
        self.plateaus = [(average_loss(math.inf), "knows nothing")]
        if N > 1:
            self.plateaus.append((average_loss(N), f"averages the {N} candidates"))

        # the losses below which training has learned a symbol (0.5 if N = 4, as in the paper), and
        # above which an ablation has lost it
        lowest, _ = self.plateaus[-1]
        self.learned_below = lowest * 2 / 3
        self.lost_above = lowest / 2

    @property
    def T(self):
        """The number of tokens."""
        return sum(block.size * block.slots for block in self.blocks)

    def arrange(self, keys):
        """Shuffle by random keys (B, self.keys). Return
        symbols (B, T): the number of the symbol of each token; x_k of chain n is n * (D+1) + k;
        positions (B, N, roles): the tokens of each chain, in the order of self.roles."""
        N, D = self.N, self.symbols - 1

        # column 0 has the queries, column k the pairs of step k
        chain_at = keys.view(-1, N, D + 1).argsort(1)  # (B, N, D+1) the chain at each place
        place_of = chain_at.argsort(1)  # (B, N, D+1) the place of each chain, its inverse

        symbols = [chain_at[:, :, 0] * (D + 1)]  # (B, N) of x_0
        positions = [2 * N * D + place_of[:, :, 0]]  # (B, N) of the queries, the last N tokens
        for k in range(1, D + 1):
            x_k = chain_at[:, :, k] * (D + 1) + k  # (B, N)
            symbols.append(torch.stack([x_k - 1, x_k], -1).flatten(1))  # (B, 2N)
            first = 2 * N * (D - k) + 2 * place_of[:, :, k]  # (B, N) the first token of each pair
            positions += [first, first + 1]
        return torch.cat(symbols[::-1], 1), torch.stack(positions, -1)


TASKS = {"chain": Task}  # --task


class Batch(NamedTuple):
    """B sequences of T tokens, the last N of which are the queries."""

    inputs: torch.Tensor  # (B, T, K), or (B, T, 2K) with the numbers of each token's position
    targets: torch.Tensor  # (B, N, target symbols * K) of each query, in the order of the tokens
    positions: torch.Tensor  # (B, N, roles) the tokens of the chain of each query, as in Task.roles
    symbols: torch.Tensor  # (B, T) the number of each token's symbol


def make_batch(seed, index, N=4, D=3, K=4, ks=None, rotary="input", task="chain"):
    """The Batch of the examples `index` (B,) of data set `seed`, on the device of `index`: a pure
    function of the arguments. ks: the k of the target symbols, [1, 3] for x_1 and x_3 (default: all
    but x_0). rotary: "input" appends the position to each token, "qk" leaves it to the model."""
    problem, B = TASKS[task](N, D), len(index)

    # which symbol each token shows, and the vector of each symbol
    bits = random_bits(seed, index, problem.keys + len(problem.labels) * K)
    symbols, positions = problem.arrange(bits[:, : problem.keys])
    vectors = standard_normal(bits[:, problem.keys :]).view(B, -1, K)
    sequence = torch.arange(B, device=index.device)[:, None]
    inputs = vectors[sequence, symbols]  # (B, T, K)

    # the position of each token, as numbers
    if rotary == "input":
        angles = rotary_angles(problem.T, K, index.device).expand(B, -1, -1)  # (B, T, K/2)
        inputs = torch.cat([inputs, angles.cos(), angles.sin()], -1)  # (B, T, 2K)

    # the target symbols of the chain of each query
    asked = symbols[:, -N:] // problem.symbols  # (B, N) this chain
    chains = vectors[:, : N * problem.symbols].view(B, N, problem.symbols, K)[sequence, asked]
    targets = chains[:, :, ks or [*range(1, problem.symbols)]]  # (B, N, target symbols, K)
    return Batch(inputs, targets.flatten(2), positions[sequence, asked], symbols)


def rotary_angles(T, size, device=None):
    """(T, size/2) the angles of each token at the RoPE frequencies 10000^(-2i/size), size even."""
    evens = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    return torch.arange(T, device=device)[:, None] * 10000.0 ** (-evens / size)


# ---- the loss: for another, change these three

LOSS = "mean squared error"  # its name


def partial_losses(predictions, targets, K):
    """Two (..., target symbols * K) -> the losses (..., target symbols), means over K."""
    return (predictions.float() - targets).square().unflatten(-1, (-1, K)).mean(-1)


def average_loss(n):
    """The loss of a model that cannot tell n candidates apart and gives the best answer, of this
    loss their average. n = inf: it knows nothing."""
    return 1 - 1 / n


# ---- which examples: training counts up from 0, and held-out examples count down from -1

SPLITS = {
    "validation": range(1024),
    "confirmation": range(1024, 2**20),  # whether a run is solved
    "search": range(2**20, 2**20 + 2**16),  # to search circuits on
    "means": range(2**20 + 2**16, 2**21),  # of what heads read
    "circuits": range(2**21, 2**22),  # to validate them on
    "emergence": range(2**22, 2**23),
}


def held_out(split, n, device="cpu"):
    """(n,) the first n examples of a held-out split."""
    assert n <= len(SPLITS[split]), f"{split} has fewer than {n} sequences"
    return -1 - torch.tensor(SPLITS[split][:n], device=device)


@functools.lru_cache(maxsize=32)
def epoch_order(seed, epoch, examples):
    """(examples,) a random permutation. No data set has the seed ~seed, which is negative."""
    return random_bits(~seed, torch.tensor([epoch]), examples)[0].argsort()


def batch_index(seed, step, batch, examples):
    """(batch,) the examples of a training step: each once per epoch."""
    drawn = torch.arange(step * batch, (step + 1) * batch)
    epochs, parts = drawn // examples, []
    for epoch in epochs.unique().tolist():
        parts.append(epoch_order(seed, epoch, examples)[drawn[epochs == epoch] % examples])
    return torch.cat(parts)


# ---- random numbers: a hash of (seed, example, draw), so that every example can be made alone


def shift_right(x, bits):
    """x >> bits of int64 taken as uint64: the mask drops the copies of the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x):
    """The finaliser of splitmix64, int64 -> int64: each output bit depends on all input bits."""
    x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)  # uint64 as int64
    x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shift_right(x, 31)


def random_bits(seed, index, draws):
    """(B, draws) int64 random bits for the examples `index` (B,); the same on every device."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    seed = torch.as_tensor(seed, device=index.device)
    stream = mix(mix(seed + golden) ^ (index * golden))  # (B,); sums wrap around at 64 bits
    return mix(stream[:, None] + torch.arange(1, draws + 1, device=index.device) * golden)


def standard_normal(bits):
    """int64 random bits -> as many finite float32 numbers from N(0, 1)."""
    uniform = (((bits >> 41) & 0x7FFFFF).float() + 0.5) / 2**22 - 1  # in (-1, 1), without rounding
    return uniform.erfinv() * 2**0.5


# ---- command lines, of this stage and of all later ones


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that shows the description as it was written, and the defaults."""


def command_line(name, description):
    """An ArgumentParser that answers a wrong argument with one line and exit code 2."""
    p = argparse.ArgumentParser(name, None, description, allow_abbrev=False, formatter_class=Help)
    p.error = lambda message: p.exit(2, f"{name}: {message}\n")
    return p


def show(text=""):
    """Say on a terminal how far something is, in one line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r{text:50s}\r", end="", file=sys.stderr)


def progress(what, items):
    """Yield the items of a list, and show how many are done."""
    for done, item in enumerate(items, 1):
        yield item
        show(f"{what} {done}/{len(items)}")
    show()


def describe(problem, batch):
    """The first sequence of a batch as text: its tokens, their roles, the targets of each query."""
    names = [problem.labels[symbol] for symbol in batch.symbols[0].tolist()]
    lines = ["roles     the tokens, in order"]
    start = 0
    for block in problem.blocks:
        end = start + block.slots * block.size
        slots = [" ".join(names[i : i + block.size]) for i in range(start, end, block.size)]
        lines.append(f"{' '.join(block.roles):8s}  {'  '.join(slots)}")
        start = end
    lines += ["", "What the model must predict at each query:"]
    for query in batch.symbols[0, -problem.N :].tolist():  # the number of its x_0
        answer = problem.labels[query + 1 : query + problem.symbols]
        lines.append(f"  {problem.labels[query]}: {' '.join(answer)}")
    return "\n".join(lines)


def main():
    p = command_line("data.py", __doc__)
    p.add_argument("--task", default="chain", choices=TASKS, help="which task")
    p.add_argument("--N", type=int, default=4, help="chains per sequence")
    p.add_argument("--D", type=int, default=3, help="retrieval steps per chain")
    p.add_argument("--K", type=int, default=4, help="numbers per symbol")
    p.add_argument("--seed", type=int, default=0, help="which sequence")
    flags = p.parse_args()
    batch = make_batch(flags.seed, torch.arange(1), flags.N, flags.D, flags.K, task=flags.task)
    print(describe(TASKS[flags.task](flags.N, flags.D), batch))


if __name__ == "__main__":
    main()
