"""Tasks in which the pairs of one step stand whole among distractors, symbols that no chain has.

    --task extras.studies.places:random20    # among 20 distractors, anywhere: of two pairs a 1b has
                                             # one of 23 places
    --task extras.studies.places:fixed20     # the same tokens, pairs at the same places everywhere

The pairs of a sequence are shuffled over their places, and the queries come last.
"""

import re

from data import Task, Token, random_bits

import torch


class Places(Task):
    """D = 1 with G distractors before the queries."""

    G, fixed = 20, False

    def __post_init__(self):
        super().__post_init__()
        if self.D != 1:
            raise ValueError("it has one step: set --D 1")
        N, G = self.N, self.G
        self.labels += [f"D{i + 1}" for i in range(G)]
        self.blocks.insert(1, [[Token(number)] for number in range(2 * N, 2 * N + G)])

    def batch(self, index):
        """That of data.Task, with the tokens before the queries moved."""
        batch, N, G, K = super().batch(index), self.N, self.G, self.K

        # tokens are sorted by a key, those of a pair by the same one: random, or such that pair n
        # comes after (n + 1/2) G/N distractors
        if self.fixed:
            keys = torch.cat([(torch.arange(N) + 0.5) * G / N, torch.arange(G) + 0.5])
            keys = keys.expand(len(index), -1)
        else:
            keys = random_bits(~self.seed, index, N + G)  # ~seed is no seed of sequences
        keys = torch.cat([keys[:, :N].repeat_interleave(2, 1), keys[:, N:]], 1).to(index.device)
        order = keys.argsort(dim=1, stable=True)  # (B, 2N + G)
        queries = torch.arange(2 * N + G, self.T, device=index.device).expand(len(index), -1)
        order = torch.cat([order, queries], 1)  # (B, T)

        # symbols move, the numbers of the positions stay
        sequence = torch.arange(len(index), device=index.device)[:, None]
        inputs = torch.cat([batch.inputs[sequence, order, :K], batch.inputs[:, :, K:]], 2)
        positions = order.argsort(1)[sequence[:, :, None], batch.positions]
        symbols = batch.symbols[sequence, order]
        return batch._replace(inputs=inputs, positions=positions, symbols=symbols)


def __getattr__(name):
    """Return the class random20, fixed20 or the like, of any number of distractors."""
    found = re.fullmatch(r"(random|fixed)(\d+)", name)
    if found is None:
        raise AttributeError(f"{__name__} has no task {name}")
    return type(name, (Places,), dict(G=int(found[2]), fixed=found[1] == "fixed"))
