"""Models whose circuit is known because it was planted, to see whether it is found again."""

import itertools

from ablate import Path, mark_tokens, split_token
from extras.studies import tables

import torch


def paths_from(*texts):
    """[Path, ...] of texts such as "1 q 1b", in head 0 of layer 1, and "1.2 q 1b+1", in head 2."""
    paths = []
    for text in texts:
        where, *ends = text.split()
        layer, head = map(int, f"{where}.0".split(".")[:2])
        paths.append(Path(layer, head, *ends))
    return paths


def find_places(symbols, task):
    """The token of each role (B, N, roles), by the equality of symbols (B, T, K) alone."""
    same = (symbols[:, :, None] == symbols[:, None]).all(-1)
    start = task.T - task.N
    tokens_of = {0: torch.arange(start, start + task.N).expand(len(symbols), -1)}
    known, number = [*task.roles.values()], 1
    for block in range(1, 1 + task.slots[0].group):
        # the slot that shows every symbol that is known of the chain so far
        sizes = [len(slot.shows) for slot in task.slots if slot.group == block]
        slots, size = len(sizes), sizes[0]
        start -= size * slots
        first = start + size * torch.arange(slots)
        fits = torch.ones(len(symbols), task.N, slots, dtype=torch.bool)
        for place, before in itertools.product(range(size), range(number)):
            if known[number + place] == known[before]:
                tokens = tokens_of[before][..., None].expand(-1, -1, slots)
                fits &= same[:, :, first + place].gather(1, tokens)
        for place in range(size):
            tokens_of[number + place] = first[fits.int().argmax(-1)] + place
        number += size
    return torch.stack([tokens_of[number] for number in range(len(task.roles))], -1)


def heads_of(layers, heads=1):
    """[(layer, head), ...] of a model."""
    return [*itertools.product(range(layers), range(heads))]


LANES = 3  # of what a token holds: its own symbols, those of the token before, of the one before it


class Planted:
    """A model whose circuit these paths are. Every token holds an amount, from 0 to 1, of every
    symbol of every chain, in lanes, at first 1 of what it shows in lane 0; a head adds what is held
    where it attends; a query says its symbols by their amounts in lane 0, from a quarter on. Values
    are amounts times a random sign for each symbol, with a mean near zero as in a trained model."""

    def __init__(self, task, texts, layers, heads=1):
        self.task, self.paths = task, paths_from(*texts)
        self.layers, self.heads = layers, heads_of(layers, heads)

    def evidence(self, path, holds, places):
        """Return the attention (B, N) that a reader alone would give along a path: all of it in its
        own slot, else as much as it shares a symbol with what it reads (Assumption 1 of Section 5);
        of x and y the lesser."""
        ends = [mark_tokens(end, self.task, places) for end in path[2:]]  # (B, N, T) each
        names, lanes = zip(*map(split_token, path[2:]), strict=True)
        if any({*names} <= {*slot} for slot in self.task.chain_slots):
            return ends[0].sum(-1) * ends[1].sum(-1)
        held = []
        for marks, lane in zip(ends, lanes, strict=True):
            held.append(torch.einsum("bnt,btnk->bnk", marks, holds[:, :, lane]))
        shared = torch.minimum(*held)  # (B, N, symbols)
        if isinstance(self.task, tables.Conditional) and names[1] in self.task.chain_slots[0]:
            return torch.maximum(shared[..., 1:3].amin(-1), shared[..., 3])
        return shared.amax(-1)

    def attend(self, paths, holds, places):
        """Return how a head with these paths attends (B, T, T): a reader shares its attention among
        all that it reads, other tokens attend to themselves."""
        pattern = torch.eye(self.task.T).repeat(len(places), 1, 1)
        shares = {path: self.evidence(path, holds, places) for path in paths}
        total = {}  # of each reader
        for path, share in shares.items():
            total[path.reader] = total.get(path.reader, 0) + share
        for path, share in shares.items():
            reader, read = (mark_tokens(end, self.task, places) for end in path[2:])
            share = share / total[path.reader].clamp(min=1)
            pattern += (share[..., None] * reader).mT @ (read - reader)
        return pattern

    def __call__(self, x, heads=()):
        task, functions, x = self.task, dict(heads), x[..., :4]
        places, shows = find_places(x, task), [*task.roles.values()]
        first = [shows.index(k) for k in range(task.D + 1)]  # the first role that shows x_k
        symbols = x[torch.arange(len(x))[:, None, None], places[:, :, first]]
        signs = symbols[..., 0].sign()[:, None, None]  # (B, 1, 1, N, symbols)
        shown = (x[:, :, None, None] == symbols[:, None]).all(-1).float()
        holds = torch.stack([shown] + [0 * shown] * (LANES - 1), 2)  # (B, T, lanes, N, symbols)

        for layer in range(self.layers):
            added = torch.zeros_like(holds)
            for head in range(len(self.heads) // self.layers):
                paths = [path for path in self.paths if path[:2] == (layer, head)]
                pattern = self.attend(paths, holds, places)
                write = functions.get((layer, head), torch.matmul)
                read = signs * write(pattern, (signs * holds).flatten(2)).view_as(holds)
                lanes = {(split_token(path.read)[1], split_token(path.reader)[1]) for path in paths}
                for source, target in lanes:
                    added[:, :, target] += read[:, :, source]
            holds = (holds + added).clamp(0, 1)

        # of all chains: what a query holds of another, it says too
        amounts = (2 * holds[:, -task.N :, 0, :, 1:] - 0.5).clamp(0, 1)
        return torch.einsum("bqns,bnsk->bqsk", amounts, symbols[:, :, 1:]).flatten(2)


PAIRS = ["0 1b 1a", "0 2b 2a", "0 3b 3a"]  # layer 0 lets every b know its a
CIRCUITS = [  # D, heads, paths
    (2, 1, [*PAIRS[:2], "2 1b 2b", "3 q 1b"]),
    (2, 3, ["0.0 1b 1a", "0.1 2b 2a", "1.2 q 1b", "2.0 q 2b"]),
    (2, 3, ["0.1 1b 1a", "0.1 2b 2a", "2.0 1b 2b", "3.1 q 1b"]),
    (3, 1, [*PAIRS, "1 q 1b", "1 2b 3b", "3 q 2b"]),
    (2, 1, [*PAIRS[:2], "1 2b+1 2b", "1 q 1b", "2 2b+2 2b+1", "3 q 2b+2"]),  # intermediate tokens
]


def address_and_values(x, heads=None, return_patterns=False):
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
    return (answers, [patterns]) if return_patterns else answers


address_and_values.heads = heads_of(1, 5)
