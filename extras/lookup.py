"""A task of your own: in-context lookup, with words of a vocabulary and cross-entropy. N keys, each
followed by its value, then the keys again: which value did each have? D > 1: the value of that.

    python train.py --task extras.lookup:Lookup --D 1 --layers 2 --width 64 --lr 3e-3
"""

import math

from data import Task, random_bits

import torch
import torch.nn.functional as F


class Lookup(Task):
    words, loss_name = 32, "cross-entropy"

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) > self.words:
            raise ValueError(f"--N {self.N} --D {self.D} takes more than {self.words} words")
        self.inputs += self.words - self.K  # one-hot in place of K numbers; the position stays
        self.outputs = self.words * len(self.targets)  # logits
        self.plateaus = [(math.log(self.words), "knows nothing"), (math.log(self.N), "knows which")]

    def batch(self, index):
        batch = super().batch(index)  # where the symbols stand
        bits = random_bits(self.seed + 2**40, index, self.words)  # no data set has this seed
        word_of = bits.argsort(1)  # (B, words) that of each symbol
        shown = F.one_hot(word_of.gather(1, batch.symbols), self.words)  # (B, T, words)
        inputs = torch.cat([shown, batch.inputs[:, :, self.K :]], -1)
        asked = [batch.symbols[:, -self.N :] + k for k in self.targets]  # (B, N) each
        targets = torch.stack([word_of.gather(1, symbols) for symbols in asked], -1)
        return batch._replace(inputs=inputs, targets=targets)  # targets (B, N, targets)

    def losses(self, predictions, batch):
        logits = predictions.unflatten(-1, (-1, self.words)).movedim(-1, 1)
        return F.cross_entropy(logits, batch.targets, reduction="none")  # (B, N, targets)
