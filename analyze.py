"""Draw the figures of one run (Sections 8 and 9, Appendices C and D) into its directory.

    python ablate.py out/L12_H1_D3_s0      # first: finds the circuit
    python analyze.py out/L12_H1_D3_s0     # then: curves.png, attention_maps.png, circuit.png, ...

Checkpoints (--save-every) show how its paths emerged: emergence.json keeps the attention of each
path at each. To add a figure, write a function that returns it, and yield it in `figures_of`.
"""

import itertools
import pathlib
import re

import ablate
import train
from data import command_line, progress
from model import rotate

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure


RED, INK, GRAY, FAINT, PALE = "#e63946", "#22223b", "#a3a3b3", "#d8d8e0", "#f0f0f5"
SYMBOLS = "#8d99ae #4361ee #2a9d8f #f4a261 #9d4edd #588157 #a44a3f #a3a3b3".split()  # of x_0, ...
LETTERS = "Letters: the symbols that the arrows up to there can have brought. Layers count from 0."


# ---- Figure 6: losses


def first_below(steps, losses, level):
    """The step, interpolated, at which a curve first is below a level; None if it never is."""
    if losses[0] < level:
        return steps[0]
    for (start, before), (end, after) in itertools.pairwise(zip(steps, losses, strict=True)):
        if after < level <= before:
            return start + (end - start) * (before - level) / (before - after)
    return None


def crossings(rows, task):
    """{x_1: the step at which it was learned, or None, ...} from the rows of a log."""
    steps, level = [row["step"] for row in rows], task.learned_below
    return {x: first_below(steps, [row[x] for row in rows], level) for x in task.target_names}


def draw_curves(flags, rows):
    """The losses of all targets together, and of each, with the step at which it was learned."""
    task, steps = train.task_of(flags), [row["step"] for row in rows]
    figure, (left, right) = panels(2, 2, 5, 3)
    # the first row has no training loss, which is None
    left.plot(steps, [row["train"] for row in rows], color=GRAY, label="training")
    left.plot(steps, [row["val"] for row in rows], color=INK, label="validation")
    left.set(xlabel="training step", ylabel=task.loss_name, yscale="log")
    learned = crossings(rows, task)
    for k, (name, step) in zip(task.targets, learned.items(), strict=True):
        text = "" if step is None else f": learned at {step:.0f}"
        label, color = shown_name(name) + text, symbol_color(k)
        right.plot(steps, [row[name] for row in rows], color=color, label=label)
        right.plot([step], [task.learned_below], "o", color=color)  # none if step is None
    right.axhline(task.chance, color=GRAY, ls=":", label=f"{task.chance:.3g}: chance")
    end = min(steps[-1], 1.5 * max(step or steps[-1] for step in learned.values()))
    right.set(xlabel="training step", ylabel="validation loss of each", xlim=(0, end), ylim=0)
    figure.legend(loc="outside right center")
    caption = f"""Training: mean since the last row. Validation: \
{"averaged weights, " * bool(flags.ema)}1024 sequences.
Dots: the loss passes {task.learned_below:.3g}, and the target counts as learned."""
    add_title(figure, flags, "how it learned", caption)
    return figure


# ---- Appendix C: attention maps


def draw_attention_maps(model, flags, paths):
    """The attention of every head on one held-out sequence, first of those in the circuit, with
    frames around its paths. The tokens are sorted by chain."""
    task = train.task_of(flags)
    batch = task.draw("validation", 1)
    reads = ablate.record_reads(model, batch.inputs)
    order = batch.places[0].flatten()  # the tokens of each chain together, (N * roles)
    names, n = [*task.roles] * task.N, len(order)
    chains = np.arange(0, n, len(task.roles)) - 0.5  # where they begin
    ticks = names if n <= 40 else []  # more are too small to read, and take minutes

    circuit = {path[:2] for path in paths}
    heads = sorted(model.heads, key=lambda head: head not in circuit)
    figure, grid = panels(len(heads), 3, 4, 4.3)
    for axes, (layer, head) in zip(grid, heads, strict=True):
        pattern, _ = reads[layer, head]
        axes.imshow(pattern[0, order][:, order], "Blues", vmin=0, vmax=1)
        axes.set_title(f"L{layer}H{head}")
        axes.set_xticks(range(len(ticks)), ticks, rotation=90)
        axes.set_yticks(range(len(ticks)), ticks)
        axes.tick_params(length=0, pad=1, labelsize=min(8, 200 / n))
        axes.hlines(chains, -0.5, n - 0.5, GRAY, lw=0.5)
        axes.vlines(chains, -0.5, n - 0.5, GRAY, lw=0.5)
        own = [path for path in paths if path[:2] == (layer, head)]
        edges = ablate.mark_edges(own, task, batch.places)[0, order][:, order]
        # x: what is read, y: its reader
        axes.plot(*edges.T.nonzero().T, "s", ms=250 / n, mfc="none", mec=RED)
    caption = f"""Heads of the circuit come first. Rows attend to columns. Tokens between lines: \
{" ".join(task.roles)}.
Red: paths of the circuit. They were found on many sequences, and may be empty in this one."""
    add_title(figure, flags, "where it attends", caption)
    return figure


