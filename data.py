"""The retrieval problem of Section 6: chains of symbols, cut into pairs that are shuffled. The
symbols are random vectors, new in every sequence.

    python data.py --D 3    # shows one worked sequence: tokens, roles, targets
"""

import argparse
import functools
import importlib
import os
import sys
from dataclasses import dataclass
from typing import NamedTuple


os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: idle threads sleep early

import torch


# ---- the problem


class Token(NamedTuple):
    """A token of a sequence before it is shuffled."""

    symbol: int  # the number of the symbol that it shows
    role: str = ""  # 1a, 1b, 2a, ..., q; "" if it has none
    chain: int | None = None  # 0 to N - 1; None if it belongs to no chain


class Batch(NamedTuple):
    """B sequences of T tokens each; the last N tokens of a sequence are its queries."""

    inputs: torch.Tensor  # (B, T, Task.inputs)
    targets: torch.Tensor  # (B, N, targets * K) the answers to each query, read by Task.losses
    positions: torch.Tensor  # (B, N, roles) the place, 0 to T - 1, of each role in a query's chain
    symbols: torch.Tensor  # (B, T) the number of the symbol that each token shows


@dataclass
class Task:
    """All about the problem: its sequences, its sizes, and its losses.

    A chain is A -> B -> C for D = 2. A sequence shows N chains, cut into pairs, and then their
    first symbols, the queries. At each query the model predicts the rest of the chain: it retrieves
    B with the pair (A, B), then C with (B, C). With N = 3, in three blocks:

        tokens    B3 C3  B2 C2  B1 C1    A2 B2  A1 B1  A3 B3    A3 A1 A2
        roles     2a 2b  2a 2b  2a 2b    1a 1b  1a 1b  1a 1b    q  q  q

    The shuffle moves chains, not roles: each place has the same role in every sequence.

    In the paper A, B, C are x_0, x_1, x_2, the role q is s_0, and the pair of step k, here 1a 1b or
    2a 2b, is s_{2k-1} s_{2k}. To predict all of x_1 to x_D is its implicit curriculum (IC).

    A task of your own is a subclass that overrides what differs: see make_task."""

    N: int = 4  # chains, and as many queries
    D: int = 3  # retrieval steps per chain
    K: int = 4  # numbers per symbol
    targets: list = ()  # the k of the symbols x_k to predict; by default all but x_0
    rotary: str = "input"  # appends the position to each token; "qk" leaves it to the model
    seed: int = 0  # which data set

    loss_name = "mean squared error"
    faithful_below = 0.05  # what the loss of a symbol must be below if a circuit still answers

    def __post_init__(self):
        """ValueError if there is no such task."""
        N, D, K = self.N, self.D, self.K
        if min(N, D, K) < 1:
            raise ValueError("--N, --D and --K must not be below 1")
        if self.rotary == "input" and K % 2:
            raise ValueError("--K must be even with --rotary input: it appends pairs of numbers")
        if not {*self.targets} <= {*range(1, D + 1)}:
            raise ValueError(f"--targets must be among 1 to {D}")
        self.targets = sorted({*self.targets}) or [*range(1, D + 1)]
        self.target_names = [f"x_{k}" for k in self.targets]

        # x_k of chain n has the number n (D + 1) + k; labels has the names in this order
        self.labels = [f"{chr(ord('A') + k)}{n + 1}" for n in range(N) for k in range(D + 1)]

        # blocks: the pairs of each step, the last step first, then the queries. A block is a list
        # of slots, which are shuffled among themselves; a slot, one pair or one query, is a list of
        # Tokens. For N = 1 and D = 1: [[[A1 as 1a, B1 as 1b]], [[A1 as q]]]
        self.blocks = []
        for k in range(D, 0, -1):
            block = []
            for n in range(N):
                number = n * (D + 1) + k  # of x_k
                block.append([Token(number - 1, f"{k}a", n), Token(number, f"{k}b", n)])
            self.blocks.append(block)
        self.blocks.append([[Token(n * (D + 1), "q", n)] for n in range(N)])

        # the numbers that a model reads at each token, and predicts at each query
        self.inputs = 2 * K if self.rotary == "input" else K
        self.outputs = K * len(self.targets)

        # Training can stall at these losses, the highest first. A model that cannot tell which of N
        # symbols is right does best with their average, whose error is 1 - 1/N at variance 1
        self.plateaus = [(1.0, "knows nothing")]
        if N > 1:
            self.plateaus += [(1 - 1 / N, f"averages the {N} candidates")]

    @property
    def title(self):
        """What figures and the names of runs call the task: D=3, or lookup D=3 of a subclass."""
        name = "" if type(self).__name__ == "Task" else f"{type(self).__name__.lower()} "
        return f"{name}D={self.D}"

    @property
    def tokens(self):
        """The Tokens of all blocks."""
        return [token for block in self.blocks for slot in block for token in slot]

    @property
    def T(self):
        """The number of tokens."""
        return len(self.tokens)

    @property
    def slots(self):
        """The roles of each slot of a chain: [["2a", "2b"], ["1a", "1b"], ["q"]]."""
        slots = [slot for block in self.blocks for slot in block if slot[0].chain == 0]
        return [[token.role for token in slot] for slot in slots]

    @property
    def roles(self):
        """{role: the k of the x_k that it shows}, the query first, then the blocks backwards. In
        chain 0 the number of x_k is k."""
        tokens = [token for block in self.blocks[::-1] for slot in block for token in slot]
        return {token.role: token.symbol for token in tokens if token.chain == 0}

    @property
    def learned_below(self):
        """The loss below which training has learned a symbol: 0.5 if N = 4, as in the paper."""
        return self.plateaus[-1][0] * 2 / 3

    @property
    def lost_above(self):
        """The loss above which an ablation has lost an answer: 0.375 if N = 4."""
        return self.plateaus[-1][0] / 2

    def batch(self, index):
        """The Batch of the examples with the numbers `index` (B,), on their device. An example
        depends on the task and on its number alone. One with N = 3 and D = 1:

            token                  0  1   2  3   4  5    6  7  8
            symbol of a token      A1 B1  A2 B2  A3 B3   A1 A2 A3
            key of its slot        .5     .9     .2      .8 .4 .1
            token_at a place       4  5   0  1   2  3    8  7  6     sorted by the keys
            symbol at a place      A3 B3  A1 B1  A2 B2   A3 A2 A1
            place_of a token       2  3   4  5   0  1    8  7  6     the inverse

        The first query asks for chain 3, whose q, 1a, 1b are the tokens 8, 4, 5: they stand at the
        positions 6, 0, 1."""
        B, device = len(index), index.device
        row = torch.arange(B, device=device)[:, None]  # (B, 1): x[row, i] is x[b, i[b]] for each b

        # random numbers: a key for each slot, and a vector for each symbol
        n_keys = len(self.blocks) * max(len(block) for block in self.blocks)
        bits = random_bits(self.seed, index, n_keys + len(self.labels) * self.K)
        keys = bits[:, :n_keys].view(B, -1, len(self.blocks))  # (B, slots, blocks)
        keys = keys.flip(2)  # the last block first: any order would do, all data sets have this one
        vectors = standard_normal(bits[:, n_keys:]).view(B, -1, self.K)  # (B, symbols, K)

        # the order of the tokens: in each block the slots are sorted by their keys
        token_at, first = [], 0  # first: the first token of the block
        for block, key in zip(self.blocks, keys.unbind(2), strict=True):
            sorted_slots = key[:, : len(block)].argsort(1)  # (B, slots)
            size = len(block[0])  # slot s has the tokens first + size * s and the next
            tokens = first + size * sorted_slots[:, :, None] + torch.arange(size, device=device)
            token_at.append(tokens.flatten(1))  # (B, slots, size) -> (B, slots * size)
            first += size * len(block)
        token_at = torch.cat(token_at, 1)  # (B, T)

        # what the tokens show
        unshuffled = torch.tensor([token.symbol for token in self.tokens], device=device)
        symbols = unshuffled[token_at]  # (B, T)
        inputs = vectors[row, symbols]  # (B, T, K)
        if self.rotary == "input":
            angles = rotary_angles(self.T, self.K, device).expand(B, -1, -1)  # (B, T, K/2)
            inputs = torch.cat([inputs, angles.cos(), angles.sin()], -1)  # (B, T, 2K)

        # what each query asks for: if it shows x_0 with the number 8, then x_2 has the number 10
        queries = symbols[:, -self.N :]  # (B, N)
        asked = queries[:, :, None] + torch.tensor(self.targets, device=device)  # (B, N, targets)
        targets = vectors[row, asked.flatten(1)].view(B, self.N, -1)  # (B, N, targets * K)

        # where the tokens of each query's chain stand
        token_of = {(token.chain, token.role): i for i, token in enumerate(self.tokens)}
        of_chains = [[token_of[n, role] for role in self.roles] for n in range(self.N)]
        of_chains = torch.tensor(of_chains, dtype=torch.long, device=device)  # (N, roles)
        chains = queries // (self.D + 1)  # (B, N) the chain of each query
        of_queries = of_chains[chains]  # (B, N, roles) the tokens of these chains
        place_of = token_at.argsort(1)  # (B, T)
        positions = place_of[row[:, :, None], of_queries]  # (B, N, roles)
        return Batch(inputs, targets, positions, symbols)

    def losses(self, predictions, batch):
        """The losses (B, N, targets) of predictions (B, N, outputs): means over K."""
        errors = (predictions - batch.targets).square()
        return errors.unflatten(-1, (-1, self.K)).mean(-1)


