"""Models whose answer travels otherwise than a too simple circuit would say. Most retrieve one step
(q, 1a, 1b): in layer 0 every token attends to the token before, so that 1b holds x_0 and can be
found by it, and the token after 1b, an intermediate token, holds x_1."""

import itertools

from data import Task
from test_all import address_and_values
from tests.planted import Planted, attending

import torch


CHAIN = Task(4, 1)
PREVIOUS = torch.eye(CHAIN.T)[(torch.arange(CHAIN.T) - 1).clamp(min=0)]


def one_step(look, layers=2, heads=1, gains=(), intermediate=False):
    """A model of one step. look(head, match, b) -> [(tokens (B, N), shares (B, N)), ...], where a
    query attends in a head above layer 0; match (B, N): how well 1b is found, at tokens b. It reads
    what these show and, with intermediate, what they have read before. gains: of the heads of layer
    1."""

    def attend(head, holds, positions):
        if head[0] == 0:
            return PREVIOUS if head[1] == 0 else torch.eye(CHAIN.T)
        b, rows = positions[:, :, 2], torch.arange(len(positions))[:, None]
        given = look(head, holds[rows, b, 1, torch.arange(4), 0], b)
        return attending(CHAIN, positions, *[("q", *target) for target in given])

    def reading(gain):
        return [(lane, -1, gain) for lane in range(1 + intermediate)]

    moves = dict.fromkeys(itertools.product(range(1, layers), range(heads)), reading(1.0))
    moves |= {(0, head): [(0, 1, 0.01 if head else 1.0)] for head in range(heads)}
    moves |= {(1, head): reading(gain) for head, gain in enumerate(gains)}
    return Planted(CHAIN, attend, layers, heads, moves)


def direct(head, match, b):
    return [(b, match)]


def faint(head, match, b):
    """Most of the attention stays on the query itself."""
    return [(b, 0.08 * match)]


def decoy(head, match, b):
    """Head 0 reads 1b, but says next to nothing of it; head 1 reads the token after 1b."""
    return [(b + head[1], match)]


