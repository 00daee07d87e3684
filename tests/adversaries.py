"""Models whose answer travels otherwise than a too simple circuit would say: at least one for each
rule of ablate.py's definition of a circuit. Each solves N=4, D=1 and is called as a function."""

from tests.planted import address_and_values, heads_of

import torch


T = 12  # four pairs and four queries
PREVIOUS = torch.eye(T)[(torch.arange(T) - 1).clamp(min=0)]


def attend(heads, head, pattern, values):
    """Return what a head writes, with pattern (B or 1, T, T) for all tokens."""
    pattern = pattern.expand(len(values), -1, -1)
    return heads.get(head, torch.matmul)(pattern, values)


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


def differs(key, own):
    """Return whether a key (B, N, 4) says something, and it is not this."""
    return (key.norm(dim=-1, keepdim=True) > 0.5) & ((key - own).norm(dim=-1, keepdim=True) > 0.1)


# ---- what is a path


def next_token(x, heads):
    """The query reads the token after 1b, which has noted x_1 in layer 0."""
    _, noted, found = find(x, heads)
    return attend(heads, (1, 0), found.roll(1, dims=-1), noted)[:, 8:]


def faint(x, heads):
    """Most of the attention stays on the query itself."""
    symbols, _, found = find(x, heads)
    read = attend(heads, (1, 0), 0.92 * torch.eye(T) + 0.08 * found, symbols)
    return 12.5 * (read - 0.92 * symbols)[:, 8:]


def canceller(x, heads):
    """Head 0 takes what the first slot shows with the right symbol; head 1 subtracts it."""
    symbols, _, found = find(x, heads)
    first = torch.eye(T)[1].expand(T, T)
    taken = attend(heads, (1, 0), (found + first) / 2, symbols)
    return (2 * taken - attend(heads, (1, 1), first, symbols))[:, 8:]


def canceller_of_two_notes(x, heads):
    """That, where 1b is found by two notes, both of which must be right: a star can stand for each
    plain path that brings one, and must not."""
    symbols = x[..., :4]
    notes = [attend(heads, (0, head), PREVIOUS, symbols) for head in (0, 1)]
    scores = sum(-50 * torch.cdist(symbols, note).square() for note in notes)
    scores = scores + torch.full((T, T), -torch.inf).triu(1)
    scores[:, 1:, 0] = -torch.inf
    first = torch.eye(T)[1].expand(T, T)
    taken = attend(heads, (1, 0), (scores.softmax(-1) + first) / 2, symbols)
    return (2 * taken - attend(heads, (1, 1), first, symbols))[:, 8:]


# ---- what one of two ablations does not see


def veiled(x, heads):
    """Head 1 reads all 1a; where these are of another sequence, there is no answer. The mean of all
    sequences is near zero, and does no harm."""
    symbols, _, found = find(x, heads)
    every = torch.zeros(T, T)
    every[:, 0:8:2] = 1 / 4
    key, own = attend(heads, (1, 1), every, symbols), every @ symbols
    answer = attend(heads, (1, 0), found, symbols)
    return (answer * ~differs(4 * key, 4 * own))[:, 8:]


def two_that_must_agree(x, heads):
    """Where two heads differ there is no answer."""
    symbols, _, found = find(x, heads)
    first, second = (attend(heads, (1, head), found, symbols)[:, 8:] for head in (0, 1))
    return first * ~differs(second, first)


def star_with_a_checksum(x, heads):
    """A star, and a head that reads a little of all tokens: of others, there is no answer."""
    symbols, everything = x[..., :4], 0.98 * torch.eye(T) + 0.02 / T
    reads = attend(heads, (0, 5), everything, symbols), everything @ symbols
    key, own = (220 * (read - everything[0, 0] * symbols)[:, 8:] for read in reads)
    return address_and_values(x, heads) * ~differs(key, own)


# ---- what the losses of a circuit do not show


EVERY_1B = torch.zeros(T, T)
EVERY_1B[8:, 1:8:2] = 1 / 4


def most_alike(read, symbols):
    """Return the x_1 that is most like what each query has read (B, N, 4)."""
    choices = symbols[:, 1:8:2]  # (B, 4, 4)
    similar = torch.cosine_similarity(read[:, :, None], choices[:, None], dim=-1)
    return torch.nn.functional.one_hot(similar.argmax(-1), 4).float() @ choices


def chooses(x, heads):
    """The query reads every 1b, the right one most, and answers the one that is most like what it
    has read."""
    symbols, _, found = find(x, heads)
    read = attend(heads, (1, 0), 0.1 * EVERY_1B + 0.9 * found, symbols)[:, 8:]
    read = read + idle(heads, (1, 1), symbols)[:, 8:]
    return most_alike(read, symbols)


