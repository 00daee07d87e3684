"""Draw what a run directory holds: the figures of Sections 5, 8 and 9, and an information map that the paper lacks.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: attention_maps, circuit, shared_information, information_map, curves
"""
import argparse
import json
import math
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch

from data import name_symbol, roles, validation_index
from train import draw_curves, load, sequences, write_file

USEFUL = "tab:red"


def save(figure, path):
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
    plt.close(figure)
    print(path)


def read_circuit(run):
    """{(layer, head): [path, ...]} of the useful heads, counted from 1; None if ablate.py found no circuit here."""
    report = json.loads((run / "circuit.json").read_text()) if (run / "circuit.json").exists() else {}
    return {(head["layer"], head["head"]): head["mechanism"] for head in report["heads"]
            if isinstance(head["mechanism"], list)} if "heads" in report else None


# ---- Appendix C: attention maps

def draw_attention_maps(run, model, config, useful):
    """attention_maps.png: every head on one prompt, rows the attending token. Letters are symbols, x_0 = A; the number
    is the chain."""
    N, D = config["N"], config["D"]
    batch = sequences(config, validation_index(1))
    with torch.no_grad():
        patterns = model(batch.inputs, return_patterns=True)[1]
    labels = [""] * (N * (2 * D + 1))
    for n, place in enumerate(batch.positions[0].tolist()):
        for role, token in enumerate(place):
            labels[token] = name_symbol(n, role // 2)
    maps = [(layer + 1, head + 1, patterns[layer][0, head]) for layer in range(len(patterns))
            for head in range(config["heads"])]
    columns = config["heads"] if config["heads"] > 1 else min(4, len(maps))
    figure, grid = plt.subplots(math.ceil(len(maps) / columns), columns, squeeze=False, layout="constrained",
                                figsize=(4 * columns, 4.1 * math.ceil(len(maps) / columns)))
    for axes in grid.flat[len(maps):]:
        axes.axis("off")
    for axes, (layer, head, pattern) in zip(grid.flat, maps):
        image = axes.imshow(pattern, cmap="Blues", vmin=0, vmax=1)
        for block in range(1, D + 1):  # between the steps
            axes.axhline(2 * N * block - 0.5, color="black", lw=0.3)
            axes.axvline(2 * N * block - 0.5, color="black", lw=0.3)
        axes.set_xticks(range(len(labels)), labels, fontsize=5, rotation=90)
        axes.set_yticks(range(len(labels)), labels, fontsize=5)
        marked = (layer, head) in (useful or {})
        title = f"layer {layer}" + (f", head {head}" if config["heads"] > 1 else "") + (", useful" if marked else "")
        axes.set_title(title, fontsize=10, color=USEFUL if marked else "black")
        axes.spines[:].set(color=USEFUL if marked else "black", linewidth=2 if marked else 0.8)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    figure.supxlabel("attended token")
    figure.supylabel("attending token")
    save(figure, run / "attention_maps.png")


# ---- Figures 5 and 7, left: the circuit

def draw_circuit(run, config, useful):
    """circuit.png: the roles of a chain across in the order in which they are read, layers upward, an arrow per path
    from where information is taken to where it goes, with the mean attention of the path."""
    D, names = config["D"], roles(config["D"])
    order = [name for k in range(D, 0, -1) for name in (f"{k}a", f"{k}b")] + ["q"]
    across = {name: x for x, name in enumerate(order)}
    layers = sorted({layer for layer, _ in useful})
    figure, axes = plt.subplots(figsize=(1.3 * len(order) + 1, 1.3 * len(layers) + 1.6), layout="constrained")
    for name, x in across.items():
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * (len(layers) + 1), range(len(layers) + 1), "o", color="white", markeredgecolor="gray", ms=7)
    for (layer, head), paths in useful.items():
        y = layers.index(layer)
        for path in paths:
            end = (across[path["source"]], y + 1)
            start = (across.get(path["target"], end[0] - 0.45), y)  # the token before is none of the chain
            if path["target"] not in across:
                axes.text(*start, "token\nbefore", ha="center", va="top", fontsize=7, color="gray")
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14,
                                           color=USEFUL if path["target"] in across else "gray",
                                           shrinkA=5, shrinkB=5, connectionstyle="arc3,rad=0.08"))
            axes.annotate(f"{path['attention']:.2f}", (start[0] + 0.62 * (end[0] - start[0]), y + 0.62), fontsize=9,
                          ha="center", va="center", bbox=dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85))
    letters = [f"{chr(ord('A') + names.index(name) // 2)}\n{name}" for name in order]
    axes.set_xticks(range(len(order)), letters)
    axes.set_yticks(range(len(layers) + 1), ["input"] + [f"after layer {layer}" for layer in layers])
    axes.set(xlim=(-0.6, len(order) - 0.4), ylim=(-0.25, len(layers) + 0.3),
             xlabel="symbol and role, in the order of reading",
             title=f"Circuit of {config['layers']} layers, D={D}, seed {config['seed']}: arrows carry mean attention\n"
                   "(128 sequences); heads not drawn are uniform, identity or zero")
    axes.spines[:].set_visible(False)
    save(figure, run / "circuit.png")


