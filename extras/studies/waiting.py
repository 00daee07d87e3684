"""What grows beneath the plateau: attention that the loss does not show yet.

    python -m extras.studies.waiting out/waiting --seeds 3  # trains small models on x_1; rerun to go on
    python -m extras.studies.waiting out/waiting --run out/L12_H1_D3_s0  # one trained with --save-every 10

The excess of a path is how much more its source attends to the target of its own chain than to the
targets of other chains. The plateau of x_1 lasts until a third of its loss there is gone. It is cut
into a delay, in which the log of the excess of q -> 1b is flat; growth, in which it is straight,
until the excess is 0.1; and a rest. growth.jsonl holds a row for each run, with a number for every
tenth step:

    loss: of x_1 on 256 held-out sequences, on which everything else is measured too
    excess: of q -> 1b in the head where it is largest at the end, the mean over sequences
    held: R2 with which 1b holds x_0, read linearly before the layer of that head
    average: how much of the average of the candidates the prediction holds; 1 is all of it
    on_2a: the attention of a query to all 2a, in the head that gives them most (not in the oldest
        rows)
    gradient_qk, gradient_v: the norm of the gradient of the weights of that head
"""

import contextlib
import functools
import io
import itertools
import math
import shlex
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

import analyze
import sweep
import train
from ablate import End, PatchedModel, path_name, paths_in, preference, read_report
from data import TASKS, Task, UserError, chain, command_line, held_out, partial_losses, program
from extras.studies import markdown, theory
from extras.studies.stats import progress
from extras.studies.theory import frozen_heads


LEVEL = 0.1  # the excess at which growth ends: the loss starts to move
FLOOR = 1e-4  # smaller excesses count as this: half of the 95% interval over 256 sequences
SETTINGS = {  # name: flags
    "Muon, appended": "--optimizer muon --rotary input",
    "Muon, RoPE": "--optimizer muon --rotary qk",
    "AdamW, appended": "--optimizer adamw --rotary input",
    "AdamW, RoPE": "--optimizer adamw --rotary qk",
}
SMALL = f"{sweep.PLAIN} --layers 4 --heads 4 --width 64 --batch 64 --targets 1 --D 1 --decay 0"
SMALL += " --warmup 0 --steps 2400 --eval-every 20 --save-every 10 --dtype float32"
POINTS = {  # what differs from the base: flags
    "base": "",
    "first W_Q, W_K 0.1": "--qk-std 0.1",
    "first W_Q, W_K 0.05": "--qk-std 0.05",
    "first W_Q, W_K 0.005": "--qk-std 0.005",
    "1b -> 1a frozen": "--circuit previous",
    "rate 5e-4": "--lr 5e-4",
    "rate 4e-3": "--lr 4e-3",
    "batch 32": "--batch 32",
    "batch 256": "--batch 256",
    "N=2": "--N 2",
    "N=12, 36 tokens": "--N 12",
    "N=4, 36 tokens": "--task padded",
    "2 layers": "--layers 2",
    "8 layers": "--layers 8",
    "D=2": "--D 2",
    "D=2, read from step 1 on": "--D 2 --task first_step_first",
}
TRANSPLANTS = {  # which weights of the base at step 200 a run starts with; the others are fresh
    "all but W_Q, W_K from step 200": False,
    "only W_Q, W_K from step 200": True,
}
MAIN = {  # at the size of the main command
    "12 layers": "",
    "12 layers, N=8": "--N 8",
    "12 layers, D=2": "--D 2",
}
AT_MAIN_SIZE = "--layers 12 --heads 1 --width 128 --batch 128 --warmup 100 "


# ---- tasks and circuits


@functools.cache
def first_step_first(N, D):
    """Chains whose pairs are read from step 1 to step D, then the queries."""
    order = [*range(D - 1, -1, -1), D]
    roles = [role._replace(block=order[role.block]) for role in chain(N, D).roles]
    return Task(f"first_step_first_D={D}", N, tuple(roles))


@functools.cache
def padded(N, D):
    """The chains of step 1 after pairs of no chain, three times as many as D steps have."""
    roles = chain(N, 3 * D + 1).roles
    roles = [role._replace(symbol=-1) if role.block < 3 * D else role for role in roles]
    return Task(f"padded_D={D}", N, tuple(roles))


def previous(D, layers, causal):
    """The paths of the previous-token head of the minimal circuit."""
    return theory.minimal_circuit(D, 1, causal)


theory.CIRCUITS["previous", "chain"] = previous
TASKS |= dict(first_step_first=first_step_first, padded=padded)


# ---- measuring


