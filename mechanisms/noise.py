"""Common bigrams or the context (Bietti's slides): what an MLP learns first, and its truncation.

    python -m mechanisms.noise                             # about 9 minutes of one core

Characters follow Shakespeare's bigrams, but a space is followed by an output of the sequence's own,
or half the time by one and the same noise token ("the" in "in the"). Tested is without noise, on
spaces after the first: does the model name the output, or the noise? With how much of its last MLP?
"""

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from mechanisms import COLORS, command, draw_seeds, markdown
from mechanisms.bigrams import N, read_bigrams


NOISE, OFTEN = N, 0.5  # the token after the N characters, and how often it follows a space
WIDTH, KEPT = 128, (0, 1, 2, 4, 8, 13, 26, 64, 128)  # ranks kept of the second MLP


def sample(B, T, often, chances, frequency, generator):
    """Tokens (B, T + 1), scored (B, T): at a trigger that occurred before, and output (B,)."""
    trigger = frequency.argmax()
    output = torch.randint(N - 1, (B,), generator=generator)
    output += output >= trigger  # any character but the trigger

    # every token from the one before; after the noise token comes any character, by frequency
    below = torch.cat([chances, frequency[None]]).cumsum(1)
    below /= below[:, -1:].clone()
    uniform, coin = torch.rand(2, T, B, generator=generator)
    tokens = torch.multinomial(frequency, B, replacement=True, generator=generator)[:, None]
    for t in range(T):
        drawn = (below[tokens[:, t]] <= uniform[t, :, None]).sum(1)
        own = torch.where(coin[t] < often, NOISE, output)
        following = torch.where(tokens[:, t] == trigger, own, drawn)
        tokens = torch.cat([tokens, following[:, None]], 1)
    triggers = tokens[:, :-1] == trigger
    return tokens, triggers & (triggers.cumsum(1) > 1), output


class Layer(torch.nn.Module):
    """One head and a ReLU MLP, each added to the stream, without norm or bias."""

    def __init__(self, d, generator):
        super().__init__()
        self.key = torch.nn.Parameter(torch.zeros(d, d))
        for name, shape in dict(value=(d, d), out=(d, d), up=(4 * d, d), down=(d, 4 * d)).items():
            spread = 2 * torch.rand(shape, generator=generator) - 1
            setattr(self, name, torch.nn.Parameter(spread / shape[1] ** 0.5))

    def attend(self, x):
        """The stream (B, T, d) after the head."""
        future = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        attention = (x @ self.key @ x.mT / x.shape[2] ** 0.5 + future).softmax(2)
        return x + attention @ (x @ (self.out @ self.value).T)

    def mlp(self, x, kept=None):
        """What the MLP adds to x (..., d), its first matrix as it is or cut to this rank."""
        up = self.up if kept is None else truncated(self.up, kept)
        return (x @ up.T).relu() @ self.down.T


class TwoLayers(torch.nn.Module):
    """Two layers between random embeddings E, P, U that stay as they are."""

    def __init__(self, d, T, generator):
        super().__init__()
        E, P, U = (torch.randn(n, d, generator=generator) for n in (N + 1, T, N + 1))
        self.E, self.P, self.U = E, P, U / d**0.5
        self.first, self.second = Layer(d, generator), Layer(d, generator)

    def before_last(self, tokens, first=True):
        """What the second MLP reads (B, T, d), with or without the first."""
        x = self.first.attend(self.E[tokens] + self.P[: tokens.shape[1]])
        return self.second.attend(x + self.first.mlp(x) if first else x)

    def read(self, x, kept=None):
        """Logits (..., N + 1) of what the second MLP reads."""
        return (x + self.second.mlp(x, kept)) @ self.U.T

    def forward(self, tokens):
        return self.read(self.before_last(tokens))


def truncated(matrix, kept):
    """The nearest matrix of this rank."""
    left, size, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[:, :kept] * size[:kept]) @ right[:kept]


@torch.no_grad()
def measures(model, tokens, scored, output):
    """[accuracy, p(noise)] for each of KEPT, and without the first MLP."""
    right, found = output[:, None].expand(scored.shape)[scored], []
    for kept in (*KEPT, None):
        x = model.before_last(tokens[:, :-1], first=kept is not None)[scored]
        p = model.read(x, kept).softmax(1)
        values = (p.argmax(1) == right).float(), p[:, NOISE]
        found.append([round(float(value.mean()), 5) for value in values])
    return found


def train(seed, steps, d=WIDTH, T=64, B=64, every=10):
    """[step, measures] of every so many steps; the loss includes noise."""
    generator = torch.Generator().manual_seed(seed)
    _, *table = read_bigrams()
    model = TwoLayers(d, T, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    clean, found = sample(256, T, 0, *table, generator), []
    for step in range(steps + 1):
        if step % every == 0:
            found.append([step, measures(model, *clean)])
        tokens, scored, _ = sample(B, T, OFTEN, *table, generator)
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1])[scored], tokens[:, 1:][scored]).backward()
        optimizer.step()
    return found


def tasks(seeds, steps):
    return [(1, train, dict(steps=steps), seeds)]


def shares(results):
    """Steps, and [accuracy, p(noise)] (seeds, steps, KEPT and without the first MLP, 2)."""
    seeds = results["train"][0]["values"]
    return [step for step, _ in seeds[0]], torch.tensor([[row[1] for row in run] for run in seeds])


def table(results):
    """Means, and the lowest and the highest seed."""
    steps, values = shares(results)
    rows = [("tested without noise", "accuracy", "p(noise)")]
    for time, kept in (-1, WIDTH), (-1, 26), (-1, 13), (-1, 0), (5, WIDTH), (5, 0), (-1, None):
        seeds = values[:, time, (*KEPT, None).index(kept)].T  # (2, seeds)
        cells = [f"{x.mean():.2f} ({x.min():.2f}\N{EN DASH}{x.max():.2f})" for x in seeds]
        how = "first MLP removed instead" if kept is None else f"rank {kept} of {WIDTH}"
        rows.append((f"step {steps[time]}, {how}", *cells))
    return markdown(*rows)


def draw(results):
    """Accuracy and p(noise) by step, and by the rank kept of the second MLP."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    steps, values = shares(results)
    for i, what in enumerate(("accuracy", "p(noise)")):
        for kept, how, style in (WIDTH, "", "-"), (0, ", MLP 2 removed", "--"):
            looks = dict(color=COLORS[i], ls=style)
            draw_seeds(left, steps, values[:, :, KEPT.index(kept), i], what + how, **looks)
        draw_seeds(right, KEPT, values[:, -1, : len(KEPT), i], what, color=COLORS[i])
    left.set(xlabel="training step", ylabel="share, tested without noise", ylim=(-0.03, 1.25))
    left.set_title(f"mean of {len(values)} seeds, lowest to highest")
    right.set_xscale("symlog", base=2, linthresh=1)
    right.set_xticks(KEPT, KEPT)
    right.set_xticks([], minor=True)
    right.set(xlabel="rank kept of the second MLP; 0: removed, 128: whole", ylabel="share")
    right.set_title(f"Truncated after step {steps[-1]}")
    left.legend(fontsize="small", ncol=2, loc="upper center")
    right.legend(fontsize="small", loc="center left")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, draw, steps=300, seeds=8)
