"""Tasks that are tables of symbols: a block is a table whose rows, the slots, are shuffled.

python -m extras.studies.stage train --layers 4 --heads 2 --task conditional
"""

import data

import torch


class Block:
    """A part of the sequence. roles: names of the tokens of a chain here, 2a and 2b; symbols
    (slots, tokens per slot): the number of the symbol of each token; own: the slot of chain 0, 1,
    ..., or (N, m) for the m slots of each; other slots show distractors, which no chain has."""

    def __init__(self, roles, symbols, own=slice(None)):
        self.roles, self.symbols, self.own = roles, symbols, own
        self.slots, self.size = symbols.shape


class Task(data.Task):
    """N chains of `symbols` symbols and the blocks that show them, the queries last. Symbol number
    n * symbols + k is x_k of chain n; distractors, named in a list, have the numbers after."""

    def __init__(self, title, N, symbols, blocks, distractors=()):
        super().__init__(N, symbols - 1)
        self.title, self.blocks = title, blocks
        self.labels += distractors
        self.keys = len(blocks) * max(block.slots for block in blocks)

        # {role: the k of the x_k that it shows in chain 0, or -1 for a distractor}, the query first
        self.roles = {}
        for block in reversed(blocks):
            chain_0 = block.symbols[block.own][0].flatten().tolist()
            for name, number in zip(block.roles, chain_0, strict=True):
                self.roles[name] = number if number < symbols else -1

    def arrange(self, keys):
        """As data.Task.arrange: shuffle the slots of each block by its keys."""
        symbols, positions, start = [], [], self.T
        keys = keys.view(len(keys), -1, len(self.blocks)).unbind(-1)  # the queries first
        for block, key in zip(self.blocks[::-1], keys, strict=True):
            start -= block.slots * block.size  # the first token of the block
            slot_at = key[:, : block.slots].argsort(1)  # (B, places)
            place_of = slot_at.argsort(1)  # (B, slots), the inverse
            symbols.append(block.symbols.to(key.device)[slot_at].flatten(1))
            tokens = torch.arange(block.size, device=key.device)
            tokens = start + block.size * place_of[:, block.own, None] + tokens
            positions.append(tokens.flatten(2))  # (B, N, roles of the block)
        return torch.cat(symbols[::-1], 1), torch.cat(positions, 2)


def conditional(N, D=3):
    """Conditional retrieval (Section 3.1): triples (x, y, z) of every x with every y, then pairs
    (a, y), pairs (a, x) and queries a. Here x_0, x_1, x_2, x_3 are a, x, y, z. The triple of x and
    y of two chains shows a distractor: D1.2 stands after B1 and C2."""
    if D != 3:
        raise ValueError("--task conditional is the same for every --D: leave --D out")
    x = torch.arange(N * 4).view(N, 4)  # x[n, k] is the number of x_k of chain n
    triples, distractors = [], []
    for i in range(N):
        for j in range(N):
            z = x[i, 3]
            if i != j:
                z = 4 * N + len(distractors)
                distractors.append(f"D{i + 1}.{j + 1}")
            triples.append([x[i, 1], x[j, 2], z])
    blocks = [
        Block(["3a", "3b", "3c"], torch.tensor(triples), slice(None, None, N + 1)),  # i = j
        Block(["2a", "2b"], x[:, [0, 2]]),
        Block(["1a", "1b"], x[:, [0, 1]]),
        Block(["q"], x[:, :1]),
    ]
    return Task("conditional", N, 4, blocks, distractors)


def shuffled(N, D):
    """The retrieval problem with the pairs of all steps in one block."""
    x = torch.arange(N * (D + 1)).view(N, D + 1)
    pairs = torch.stack([x[:, :-1], x[:, 1:]], 2).flatten(0, 1)  # slot n * D + k - 1: step k of n
    roles = [f"{k}{end}" for k in range(1, D + 1) for end in "ab"]
    blocks = [Block(roles, pairs, torch.arange(N * D).view(N, D)), Block(["q"], x[:, :1])]
    return Task(f"shuffled D={D}", N, D + 1, blocks)


data.TASKS.update(conditional=conditional, shuffled=shuffled)
