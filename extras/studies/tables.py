"""Tasks whose blocks are other tables of symbols.

python train.py --layers 4 --heads 2 --task extras.studies.tables:Conditional
python train.py --layers 3 --heads 4 --D 2 --task extras.studies.tables:Shuffled
"""

from data import Block, Task

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
        x = torch.arange(N * 4).view(N, 4)  # x[n, k] is the number of x_k of chain n
        triples = []
        for i in range(N):
            for j in range(N):
                z = x[i, 3]
                if i != j:
                    z = len(self.labels)
                    self.labels.append(f"D{i + 1}.{j + 1}")
                triples.append([x[i, 1], x[j, 2], z])
        own = torch.arange(N)[:, None]
        self.blocks = [
            Block({"3a": 1, "3b": 2, "3c": 3}, torch.tensor(triples), own * (N + 1)),
            Block({"2a": 0, "2b": 2}, x[:, [0, 2]], own),
            Block({"1a": 0, "1b": 1}, x[:, [0, 1]], own),
            Block({"q": 0}, x[:, :1], own),
        ]


class Shuffled(Task):
    """The retrieval problem with the pairs of all steps in one block."""

    def __post_init__(self):
        super().__post_init__()
        N, D = self.N, self.D
        x = torch.arange(N * (D + 1)).view(N, D + 1)
        pairs = torch.stack([x[:, :-1], x[:, 1:]], 2).flatten(0, 1)  # slot n * D + k - 1: step k
        roles = {}
        for k in range(1, D + 1):
            roles.update({f"{k}a": k - 1, f"{k}b": k})
        own = torch.arange(N * D).view(N, D)
        self.blocks = [Block(roles, pairs, own), self.blocks[-1]]  # the queries stay