# ---- what a read matches


def queries_and_keys(model, inputs):
    """{(layer, "q" or "k"): (B, heads, T, head_size)}, after RoPE."""
    found, hooks = {}, []
    for (layer, block), name in itertools.product(enumerate(model.blocks), "qk"):

        def keep(module, args, output, key=(layer, name)):
            found[key] = output if model.angles is None else rotate(output, model.angles)

        hooks.append(getattr(block, name).register_forward_hook(keep))
    # a head is replaced by itself: the last layer has all its tokens then, not the queries alone
    model(inputs, heads={model.heads[-1]: torch.matmul})
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def scores_and_maps(model, task, paths, batch):
    """The scores (paths,), and their maps M (paths, roles, roles, K, K), as in measure_matches, of
    one chain in each sequence."""
    sequence = torch.arange(len(batch.inputs))
    # of sequence b the chain of query b mod N, and of the next: where its roles stand, {role: (B,)}
    chains = [batch.places[sequence, (sequence + i) % task.N].T for i in (0, 1)]
    own, other = (dict(zip(task.roles, places, strict=True)) for places in chains)

    def q_and_k(inputs):  # (2, paths, B, head_size)
        found, both = queries_and_keys(model, inputs), []
        for path in paths:
            q, k = (found[path.layer, name][:, path.head] for name in "qk")  # (B, T, head_size)
            q = q[sequence, own[path.reader]] / q.shape[-1] ** 0.5
            k = k[sequence, own[path.read]] - k[sequence, other[path.read]]
            both.append(torch.stack([q, k]))
        return torch.stack(both, 1)

    # the derivatives of q and k by each number of the symbol at each role
    slopes = []
    for places, i in itertools.product(own.values(), range(task.inputs)):
        change = torch.zeros_like(batch.inputs)
        change[sequence, places, i] = 1
        qk, slope = torch.func.jvp(q_and_k, (batch.inputs,), (change,))  # qk: always the same
        slopes.append(slope)
    dq, dk = torch.stack(slopes, 2).unflatten(2, (len(own), -1))  # (paths, roles, K, B, head_size)
    maps = torch.einsum("puins,pvjns->puvij", dq, dk) / len(sequence)
    return qk.prod(0).sum(-1).mean(-1), maps


# A head compares two copies of a symbol x if c |x|^2 is at least a third of its score, and at least
# 1 nat, which multiplies the odds by e. What it was chosen on stands in results/circuits.md
SHARE, LEAST = 1 / 3, 1.0


def measure_matches(model, task, paths, n=32):
    """{path: (M, score, matched)} of the paths between roles, if there is another chain.

    The score of a read is q k before the softmax, with the k of what it reads less that of the same
    token of the next chain, since the softmax sees differences alone. By the symbol x_u of token u
    in q, and the x_v of token v in k, it has the second derivative (K, K)

        M[u, v] = dq/dx_u dk/dx_v        mean over n sequences

    If that is c I, the score holds c x_u x_v: the head compares the symbols of u and v. In the
    tuples are M (roles, roles, K, K), the mean score, and matched {k: c} of the x_k that the head
    compares, with c summed over the pairs of tokens that show it; {} if it looks by place."""
    paths = [path for path in paths if {*path[2:]} <= task.roles.keys() and task.N > 1]
    if not paths:
        return {}
    batch, matches = task.draw("circuits", n), {}
    square = batch.inputs.square().sum(-1).mean().item()  # |x|^2 of a symbol, about K
    shown = torch.tensor([*task.roles.values()])  # the k of each role
    for path, score, M in zip(paths, *scores_and_maps(model, task, paths, batch), strict=True):
        if not M.isfinite().all():
            raise FloatingPointError(f"{path} has scores that are not finite")
        all_c, matched = c_of(M), {}
        for k in sorted({*task.roles.values()}):
            c = all_c[shown == k][:, shown == k].sum().item()
            if abs(c) * square >= max(LEAST, SHARE * abs(score)):
                matched[k] = c
        matches[path] = M, score.item(), matched
    return matches


