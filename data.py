"""The retrieval problem of Section 6: what a task is, and how its sequences are made.

    python data.py --D 3                 # shows one worked sequence: tokens, roles, targets
    python data.py --task conditional    # the same for conditional retrieval (Section 3.1)

A chain is a list of D+1 symbols, A -> B -> C for D = 2. A sequence shows N chains, cut into pairs
and shuffled, and then the queries, which are the first symbols of the chains. At each query the
model predicts the rest of the chain: it retrieves B with the pair (A, B), then C with (B, C). The
symbols are random vectors, new in every sequence. With N = 3 and D = 2:

    tokens    B3 C3  B2 C2  B1 C1    A2 B2  A1 B1  A3 B3    A3 A1 A2
    roles     2a 2b  2a 2b  2a 2b    1a 1b  1a 1b  1a 1b    q  q  q
    slots     0      1      2        0      1      2        0  1  2
    blocks    0: pairs of step 2     1: pairs of step 1     2: queries

    in the code       in the paper
    N, D, K, T        N chains, D retrieval steps, K numbers per symbol, T = N(2D+1) tokens
    symbol k          x_k of a chain: x_0 is A, x_1 is B, x_2 is C, ...
    role q            s_0 of Definition 1: the query, which shows x_0
    roles ka, kb      s_{2k-1} and s_{2k}: the pair of step k, which shows x_{k-1} and x_k
    block, slot       the pairs of one step; where a pair stands among them, p_k of Definition 3
    targets           x_1, ..., x_D with the implicit curriculum (IC), x_D alone without it
"""

import argparse
import contextlib
import functools
import io
import itertools
import math
import os
import sys
import time
from typing import NamedTuple

import torch


# ---- command lines, of this stage and of all later ones


class UserError(ValueError):
    """A mistake that the user can correct. The program prints its message, which is one line and
    says what to do, and ends with exit code 2. Any other exception is a bug."""


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that shows the description as it was written, and the default of each flag."""


def command_line(name, description):
    """Return an ArgumentParser that answers a wrong argument with one line and exit code 2."""
    p = argparse.ArgumentParser(name, None, description, allow_abbrev=False, formatter_class=Help)
    p.error = lambda message: p.exit(2, f"{name}: {message}\n")
    return p


def number(kind, low, high=math.inf):
    """Return the type of an argument that is an int or a float (kind) from low to high."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high or math.isinf(value):  # nan neither
            bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's own message, "invalid int value"
    return parse


@contextlib.contextmanager
def program(name):
    """Run the body as the main of a script called `name`: a UserError, or an error of the disk,
    prints one line and ends with exit code 2; Ctrl-C ends with 130. A letter that the terminal
    lacks is printed as a question mark, and figures have our style, whatever a user has set."""
    if matplotlib := sys.modules.get("matplotlib"):
        matplotlib.rcdefaults()
        matplotlib.use("Agg")  # figures are files
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        yield
    except BrokenPipeError:  # the reader is gone, as in `python data.py | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def progress(what, items):
    """Yield the items of a list; say on stderr how far it is and how long the rest may take."""
    began = said = time.time()
    for done, item in enumerate(items, 1):
        yield item
        if time.time() - said > 0.5:
            said = time.time()
            left = (said - began) / done * (len(items) - done)
            print(f"\r{what} {done}/{len(items)}, {left:.0f} s left ", end="", file=sys.stderr)
    if said > began:
        print(f"\r{what} {len(items)}/{len(items)}, {time.time() - began:.0f} s", file=sys.stderr)


# ---- random numbers: a hash of (seed, example, draw), so that every example can be made alone


def mix(x):
    """The finaliser of splitmix64, int64 -> int64: each output bit depends on all input bits."""
    factors = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64, 1  # uint64 as int64
    for bits, factor in zip((30, 27, 31), factors, strict=True):
        shifted = (x >> bits) & ((1 << (64 - bits)) - 1)  # the mask drops the copies of the sign
        x = (x ^ shifted) * factor
    return x


