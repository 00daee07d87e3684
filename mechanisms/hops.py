"""k-fold composition (Bietti's slides): hops alone are hard, from easy to hard they are learnt.

    python -m mechanisms.hops                              # about 13 minutes of one core

A sequence holds k permutations of N numbers in a ring; each is preceded by another one, the same in
all sequences and never shown. From token (i, b) 2^l hops through the ring are asked, by the state
after layer l, or after the last as a hop token says. Levels l count from 0.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from mechanisms import command, markdown
from model import Block


SOLVED = 0.95  # accuracy
REGIMES = ("mixture", "curriculum", "hard")
GRID = [(k, 4, regime, False) for k in (2, 4, 8) for regime in REGIMES]  # k, N, regime, hop token
GRID += [(k, 4, regime, True) for k in (2, 4) for regime in ("mixture", "curriculum")]
GRID += [(2, N, regime, False) for N in (6, 8) for regime in ("mixture", "hard")]
WIDTH, HEADS, BATCH, EVERY = 64, 2, 64, 25  # steps between evaluations


class Ring:
    """k permutations sigma_i of N numbers; token (i, b) shows sigma_i(b). A hop from number b at
    place i of the ring leads to number sigma_i(pi_i(b)) at place i + 1; pi (1, k, N), drawn once,
    is never shown. Asked at (i, b): the number after 1, 2, 4 ... k hops."""

    def __init__(self, k, N, hop_token, seed):
        generator = torch.Generator().manual_seed(seed)
        self.k, self.N, self.hop_token = k, N, hop_token
        self.hops = [2**level for level in range(k.bit_length())]
        self.pi = torch.rand(1, k, N, generator=generator).argsort(2)
        self.vocabulary, self.T = N + hop_token * len(self.hops), k * N + hop_token

    def answers(self, sigma):
        """The number after so many hops from each number of each place, (levels, B, k, N)."""
        found = [sigma.gather(2, self.pi.expand_as(sigma))]
        for hops in self.hops[:-1]:
            found.append(found[-1].roll(-hops, 1).gather(2, found[-1]))
        return torch.stack(found)

    def sample(self, levels, B, generator):
        """Tokens (B, T) and what is asked of these levels (readings, B, T), -100 for nothing."""
        sigma = torch.rand(B, self.k, self.N, generator=generator).argsort(2)
        answers = self.answers(sigma).flatten(2)
        if not self.hop_token:
            return sigma.flatten(1), answers[levels]
        asked = torch.tensor(levels)[torch.randint(len(levels), (B,), generator=generator)]
        tokens = torch.cat([self.N + asked[:, None], sigma.flatten(1)], 1)
        none = torch.full((B, 1), -100)
        return tokens, torch.cat([none, answers[asked, torch.arange(B)]], 1)[None]


class Transformer(torch.nn.Module):
    """Attention layers of model.py, read after each, or after the last where a hop token asks."""

    def __init__(self, task):
        super().__init__()
        self.E = torch.nn.Parameter(torch.randn(task.vocabulary, WIDTH))
        self.P = torch.nn.Parameter(torch.randn(task.T, WIDTH))
        blocks = (Block(WIDTH, HEADS, WIDTH // HEADS, mlp=False) for _ in task.hops)
        self.blocks, self.reads = torch.nn.ModuleList(blocks), torch.nn.ModuleList()
        for _ in task.hops[-1:] if task.hop_token else task.hops:
            read = torch.nn.Linear(WIDTH, task.N)
            self.reads.append(torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), read))

    def forward(self, tokens, levels, held=()):
        """Logits (readings, B, T, N) of the levels, [attention (B, heads, T, T), ...]; held: for
        each layer {head: attention to use instead of its own}."""
        x, states, patterns = self.E[tokens] + self.P, [], []
        T = len(self.P)
        for layer, block in enumerate(self.blocks):
            own = held[layer] if held else {}
            x, pattern = block(x, torch.zeros(T, T), None, T, own)
            states.append(x)
            patterns.append(pattern)
        if len(self.reads) == 1:
            levels, states = [0], [x]
        return torch.stack([self.reads[i](states[i]) for i in levels]), patterns


@torch.no_grad()
def accuracy(model, task, level, generator):
    tokens, targets = task.sample([level], BATCH, generator)
    right = model(tokens, [level])[0].argmax(3) == targets
    return round(float(right[targets >= 0].float().mean()), 4)


def fit(task, regime, steps, seed):
    """The model, and [step, accuracy of each level] up to the one where the last is SOLVED.

    hard: the last level alone; mixture: all; curriculum: one more when the newest is SOLVED."""
    generator = torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed)
    model, levels, found = Transformer(task), [*range(len(task.hops))], []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    asked = dict(hard=levels[-1:], mixture=levels, curriculum=levels[:1])[regime]
    for step in range(steps + 1):
        if step % EVERY == 0:
            found.append([step, *(accuracy(model, task, i, generator) for i in levels)])
            if found[-1][-1] >= SOLVED:
                break
            if regime == "curriculum" and found[-1][len(asked)] >= SOLVED:
                asked = levels[: len(asked) + 1]
        tokens, targets = task.sample(asked, BATCH, generator)
        logits, _ = model(tokens, asked)
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 2), targets.flatten()).backward()
        optimizer.step()
    return model, found


@torch.no_grad()
def attended(model, task, generator):
    """Of each layer and head the mean attention to each place of the ring, counted from its own,
    (layers, heads, k); and the last level's accuracy when each layer sees only its place, by theory
    0, 1, 2, 4 ... ahead, or only the place after it."""
    tokens, _ = task.sample([0], 4 * BATCH, generator)
    levels = [len(task.hops) - 1]
    place = torch.arange(task.k).repeat_interleave(task.N)  # (T,)
    apart = (place - place[:, None]) % task.k
    there = torch.stack([apart == ahead for ahead in range(task.k)]).float()  # (k, T, T)
    places, held = [], ([], [])
    for layer, pattern in enumerate(model(tokens, levels)[1]):
        ahead = (0, *task.hops)[layer]
        places.append((torch.einsum("bhts,kts->hk", pattern, there) / tokens.numel()).tolist())
        for maps, seen in zip(held, (ahead, (ahead + 1) % task.k), strict=True):
            alone = pattern * there[seen]
            maps.append(dict(enumerate((alone / alone.sum(3, keepdim=True).clamp(1e-9)).unbind(1))))
    last = task.answers(tokens.view(-1, task.k, task.N))[-1].flatten(1)
    right = [model(tokens, levels, maps)[0][0].argmax(2) == last for maps in held]
    return dict(places=places, held=[float(some.float().mean()) for some in right])


def train(seed, k, N, regime, hop_token, steps):
    """The rows of fit and, with a reading after each layer, what is attended to."""
    task = Ring(k, N, hop_token, seed)
    model, rows = fit(task, regime, steps, seed)
    if hop_token:
        return dict(rows=rows)
    return dict(rows=rows, attended=attended(model, task, torch.Generator().manual_seed(seed)))


def tasks(seeds, steps):
    todo = []
    for row in GRID:
        arguments = dict(zip(("k", "N", "regime", "hop_token"), row, strict=True), steps=steps)
        todo.append((row[0] * row[1], train, arguments, seeds))
    return todo


def runs_of(results):
    """{(k, N, regime, hop_token): the runs, one a seed}."""
    return {(*row.values(),)[:4]: row["values"] for row in results["train"]}


def table(results):
    """Steps to SOLVED at k hops, one a seed, a dash for never."""
    runs = runs_of(results)
    shapes = [*dict.fromkeys(key[:2] for key in runs)]
    rows = [("steps to 95%", *(f"k = {k}, N = {N}" for k, N in shapes))]
    for regime, token in dict.fromkeys(key[2:] for key in runs):
        cells = []
        for shape in shapes:
            last = [run["rows"][-1] for run in runs.get((*shape, regime, token), [])]
            steps = sorted(row[0] if row[-1] >= SOLVED else math.inf for row in last)
            cells.append(", ".join(map(str, steps)).replace("inf", "-"))
        rows.append((regime + ", hop token" * token, *cells))
    return markdown(*rows)


def draw(results):
    """At the largest k accuracy through training, a line per seed, and where the layers attend."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), layout="constrained")
    k = max(row["k"] for row in results["train"])
    colors = plt.get_cmap("viridis")([0.3 * level for level in range(k.bit_length())])
    for panel, regime in zip(axes, ("mixture", "curriculum"), strict=False):
        runs = runs_of(results)[k, 4, regime, False]
        for level, color in enumerate(colors):
            panel.plot([], [], color=color, label=f"{2**level} hop{'s'[:level]}")
            for run in runs:
                accuracies = [row[level + 1] for row in run["rows"]]
                panel.plot([row[0] for row in run["rows"]], accuracies, color=color)
        panel.axhline(1 / 4, color="0.5", lw=1, ls="--", label="a guess")
        panel.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.02))
        panel.set_title(f"{regime.capitalize()}, k = {k}, N = 4, {len(runs)} seeds")
    axes[0].legend(fontsize="small", loc="lower center", ncol=3)

    # of each layer the head that attends most to the place of the theory
    places = [run["attended"]["places"] for run in runs_of(results)[k, 4, "mixture", False]]
    heads = torch.tensor(places).transpose(0, 1)  # (layers, seeds, heads, k)
    best = [own[range(len(own)), own[:, :, 2**i // 2].argmax(1)] for i, own in enumerate(heads)]
    best = torch.stack(best).mean(1)  # (layers, k)
    extent, panel = (-0.5, k - 0.5, 0.5, len(best) + 0.5), axes[2]
    image = panel.imshow(best, "cividis", clim=(0, 1), aspect="auto", origin="lower", extent=extent)
    panel.set(xlabel="places ahead on the ring", xticks=range(k))
    panel.set(ylabel="layer", yticks=range(1, len(best) + 1))
    panel.set_title(f"Better head, mixture, k = {k}, {len(places)} seeds")
    figure.colorbar(image, ax=panel, label="share of its attention")
    return figure


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, draw, steps=1600, seeds=3)