def c_of(M):
    """(roles, roles): of each map M[u, v] the c of c I, trace(M[u, v]) / K."""
    return M.diagonal(dim1=2, dim2=3).mean(-1)


# ---- Figures 5 and 7, Appendix D: the circuit, and how its paths emerged


def columns_of(task, paths):
    """The tokens of a diagram, from left to right: all roles, and those 1b+1 that some path has."""
    used = {*task.roles, *(token for path in paths for token in path[2:])}
    return [token for token in ablate.tokens_of(task) if token in used]


def draw_diagram(axes, flags, looks, first=0):
    """Draw the tokens of a chain across and the layers that have paths upward, letters for what can
    have arrived at a token by then, and arrows from what is read to its reader;
    looks: {path: ([(text, color of its box), ...], color, width)}; first: the number of layer 0."""
    task, paths = train.task_of(flags), sorted(looks)
    apart = max(1, 0.2 * len({*task.roles.values()}))  # room for all letters at each token
    x_of = {token: apart * i for i, token in enumerate(columns_of(task, paths))}
    for slot in task.chain_slots:
        ends = x_of[slot[0]] - 0.15, x_of[slot[-1]] + 0.15
        axes.plot(ends, [0, 0], color=PALE, lw=30, solid_capstyle="round", zorder=0)

    # labels that would hide each other are in different lanes, one above the other
    middle = {path: (x_of[path.reader] + x_of[path.read.rstrip("*")]) / 2 for path in paths}
    names = {path: [(f"H{path.head}", "white")] * (flags.heads > 1) for path in paths}
    labels = {path: names[path] + looks[path][0] for path in paths}
    room, lane = max(map(width_of, labels.values())), {}
    for path in paths:
        near = {other for other in lane if abs(middle[other] - middle[path]) < room}
        taken = {lane[other] for other in near if other.layer == path.layer}
        lane[path] = min({*range(len(paths))} - taken)

    # from the input, layer -1, to the last: where each layer is that has paths, dots between others
    rows, y_of, ticks, below = ablate.arrivals(paths, task), {-1: 0}, {0: "input"}, {}
    for (lower, _), (layer, _) in itertools.pairwise(rows):
        lanes = max(lane[path] for path in paths if path.layer == layer)
        y_of[layer], below[layer] = y_of[lower] + 1 + 0.35 * lanes, lower
        style = "-" if layer == lower + 1 else ":"
        axes.vlines(x_of.values(), y_of[lower], y_of[layer], FAINT, style, lw=1, zorder=0)
        ticks[y_of[layer]] = f"layer {first + layer}"
        if style == ":":
            ticks[(y_of[lower] + y_of[layer]) / 2] = "\N{VERTICAL ELLIPSIS}"
    top = max(ticks)
    axes.figure.set_size_inches(max(7.5, 0.85 * apart * len(x_of) + 1.2), 0.8 * top + 2.8)
    axes.set_yticks([*ticks], ticks.values())
    axes.set_xticks([*x_of.values()], x_of)
    axes.set(xlim=(-0.6, max(x_of.values()) + 0.7), ylim=(-0.4, top + 0.4), frame_on=False)
    axes.tick_params(length=0)

    # the arrows, and where they start and end letters, as at the input
    shown = {(-1, token) for token in x_of}
    for path in paths:
        read, (_, color, width) = path.read.rstrip("*"), looks[path]
        y, dashes = y_of[below[path.layer]] + 0.35 * lane[path], "--" if "*" in path.read else "-"
        start, end = (x_of[read], y + 0.2), (x_of[path.reader], y + 0.8)
        style = dict(arrowstyle="-|>", mutation_scale=13, color=color, lw=width, ls=dashes)
        axes.annotate("", end, start, arrowprops=style)
        write_boxes(axes, middle[path], y + 0.5, labels[path])
        shown |= {(below[path.layer], read), (path.layer, path.reader)}
    for (layer, holds), token in itertools.product(rows, x_of):
        if (layer, token) in shown:
            # the label of x_1 of the first chain is B1
            letters = [(task.labels[k][0], symbol_color(k)) for k in sorted(holds[token])]
            write_boxes(axes, x_of[token], y_of[layer], letters)