def next_in_one_slot(head, match, b):
    """In one slot of four it reads the token after 1b: a circuit without it would lose 0.25."""
    return [(b, match * (b // 2 != 1)), (b + 1, match * (b // 2 == 1))]


# ---- what is taken and taken back


def canceller(wrong):
    """Head 0 takes a wrong candidate, at wrong(b), with the right one; head 1 subtracts it."""

    def look(head, match, b):
        return [(wrong(b), match)] if head[1] else [(b, match / 2), (wrong(b), match / 2)]

    return one_step(look, heads=2, gains=[2.0, -1.0])


def of_another_chain(b):
    """1b of another chain, which no place of the own chain can name."""
    return b.roll(1, dims=1)


# ---- attention that does not say whose


def averages_and_a_pointer():
    """Head 1 averages all tokens; of these that is said whose x_0 head 0 brings."""
    model = one_step(direct, heads=2)
    other_heads, add, uniform = model.attend, model.added, torch.ones(12, 12).tril()
    uniform /= uniform.sum(-1, keepdim=True)

    def added(layer, written, holds):
        if layer == 0:
            return add(layer, written, holds)
        total, key = torch.zeros_like(holds), written[0][:, :, 1, :, 0, None]  # (B, T, N, 1)
        x_1 = (12 * written[1][:, :, 0, :, 1, None]).clamp(0, 1)
        total[:, -4:, -1, :, 1:] = (key * x_1)[:, -4:]
        return total

    model.attend = lambda head, *state: uniform if head == (1, 1) else other_heads(head, *state)
    model.added = added
    return model


# ---- what one of two ablations does not see: models of N=4, D=1, called as functions


def attend(heads, head, pattern, values):
    """Return what a head writes, with pattern (B or 1, T, T) for all tokens."""
    pattern = pattern.expand(len(values), -1, -1)
    return heads.get(head, torch.matmul)(pattern, values)


def find(x, heads):
    """Return the symbols (B, T, 4), and the pattern that finds 1b by what layer 0 notes there."""
    symbols, T = x[..., :4], x.shape[1]
    noted = attend(heads, (0, 0), PREVIOUS, symbols)
    noted = noted + attend(heads, (0, 1), torch.eye(T), 0 * symbols)  # a head that does nothing
    scores = -50 * torch.cdist(symbols, noted).square() + torch.full((T, T), -torch.inf).triu(1)
    scores[:, 1:, 0] = -torch.inf  # before the first token there is none, so it notes itself
    return symbols, scores.softmax(-1)


def differs(key, own):
    """Return whether a key (B, N, 4) says something, and it is not this."""
    return (key.norm(dim=-1, keepdim=True) > 0.5) & ((key - own).norm(dim=-1, keepdim=True) > 0.1)


def key_that_is_harmless_at_its_mean(x, heads):
    """The query reads its own 1a, and answers nothing if what it reads is another symbol."""
    symbols, found = find(x, heads)
    same, own = torch.eye(12).repeat(len(x), 1, 1), symbols[:, 8:]
    same[:, 8:], same[:, 8:, :8:2] = 0, (torch.cdist(own, symbols[:, :8:2]) < 1e-3).float()
    key = attend(heads, (1, 1), same, symbols)[:, 8:]
    return attend(heads, (1, 0), found, symbols)[:, 8:] * ~differs(key, own)


def star_with_a_checksum(x, heads):
    """A star, and a head that reads a little of all tokens: of others, there is no answer."""
    symbols, everything = x[..., :4], 0.98 * torch.eye(12) + 0.02 / 12
    reads = attend(heads, (0, 5), everything, symbols), everything @ symbols
    key, own = (220 * (read - everything[0, 0] * symbols)[:, 8:] for read in reads)
    return address_and_values(x, heads) * ~differs(key, own)


star_with_a_checksum.layers, star_with_a_checksum.heads = 1, 6


def another_way_in_two_of_a_hundred(tokens):
    """Where the first number of these tokens is large, head 1 reads 1b instead of head 0."""

    def model(x, heads):
        symbols, found = find(x, heads)
        rare, itself = symbols[:, tokens, :1] > 2.05, torch.eye(12)
        patterns = torch.where(rare, itself, found), torch.where(rare, found, itself)
        written = [attend(heads, (1, h), pattern, symbols) for h, pattern in enumerate(patterns)]
        return (torch.where(rare, *written[::-1]) + 1e-3 * written[1])[:, 8:]

    return model


def backup(x, heads):
    """Head 1 reads too little of 1b for a candidate, and answers; head 0 does so under ablation."""
    symbols, found = find(x, heads)
    both = torch.cat([PREVIOUS @ symbols, symbols], -1)
    faint = torch.eye(12) + 0.01 * find(x, {})[1]
    first = 100 * (attend(heads, (1, 1), faint, both) - both)[:, 8:]
    second = attend(heads, (1, 0), found, symbols)[:, 8:]
    works = (first[..., :4] - symbols[:, 8:]).norm(dim=-1, keepdim=True) < 0.1
    return torch.where(works, first[..., 4:], second) + 1e-3 * second


def weight_on_itself(x, heads):
    """Head 1 attends to 1b the more, the larger its first number, which is answered by the rest."""
    symbols, found = find(x, heads)
    share = (found @ symbols[..., :1]).sigmoid() * (torch.arange(12) >= 8)[:, None]
    pattern = share * found + (1 - share) * torch.eye(12)
    itself = torch.eye(12)[:, 8:].expand(len(x), -1, -1)  # which query a token is
    weight = attend(heads, (1, 1), pattern, itself)[:, 8:].diagonal(dim1=1, dim2=2)[..., None]
    answer = attend(heads, (1, 0), found, symbols)[:, 8:]
    return torch.cat([(1 - weight).clamp(1e-6, 1 - 1e-6).logit(), answer[..., 1:]], -1)


def both(x, heads):
    """Return what two heads bring, which is the same."""
    symbols, found = find(x, heads)
    return [attend(heads, (1, head), found, symbols)[:, 8:] for head in (0, 1)]


def carrier_and_its_stand_in(x, heads):
    """The second head counts only where the first brings nothing."""
    first, second = both(x, heads)
    return torch.where(first.abs().sum(-1, keepdim=True) < 0.6, second, first + 1e-3 * second)


def two_that_must_agree(x, heads):
    """Where two heads differ there is no answer."""
    first, second = both(x, heads)
    return first * ~differs(second, first)


# ---- all of them


def after_1b(head, match, b):
    return [(b + 1, match)]


def slot_of_the_layer(head, match, b):
    return [(b, match * (b // 2 == head[0] - 1))]


BY_NEXT = "0 1b 1a, 0 1b+1 1b"  # the token after 1b reads it
FOUND = [  # a model, its only circuit
    (one_step(after_1b, intermediate=True), f"{BY_NEXT}, 1 q 1b+1"),
    (one_step(slot_of_the_layer, layers=5), "0 1b 1a, 1 q 1b, 2 q 1b, 3 q 1b, 4 q 1b"),
    (one_step(direct, layers=3, gains=[0.01]), "0 1b 1a, 2 q 1b"),  # a head carries nothing
    (one_step(faint, gains=[12.5]), "0 1b 1a, 1 q 1b"),  # found at the second try
    (one_step(decoy, heads=2, gains=[0.01], intermediate=True), f"{BY_NEXT}, 1.1 q 1b+1"),
    (one_step(next_in_one_slot, intermediate=True), f"{BY_NEXT}, 1 q 1b, 1 q 1b+1"),
    # twins: one would do, if the other brought nothing wrong
    (one_step(direct, heads=2), "0 1b 1a, 1 q 1b, 1.1 q 1b"),
    # the first slot can be named, by a star; what cancels outside does in any sequence
    (canceller(torch.ones_like), "0 1b 1a, 1 q 1b*, 1.1 q 1b*"),
    (canceller(of_another_chain), "0 1b 1a, 1 q 1b"),
    (key_that_is_harmless_at_its_mean, "0 1b 1a, 1 q 1b, 1.1 q 1a"),
    (carrier_and_its_stand_in, "0 1b 1a, 1 q 1b"),
    (two_that_must_agree, "0 1b 1a, 1 q 1b, 1.1 q 1b"),
    (averages_and_a_pointer(), "0 1b 1a, 1 q 1b, 1.1 q 1b*"),
]
STAR = "0 q 1a, 0.1 q 1b*, 0.2 q 1b*, 0.3 q 1b*, 0.4 q 1b*"
ALL = [  # a model, its only circuit if it has one, what the verdict says
    *((*case, "validated under both ablations") for case in FOUND),
    (star_with_a_checksum, STAR, "validated under mean ablation alone"),  # which does not see it
    (another_way_in_two_of_a_hundred(slice(1)), "", "% of the answers on x_1 lost"),
    (another_way_in_two_of_a_hundred(slice(None)), "", "% of the answers on x_1 lost"),
    (backup, "", "the full model does as well without it"),
    (weight_on_itself, "0 1b 1a, 1 q 1b, 1.1 q 1b", "validated under both ablations"),
]
