"""Models whose answer travels otherwise than a too simple circuit would say. Each solves N=4, D=1
and is called as a function."""

from tests.planted import heads_of

import torch


T = 12  # four pairs and four queries
PREVIOUS = torch.eye(T)[(torch.arange(T) - 1).clamp(min=0)]
MEMORY = torch.zeros(512, T, T)


def attend(heads, head, pattern, values):
    """Return what a head writes, with pattern (B or 1, T, T) for all tokens. The same memory holds
    the pattern of each head in turn, as a model of your own may have it."""
    return heads.get(head, torch.matmul)(MEMORY[: len(values)].copy_(pattern), values)


def idle(heads, head, symbols):
    """A head that does nothing."""
    return attend(heads, head, torch.eye(T), 0 * symbols)


def find(x, heads):
    """In layer 0 every token notes the token before it: 1b notes x_0, by which it can be found.
    Return the symbols (B, T, 4), what is noted, and the pattern that finds 1b."""
    symbols = x[..., :4]
    noted = attend(heads, (0, 0), PREVIOUS, symbols)
    noted = noted + idle(heads, (0, 1), symbols)
    scores = -50 * torch.cdist(symbols, noted).square() + torch.full((T, T), -torch.inf).triu(1)
    scores[:, 1:, 0] = -torch.inf  # before the first token there is none, so it notes itself
    return symbols, noted, scores.softmax(-1)


def next_token(x, heads):
    """The query reads the token after 1b, which has noted x_1 in layer 0."""
    _, noted, found = find(x, heads)
    return attend(heads, (1, 0), found.roll(1, dims=-1), noted)[:, 8:]


def canceller(x, heads):
    """Head 0 takes what the first slot shows with the right symbol; head 1 subtracts it."""
    symbols, _, found = find(x, heads)
    first = torch.eye(T)[1].expand(T, T)
    taken = attend(heads, (1, 0), (found + first) / 2, symbols)
    return (2 * taken - attend(heads, (1, 1), first, symbols))[:, 8:]


def veiled(x, heads):
    """Head 1 reads all 1a; where these are of another sequence, there is no answer. The mean of all
    sequences is near zero, and does no harm."""
    symbols, _, found = find(x, heads)
    every = torch.zeros(T, T)
    every[:, 0:8:2] = 1 / 4
    key, own = 4 * attend(heads, (1, 1), every, symbols), 4 * every @ symbols
    answer, says = attend(heads, (1, 0), found, symbols), key.norm(dim=-1, keepdim=True) > 0.5
    differs = (key - own).norm(dim=-1, keepdim=True) > 0.1
    return (answer * ~(says & differs))[:, 8:]


def follows_the_mask(x, heads):
    """The query reads every 1b, the right one most, and answers the one that is most like what it
    has read: of the edges that a circuit keeps, whatever chain they are of."""
    symbols, _, found = find(x, heads)
    every = torch.zeros(T, T)
    every[8:, 1:8:2] = 1 / 4
    read = attend(heads, (1, 0), 0.1 * every + 0.9 * found, symbols)[:, 8:]
    read = read + idle(heads, (1, 1), symbols)[:, 8:]
    choices = symbols[:, 1:8:2]  # (B, 4, 4)
    similar = torch.cosine_similarity(read[:, :, None], choices[:, None], dim=-1)
    return torch.nn.functional.one_hot(similar.argmax(-1), 4).float() @ choices


def backup(x, heads):
    """Head 1 reads too little of 1b for a candidate, and answers; head 0 does so under ablation."""
    symbols, noted, found = find(x, heads)
    both = torch.cat([PREVIOUS @ symbols, symbols], -1)
    little = torch.eye(T) + 0.01 * find(x, {})[2]
    first = 100 * (attend(heads, (1, 1), little, both) - both)[:, 8:]
    second = attend(heads, (1, 0), found, symbols)[:, 8:]
    works = (first[..., :4] - symbols[:, 8:]).norm(dim=-1, keepdim=True) < 0.1
    return torch.where(works, first[..., 4:], second) + 1e-3 * second


def convolution(x, heads):
    """Outside of the heads a token gets what the next one shows; the query reads its own 1a."""
    symbols, same = x[..., :4], torch.eye(T).repeat(len(x), 1, 1)
    same[:, 8:] = (torch.cdist(symbols[:, 8:], symbols) < 1e-3) * (torch.arange(T) < 8).float()
    return attend(heads, (0, 0), same, symbols.roll(-1, dims=1))[:, 8:]


BOTH = "validated under both ablations"
ALL = [  # a model, its layers and heads, the circuit that is found, what the verdict says
    (next_token, 2, 1, "0 1b 1a, 0 1b+1 1b, 1 q 1b+1", BOTH),
    (canceller, 2, 2, "0 1b 1a, 1 q 1b*, 1.1 q 1b*", BOTH),
    (veiled, 2, 2, "0 1b 1a, 1 q 1b", "mean ablation alone"),  # without the star
    (follows_the_mask, 2, 2, "", "not validated: it answers a decoy"),
    (backup, 2, 2, "", "not validated: the full model does as well without it"),
    (convolution, 1, 1, "", "not validated: no paths lead from x_1 to the query"),
]  # fmt: skip
for model, layers, heads, *_ in ALL:
    model.heads = heads_of(layers, heads)
