"""k-fold composition (Bietti's slides): hops alone are hard, from easy to hard they are learnt.

    python mechanisms/hops.py                              # about 13 minutes of one core
    python mechanisms/hops.py --task letters --seeds 1     # about 6 minutes of one core
    python mechanisms/hops.py --plot-only                  # the figure again, from hops.json

A sequence holds k permutations of N numbers in a ring; each is preceded by another one, the same in
all sequences and never shown. From token (i, b) 2^l hops through the ring are asked, by the state
after layer l, or after the last as a hop token says. letters: hop from a letter to what followed
it the last time, from there to what followed that letter, and so on (Sanford et al., 2024).
"""

import argparse
import json
import sys
import time
from pathlib import Path

from parts.flags import command_line
from parts.runs import save_figure, symbol_color, write_text

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from mechanisms.hop_tasks import Letters, Ring, Transformer


SOLVED = 0.95  # accuracy
REGIMES = {"mixture": "#0072B2", "curriculum": "#009E73", "hard": "#D55E00"}
GRID = [(k, 4, regime, False) for k in (2, 4, 8) for regime in REGIMES]  # k, N, regime, hop token
GRID += [(k, 4, regime, True) for k in (2, 4) for regime in ("mixture", "curriculum")]
GRID += [(2, N, regime, False) for N in (6, 8) for regime in ("mixture", "hard")]
PUBLISHED = {2: 0.140, 4: 0.423, 8: 0.658, 16: 0.737}  # errors of depth 2 after 100,000 steps


@torch.no_grad()
def accuracy(model, task, level, generator, held=()):
    tokens, targets = task.sample([level], task.batch, generator)
    right = model(tokens, [level], held)[0].argmax(3) == targets
    return round(float(right[targets >= 0].float().mean()), 4)


def train(task, regime, steps, seed):
    """The model, and [step, accuracy of each level] up to the one where the last is SOLVED.

    hard: the last level alone; mixture: all; curriculum: one more when the newest is SOLVED."""
    generator = torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed)
    model, levels, found = Transformer(task), [*range(len(task.hops))], []
    optimizer = torch.optim.AdamW(model.parameters(), task.lr, betas=(0.9, 0.95))
    asked = dict(hard=levels[-1:], mixture=levels, curriculum=levels[:1])[regime]
    for step in range(steps + 1):
        if step % task.every == 0:
            found.append([step, *(accuracy(model, task, i, generator) for i in levels)])
            if found[-1][-1] >= SOLVED:
                break
            if regime == "curriculum" and found[-1][len(asked)] >= SOLVED:
                asked = levels[: len(asked) + 1]
        tokens, targets = task.sample(asked, task.batch, generator)
        logits, _ = model(tokens, asked)
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 2), targets.flatten()).backward()
        optimizer.step()
    return model, found


@torch.no_grad()
def attended(model, task, generator):
    """Of each layer and head the mean attention to each place of the ring, counted from its own,
    (layers, heads, k), and to the one token there that holds the next hops (layers, heads); and the
    last level's accuracy when each layer sees only its place, by theory 0, 1, 2, 4 ... ahead, or
    only the place after it."""
    tokens, _ = task.sample([0], 4 * task.batch, generator)
    sigma, levels = tokens.view(-1, task.k, task.N), [len(task.hops) - 1]
    numbers = [task.pi.expand_as(sigma), *task.answers(sigma)]
    place = torch.arange(task.k).repeat_interleave(task.N)  # (T,)
    apart = (place - place[:, None]) % task.k
    there = torch.stack([apart == ahead for ahead in range(task.k)]).float()  # (k, T, T)
    places, targets, held = [], [], ([], [])
    for layer, pattern in enumerate(model(tokens, levels)[1]):
        ahead = (0, *task.hops)[layer]
        wanted = (place + ahead) % task.k * task.N + numbers[layer].flatten(1)  # (B, T)
        wanted = wanted[:, None, :, None].expand(-1, task.heads, -1, -1)
        targets.append(pattern.gather(3, wanted).mean((0, 2, 3)).tolist())
        places.append((torch.einsum("bhts,kts->hk", pattern, there) / tokens.numel()).tolist())
        for maps, seen in zip(held, (ahead, (ahead + 1) % task.k), strict=True):
            alone = pattern * there[seen]
            maps.append(dict(enumerate((alone / alone.sum(3, keepdim=True).clamp(1e-9)).unbind(1))))
    answers = [model(tokens, levels, maps)[0][0].argmax(2) for maps in held]
    right = [float((answer == numbers[-1].flatten(1)).float().mean()) for answer in answers]
    return dict(places=places, targets=targets, held=right)


