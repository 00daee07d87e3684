"""The retrieval problem of Section 6: what a task is, and how its sequences are made.

    python data.py --D 3                 # shows one worked sequence: tokens, roles, targets
    python data.py --task conditional    # the same for conditional retrieval (Section 3.1)

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
    slot              a row of a block's table before the shuffle: here slot n shows chain n
    targets           x_1, ..., x_D with the implicit curriculum (IC), x_D alone without it
"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple


# before torch is imported: its waiting threads sleep, and free a core
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch


# ---- the problem: which symbols a sequence shows, block by block


class Block(NamedTuple):
    """A part of the sequence: a table of symbols whose rows, the slots, are shuffled to places."""

    roles: list  # names of the tokens of a chain here: 2a and 2b
    symbols: torch.Tensor  # (slots, tokens per slot) the number of the symbol of each token
    # the slot of chain 0, 1, ..., or (N, m) for the m slots of each; other slots show distractors
    own: slice | torch.Tensor = slice(None)


class Task:
    """N chains of `symbols` symbols and the blocks that show them, the queries last. Symbol number
    n * symbols + k is x_k of chain n; distractors, which no chain has, have the numbers after."""

    def __init__(self, title, N, symbols, blocks, distractors=()):
        self.title, self.N, self.symbols, self.blocks = title, N, symbols, blocks
        self.T = sum(block.symbols.numel() for block in blocks)

        # {role: the k of the x_k that it shows, or -1 for a distractor}, the query first; as in
        # chain 0, where x_k has the number k
        self.roles = {}
        for block in reversed(blocks):
            chain_0 = block.symbols[block.own][0].flatten().tolist()
            for name, number in zip(block.roles, chain_0, strict=True):
                if name in self.roles:
                    raise ValueError(f"two blocks have a role {name}")
                self.roles[name] = number if number < symbols else -1
        self.names = list(self.roles)

        # the name of each symbol; the letters are those of the paper: B1 is x_1 of the first chain
        self.distractors = distractors
        self.labels = []
        for n in range(N):
            for k in range(symbols):
                self.labels.append(f"{chr(ord('A') + k)}{n + 1}" if k < 26 else f"x{k}.{n + 1}")
        self.labels += distractors

        # the losses on which a model can stay, the highest first, and what it does then
        self.plateaus = [(average_loss(math.inf), "knows nothing")]
        if N > 1:
            self.plateaus.append((average_loss(N), f"averages the {N} candidates"))

        # the losses below which training has learned a symbol (0.5 if N = 4, as in the paper), and
        # above which an ablation has lost it
        lowest, _ = self.plateaus[-1]
        self.learned_below = lowest * 2 / 3
        self.lost_above = lowest / 2


@functools.lru_cache
def chain(N, D):
    """The retrieval problem (Section 6): the pairs (x_{k-1}, x_k) of each step k, the last step
    first, and then the queries x_0. The roles are q, 1a, 1b, 2a, ..., Db."""
    x = torch.arange(N * (D + 1)).view(N, D + 1)  # x[n, k] is the number of x_k of chain n
    blocks = []
    for k in range(D, 0, -1):
        blocks.append(Block([f"{k}a", f"{k}b"], x[:, k - 1 : k + 1]))
    blocks.append(Block(["q"], x[:, :1]))
    return Task(f"D={D}", N, D + 1, blocks)


class Batch(NamedTuple):
    """B sequences of T tokens, the last N of which are the queries."""

    inputs: torch.Tensor  # (B, T, K + appended numbers) each token's symbol, then its position
    targets: torch.Tensor  # (B, N, target symbols * K) by query: n is that of token T - N + n
    positions: torch.Tensor  # (B, N, roles) by chain: the tokens of chain n, role by role
    symbols: torch.Tensor  # (B, T) the number of each token's symbol


def make_batch(seed, index, N=4, D=3, K=4, ks=None, rotary="input", task="chain"):
    """The Batch of the examples `index` (B,) of data set `seed`, on the device of `index`: a pure
    function of the arguments. ks: the k of the target symbols, [1, 3] for x_1 and x_3 (default: all
    but x_0); rotary: a key of ENCODINGS; task: a key of TASKS."""
    problem = TASKS[task](N, D)
    B, device = len(index), index.device

    # draw the keys of the shuffle, as many for each block as the largest needs, and the symbols
    most = max(len(block.symbols) for block in problem.blocks)
    drawn = most * len(problem.blocks)
    bits = random_bits(seed, index, drawn + len(problem.labels) * K)
    keys = bits[:, :drawn].view(B, most, -1).unbind(-1)  # (B, most) of each block, the last first
    vectors = draw_vectors(bits[:, drawn:].view(B, -1, K))

    # shuffle each block by its keys: with 70 20 50, places 0 1 2 show slots 1 2 0, so that slots
    # 0 1 2 stand at places 2 0 1
    symbols, positions = [], []
    start = problem.T
    for block, key in zip(problem.blocks[::-1], keys, strict=True):  # from the queries on, as roles
        slots, size = block.symbols.shape
        start -= slots * size  # the first token of the block
        slot_at = key[:, :slots].contiguous().argsort(1)  # (B, places); MPS sorts nothing else
        place_of = slot_at.argsort(1)  # (B, slots), the inverse
        symbols.append(block.symbols.to(device)[slot_at].flatten(1))
        tokens = start + size * place_of[:, block.own, None] + torch.arange(size, device=device)
        positions.append(tokens.flatten(2))  # (B, N, roles of the block)
    symbols, positions = torch.cat(symbols[::-1], 1), torch.cat(positions, 2)

    # every token shows its symbol, followed by the numbers of its position
    sequence = torch.arange(B, device=device)[:, None]
    numbers = ENCODINGS[rotary].numbers(problem.T, K, device).expand(B, -1, -1)
    inputs = torch.cat([vectors[sequence, symbols], numbers], -1)

    # the target symbols of the chain of each query
    asked = symbols[:, -N:] // problem.symbols  # (B, N) this chain
    chains = vectors[:, : N * problem.symbols].view(B, N, problem.symbols, K)[sequence, asked]
    answers = chains[:, :, ks or [*range(1, problem.symbols)]]
    return Batch(inputs, answers.flatten(2), positions, symbols)


# ---- symbols and the loss: for others, change these four


def draw_vectors(bits):
    """int64 random bits (B, symbols, K) -> the vector of each symbol, of the same shape."""
    return standard_normal(bits)


LOSS = "mean squared error"  # its name


def partial_losses(predictions, targets, K):
    """Two (..., N, target symbols * K) -> the losses (..., target symbols), means over N and K."""
    return (predictions.float() - targets).square().unflatten(-1, (-1, K)).mean((-3, -1))


def average_loss(n):
    """The loss of the best answer for a model that cannot tell n candidates apart: their average.
    n = inf: it knows nothing."""
    return 1 - 1 / n


# ---- a second task


@functools.lru_cache
def conditional(N, D=3):
    """Conditional retrieval (Section 3.1): triples (x, y, z) of every x with every y, then pairs
    (a, y), pairs (a, x) and queries a. Here x_0, x_1, x_2, x_3 are a, x, y, z. The triple of x and
    y of two chains shows a distractor: D1.2 stands after B1 and C2."""
    if D != 3:
        raise UserError("--task conditional is the same for every --D: leave --D out")
    x = torch.arange(N * 4).view(N, 4)  # x[n, k] is the number of x_k of chain n
    triples, distractors = [], []
    for i in range(N):
        for j in range(N):
            z = x[i, 3]
            if i != j:
                z = 4 * N + len(distractors)
                distractors.append(f"D{i + 1}.{j + 1}")
            triples.append([x[i, 1], x[j, 2], z])
    blocks = [
        Block(["3a", "3b", "3c"], torch.tensor(triples), slice(None, None, N + 1)),  # i = j
        Block(["2a", "2b"], x[:, [0, 2]]),
        Block(["1a", "1b"], x[:, [0, 1]]),
        Block(["q"], x[:, :1]),
    ]
    return Task("conditional", N, 4, blocks, distractors)


TASKS = {"chain": chain, "conditional": conditional}  # (N, D) -> Task


# ---- a sequence as text


def describe(problem, batch):
    """The first sequence of a batch as text: its tokens, their roles, the targets of each query."""
    K = batch.targets.shape[-1] // (problem.symbols - 1)
    names = [problem.labels[symbol] for symbol in batch.symbols[0].tolist()]
    lines = [f"{problem.N} chains, {K} numbers per symbol, {problem.T} tokens", ""]

    # the blocks, in the order of the sequence, N slots a line
    lines.append("roles     the tokens, in order")
    tokens = iter(names)
    for block in problem.blocks:
        slots, size = block.symbols.shape
        shown = [" ".join(itertools.islice(tokens, size)) for _ in range(slots)]
        title = " ".join(block.roles)
        for first in range(0, slots, problem.N):
            lines.append(f"{title:8s}  " + "  ".join(shown[first : first + problem.N]))
            title = ""

    # the targets, query by query
    lines += ["", "What the model must predict at each query:"]
    for query in batch.symbols[0, -problem.N :].tolist():
        answer = problem.labels[query + 1 : query + problem.symbols]
        lines.append(f"  {problem.labels[query]}: {' '.join(answer)}")
    numbers = " ".join(f"{x:.2f}" for x in batch.inputs[0, 0].tolist())
    lines += ["", f"Token 0 ({names[0]}) as numbers, its symbol's, then its position's: {numbers}"]
    return "\n".join(lines)


# ---- positional encodings


def rotary_angles(T, dimensions, device=None):
    """(T, dimensions/2) the angles of each token at the RoPE frequencies 10000^(-2i/dimensions)."""
    if dimensions % 2:
        text = "rotary encodings turn pairs of numbers: --K, or with --rotary qk the head size,"
        raise UserError(f"{text} must be even, not {dimensions}")
    evens = torch.arange(0, dimensions, 2, dtype=torch.float32, device=device)
    return torch.arange(T, device=device)[:, None] * 10000.0 ** (-evens / dimensions)


def rotary_numbers(T, K, device=None):
    """(T, K) the cosines and then the sines of the angles of each token."""
    angles = rotary_angles(T, K, device)
    return torch.cat([angles.cos(), angles.sin()], -1)


def no_numbers(T, K, device=None):
    return torch.empty(T, 0, dtype=torch.float32, device=device)


class Encoding(NamedTuple):
    """How a model knows the position of a token."""

    numbers: Callable = no_numbers  # f(T, K, device) -> (T, any), appended to the symbols
    angles: Callable | None = None  # f(T, head size) -> (T, head size/2), by which RoPE rotates
    bias: Callable | None = None  # f(T, heads) -> (heads, T, T), added to the attention scores


ENCODINGS = {"input": Encoding(rotary_numbers), "qk": Encoding(angles=rotary_angles)}


# ---- which examples: training counts up from 0, and held-out examples count down from -1

SPLITS = {
    "validation": range(1024),
    "confirmation": range(1024, 2**20),  # whether a run is solved
    "search": range(2**20, 2**20 + 2**16),  # to search circuits on
    "means": range(2**20 + 2**16, 2**21),  # of what heads read
    "circuits": range(2**21, 2**22),  # to validate them on
    "emergence": range(2**22, 2**23),
    "information": range(2**23, 2**24),
}


def held_out(split, n, device="cpu"):
    """(n,) the first n examples of a held-out split; ValueError if it has fewer."""
    examples = SPLITS[split]
    if n > len(examples):
        raise ValueError(f"there are {len(examples)} sequences held out for {split}, not {n}")
    return -1 - torch.tensor(examples[:n], device=device)


@functools.lru_cache(maxsize=32)
def epoch_order(seed, epoch, examples):
    """(examples,) a random permutation. No data set has the seed ~seed, which is negative."""
    return random_bits(~seed, torch.tensor([epoch]), examples)[0].argsort()


def batch_index(seed, step, batch, examples):
    """(batch,) the examples of a training step: each once per epoch, or new ones if examples=0."""
    drawn = torch.arange(step * batch, (step + 1) * batch)
    if not examples:
        return drawn
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


class UserError(ValueError):
    """A mistake that the user can correct; the message is one line and says what to do. Any other
    exception is a bug."""


@contextlib.contextmanager
def program(name):
    """Run the body as the main of a script called `name`: a UserError prints its line and ends with
    exit code 2, Ctrl-C ends with 130. All other errors keep their traceback."""
    out, err = Printed(sys.stdout), Printed(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        except UserError as error:
            print(f"{name}: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)


class Printed:
    """A stream that prints at once, and nothing more when nobody reads it any more, as after
    `| head`: a training goes on."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if not isinstance(error, BrokenPipeError):
                raise UserError(f"cannot print: {error.strerror}") from None


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that shows the description as it was written, and the default of flags with a value."""

    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.nargs != 0 else action.help


def command_line(name, description):
    """Return an ArgumentParser that answers a wrong argument with one line and exit code 2."""
    p = argparse.ArgumentParser(name, None, description, allow_abbrev=False, formatter_class=Help)
    p.error = lambda message: p.exit(2, f"{name}: {message}\n")
    return p


def number(kind, low, high=10**9):
    """Return the type of an argument that is an int or a float (kind) from low to high."""

    def parse(text):
        if not low <= kind(text) <= high:  # nan neither
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text}")
        return kind(text)

    parse.__name__ = kind.__name__  # for argparse's own message, "invalid int value"
    return parse


def show(text=""):
    """Say on stderr how far something is, in one line that the next one replaces."""
    print(f"\r{text:50s}\r", end="", file=sys.stderr)


def progress(what, items):
    """Yield the items of a list, and show how many are done and how long the rest takes."""
    began = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        left = (time.monotonic() - began) / done * (len(items) - done)
        show(f"{what} {done}/{len(items)}, {left:.0f} s left")
    show()


def main():
    p = command_line("data.py", __doc__)
    count = number(int, 1, 100)
    p.add_argument("--task", default="chain", choices=TASKS, help="which task")
    p.add_argument("--N", type=count, default=4, help="chains per sequence")
    p.add_argument("--D", type=count, default=3, help="retrieval steps per chain")
    p.add_argument("--K", type=count, default=4, help="numbers per symbol, even")
    p.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help="which sequence")
    with program("data.py"):
        flags = p.parse_args()
        problem = TASKS[flags.task](flags.N, flags.D)
        index = torch.arange(1)
        batch = make_batch(flags.seed, index, flags.N, flags.D, flags.K, task=flags.task)
        print(describe(problem, batch))


if __name__ == "__main__":
    main()
