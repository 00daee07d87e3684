"""The retrieval problem of Section 6: chains of symbols, cut into pairs that are shuffled. The
symbols are random vectors, new in every sequence.

    python data.py --D 3    # shows one worked sequence: tokens, roles, targets
"""

import argparse
import importlib
import itertools
import os
import sys
from dataclasses import dataclass
from typing import NamedTuple


os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch: idle threads sleep early

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

    A task of your own is a subclass: see make_task."""

    N: int = 4  # chains, and as many queries
    D: int = 3  # retrieval steps per chain
    K: int = 4  # dimensions of a symbol
    targets: list = ()  # the k of the symbols x_k to predict; by default all but x_0
    seed: int = 0  # which data set

    loss_name = "mean squared error"
    blank = 1.0  # the loss of a model that knows nothing; at variance 1 it answers zero
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

        # x_k of chain n is the symbol n (D + 1) + k; labels has their names in this order
        self.labels = [f"{chr(ord('A') + k)}{n + 1}" for n in range(N) for k in range(D + 1)]

        # before the shuffle: group k has the pairs of step k, group 0 the queries
        self.slots = []
        for k, n in itertools.product(range(D, 0, -1), range(N)):
            symbol = n * (D + 1) + k
            self.slots.append(Slot(k, {f"{k}a": symbol - 1, f"{k}b": symbol}, n))
        self.slots += [Slot(0, {"q": n * (D + 1)}, n) for n in range(N)]

        # the dimensions of a token, and of what a model predicts at each query
        self.inputs, self.outputs = K, K * len(self.targets)

        # the loss of a model that cannot tell which of N symbols is right: it answers their average
        self.chance = 1 - 1 / N if N > 1 else self.blank

    @property
    def title(self):
        """The task in names of runs: "D=3", and of a subclass "lookup D=3"."""
        return f"{type(self).__name__.lower()} D={self.D}".removeprefix("task ")

    @property
    def lost_above(self):
        """The loss above which a query is not answered: halfway to that average."""
        return self.chance / 2

    @property
    def learned_below(self):
        """The loss below which training has learned a symbol: 0.5 if N = 4, as in the paper."""
        return self.chance * 2 / 3

    @property
    def T(self):
        """The number of tokens."""
        return sum(len(slot.shows) for slot in self.slots)

    @property
    def chain_slots(self):
        """The roles of each slot of a chain: [["2a", "2b"], ["1a", "1b"], ["q"]]."""
        return [[*slot.shows] for slot in self.slots if slot.chain == 0]

    @property
    def roles(self):
        """{role: the k of the x_k that it shows}, the query first, then the last group before it,
        and so on."""
        roles = {}
        for slot in sorted(self.slots, key=lambda slot: slot.group):
            roles |= slot.shows if slot.chain == 0 else {}  # the symbol x_k of chain 0 is k
        return roles

    def draw(self, split, size, number=0):
        """Batch `number` of a split, of `size` sequences: the same for the same arguments."""
        return self.batch(size, np.random.default_rng((self.seed, SPLITS.index(split), number)))

    def batch(self, size, rng):
        """A Batch of `size` sequences drawn by a NumPy generator. The comments follow a sequence
        with N = 3, D = 1, whose tokens show A1 B1  A2 B2  A3 B3  A1 A2 A3 before the shuffle."""
        row = np.arange(size)[:, None]  # (B, 1): x[row, i] is x[b, i[b]] for each b
        vectors = rng.standard_normal((size, len(self.labels), self.K), dtype=np.float32)

        # one key a slot, random less its group: -.6  -.2  -.9  .8 .4 .1
        keys = rng.random((size, len(self.slots))) - [slot.group for slot in self.slots]
        # sort the tokens by it; those of a slot have the same, and stay together
        keys = keys.repeat([len(slot.shows) for slot in self.slots], 1)  # (B, T)
        token_at = keys.argsort(1, kind="stable")  # (B, T) 4 5  0 1  2 3  8 7 6
        place_of = token_at.argsort(1)  # (B, T) of each token: 2 3  4 5  0 1  8 7 6

        # what they show: A3 B3  A1 B1  A2 B2  A3 A2 A1
        tokens = [(slot, role) for slot in self.slots for role in slot.shows]
        symbols = np.array([slot.shows[role] for slot, role in tokens])[token_at]  # (B, T)
        inputs = vectors[row, symbols]  # (B, T, K)

        # what each query asks for: the first shows A3, the symbol 4, so x_1 is the symbol 5
        queries = symbols[:, -self.N :]  # (B, N)
        asked = queries[:, :, None] + self.targets  # (B, N, targets)
        answers = vectors[row[:, :, None], asked].reshape(size, self.N, -1)  # (B, N, targets * K)

        # where the tokens of its chain stand: q, 1a, 1b of A3, the tokens 8, 4, 5, at 6, 0, 1
        names = [(slot.chain, role) for slot, role in tokens]
        of_chains = [[names.index((n, role)) for role in self.roles] for n in range(self.N)]
        chains = queries // (self.D + 1)  # (B, N) that each query asks for, from 0
        of_queries = np.array(of_chains, dtype=int)[chains]  # (B, N, roles) its tokens
        places = place_of[row[:, :, None], of_queries]
        return Batch(*map(torch.from_numpy, (inputs, answers, places, symbols)))

    def losses(self, predictions, batch):
        """The losses (B, N, targets) of predictions (B, N, outputs): means over K."""
        errors = (predictions - batch.answers).square()
        return errors.unflatten(-1, (-1, self.K)).mean(-1)

    def decoy(self, batch):
        """The batch in which each query, where it stands, has the places and the answers of another
        chain; None if there is one chain. A circuit must not answer it: see ablate.validate."""
        if self.N == 1:
            return None
        places, answers = batch.places.roll(1, 1), batch.answers.roll(1, 1)
        query = [*self.roles].index("q")
        places[:, :, query] = batch.places[:, :, query]
        return batch._replace(places=places, answers=answers)


class Slot(NamedTuple):
    """Tokens that stay together when a sequence is shuffled: a pair, or one query."""

    group: int  # slots of one group are shuffled among themselves; the queries, 0, come last
    shows: dict  # {role: symbol} of its tokens: {"2a": 1, "2b": 2}
    chain: int | None = None  # 0 to N - 1; None for distractors


class Batch(NamedTuple):
    """B sequences of T tokens each. The last N tokens of a sequence are its queries."""

    inputs: torch.Tensor  # (B, T, Task.inputs)
    answers: torch.Tensor  # (B, N, targets * K) those to each query; only Task reads them
    places: torch.Tensor  # (B, N, roles) where each role of a query's chain stands, 0 to T - 1
    symbols: torch.Tensor  # (B, T) which symbol each token shows, an index of Task.labels

    def to(self, device):
        """The same on another device."""
        return Batch(*(x.to(device) for x in self))


SPLITS = "training", "validation", "confirmation", "search", "corrupted", "circuits", "emergence"


def make_task(name, *values, **more):
    """The task of --task with these values of its fields: `chain` is Task, and
    extras.lookup:Lookup the class Lookup of extras/lookup.py. ValueError if there is none.

    A task of your own is a subclass of Task. The stages read of it:

        train.py      T, N, inputs, outputs, targets, target_names, title, roles ({} if there are
                      none), batch, losses (finite: 0 of a query that is not asked)
        ablate.py     also chain_slots, the places of a batch, faithful_below, lost_above, decoy.
                      Its queries have the role q, and all chains are alike, since means are over
                      chains
        analyze.py    also labels (it draws their first letters), chance, blank, learned_below,
                      loss_name

    If it keeps batch(), x_k of chain n is the symbol n (D + 1) + k, and queries are last."""
    if name == "chain":
        return Task(*values, **more)
    module, _, class_name = name.partition(":")
    try:
        task_class = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--task {name}: {error}") from None
    return task_class(*values, **more)


def check_task(task):
    """ValueError if a batch of a task, or its losses, are not as Batch and make_task say."""
    if task.roles and not ("q" in task.roles and task.targets):
        raise ValueError("the task has roles, and must have the role q and targets, [1] for x_1")
    B, N = 64, task.N
    batch = task.draw("validation", B)
    if not all(isinstance(x, torch.Tensor) for x in batch) or batch.inputs.dtype != torch.float32:
        raise ValueError("a batch of the task must have tensors, and inputs of the type float32")
    losses = task.losses(torch.zeros(B, N, task.outputs), batch)
    found = [tuple(x.shape) for x in (batch.inputs, batch.places, losses)]
    said = [(B, task.T, task.inputs), (B, N, len(task.roles)), (B, N, len(task.target_names))]
    if found != said:
        raise ValueError(f"inputs, places and losses of the task have {found}, not {said}")
    if not losses.isfinite().all():
        raise ValueError("a loss of the task is not finite: let one that is not asked be 0")
    if not ((batch.places >= 0) & (batch.places < task.T)).all():
        raise ValueError(f"a place of the task is not among 0 to {task.T - 1}")


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
    for _, group in itertools.groupby(task.slots, lambda slot: slot.group):
        group = [*group]
        roles = " ".join(role for slot in group if slot.chain == 0 for role in slot.shows)
        shown = [" ".join(names.pop(0) for _ in slot.shows) for slot in group]
        lines.append(f"{roles:8s}  {'  '.join(shown)}")
    lines += ["", "What the model must predict at each query:"]
    for query in batch.symbols[0, -task.N :].tolist():  # the symbol x_0 of its chain
        answer = [task.labels[query + k] for k in task.targets]
        lines.append(f"  {task.labels[query]}: {' '.join(answer)}")
    return "\n".join(lines)


def main():
    p = command_line("data.py", __doc__)
    p.add_argument("--task", default="chain", help="or module:Class, a task of your own")
    p.add_argument("--N", type=int, default=4, help="chains per sequence")
    p.add_argument("--D", type=int, default=3, help="retrieval steps per chain")
    p.add_argument("--seed", type=int, default=0, help="which data set")
    flags = p.parse_args()
    try:
        task = make_task(flags.task, flags.N, flags.D, seed=flags.seed)
    except ValueError as error:
        p.error(error)
    print(describe(task, task.draw("training", 1)))


if __name__ == "__main__":
    main()
