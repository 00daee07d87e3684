"""Tasks whose blocks are other tables of symbols.

python train.py --layers 4 --heads 2 --task extras.studies.tables:Conditional
python train.py --layers 3 --heads 4 --D 2 --task extras.studies.tables:Shuffled
python train.py --layers 3 --heads 4 --D 2 --task extras.studies.tables:Forward
"""

from extras.studies.slots import Slot, SlotTask


class Conditional(SlotTask):
    """Conditional retrieval (Section 3.1): triples (x, y, z) of every x with every y, then pairs
    (a, y), pairs (a, x) and queries a. Here x_0, x_1, x_2, x_3 are a, x, y, z. The triple of x and
    y of two chains shows a distractor: D1.2 stands after B1 and C2."""

    def __post_init__(self):
        super().__post_init__()
        if self.D != 3:
            raise ValueError("it is the same for every --D: leave --D out")
        with_x, with_y, triples = [], [], []
        for i in range(self.N):
            a, x, y, z = range(4 * i, 4 * i + 4)  # the symbols of chain i
            with_x.append(Slot(1, {"1a": a, "1b": x}, i))
            with_y.append(Slot(2, {"2a": a, "2b": y}, i))
            for j in range(self.N):
                chain, shown = i, z
                if i != j:
                    chain, shown = None, len(self.labels)
                    self.labels.append(f"D{i + 1}.{j + 1}")
                triples.append(Slot(3, {"3a": x, "3b": 4 * j + 2, "3c": shown}, chain))
        self.arrange(triples + with_y + with_x + self.slots[-self.N :])  # the queries stay


class Shuffled(SlotTask):
    """The retrieval problem with the pairs of all steps in one block."""

    def __post_init__(self):
        super().__post_init__()
        pairs = sorted(self.slots[: -self.N], key=lambda slot: (slot.chain, slot.group))
        self.arrange([pair._replace(group=1) for pair in pairs] + self.slots[-self.N :])


class Forward(SlotTask):
    """The retrieval problem with the pairs of step 1 first and those of step D last."""

    def __post_init__(self):
        super().__post_init__()
        pairs = sorted(self.slots[: -self.N], key=lambda slot: slot.group)
        pairs = [pair._replace(group=self.D + 1 - pair.group) for pair in pairs]
        self.arrange(pairs + self.slots[-self.N :])
