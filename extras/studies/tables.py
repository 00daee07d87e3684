"""Tasks whose blocks are other tables of symbols.

python train.py --layers 4 --heads 2 --task extras.studies.tables:Conditional
python train.py --layers 3 --heads 4 --D 2 --task extras.studies.tables:Shuffled
"""

from data import Task, Token


class Conditional(Task):
    """Conditional retrieval (Section 3.1): triples (x, y, z) of every x with every y, then pairs
    (a, y), pairs (a, x) and queries a. Here x_0, x_1, x_2, x_3 are a, x, y, z. The triple of x and
    y of two chains shows a distractor: D1.2 stands after B1 and C2."""

    def __post_init__(self):
        super().__post_init__()
        if self.D != 3:
            raise ValueError("it is the same for every --D: leave --D out")
        N = self.N
        triples, with_y, with_x = [], [], []
        for i in range(N):
            a, x, y, z = range(4 * i, 4 * i + 4)  # the symbols of chain i
            with_y.append([Token(a, "2a", i), Token(y, "2b", i)])
            with_x.append([Token(a, "1a", i), Token(x, "1b", i)])
            for j in range(N):
                chain, shown = i, z
                if i != j:
                    chain, shown = None, len(self.labels)
                    self.labels.append(f"D{i + 1}.{j + 1}")
                y = 4 * j + 2
                triple = Token(x, "3a", chain), Token(y, "3b", chain), Token(shown, "3c", chain)
                triples.append([*triple])
        self.blocks = [triples, with_y, with_x, self.blocks[-1]]  # the queries stay


class Shuffled(Task):
    """The retrieval problem with the pairs of all steps in one block."""

    def __post_init__(self):
        super().__post_init__()
        *pairs, queries = self.blocks
        self.blocks = [[block[n] for n in range(self.N) for block in reversed(pairs)], queries]
