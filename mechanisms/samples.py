"""How many samples MLP and attention need for one gradient step (Bietti's slides, a theorem).

    python mechanisms/samples.py                           # about half a minute on 2 cores
    python mechanisms/samples.py --plot-only               # the figure again, from samples.json

The task of noise.py with n characters, all equally frequent: after a trigger comes noise, or else
the sequence's own output. Embeddings are one-hot, the MLP is a matrix that reads the last token, a
trigger, and attention is even over the tokens before: all that one step learns are counts.
"""

import math
import time

from parts.intervals import bootstrap
from parts.runs import measure_and_draw, save_figure

import matplotlib.pyplot as plt
import torch


OFTEN = 0.5  # how often noise follows a trigger
CHARACTERS = (16, 32, 64, 128, 256)
SAMPLES = tuple(2**i for i in range(14))
LEARNT = {  # what one step learns: the share of trials, or of copies, that counts as learnt
    "noise by the MLP": 0.95,
    "noise by attention": 0.95,
    "copying by attention": 0.5,
}
COLORS = ("#0072B2", "#D55E00", "#009E73")  # all readers can tell these apart


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


def needed(learnt, level):
    """Samples at which learnt (trials, SAMPLES) passes the level in the mean, between powers of two
    by a line; infinite if it does not."""
    shares = learnt.mean(0).tolist()
    after = next((i for i, share in enumerate(shares) if share >= level), None)
    if not after:
        return math.inf if after is None else float(SAMPLES[0])
    rest = (shares[after] - level) / (shares[after] - shares[after - 1])
    return SAMPLES[after] * 0.5**rest


def summary(values):
    """{name of LEARNT: dict} of values (trials, SAMPLES, LEARNT): the samples needed and, of the
    noise, the margin after all samples, each with its 95% interval; the shares behind it."""
    found = {}
    for i, (name, level) in enumerate(LEARNT.items()):
        generator = torch.Generator().manual_seed(0)
        copying = name.startswith("copying")
        learnt = values[:, :, i] if copying else (values[:, :, i] > 0).float()
        again = torch.randint(len(values), (1000, len(values)), generator=generator)
        spread = sorted(needed(learnt[rows], level) for rows in again)
        counts = [needed(learnt, level), spread[25], spread[975]]
        found[name] = dict(needed=counts, shares=learnt.mean(0).tolist())
        if not copying:
            margin = values[:, -1, i]
            found[name]["margin"] = [margin.mean().item(), *bootstrap(margin, generator)]
    return found


def measure(args):
    """{"trials": their number, "characters": {n: summary}}."""
    found, start = {}, time.time()
    for done, n in enumerate(CHARACTERS, 1):
        generator = torch.Generator().manual_seed(args.seed)
        values = [one_step(n, SAMPLES, generator) for _ in range(args.trials)]
        found[n] = summary(torch.tensor(values))
        left = (time.time() - start) * (len(CHARACTERS) / done - 1)
        said = ", ".join(f"{name} {found[n][name]['needed'][0]:.0f}" for name in LEARNT)
        print(f"{n} characters, samples needed: {said}; about {left:.0f} s left", flush=True)
    return dict(trials=args.trials, characters=found)


def draw(results, path):
    """Samples needed against n, and the size of the margins of the noise token."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    characters, found = [*map(int, results["characters"])], [*results["characters"].values()]

    def points(panel, name, what):
        mean, low, high = torch.tensor([row[name][what] for row in found]).T
        style = dict(fmt="o-", color=COLORS[[*LEARNT].index(name)], label=name, capsize=3)
        panel.errorbar(characters, mean, (mean - low, high - mean), **style)

    for name in LEARNT:
        points(left, name, "needed")
        if "margin" in found[0][name]:
            points(right, name, "margin")
    left.plot(characters, [32 * n for n in characters], "k:", label="32 n, to guide the eye")
    right.plot(characters, [0.5] * len(characters), "k--", lw=1, label="1/2 and 1/(2n), expected")
    right.plot(characters, [0.5 / n for n in characters], "k--", lw=1)
    left.set(ylabel="samples needed", title="The noise in 95% of trials, half of all copies")
    text = f"Margin of the noise token after {SAMPLES[-1]} samples"
    right.set(ylabel="logit of noise less the highest other, rate 1", title=text)
    for panel in (left, right):
        panel.set(xscale="log", yscale="log")
        panel.set_xlabel(f"characters n; {results['trials']} trials each, 95% intervals")
        panel.set_xticks(characters, characters)
        panel.minorticks_off()
        panel.legend(fontsize="small")
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, trials=200)


if __name__ == "__main__":
    main()
