"""Samples that an MLP and attention need for one gradient step (Bietti's slides, a theorem).

    python -m mechanisms.samples                           # about half a minute on one core

The task is that of noise.py with n equally frequent characters: after a trigger comes the noise
token or the output of the sequence. Embeddings are one-hot, the MLP is a matrix that reads the last
token, a trigger, and attention is uniform over the preceding tokens: one step learns counts.
"""

import math

import torch

from mechanisms import command


NOISE_SHARE = 0.5  # how often the noise token follows a trigger
SAMPLES = tuple(2**i for i in range(14))
LEARNED = {  # share of the trials, or of the copied characters, that counts as learned
    "noise by the MLP": 0.95,
    "noise by attention": 0.95,
    "copying by attention": 0.5,
}


def sample(B, n, T, generator):
    """Draw tokens (T, B) that begin with a trigger and precede another one, and what follows it
    (B,). Token 0 is the trigger, 1 ... n - 1 are the other characters, n is the noise."""
    output = torch.randint(1, n, (B,), generator=generator)
    noisy = torch.rand(T + 1, B, generator=generator) < NOISE_SHARE
    following = torch.where(noisy, n, output)  # (T + 1, B), used after a trigger
    drawn, tokens = torch.randint(n, (T, B), generator=generator), [torch.zeros_like(output)]
    for t in range(1, T):
        tokens.append(torch.where(tokens[-1] == 0, following[t], drawn[t]))
    return torch.stack(tokens), following[-1]


def learnt(seed, n, trials, T=64):
    """Take a gradient step from zero on each number of SAMPLES; the mean over trials of LEARNED.

    The noise is learned if it has the largest logit, for attention on a fresh sequence. A character
    is copied if attention that reads it alone prefers it to all other characters."""
    rows = torch.zeros(len(SAMPLES), len(LEARNED))
    for trial in range(trials):
        generator = torch.Generator().manual_seed(seed * trials + trial)
        tokens, target = sample(SAMPLES[-1] + 1, n, T, generator)
        fresh = tokens[:, -1].bincount(minlength=n + 1) / T
        context, start = torch.zeros(n + 1, n + 1), 0
        for i, end in enumerate(SAMPLES):
            # a step adds u_target x' of each sample; the softmax subtracts the same from all logits
            pairs = (target[start:end] * (n + 1) + tokens[:, start:end]).flatten()
            context += pairs.bincount(minlength=(n + 1) ** 2).view(n + 1, n + 1)
            last, start = target[:end].bincount(minlength=n + 1), end
            for j, logits in enumerate((last, context @ fresh)):
                rows[i, j] += logits[n] > logits[:n].max()
            others = context[1:n, 1:n] - torch.full((n - 1,), math.inf).diag()
            rows[i, 2] += (context.diagonal()[1:n] > others.amax(0)).float().mean()
    return (rows / trials).tolist()


TASKS = [(learnt, dict(n=n, trials=200)) for n in (16, 32, 64, 128, 256)]


def table(results):
    """The samples that each of LEARNED needs, interpolated between the powers of two."""
    rows = [("characters n", *(row["n"] for row in results["learnt"]))]
    for i, (name, level) in enumerate(LEARNED.items()):
        cells = []
        for row in results["learnt"]:
            shares = torch.tensor(row["values"]).mean(0)[:, i].tolist()
            after = next(j for j, share in enumerate(shares) if share >= level)
            excess = (shares[after] - level) / (shares[after] - shares[after - 1])
            cells.append(f"{SAMPLES[after] * 0.5**excess:.0f}")
        rows.append((name, *cells))
    return rows


if __name__ == "__main__":
    command(__file__, __doc__, TASKS, table)
