"""A task of other tables of symbols, of which the model looks up one after another.

python train.py --layers 4 --heads 2 --task extras.studies.tables:Conditional
"""

from data import Batch, Task

import numpy as np
import torch


class Conditional(Task):
    """Conditional retrieval (Section 3.1): triples (x, y, z) of every x with every y, then pairs
    (a, y), pairs (a, x) and queries a. Here x_0, x_1, x_2, x_3 are a, x, y, z. The triple of x and
    y of two chains shows a distractor: D1.2 stands after B1 and C2."""

    def __post_init__(self):
        super().__post_init__()
        if self.D != 3:
            raise ValueError("it is the same for every --D: leave --D out")
        N = self.N
        self.labels += [f"D{i + 1}.{j + 1}" for i in range(N) for j in range(N)]
        self.roles = {"q": 0, "1a": 0, "1b": 1, "2a": 0, "2b": 2, "3a": 1, "3b": 2, "3c": 3}
        self.chain_slots = [["3a", "3b", "3c"], ["2a", "2b"], ["1a", "1b"], ["q"]]
        self.T = 3 * N * N + 5 * N

    def batch(self, size, rng):
        N, row = self.N, np.arange(size)[:, None]
        vectors = rng.standard_normal((size, len(self.labels), self.K), dtype=np.float32)

        # what stands where: the triple N i + j has x of chain i and y of chain j
        triples = rng.random((size, N * N)).argsort(1)  # (B, N * N)
        with_y, with_x, queries = rng.random((3, size, N)).argsort(2)  # (B, N) each, chains
        i, j = triples // N, triples % N
        z = np.where(i == j, 4 * i + 3, 4 * N + triples)
        shown = [np.stack([4 * i + 1, 4 * j + 2, z], 2), np.stack([4 * with_y, 4 * with_y + 2], 2)]
        shown += [np.stack([4 * with_x, 4 * with_x + 1], 2), 4 * queries]
        symbols = np.concatenate([part.reshape(size, -1) for part in shown], 1)  # (B, T)

        # where the slots of each query's chain begin
        triple = 3 * triples.argsort(1)[row, queries * (N + 1)]  # (B, N)
        pair_y = 3 * N * N + 2 * with_y.argsort(1)[row, queries]
        pair_x = 3 * N * N + 2 * N + 2 * with_x.argsort(1)[row, queries]
        query = np.arange(self.T - N, self.T) + 0 * queries
        places = [query, pair_x, pair_x + 1, pair_y, pair_y + 1, triple, triple + 1, triple + 2]

        asked = 4 * queries[:, :, None] + self.targets  # (B, N, targets)
        answers = vectors[row[:, :, None], asked].reshape(size, N, -1)
        parts = vectors[row, symbols], answers, np.stack(places, 2), symbols
        return Batch(*map(torch.from_numpy, parts))