def linear_r2(x, y):
    """Return R2, on the second half of the rows, of the linear map from x (n, width) to y (n, K)
    that fits the first half best."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    half = len(x) // 2
    error = y - x @ torch.linalg.lstsq(x[:half], y[:half]).solution
    return 1 - (error[half:].square().sum() / (y - y.mean(0))[half:].square().sum()).item()


def measure_weights(model, flags, batch):
    """Return what a row holds of one step, as {name: a number, or a tensor with one for each
    head or each layer}."""
    task, positions, streams = flags.problem, batch.positions, []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0].detach()))
    heads = frozen_heads(theory.frozen_paths(flags), task, positions)
    predictions, patterns = model(batch.inputs, heads, return_patterns=True)
    loss = partial_losses(predictions, batch.targets, flags.K).mean()
    loss.backward()

    # the excess of q -> 1b in every head
    q, b = (End(task.names.index(name)) for name in ("q", "1b"))
    of_heads = torch.cat([pattern.transpose(0, 1) for pattern in patterns]).detach()
    excess = preference(of_heads, q, b, task, positions).mean(1)  # (heads of all layers,)

    # how much of its attention a query gives to all 2a, in the head that gives most
    sequence, on_2a = torch.arange(len(positions))[:, None], 0
    if "2a" in task.names:
        read = positions[:, None, None, :, task.names.index("2a")]  # (B, 1, 1, N)
        queries = [p[sequence, :, positions[:, :, q.role]] for p in patterns]  # (B, N, heads, T)
        given = [rows.gather(3, read.expand(*rows.shape[:3], -1)) for rows in queries]
        on_2a = torch.stack(given).sum(-1).mean((1, 2)).max().item()

    # what 1b holds of x_0, and what the prediction holds of the average of the candidates
    x_0 = batch.inputs[sequence, positions[:, :, q.role], : flags.K].flatten(0, 1)
    of_1b = [stream[sequence, positions[:, :, b.role]].flatten(0, 1) for stream in streams]
    average = batch.targets.mean(1, keepdim=True)
    share = (predictions * average).sum() / (average**2).expand_as(predictions).sum()

    # the gradient of each head's W_Q and W_K, and of its W_V
    gradients = []
    for block in model.blocks:
        gradients.append(block.qkv.weight.grad.unflatten(0, (3, flags.heads, -1)))
    squares = torch.stack(gradients).square().sum((-2, -1))  # (layers, 3, heads)
    return dict(
        loss=loss.item(),
        excess=excess,
        held=[linear_r2(stream, x_0) for stream in of_1b],
        average=share.item(),
        on_2a=on_2a,
        gradient_qk=squares[:, :2].sum(1).sqrt().flatten(),
        gradient_v=squares[:, 2].sqrt().flatten(),
    )


def measure(flags):
    """Return the row of growth.jsonl of a run with checkpoints."""
    batch, measured = train.sequences(flags, held_out("emergence", 256)), []
    files = train.checkpoints_of(flags.out)
    for file in files:
        model = train.load(flags.out, f"ckpt/{file.name}")[0]
        measured.append(measure_weights(model, flags, batch))
    head = measured[-1]["excess"].argmax().item()
    layer, log = head // flags.heads, train.read_log(flags.out)
    row = dict(head=f"L{layer}H{head % flags.heads}", plateau=analyze.crossings(log, flags)["x_1"])
    row["steps"] = [int(file.stem) for file in files]

    # of what each head or layer has, keep that of this head
    index = dict(held=layer, excess=head, gradient_qk=head, gradient_v=head)
    for name in measured[0]:
        curve = [m[name][index[name]] if name in index else m[name] for m in measured]
        row[name] = [float(f"{x:.3g}") for x in curve]
    return row


# ---- training


def start_of(folder, point, seed):
    """Return the run that a transplant starts from."""
    return folder / "starts" / f"{point}_s{seed}".replace(" ", "_")


def write_transplants(flags, folder):
    """Write, from a run of the base, the runs that the transplants start from."""
    for point, only_scores in TRANSPLANTS.items():
        first, later = (train.load(flags.out, f"ckpt/{step:06d}.pt")[0] for step in (0, 200))
        mixed = first.state_dict() if only_scores else later.state_dict()
        donor = later.state_dict() if only_scores else first.state_dict()
        for name in mixed:
            if ".qkv." in name:
                scores = 2 * len(mixed[name]) // 3
                mixed[name][:scores] = donor[name][:scores]
        run = start_of(folder, point, flags.seed)
        run.mkdir(parents=True, exist_ok=True)
        shutil.copy(flags.out / "config.json", run)
        train.write_tensors(run / "model.pt", mixed)


def grid(folder, seeds):
    """Return {(point, setting, seed): flags as text}, a seed of all points before the next."""
    texts = {}
    for seed in range(seeds):
        for (point, text), setting in itertools.product(POINTS.items(), SETTINGS):
            texts[point, setting, seed] = f"{SMALL} {SETTINGS[setting]} {text} --seed {seed}"
        setting = "Muon, appended"
        for point, text in MAIN.items():
            flags = f"{SMALL} {SETTINGS[setting]} {AT_MAIN_SIZE} {text}"
            texts[point, setting, seed] = f"{flags} --seed {seed}"
        for point in TRANSPLANTS:
            start = shlex.quote(str(start_of(folder, point, seed)))
            flags = f"{SMALL} {SETTINGS[setting]} --init {start}"
            texts[point, setting, seed] = f"{flags} --seed {seed}"
    return texts


def grow(folder, seeds):
    """Train and measure all runs of the grid that growth.jsonl in the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, texts = load_rows(folder), grid(folder, seeds)
    there = {(row["point"], row["setting"], row["seed"]) for row in rows}
    train.keep_freed_memory()
    for key in progress("run", [key for key in texts if key not in there]):
        with tempfile.TemporaryDirectory() as temporary:
            out = ["--out", f"{temporary}/run"]
            flags = train.parse_flags([*shlex.split(texts[key]), *out])
            flags.stop_below = flags.problem.lost_above
            with contextlib.redirect_stdout(io.StringIO()):
                train.run_once(flags)
            rows.append(dict(zip(("point", "setting", "seed"), key, strict=True)) | measure(flags))
            if key[:2] == ("base", "Muon, appended"):
                write_transplants(flags, folder)
        train.write_rows(folder / "growth.jsonl", rows)


