"""The attention of the bigram task's induction head (Bietti's slides), trained by bigrams.py."""

from analyze import RED, panels
from extras.mechanisms import seeds_table
from extras.mechanisms.bigrams import CHARACTERS, N, read_bigrams, sample, train_simplified
from extras.studies import spread

import torch
from torch.nn.functional import one_hot, pad


SHOWN = 24  # tokens of the figure
TARGETS = "the previous token", "what followed the trigger before"


def targets_of(tokens, scored):
    """Whether token t (a row) should attend to token s, in each layer (B, T, T). Inputs (B, T)."""
    same = tokens[:, :, None] == tokens[:, None]
    following = pad(same[:, :, :-1], (1, 0)).tril()  # token s - 1 is the same as token t
    return torch.ones_like(same).tril(-1).triu(-1), following & scored[:, :, None]


def measure_attention(seed, triggers, steps, T=64):
    """Train, and read 512 new sequences. Return the start of the first that cannot cycle and has
    three scored triggers there, and for each layer the attention to its targets in all sequences,
    that of uniform attention, and of this start the pattern, in percent, and the targets [t, s]."""
    model, _ = train_simplified(seed, triggers=triggers, steps=steps)
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens, scored, cyclic = sample(512, T, triggers, read_bigrams(), generator)
    tokens, layers = tokens[:, :-1], []
    with torch.no_grad():
        _, patterns = model(tokens)

    # the sequence to show, then each layer
    uniform = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    kinds = (one_hot(tokens, N) * scored[:, :, None])[:, :SHOWN].any(1).sum(1)
    shown = int((~cyclic & (kinds >= 3)).nonzero()[0])
    for pattern, target in zip(patterns, targets_of(tokens, scored), strict=True):
        means = [float((x * target).sum(2)[target.any(2)].mean()) for x in (pattern, uniform)]
        pattern, target = (x[shown, :SHOWN, :SHOWN] for x in (pattern, target))
        layers.append([*means, (100 * pattern).round().int().tolist(), target.nonzero().tolist()])
    return ["".join(CHARACTERS[i] for i in tokens[shown, :SHOWN]), layers]


def table(rows):
    lines = []
    for i, target in enumerate(TARGETS):
        means = zip(*(layers[i][:2] for _, layers in rows[0]["values"]), strict=True)
        lines.append((i + 1, target, *(spread(values, "{:.2f}") for values in means)))
    return seeds_table(rows, ("layer", "should attend to", "attention", "if uniform"), lines)


def draw(results):
    """Show the attention of the first seed, with frames around its targets."""
    text, layers = results["measure_attention"][0]["values"][0]
    names = [*text.replace(" ", "\u2423").replace("\n", "\u21b5")]  # signs one can see
    figure, grid = panels(2, 2, 4.5, 4)
    for i, (panel, (_, _, pattern, targets)) in enumerate(zip(grid, layers, strict=True)):
        panel.imshow(pattern, "Blues", vmin=0, vmax=100)
        y, x = zip(*targets, strict=True)
        panel.plot(x, y, "s", ms=9, mfc="none", mec=RED)
        panel.set(title=f"layer {i + 1}, framed:\n{TARGETS[i]}")
        panel.set(xlabel="attended character", ylabel="reading character")
        panel.set_xticks(range(SHOWN), names)
        panel.set_yticks(range(SHOWN), names)
    return figure


TASKS = [(measure_attention, 3, [dict(triggers="random", steps=300)], table)]
