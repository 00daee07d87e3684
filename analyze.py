"""Draw what a run directory holds: the figures of Sections 5, 8 and 9, and an information map that the paper lacks.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: attention_maps, circuit, shared_information, information_map, curves
    python analyze.py out/L12_H1_D3_s*     # several runs: a table of their circuits, and order.png

Of a run that was trained with --save-every it also draws how the circuit emerged: emergence, paths, removal, and the
animation emergence.gif. What is measured for them is kept in emergence.json, so that the checkpoints may go.
"""
import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.animation import PillowWriter
from matplotlib.patches import FancyArrowPatch

from ablate import lost, read_paths, target_names, write_pattern
from data import roles, token_names, validation_index
from llm import wilson
from train import (draw_curves, first_below, load, partial_losses, read_config, read_file, read_log, save_figure, sequences,
                   write_file)

USEFUL = "tab:red"


def save(figure, path):
    save_figure(figure, path)
    print(path)


def read_report(run):
    """What ablate.py wrote into circuit.json; {} if it was not here yet."""
    return read_file(run / "circuit.json") if (run / "circuit.json").exists() else {}


def read_circuit(run):
    """{(layer, head, from role, to role): mean attention} of the paths, layers and heads counted from 1; None if ablate.py
    found no circuit here."""
    return paths_in(read_report(run))


def paths_in(report):
    return {(head["layer"], head["head"], path["source"], path["target"]): path["attention"] for head in report["heads"]
            if isinstance(head["mechanism"], list) for path in head["mechanism"]} if "heads" in report else None


# ---- Appendix C: attention maps

def draw_attention_maps(run, model, config, useful):
    """attention_maps.png: every head on one prompt, rows the attending token. Letters are symbols, x_0 = A; the number
    is the chain."""
    N, D = config["N"], config["D"]
    batch = sequences(config, validation_index(1))
    with torch.no_grad():
        patterns = model(batch.inputs, return_patterns=True)[1]
    labels = token_names(batch.positions[0])
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
        marked = (layer, head) in {path[:2] for path in useful or {}}
        title = f"layer {layer}" + (f", head {head}" if config["heads"] > 1 else "") + (", useful" if marked else "")
        axes.set_title(title, fontsize=10, color=USEFUL if marked else "black")
        axes.spines[:].set(color=USEFUL if marked else "black", linewidth=2 if marked else 0.8)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    figure.supxlabel("attended token")
    figure.supylabel("attending token")
    save(figure, run / "attention_maps.png")


# ---- Figures 5 and 7, left: the circuit

def draw_paths(axes, config, useful, label, color):
    """The roles of a chain across in the order in which they are read, layers upward, an arrow per path from where
    information is taken to where it goes. label, color: path -> of its arrow. Returns {path: (arrow, its text)}."""
    D, names, drawn = config["D"], roles(config["D"]), {}
    order = [name for k in range(D, 0, -1) for name in (f"{k}a", f"{k}b")] + ["q"]
    across = {name: x for x, name in enumerate(order)}
    layers = sorted({layer for layer, _, _, _ in useful})
    for x in range(len(order)):
        axes.plot([x, x], [0, len(layers)], color="lightgray", lw=1, zorder=0)
        axes.plot([x] * (len(layers) + 1), range(len(layers) + 1), "o", color="white", markeredgecolor="gray", ms=7)
    for path in useful:
        layer, _, source, target = path
        y = layers.index(layer)
        end = (across[source], y + 1)
        start = (across.get(target, end[0] - 0.45), y)  # the token before is none of the chain
        if target not in order:
            axes.text(*start, "token\nbefore", ha="center", va="top", fontsize=7, color="gray")
        arrow = axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=color(path),
                                               linestyle="-" if useful[path] > 0.1 else (0, (4, 4)),
                                               shrinkA=5, shrinkB=5, connectionstyle="arc3,rad=0.08"))
        along = 0.62 - 0.2 * sum(other[:3] == path[:3] for other in drawn)  # arrows with one end: one text beside another
        text = axes.annotate(label(path), (start[0] + along * (end[0] - start[0]), y + along), fontsize=9, ha="center",
                             va="center", bbox=dict(boxstyle="round,pad=0.1", fc="white", ec="none", alpha=0.85))
        drawn[path] = arrow, text
    letters = [f"{chr(ord('A') + names.index(name) // 2)}\n{name}" for name in order]
    axes.set_xticks(range(len(order)), letters)
    axes.set_yticks(range(len(layers) + 1), ["input"] + [f"after layer {layer}" for layer in layers])
    axes.set(xlim=(-0.6, len(order) - 0.4), ylim=(-0.35, len(layers) + 0.3),
             xlabel="symbol and role, in the order of reading")
    axes.spines[:].set_visible(False)
    return drawn