def measure(args):
    """Yield after every run the results so far: {"runs": [a dict for each]}."""
    shapes = [(dict(k=k, N=N, hop_token=token), regime) for k, N, regime, token in GRID]
    if args.task == "letters":
        shapes = [(dict(layers=2), "mixture")]
    todo = [(*row, args.seed + i) for row in shapes for i in range(args.seeds)]
    costs = [shape.get("k", 1) * shape.get("N", 1) for shape, _, _ in todo]  # roughly
    runs, start = [], time.time()
    for number, (shape, regime, seed) in enumerate(todo, 1):
        task = Letters(**shape) if args.task == "letters" else Ring(**shape, seed=seed)
        model, rows = train(task, regime, args.steps, seed)
        runs.append(dict(shape, regime=regime, seed=seed, rows=rows))
        if not task.hop_token:
            runs[-1]["attended"] = attended(model, task, torch.Generator().manual_seed(seed))
        left = (time.time() - start) * (sum(costs) / sum(costs[:number]) - 1)
        said = f"{rows[-1][-1]:.2f} at step {rows[-1][0]}"
        print(f"{shape} {regime}, seed {seed}: {said}, about {left:.0f} s left", flush=True)
        times = dict(seconds=time.time() - start, processor=time.process_time())
        yield times | dict(steps=args.steps, runs=runs)


def solved_at(run):
    """The step at which the last level was SOLVED; None if the run ended before."""
    return run["rows"][-1][0] if run["rows"][-1][-1] >= SOLVED else None


def select(results, **wanted):
    return [run for run in results["runs"] if wanted.items() <= run.items()]


def draw_steps(panel, results, x, **wanted):
    """Steps to solve against x ("k" or "N"), a mark per seed."""
    rest = ", ".join(f"{name} = {value}" for name, value in wanted.items())
    values = sorted({run[x] for run in select(results, **wanted)})
    for run in select(results, **wanted):
        step, color = solved_at(run), REGIMES[run["regime"]]
        place = values.index(run[x]) + 0.2 * [*REGIMES].index(run["regime"]) - 0.25
        place += 0.03 * (run["seed"] % 3) + 0.1 * run["hop_token"]
        mark = "os"[run["hop_token"]] if step else "^"
        panel.plot(place, step or results["steps"], mark, c=color, mfc=color if step else "none")
    for regime, color in REGIMES.items():
        panel.plot([], [], "o", color=color, label=regime)
    panel.plot([], [], "ks", label="a hop token and one reading")
    panel.plot([], [], "k^", mfc="none", label="not solved when it was ended")
    panel.set_xticks(range(len(values)), values)
    panel.set(xlabel=f"{x}, with {rest}", yscale="log", ylim=(20, 1.5 * results["steps"]))
    panel.set_ylabel(f"steps to accuracy {SOLVED:g} at k hops, a mark per seed")
    panel.legend(fontsize="small")


def draw_curves(panel, runs):
    """Accuracy after 1, 2, 4 ... hops, a line per seed."""
    for run in runs:
        steps, *levels = zip(*run["rows"], strict=True)
        for level, accuracies in enumerate(levels):
            label = f"{2**level} hops" if run is runs[0] else None
            panel.plot(steps, accuracies, color=symbol_color(level + 1, 4), label=label)
        panel.legend(fontsize="small")
    panel.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.02), visible=bool(runs))