def load_rows(folder):
    """Return the rows of growth.jsonl in a folder, [] if it is not there yet."""
    file = folder / "growth.jsonl"
    return train.read_rows(file) if file.exists() else []


# ---- the terms of a plateau


def straight_line(x, y):
    """Return the line (intercept, slope) that fits points, arrays (n,), best, and its error."""
    design = np.stack([np.ones_like(x), x], 1)
    line = np.linalg.lstsq(design, y, rcond=None)[0]
    return line, ((y - design @ line) ** 2).sum()


def knee_fit(steps, excess):
    """Return (knee, intercept, slope, error) of the fit to the log of the excess, arrays (n,), that
    is flat until the knee and a straight line after it, with three points or more after it."""
    logs = np.log(np.maximum(excess, FLOOR))
    fits = []
    for knee in steps[:-3]:
        (intercept, slope), error = straight_line(np.maximum(steps - knee, 0), logs)
        fits.append((knee, intercept, slope, error))
    return min(fits, key=lambda fit: fit[-1])


def terms(row):
    """Return the terms of a plateau, a dict; None if the excess never passes LEVEL, or so soon that
    nothing can be fitted.

    delay, first, doubling: steps, an excess, steps, from the fit with a knee; rest: steps from
    LEVEL to the end of the plateau; r2, r2_power: of this fit, which has three numbers, and of a
    power law of the step, with two"""
    excess, steps = np.array(row["excess"]), np.array(row["steps"], float)
    last = int(np.argmax(excess >= LEVEL))  # 0 if it never is
    if last < 6:
        return None
    excess, steps = excess[1 : last + 1], steps[1 : last + 1]
    knee, intercept, slope, error = knee_fit(steps, excess)
    logs = np.log(np.maximum(excess, FLOOR))
    total = ((logs - logs.mean()) ** 2).sum()
    return dict(
        delay=knee if knee > steps[0] else 0,
        first=math.exp(intercept),
        doubling=math.log(2) / slope,
        rest=math.inf if row["plateau"] is None else row["plateau"] - steps[-1],
        r2=1 - error / total,
        r2_power=1 - straight_line(np.log(steps), logs)[1] / total,
    )


def forecast(row, until):
    """Return the step at which the excess would be 1 if it went on as in the steps up to `until`;
    None if these are fewer than five, or the excess does not grow in them."""
    steps = np.array([step for step in row["steps"][1:] if step <= until], float)
    if len(steps) < 5:
        return None
    knee, intercept, slope, _ = knee_fit(steps, np.array(row["excess"][1 : len(steps) + 1]))
    return knee - intercept / slope if slope > 0 else None