def relay_note(useful):
    """A line of the title that explains dashed arrows, if there are any."""
    return ("\ndashed: attention goes where the place of that pair says, but to another token, a relay"
            if min(useful.values()) < 0.1 else "")


def circuit_size(config, useful):
    layers = len({layer for layer, _, _, _ in useful})
    return 1.3 * (2 * config["D"] + 1) + 1, (1.3 if layers < 7 else 0.9) * layers + 1.6


def draw_circuit(run, config, useful):
    """circuit.png: the circuit, with the mean attention of each path."""
    figure, axes = plt.subplots(figsize=circuit_size(config, useful), layout="constrained")
    draw_paths(axes, config, useful, label=lambda path: f"{useful[path]:.2f}",
               color=lambda path: "gray" if path[3] == "previous token" else USEFUL)
    axes.set_title(f"Circuit of {config['layers']} layers, D={config['D']}, seed {config['seed']}: arrows carry mean "
                   "attention\n(1024 sequences); what is not drawn is zero, uniform, identity, or by position alone"
                   + relay_note(useful))
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
            solution = torch.linalg.lstsq(fit, wanted, driver="gelsy").solution
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
        if layer in {path[0] for path in useful or {}}:
            label.set_color(USEFUL)
    figure.colorbar(image, ax=panels, label="held-out $R^2$", shrink=0.8)
    figure.suptitle("What can be read from the residual stream at each role, by least squares (512 sequences to fit, 512 to "
                    "test)" + ("; red: layers with a useful head" if useful else ""), fontsize=11)
    save(figure, run / "information_map.png")


# ---- Section 9: emergence

@torch.no_grad()
def measure_emergence(run, useful, n=32):
    """What happens to each path over the checkpoints, on n sequences: a dict of paths and rows, one row per checkpoint
    with its step, the partial losses, and of each path: its mean attention, the 10% and 90% quantiles over sequences, how
    often it gets more attention than any other token, and the partial losses without it (its attention taken away, all
    else alive)."""
    steps = sorted((run / "ckpt").glob("*.pt"), key=lambda path: int(path.stem))
    rows, began, config = [], time.time(), read_config(run)
    names, batch = target_names(config["D"]), sequences(config, validation_index(n, first=2 ** 22))

    def losses(predictions):
        return rounded(partial_losses(predictions, batch.targets, config["K"]).mean(0))

    for done, checkpoint in enumerate(steps):
        model, paths = load(run, f"ckpt/{checkpoint.name}")[0], []
        predictions, seen = model(batch.inputs, return_patterns=True)
        for layer, head, source, target in useful:
            pattern, path = seen[layer - 1][:, head - 1], (names.index(source), names.index(target))
            attention = read_paths(pattern, batch.positions)[(..., *path)]                              # (B, N)
            highest = pattern.amax(-1).gather(1, batch.positions[..., path[0]])                         # (B, N)
            low, high = attention.mean(1).quantile(torch.tensor([0.1, 0.9])).tolist()
            elsewhere = write_pattern([path], batch.positions, config["causal"]) == 0
            without = losses(model(batch.inputs, patterns={(layer - 1, head - 1): pattern * elsewhere}))
            paths.append(dict(mean=round(attention.mean().item(), 4), low=round(low, 4), high=round(high, 4),
                              hits=round((attention == highest).float().mean().item(), 4), without=without))
        rows.append(dict(step=int(checkpoint.stem), losses=losses(predictions), paths=paths))
        left = (time.time() - began) / (done + 1) * (len(steps) - done - 1)
        print(f"\rcheckpoint {done + 1}/{len(steps)}, {left:.0f} s left ", end="", flush=True)
    print()
    return dict(sequences=n, paths=list(useful), rows=rows)


