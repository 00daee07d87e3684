"""In which layers of a language model one hop happens, by activation patching (Section 4).

    python -m extras.llm.inside                   # Gemma 3 270M, which pip installs
    python -m extras.llm.inside --model FOLDER    # another model

It asks to complete `o -> white, r -> pink, o ->` after four solved examples. A swapped run has the
two colours exchanged, and gets parts of the clean run patched in. Layers and heads count from 0.
Writes hop_MODEL.jsonl and llm_inside.png into --out.
"""

import itertools
import math
import random
from contextlib import ExitStack
from typing import NamedTuple

from analyze import panels, save_figure
from data import progress
from extras.llm.weights import FOLDER, GROUP, draw, last_logits, run, tokens
from extras.studies import markdown
from extras.studies.stats import bootstrap
from train import read_file

import numpy as np
import torch


T = 10  # tokens of a question: two lines of four, then the letter and the sign, the query
CLEAN, SWAPPED = "clean", "swapped"
TOP = 3  # so many heads are tested together
NULLS = 20  # against so many sets of others of the same layers, or all that there are
CUTS = {"query cut": "query -> line", "letter cut": "rest of the line -> its letter"}


class Group(NamedTuple):
    """B questions with D=1 and N=2 that share their solved examples."""

    cache: object  # what the model keeps of the examples
    ids: dict  # {CLEAN: (B, T), SWAPPED: (B, T)}, the tokens
    line: torch.Tensor  # (B, 4), where the line stands that holds the answer
    colours: torch.Tensor  # (B, 2), the tokens of the answer and of the other colour
    kept: dict  # {module: its input in the clean run}


