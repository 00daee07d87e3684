"""Models whose circuit is known because it was planted, to see whether it is found again."""

import itertools

from ablate import Path

import torch


def paths_from(*texts):
    """[Path, ...] of texts such as "1 q 1b", in head 0 of layer 1, and "1.2 q 1b", in head 2."""
    paths = []
    for text in texts:
        where, *ends = text.split()
        layer, head = map(int, f"{where}.0".split(".")[:2])
        paths.append(Path(layer, head, *ends))
    return paths


def find_places(symbols, task):
    """The token of each role (B, N, roles), by the equality of symbols (B, T, K) alone."""
    same = (symbols[:, :, None] == symbols[:, None]).all(-1).int()
    token = torch.arange(task.T - task.N, task.T).expand(len(symbols), -1)  # (B, N)
    places, row = [token], torch.arange(len(symbols))[:, None]
    for start in range(2 * task.N * (task.D - 1), -1, -2 * task.N):  # of the pairs of each step
        # the a token that shows what the token before it in the chain shows
        first = start + 2 * same[row, token, start : start + 2 * task.N : 2].argmax(-1)
        token = first + 1
        places += [first, token]
    return torch.stack(places, -1)


def heads_of(layers, heads=1):
    """[(layer, head), ...] of a model."""
    return [*itertools.product(range(layers), range(heads))]


class Planted:
    """A model whose circuit these paths are. Every token holds an amount, from 0 to 1, of every
    symbol of every chain, at first 1 of what it shows; a head adds what is held where it attends; a
    query says its symbols by their amounts, from a quarter on. Values are amounts times a random
    sign for each symbol, with a mean near zero as in a trained model."""

    def __init__(self, task, texts, layers, heads=1):
        self.task, self.paths = task, paths_from(*texts)
        self.layers, self.heads = layers, heads_of(layers, heads)

    def marks(self, token, places):
        """1 at [b, n, t] of (B, N, T) if t is this token of chain n."""
        place = places[..., [*self.task.roles].index(token), None]
        return (place == torch.arange(self.task.T)).float()

    def evidence(self, path, holds, places):
        """The attention (B, N) that a reader alone would give along a path: all of it in its own
        pair, else as much as it shares a symbol with what it reads (Assumption 1 of Section 5)."""
        marks = [self.marks(end, places) for end in path[2:]]  # (B, N, T) each
        if path.reader[0] == path.read[0]:
            return marks[0].sum(-1) * marks[1].sum(-1)
        held = [torch.einsum("bnt,btnk->bnk", mark, holds) for mark in marks]
        return torch.minimum(*held).amax(-1)  # of symbols

    def attend(self, paths, holds, places):
        """Return how a head with these paths attends (B, T, T): a reader shares its attention among
        all that it reads, other tokens attend to themselves."""
        pattern = torch.eye(self.task.T).repeat(len(places), 1, 1)
        shares = {path: self.evidence(path, holds, places) for path in paths}
        total = {}  # of each reader
        for path, share in shares.items():
            total[path.reader] = total.get(path.reader, 0) + share
        for path, share in shares.items():
            reader, read = (self.marks(end, places) for end in path[2:])
            share = share / total[path.reader].clamp(min=1)
            pattern += (share[..., None] * reader).mT @ (read - reader)
        return pattern

    def __call__(self, x, heads=()):
        task, functions = self.task, dict(heads)
        places = find_places(x, task)
        first = [0, *range(2, 2 * task.D + 1, 2)]  # the roles q, 1b, 2b, ..., which show all x_k
        symbols = x[torch.arange(len(x))[:, None, None], places[:, :, first]]
        signs = symbols[..., 0].sign()[:, None]  # (B, 1, N, symbols)
        holds = (x[:, :, None, None] == symbols[:, None]).all(-1).float()  # (B, T, N, symbols)

        for layer in range(self.layers):
            added = torch.zeros_like(holds)
            for head in range(len(self.heads) // self.layers):
                paths = [path for path in self.paths if path[:2] == (layer, head)]
                pattern = self.attend(paths, holds, places)
                write = functions.get((layer, head), torch.matmul)
                added += signs * write(pattern, (signs * holds).flatten(2)).view_as(holds)
            holds = (holds + added).clamp(0, 1)

        # of all chains: what a query holds of another, it says too
        amounts = (2 * holds[:, -task.N :, :, 1:] - 0.5).clamp(0, 1)
        return torch.einsum("bqns,bnsk->bqsk", amounts, symbols[:, :, 1:]).flatten(2)


CIRCUITS = [  # D, heads, paths; layer 0 lets every b know its a
    (2, 3, ["0.1 1b 1a", "0.1 2b 2a", "2.0 1b 2b", "3.1 q 1b"]),
    (3, 1, ["0 1b 1a", "0 2b 2a", "0 3b 3a", "1 q 1b", "1 2b 3b", "3 q 2b"]),
]


def address_and_values(x, heads=None):
    """A model of one layer with five heads that solves N=4, D=1: head 0 tells the query at which
    place its own 1a stands, heads 1 to 4 bring the values of all places; this one's is taken."""
    symbols, T, queries, keys = x[..., :4], x.shape[1], slice(8, 12), slice(0, 8, 2)
    heads, patterns = heads or {}, torch.eye(T).repeat(len(x), 5, 1, 1)  # (B, heads, T, T)
    patterns[:, :, queries] = 0

    # head 0: to the token 1a of the same symbol, which brings its place, one-hot
    distance = torch.cdist(symbols[:, queries], symbols[:, keys])
    patterns[:, 0, queries, keys] = (-50 * distance.square()).softmax(-1)
    places = torch.eye(T)[:, keys].expand(len(x), T, 4)
    own_place = heads.get((0, 0), torch.matmul)(patterns[:, 0], places)[:, queries]

    # the others: to the token 1b of one place, whatever chain stands there
    answers = 0
    for place in range(4):
        patterns[:, 1 + place, queries, 2 * place + 1] = 1
        value = heads.get((0, 1 + place), torch.matmul)(patterns[:, 1 + place], symbols)
        answers = answers + own_place[:, :, place, None] * value[:, queries]
    return answers


address_and_values.heads = heads_of(1, 5)