def rounded(values):
    return [round(value, 4) for value in values.tolist()]


def read_emergence(run, useful):
    """emergence.json if it is of this circuit, else measured from the checkpoints and kept; None without checkpoints."""
    path = run / "emergence.json"
    emergence = read_file(path) if path.exists() else None
    if not emergence or [tuple(path) for path in emergence["paths"]] != list(useful):
        if not any((run / "ckpt").glob("*.pt")):
            return None
        emergence = measure_emergence(run, useful)
        write_file(path, lambda temporary: temporary.write_text(json.dumps(emergence) + "\n"))
    emergence["paths"] = [tuple(path) for path in emergence["paths"]]
    return emergence


def emergence_steps(emergence):
    """{path: the step, interpolated, at which its mean attention first passes 0.5; None if it never does}"""
    steps = [row["step"] for row in emergence["rows"]]
    return {path: first_below(steps, [-row["paths"][i]["mean"] for row in emergence["rows"]], -0.5)
            for i, path in enumerate(emergence["paths"])}


def path_title(path, config):
    layer, head, source, target = path
    return f"layer {layer}" + (f" head {head}" if config["heads"] > 1 else "") + f": {source} \N{RIGHTWARDS ARROW} {target}"


def draw_emergence(run, config, useful, emergence):
    """emergence.png, Figure 7: the circuit with its attention, and when each path emerged."""
    when = emergence_steps(emergence)
    width, height = circuit_size(config, useful)
    figure, (left, right) = plt.subplots(1, 2, figsize=(1.7 * width, height + 0.3), layout="constrained", sharey=True)
    draw_paths(left, config, useful, label=lambda path: f"{useful[path]:.2f}", color=lambda path: USEFUL)
    left.set_title("mean attention at the end" + relay_note(useful), fontsize=11)
    known = [step for step in when.values() if step is not None] or [0]
    scale = matplotlib.cm.ScalarMappable(plt.Normalize(min(known), max(known)), "viridis_r")
    draw_paths(right, config, useful, label=lambda path: "never" if when[path] is None else f"{when[path]:.0f}",
               color=lambda path: "lightgray" if when[path] is None else scale.to_rgba(when[path]))
    right.set_title(f"step at which it first passes 0.5 ({emergence['sequences']} sequences)", fontsize=11)
    figure.colorbar(scale, ax=right, label="training step", shrink=0.8)
    save(figure, run / "emergence.png")


def draw_path_histories(run, config, emergence):
    """paths.png, Appendix D: the attention of each path over training."""
    when, rows = emergence_steps(emergence), emergence["rows"]
    steps, columns = [row["step"] for row in rows], 4
    lines = math.ceil(len(when) / columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.2 * columns, 2.1 * lines + 0.9), squeeze=False, sharex=True,
                                sharey=True, layout="constrained")
    for axes in grid.flat[len(when):]:
        axes.axis("off")
    for i, (axes, (path, step)) in enumerate(zip(grid.flat, when.items())):
        history = {key: [row["paths"][i][key] for row in rows] for key in ("mean", "low", "high", "hits")}
        axes.fill_between(steps, history["low"], history["high"], color="tab:blue", alpha=0.25,
                          label="10% to 90% of the sequences")
        axes.plot(steps, history["mean"], color="tab:blue", label="mean attention")
        axes.plot(steps, history["hits"], color="tab:orange", lw=1, label="share of rows where it is the largest")
        axes.axhline(0.5, color="gray", ls=":", lw=1)
        if step is not None:
            axes.axvline(step, color=USEFUL, lw=1)
            axes.annotate(f"{step:.0f}", (step, 0.05), (3, 0), textcoords="offset points", color=USEFUL, fontsize=9)
        axes.set_title(path_title(path, config), fontsize=10)
        axes.set(ylim=(-0.03, 1.03))
    figure.supxlabel(f"training step; red: the mean passes 0.5 ({emergence['sequences']} sequences)", fontsize=10)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    save(figure, run / "paths.png")