def random_bits(seed, index, draws):
    """(B, draws) int64 random bits for the examples `index` (B,); the same on every device."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    seed = torch.as_tensor(seed, device=index.device)
    stream = mix(mix(seed + golden) ^ (index * golden))
    return mix(stream[:, None] + torch.arange(1, draws + 1, device=index.device) * golden)


def standard_normal(bits):
    """int64 random bits -> as many finite float32 numbers from N(0, 1)."""
    uniform = (((bits >> 41) & 0x7FFFFF).float() + 0.5) / 2**22 - 1  # in (-1, 1), without rounding
    return uniform.erfinv() * 2**0.5


# ---- the task: a table of roles


class Role(NamedTuple):
    """What a token is to its chain. The roles of one block stand side by side in a slot."""

    name: str  # q, 1a, 1b, ...
    symbol: int  # k if it shows x_k of its chain; -1 if it shows a distractor
    block: int  # the sequence shows block 0 first
    place: int  # among the roles of its block: 0 or 1 in a pair


class Block(NamedTuple):
    """A part of the sequence, whose slots stand in random order."""

    start: int  # its first token
    size: int  # tokens per slot: 2 for pairs, 1 for queries
    slots: int  # N, or N*N if crossed


class Task:
    """N chains per sequence and the table of their roles, the query first, from which everything
    else follows. A distractor is a symbol of no chain. ValueError if two roles have one name, or a
    name has other characters than letters and digits.

    A block has one slot for each chain. A crossed block has one for each pair of chains (i, j),
    slot i*N + j before the shuffle: it shows a symbol of chain i, one of chain j, and a third that
    is shown nowhere else. The slot (n, n) is that of chain n; the third of others is a distractor.
    mixed: the pairs of a block, of all steps of all chains, are shuffled together. crossed: the
    numbers of these blocks, at most one.
    """

    def __init__(self, title, N, roles, crossed=(), mixed=False):
        self.title, self.N, self.roles, self.crossed = title, N, roles, crossed
        self.names = [role.name for role in roles]
        if len({*self.names}) < len(roles) or not "".join(self.names).isalnum():
            raise ValueError(f"names of roles of task {title}: one each, of letters and digits")
        self.symbols = 1 + max(role.symbol for role in roles)  # per chain, x_0 included

        # the numbers of the roles in the order in which the sequence shows them
        self.in_reading_order = sorted(range(len(roles)), key=lambda number: roles[number][2:])

        # the blocks; of each token before the slots are shuffled, its block, slot, place and
        # symbol: n * symbols + k for x_k of chain n, or a larger number for a distractor
        self.blocks, tokens, distractors = [], [], itertools.count(N * self.symbols)
        for number in range(1 + max(role.block for role in roles)):
            shown = [roles[i] for i in self.in_reading_order if roles[i].block == number]
            slots = N**2 if number in crossed else N
            size = min(2, len(shown)) if mixed else len(shown)
            self.blocks.append(Block(len(tokens), size, slots * len(shown) // size))
            for slot, role in itertools.product(range(slots), shown):
                i, j = divmod(slot, N) if number in crossed else (slot, slot)
                owner = j if role.place == 1 else i
                in_chain = role.symbol >= 0 and (role.place < 2 or i == j)
                symbol = owner * self.symbols + role.symbol if in_chain else next(distractors)
                token = slot * len(shown) + role.place
                tokens.append((number, *divmod(token, size), symbol))
        self.T, self.tokens = len(tokens), [*torch.tensor(tokens).T]  # (T,) each

        # (loss, what a model with it does), the highest first; an average of n leaves 1 - 1/n
        self.plateaus = [(1, "knows nothing")]
        if N > 1 and not crossed:
            self.plateaus.append((1 - 1 / N, f"averages the {N} candidates"))
        elif N > 1:
            x, y, z = (f"$x_{self.role_at(*crossed, place).symbol}$" for place in range(3))
            self.plateaus.append((1 - 1 / N**2, f"{z}: averages all {N**2}"))
            self.plateaus.append((1 - 1 / N, f"averages {N} candidates; {z}: knows {x} or {y}"))

        # the losses below which a symbol is learned (0.5 if N = 4, as in the paper) and above which
        # it is lost
        lowest, _ = self.plateaus[-1]
        self.learned_below, self.lost_above = lowest * 2 / 3, lowest / 2

    def role_at(self, block, place):
        """The Role of this block and place."""
        return next(role for role in self.roles if role[2:] == (block, place))


@functools.lru_cache
def chain(N, D):
    """The retrieval problem (Section 6): the pairs (x_{k-1}, x_k) of each step k, the last step
    first, and then the queries x_0. The roles are q, 1a, 1b, 2a, ..., Db."""
    roles = [Role("q", symbol=0, block=D, place=0)]
    for k in range(1, D + 1):
        roles.append(Role(f"{k}a", symbol=k - 1, block=D - k, place=0))
        roles.append(Role(f"{k}b", symbol=k, block=D - k, place=1))
    return Task(f"D={D}", N, tuple(roles))


@functools.lru_cache
def conditional(N, D=3):
    """Conditional retrieval (Section 3.1): triples (x, y, z) of every x with every y, then pairs
    (a, y), pairs (a, x) and queries a. Here x_0, x_1, x_2, x_3 are a, x, y, z, for every D."""
    triples, y_pairs, x_pairs, queries = range(4)
    roles = (
        Role("q", symbol=0, block=queries, place=0),
        Role("1a", symbol=0, block=x_pairs, place=0),
        Role("1b", symbol=1, block=x_pairs, place=1),
        Role("2a", symbol=0, block=y_pairs, place=0),
        Role("2b", symbol=2, block=y_pairs, place=1),
        Role("3a", symbol=1, block=triples, place=0),
        Role("3b", symbol=2, block=triples, place=1),
        Role("3c", symbol=3, block=triples, place=2),
    )
    return Task("conditional", N, roles, crossed=(triples,))


@functools.lru_cache
def shuffled(N, D):
    """The retrieval problem with the pairs of all steps shuffled together: a place says nothing
    about the step."""
    roles = [role._replace(block=1) for role in chain(N, D).roles[:1]]
    roles += [role._replace(block=0, place=i) for i, role in enumerate(chain(N, D).roles[1:])]
    return Task(f"shuffled D={D}", N, tuple(roles), mixed=True)


TASKS = {"chain": chain, "conditional": conditional, "shuffled": shuffled}  # (N, D) -> Task


def check_problem(parser, flags):
    """End a program in one line if no problem has the task, D and K of these flags."""
    if flags.K % 2:
        parser.error(f"--K must be even (rotary encodings turn pairs), not {flags.K}")
    if flags.task == "conditional" and parser.get_default("D") != flags.D:
        parser.error("--task conditional is the same for every --D: leave --D out")


# ---- positional encodings


def rotary_angles(T, dimensions, device=None):
    """(T, dimensions/2) the angles of each token at the RoPE frequencies 10000^(-2i/dimensions)."""
    frequencies = 10000.0 ** (-torch.arange(0, dimensions, 2, device=device) / dimensions)
    return torch.arange(T, device=device)[:, None] * frequencies


def rotary_numbers(T, K, device=None):
    """(T, K) the cosines and then the sines of the angles of each token."""
    angles = rotary_angles(T, K, device)
    return torch.cat([angles.cos(), angles.sin()], -1)


# name: (f(T, K, device) -> (T, any), numbers that are appended to each token; and
# f(T, head size) -> (T, head size/2), angles by which queries and keys are rotated, or None)
ENCODINGS = {
    "input": (rotary_numbers, None),
    "qk": (lambda T, K, device=None: torch.empty(T, 0, device=device), rotary_angles),
}


# ---- batches


class Batch(NamedTuple):
    """B sequences of T tokens, the last N of which are the queries."""

    inputs: torch.Tensor  # (B, T, K + appended numbers) each token's symbol, then its position
    targets: torch.Tensor  # (B, N, K * target symbols) for each query, in the order of the tokens
    positions: torch.Tensor  # (B, N, roles) the token of each role of each chain


def make_batch(seed, index, N=4, D=3, K=4, targets=None, rotary="input", task="chain"):
    """The Batch of the examples `index` (B,) of data set `seed`, on the device of `index`: a pure
    function of both. targets: the k of the target symbols, [1, 3] for x_1 and x_3 (default: all but
    x_0); rotary: a key of ENCODINGS; task: a key of TASKS."""
    task, B, device = TASKS[task](N, D), len(index), index.device
    sequence = torch.arange(B, device=device)[:, None]

    # draw the keys of the shuffle, as many for each block as the largest needs, and the symbols
    most = max(block.slots for block in task.blocks)
    *_, shown_symbols = task.tokens
    drawn, symbols = most * len(task.blocks), 1 + max(shown_symbols.tolist())
    bits = random_bits(seed, index, drawn + symbols * K)
    keys = bits[:, :drawn].view(B, most, -1).flip(-1)  # (B, most, blocks), queries drawn first
    vectors = standard_normal(bits[:, drawn:]).view(B, symbols, K)

    # shuffle each block: its slots move to the ranks of their keys. The keys 70 20 50 sort as slots
    # 1 2 0, whose own order is 2 0 1: slot 0 moves to slot 2, slot 1 to slot 0, slot 2 to slot 1
    all_tokens, role_tokens = [], []
    for number, (start, size, count) in enumerate(task.blocks):
        rank = keys[:, :count, number].argsort(1).argsort(1)  # (B, count)
        moved = start + size * rank[..., None] + torch.arange(size, device=device)  # tokens
        all_tokens.append(moved.flatten(1))
        own = slice(None, None, N + 1 if number in task.crossed else 1)  # the slots (n, n)
        role_tokens.append(moved[:, own])  # (B, N, size)
    role_tokens = [tokens.reshape(B, N, -1) for tokens in role_tokens]  # of the block, if mixed
    roles = torch.tensor(task.in_reading_order, device=device)
    positions = torch.cat(role_tokens, 2)[:, :, roles.argsort()]

    # every token shows its symbol, followed by the numbers of its position
    shown = vectors.new_empty(B, task.T, K)
    shown[sequence, torch.cat(all_tokens, 1)] = vectors[:, shown_symbols.to(device)]
    appended, _ = ENCODINGS[rotary]
    numbers = appended(task.T, K, device).expand(B, -1, -1)

    # the target symbols of each chain, in the order of the queries
    chains = vectors[:, : N * task.symbols].view(B, N, task.symbols, K)
    chains = chains[sequence, positions[:, :, 0].argsort(1)]
    answers = chains[:, :, targets or [*range(1, task.symbols)]]
    return Batch(torch.cat([shown, numbers], -1), answers.flatten(2), positions)


def partial_losses(predictions, targets, K):
    """The mean squared errors (..., target symbols) of two (..., N, K * target symbols)."""
    return (predictions.float() - targets).square().unflatten(-1, (-1, K)).mean((-3, -1))


# ---- which examples: training counts up from 0, and held-out examples count down from -1

SPLITS = {
    "validation": range(1024),
    "confirmation": range(1024, 2**20),  # at the end of a run
    "search": range(2**20, 2**20 + 2**16),  # for circuits
    "means": range(2**20 + 2**16, 2**21),  # of what heads read
    "circuits": range(2**21, 2**22),  # to validate them
    "emergence": range(2**22, 2**23),
    "information": range(2**23, 2**24),
}


def held_out(split, n, device="cpu"):
    """(n,) the first n examples of a held-out split; ValueError if it has fewer."""
    first, size = SPLITS[split].start, len(SPLITS[split])
    if n > size:
        raise ValueError(f"there are {size} sequences held out for {split}, not {n}")
    return -1 - torch.arange(first, first + n, device=device)


@functools.lru_cache(maxsize=32)
def epoch_order(seed, epoch, examples):
    """(examples,) a random permutation, drawn with ~seed, which is no seed of sequences."""
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


# ---- one worked sequence, as text


def name_symbol(n, k):
    """B1 for x_1 of the first chain, n = 0; the letters are those of the paper, A for x_0."""
    return f"{chr(ord('A') + k)}{n + 1}" if k < 26 else f"x{k}.{n + 1}"


def token_names(task, symbols, positions):
    """The names of the T tokens of one sequence with these symbols (T, K) and positions (N, roles).
    Distractors have the name of their role and slot, da.1; D1.2 is the one after B1 and C2."""
    vectors = [tuple(vector) for vector in symbols.tolist()]
    name_of, names = {}, []
    for n, (number, role) in itertools.product(range(task.N), enumerate(task.roles)):
        name = f"{role.name}.{n + 1}" if role.symbol < 0 else name_symbol(n, role.symbol)
        name_of[vectors[positions[n, number]]] = name
    for vector in vectors:
        if vector not in name_of:
            i, j = (int(name[1:]) for name in names[-2:])
            z = task.role_at(*task.crossed, 2).symbol
            name_of[vector] = f"{name_symbol(i - 1, z)}.{j}"
        names.append(name_of[vector])
    return names


def describe(task, batch, K):
    """The first sequence of a batch as text: its tokens, their roles, the targets of each query."""
    names = token_names(task, batch.inputs[0, :, :K], batch.positions[0])
    lines = [f"{task.N} chains, {K} numbers per symbol, {task.T} tokens", ""]

    # the blocks, in the order of the sequence
    lines.append("roles     the tokens, in order")
    for number, (start, size, count) in enumerate(task.blocks):
        slots = [" ".join(names[start + size * slot :][:size]) for slot in range(count)]
        rows = ["  ".join(slots[first : first + task.N]) for first in range(0, count, task.N)]
        roles = " ".join(role.name for role in task.roles if role.block == number)
        lines.append(f"{roles + '  ':10s}" + f"\n{'':10s}".join(rows))

    # the targets, query by query
    lines += ["", "What the model must predict at each query:"]
    for n in batch.positions[0, :, 0].argsort().tolist():
        answer = " ".join(name_symbol(n, k) for k in range(1, task.symbols))
        lines.append(f"  {name_symbol(n, 0)}: {answer}")
    numbers = " ".join(f"{x:.2f}" for x in batch.inputs[0, 0].tolist())
    lines += ["", f"Token 0 ({names[0]}) as numbers, its symbol's, then its position's: {numbers}"]
    return "\n".join(lines)


def main():
    p = command_line("data.py", __doc__)
    count, seed = number(int, 1, 100), number(int, 0, 2**63 - 1)
    p.add_argument("--task", default="chain", choices=TASKS, help="which task")
    p.add_argument("--N", type=count, default=4, help="chains per sequence")
    p.add_argument("--D", type=count, default=3, help="retrieval steps per chain")
    p.add_argument("--K", type=count, default=4, help="numbers per symbol, even")
    p.add_argument("--seed", type=seed, default=0, help="which sequence to show")
    flags = p.parse_args()
    check_problem(p, flags)
    with program("data.py"):
        task = TASKS[flags.task](flags.N, flags.D)
        batch = make_batch(flags.seed, torch.arange(1), flags.N, flags.D, flags.K, task=flags.task)
        print(describe(task, batch, flags.K))


if __name__ == "__main__":
    main()
