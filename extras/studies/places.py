"""Tasks in which the pairs of each step stand whole among distractors, symbols that no chain has.

    --task extras.studies.places:random20    # among 20 distractors, anywhere: of two pairs a 1b has
                                             # one of 23 places, and so has a 2b
    --task extras.studies.places:fixed20     # the same tokens, pairs at the same places everywhere

The pairs of a sequence are shuffled over their places, and the queries come last.
"""

import re

from data import Batch
from extras.studies.slots import Slot, SlotTask

import numpy as np
import torch


class Places(SlotTask):
    """The retrieval problem with G distractors in the block of each step."""

    G = 20

    def __post_init__(self):
        super().__post_init__()
        distractors = []
        for step in range(1, self.D + 1):
            for i in range(self.G):
                distractors.append(Slot(step, {"": len(self.labels)}))
                self.labels.append(f"D{step}.{i + 1}")
        self.arrange([*self.slots[: -self.N], *distractors, *self.slots[-self.N :]])


class Fixed(Places):
    """Pair n of the one step comes after (n + 1/2) G/N distractors."""

    def __post_init__(self):
        super().__post_init__()
        if self.D != 1:
            raise ValueError("it has one step: set --D 1")
        pairs = [pair._replace(group=2) for pair in self.slots[: self.N]]
        self.arrange(pairs + self.slots[self.N :])

    def batch(self, size, rng):
        """That of data.Task, with the tokens before the queries moved: they are sorted by a key,
        which is the same for those of a pair."""
        batch, N, G = super().batch(size, rng), self.N, self.G
        pairs = (np.arange(N) + 0.5) * G / N
        keys = [*pairs.repeat(2), *(np.arange(G) + 0.5), *[G + 1] * N]  # (T,)
        order = torch.from_numpy(np.argsort(keys, kind="stable"))
        places = order.argsort()[batch.places]
        return Batch(batch.inputs[:, order], batch.answers, places, batch.symbols[:, order])


def __getattr__(name):
    """Return the class random20, fixed20 or the like, of any number of distractors."""
    found = re.fullmatch(r"(random|fixed)(\d+)", name)
    if found is None:
        raise AttributeError(f"{__name__} has no task {name}")
    kind = Fixed if found[1] == "fixed" else Places
    return type(name, (kind,), dict(G=int(found[2])))
