"""How many samples MLP and attention need for one gradient step (Bietti's slides, a theorem).

    python -m mechanisms.samples                           # about half a minute of one core

The task of noise.py with n characters, all equally frequent: after a trigger comes noise, or else
the sequence's own output. Embeddings are one-hot, the MLP is a matrix that reads the last token, a
trigger, and attention is even over the tokens before: all that one step learns are counts.
"""

import math

import torch

from mechanisms import command, markdown


OFTEN = 0.5  # how often noise follows a trigger
CHARACTERS = (16, 32, 64, 128, 256)
SAMPLES = tuple(2**i for i in range(14))
LEARNT = {  # what one step learns: the share of trials, or of copies, that counts as learnt
    "noise by the MLP": 0.95,
    "noise by attention": 0.95,
    "copying by attention": 0.5,
}


def sample(B, n, T, generator):
    """Tokens (T, B) before a last trigger, the first a trigger too, and what follows it (B,).

    Token 0 is the trigger, 1 ... n - 1 the other characters, n the noise."""
    output = torch.randint(1, n, (B,), generator=generator)
    noisy = torch.rand(T + 1, B, generator=generator) < OFTEN
    named = torch.where(noisy, n, output)  # (T + 1, B), what follows if the token is a trigger
    drawn, tokens = torch.randint(n, (T, B), generator=generator), [torch.zeros_like(output)]
    for t in range(1, T):
        tokens.append(torch.where(tokens[-1] == 0, named[t], drawn[t]))
    return torch.stack(tokens), named[-1]


def one_step(n, samples, generator, T=64):
    """For each number of samples LEARNT after a step of rate 1 from zero: the margins of the noise
    over the best character, for attention on a fresh sequence, and the share of characters that
    attention copies: read alone, they name themselves before any other."""
    tokens, target = sample(samples[-1] + 1, n, T, generator)
    fresh = tokens[:, -1].bincount(minlength=n + 1) / T

    # a step adds u_target x' of every sample; what the softmax takes off is alike for all logits
    last, context, found, start = torch.zeros(n + 1), torch.zeros(n + 1, n + 1), [], 0
    for end in samples:
        some = target[start:end]
        last += some.bincount(minlength=n + 1)
        pairs = (some * (n + 1) + tokens[:, start:end]).flatten()
        context += pairs.bincount(minlength=(n + 1) ** 2).view(n + 1, n + 1)
        start = end

        by_attention = context @ fresh / (T * end)
        margins = [row[n] - row[:n].max() for row in (last / end, by_attention)]
        characters = context[1:n, 1:n]
        others = characters - torch.full((n - 1,), math.inf).diag()
        copied = (characters.diagonal() > others.amax(0)).float().mean()
        found.append([float(value) for value in (*margins, copied)])
    return found


def learnt(seed, n, trials):
    """Of LEARNT the share of trials that have it after each of SAMPLES, of copies the mean share,
    (SAMPLES, 3)."""
    generators = (torch.Generator().manual_seed(seed + trial) for trial in range(trials))
    values = torch.tensor([one_step(n, SAMPLES, generator) for generator in generators])
    return torch.cat([(values[:, :, :2] > 0).float(), values[:, :, 2:]], 2).mean(0).tolist()


def needed(shares, level):
    """Samples at which shares, one for each of SAMPLES, pass the level, between powers of two by a
    line; infinite if they do not."""
    after = next((i for i, share in enumerate(shares) if share >= level), None)
    if not after:
        return math.inf if after is None else float(SAMPLES[0])
    rest = (shares[after] - level) / (shares[after] - shares[after - 1])
    return SAMPLES[after] * 0.5**rest


def tasks(seeds):
    """All seeds in one row, whose mean is kept."""
    return [(1, learnt, dict(n=n, trials=len(seeds)), seeds[:1]) for n in CHARACTERS]


def table(results):
    """Samples needed for LEARNT."""
    rows = [("characters n", *(row["n"] for row in results["learnt"]))]
    for i, (name, level) in enumerate(LEARNT.items()):
        shares = [[share[i] for share in row["values"][0]] for row in results["learnt"]]
        rows.append((name, *(f"{needed(some, level):.0f}" for some in shares)))
    return markdown(*rows)


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, seeds=200)
