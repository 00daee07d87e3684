"""Models whose circuit is known because it was planted, to see whether it is found again."""

import itertools

from parts.circuit import Path, read_paths, write_pattern
from parts.flow import starting_information, symbols_reached

import torch

import train
from data import chain


def paths_from(task, *texts):
    """[Path, ...] from texts such as "2 q 1b": layer 2, its first head, from q to 1b; "2.3 q 1b" is
    its third head."""
    paths = []
    for text in texts:
        where, source, target = text.split()
        layer, head = map(int, f"{where}.1".split(".")[:2])
        roles = task.names.index(source), task.names.index(target)
        paths.append(Path(layer - 1, head - 1, *roles))
    return paths


def needed(task, paths, layers):
    """Those paths without which the query would lose a symbol."""
    kept = []
    for path in paths:
        others = [other for other in paths if other != path]
        if not all(symbols_reached(task, others, layers)):
            kept.append(path)
    return kept


def find_positions(x, task, K):
    """The token of each role (B, N, roles), by the equality of symbols alone; the first chain is
    that of the first query. x (B, T, K and more)."""
    symbols = x[..., :K]
    same = (symbols[:, :, None] == symbols[:, None]).all(-1)
    start = task.blocks[task.roles[0].block].start
    found = {0: torch.arange(start, start + task.N).expand(len(x), -1)}
    for block in dict.fromkeys(role.block for role in task.roles[1:]):
        # the slot that shows every symbol that is known of the chain so far
        start, size, slots = task.blocks[block]
        first = start + size * torch.arange(slots)
        own = [number for number, role in enumerate(task.roles) if role.block == block]
        fits = torch.ones(len(x), task.N, slots, dtype=torch.bool)
        for number, before in itertools.product(own, list(found)):
            if task.roles[number].symbol == task.roles[before].symbol:
                tokens = found[before][..., None].expand(-1, -1, slots)
                fits &= same[:, :, first + task.roles[number].place].gather(1, tokens)
        for number in own:
            found[number] = first[fits.int().argmax(-1)] + task.roles[number].place
    return torch.stack([found[number] for number in range(len(task.roles))], -1)


class Planted:
    """Stands in for a transformer and computes a known circuit by following what information goes
    where: a path is taken only while its two roles share a piece (Section 5), the query says what
    it holds and 0 for what it does not."""

    def __init__(self, task, paths, layers, heads=1, K=4):
        self.task, self.paths, self.layers, self.heads, self.K = task, paths, layers, heads, K

    def own_pattern(self, head, shared, positions):
        """(B, T, T) along the head's paths between roles that share a piece, else uniform."""
        own = [path for path in self.paths if path[:2] == head and shared[path[2:]]]
        pattern = write_pattern(own or "uniform", self.task, positions, True, "uniform")
        return pattern.expand(len(positions), -1, -1)

    def __call__(self, x, patterns=None, return_patterns=False):
        task, seen = self.task, []
        positions = find_positions(x, task, self.K)

        # what each role holds, layer by layer
        known = starting_information(task)
        for layer in range(self.layers):
            before, every = known.float(), []
            shared = before @ before.T > 0
            for target in [i for i, role in enumerate(task.roles) if role.block in task.crossed]:
                # a triple is told by x and y, by z or by its slot
                common = known & known[target]
                slot = task.symbols + task.roles[target].block
                shared[:, target] = common[:, 1:3].all(1) | common[:, [3, slot]].any(1)
            for head in range(self.heads):
                pattern = (patterns or {}).get((layer, head))
                if pattern is None:
                    pattern = self.own_pattern((layer, head), shared, positions)
                every.append(pattern.expand(len(x), -1, -1))
                moved = read_paths(every[-1], task, positions).mean((0, 1)) > 0.35
                known = known | (moved.float() @ before > 0)
            seen.append(torch.stack(every, 1))

        # x_1, x_2, ... at each query, where it holds them
        symbols = task.column("symbol").tolist()
        holders = [symbols.index(k) for k in range(1, task.symbols)]
        sequence = torch.arange(len(x))[:, None, None]
        held = x[sequence, positions[:, :, holders], : self.K]  # (B, N, symbols, K)
        predictions = (held * known[0, 1 : task.symbols, None]).flatten(2)
        return (predictions, seen) if return_patterns else predictions


PAIRS = ["1 1b 1a", "1 2b 2a", "1 3b 3a"]  # layer 1 lets every b know its a
CIRCUITS = [  # D, paths
    (1, [*PAIRS[:1], "2 q 1b"]),
    (2, [*PAIRS[:2], "2 q 1b", "3 q 2b"]),
    (2, [*PAIRS[:2], "3 1b 2b", "4 q 1b"]),
    (3, [*PAIRS, "2 q 1b", "2 2b 3b", "4 q 2b"]),
    (3, [*PAIRS, "2 q 1b", "2 1b 2b", "3 q 2b", "4 q 3b"]),
    (3, [*PAIRS, "2 q 1b", "3 q 2b", "4 q 3b"]),
]