def forecasts(rows, row):
    """Return {what is known: the forecast of the step at which x_1 is learned, or None}."""
    others = [r["plateau"] for r in select(rows, row["point"], row["setting"]) if r is not row]
    level = next((s for s, e in zip(row["steps"], row["excess"], strict=True) if e >= 0.01), 0)
    return {
        "its first third": forecast(row, row["plateau"] / 3),
        "until its excess is 0.01": forecast(row, level),
        "the other seeds": statistics.median(others) if others else None,
    }


# ---- tables


def select(rows, point, setting):
    """Return the rows of a point whose plateau ended, and of one setting."""
    rows = [row for row in rows if (row["point"], row["setting"]) == (point, setting)]
    return [row for row in rows if row["plateau"] is not None]


def held_at_first(rows):
    """Return how well x_0 can be read from 1b at step 10, of each row whose head is not in layer 0,
    where 1b can hold nothing but its own symbol."""
    return [row["held"][1] for row in rows if row["head"][:2] != "L0"]


def terms_table(rows, keys):
    """Return a row for each of {label: (point, setting)}, with medians over the runs in which x_1
    is learned; held: over all of them, at step 10."""
    lines = []
    for label, key in keys.items():
        runs = [row for row in rows if (row["point"], row["setting"]) == key]
        group = select(rows, *key)
        fits = [fit for fit in map(terms, group) if fit]
        line = [label, f"{len(group)} of {len(runs)}", *[""] * 8]
        if held := held_at_first(runs):
            line[2] = f"{statistics.median(held):.2f}"
        if group:
            line[3] = f"{statistics.median(row['plateau'] for row in group):.0f}"
        if fits:
            median = {name: statistics.median(fit[name] for fit in fits) for name in fits[0]}
            line[4:8] = (f"{median[name]:.0f}" for name in ("delay", "first", "doubling", "rest"))
            line[5] = f"{median['first']:.1e}"
            line[8:] = (f"{median[name]:.2f}" for name in ("r2", "r2_power"))
        lines += [line] if runs else []
    head = ["", "learned", "x_0 in 1b, R²", "plateau", "delay", "first excess", "doubling", "rest"]
    return markdown([*head, "R²", "R² of a power law"], *lines)


def points_table(rows, setting):
    """Return terms_table of all points of a setting."""
    return terms_table(rows, {point: (point, setting) for point in (*POINTS, *MAIN, *TRANSPLANTS)})


def moments_table(rows, point="base"):
    """Return what the model holds, and the gradients of the head, at step 10, at the knee and when
    the excess passes LEVEL: medians over the runs of each setting."""
    names = {
        "average of the candidates": "average",
        "1b holds x_0, R²": "held",
        "gradient of W_Q, W_K": "gradient_qk",
        "gradient of W_V": "gradient_v",
    }
    lines = []
    for setting in SETTINGS:
        fits = [(row, terms(row)) for row in select(rows, point, setting)]
        fits = [(row, fit) for row, fit in fits if fit]
        group = [row for row, _ in fits]
        steps = {
            "step 10": [10 for _ in group],
            "the knee": [fit["delay"] or 10 for _, fit in fits],
            "the end of growth": [row["plateau"] - fit["rest"] for row, fit in fits],
        }
        for moment, at in steps.items() if group else ():
            line = [setting, moment, f"{statistics.median(at):.0f}"]
            for name in names.values():
                values = [row[name][round(step / 10)] for row, step in zip(group, at, strict=True)]
                line.append(f"{statistics.median(values):.2g}")
            lines.append(line)
    return markdown(["", "at", "step", *names], *lines)


def forecast_table(rows):
    """Return the median error of the forecasts of the length of the plateau, in percent."""
    lines = []
    for setting in SETTINGS:
        errors = {}
        for row in (row for point in POINTS for row in select(rows, point, setting)):
            for known, step in forecasts(rows, row).items():
                error = math.inf if step is None else abs(step / row["plateau"] - 1)
                errors.setdefault(known, []).append(error)
        texts = [f"{100 * statistics.median(values):.0f}%" for values in errors.values()]
        lines.append([setting, len(next(iter(errors.values()))), *texts])
    return markdown(["", "runs", *errors], *lines)


# ---- figures


