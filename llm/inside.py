"""In which layers of a language model one hop happens, by activation patching (Section 4).

    python -m llm.inside                   # Gemma 3 270M, which pip installs
    python -m llm.inside --model FOLDER    # another model: the first line tells of a second hop

It asks to complete `o -> white, r -> pink, o ->` after four solved examples. A swapped run has the
two colours exchanged, and gets parts of the clean run patched in. Layers and heads count from 0.
Writes hop_MODEL.jsonl and llm_inside.png into --out.
"""

import random
from contextlib import ExitStack
from typing import NamedTuple

from parts.config import progress, save_figure
from parts.stats import bootstrap, wilson

import matplotlib.pyplot as plt
import numpy as np
import torch

from bench.language import GROUP, count_hops, draw, last_logits, run, tokens


T = 10  # tokens of a question: two lines of four, then the letter and the sign
QUERY = T - 1  # the sign, where the model predicts the colour
CLEAN, SWAPPED = "clean", "swapped"
TOP = 3  # so many heads are tested together
NULLS = 8  # against so many random sets of others, of the same layers


class Group(NamedTuple):
    """B questions with D=1 and N=2 that share their solved examples."""

    cache: object  # what the model keeps of the examples
    ids: dict  # {CLEAN: (B, T), SWAPPED: (B, T)}, the tokens
    line: torch.Tensor  # (B, 4), where the line stands that holds the answer
    colours: torch.Tensor  # (B, 2), the tokens of the answer and of the other colour
    kept: dict  # {module: its input in the clean run}


def make_groups(model, tokenizer, name, n, seed, modules):
    """Return n questions in groups that keep inputs of modules, and {run: differences (n,)}."""
    rng, groups = random.Random(f"{seed} hop"), []
    for _ in range(0, n, GROUP):
        questions, cache = draw(model, tokenizer, rng, name, 4, 2, 1)
        ids = torch.tensor([tokens(tokenizer, text) for text, _, _ in questions])
        swapped = ids[:, [0, 1, 6, 3, 4, 5, 2, 7, 8, 9]]
        answers = torch.tensor([tokens(tokenizer, answer) for _, answer, _ in questions])
        start = 4 * (ids[:, 2:3] != answers)
        line, colours = start + torch.arange(4), ids.gather(1, torch.cat([start + 2, 6 - start], 1))
        groups.append(Group(cache, {CLEAN: ids, SWAPPED: swapped}, line, colours, {}))
        measure(model, groups[-1:], CLEAN, lambda group: [keep(group, m) for m in modules])
    return groups, {name: measure(model, groups, name) for name in (CLEAN, SWAPPED)}


def measure(model, groups, which, hooks=lambda group: ()):
    """Return the logit of the answer minus that of the other colour (n,), with hooks(group)."""
    values = []
    for group in groups:
        with ExitStack() as stack:
            for hook in hooks(group):
                stack.enter_context(hook)  # it is removed at the end of the block
            logits = last_logits(model, group.ids[which], group.cache)
        values.append(logits.gather(1, group.colours) @ torch.tensor([1.0, -1.0]))
    return torch.cat(values)


def keep(group, module):
    """Hook a module to keep its input."""

    def hook(module, inputs):
        group.kept[module] = inputs[0].clone()

    return module.register_forward_pre_hook(hook)


def patch(group, module, columns, part=slice(None)):
    """Hook a module so that at columns (B, k) its input, or a part of it, is the clean run's."""

    def hook(module, inputs):
        rows = torch.arange(len(columns))[:, None]
        inputs[0][rows, columns, part] = group.kept[module][rows, columns, part]

    return module.register_forward_pre_hook(hook)