def counts(x, heads):
    """The query reads every 1b, the right one most, and answers if all that it reads weighs 1."""
    symbols, _, found = find(x, heads)
    values = torch.cat([symbols, torch.ones(len(x), T, 1)], -1)
    read = attend(heads, (1, 0), 0.28 * EVERY_1B + 0.72 * found, values)[:, 8:]
    read = read + idle(heads, (1, 1), values)[:, 8:]
    return read[..., :4] / 0.79 * ((read[..., 4:] - 1).abs() < 0.05)


def follows_the_mask(x, heads, never=0):
    """Like chooses, but where the 1a that head 1 reads are of another sequence, there is no answer.
    So 1b need not be found: of all that are read a little, a circuit keeps the right one."""
    symbols, _, found = find(x, heads)
    pattern = (0.1 * EVERY_1B + 0.9 * found * (EVERY_1B > 0)) * (1 - never)
    read = attend(heads, (1, 0), pattern, symbols)[:, 8:]
    every_1a = EVERY_1B.roll(-1, 1)
    key, own = attend(heads, (1, 1), every_1a, symbols), every_1a @ symbols
    return most_alike(read, symbols) * ~differs(4 * key, 4 * own)[:, 8:]


def never_the_one_before(x, heads):
    """The same, but a query never reads the 1b of the query before it."""
    never = torch.zeros(len(x), T, T)
    never[:, 8:] = find(x, {})[2][:, 8:].roll(1, 1)
    return follows_the_mask(x, heads, never)


def another_way_in_one_of_a_hundred(x, heads):
    """Where the first number of a symbol is large, head 1 reads 1b instead of head 0."""
    symbols, _, found = find(x, heads)
    rare, itself = symbols[..., :1] > 2.3, torch.eye(T)
    first = attend(heads, (1, 0), torch.where(rare, itself, found), symbols)
    second = attend(heads, (1, 1), torch.where(rare, found, itself), symbols)
    return torch.where(rare, second, first + 1e-3 * second)[:, 8:]


def weight_on_itself(x, heads):
    """Head 1 attends to 1b the more, the larger its first number, which is answered by the rest."""
    symbols, _, found = find(x, heads)
    share = (found @ symbols[..., :1]).sigmoid() * (torch.arange(T) >= 8)[:, None]
    pattern = share * found + (1 - share) * torch.eye(T)
    itself = torch.eye(T)[:, 8:].expand(len(x), -1, -1)  # which query a token is
    weight = attend(heads, (1, 1), pattern, itself)[:, 8:].diagonal(dim1=1, dim2=2)[..., None]
    answer = attend(heads, (1, 0), found, symbols)[:, 8:]
    return torch.cat([(1 - weight).clamp(1e-6, 1 - 1e-6).logit(), answer[..., 1:]], -1)


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


STAR = "0 q 1a, 0.1 q 1b*, 0.2 q 1b*, 0.3 q 1b*, 0.4 q 1b*"
MEAN_ALONE = "validated under mean ablation alone"
BOTH = "validated under both ablations"
ALL = [  # a model, its layers and heads, the circuit that is found, what the verdict says
    (next_token, 2, 1, "0 1b 1a, 0 1b+1 1b, 1 q 1b+1", BOTH),
    (faint, 2, 1, "0 1b 1a, 1 q 1b", BOTH),
    (canceller, 2, 2, "0 1b 1a, 1 q 1b*, 1.1 q 1b*", BOTH),
    (canceller_of_two_notes, 2, 2, "0 1b 1a, 1 q 1b*, 1.1 q 1b*", MEAN_ALONE),  # without a note
    (veiled, 2, 2, "0 1b 1a, 1 q 1b", MEAN_ALONE),  # without the star 1.1 q 1a*
    (chooses, 2, 2, "0 1b 1a, 1 q 1b", BOTH),
    (counts, 2, 2, "0 1b 1a, 1 q 1b", BOTH),
    (follows_the_mask, 2, 2, "", "not validated: with paths to all chains it has a loss of"),
    (never_the_one_before, 2, 2, "", "not validated: with paths to all chains it has a loss of"),
    (two_that_must_agree, 2, 2, "0 1b 1a, 1 q 1b, 1.1 q 1b", BOTH),
    (star_with_a_checksum, 1, 6, STAR, MEAN_ALONE),  # it sees no key
    (another_way_in_one_of_a_hundred, 2, 2, "", "not validated: on fresh sequences its score is"),
    (weight_on_itself, 2, 2, "0 1b 1a, 1 q 1b, 1.1 q 1b", BOTH),
    (backup, 2, 2, "", "not validated: the full model does as well without it"),
    (convolution, 1, 1, "", "not validated: no paths lead from x_1 to the query"),
]  # fmt: skip
for model, layers, heads, *_ in ALL:
    model.heads = heads_of(layers, heads)