def make_groups(model, tokenizer, name, n, seed, modules):
    """Return n questions in groups that keep inputs of modules, and {run: what measure returns}."""
    rng, groups = random.Random(f"{seed} hop"), []
    for _ in range(0, n, GROUP):
        questions, cache = draw(model, tokenizer, rng, name, 4, 2, 1)

        # each two lines are asked for both, so that a preference for the first or last cancels
        words = [text.split() for text, _, _ in questions[: GROUP // 2]]
        texts = [" ".join([*word[:6], word[k], word[7]]) for k in (0, 3) for word in words]
        ids = torch.tensor([tokens(tokenizer, text) for text in texts])
        swapped = ids[:, [0, 1, 6, 3, 4, 5, 2, 7, 8, 9]]
        start = torch.tensor([0, 4]).repeat_interleave(GROUP // 2)[:, None]
        line, colours = start + torch.arange(4), ids.gather(1, torch.cat([start + 2, 6 - start], 1))
        groups.append(Group(cache, {CLEAN: ids, SWAPPED: swapped}, line, colours, {}))
        measure(model, groups[-1:], CLEAN, lambda group: [keep(group, m) for m in modules])
    return groups, {name: measure(model, groups, name) for name in (CLEAN, SWAPPED)}


def measure(model, groups, which, hooks=lambda group: ()):
    """Return (groups,) means of the answer's logit minus the other colour's, with hooks(group)."""
    values = []
    for group in groups:
        with ExitStack() as stack:
            for hook in hooks(group):
                stack.enter_context(hook)  # it is removed at the end of the block
            logits = last_logits(model, group.ids[which], group.cache)
        values.append((logits.gather(1, group.colours) @ torch.tensor([1.0, -1.0])).mean())
    return torch.stack(values)


def keep(group, module):
    """Hook a module to keep its input."""
    return module.register_forward_pre_hook(lambda m, x: group.kept.update({m: x[0].clone()}))


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
    """Return rows {kind, where: a layer or heads, effect, low, high}. The effect is the share of
    the difference between clean and swapped runs: what patching brings, or what a cut leaves."""
    rows, decoder = [], model.get_decoder()
    layers, mixers = decoder.layers, [layer.self_attn.o_proj for layer in decoder.layers]
    above = [*layers[1:], decoder.norm]  # what reads the output of a layer
    groups, base = make_groups(model, tokenizer, name, n, seed, [*above, *mixers])
    sign, gains, alone = torch.full((GROUP, 1), T - 1), [0], {}

    def add(kind, where, hooks):
        values = measure(model, groups, SWAPPED, hooks)
        cuts = "cut" in kind  # these are made in both runs
        values = measure(model, groups, CLEAN, hooks) - values if cuts else values - base[SWAPPED]
        values = values / (base[CLEAN] - base[SWAPPED]).mean()
        low, high = bootstrap(values, torch.Generator().manual_seed(0))
        rows.append(dict(kind=kind, where=where, effect=values.mean().item(), low=low, high=high))
        return rows[-1]["effect"]

    def cut_near(i, ends, shift):
        near = layers[max(0, i - 1) : i + 2]
        return lambda group: [cut(layer, *ends((group.line + shift) % 8)) for layer in near]

    def patch_heads(heads):
        size = layers[0].self_attn.head_dim
        parts = [(mixers[i], slice(head * size, head * size + size)) for i, head in heads]
        return lambda group: [patch(group, module, sign, part) for module, part in parts]

    # what carries the answer, and which attention is needed; the other line is the control
    for i in progress("layer", range(len(layers))):
        add("line", i, lambda group, i=i: [patch(group, above[i], group.line)])
        gains.append(add("query", i, lambda group, i=i: [patch(group, above[i], sign)]))
        for shift, of in (0, ""), (4, ", other line"):
            add(f"query cut{of}", i, cut_near(i, lambda line: (sign, line), shift))
            add(f"letter cut{of}", i, cut_near(i, lambda line: (line[:, 1:], line[:, :1]), shift))

    # each head of the layers in which the query gains at least a twentieth
    late = [i for i in range(len(layers)) if gains[i + 1] - gains[i] > 0.05]
    heads = [*itertools.product(late, range(model.config.num_attention_heads))]
    for i, head in progress("head", heads):
        alone[i, head] = add("head", f"L{i}H{head}", patch_heads([(i, head)]))
    best = sorted(alone, key=alone.get)[-TOP:]

    # together on a fresh seed, beside sets of as many others of the same layers
    groups, base = make_groups(model, tokenizer, name, n, seed + 1, mixers)
    nulls = [*itertools.combinations([head for head in heads if head not in best], TOP)]
    nulls = random.Random(seed).sample(nulls, min(NULLS, len(nulls)))
    for kind, chosen in [("together", sorted(best)), *(("others", heads) for heads in nulls)]:
        add(kind, " + ".join(f"L{i}H{head}" for i, head in chosen), patch_heads(chosen))
    return rows


def table():
    """Return the committed effects in the layers that have a control, then those of heads."""
    rows = read_file(FOLDER / "hop_gemma-3-270m.jsonl")
    effects = {(row["kind"], row["where"]): f"{row['effect']:.2f}" for row in rows}
    kinds = ["query", *itertools.chain(*((kind, f"{kind}, other line") for kind in CUTS))]
    layers = sorted(where for kind, where in effects if kind == kinds[-1])
    lines = [(i, *(effects[kind, i] for kind in kinds)) for i in layers]
    heads = [(where, text) for (kind, where), text in effects.items() if kind == "together"]
    others = [row["effect"] for row in rows if row["kind"] == "others"]
    sets = math.comb(sum(row["kind"] == "head" for row in rows), TOP) - 1
    name = f"{len(others)} of {sets} other sets in these layers"
    heads.append((name, f"{min(others):.2f} to {max(others):.2f}"))
    return f"{markdown(['layer', *kinds], *lines)}\n\n{markdown(['heads', 'share'], *heads)}"


def draw_inside(rows, path):
    """Draw the effects by layer: of patching above, of cuts and their controls below."""
    figure, axes = panels(2, 1, 7, 3.2, sharex=True)
    lines = {"line": "the line that holds the answer", "query": "the query"} | CUTS
    lines |= {f"{kind}, other line": f"control: {lines[kind]}, other line" for kind in CUTS}
    for number, (kind, label) in enumerate(lines.items()):
        chosen = sorted((r for r in rows if r["kind"] == kind), key=lambda row: row["where"])
        x, mean, low, high = zip(*([*row.values()][-4:] for row in chosen), strict=True)
        panel, color = axes[int(number > 1)], f"C{number - 2 * (number > 3)}"
        style = dict(fmt="s" if number > 3 else "o-", label=f"{label} (n = {chosen[0]['n']})")
        x = np.add(x, 0.2 * (number > 3))  # controls stand beside
        panel.errorbar(x, mean, np.abs(np.subtract([low, high], mean)), color=color, **style)
        panel.grid(True, axis="y")
        panel.legend(fontsize="small", loc=["center left", "lower left"][int(number > 1)])
    axes[0].set(title="Clean activations after one layer", ylabel="share recovered")
    axes[1].set(title="Attention cut in three layers", ylabel="share left")
    axes[1].set_xlabel("layer; of a cut the middle one")
    axes[1].locator_params("x", integer=True)
    figure.suptitle(f"{rows[0]['model']}, D=1; bars: 95% (bootstrap over groups)")
    save_figure(figure, path)
    print(path)


def main():
    rows, out = run("python -m extras.llm.inside", __doc__, dict(hop=hop))
    draw_inside(rows, out / "llm_inside.png")


if __name__ == "__main__":
    main()
