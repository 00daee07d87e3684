"""The retrieval problem of Section 6: chains of symbols, cut into pairs that are shuffled. The
symbols are random vectors, new in every sequence.

    python data.py --D 3    # shows one worked sequence: tokens, roles, targets
"""

import argparse
import os
import pkgutil
import sys
from dataclasses import dataclass
from typing import NamedTuple


# PyTorch reads it when it is imported: threads that wait shall sleep soon, since beside other busy
# processes they would slow one another down
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch


# ---- the problem


@dataclass
class Task:
    """The problem: its sequences, its sizes, and its losses.

    With D = 2 a chain is A -> B -> C. A sequence shows N chains, cut into pairs, and then their
    first symbols, the queries. At each query the model predicts the rest of the chain: it finds B
    in the pair (A, B), then C in (B, C). With N = 3:

        tokens    B3 C3  B2 C2  B1 C1    A2 B2  A1 B1  A3 B3    A3 A1 A2
        roles     2a 2b  2a 2b  2a 2b    1a 1b  1a 1b  1a 1b    q  q  q

    A place has the same role in every sequence; which chain stands there is random. In the paper
    A, B, C are x_0, x_1, x_2, the role q is s_0, and the pair of step k, here 1a 1b or 2a 2b, is
    s_{2k-1} s_{2k}. To predict all of x_1 to x_D is its implicit curriculum (IC).

    A task of your own is a subclass with what differs, like extras/lookup.py. Its queries come
    last and have the role q, and all its chains are alike, since means are over chains."""

    N: int = 4  # chains, and as many queries
    D: int = 3  # retrieval steps per chain
    K: int = 4  # dimensions of a symbol
    targets: list = ()  # the k of the symbols x_k to predict; by default all but x_0
    seed: int = 0  # which data set

    loss_name = "mean squared error"
    faithful_below = 0.05  # a circuit that answers has each symbol's loss below it

    def __post_init__(self):
        """ValueError if there is no such task."""
        N, D, K = self.N, self.D, self.K
        if min(N, D, K) < 1:
            raise ValueError("--N, --D and --K must not be below 1")
        if not {*self.targets} <= {*range(1, D + 1)}:
            raise ValueError(f"--targets must be among 1 to {D}")
        self.targets = sorted({*self.targets}) or [*range(1, D + 1)]
        self.target_names = [f"x_{k}" for k in self.targets]

        # x_k of chain n is the symbol n * (D + 1) + k; labels has their names in this order
        self.labels = [f"{chr(ord('A') + k)}{n + 1}" for n in range(N) for k in range(D + 1)]

        # {role: the k of the x_k that it shows}; slots, in the order of a sequence: the roles of a
        # pair, or of a query
        self.roles, self.chain_slots = {"q": 0}, [["q"]]
        for k in range(1, D + 1):
            self.roles |= {f"{k}a": k - 1, f"{k}b": k}
            self.chain_slots.insert(0, [f"{k}a", f"{k}b"])

        # the number of tokens, their dimensions, and those of what is predicted at each query
        self.T, self.inputs, self.outputs = N * (2 * D + 1), K, K * len(self.targets)

        # the loss of a model that answers the mean of the N symbols among which it cannot tell; of
        # one chain, where there is nothing to tell, that of a model that answers 0
        self.chance = 1 - 1 / N if N > 1 else 1.0

    @property
    def learned_below(self):
        """The loss below which training has learned a symbol: 0.5 if N = 4, as in the paper."""
        return self.chance * 2 / 3

    def draw(self, split, size, number=0):
        """Batch `number` of a split, of `size` sequences: the same for the same arguments. With
        another size it shuffles otherwise: a larger batch does not begin with the smaller one."""
        return self.batch(size, np.random.default_rng((self.seed, SPLITS.index(split), number)))

    def batch(self, size, rng):
        """A Batch of `size` sequences drawn by a NumPy generator. At the right of the code stands
        what one has with N = 3 and D = 1, which shows A3 B3  A1 B1  A2 B2  A3 A2 A1."""
        N, D, row = self.N, self.D, np.arange(size)[:, None]
        vectors = rng.standard_normal((size, N * (D + 1), self.K), dtype=np.float32)

        # which chain stands where, from 0, in the pairs of step D, D - 1, ..., 1 and the queries
        order = rng.random((size, D + 1, N)).argsort(-1)  # (B, D + 1, N)  2 0 1  2 1 0
        rank = order.argsort(-1)  # at which of N each chain stands there  1 2 0  2 1 0
        queries = order[:, D]  # (B, N) the chain of each                  2 1 0

        # what they show, and where 1a and 1b of each query stand
        shown = []
        places = {"q": np.broadcast_to(np.arange(self.T - N, self.T), (size, N))}  # 6 7 8
        for i, k in enumerate(range(D, 0, -1)):
            symbol = order[:, i] * (D + 1) + k  # (B, N) x_k of each pair  5 1 3
            shown += [np.stack([symbol - 1, symbol], 2).reshape(size, -1)]
            first = 2 * N * i + 2 * rank[row, i, queries]  # (B, N)        0 4 2
            places |= {f"{k}a": first, f"{k}b": first + 1}
        symbols = np.concatenate([*shown, queries * (D + 1)], 1)  # (B, T) 4 5 0 1 2 3  4 2 0
        inputs = vectors[row, symbols]  # (B, T, K)
        places = np.stack([places[role] for role in self.roles], 2)  # (B, N, roles)

        # what each query asks for: the first shows A3, the symbol 4, so x_1 is the symbol 5
        asked = symbols[:, -N:, None] + self.targets  # (B, N, targets)
        answers = vectors[row[:, :, None], asked].reshape(size, N, -1)  # (B, N, targets * K)
        return Batch(*map(torch.from_numpy, (inputs, answers, places, symbols)))

    def losses(self, predictions, batch):
        """The losses (B, N, targets) of predictions (B, N, outputs): means over K."""
        errors = (predictions - batch.answers).square()
        return errors.unflatten(-1, (-1, self.K)).mean(-1)