def cut(layer, readers, targets):
    """Hook a layer so that columns (B, i) pay no attention to columns (B, k)."""

    def hook(module, inputs, options):
        mask = options["attention_mask"].expand(len(readers), -1, -1, -1).clone()
        rows = torch.arange(len(readers))[:, None, None]

        # columns count from the end, since the examples come before
        mask[rows, 0, readers[:, :, None] - T, targets[:, None] - T] = torch.finfo(mask.dtype).min
        return inputs, options | dict(attention_mask=mask)

    return layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def hop(model, tokenizer, name, n, seed):
    """Return rows {kind, layer or heads, effect, low, high}: 1 is the clean run; 0 is the swapped
    run for what is patched, and no preference for either colour for what is cut."""
    two = count_hops(model, tokenizer, name, n, seed, N=2, D=2, shots=4, shuffled=False)
    low, high = wilson(two, n)
    says = "a second hop" if low > 0.5 else "no second hop"
    print(f"D=2: {two} of {n} [{low:.2f}, {high:.2f}] are right, chance is 0.50: {says}")

    decoder, size = model.get_decoder(), model.get_decoder().layers[0].self_attn.head_dim
    layers, mixers = decoder.layers, [layer.self_attn.o_proj for layer in decoder.layers]
    above, rows = (
        [*layers[1:], decoder.norm],
        [dict(kind="two hops", effect=two / n, low=low, high=high)],
    )
    groups, base = make_groups(model, tokenizer, name, n, seed, [*above, *mixers])

    def add(kind, where, which, hooks):
        values, zero = measure(model, groups, which, hooks), base[SWAPPED] * (which == SWAPPED)
        values = (values - zero) / (base[CLEAN] - zero).mean()
        low, high = bootstrap(values, torch.Generator().manual_seed(0))
        rows.append(dict(kind=kind, where=where, effect=values.mean().item(), low=low, high=high))
        return rows[-1]["effect"]

    # by layer: what carries the answer, and which attention is needed in three layers around it
    sign, gains = torch.full((GROUP, 1), QUERY), [0]
    for i in progress("layer", range(len(layers))):
        near = layers[max(0, i - 1) : i + 2]
        add("line", i, SWAPPED, lambda group, i=i: [patch(group, above[i], group.line)])
        gains.append(add("query", i, SWAPPED, lambda group, i=i: [patch(group, above[i], sign)]))
        add(
            "fetch",
            i,
            CLEAN,
            lambda group, near=near: [cut(layer, sign, group.line) for layer in near],
        )
        add(
            "match",
            i,
            CLEAN,
            lambda group, near=near: [
                cut(layer, group.line[:, 1:], group.line[:, :1]) for layer in near
            ],
        )

    # each head of the layers in which the query gains at least a twentieth
    def patch_heads(heads):
        parts = [(mixers[i], slice(head * size, head * size + size)) for i, head in heads]
        return lambda group: [patch(group, module, sign, part) for module, part in parts]

    count = model.config.num_attention_heads
    heads = [
        (i, head) for i in np.flatnonzero(np.diff(gains) > 0.05).tolist() for head in range(count)
    ]
    alone = {}
    for i, head in progress("head", heads):
        alone[i, head] = add("head", f"L{i}H{head}", SWAPPED, patch_heads([(i, head)]))
    best = sorted(alone, key=alone.get)[-TOP:]

    # together on a fresh seed, beside random heads of the same layers
    groups, base = make_groups(model, tokenizer, name, n, seed + 1, mixers)
    add("together", " + ".join(f"L{i}H{head}" for i, head in best), SWAPPED, patch_heads(best))
    rng = random.Random(seed)
    for _ in range(NULLS):
        others = [rng.choice([h for h in alone if h[0] == i and h not in best]) for i, _ in best]
        add(
            "random", " + ".join(f"L{i}H{head}" for i, head in others), SWAPPED, patch_heads(others)
        )
    return rows


def draw_inside(rows, path):
    """Draw the effects by layer."""
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(6, 6.4), layout="constrained")
    lines = {
        "line": (0, "the line that holds the answer"),
        "query": (0, "the query"),
        "fetch": (1, "query \N{RIGHTWARDS ARROW} line"),
        "match": (1, "rest of the line \N{RIGHTWARDS ARROW} its letter"),
    }
    for color, (kind, (panel, label)) in enumerate(lines.items()):
        chosen = [row for row in rows if row["kind"] == kind]
        x = [row["where"] for row in chosen]
        mean, low, high = ([row[key] for row in chosen] for key in ("effect", "low", "high"))
        axes[panel].plot(x, mean, "o-", color=f"C{color}", label=label)
        axes[panel].fill_between(x, low, high, color=f"C{color}", alpha=0.2, lw=0)
    for panel, title in zip(axes, ("Recovered by patching", "Left without attention"), strict=True):
        panel.set_title(title, fontsize=15)
        panel.axhline(0, color="black", lw=0.8)
        panel.axhline(1, color="black", lw=0.8, ls="--")
        panel.legend(fontsize=12)
        panel.tick_params(labelsize=13)
    axes[1].set_xlabel("layer", fontsize=14)
    save_figure(figure, path)
    print(path)


if __name__ == "__main__":
    rows, out = run("python -m llm.inside", __doc__, dict(hop=hop))
    draw_inside(rows, out / "llm_inside.png")
