"""The retrieval problem (Section 6): chains of symbols, cut into pairs, as shuffled sequences.

    python data.py --D 3                 # one worked sequence: tokens, roles, targets
    python data.py --task conditional    # of conditional retrieval (Section 3.1)

A task is a table of roles. Everything else follows from it: how long a sequence is, where each
role of each chain stands, which symbol it holds, which roles share something before any layer.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


# ---- random numbers: a hash of (seed, example, draw), so that any example can be made alone, in
# any order, on any device


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


# ---- the task: a table of roles


class Role(NamedTuple):
    """What a token can be in its chain. Roles of one block and chain stand side by side."""

    name: str  # q, 1a, 1b, ...
    symbol: int  # it holds x_symbol of its chain; -1: a symbol of nobody, to distract
    block: int  # the part of the sequence in which it stands; block 0 is read first
    place: int  # its place within its slot: 0 or 1 in a pair


class Block(NamedTuple):
    """A part of the sequence: slots in shuffled order, one for each chain or, in a crossed block,
    for each pair of chains."""

    start: int  # its first token
    size: int  # tokens per slot: 2 for pairs, 1 for queries
    slots: int  # N, crossed N*N


class Tokens(NamedTuple):
    """Every token of a sequence before its slots are shuffled, each field (T,)."""

    block: torch.Tensor
    slot: torch.Tensor
    place: torch.Tensor
    symbol: torch.Tensor  # its number: n * symbols + k for x_k of chain n, then those of nobody


@dataclass(frozen=True)
class Task:
    """N chains per sequence and the roles of each, the query first.

    In a crossed block slot i*N + j shows, before the shuffle, the symbol of chain i at place 0, of
    chain j at place 1, and at the others one that belongs to this pair alone. Chain n's own slot is
    that of the pair (n, n); the tokens of the other slots are nobody's and have no role."""

    title: str  # D=3
    N: int
    roles: tuple[Role, ...]
    crossed: tuple[int, ...] = ()  # blocks

    @functools.cached_property
    def names(self):
        return [role.name for role in self.roles]

    @functools.cached_property
    def blocks(self):
        """[Block, ...] in the order of reading."""
        blocks, start = [], 0
        for number in range(1 + max(role.block for role in self.roles)):
            size = 1 + max((role.place for role in self.roles if role.block == number), default=-1)
            slots = self.N**2 if number in self.crossed else self.N
            blocks.append(Block(start, size, slots))
            start += slots * size
        return blocks

    @property
    def T(self):
        """Tokens per sequence."""
        start, size, slots = self.blocks[-1]
        return start + slots * size

    @property
    def symbols(self):
        """Symbols per chain, x_0 included."""
        return 1 + max(role.symbol for role in self.roles)

    @functools.cached_property
    def tokens(self):
        """The Tokens."""
        nobodys, rows = itertools.count(self.N * self.symbols), []
        for number, block in enumerate(self.blocks):
            held = [self.role_at(number, place).symbol for place in range(block.size)]
            for slot, place in itertools.product(range(block.slots), range(block.size)):
                i, j = divmod(slot, self.N) if number in self.crossed else (slot, slot)
                owner = j if place == 1 else i  # the chain whose symbol it shows
                own = held[place] >= 0 and (place < 2 or i == j)
                symbol = owner * self.symbols + held[place] if own else next(nobodys)
                rows.append((number, slot, place, symbol))
        return Tokens(*torch.tensor(rows).T)

    @functools.cached_property
    def own_slots(self):
        """(N, blocks) the slot of each chain in each block, before the shuffle."""
        steps = [self.N + 1 if block.slots > self.N else 1 for block in self.blocks]
        return torch.arange(self.N)[:, None] * torch.tensor(steps)

    @functools.cached_property
    def in_reading_order(self):
        """The indices of the roles as they are read, whatever the slots."""
        return sorted(range(len(self.roles)), key=lambda i: self.roles[i][2:])

    @functools.cached_property
    def shown(self):
        """(roles, symbols) bool: which of x_0, x_1, ... a role holds."""
        return self.column("symbol")[:, None] == torch.arange(self.symbols)

    def column(self, field, device=None):
        """(roles,) a column of the table as a tensor: "symbol", "block" or "place"."""
        return torch.tensor([getattr(role, field) for role in self.roles], device=device)

    def positions(self, slots):
        """The token of every role (B, N, roles), from the slot of each chain in each block
        (B, N, blocks)."""
        block = self.column("block", slots.device)
        start, size, _ = torch.tensor(self.blocks, device=slots.device)[block].T
        return start + slots[:, :, block] * size + self.column("place", slots.device)

    def slots(self, positions):
        """The slot of each chain in each block (B, N, blocks), from the token of every role."""
        first = [self.roles.index(self.role_at(block, 0)) for block in range(len(self.blocks))]
        start, size, _ = torch.tensor(self.blocks, device=positions.device).T
        return (positions[:, :, first] - start) // size

    def role_at(self, block, place):
        """The Role that stands in this block at this place of its slot."""
        return next(role for role in self.roles if role[2:] == (block, place))

    @property
    def plateaus(self):
        """[(loss, what a model with this loss does), ...] for each symbol, above the solution at 0;
        the candidates are those that its block shows, fewer once another symbol of the slot is
        known."""
        one_of_N = 1 - 1 / self.N
        if self.N == 1:  # nothing to average
            return [(1, "knows nothing")]
        if not self.crossed:
            return [(1, "knows nothing"), (one_of_N, f"averages the {self.N} candidates")]
        x, y, z = (f"$x_{self.role_at(*self.crossed, place).symbol}$" for place in range(3))
        return [
            (1, "knows nothing"),
            (1 - 1 / self.N**2, f"{z}: averages all {self.N**2}"),
            (one_of_N, f"averages {self.N} candidates; {z}: knows {x} or {y}"),
        ]

    @property
    def lost(self):
        """The loss from which on a symbol counts as destroyed: half way to the lowest plateau."""
        return min(loss for loss, _ in self.plateaus) / 2

    @property
    def learned(self):
        """The loss below which a symbol counts as learned: two thirds of the lowest plateau, which
        is 0.5 for four chains."""
        return min(loss for loss, _ in self.plateaus) * 2 / 3