def draw_removals(run, config, emergence):
    """removal.png: when a path starts to matter, and for which symbol: by how much its removal raises each partial loss."""
    rows, D = emergence["rows"], config["D"]
    steps, count = [row["step"] for row in rows], len(emergence["paths"])
    edges = [steps[0], *((a + b) / 2 for a, b in zip(steps, steps[1:])), steps[-1]]  # checkpoints may be unequally apart
    figure, panels = plt.subplots(1, D, figsize=(3.3 * D + 2, 0.33 * count + 1.6), squeeze=False, sharey=True,
                                  layout="constrained")
    for k, axes in enumerate(panels[0]):
        rise = [[row["paths"][i]["without"][k] - row["losses"][k] for row in rows] for i in range(count)]
        image = axes.pcolormesh(edges, [i - 0.5 for i in range(count + 1)], rise, cmap="Reds", vmin=0, vmax=1)
        crossing = first_below(steps, [row["losses"][k] for row in rows])
        if crossing is not None:
            axes.axvline(crossing, color="tab:blue", lw=1, ls="--")
        axes.set(title=f"$x_{k + 1}$", xlabel="training step", ylim=(count - 0.5, -0.5))
    panels[0, 0].set_yticks(range(count), [path_title(path, config) for path in emergence["paths"]], fontsize=9)
    figure.colorbar(image, ax=panels, label="rise of the partial loss", extend="max")
    figure.suptitle(f"What the removal of each path destroys ({emergence['sequences']} sequences; dashed: the symbol's loss "
                    "passes 0.5)", fontsize=11)
    save(figure, run / "removal.png")


def animate_emergence(run, config, useful, emergence):
    """emergence.gif: the circuit lighting up through training, the partial losses under it."""
    rows, D = emergence["rows"], config["D"]
    steps, (width, height) = [row["step"] for row in rows], circuit_size(config, useful)
    figure, (above, below) = plt.subplots(2, 1, figsize=(0.75 * width, 0.75 * (height + 3.2)), layout="constrained",
                                          height_ratios=[height, 2.6])
    drawn = draw_paths(above, config, useful, label=lambda path: "0.00", color=lambda path: USEFUL)
    for k in range(D):
        below.plot(steps, [row["losses"][k] for row in rows], color=plt.get_cmap("viridis")(0.9 * k / max(1, D - 1)),
                   label=f"$x_{k + 1}$")
    now = below.axvline(0, color=USEFUL)
    below.set(xlabel="training step", ylabel="MSE of each symbol", ylim=(0, 1.2), xlim=(steps[0], steps[-1]))
    below.legend(fontsize="small", ncols=D, loc="upper right")

    def show(row):
        above.set_title(f"Who attends to whom after {row['step']} training steps", fontsize=11)
        now.set_xdata([row["step"]] * 2)
        for path, measured in zip(emergence["paths"], row["paths"]):
            arrow, text = drawn[path]
            arrow.set_alpha(max(0.04, measured["mean"]))
            text.set(text=f"{measured['mean']:.2f}", alpha=max(0.15, measured["mean"]))

    writer = PillowWriter(fps=8)
    path = run / "emergence.gif"
    show(rows[0])
    figure.canvas.draw()
    figure.set_layout_engine("none")  # to lay out every frame anew takes most of the time
    with writer.saving(figure, path.with_name("emergence.tmp.gif"), dpi=75):
        for row in rows + rows[-1:] * 8:  # a second at the end
            show(row)
            writer.grab_frame()
    path.with_name("emergence.tmp.gif").replace(path)
    plt.close(figure)
    print(path)


# ---- several runs

def facts(run):
    """What is compared over runs, a dict with None for what is not known: the certificate, and what emerged when."""
    config, log, report = read_config(run), read_log(run), read_report(run)
    useful = paths_in(report)
    symbols = [name for name in log[0] if name.startswith("x_")]
    crossings = [first_below([row["step"] for row in log], [row[name] for row in log]) for name in symbols]
    reached = [step for step in crossings if step is not None]
    facts = dict(run=run.name, rotary=config["rotary"], mse=log[-1].get("confirmed", log[-1]["val"]), crossings=crossings,
                 in_order=None if len(reached) < 2 else reached == sorted(reached) and reached == crossings[:len(reached)],
                 certified=report and bool(report.get("sufficient") and report.get("all_necessary")), report=report)
    emergence = read_emergence(run, useful) if useful else None
    return facts | (what_came_first(emergence, crossings, config) if emergence else {})