def draw_ring(results, path):
    """Steps against k and N; accuracy through training; where the layers attend."""
    figure, axes = plt.subplots(2, 3, figsize=(17, 10), layout="constrained")
    draw_steps(axes[0, 0], results, "k", N=4)
    draw_steps(axes[0, 1], results, "N", k=2)
    k = max(run["k"] for run in results["runs"])
    shown = (k, "mixture", False), (k, "curriculum", False), (min(k, 4), "mixture", True)
    for panel, (k, regime, token) in zip((axes[0, 2], axes[1, 0], axes[1, 2]), shown, strict=True):
        draw_curves(panel, select(results, k=k, N=4, regime=regime, hop_token=token))
        panel.set_title(f"{regime}, k = {k}, N = 4{', a hop token' if token else ''}")

    places = []  # of each layer the head that attends most to the place of the theory
    for run in select(results, k=shown[0][0], N=4, regime="mixture", hop_token=False):
        heads = torch.tensor(run["attended"]["places"])  # (layers, heads, k)
        best = [own[own[:, 2**layer // 2].argmax()] for layer, own in enumerate(heads)]
        places.append(torch.stack(best))
    mean, panel = torch.stack(places).mean(0).numpy(), axes[1, 1]  # (layers, k)
    extent = -0.5, shown[0][0] - 0.5, 0.5, len(mean) + 0.5
    image = panel.imshow(mean, "cividis", clim=(0, 1), aspect="auto", origin="lower", extent=extent)
    panel.set(xlabel="places ahead on the ring", xticks=range(shown[0][0]))
    panel.set(ylabel="layer", yticks=range(1, len(mean) + 1))
    panel.set_title(f"Most attentive head, mixture, k = {shown[0][0]}, {len(places)} seeds")
    figure.colorbar(image, ax=panel, label="attention")
    save_figure(figure, path)


def draw_letters(results, path):
    """Error against the number of hops, beside what was published after more steps."""
    figure, panel = plt.subplots(figsize=(8, 5), layout="constrained")
    for run in results["runs"]:
        step, *accuracies = run["rows"][-1]
        panel.plot([1 - share for share in accuracies], "o-", label=f"ours, {step} steps")
    panel.axhline(0.75, color="0.8", label="a guess among the letters")
    panel.plot(*zip(*PUBLISHED.items(), strict=True), "k^", label="published, 100,000 steps")
    panel.set(xlabel="hops k", ylabel="error", title="Hops among letters, depth 2", ylim=0)
    panel.legend()
    save_figure(figure, path)


def main():
    p = command_line("hops.py", __doc__.splitlines()[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("--task", choices=["ring", "letters"], default="ring", help="what to learn")
    p.add_argument("--steps", type=int, default=1600, help="at which a run ends unsolved")
    p.add_argument("--seeds", type=int, default=3, help="number of seeds")
    p.add_argument("--seed", type=int, default=0, help="the first of them")
    p.add_argument("--out", type=Path, default=Path("results/mechanisms"), help="folder")
    p.add_argument("--plot-only", action="store_true", help="draw what the JSON file holds")
    args = p.parse_args()
    if min(args.steps, args.seeds) < 1:
        p.error("--steps and --seeds must be at least 1")
    name, draw = ("letters", draw_letters) if args.task == "letters" else ("hops", draw_ring)
    path = args.out / f"{name}.json"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for results in () if args.plot_only else measure(args):  # a stop keeps what is done
            write_text(path, json.dumps(dict(command=sys.argv[1:]) | results))
        draw(json.loads(path.read_text()), path.with_suffix(".png"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        p.error(f"{path}: {error}; run without --plot-only, --out a folder that can be written")


if __name__ == "__main__":
    main()
