"""Tasks in which the pairs of each step stand whole among distractors, symbols that no chain has.

    --task extras.studies.places:random20    # among 20 distractors, anywhere: of two pairs a 1b has
                                             # one of 23 places, and so has a 2b

The queries come last.
"""

from data import Batch, Task

import numpy as np
import torch


class Places(Task):
    """The retrieval problem with G distractors in the block of each step."""

    G = 20

    def __post_init__(self):
        super().__post_init__()
        self.labels += [f"D{k}.{i + 1}" for k in range(1, self.D + 1) for i in range(self.G)]
        self.T += self.D * self.G

    def batch(self, size, rng):
        N, D, G = self.N, self.D, self.G
        chains = Task(N, D, self.K, self.targets, self.seed).batch(size, rng)

        # the distractors come after the queries, and then where these keys put them, one a token:
        # the number of its block, and a random number less than 1 that both tokens of a pair have
        number = np.arange(len(self.labels))[-D * G :]
        vectors = rng.standard_normal((size, D * G, self.K), dtype=np.float32)
        inputs = torch.cat([chains.inputs, torch.from_numpy(vectors)], 1)
        symbols = torch.cat([chains.symbols, torch.from_numpy(number).expand(size, -1)], 1)
        keys = np.arange(D)[:, None] + rng.random((size, D, N + G))
        pairs = keys[:, :, :N].repeat(2, 2).reshape(size, -1)
        queries = np.full((size, N), D)
        keys = np.concatenate([pairs, queries, keys[:, :, N:].reshape(size, -1)], 1)  # (B, T)

        # which token stands at each place, and the place of each token
        token_at = torch.from_numpy(keys.argsort(1, kind="stable"))
        place_of = token_at.argsort(1)
        inputs = inputs[torch.arange(size)[:, None], token_at]
        places = place_of.gather(1, chains.places.flatten(1)).view_as(chains.places)
        return Batch(inputs, chains.answers, places, symbols.gather(1, token_at))


def __getattr__(name):
    """Return the class random20 or the like, of any number of distractors."""
    if not name.startswith("random"):
        raise AttributeError(f"{__name__} has no task {name}")
    return type(name, (Places,), dict(G=int(name.removeprefix("random"))))