def what_came_first(emergence, crossings, config):
    """A dict of what the order of the paths says: only of those whose attention passes 0.5, and without what does not apply."""
    when = {path: step for path, step in emergence_steps(emergence).items()
            if step is not None and path[3] != "previous token"}  # which is another chain's
    inside = [path for path in when if path[2:] in [(f"{k}b", f"{k}a") for k in range(1, config["D"] + 1)]]
    across = sorted((path for path in when if path not in inside), key=when.get)
    came = {}
    in_time = [path for path in when if None not in crossings and when[path] <= crossings[-1]]
    if in_time:
        lowest = min(layer for layer, *_ in in_time)
        came |= dict(began_with_previous=all(path in inside for path in in_time if path[0] == lowest))
    if not across:
        return came
    first, head = across[0], next((path for path in across if path[2:] == ("q", "1b")), None)
    below = min((path for path in inside if head and path[2:] == ("1b", "1a") and path[0] < head[0]), key=when.get,
                default=None)
    then = next((path for path in across if path[2:] != ("q", "1b")), None)
    until = when.get(then, math.inf)
    came |= dict(first=", ".join(f"layer {path[0]}: {path[2]} -> {path[3]} at {when[path]:.0f}"
                                 for path in ([below, head, then] if first is head else [first]) if path),
                 induction_first=first is head and when.get(below, math.inf) < until)
    if below:
        came |= dict(induction_head=(when[below], when[head]))
    if came["induction_first"]:
        last, i = emergence["rows"][-1], emergence["paths"].index(head)
        rises = [after - before for after, before in zip(last["paths"][i]["without"], last["losses"])]
        complete = max(when[below], when[head])
        came |= dict(below_first=when[below] < when[head],
                     apart=any(complete <= row["step"] <= until for row in emergence["rows"]) if then else None,
                     reused=max(rises[1:]) > lost(config["N"]) if rises[1:] else None)
    return came