@functools.lru_cache
def chain(N, D):
    """The task of the paper (Definition 1): pairs (x_{k-1}, x_k) for each step k, the deepest step
    first, then the queries x_0. The roles are q, 1a, 1b, 2a, ..., Db."""
    rows = [Role("q", symbol=0, block=D, place=0)]
    for k in range(1, D + 1):
        rows.append(Role(f"{k}a", symbol=k - 1, block=D - k, place=0))
        rows.append(Role(f"{k}b", symbol=k, block=D - k, place=1))
    return Task(f"D={D}", N, tuple(rows))


@functools.lru_cache
def conditional(N, D=3):
    """Conditional retrieval (Section 3.1), where the last step depends on two symbols: triples
    (x, y, z) of every x with every y, then pairs (a, y), then pairs (a, x), then the queries a.
    x_0, ..., x_3 are a, x, y, z, whatever D.

    A query's x and y are those of its chain: symbols are drawn afresh and the blocks shuffled each
    on its own, so which of all x meets which of all y is as random as if two permutations were
    drawn."""
    triples, y_pairs, x_pairs, queries = range(4)
    rows = (
        Role("q", symbol=0, block=queries, place=0),
        Role("1a", symbol=0, block=x_pairs, place=0),
        Role("1b", symbol=1, block=x_pairs, place=1),
        Role("2a", symbol=0, block=y_pairs, place=0),
        Role("2b", symbol=2, block=y_pairs, place=1),
        Role("3a", symbol=1, block=triples, place=0),
        Role("3b", symbol=2, block=triples, place=1),
        Role("3c", symbol=3, block=triples, place=2),
    )
    return Task("conditional", N, rows, crossed=(triples,))


TASKS = {"chain": chain, "conditional": conditional}  # (N, D) -> Task


# ---- where the position of a token enters


def rotary_angles(T, dimensions, device=None):
    """(T, dimensions/2) angle of each token at the RoPE frequencies 10000^(-2i/dimensions)."""
    frequencies = 10000.0 ** (-torch.arange(0, dimensions, 2, device=device) / dimensions)
    return torch.arange(T, device=device)[:, None] * frequencies


def rotary_numbers(T, K, device=None):
    """(T, K) the cosines, then the sines, of the angles of each token."""
    angles = rotary_angles(T, K, device)
    return torch.cat([angles.cos(), angles.sin()], -1)