def make_task(name, *settings, **more):
    """The task of --task with these settings: `chain` is Task, and extras.lookup:Lookup the class
    Lookup of extras/lookup.py. ValueError if there is none.

    A task of your own is a subclass of Task. Beside its fields, the stages read of it:

        train.py      T, inputs, outputs, target_names, title, roles ({} if there are none), batch,
                      losses
        ablate.py     also slots, positions of a batch, plateaus (the last one says when an answer
                      is lost), faithful_below. A query has the role q; without roles there is no
                      circuit. It takes means over chains, so all chains must be alike
        analyze.py    also labels, whose first letters it draws, and loss_name

    A subclass that keeps this batch() gives the symbol x_k of chain n the number n (D + 1) + k, and
    puts the queries last: by these two, batch() finds answers and chains."""
    if name == "chain":
        return Task(*settings, **more)
    module, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--task {name}: {error}") from None
    if not hasattr(found, "losses"):  # Task may be __main__.Task here, so issubclass won't do
        raise ValueError(f"--task {name} is no subclass of data.Task")
    return found(*settings, **more)


def check_task(task):
    """ValueError if a batch of a task, or its losses, have other shapes than it says."""
    batch = task.batch(torch.arange(2))
    losses = task.losses(torch.zeros(2, task.N, task.outputs), batch)
    for name, found, said in (
        ("batch.inputs", batch.inputs, (2, task.T, task.inputs)),
        ("batch.positions", batch.positions, (2, task.N, len(task.roles))),
        ("losses", losses, (2, task.N, len(task.target_names))),
    ):
        if found.shape != said:
            raise ValueError(f"{name} of the task has the shape {tuple(found.shape)}, not {said}")


