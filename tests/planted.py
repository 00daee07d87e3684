"""Models whose circuit is known because it was planted, to see whether it is found again."""

import itertools

import train
from ablate import Path, marks_of, parts_of

import torch


def paths_from(*texts):
    """[Path, ...] of texts such as "1 q 1b", in head 0 of layer 1, and "1.2 q 1b+1", in head 2."""
    paths = []
    for text in texts:
        where, *ends = text.split()
        layer, head = map(int, f"{where}.0".split(".")[:2])
        paths.append(Path(layer, head, *ends))
    return paths


def find_positions(symbols, task):
    """The token of each role (B, N, roles), by the equality of symbols (B, T, K) alone."""
    same = (symbols[:, :, None] == symbols[:, None]).all(-1)
    start = task.T - task.N
    tokens_of = {0: torch.arange(start, start + task.N).expand(len(symbols), -1)}
    known, number = [*task.roles.values()], 1
    for block in task.blocks[-2::-1]:
        # the slot that shows every symbol that is known of the chain so far
        start -= block.size * block.slots
        first = start + block.size * torch.arange(block.slots)
        fits = torch.ones(len(symbols), task.N, block.slots, dtype=torch.bool)
        for place, before in itertools.product(range(block.size), range(number)):
            if known[number + place] == known[before]:
                tokens = tokens_of[before][..., None].expand(-1, -1, block.slots)
                fits &= same[:, :, first + place].gather(1, tokens)
        for place in range(len(block.roles)):
            tokens_of[number + place] = first[fits.int().argmax(-1)] + place
        number += len(block.roles)
    return torch.stack([tokens_of[number] for number in range(len(task.roles))], -1)


LANES = 4  # of what a token holds: its own symbol's, the previous token's, ...; answers


class Planted:
    """Stands in for a transformer. Every token holds an amount, from 0 to 1, of every symbol of
    every chain, in lanes, at first 1 of what it shows in lane 0; a head adds what is held where it
    attends; a query says its symbols by their amounts in lane 0 and in the last, from a quarter on.

    attend(head, holds, positions) -> (B, T, T), the attention of a head; holds (B, T, lanes, N,
    symbols). Values are holds times a random sign for each symbol, with a mean near zero as in a
    trained model. moves: {(layer, head): [(from lane, to lane, gain), ...]}, by default in lane 0.
    """

    def __init__(self, task, attend, layers, heads=1, moves=None):
        self.task, self.attend, self.layers, self.heads = task, attend, layers, heads
        self.moves = moves or {}

    def added(self, layer, written, holds):
        """Return what a layer adds to holds, from what its heads write, each like holds."""
        total = torch.zeros_like(holds)
        for head, read in enumerate(written):
            for source, target, gain in self.moves.get((layer, head), [(0, 0, 1.0)]):
                total[:, :, target] += gain * read[:, :, source]
        return total

    def __call__(self, x, heads=()):
        task, functions, x = self.task, dict(heads), x[..., :4]
        positions = find_positions(x, task)
        symbols = [*task.roles.values()]
        holders = [symbols.index(k) for k in range(task.symbols)]
        sequence = torch.arange(len(x))[:, None, None]
        symbols = x[sequence, positions[:, :, holders]]  # (B, N, symbols, K)
        signs = symbols[..., 0].sign()[:, None, None]  # (B, 1, 1, N, symbols)
        shown = (x[:, :, None, None] == symbols[:, None]).all(-1).float()
        holds = torch.stack([shown] + [torch.zeros_like(shown)] * (LANES - 1), 2)

        for layer in range(self.layers):
            written = []
            for head in range(self.heads):
                pattern = self.attend((layer, head), holds, positions).expand(len(x), -1, -1)
                write = functions.get((layer, head), torch.matmul)
                written.append(signs * write(pattern, (signs * holds).flatten(2)).view_as(holds))
            holds = (holds + self.added(layer, written, holds)).clamp(0, 1)

        # of all chains: what a query holds of another, it says too
        amounts = holds[:, -task.N :, 0, :, 1:] + holds[:, -task.N :, -1, :, 1:]
        amounts = (2 * amounts - 0.5).clamp(0, 1)
        return torch.einsum("bqns,bnsk->bqsk", amounts, symbols[:, :, 1:]).flatten(2)