# ---- Figures 3 and 8: shared information before any layer

def draw_shared_information(run, config):
    """shared_information.png: which roles share a symbol (above) or the place of their pair (below) to begin with."""
    D, names = config["D"], roles(config["D"])
    figure, axes = plt.subplots(figsize=(1.1 * len(names) + 1, 3), layout="constrained")
    for i, name in enumerate(names):
        axes.text(i, 0, f"$x_{i // 2}$\n{name}", ha="center", va="center", bbox=dict(boxstyle="round", fc="white"))
        if i < 2 * D:
            symbol = i % 2 == 0
            axes.add_patch(FancyArrowPatch((i, 0.3 if symbol else -0.3), (i + 1, 0.3 if symbol else -0.3), arrowstyle="-",
                                           connectionstyle=f"arc3,rad={-0.5 if symbol else 0.5}", lw=2,
                                           color="tab:blue" if symbol else "tab:orange"))
    axes.plot([], [], color="tab:blue", lw=2, label="share a symbol")
    axes.plot([], [], color="tab:orange", lw=2, label="share the position of their pair")
    axes.legend(loc="upper right", ncols=2, frameon=False)
    axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(-1, 1.3),
             title=f"What the roles of one chain share before any layer, D={D}")
    axes.axis("off")
    save(figure, run / "shared_information.png")


# ---- the information map

def information(model, config, n=512):
    """(layers+1, roles, D+1) R^2 on held-out sequences of reading x_k from the residual stream at a role, before the
    first and after each layer, by least squares: fitted on n sequences, tested on n others. An empirical Lemma 2."""
    B, streams = 2 * n, []
    batch = sequences(config, validation_index(B, first=2 ** 23))
    hooks = [model.embed.register_forward_hook(lambda module, inputs, output: streams.append(output))]
    hooks += [block.register_forward_hook(lambda module, inputs, output: streams.append(output[0]))
              for block in model.blocks]
    try:
        with torch.no_grad():
            model(batch.inputs, return_patterns=True)  # then every layer computes all tokens
    finally:
        for hook in hooks:
            hook.remove()

    def at(values, role):  # (B, T, size) -> (B, N, size), at the tokens with this role
        return values.gather(1, batch.positions[:, :, role, None].expand(-1, -1, values.shape[-1]))

    roles_count = 2 * config["D"] + 1
    symbols = torch.stack([at(batch.inputs[:, :, :config["K"]], 2 * k) for k in range(config["D"] + 1)], 2)
    scores = torch.empty(len(streams), roles_count, config["D"] + 1)
    half = n * config["N"]
    wanted, truth = symbols.flatten(2).flatten(0, 1).double().split(half)
    for layer, stream in enumerate(streams):
        for role in range(roles_count):
            read = torch.cat([at(stream, role), torch.ones(B, config["N"], 1)], -1)
            fit, test = read.flatten(0, 1).double().split(half)
            solution = torch.linalg.lstsq(fit, wanted, driver="gelsd").solution
            missed = (test @ solution - truth).square().mean(0)
            scores[layer, role] = (1 - missed / truth.var(0)).view(-1, config["K"]).mean(1)
    return scores


def draw_information_map(run, config, scores, useful):
    """information_map.png: one panel per role, layers upward, symbols across."""
    names, D = roles(config["D"]), config["D"]
    figure, panels = plt.subplots(1, len(names), figsize=(1.5 * len(names) + 1.5, 0.32 * len(scores) + 1.8), sharey=True,
                                  layout="constrained")
    for role, axes in enumerate(panels):
        image = axes.imshow(scores[:, role], origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
        axes.set_xticks(range(D + 1), [f"$x_{k}$" for k in range(D + 1)])
        axes.set_title(names[role])
    panels[0].set_yticks(range(len(scores)), ["input"] + [f"layer {layer}" for layer in range(1, len(scores))])
    for label, layer in zip(panels[0].get_yticklabels(), range(len(scores))):
        if layer in {at for at, _ in (useful or {})}:
            label.set_color(USEFUL)
    figure.colorbar(image, ax=panels, label="held-out $R^2$", shrink=0.8)
    figure.suptitle("What can be read from the residual stream at each role, by least squares (512 sequences to fit, 512 to "
                    "test)" + ("; red: layers with a useful head" if useful else ""), fontsize=11)
    save(figure, run / "information_map.png")


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"analyze.py: {message}\n")
    p.add_argument("run", type=Path, help="run directory of train.py")
    run = p.parse_args().run
    try:
        model, config = load(run)
    except ValueError as error:
        p.error(error)
    useful = read_circuit(run)
    draw_curves(run)
    draw_shared_information(run, config)
    draw_attention_maps(run, model, config, useful)
    if useful is None:
        print(f"no circuit is known here, so none is drawn: run python ablate.py {run} first")
    else:
        draw_circuit(run, config, useful)
    draw_information_map(run, config, information(model, config), useful)


if __name__ == "__main__":
    main()
