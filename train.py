"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

python train.py --layers 12 --heads 1 --D 3           # transformers A, B, C (Section 8.1)
python train.py --layers 12 --heads 1 --D 3 --resume  # go on after a stop, bitwise as without it
python train.py --layers 3 --heads 8 --D 5 --steps 1500 --lr 2e-3 --decay 0.3 --target 0
python train.py --layers 4 --heads 2 --task conditional     # the last step depends on two symbols
"""

import ctypes
import json
import math
import shlex
import signal
import sys
import time

from parts import runs
from parts.circuit import hold
from parts.flags import DTYPES, asked, parse, problem_name, run_directory
from parts.flow import held_paths

import torch

from data import ENCODINGS, TASKS, batch_index, held_out, partial_losses, plateaus


# ---- optimizers


def orthogonalize(x, iterations=5):
    """(B, rows, columns) -> nearly the closest matrices whose singular values are all 1, by
    Newton-Schulz iterations."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with every matrix of the update made orthogonal (Jordan et al., 2024), and of the
    size of an update of AdamW (Liu et al., 2025). The same as torch.optim.Muon (tested), which goes
    matrix by matrix and always in bfloat16, slow on most laptops; here all matrices of one shape go
    through the same products, in the dtype given."""

    def __init__(self, matrices, weight_decay, dtype, momentum=0.95):
        shapes = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        defaults = dict(lr=0.0, weight_decay=weight_decay, momentum=momentum)
        super().__init__([dict(params=group) for group in shapes.values()], defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            # Nesterov momentum of all matrices of one shape
            gradient = torch.stack([matrix.grad for matrix in group["params"]])
            state = self.state[group["params"][0]]
            if not state:
                state["average"] = torch.zeros_like(gradient)
            average = state["average"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(average, group["momentum"]).to(self.dtype)

            # orthogonal, as large as Adam's updates, whose root mean square is near 0.2
            update = orthogonalize(update).float()
            size = group["lr"] * 0.2 * math.sqrt(max(gradient.shape[-2:]))
            for matrix, change in zip(group["params"], update, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=size)


def adamw(parameters, flags):
    """Biases and LayerNorms do not decay."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=flags["weight_decay"]),
        dict(params=vectors, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, betas=(0.9, flags["beta2"]), fused=True)


def adamw_alone(model, flags):
    return [adamw([*model.parameters()], flags)]


def muon_and_adamw(model, flags):
    """Muon for the matrices inside the layers, AdamW for the rest."""
    inside, rest = [], []
    for name, parameter in model.named_parameters():
        ours = name.startswith("blocks") and parameter.ndim > 1
        (inside if ours else rest).append(parameter)
    return [adamw(rest, flags), Muon(inside, flags["weight_decay"], DTYPES[flags["dtype"]])]


OPTIMIZERS = {"muon": muon_and_adamw, "adamw": adamw_alone}  # (model, flags) -> [optimizer, ...]


def optimizers(model, flags):
    """The optimizers that together train all parameters."""
    return OPTIMIZERS[flags["optimizer"]](model, flags)


def learning_rate(step, flags):
    """Linear warm-up, constant, then linear to 0 over the last `decay` fraction of the steps."""
    rise = (step + 1) / flags["warmup"] if flags["warmup"] else 1
    fall = (flags["steps"] - step) / (flags["decay"] * flags["steps"]) if flags["decay"] else 1
    return flags["lr"] * min(rise, 1, fall)


# ---- training


def parse_flags(arguments=None):
    """The flags of a run as a dict, from the command line; a bad one ends the program."""
    choices = {"task": TASKS, "optimizer": OPTIMIZERS, "rotary": ENCODINGS, "dtype": DTYPES}
    return parse(arguments, __doc__, choices)


def compile_model(model, flags):
    """The model, with --compile compiled; ValueError if this machine cannot: a CPU takes a C++
    compiler."""
    if not flags["compile"]:
        return model
    compiled = torch.compile(model)
    try:
        predict(compiled, flags, batch_index(flags["seed"], 0, flags["batch"], flags["examples"]))
    except RuntimeError as error:
        what = f"--compile does not work here ({type(error).__name__})"
        raise ValueError(f"{what}: install a compiler, or leave it out") from None
    return compiled


def predict(model, flags, index):
    """Predictions and targets for the examples `index`."""
    batch = runs.sequences(flags, index.to(flags["device"]))
    held = held_paths(flags) if flags["circuit"] else []
    with runs.precision(flags):
        return model(batch.inputs, hold(held, runs.task_of(flags), batch.positions)), batch.targets


@torch.no_grad()
def evaluate(model, flags, split="validation", n=1024):
    """The partial losses, a list, on n sequences that training never sees; with --mixture every
    query is asked for each of the symbols in turn."""
    turns, of_symbols = [flags], []
    if flags["mixture"]:
        turns = [flags | dict(targets=[k]) for k in asked(flags)]
    for turn in turns:
        losses = []
        for index in held_out(split, n, flags["device"]).split(256):
            losses.append(partial_losses(*predict(model, turn, index), flags["K"]))
        of_symbols += torch.cat(losses).mean(0).tolist()
    return of_symbols