def tokens_of(end, task, positions):
    """The token of each chain that is this end of a path (B, N), and whether it exists."""
    marks = marks_of(end, task, positions)
    return marks.argmax(-1), marks.any(-1)


def attending(task, positions, *given):
    """(B, T, T) tokens attend to themselves, but for what is given: (end, tokens, shares), ..."""
    pattern = torch.eye(task.T).repeat(len(positions), 1, 1)
    sequence = torch.arange(len(positions))[:, None]
    for source, tokens, share in given:
        rows, there = tokens_of(source, task, positions)
        pattern[sequence, rows, rows] -= share * there
        pattern[sequence, rows, tokens] += share * there
    return pattern


def evidence(task, path, holds, positions):
    """(B, N) the share of its attention that a source gives its target: all in its own slot, else
    as much as it shares a symbol with it (Assumption 1 of Section 5); of x and y the lesser."""
    sequence, chains = torch.arange(len(positions))[:, None], torch.arange(task.N)
    (source, there), (target, too) = (tokens_of(end, task, positions) for end in path[2:])
    names, (first, second) = zip(*map(parts_of, path[2:]), strict=True)
    if any({*names} <= {*block.roles} for block in task.blocks):
        return (there & too).float()
    held = holds[sequence, source, first, chains]
    shared = torch.minimum(held, holds[sequence, target, second, chains])
    if task.title == "conditional" and names[1] in task.blocks[0].roles:
        shared = torch.stack([shared[..., 1:3].amin(-1), shared[..., 3]], -1)
    return shared.amax(-1) * (there & too)


def following(task, paths):
    """How a model attends that follows these paths; several targets of a source share."""

    def attend(head, holds, positions):
        members = [path for path in paths if path[:2] == head]
        shares = [evidence(task, path, holds, positions) for path in members]
        given = []
        for path, share in zip(members, shares, strict=True):
            rivals = [s for p, s in zip(members, shares, strict=True) if p[2] == path[2]]
            tokens, _ = tokens_of(path.read, task, positions)
            given.append((path.reader, tokens, share / sum(rivals).clamp(min=1)))
        return attending(task, positions, *given)

    return attend


PAIRS = ["0 1b 1a", "0 2b 2a", "0 3b 3a"]  # layer 0 lets every b know its a
CIRCUITS = [  # D, heads, paths
    (2, 1, [*PAIRS[:2], "2 1b 2b", "3 q 1b"]),
    (2, 3, ["0.0 1b 1a", "0.1 2b 2a", "1.2 q 1b", "2.0 q 2b"]),
    (2, 3, ["0.1 1b 1a", "0.1 2b 2a", "2.0 1b 2b", "3.1 q 1b"]),
    (3, 1, [*PAIRS, "1 q 1b", "1 2b 3b", "3 q 2b"]),
    (2, 1, [*PAIRS[:2], "1 2b+1 2b", "1 q 1b", "2 2b+2 2b+1", "3 q 2b+2"]),  # intermediate tokens
]


def plant(task, texts, layers, heads=1):
    """A model whose circuit these paths are."""
    paths, moves = paths_from(*texts), {}
    for path in paths:
        move = (parts_of(path.read)[1], parts_of(path.reader)[1], 1.0)
        moves[path[:2]] = list({*moves.get(path[:2], []), move})
    return Planted(task, following(task, paths), layers, heads, moves)


def settings(D, layers, heads=1):
    """The flags of a planted model."""
    flags = f"--D {D} --layers {layers} --heads {heads} --head-size 8 --device cpu --dtype float32"
    return train.parse_flags(flags.split())
