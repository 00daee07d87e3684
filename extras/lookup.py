"""A task of your own: in-context lookup, with words of a vocabulary and cross-entropy.

    python train.py --task extras.lookup:Lookup --D 1 --layers 2 --lr 3e-3 --out out/lookup
    python ablate.py out/lookup

N keys, each followed by its value, then the keys again: which value did each have? It is the
retrieval problem with words in place of vectors; D > 1 looks up the value of the value.
"""

import math

from data import Task, random_bits

import torch
import torch.nn.functional as F


WORDS = 32


class Lookup(Task):
    loss_name = "cross-entropy"

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) > WORDS:
            raise ValueError(f"--N {self.N} --D {self.D} takes more than {WORDS} words")
        self.inputs += WORDS - self.K  # one-hot in place of K numbers; the position stays
        self.outputs = WORDS * len(self.targets)  # logits
        self.plateaus = [(math.log(WORDS), "knows nothing"), (math.log(self.N), "knows the values")]

    def batch(self, index):
        batch = super().batch(index)  # where the symbols stand
        bits = random_bits(self.seed + 2**40, index, WORDS)  # no data set has this seed
        words = bits.argsort(1)  # (B, WORDS) the word of each symbol
        shown = F.one_hot(words.gather(1, batch.symbols), WORDS)  # (B, T, WORDS)
        inputs = torch.cat([shown, batch.inputs[..., self.K :]], -1)
        asked = [batch.symbols[:, -self.N :] + k for k in self.targets]  # the symbols, (B, N) each
        targets = torch.stack([words.gather(1, symbols) for symbols in asked], -1)
        return batch._replace(inputs=inputs, targets=targets)  # targets (B, N, targets)

    def losses(self, predictions, batch):
        logits = predictions.unflatten(-1, (-1, WORDS)).movedim(-1, 1)  # (B, WORDS, N, targets)
        return F.cross_entropy(logits, batch.targets, reduction="none")  # (B, N, targets)