def rotary_angles(T, size, device=None):
    """(T, size/2) the angles of each token at the RoPE frequencies 10000^(-2i/size), size even."""
    evens = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    return torch.arange(T, device=device)[:, None] * 10000.0 ** (-evens / size)


# ---- which examples: training counts up from 0, and held-out examples count down from -1

SPLITS = {
    "validation": range(1024),
    "confirmation": range(1024, 2**20),  # whether a run is solved
    "search": range(2**20, 2**20 + 2**16),  # to search circuits on
    "means": range(2**20 + 2**16, 2**21),  # the corrupted sequences
    "circuits": range(2**21, 2**22),  # to validate circuits on
    "emergence": range(2**22, 2**23),
}


def held_out(split, n, device="cpu"):
    """(n,) the first n examples of a held-out split."""
    assert n <= len(SPLITS[split]), f"{split} has fewer than {n} sequences"
    return -1 - torch.tensor(SPLITS[split][:n], device=device)


@functools.lru_cache(maxsize=32)
def epoch_order(seed, epoch, examples):
    """(examples,) the order in which an epoch takes the examples 0, 1, ..., examples - 1."""
    keys = random_bits(~seed, torch.tensor([epoch]), examples)  # ~seed < 0 is no seed of a run
    return keys[0].argsort()


