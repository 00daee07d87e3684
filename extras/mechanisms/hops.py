"""k-fold composition (Bietti's slides): k hops are hard to learn, unless shorter ones come first.

    python -m extras.mechanisms hops                              # about 13 minutes on one core

A sequence shows k permutations of N numbers in a ring; each is preceded by a hidden one, the same
in all sequences. The output after layer l is the number 2^l hops ahead; a hop token in the input
selects the number of hops instead, and only the last layer has an output. Levels l count from 0.
"""

import math

from model import Layer

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy


SOLVED = 0.95  # accuracy
REGIMES = ("mixture", "curriculum", "hard")
GRID = [(k, 4, regime, False) for k in (2, 4, 8) for regime in REGIMES]  # k, N, regime, hop token
GRID += [(k, 4, regime, True) for k in (2, 4) for regime in ("mixture", "curriculum")]
GRID += [(2, N, regime, False) for N in (6, 8) for regime in ("mixture", "hard")]
WIDTH, HEADS, BATCH, EVERY = 64, 2, 64, 25  # steps between evaluations


class Ring:
    """The k permutations sigma_i of N numbers; token (i, b) shows sigma_i(b). A hop leads from
    number b at place i to number sigma_i(pi_i(b)) at place i + 1; pi (1, k, N) is hidden."""

    def __init__(self, k, N, hop_token, seed):
        generator = torch.Generator().manual_seed(seed)
        self.k, self.N, self.hop_token = k, N, hop_token
        self.hops = [2**level for level in range(k.bit_length())]
        self.pi = torch.rand(1, k, N, generator=generator).argsort(2)

    def answers(self, sigma):
        """The numbers that are 1, 2, 4 ... k hops from every token, (levels, B, k, N)."""
        answers = [sigma.gather(2, self.pi.expand_as(sigma))]
        for hops in self.hops[:-1]:
            answers.append(answers[-1].roll(-hops, 1).gather(2, answers[-1]))
        return torch.stack(answers)

    def sample(self, levels, B, generator):
        """Draw tokens (B, T) and targets (outputs, B, T) of these levels; -100 is no target."""
        sigma = torch.rand(B, self.k, self.N, generator=generator).argsort(2)
        answers = self.answers(sigma).flatten(2)
        if not self.hop_token:
            return sigma.flatten(1), answers[levels]
        level = torch.tensor(levels)[torch.randint(len(levels), (B,), generator=generator)]
        tokens = torch.cat([self.N + level[:, None], sigma.flatten(1)], 1)
        no_target = torch.full((B, 1), -100)
        return tokens, torch.cat([no_target, answers[level, torch.arange(B)]], 1)[None]


class Transformer(torch.nn.Module):
    """Attention layers of model.py; each has an output, or with a hop token the last one alone."""

    def __init__(self, task):
        super().__init__()
        vocabulary = task.N + task.hop_token * len(task.hops)
        self.E = torch.nn.Parameter(torch.randn(vocabulary, WIDTH))
        self.P = torch.nn.Parameter(torch.randn(task.k * task.N + task.hop_token, WIDTH))
        blocks = (Layer(WIDTH, HEADS, WIDTH // HEADS, mlp=False) for _ in task.hops)
        self.blocks, self.outputs = torch.nn.ModuleList(blocks), torch.nn.ModuleList()
        for _ in range(1 if task.hop_token else len(task.hops)):
            norm, linear = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, task.N)
            self.outputs.append(torch.nn.Sequential(norm, linear))

    def forward(self, tokens, levels):
        """Logits (outputs, B, T, N) of the levels."""
        x, states, T = self.E[tokens] + self.P, [], len(self.P)
        for block in self.blocks:
            x, _ = block(x, torch.zeros(T, T), None, T, {})
            states.append(x)
        if len(self.outputs) == 1:
            levels, states = [0], [x]
        return torch.stack([self.outputs[i](states[i]) for i in levels])


def train(seed, k, N, regime, hop_token, steps):
    """Train on the last level (hard), all levels (mixture), or one more level whenever the newest
    is SOLVED (curriculum), until the last one is SOLVED; rows of [step, accuracy of each level]."""
    task, generator = Ring(k, N, hop_token, seed), torch.Generator().manual_seed(seed + 1)
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
                rows[-1].append(round(float(right[targets >= 0].float().mean()), 4))
            if rows[-1][-1] >= SOLVED:
                break
            if regime == "curriculum" and rows[-1][len(trained)] >= SOLVED:
                trained = levels[: len(trained) + 1]
        tokens, targets = task.sample(trained, BATCH, generator)
        optimizer.zero_grad()
        cross_entropy(model(tokens, trained).flatten(0, 2), targets.flatten()).backward()
        optimizer.step()
    return rows


def table(rows):
    """The steps to SOLVED at k hops for each seed; a dash stands for never."""
    runs = {(*row.values(),)[:4]: row["values"] for row in rows}  # {a row of GRID: runs}
    shapes = [*dict.fromkeys(key[:2] for key in runs)]
    cells = [("steps to 95%", *(f"k = {k}, N = {N}" for k, N in shapes))]
    for regime, token in dict.fromkeys(key[2:] for key in runs):
        times = []
        for shape in shapes:
            last = [run[-1] for run in runs.get((*shape, regime, token), [])]
            steps = sorted(row[0] if row[-1] >= SOLVED else math.inf for row in last)
            times.append(", ".join(map(str, steps)).replace("inf", "-"))
        cells.append((regime + ", hop token" * token, *times))
    return cells


KEYS = ("k", "N", "regime", "hop_token")
TASKS = [(train, 3, [dict(zip(KEYS, row, strict=True), steps=1600) for row in GRID], table)]


def draw(results):
    """Plot the accuracy of every seed during training at the largest k."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.7), layout="constrained")
    k = max(row["k"] for row in results["train"])
    rows = {row["regime"]: row for row in results["train"] if row["k"] == k}
    colors = plt.get_cmap("viridis")([0.3 * level for level in range(k.bit_length())])
    for panel, regime in zip(axes, ("mixture", "curriculum"), strict=True):
        runs, N = rows[regime]["values"], rows[regime]["N"]
        for level, color in enumerate(colors):
            panel.plot([], [], color=color, label=f"{2**level} hop{'s'[:level]}")
            for run in runs:
                steps, *accuracies = zip(*run, strict=True)
                panel.plot(steps, accuracies[level], color=color)
        panel.axhline(1 / N, color="0.5", lw=1, ls="--", label="a guess")
        panel.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
        panel.set_title(f"{regime.capitalize()}, k = {k}, N = {N}, {len(runs)} seeds")
    axes[0].legend(fontsize="small", loc="lower center", ncol=3)
    return figure
