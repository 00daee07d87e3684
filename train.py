"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

python train.py --layers 12 --heads 1 --D 3           # transformers A, B, C (Section 8.1)
python train.py --layers 12 --heads 1 --D 3 --resume  # go on after a stop, bitwise as without it
python train.py --layers 3 --heads 8 --D 5 --steps 1500 --lr 2e-3 --decay 0.3 --target 0
python train.py --layers 4 --heads 2 --task conditional     # the last step depends on two symbols
"""

import ctypes
import math
import shlex
import signal
import sys
import time

from parts import config, program
from parts.circuit import frozen_heads
from parts.config import parse
from parts.theory import frozen_paths

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from data import batch_index, held_out, partial_losses


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

    def __init__(self, matrices, lr, weight_decay, dtype, momentum=0.95):
        shapes = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
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


def adamw(parameters, decay, flags):
    """Of the parameters those named again decay: not biases, LayerNorms or gains."""
    groups = [
        dict(params=[one for one in parameters if one in decay], weight_decay=flags.weight_decay),
        dict(params=[one for one in parameters if one not in decay], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, flags.beta2), fused=True)


def linear_weights(module):
    """A dict whose keys are the weights of its linear layers, those that are shared once."""
    linear = [one for one in module.modules() if isinstance(one, torch.nn.Linear)]
    return dict.fromkeys(one.weight for one in linear)


def adamw_alone(model, flags):
    return [adamw([*model.parameters()], linear_weights(model), flags)]


def muon_and_adamw(model, flags):
    """Muon for the matrices inside the layers, AdamW for the rest."""
    inside, dtype = linear_weights(model.blocks), getattr(torch, flags.dtype)
    rest = [one for one in model.parameters() if one not in inside]
    muon = Muon(inside, flags.lr, flags.weight_decay, dtype)
    return [adamw(rest, linear_weights(model), flags), muon]


OPTIMIZERS = {"muon": muon_and_adamw, "adamw": adamw_alone}  # (model, flags) -> [optimizer, ...]


def schedule(step, flags):
    """The share of the learning rate at a step: linear warm-up, constant, then linear to 0 over the
    last `decay` fraction of the steps."""
    rise = (step + 1) / flags.warmup if flags.warmup else 1
    fall = (flags.steps - step) / (flags.decay * flags.steps) if flags.decay else 1
    return min(rise, 1, fall)


# ---- what training changes


class State:
    """All that a step changes, and state.pt keeps: a running mean of yours goes here, as a number,
    tensor, list, dict, or what has a state_dict."""

    def __init__(self, flags, begin=config.untrained):
        torch.manual_seed(flags.seed)
        self.model = begin(flags).to(flags.device)
        mean = get_ema_multi_avg_fn(flags.ema)
        self.averaged = AveragedModel(self.model, multi_avg_fn=mean)  # what is evaluated and kept
        self.optimizers = OPTIMIZERS[flags.optimizer](self.model, flags)
        self.step, self.seconds = 0, 0.0
        self.train_loss = torch.zeros(2, device=flags.device)  # sum, number since the last row
        self.rows = []  # of log.jsonl
        for group in self.groups():
            group["initial_lr"] = group["lr"]

    def groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self):
        kept = dict(threads=torch.get_num_threads())
        for name, own in vars(self).items():
            kept[name] = own.state_dict() if hasattr(own, "state_dict") else own
        return kept | dict(optimizers=[optimizer.state_dict() for optimizer in self.optimizers])

    def load_state_dict(self, saved):
        torch.set_num_threads(saved.pop("threads"))  # other sums have other last bits
        for optimizer, own in zip(self.optimizers, saved.pop("optimizers"), strict=True):
            optimizer.load_state_dict(own)
        for name, own in saved.items():
            if hasattr(getattr(self, name), "load_state_dict"):
                getattr(self, name).load_state_dict(own)
            else:
                setattr(self, name, own)


# ---- training


def parse_flags(arguments=None):
    """The Flags of a run from the command line; a bad one ends the program."""
    flags = parse(arguments, __doc__)
    frozen_paths(flags)  # refuses what it cannot hold
    return flags


def predict(model, flags, index):
    """Predictions and targets for the examples `index`."""
    batch = config.sequences(flags, index.to(flags.device))
    with config.precision(flags):
        held = frozen_heads(frozen_paths(flags), flags.problem, batch.positions)
        return model(batch.inputs, held), batch.targets


@torch.no_grad()
def evaluate(model, flags, split="validation", n=1024):
    """The partial losses, a list, on n sequences that training never sees."""
    losses = []
    for index in held_out(split, n, flags.device).split(256):
        losses.append(partial_losses(*predict(model, flags, index), flags.K))
    return torch.cat(losses).mean(0).tolist()


def log_row(flags, state):
    """One evaluation, as it goes into log.jsonl."""
    step, model = state.step, state.averaged.module
    losses = evaluate(model, flags)
    row = dict(
        step=step,
        seconds=round(state.seconds, 2),
        lr=flags.lr * schedule(step, flags),
        train=(state.train_loss[0] / state.train_loss[1]).item() if step else None,
        val=sum(losses) / len(losses),
        **dict(zip(flags.target_names, losses, strict=True)),
    )

    # few sequences make most of so small an error, and the lowest of many is biased
    if step == flags.steps or row["val"] < flags.target:
        losses = evaluate(model, flags, "confirmation", 8192)
        row["confirmed"] = sum(losses) / len(losses)
    return row


def train(flags, state, stopped=()):
    """Train from `state` to the target or the last step. True when it has ended, False when
    `stopped` fills up first. FloatingPointError when a loss is no longer finite; state.pt then
    keeps the last time it was."""
    run, model, averaged = flags.out, state.model, state.averaged.module
    compiled = torch.compile(model) if flags.compile else model
    began = time.monotonic() - state.seconds
    shown = state.seconds, state.step  # when the last line was printed

    def save_state():
        state.seconds = time.monotonic() - began
        config.write_tensors(run / "state.pt", state.state_dict())

    while True:  # the top of the loop is the state that is saved: after `step` steps
        step = state.step
        if flags.save_every and step % flags.save_every == 0:
            (run / "ckpt").mkdir(exist_ok=True)
            config.write_tensors(run / f"ckpt/{step:06d}.pt", averaged.state_dict())

        # evaluate, save, and end when the target is met twice or the steps are done
        if step % flags.eval_every == 0 or step == flags.steps:
            state.seconds = time.monotonic() - began
            row = log_row(flags, state)
            if not math.isfinite(row["val"] + (row["train"] or 0)):
                what = f"the loss is no longer finite at step {step}"
                again = "start again with a lower --lr or --clip and another --out"
                raise FloatingPointError(f"{what}: {again}; {run} keeps the last good state")
            save_state()  # its rows end before this one: after a kill it is evaluated again
            state.rows.append(row)
            config.write_rows(run / "log.jsonl", state.rows)
            print_row(row, flags, (step - shown[1]) / max(state.seconds - shown[0], 1e-9))
            shown = state.seconds, step
            if step == flags.steps or row.get("confirmed", math.inf) < flags.target:
                config.write_tensors(run / "model.pt", averaged.state_dict())
                draw_curves(run)
                return True
            state.train_loss.zero_()

        # an evaluation has just saved; what blew up never is
        if stopped:
            if step % flags.eval_every and state.train_loss.isfinite().all():
                save_state()
            return False

        # one step; what you may draw in it is the same after a stop
        torch.manual_seed(hash((flags.seed, step)))
        for group in state.groups():
            group["lr"] = group["initial_lr"] * schedule(step, flags)
        index = batch_index(flags.seed, step, flags.batch, flags.examples)
        predictions, targets = predict(compiled, flags, index)
        loss = partial_losses(predictions, targets, flags.K).mean()
        loss.backward()
        if flags.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state.averaged.update_parameters(model)
        state.train_loss += torch.stack([loss.detach(), torch.ones_like(loss)])
        state.step += 1


def print_row(row, flags, rate):
    """The line of an evaluation; rate: steps per second since the one before."""
    left = f"{(flags.steps - row['step']) / rate / 60:.1f} min" if rate else "?"
    symbols = "  ".join(f"{name} {row[name]:.3f}" for name in flags.target_names)
    print(
        f"step {row['step']:5d}/{flags.steps} {row['step'] / flags.steps:4.0%}  "
        f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  {symbols}  "
        f"{rate:5.2f} steps/s  {left} left at most",
        flush=True,
    )


# ---- the end of a run


def draw_curves(run):
    """curves.png: training and validation loss, and the partial losses with the step where each
    is learned, beside the plateaus of the task."""
    import matplotlib.pyplot as plt

    flags, rows = config.read_flags(run), config.read_log(run)
    steps, validation = [row["step"] for row in rows], [row["val"] for row in rows]
    figure, (whole, partial) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")

    # left: all symbols together
    whole.plot(steps[1:], [row["train"] for row in rows[1:]], color="tab:gray", label="training")
    whole.plot(steps, validation, color="black", label="validation, 1024 sequences")
    if flags.target:
        label = f"target {flags.target:g}"
        whole.axhline(flags.target, color="tab:green", ls="--", lw=1, label=label)
    shape = f"{flags.layers} layers x {flags.heads} head{'s' * (flags.heads > 1)}"
    problem = f"{flags.problem.title}, seed {flags.seed}"
    title = f"{shape}, {problem}: validation MSE {validation[-1]:.4f} at step {steps[-1]}"
    whole.set_title(title, fontsize=11)
    whole.set(yscale="log", ylim=(min([*validation, flags.target or 1]) / 2, 1.5))
    whole.set(xlabel="training step", ylabel="mean squared error")
    whole.legend(fontsize="small", loc="lower left")

    # right: each symbol alone
    level = flags.problem.learned
    for name, crossing in config.crossings(rows, flags).items():
        color, label = config.symbol_color(int(name[2:]), flags.problem.symbols - 1), f"${name}$"
        if crossing is not None:
            partial.plot(crossing, level, "o", color=color)
            label += f", below {level:.3g} at step {crossing:.0f}"
        partial.plot(steps, [row[name] for row in rows], color=color, label=label)
    partial.set_title("each symbol alone", fontsize=11)
    partial.set(xlabel="training step", ylabel="validation MSE", ylim=(0, 1.2))
    look = dict(fontsize="small", ncols=3, handlelength=1, columnspacing=1, frameon=False)
    figure.legend(*partial.get_legend_handles_labels(), loc="outside lower right", **look)

    # what the levels mean, above a line if it is the highest, else below: curves end lower
    for level, meaning in flags.problem.plateaus:
        for axes in (whole, partial):
            axes.axhline(level, color="tab:red", ls=":", lw=1)
        style = dict(color="tab:red", fontsize="small", ha="right", zorder=1)
        partial.text(steps[-1], level, f"{level:.3g}: {meaning}", va="bottom", **style)
    config.save_figure(figure, run / "curves.png")


def summary(run):
    """The end of a run in lines of "name: value", easy to grep."""
    flags, rows = config.read_flags(run), config.read_log(run)
    last = rows[-1]
    lines = ["---", f"run: {run}"]
    if flags.target:
        solved = max(last["val"], last.get("confirmed", math.inf)) < flags.target
        lines.append(f"solved: {solved}")
    lines += [f"{name}: {last[name]:.5g}" for name in last if name not in ("lr", "train")]
    for name, step in config.crossings(rows, flags).items():
        when = "never" if step is None else round(step)
        lines.append(f"{name}_below_{flags.problem.learned:.3g}_at_step: {when}")
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
    `stopped` filled up first. UserError, FloatingPointError or OSError if it cannot be."""
    run, file = flags.out, flags.out / "state.pt"
    run.mkdir(parents=True, exist_ok=True)
    with config.alone_in(run):
        state = State(flags, config.build if file.exists() else config.untrained)
        config.open_run(flags)
        if (run / "model.pt").exists():
            return True
        if file.exists():
            state.load_state_dict(config.read_tensors(file, flags.device))
            print(f"resumed {run} at step {state.step}")
        return train(flags, state, stopped)


def main():
    stopped = []
    with program("train.py"):
        flags = parse_flags()
        keep_freed_memory()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.append(number))
        if run_once(flags, stopped):
            print(summary(flags.out))
            return
        again = shlex.join(argument for argument in sys.argv[1:] if argument != "--resume")
        print(f"stopped and saved; to go on: python train.py {again} --resume")
        sys.exit(128 + stopped[0])


if __name__ == "__main__":
    main()