def plant(D, texts, layers, heads=1):
    """(Planted, its task, its paths)"""
    task = chain(4, D)
    paths = paths_from(task, *texts)
    return Planted(task, paths, layers, heads), task, paths


# ---- models that ablate.py must not be deceived by


class Tokens:
    """Stands in for a transformer, token by token. Each starts with the symbol that it shows, and
    where it pays another more than half of its attention it takes all the symbols held there. Some
    heads may be mute: what they attend to is not taken. Where nothing is replaced, a head attends
    as own(head, holds, positions) says, (B, T, T), holds (B, T, N, symbols) bool."""

    def __init__(self, task, own, layers, heads=1, mute=(), K=4):
        self.task, self.own, self.layers, self.heads = task, own, layers, heads
        self.mute, self.K = mute, K

    def __call__(self, x, patterns=None, return_patterns=False):
        task, sequence = self.task, torch.arange(len(x))[:, None, None]
        positions, seen = find_positions(x, task, self.K), []
        holds = torch.zeros(len(x), task.T, task.N, task.symbols, dtype=torch.bool)
        chains = torch.arange(task.N)[:, None]
        holds[sequence, positions, chains, task.column("symbol")] = True

        for layer in range(self.layers):
            before, every = holds.flatten(2).float(), []
            for head in range(self.heads):
                pattern = (patterns or {}).get((layer, head))
                if pattern is None:
                    pattern = self.own((layer, head), holds, positions)
                every.append(pattern.expand(len(x), -1, -1))
            for head, pattern in enumerate(every):
                if (layer, head) not in self.mute:
                    taken = (pattern > 0.5).float() @ before > 0
                    holds = holds | taken.view_as(holds)
            seen.append(torch.stack(every, 1))

        # x_1, x_2, ... at each query, where it holds them
        symbols = task.column("symbol").tolist()
        holders = [symbols.index(k) for k in range(1, task.symbols)]
        said = x[sequence, positions[:, :, holders], : self.K]  # (B, N, symbols, K)
        known = holds[sequence[..., 0], positions[:, :, 0], chains[:, 0], 1:]
        predictions = (said * known[..., None]).flatten(2)
        return (predictions, seen) if return_patterns else predictions


def attending(task, positions, source, tokens, share):
    """(B, T, T) the source of each chain gives this share, (B, N), of its attention to tokens
    (B, N); all else goes to itself."""
    pattern = torch.eye(task.T).repeat(len(positions), 1, 1)
    for b, n in itertools.product(*map(range, tokens.shape)):
        row = positions[b, n, source]
        pattern[b, row, row] -= share[b, n]
        pattern[b, row, tokens[b, n]] += share[b, n]
    return pattern


# ---- a model of another kind, behind the contract of ablate.find_circuit


class Attention(torch.nn.Module):
    """Two heads over a stream of (symbol, previous symbol), K numbers each, with weights set by
    hand. In layer 1 the first attends to the token before and notes its symbol; in layer 2 it
    attends where the noted symbol is the token's own, and takes the symbol that stands there. The
    second head attends at random and changes nothing."""

    def __init__(self, layer, T):
        super().__init__()
        self.layer, self.replaced, self.last = layer, {}, None
        mask = torch.full((T, T), -torch.inf).triu(1)
        noise = torch.randn(T, T, generator=torch.Generator().manual_seed(layer))
        first = mask + 50 * torch.eye(T)[(torch.arange(T) - 1).clamp(min=0)]
        if layer == 1:
            first = mask - 1000 * torch.eye(T)[0]  # before token 0 stands none
        self.register_buffer("bias", torch.stack([first, noise + mask]))

    def forward(self, symbols, noted):
        scores = self.bias.expand(len(symbols), -1, -1, -1).clone()
        if self.layer == 1:
            scores[:, 0] -= 50 * torch.cdist(symbols, noted).square()
        heads = list(scores.softmax(-1).unbind(1))
        for head, pattern in self.replaced.items():
            heads[head] = pattern.expand_as(heads[head])
        self.last = torch.stack(heads, 1)
        return heads[0] @ symbols


class Wrapped:
    """Such a network, which solves D=1, called as find_circuit calls a model."""

    def __init__(self, task, K=4):
        self.task, self.K = task, K
        self.layers = torch.nn.ModuleList(Attention(layer, task.T) for layer in range(2))

    def __call__(self, x, patterns=None, return_patterns=False):
        for layer, attention in enumerate(self.layers):
            attention.replaced = {}
            for (at, head), pattern in (patterns or {}).items():
                if at == layer:
                    attention.replaced[head] = pattern
        symbols = x[..., : self.K]
        noted = self.layers[0](symbols, None)
        predictions = self.layers[1](symbols, noted)[:, -self.task.N :]
        seen = [attention.last for attention in self.layers]
        return (predictions, seen) if return_patterns else predictions


def settings(D, layers, heads=1):
    """The config of a planted model."""
    flags = f"--D {D} --layers {layers} --heads {heads} --head-size 8 --device cpu --dtype float32"
    return train.parse_flags(flags.split())