def no_numbers(T, K, device=None):
    return torch.empty(T, 0, device=device)


class Encoding(NamedTuple):
    """What tells a model where a token stands."""

    appended: Callable  # (T, K, device) -> (T, any size), numbers appended to each token
    angles: Callable | None  # (T, head size) -> (T, head size/2), turns queries and keys (RoPE)


ENCODINGS = {
    "input": Encoding(appended=rotary_numbers, angles=None),
    "qk": Encoding(appended=no_numbers, angles=rotary_angles),
}


# ---- batches


class Batch(NamedTuple):
    """B sequences of N chains; T tokens each, the last N of them the queries."""

    inputs: torch.Tensor  # (B, T, K and the numbers that the encoding appends)
    targets: torch.Tensor  # (B, N, asked*K) for each query in token order: the symbols asked for
    positions: torch.Tensor  # (B, N, roles) the token where each role of each chain stands


def make_batch(seed, index, N=4, D=3, K=4, targets=None, rotary="input", task="chain"):
    """The examples `index` (B,) of data set `seed`: a pure function of both, made on the device of
    `index`. The slots of each block are shuffled among themselves. task: one of TASKS.
    targets: which of x_1, x_2, ... each query is asked for, [1, 3] for x_1 and x_3; None: all."""
    task, B, device = TASKS[task](N, D), len(index), index.device
    block, slot, place, symbol = (column.to(device) for column in task.tokens)
    start, size, count = torch.tensor(task.blocks, device=device).T

    # random numbers: first for each slot of each block, from the queries' block back to the first
    # (those of slots that a block lacks sort behind all others), then for the symbols
    most = max(block.slots for block in task.blocks)
    shuffles, drawn = most * len(task.blocks), (1 + int(task.tokens.symbol.max())) * K
    bits = random_bits(seed, index, shuffles + drawn)
    order = bits[:, :shuffles].view(B, most, -1).flip(-1)
    order = order.masked_fill(torch.arange(most, device=device)[:, None] >= count, 2**63 - 1)
    goes_to = order.argsort(1).argsort(1)  # (B, most, blocks) ranks: where each slot goes
    symbols = standard_normal(bits[:, shuffles:]).view(B, -1, K)

    # every token goes with its slot
    tokens = start[block] + goes_to[:, slot, block] * size[block] + place  # (B, T)
    inputs = symbols.new_empty(B, task.T, K)
    inputs.scatter_(1, tokens[..., None].expand(-1, -1, K), symbols[:, symbol])
    numbers = ENCODINGS[rotary].appended(task.T, K, device)
    inputs = torch.cat([inputs, numbers.expand(B, -1, -1)], -1)

    # the answers in the order in which the queries stand
    own = task.own_slots.to(device)
    slots = goes_to[:, own, torch.arange(len(task.blocks), device=device)]  # (B, N, blocks)
    asked = torch.tensor(targets or range(1, task.symbols), device=device)
    answers = symbols[:, : N * task.symbols].view(B, N, -1, K)[:, :, asked]
    chain_of = slots[:, :, task.roles[0].block].argsort(1)  # (B, N) the chain in each slot
    answers = answers.gather(1, chain_of[..., None, None].expand_as(answers))  # (B, N, asked, K)
    return Batch(inputs, answers.flatten(2), task.positions(slots))


def partial_losses(predictions, targets, K):
    """(..., N, asked*K) twice -> (..., asked): the mean squared error of each sequence on each
    symbol that is asked for."""
    return (predictions.float() - targets).square().unflatten(-1, (-1, K)).mean((-3, -1))


# ---- which examples: training counts up from 0, what is held out counts down from -1

SPLITS = {  # where each held-out part begins; it ends where the next one does
    "validation": 0,
    "confirmation": 1024,  # at the end of a run
    "search": 2**20,  # for circuits
    "means": 2**20 + 2**16,  # of what heads read
    "validate": 2**21,  # circuits
    "emergence": 2**22,
    "information": 2**23,
    "end": 2**24,  # no part, the limit of the last
}