def draw_order(every, path):
    """order.png, Sections 7.2 and 9 over many runs: when each run learned each symbol and formed its induction head."""
    figure, axes = plt.subplots(figsize=(10, 1.8 + 0.22 * len(every)), layout="constrained")
    D = max(len(fact["crossings"]) for fact in every)
    kinds = [(f"$x_{k + 1}$ below 0.5", "o", plt.get_cmap("viridis")(0.9 * k / max(1, D - 1)),
              [(fact["crossings"] + [None] * D)[k] for fact in every]) for k in range(D)]
    kinds += [(f"{role} attention above 0.5", marker, USEFUL,
               [fact.get("induction_head", (None, None))[i] for fact in every])
              for i, (role, marker) in enumerate((("1b \N{RIGHTWARDS ARROW} 1a", 2), ("q \N{RIGHTWARDS ARROW} 1b", 3)))]
    for label, marker, color, steps in kinds:
        known = [(step, row) for row, step in enumerate(steps) if step is not None]
        if known:
            axes.scatter(*zip(*known), marker=marker, color=color, s=25, label=f"{label} (n = {len(known)})")
    names = [fact["run"] for fact in every]
    shared = os.path.commonprefix(names).rfind("_") + 1
    axes.set_yticks(range(len(every)), [name[shared:] for name in names], fontsize=8)
    axes.set(xlabel="training step", ylim=(len(every) - 0.5, -0.5), title="When each run learned what")
    axes.grid(axis="y", lw=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    save(figure, path)


def compare(runs):
    """A table of several runs and what they have in common, as text (Markdown); also draws order.png beside the first."""
    def share(flags):
        flags = [flag for flag in flags if flag is not None]
        if not flags:
            return "not measured"
        low, high = wilson(sum(flags), len(flags))
        return f"{sum(flags)} of {len(flags)} [{low:.2f}, {high:.2f}]"

    def steps(values):
        return ", ".join("never" if value is None else f"{value:.0f}" for value in values)

    lines = ["| run | MSE | circuit, found with | all heads replaced | paths | layers | first useful layer: previous token "
             "| x_1, x_2, ... below 0.5 at step "
             "| first path across pairs above 0.5 at step, with what it needs and what follows |",
             "|---" * 9 + "|"]
    every = [facts(run) for run in runs]
    for fact in every:
        report = fact["report"]
        replaced = report["rows"][1] if "rows" in report else None
        how = {"zero": "one-hot maps", "mean": "mean attention"}
        cells = [fact["run"], f"{fact['mse']:.4f}",
                 f"{'certified' if fact['certified'] else 'not certified'}, {how[report['rows_without_a_path']]}"
                 if replaced else "none" if report else "not looked for",
                 f"{replaced['mse']:.4f} [{replaced['low']:.4f}, {replaced['high']:.4f}]" if replaced else "",
                 *([f"{report['paths']} (least {report['least_paths']})",
                    f"{report['layers_with_paths']} (least {report['least_layers']})",
                    "yes" if report["first_useful_layer_is_previous_token"] else "no"] if replaced else [""] * 3),
                 steps(fact["crossings"]),
                 fact.get("first", "")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| over the runs of a kind (95% Wilson intervals) | |", "|---|---|"]
    for rotary in sorted({fact["rotary"] for fact in every}):
        group = [fact for fact in every if fact["rotary"] == rotary]
        found = [fact["report"] for fact in group if "rows" in fact["report"]]
        shapes = {tuple(path[2:] for path in paths_in(report)) for report in found}
        waits = [[b - a for a, b in zip(fact["crossings"], fact["crossings"][1:])] for fact in group
                 if fact["in_order"] and None not in fact["crossings"]]
        shares = {
            "a certified circuit": (bool(fact["certified"]) for fact in group if fact["report"]),
            "in the least number of layers": (report["layers_with_paths"] == report["least_layers"] for report in found),
            "with the least number of paths": (report["paths"] == report["least_paths"] for report in found),
            "first useful layer attends to the previous token": (
                report["first_useful_layer_is_previous_token"] for report in found),
            "the same, counting only paths above 0.5 when the last symbol is learned": (
                fact.get("began_with_previous") for fact in group),
            "x_1, x_2, ... cross 0.5 in this order": (fact["in_order"] for fact in group),
            "an induction head first (q -> 1b, with 1b -> 1a below, before any other)": (
                fact.get("induction_first") for fact in group),
            "a checkpoint stands between it and the next path": (fact.get("apart") for fact in group),
            "its 1b -> 1a passes 0.5 before its q -> 1b": (fact.get("below_first") for fact in group),
            "without that head at the end a later symbol is lost": (fact.get("reused") for fact in group)}
        lines += [f"| --rotary {rotary}: {what} | {share(flags)} |" for what, flags in shares.items()]
        lines.append(f"| --rotary {rotary}: different circuits, by the roles of their paths in order | {len(shapes)} |")
        for k, gaps in enumerate(zip(*waits), 1):
            lines.append(f"| --rotary {rotary}: steps from x_{k} to x_{k + 1}, median (range) | "
                         f"{statistics.median(gaps):.0f} ({min(gaps):.0f} to {max(gaps):.0f}) |")
    if any(step is not None for fact in every for step in fact["crossings"]):
        draw_order(every, runs[0].parent / "order.png")
    return "\n".join(lines)


# ---- the command line

def draw(run):
    """All figures of one run."""
    model, config = load(run)
    if config.get("circuit"):
        raise ValueError(f"{run} was trained with --circuit: its attention is known, there is nothing to find")
    useful = read_circuit(run)
    draw_curves(run)
    draw_shared_information(run, config)
    draw_attention_maps(run, model, config, useful)
    draw_information_map(run, config, information(model, config), useful)
    if not useful:
        print("ablate.py found no circuit here, so none is drawn" if (run / "circuit.json").exists() else
              f"no circuit is known here, so none is drawn: run python ablate.py {run} first")
        return
    draw_circuit(run, config, useful)
    emergence = read_emergence(run, useful)
    if emergence:
        draw_emergence(run, config, useful, emergence)
        draw_path_histories(run, config, emergence)
        draw_removals(run, config, emergence)
        animate_emergence(run, config, useful, emergence)


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"analyze.py: {message}\n")
    p.add_argument("run", type=Path, nargs="+", help="run directory of train.py; several for a table of them")
    runs = p.parse_args().run
    try:
        if len(runs) == 1:
            draw(runs[0])
        else:
            print(compare(runs))
    except (OSError, ValueError) as error:
        p.error(error)


if __name__ == "__main__":
    main()