def asked_symbols(flags):
    """The names of the targets, x_1, x_2, ..., of one query."""
    return [f"x_{k}" for k in asked(flags)]


def log_row(model, flags, step, seconds, train_loss):
    """One evaluation, as it goes into log.jsonl. FloatingPointError if a loss is not finite."""
    losses = evaluate(model, flags)
    row = dict(
        step=step,
        seconds=round(seconds, 2),
        lr=learning_rate(step, flags),
        train=(train_loss[0] / train_loss[1]).item() if step else None,
        val=sum(losses) / len(losses),
        **dict(zip(asked_symbols(flags), losses, strict=True)),
    )
    if not math.isfinite(row["val"] + (row["train"] or 0)):
        what = f"the loss is no longer finite at step {step}"
        again = "start again with a lower --lr or --clip and another --out"
        raise FloatingPointError(f"{what}: {again}; {flags['out']} keeps the last good state")

    # few sequences make most of so small an error, and the lowest of many is biased
    if step == flags["steps"] or row["val"] < flags["target"]:
        losses = evaluate(model, flags, "confirmation", 8192)
        row["confirmed"] = sum(losses) / len(losses)
    return row


def train(flags, state=None, stopped=()):
    """Train the run `flags` from the state of an earlier stop (None = from the start) to the target
    or the last step. True when it has ended, False when `stopped` fills up first.

    FloatingPointError when a loss is no longer finite; state.pt then keeps the last time it was."""
    # the model, its optimizers, and where they stand
    run, every, steps = flags["out"], flags["eval_every"], flags["steps"]
    torch.manual_seed(flags["seed"])
    model = (runs.build(flags) if state else runs.untrained(flags)).to(flags["device"])
    compiled = compile_model(model, flags)
    trained_by, rows, step = optimizers(model, flags), [], 0
    train_loss = torch.zeros(2, device=flags["device"])  # sum, number since the last evaluation
    started = time.time()
    if state:
        rows = restore(state, model, trained_by, flags)
        step, train_loss = state["step"], state["train_loss"].flatten()
        started -= state["seconds"]
    since = time.time(), step

    def save_state():
        now = dict(
            model=model.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in trained_by],
            step=step,
            rows=len(rows),
            train_loss=train_loss,
            seconds=time.time() - started,
        )
        runs.write_tensors(run / "state.pt", now)

    while True:  # the top of the loop is the state that is saved: after `step` steps
        if flags["save_every"] and step % flags["save_every"] == 0:
            (run / "ckpt").mkdir(exist_ok=True)
            runs.write_tensors(run / f"ckpt/{step:06d}.pt", model.state_dict())

        # evaluate, save, and end when the target is met twice or the steps are done
        if step % every == 0 or step == steps:
            row = log_row(compiled, flags, step, time.time() - started, train_loss)
            save_state()
            rows.append(row)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            runs.write_text(run / "log.jsonl", lines)
            print_row(row, steps, (step - since[1]) / (time.time() - since[0]))
            since = time.time(), step
            if step == steps or row.get("confirmed", math.inf) < flags["target"]:
                draw_curves(run)
                runs.write_tensors(run / "model.pt", model.state_dict())
                return True
            train_loss.zero_()

        # an evaluation has just saved; what blew up never is
        if stopped:
            if step % every and train_loss.isfinite().all():
                save_state()
            return False

        # one step
        for group in (group for optimizer in trained_by for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, flags)
        index = batch_index(flags["seed"], step, flags["batch"], flags["examples"])
        predictions, targets = predict(compiled, flags, index)
        loss = partial_losses(predictions, targets, flags["K"]).mean()
        loss.backward()
        if flags["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), flags["clip"])
        for optimizer in trained_by:
            optimizer.step()
            optimizer.zero_grad()
        train_loss += torch.stack([loss.detach(), torch.ones_like(loss)])
        step += 1


def restore(state, model, trained_by, flags):
    """Put model and optimizers where they stood. The rows of the log until then; ValueError if some
    are missing or the state is of another run."""
    try:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(trained_by, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            for parameter, own in optimizer.state.items():  # fused AdamW would not look
                if own.get("exp_avg", parameter).shape != parameter.shape:
                    raise ValueError("an average of another parameter")
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise runs.unusable(flags["out"] / "state.pt", "is of another run") from None
    rows = runs.rows_before(flags["out"], state)
    print(f"resumed {flags['out']} at step {state['step']}")
    return rows


def print_row(row, steps, rate):
    """The line of an evaluation; rate: steps per second since the one before."""
    left = f"{(steps - row['step']) / rate / 60:.1f} min" if rate else "?"
    symbols = "  ".join(f"{name} {loss:.3f}" for name, loss in row.items() if name[:2] == "x_")
    print(
        f"step {row['step']:5d}/{steps} {row['step'] / steps:4.0%}  "
        f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  {symbols}  "
        f"{rate:5.2f} steps/s  {left} left at most",
        flush=True,
    )


# ---- the end of a run


def draw_curves(run):
    """curves.png: training and validation loss, and the partial losses with the step where each
    passes 0.5."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    config, rows = runs.read_config(run), runs.read_log(run)
    steps = [row["step"] for row in rows]
    figure, (whole, partial) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")

    # left: all symbols together
    whole.plot(steps[1:], [row["train"] for row in rows[1:]], color="tab:gray", label="training")
    validation = [row["val"] for row in rows]
    whole.plot(steps, validation, color="black", label="validation, 1024 sequences")
    if config["target"]:
        label = f"target {config['target']:g}"
        whole.axhline(config["target"], color="tab:green", ls="--", lw=1, label=label)
    shape = f"{config['layers']} layers x {config['heads']} head{'s' * (config['heads'] > 1)}"
    error = rows[-1].get("confirmed", rows[-1]["val"])
    problem = f"{problem_name(config)}, seed {config['seed']}"
    title = f"{shape}, {problem}: MSE {error:.4f} at step {steps[-1]}"
    lowest = min([*validation, config["target"] or 1])
    whole.set(yscale="log", ylabel="mean squared error", ylim=(lowest / 2, None))  # for the legend
    whole.set_title(title, fontsize=11)

    # right: each symbol alone
    for name, crossing in runs.crossings(rows).items():
        color, label = runs.symbol_color(int(name[2:]), config["D"]), f"${name}$"
        if crossing is not None:
            partial.plot(crossing, 0.5, "o", color=color)
            label += f", below 0.5 at step {crossing:.0f}"
        partial.plot(steps, [row[name] for row in rows], color=color, label=label)
    partial.set(ylim=(0, 1.2), ylabel="validation MSE")
    partial.set_title("each symbol alone", fontsize=11)

    # what the levels mean; the legends where no curves are
    for axes in (whole, partial):
        for level, meaning in plateaus(runs.task_of(config)):
            axes.axhline(level, color="tab:red", ls=":", lw=1)
            near = axes is whole and 0.9 < level < 1  # a log scale has no room for its text
            axes.annotate(
                "" if near else f"{level:.3g}: {meaning}",
                (0.65 if 0.9 < level < 1 else 1, level),  # beside what is said of 1
                (-4, 2 if level == 1 else -3),  # below a plateau: curves stay above it
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="bottom" if level == 1 else "top",
                fontsize="small",
                color="tab:red",
                zorder=1,  # behind the curves
            )
        axes.set(xlabel="training step")
    whole.legend(fontsize="small", loc="lower left")
    look = dict(fontsize="small", ncols=3, handlelength=1, columnspacing=1, frameon=False)
    figure.legend(*partial.get_legend_handles_labels(), loc="outside lower right", **look)
    runs.save_figure(figure, run / "curves.png")


def summary(run):
    """The end of a run in lines of "name: value", easy to grep."""
    config, rows = runs.read_config(run), runs.read_log(run)
    last = rows[-1]
    lines = ["---", f"run: {run}"]
    if config["target"]:
        solved = max(last["val"], last.get("confirmed", math.inf)) < config["target"]
        lines.append(f"solved: {solved}")
    lines += [f"{name}: {last[name]:.5g}" for name in last if name not in ("lr", "train")]
    for name, step in runs.crossings(rows).items():
        lines.append(f"{name}_below_0.5_at_step: {'never' if step is None else round(step)}")
    return "\n".join(lines)


# ---- the command line


def keep_freed_memory():
    """Let glibc keep what a step frees for the next: to hand it back costs thousands of page faults
    per step."""
    try:
        glibc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library
        return
    glibc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
    glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes


def run_once(flags, stopped=()):
    """Train the run in its directory, or go on with it. True when it has ended, False when
    `stopped` filled up first. ValueError, FloatingPointError or OSError if it cannot be."""
    run = flags["out"]
    if flags["init"] and not (run / "config.json").exists():
        runs.untrained(flags)  # an --init that cannot be is refused before anything is written
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot write to {run} ({error.strerror})"
        raise ValueError(f"{what}: choose another --out") from None
    runs.check_folder(run)
    with runs.alone_in(run):
        if not (run / "config.json").exists():
            runs.create_run(run, flags)
            return train(flags, None, stopped)
        runs.check_same_run(run, flags)
        if (run / "model.pt").exists():
            runs.check_log(run)
            return True
        return train(flags, runs.read_state(run, flags["device"]), stopped)


def main():
    flags, stopped = parse_flags(), []
    keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    flags["out"] = flags["out"] or run_directory(flags)
    try:
        if run_once(flags, stopped):
            print(summary(flags["out"]))
            return
    except (FloatingPointError, OSError, ValueError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    again = shlex.join(argument for argument in sys.argv[1:] if argument != "--resume")
    print(f"stopped and saved; to go on: python train.py {again} --resume")
    sys.exit(128 + stopped[0])


if __name__ == "__main__":
    main()
