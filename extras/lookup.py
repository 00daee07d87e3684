"""A task of your own: in-context lookup, with words of a vocabulary and cross-entropy. N keys, each
followed by its value, then the keys again: which value did each have? D > 1: the value of that.

    python train.py --task extras.lookup:Lookup --D 1 --layers 2 --width 64 --lr 3e-3
"""

import math

from data import Task

import numpy as np
import torch
import torch.nn.functional as F


class Lookup(Task):
    words, loss_name = 32, "cross-entropy"

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) > self.words:
            raise ValueError(f"--N {self.N} --D {self.D} takes more than {self.words} words")
        self.inputs = self.words  # one-hot
        self.outputs = self.words * len(self.targets)  # logits
        self.chance = math.log(self.N)

    def batch(self, size, rng):
        batch = super().batch(size, rng)  # where the symbols stand
        words = np.tile(np.arange(self.words), (size, 1))
        word_of = torch.from_numpy(rng.permuted(words, axis=1))  # (B, words) that of each symbol
        inputs = F.one_hot(word_of.gather(1, batch.symbols), self.words).float()  # (B, T, words)
        asked = [batch.symbols[:, -self.N :] + k for k in self.targets]  # (B, N) each
        answers = torch.stack([word_of.gather(1, symbols) for symbols in asked], -1)
        return batch._replace(inputs=inputs, answers=answers)  # answers (B, N, targets)

    def losses(self, predictions, batch):
        logits = predictions.unflatten(-1, (-1, self.words)).movedim(-1, 1)
        return F.cross_entropy(logits, batch.answers, reduction="none")  # (B, N, targets)
