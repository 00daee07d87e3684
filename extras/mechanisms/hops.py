"""k-fold composition (Bietti's slides): k hops are hard to learn, unless shorter ones come first.

A sequence shows k permutations of N numbers in a ring; each is preceded by a hidden one, the same
in all sequences. The output after layer l = 0, 1, ... is the number 2^l hops ahead, at most k, and
k after the last.
"""

import itertools
import math

from analyze import panels
from extras.mechanisms import descend, pivot
from model import Layer

import matplotlib
import torch
from torch.nn.functional import cross_entropy


SOLVED, LIMIT = 0.95, 1600  # accuracy, steps
WIDTH, HEADS, BATCH, EVERY = 64, 2, 64, 25  # steps between evaluations


class Ring:
    """The k permutations sigma_i of N numbers; token (i, b) shows sigma_i(b). A hop leads from
    number b at place i to number sigma_i(pi_i(b)) at place i + 1; pi (1, k, N) is hidden. The model
    has one level of hops for each layer; as many as suffice if `layers` is 0."""

    def __init__(self, k, N, seed, layers=0):
        generator = torch.Generator().manual_seed(seed)
        self.k, self.N = k, N
        layers = layers or (k - 1).bit_length() + 1
        self.hops = [*(min(2**level, k) for level in range(layers - 1)), k]
        self.pi = torch.rand(1, k, N, generator=generator).argsort(2)

    def sample(self, levels, B, generator):
        """Draw tokens (B, T) and their targets (levels, B, T)."""
        sigma = torch.rand(B, self.k, self.N, generator=generator).argsort(2)
        answers = [hop := sigma.gather(2, self.pi.expand_as(sigma))]  # after 1, 2, ... k hops
        for place in range(1, self.k):
            answers.append(hop.roll(-place, 1).gather(2, answers[-1]))
        targets = torch.stack([answers[self.hops[level] - 1] for level in levels])
        return sigma.flatten(1), targets.flatten(2)


class Transformer(torch.nn.Module):
    """Attention layers of model.py, each with an output."""

    def __init__(self, task):
        super().__init__()
        self.E = torch.nn.Parameter(torch.randn(task.N, WIDTH))
        self.P = torch.nn.Parameter(torch.randn(task.k * task.N, WIDTH))
        blocks = (Layer(WIDTH, HEADS, WIDTH // HEADS, mlp=False) for _ in task.hops)
        self.blocks, self.outputs = torch.nn.ModuleList(blocks), torch.nn.ModuleList()
        for _ in task.hops:
            norm, linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, task.N)
            self.outputs.append(torch.nn.Sequential(norm, linear))

    def forward(self, tokens, levels):
        """Logits (levels, B, T, N)."""
        x, states, T = self.E[tokens] + self.P, [], len(self.P)
        for block in self.blocks:
            x = block(x, torch.zeros(T, T), None, T, {})
            states.append(x)
        return torch.stack([self.outputs[i](states[i]) for i in levels])


def train(seed, k, N, regime, steps, layers=0):
    """Train on the last level (hard), all levels (mixture), or one more level whenever the newest
    is SOLVED (curriculum), until the last one is SOLVED; rows of [step, accuracy of each level]."""
    task, generator = Ring(k, N, seed, layers), torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed)
    model, levels, rows = Transformer(task), [*range(len(task.hops))], []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    trained = dict(hard=levels[-1:], mixture=levels, curriculum=levels[:1])[regime]
    for step in range(steps + 1):
        if step % EVERY == 0:
            rows.append([step])
            for level in levels:
                tokens, targets = task.sample([level], BATCH, generator)
                with torch.no_grad():
                    right = model(tokens, [level]).argmax(3) == targets
                rows[-1].append(round(float(right.float().mean()), 4))
            if rows[-1][-1] >= SOLVED:
                break
            if regime == "curriculum" and rows[-1][len(trained)] >= SOLVED:
                trained = levels[: len(trained) + 1]
        tokens, targets = task.sample(trained, BATCH, generator)
        logits = model(tokens, trained)
        descend(optimizer, cross_entropy(logits.flatten(0, 2), targets.flatten()))
    return rows


def depth(seed, k, N, layers, steps):
    """The last row of a mixture with this many layers."""
    return train(seed, k, N, "mixture", steps, layers)[-1:]


def steps_text(runs):
    """The steps to SOLVED of these runs, as in 150/200/-; a dash stands for never."""
    solved = sorted(run[-1][0] if run[-1][-1] >= SOLVED else math.inf for run in runs)
    return "/".join(map(str, solved)).replace("inf", "-")


def table(rows):
    return pivot(rows, dict(N="numbers N", k="hops k"), lambda row: row["regime"], steps_text)


def depth_table(rows):
    def layers_of(row):
        return f"{row['layers']} layer{'s'[: row['layers'] - 1]}"

    return pivot(rows, dict(k="hops k"), layers_of, steps_text)


def draw(results):
    """Plot how each regime learns 1, 2, 4, 8 hops."""
    figure, grid = panels(3, 3, 4, 2.8, sharey=True)
    colors, (k, N) = matplotlib.colormaps["viridis"], (8, 4)
    for panel, regime in zip(grid, REGIMES, strict=True):
        panel.axhline(1 / N, color="0.5", lw=1, ls="--", label="a guess")
        wanted = dict(k=k, N=N, regime=regime).items()
        [runs] = [row["values"] for row in results["train"] if wanted <= row.items()]
        for level, run in itertools.product(range(k.bit_length()), runs):
            steps, *accuracies = zip(*run, strict=True)
            label = f"{2**level} hop{'s'[:level]}" if run is runs[0] else None
            panel.plot(steps, accuracies[level], color=colors(0.3 * level), label=label)
        panel.set(xlabel="training step", xlim=(-20, LIMIT + 20), ylim=(0, 1.04))
        panel.set_title(f"{regime}, k = {k} ({len(runs)} seeds)")
    grid[0].set_ylabel("accuracy")
    grid[2].legend(fontsize="small", loc="center right", title="accuracy at")
    return figure


REGIMES = ("mixture", "curriculum", "hard")
GRID = [(k, 4, regime) for k in (2, 4, 8) for regime in REGIMES]  # k, N, regime
SMALL = [(2, 2), (3, 2), (4, 2), (8, 2), (2, 3), (3, 3), (4, 3), (3, 4)]  # k, N
GRID += [(k, N, regime) for k, N in SMALL for regime in ("mixture", "hard")]
ROWS = [dict(k=k, N=N, regime=regime, steps=LIMIT) for k, N, regime in GRID]
DEPTHS = [dict(k=k, N=4, layers=n, steps=LIMIT) for k in (2, 3, 4) for n in (1, 2, 3, 4)]
TASKS = [(train, 3, ROWS, table), (depth, 3, DEPTHS, depth_table)]
