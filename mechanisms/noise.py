"""Common bigrams or the context (Bietti's slides): what an MLP learns first, and its truncation.

    python mechanisms/noise.py                             # about 5 minutes on 2 cores
    python mechanisms/noise.py --plot-only                 # the figure again, from noise.json

Characters follow Shakespeare's bigrams, but a space is followed by an output of the sequence's own,
or half the time by one and the same noise token ("the" in "in the"). Tested is without noise, on
spaces after the first: does the model name the output, or the noise? With how much of its last MLP?
"""

import time

from parts.runs import measure_and_draw, save_figure

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from mechanisms.bigrams import N, read_bigrams


NOISE, OFTEN = N, 0.5  # the token after the N characters, and how often it follows a space
WIDTH, KEPT = 128, (0, 1, 2, 4, 8, 13, 26, 64, 128)  # ranks kept of the second MLP
COLORS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7")  # all readers can tell these apart


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
        """The stream (B, T, d) after the head, and its attention (B, T, T)."""
        future = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        attention = (x @ self.key @ x.mT / x.shape[2] ** 0.5 + future).softmax(2)
        return x + attention @ (x @ (self.out @ self.value).T), attention

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
        """What the second MLP reads (B, T, d), with or without the first; the second attention."""
        x, _ = self.first.attend(self.E[tokens] + self.P[: tokens.shape[1]])
        return self.second.attend(x + self.first.mlp(x) if first else x)

    def read(self, x, kept=None):
        """Logits (..., N + 1) of what the second MLP reads."""
        return (x + self.second.mlp(x, kept)) @ self.U.T

    def forward(self, tokens):
        return self.read(self.before_last(tokens)[0])


def truncated(matrix, kept):
    """The nearest matrix of this rank."""
    left, size, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[:, :kept] * size[:kept]) @ right[:kept]


def margin(logits):
    """Of (..., N + 1) the (...) by which the noise token is above all others."""
    return logits[..., NOISE] - logits[..., :NOISE].amax(-1)


@torch.no_grad()
def measures(model, clean, noisy):
    """[accuracy, p(right), p(noise)] for each of KEPT; then [margin of the second MLP alone,
    accuracy without the first, attention to outputs, to noise after triggers of noisy sequences]"""
    tokens, scored, output = clean
    right = output[:, None].expand(scored.shape)[scored]
    x, rows = model.before_last(tokens[:, :-1])[0][scored], []
    for kept in KEPT:
        p = model.read(x, kept).softmax(1)
        values = (p.argmax(1) == right).float(), p.gather(1, right[:, None]), p[:, NOISE]
        rows.append([float(value.mean()) for value in values])
    without_first = model.before_last(tokens[:, :-1], first=False)[0][scored]
    accuracy = (model.read(without_first).argmax(1) == right).float().mean()
    found = [margin(model.second.mlp(x) @ model.U.T).mean(), accuracy]

    # the place after a trigger holds the output or noise
    tokens, scored, output = noisy
    attention = model.before_last(tokens[:, :-1])[1]
    after = tokens[:, :-2] == read_bigrams()[2].argmax()
    for what in (output[:, None], NOISE):
        place = after & (tokens[:, 1:-1] == what)
        found.append((attention[:, :, 1:] * place[:, None]).sum(2)[scored].mean())
    return rows, [float(value) for value in found]


def train(seed, steps, d=WIDTH, T=64, B=64, every=10):
    """[step, *measures] of every so many steps; the loss includes noise."""
    generator = torch.Generator().manual_seed(seed)
    _, *table = read_bigrams()
    model = TwoLayers(d, T, generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    clean, noisy = (sample(256, T, often, *table, generator) for often in (0, OFTEN))
    found = []
    for step in range(steps + 1):
        if step % every == 0:
            found.append([step, *measures(model, clean, noisy)])
        tokens, scored, _ = sample(B, T, OFTEN, *table, generator)
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1])[scored], tokens[:, 1:][scored]).backward()
        optimizer.step()
    return found


def measure(args):
    """{"training": of each seed what train gives}."""
    training, start = [], time.time()
    for seed in range(args.seed, args.seed + args.seeds):
        training.append(train(seed, args.steps))
        accuracy = training[-1][-1][1][-1][0]  # last step, all ranks kept
        left = (time.time() - start) * (args.seeds / len(training) - 1)
        print(f"seed {seed}: accuracy {accuracy:.3f}, about {left:.0f} s left", flush=True)
    return dict(training=training)


def draw(results, path):
    """Accuracy and p(noise) by rank kept and step; the MLP's margin; what is attended to."""
    figure, axes = plt.subplot_mosaic("AABBCC;DDDEEE", figsize=(16, 9), layout="constrained")
    seeds, steps = results["training"], [row[0] for row in results["training"][0]]
    cut = torch.tensor([[row[1] for row in rows] for rows in seeds])  # (seeds, steps, KEPT, 3)
    found = torch.tensor([[row[2] for row in rows] for rows in seeds])  # (seeds, steps, 4)

    def curves(panel, values, color, label, style="-"):
        panel.plot(steps, values.T, style, color=color, alpha=0.3)
        panel.plot(steps, values.mean(0), style, color=color, label=label)
        panel.legend(fontsize="small")
        panel.set_xlabel("training step")

    for i, kept in enumerate((128, 64, 13, 0)):
        name = f"rank {kept} kept" if kept else "second MLP removed"
        curves(axes["A"], cut[:, :, KEPT.index(kept), 0], COLORS[i], name)
    curves(axes["A"], found[:, :, 1], COLORS[4], "first MLP removed", "--")
    axes["A"].set(ylabel="accuracy without noise", title=f"{len(seeds)} seeds and their mean")

    # the same for all ranks, beside the chance of the noise token
    for key, i, what in ("B", 0, "accuracy"), ("C", 2, "p(noise)"):
        shares, panel = cut[..., i].mean(0).T, axes[key]
        image = panel.pcolormesh(steps, range(len(KEPT)), shares, vmin=0, vmax=1, cmap="cividis")
        panel.set_yticks(range(len(KEPT)), KEPT)
        panel.set(xlabel="training step", ylabel="rank kept of the second MLP")
        panel.set_title(f"{what} without noise, mean of {len(seeds)} seeds")
        figure.colorbar(image, ax=panel)

    curves(axes["D"], found[:, :, 0], COLORS[1], "second MLP alone")
    axes["D"].set(ylabel="logit of noise less the highest other", title="Margin of the noise token")
    for i, what in (2, "the output"), (3, "noise"):
        curves(axes["E"], found[:, :, i], COLORS[i], f"{what} after earlier spaces")
    axes["E"].set(ylabel="attention of the second layer", ylim=(0, 1), title="Where it attends")
    save_figure(figure, path)


def main():
    measure_and_draw(__file__, __doc__, measure, draw, steps=300, seeds=3)


if __name__ == "__main__":
    main()