def width_of(boxes):
    """How wide these [(text, color), ...] are, side by side, where tokens are 1 apart."""
    return sum(0.1 + 0.1 * len(text) for text, _ in boxes)


def write_boxes(axes, x, y, boxes):
    """Write texts side by side around a point: [(text, color of its box), ...]."""
    style = dict(size=8.5, family="monospace", weight="bold", ha="center", va="center", zorder=4)
    x -= width_of(boxes) / 2
    for text, fill in boxes:
        box = dict(boxstyle="round,pad=0.25", fc=fill, ec="white")
        color, half = INK if fill == "white" else "white", width_of([(text, fill)]) / 2
        axes.text(x + half, y, text, color=color, bbox=box, parse_math=False, **style)
        x += 2 * half


def held_before(paths, task):
    """{layer: {token: the k of the x_k that can have arrived there before it}} of their layers."""
    arrived = itertools.pairwise(ablate.arrivals(paths, task))
    return {layer: holds for (_, holds), (layer, _) in arrived}


def draw_circuit(flags, report, matches):
    """Figure 5: the circuit, and what each read matches; the higher the worst loss without a path,
    the wider its arrow."""
    task, paths, looks = train.task_of(flags), ablate.paths_in(report), {}
    before = held_before(paths, task)
    for path, row in paths.items():
        # gray: nothing new; red: a token other than q reads what is beyond its own symbol
        brought, has = before[path.layer][path.read.rstrip("*")], before[path.layer][path.reader]
        ahead = path.reader in task.roles and max(brought, default=0) > task.roles[path.reader]
        color = GRAY if brought <= has else RED if ahead and path.reader != "q" else INK
        boxes, matched = [], matches[path][-1] if path in matches else {}
        for k, c in matched.items():
            name, sign = task.labels[k][0], "=" if c > 0 else "\N{NOT EQUAL TO}"
            boxes.append((f"{name}{sign}{name}", symbol_color(k)))
        boxes = boxes or [("place" if path in matches else "?", "white")]
        looks[path] = boxes, color, 1 + 2 * min(1, max(row["without"].values()))
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    verdict, ablation = report["verdict"].split(":")[0], report["ablation"]
    signs = [c for *_, matched in matches.values() for c in matched.values()]
    notes = {
        " ?: not measured.": {*paths} != {*matches},
        " A\N{NOT EQUAL TO}A: away from it.": min(signs, default=0) < 0,
        " Two labels: by both.": any(len(boxes) > 1 for boxes, *_ in looks.values()),
        " Dashed: reads all chains.": any("*" in path.read for path in paths),
        " 1b+1: the token after 1b.": any("+" in str(path) for path in paths),
    }
    caption = f"""Arrow: from the token that is read to its reader. Label: how it is found.
A=A: by the A that both hold. place: by no symbol.{"".join(filter(notes.get, notes))}
The wider, the higher the worst loss without it, up to 1. Gray: brings no new symbol.
Red: a token of a pair fetches what comes later in the chain. Dotted: skips layers without paths.
{LETTERS}
Circuit {verdict}; the loss of the worst symbol is {max(report[ablation].values()):.3f} under \
{ablation} ablation (n = {report["sequences"]} sequences)."""
    add_title(figure, flags, "what it learned", caption)
    return figure


def checkpoints_of(run):
    """The checkpoint files of a run, by step."""
    return sorted(pathlib.Path(run, "ckpt").glob("*.pt"), key=lambda file: int(file.stem))


def measure_emergence(run, paths, n=32):
    """What emergence.json holds: each path's attention in n sequences at each checkpoint."""
    files, rows = checkpoints_of(run), [dict(path._asdict(), mean=[]) for path in paths]
    for file in progress("checkpoints", files):
        model, task, _ = train.load(run, f"ckpt/{file.name}")
        batch = task.draw("emergence", n)
        reads = ablate.record_reads(model, batch.inputs)
        for path, row in zip(paths, rows, strict=True):
            attention = ablate.mean_attention(reads[path[:2]][0], path, task, batch.places).item()
            row["mean"].append(round(attention, 4))
    return dict(sequences=n, steps=[int(file.stem) for file in files], paths=rows)