def draw_growth(rows, path):
    """Draw the loss of x_1 and, below, the excess of q -> 1b on a log axis, over training steps."""
    import matplotlib.pyplot as plt

    size = dict(figsize=(8.5, 5), sharex="col", sharey="row", layout="constrained")
    figure, axes = plt.subplots(2, len(SETTINGS), **size)
    colors = {"base": ("tab:blue", "0.02"), "first W_Q, W_K 0.1": ("tab:orange", "0.1")}
    for (above, below), setting in zip(axes.T, SETTINGS, strict=True):
        for point, (color, std) in colors.items():
            group = select(rows, point, setting)
            for row in group:
                steps = np.array(row["steps"])
                style = dict(color=color, lw=0.9, alpha=0.8)
                above.plot(steps, row["loss"], **style)
                below.plot(steps, np.maximum(row["excess"], FLOOR), **style)
            label = f"first $W_Q$, $W_K$ of std {std}: {len(group)} seeds"
            above.plot([], [], color=color, label=label)
        label = "0.75: average of the candidates; 0.1: end of growth"
        above.axhline(0.75, color="gray", ls=":", lw=0.9, label=label)
        below.axhline(LEVEL, color="gray", ls=":", lw=0.9)
        above.set_title(setting, fontsize="medium")
        below.set(yscale="log", xlabel="training step")
    axes[0, 0].set(ylabel="MSE of $x_1$", ylim=(0, 1.1))
    axes[1, 0].set_ylabel("attention to own 1b\nminus to others'")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    title = (
        "While the loss of $x_1$ hardly falls (above), the attention that it needs grows (below)"
    )
    figure.suptitle(title)
    analyze.save_figure(figure, path)


def draw_paths(run, path):
    """Draw the losses of a run with checkpoints and, below, the excess of the paths of its circuit
    on a log axis. A path has the colour of the symbol that it brings; those within a pair, which
    bring a pair's two symbols together, are gray."""
    import matplotlib.pyplot as plt

    # measure
    flags, files, losses = train.read_flags(run), train.checkpoints_of(run), []
    task, batch = flags.problem, train.sequences(flags, held_out("emergence", 256))
    excesses = {circuit_path: [] for circuit_path in paths_in(read_report(run), task)}
    for file in progress(f"{run}: checkpoint", files):
        patched = PatchedModel(train.load(run, f"ckpt/{file.name}")[0], flags, batch)
        losses.append(patched.baseline.mean(0).tolist())
        attention = patched.attention()
        for p, curve in excesses.items():
            excess = preference(attention[p[:2]][None], *p[2:], task, batch.positions)
            curve.append(excess.mean().item())

    # draw
    size = dict(figsize=(7, 7.5), sharex=True, layout="constrained")
    figure, (above, below) = plt.subplots(2, 1, **size)
    steps, last = [int(file.stem) for file in files], task.symbols - 1
    for name, curve in zip(flags.target_names, zip(*losses, strict=True), strict=True):
        above.plot(steps, curve, color=analyze.symbol_color(int(name[2:]), last), label=f"${name}$")
    for p, curve in excesses.items():
        source, target = (task.roles[place.role] for place in (p.reader, p.read))
        color = (
            analyze.symbol_color(target.symbol, last) if source.block != target.block else "gray"
        )
        style = dict(color=color, lw=1.8, ls="-" if source.name == "q" else "--")
        below.plot(steps, np.maximum(curve, FLOOR), label=path_name(p, task), **style)
    above.set(ylabel="MSE on 256 held-out sequences", ylim=(0, 1.1), title=flags.title)
    below.set(
        yscale="log", xlabel="training step", ylabel="excess: attention to own target - others'"
    )
    below.set_title("solid: what the query reads; gray: reads within a pair", fontsize="medium")
    above.legend()
    figure.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    analyze.save_figure(figure, path)


def main():
    with program("python -m extras.studies.waiting"):
        p = command_line("python -m extras.studies.waiting", __doc__)
        p.add_argument("folder", type=Path, help="where growth.jsonl is, or will be")
        text = "train this many seeds of each point, but for those that are there (default: none)"
        p.add_argument("--seeds", type=int, default=0, help=text)
        p.add_argument("--run", type=Path, help="draw the paths of this run, which has checkpoints")
        p.add_argument("--out", type=Path, default=Path("out"), help="for figures (default: out)")
        args = p.parse_args()
        if args.run and not (train.checkpoints_of(args.run) and read_report(args.run)):
            needs = "needs checkpoints and a circuit: --save-every 10, then ablate.py"
            raise UserError(f"--run {args.run} {needs}")
        if args.seeds:
            grow(args.folder, args.seeds)
        rows = load_rows(args.folder)
        if not rows:
            raise UserError(f"{args.folder} holds no growth.jsonl: add --seeds 3 to train its runs")
        for setting in SETTINGS:
            print(f"{setting}\n\n{points_table(rows, setting)}\n")
        print(f"{moments_table(rows)}\n\n{forecast_table(rows)}")
        args.out.mkdir(parents=True, exist_ok=True)
        draw_growth(rows, args.out / "growth.png")
        if args.run:
            draw_paths(args.run, args.out / "paths_beneath.png")


if __name__ == "__main__":
    main()