def batch_index(seed, step, batch, examples):
    """(batch,) the examples of a training step: each once per epoch. With 10 examples and batches
    of 4, step 2 takes the last two of epoch 0 and the first two of epoch 1."""
    first, last = step * batch, (step + 1) * batch - 1  # counted from the start of the training
    epochs = range(first // examples, last // examples + 1)
    orders = torch.cat([epoch_order(seed, epoch, examples) for epoch in epochs])
    return orders[first % examples :][:batch]


# ---- random numbers: a hash of (seed, example, draw), so that every example can be made alone
# (a generator would have to draw all examples before it). The hash is that of splitmix64 (Steele et
# al., 2014), which is made for uint64. In int64, sums and products have the same 64 bits; only >>
# differs.

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FACTOR_1 = 0xBF58476D1CE4E5B9 - 2**64
FACTOR_2 = 0x94D049BB133111EB - 2**64


def shift_right(x, bits):
    """The >> of uint64, which moves zeros in from the left where int64 moves in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # keeps the lowest 64 - bits


def mix(x):
    """The hash of splitmix64: if one bit of x changes, so do about half of those of its hash."""
    x = (x ^ shift_right(x, 30)) * FACTOR_1
    x = (x ^ shift_right(x, 27)) * FACTOR_2
    return x ^ shift_right(x, 31)


def random_bits(seed, index, draws):
    """(B, draws) int64 random bits for the examples `index` (B,), the same on every device. Each
    example has a start, and its draw i is mix(start + i * GOLDEN)."""
    seed = torch.as_tensor(seed, device=index.device)  # an int of Python would grow beyond 64 bits
    # (B,) hashed twice, so that neighbouring seeds and examples start far from one another
    start = mix(mix(seed + GOLDEN) ^ (index * GOLDEN))
    draw = torch.arange(1, draws + 1, device=index.device)
    return mix(start[:, None] + draw * GOLDEN)


def standard_normal(bits):
    """int64 random bits -> as many finite float32 numbers from N(0, 1)."""
    highest = shift_right(bits, 41).float()  # 23 bits: whole numbers from 0 to 2**23 - 1
    uniform = (highest + 0.5) / 2**22 - 1  # between -1 and 1, without rounding
    return uniform.erfinv() * 2**0.5  # by the inverse of the normal distribution function


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


def describe(task, batch):
    """The first sequence of a batch as text: its tokens, their roles, the targets of each query."""
    names = [task.labels[symbol] for symbol in batch.symbols[0].tolist()]
    lines = ["roles     the tokens, in order"]
    for block in task.blocks:
        roles = [token.role for slot in block for token in slot if token.chain == 0]
        slots = [" ".join(names.pop(0) for _ in slot) for slot in block]
        lines.append(f"{' '.join(roles):8s}  {'  '.join(slots)}")
    lines += ["", "What the model must predict at each query:"]
    for query in batch.symbols[0, -task.N :].tolist():  # the number of its x_0
        answer = [task.labels[query + k] for k in task.targets]
        lines.append(f"  {task.labels[query]}: {' '.join(answer)}")
    return "\n".join(lines)


def main():
    p = command_line("data.py", __doc__)
    p.add_argument("--task", default="chain", help="or module:Class, a task of your own")
    p.add_argument("--N", type=int, default=4, help="chains per sequence")
    p.add_argument("--D", type=int, default=3, help="retrieval steps per chain")
    p.add_argument("--seed", type=int, default=0, help="which data set; shows its first sequence")
    flags = p.parse_args()
    try:
        task = make_task(flags.task, flags.N, flags.D, seed=flags.seed)
    except ValueError as error:
        p.error(error)
    print(describe(task, task.batch(torch.arange(1))))


if __name__ == "__main__":
    main()
