"""Tasks whose sequences are put together from slots: for those that are no plain chain of pairs."""

import itertools
from typing import NamedTuple

from data import Batch, Task

import numpy as np
import torch


class Slot(NamedTuple):
    """Tokens that stay together when a sequence is shuffled: a pair, or one query."""

    group: int  # slots of one group are shuffled among themselves; the queries, 0, come last
    shows: dict  # {role: symbol} of its tokens: {"2a": 1, "2b": 2}
    chain: int | None = None  # 0 to N - 1; None for distractors


class SlotTask(Task):
    """The retrieval problem, as slots. A subclass calls `arrange` with its own."""

    def __post_init__(self):
        super().__post_init__()
        slots = []
        for k, n in itertools.product(range(self.D, 0, -1), range(self.N)):
            symbol = n * (self.D + 1) + k
            slots.append(Slot(k, {f"{k}a": symbol - 1, f"{k}b": symbol}, n))
        self.arrange(slots + [Slot(0, {"q": n * (self.D + 1)}, n) for n in range(self.N)])

    def arrange(self, slots):
        """Take these slots, and set what follows from them."""
        self.slots, self.roles = slots, {}
        self.T = sum(len(slot.shows) for slot in slots)
        self.chain_slots = [[*slot.shows] for slot in slots if slot.chain == 0]
        for slot in sorted(slots, key=lambda slot: slot.group):
            self.roles |= slot.shows if slot.chain == 0 else {}  # the symbol x_k of chain 0 is k

    def batch(self, size, rng):
        """A Batch of `size` sequences. The comments follow a sequence with N = 3, D = 1, whose
        tokens show A1 B1  A2 B2  A3 B3  A1 A2 A3 before the shuffle."""
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