class Batch(NamedTuple):
    """B sequences of T tokens each. The last N tokens of a sequence are its queries."""

    inputs: torch.Tensor  # (B, T, Task.inputs)
    answers: torch.Tensor  # (B, N, ...) those to each query, in the form of the Task
    places: torch.Tensor  # (B, N, roles) where each role of a query's chain stands, 0 to T - 1
    symbols: torch.Tensor  # (B, T) which symbol each token shows, an index of Task.labels

    def to(self, device):
        """The same on another device."""
        return Batch(*(x.to(device) for x in self))


# a new one comes last, since its index is a part of the seed
SPLITS = "training", "validation", "confirmation", "search", "corrupted", "circuits", "emergence"


def make_task(name, *values):
    """The task of --task with these values of its fields: `chain` is Task, and
    extras.lookup:Lookup the class Lookup of extras/lookup.py. ValueError if there is none."""
    if name == "chain":
        return Task(*values)
    try:
        task = pkgutil.resolve_name(name)(*values)
        asks = task.targets and "q" in task.roles
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: it is no class
        raise ValueError(f"--task {name}: {error}") from None

    # does it do what Task and Batch say?
    if not asks:
        raise ValueError(f"--task {name}: it needs targets, and the role q")
    batch, queries = task.draw("validation", 64), (64, task.N)
    losses = task.losses(torch.zeros(*queries, task.outputs), batch)
    for what, tensor, shape, dtype in (
        ("inputs", batch.inputs, (64, task.T, task.inputs), torch.float32),
        ("places", batch.places, (*queries, len(task.roles)), torch.int64),
        ("losses", losses, (*queries, len(task.targets)), torch.float32),
    ):
        if (tensor.shape, tensor.dtype) != (shape, dtype) or not tensor.isfinite().all():
            raise ValueError(f"--task {name}: {what} must be finite, {dtype}, and {shape}")
    if not 0 <= batch.places.min() <= batch.places.max() < task.T:
        raise ValueError(f"--task {name}: places must be among 0 to {task.T - 1}")
    return task


# ---- command lines, of this stage and of all later ones


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that shows the description as it was written, and the defaults."""


def command_line(name, description):
    """An ArgumentParser that answers a wrong argument with one line and exit code 2."""
    p = argparse.ArgumentParser(name, None, description, allow_abbrev=False, formatter_class=Help)
    p.error = lambda message: p.exit(2, f"{p.prog}: {message}\n")
    return p


def progress(what, items):
    """Yield the items of a list, and show on a terminal how many are done."""
    for done, item in enumerate(items, 1):
        yield item
        if sys.stderr.isatty():
            end = "\n" if done == len(items) else ""
            print(f"\r{what} {done}/{len(items)}", end=end, file=sys.stderr, flush=True)


def describe(task, batch):
    """Print the first sequence of a batch: its tokens, their roles, the targets of each query."""
    names = [task.labels[symbol] for symbol in batch.symbols[0].tolist()]
    place_of = dict(zip(task.roles, batch.places[0].T.tolist(), strict=True))
    print("roles     the tokens that have a role, in order")
    for roles in task.chain_slots:
        slots = sorted(zip(*(place_of[role] for role in roles), strict=True))
        shown = [" ".join(names[place] for place in slot) for slot in slots]
        print(f"{' '.join(roles):8s}  {'  '.join(shown)}")
    print("\nWhat the model must predict at each query:")
    role_of = {k: role for role, k in task.roles.items()}  # one that shows x_k
    for n, query in enumerate(place_of["q"]):
        answer = [names[place_of[role_of[k]][n]] for k in task.targets]
        print(f"  {names[query]}: {' '.join(answer)}")


def main():
    p = command_line("data.py", __doc__)
    p.add_argument("--task", default="chain", help="or module:Class, a task of your own")
    p.add_argument("--N", type=int, default=4, help="chains per sequence")
    p.add_argument("--D", type=int, default=3, help="retrieval steps per chain")
    flags = p.parse_args()
    try:
        task = make_task(flags.task, flags.N, flags.D)
    except ValueError as error:
        p.error(error)
    describe(task, task.draw("training", 1))


if __name__ == "__main__":
    main()