def emergence_steps(emergence):
    """{path: the step, interpolated, at which its mean attention first passes 0.5, or None}."""
    steps, rows = emergence["steps"], ablate.paths_in(emergence)
    # x first passes 0.5 where -x first is below -0.5
    return {path: first_below(steps, [-x for x in rows[path]["mean"]], -0.5) for path in rows}


def draw_emergence(flags, emergence, log):
    """Figure 7: the step at which each path emerged; the later, the darker."""
    rows, steps, n = ablate.paths_in(emergence), emergence_steps(emergence), emergence["sequences"]
    looks = {path: ([(f"({rows[path]['mean'][-1]:.2f})", "white")], GRAY, 1) for path in rows}
    passed = sorted((step, path) for path, step in steps.items() if step is not None)
    for rank, (step, path) in enumerate(passed, 1):
        color = matplotlib.colormaps["plasma_r"](rank / len(passed))
        looks[path] = [(f"{step:.0f}", "white")], color, 2
    figure = Figure(layout="constrained")
    draw_diagram(figure.subplots(), flags, looks)
    learned = crossings(log, train.task_of(flags))
    learned = [f"{name} {step:.0f}" for name, step in learned.items() if step is not None]
    caption = f"""{LETTERS}
Numbers: the training step at which mean attention (n = {n}) passes 0.5 (the later, the darker); in
brackets its last value, if it never does. Reads below 0.5, or by other heads, may help before.
Learned at step: {", ".join(learned) or "nothing"}."""
    add_title(figure, flags, "when each path emerged", caption)
    return figure


def draw_paths(flags, emergence):
    """Appendix D: the attention of each path over training."""
    figure, grid = panels(len(emergence["paths"]), 4, 2.5, 1.8, sharey=True)
    for axes, (path, row) in zip(grid, ablate.paths_in(emergence).items(), strict=True):
        axes.plot(emergence["steps"], row["mean"], color=INK)
        axes.set_title(path, size=9)
        axes.axhline(0.5, color=RED, lw=0.5)
    caption = f"Mean attention (n = {emergence['sequences']}) by training step. Red: 0.5."
    add_title(figure, flags, "how it learned its paths", caption)
    return figure


# ---- what all figures share


def panels(count, columns, width, height, **more):
    """(figure, [axes, ...]): a grid of panels, each of width x height inches."""
    rows = (count - 1) // columns + 1
    figure = Figure(figsize=(width * columns, height * rows + 1), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **more)
    for axes in grid.flat[count:]:
        axes.axis("off")
    return figure, list(grid.flat[:count])


def add_title(figure, flags, title, caption):
    """Name the run above a figure, by its directory, and write a caption below it."""
    style = dict(x=0.01, ha="left", parse_math=False)
    figure.suptitle(f"{flags.out.name}: {title}", size=13, weight="bold", **style)
    figure.supxlabel(caption, color="dimgray", size=8.5, **style)


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def shown_name(name):
    """A name as matplotlib shows it: x_12 with an index."""
    return re.sub(r"^x_(\d+)$", r"$x_{\1}$", name)


def symbol_color(k):
    """The colour of x_k in all figures."""
    return SYMBOLS[k % len(SYMBOLS)]


# ---- the command line


def figures_of(run):
    """Yield (file name, figure) for all that this run directory has been through."""
    (model, task, flags), log = train.load(run), train.read_log(run)
    yield "curves.png", draw_curves(flags, log)
    report = ablate.read_report(run)
    paths = sorted(ablate.paths_in(report))
    yield "attention_maps.png", draw_attention_maps(model, flags, paths)
    if not paths:
        print("there is no circuit:", report.get("verdict", f"run python ablate.py {run} first"))
        return
    yield "circuit.png", draw_circuit(flags, report, measure_matches(model, task, paths))
    if checkpoints_of(run):
        train.write_file(run / "emergence.json", measure_emergence(run, paths))
    emergence = ablate.read_report(run, "emergence.json")
    if sorted(ablate.paths_in(emergence)) != paths:
        print("no emergence of this circuit: there are no checkpoints (train.py --save-every)")
        return
    yield "emergence.png", draw_emergence(flags, emergence, log)
    yield "paths.png", draw_paths(flags, emergence)


def main():
    p = command_line("analyze.py", __doc__)
    p.add_argument("run", type=train.run_directory, help="finished run directory of train.py")
    run = p.parse_args().run
    for name, figure in figures_of(run):
        save_figure(figure, run / name)
        print(run / name)


if __name__ == "__main__":
    main()