def held_out(split, n, device="cpu"):
    """(n,) the first n examples of a held-out part, of which none is ever trained on. ValueError if
    it has fewer."""
    first = SPLITS[split]
    size = min(start for start in SPLITS.values() if start > first) - first
    if n > size:
        raise ValueError(f"there are {size} sequences held out for {split}, not {n}")
    return -1 - torch.arange(first, first + n, device=device)


@functools.lru_cache(maxsize=32)
def epoch_order(seed, epoch, examples):
    """(examples,) a permutation. ~seed is negative, and seeds of sequences are not: what is drawn
    here and there never meets."""
    return random_bits(~seed, torch.tensor([epoch]), examples)[0].argsort()


def batch_index(seed, step, batch, examples):
    """(batch,) which examples step `step` trains on: every example once per epoch in a fresh order;
    with examples=0, examples never seen before."""
    drawn = torch.arange(step * batch, (step + 1) * batch)
    if not examples:
        return drawn
    epochs = drawn // examples
    parts = []
    for epoch in epochs.unique().tolist():
        parts.append(epoch_order(seed, epoch, examples)[drawn[epochs == epoch] % examples])
    return torch.cat(parts)


# ---- one worked sequence, as text


def name_symbol(n, k):
    """B2 for x_1 of chain 2, as in the paper's A, B, C; chains are counted from 1."""
    return f"{chr(ord('A') + k)}{n + 1}" if k < 26 else f"x{k}.{n + 1}"


def token_names(task, symbols, positions):
    """The names of all T tokens of one sequence, in order; symbols (T, K) that it shows, positions
    (N, roles) of its roles. D1.2 is nobody's, the last symbol of the triple of B1 and C2."""
    named, names = {}, []
    shown = [tuple(numbers) for numbers in symbols.tolist()]
    for n, tokens in enumerate(positions.tolist()):
        for role, token in zip(task.roles, tokens, strict=True):
            distracts = f"{role.name}.{n + 1}"
            named[shown[token]] = distracts if role.symbol < 0 else name_symbol(n, role.symbol)
    for numbers in shown:
        if numbers not in named:
            i, j = (int(name[1:]) for name in names[-2:])
            z = task.role_at(*task.crossed, 2).symbol
            named[numbers] = f"{name_symbol(i - 1, z)}.{j}"
        names.append(named[numbers])
    return names


def describe(task, batch, K):
    """The first sequence of a batch: its tokens, the roles, what must be said at each query."""
    names = token_names(task, batch.inputs[0, :, :K], batch.positions[0])
    chain_1 = ", ".join(name_symbol(0, k) for k in range(task.symbols))
    lines = [f"{task.N} chains, {K} numbers per symbol: {task.T} tokens. Chain 1 is {chain_1}.", ""]

    # the blocks in the order of reading
    lines.append("roles     the tokens, in order")
    for number, (start, size, slots) in enumerate(task.blocks):
        shown = [" ".join(names[start + size * slot :][:size]) for slot in range(slots)]
        rows = ["  ".join(shown[slot : slot + task.N]) for slot in range(0, slots, task.N)]
        roles = " ".join(task.role_at(number, place).name for place in range(size))
        lines.append(f"{roles:10s}" + f"\n{'':10s}".join(rows))

    # what is asked, query by query
    lines += ["", "What must be said at each query:"]
    for n in batch.positions[0, :, 0].argsort().tolist():
        said = " ".join(name_symbol(n, k) for k in range(1, task.symbols))
        lines.append(f"  {name_symbol(n, 0)}: {said}")
    numbers = " ".join(f"{x:.2f}" for x in batch.inputs[0, 0].tolist())
    lines += ["", f"Token 0 ({names[0]}) as numbers, its symbol's, then its position's: {numbers}"]
    return "\n".join(lines)


def main():
    about = dict(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p = argparse.ArgumentParser(**about)
    p.add_argument("--task", default="chain", choices=TASKS, help="which problem (default: chain)")
    for name, default, what in (
        ("N", 4, "chains per sequence"),
        ("D", 3, "retrieval steps per chain"),
        ("K", 4, "dimensions per symbol, even"),
        ("seed", 0, "which sequence to show"),
    ):
        p.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    flags = p.parse_args()
    batch = make_batch(flags.seed, torch.arange(1), flags.N, flags.D, flags.K, task=flags.task)
    print(describe(TASKS[flags.task](flags.N, flags.D), batch, flags.K))


if __name__ == "__main__":
    main()
