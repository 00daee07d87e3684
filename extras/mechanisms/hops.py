"""k-fold composition (Bietti's slides): k hops are hard to learn, unless shorter ones come first.

    python -m extras.mechanisms hops

A sequence shows k permutations of N numbers in a ring; each is preceded by a hidden one, the same
in all sequences. The output after layer l = 0, 1, ... is the number 2^l hops ahead, at most k, and
k after the last; or a hop token selects the number of hops, and only the last layer has an output.
"""

import math
import statistics

from analyze import panels
from extras.mechanisms import seeds_table
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

    def __init__(self, k, N, hop_token, seed, layers=0):
        generator = torch.Generator().manual_seed(seed)
        self.k, self.N, self.hop_token = k, N, hop_token
        layers = layers or (k - 1).bit_length() + 1
        self.hops = [*(min(2**level, k) for level in range(layers - 1)), k]
        self.pi = torch.rand(1, k, N, generator=generator).argsort(2)

    def answers(self, sigma):
        """The numbers that are `hops` from every token, (levels, B, k, N)."""
        answers = [hop := sigma.gather(2, self.pi.expand_as(sigma))]
        for place in range(1, self.k):
            answers.append(hop.roll(-place, 1).gather(2, answers[-1]))
        return torch.stack([answers[hops - 1] for hops in self.hops])

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


def train(seed, k, N, regime, hop_token, steps, layers=0):
    """Train on the last level (hard), all levels (mixture), or one more level whenever the newest
    is SOLVED (curriculum), until the last one is SOLVED; rows of [step, accuracy of each level]."""
    task = Ring(k, N, hop_token, seed, layers)
    generator = torch.Generator().manual_seed(seed + 1)
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


def depth(seed, k, N, layers, steps):
    """The last step of a mixture with this many layers, and its accuracy at k hops."""
    step, *_, accuracy = train(seed, k, N, "mixture", False, steps, layers)[-1]
    return [step, accuracy]


def by_setting(rows):
    """{(k, N, regime, hop token): the runs of all seeds}."""
    keys = "k", "N", "regime", "hop_token"
    return {tuple(row[key] for key in keys): row["values"] for row in rows}


def steps_to_solve(run):
    """The last step of a run, or infinity if it is not SOLVED by then."""
    return run[-1][0] if run[-1][-1] >= SOLVED else math.inf


def table(rows):
    """The steps to SOLVED at k hops for each seed; a dash stands for never."""
    runs = by_setting(rows)
    regimes = [*dict.fromkeys(key[2:] for key in runs)]
    names = (regime + ", hop token" * token for regime, token in regimes)
    lines = []
    for N, k in sorted({(key[1], key[0]) for key in runs}):
        times = []
        for regime in regimes:
            times.append(times_text(runs.get((k, N, *regime), [])))
        lines.append((N, k, *times))
    return seeds_table(rows, ("numbers N", "hops k", *names), lines)


def times_text(runs):
    """The steps to SOLVED of these runs, as in 150/200/-."""
    return "/".join(map(str, sorted(map(steps_to_solve, runs)))).replace("inf", "-")


def depth_table(rows):
    """The steps to SOLVED with each number of layers."""
    head, lines = ["hops k"], {}
    for row in rows:
        column = f"{row['layers']} layer{'s'[: row['layers'] - 1]}"
        head += [column] * (column not in head)
        lines.setdefault(row["k"], []).append(times_text([[run] for run in row["values"]]))
    return seeds_table(rows, head, [(k, *cells) for k, cells in lines.items()])


def draw(results):
    """Plot how each regime learns 1, 2, 4, 8 hops, and k hops by the number of layers."""
    figure, grid = panels(4, 2, 5, 2.8, sharey=True)
    viridis, (k, N) = matplotlib.colormaps["viridis"], (8, 4)
    for panel, regime in zip(grid, REGIMES, strict=False):
        runs = by_setting(results["train"])[k, N, regime, False]
        for level in range(k.bit_length()):
            color = viridis(0.3 * level)
            panel.plot([], [], color=color, label=f"{2**level} hop{'s'[:level]}")
            for run in runs:
                steps, *accuracies = zip(*run, strict=True)
                panel.plot(steps, accuracies[level], color=color)
        panel.set(xlabel="training step", xlim=(-20, LIMIT + 20))
        panel.set_title(f"{MEANINGS[regime]} ({len(runs)} seeds)")
    grid[2].legend(fontsize="small", loc="center right", title="accuracy at")
    grid[2].text(LIMIT, 1 / N, "a guess", ha="right", va="top", size="small")

    last, rows = grid[3], results["depth"]
    for hops, marker in (2, "o"), (3, "s"), (4, "^"):
        chosen = [row for row in rows if row["k"] == hops]
        color, layers = viridis(0.2 * hops), [row["layers"] for row in chosen]
        means = [statistics.mean(accuracy for _, accuracy in row["values"]) for row in chosen]
        last.plot(layers, means, marker=marker, color=color, label=f"{hops} hops")
    last.set(xlabel="layers", xticks=layers)
    last.set_title(f"k hops by depth, mixtures (mean of {len(rows[0]['values'])} seeds)")
    last.legend(fontsize="small", loc="center right")
    for panel in grid:
        panel.axhline(1 / N, color="0.5", lw=1, ls="--")
    for panel in grid[::2]:
        panel.set(ylabel="accuracy", ylim=(0, 1.04))
    return figure


MEANINGS = dict(
    mixture="Mixture of 1, 2, 4, 8 hops",
    curriculum="Curriculum, easy hops first",
    hard="Hard, 8 hops alone",
)
REGIMES = [*MEANINGS]
GRID = [(k, 4, regime, False) for k in (2, 4, 8) for regime in REGIMES]  # k, N, regime, hop token
GRID += [(k, 4, regime, True) for k in (2, 4) for regime in ("mixture", "curriculum")]
SMALL = [(2, 2), (3, 2), (4, 2), (8, 2), (2, 3), (3, 3), (4, 3), (3, 4)]  # k, N
GRID += [(k, N, regime, False) for k, N in SMALL for regime in ("mixture", "hard")]
ROWS = [dict(k=k, N=N, regime=r, hop_token=token, steps=LIMIT) for k, N, r, token in GRID]
DEPTHS = [dict(k=k, N=4, layers=n, steps=LIMIT) for k in (2, 3, 4) for n in (1, 2, 3, 4)]
TASKS = [(train, 3, ROWS, table), (depth, 3, DEPTHS, depth_table)]
