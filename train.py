"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

python train.py --layers 12 --heads 1 --D 3           # transformers A, B, C (Section 8.1)
python train.py --layers 12 --heads 1 --D 3 --resume  # continue after a stop, to the same bits
python train.py --layers 3 --heads 8 --D 5 --steps 1500 --lr 2e-3 --decay 0.3 --target 0
python train.py --layers 4 --heads 2 --task conditional     # the last step depends on two symbols
"""

import ctypes
import math
import os
import shlex
import signal
import sys
import time


if __name__ == "__main__":  # before torch loads: waiting threads sleep soon and free their cores
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from parts import UserError, config, program
from parts.circuit import frozen_heads
from parts.theory import frozen_paths

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from data import batch_index, held_out, partial_losses


# ---- optimizers


def orthogonalize(x, iterations=5):
    """Bring all singular values of x (B, rows, columns) close to 1 by Newton-Schulz iterations."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update of every matrix is made orthogonal (Jordan et al., 2024), and as large
    as an update of AdamW (Liu et al., 2025). It equals torch.optim.Muon, but computes all matrices
    of one shape together, in the given dtype."""

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
            average = group.setdefault("average", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(average, group["momentum"]).to(self.dtype)

            # the root mean square of an update of Adam is near 0.2
            update = orthogonalize(update).float()
            size = group["lr"] * 0.2 * math.sqrt(max(gradient.shape[-2:]))
            for matrix, change in zip(group["params"], update, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=size)


def linear_weights(module):
    """Return {weight: None} of all linear layers, a shared weight once."""
    return {m.weight: None for m in module.modules() if isinstance(m, torch.nn.Linear)}


def adamw(parameters, decaying, flags):
    """Return AdamW in which only the parameters in `decaying` have weight decay."""
    groups = [
        dict(params=[p for p in parameters if p in decaying], weight_decay=flags.weight_decay),
        dict(params=[p for p in parameters if p not in decaying], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, flags.beta2), fused=True)


def adamw_alone(model, flags):
    return [adamw([*model.parameters()], linear_weights(model), flags)]


def muon_and_adamw(model, flags):
    """Return Muon for the matrices inside the layers and AdamW for all other parameters."""
    matrices = linear_weights(model.blocks)
    others = [parameter for parameter in model.parameters() if parameter not in matrices]
    muon = Muon(matrices, flags.lr, flags.weight_decay, getattr(torch, flags.dtype))
    return [adamw(others, linear_weights(model), flags), muon]


OPTIMIZERS = {"muon": muon_and_adamw, "adamw": adamw_alone}  # (model, flags) -> [optimizer, ...]


def schedule(step, flags):
    """Return the factor of the learning rate: linear warm-up, constant, then linear decay to 0."""
    warmup = (step + 1) / flags.warmup if flags.warmup else 1
    decay = (flags.steps - step) / (flags.decay * flags.steps) if flags.decay else 1
    return min(warmup, 1, decay)


# ---- state


class State:
    """Everything that a training step changes. state.pt keeps each attribute: add your own here (a
    number, a tensor, a list, a dict, or anything with a state_dict), and --resume restores it."""

    def __init__(self, flags, initial_model=config.untrained):
        torch.manual_seed(flags.seed)
        self.settings = flags.settings
        self.threads = torch.get_num_threads()  # sums over other threads differ in the last bits
        self.model = initial_model(flags).to(flags.device)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(flags.ema))
        self.optimizers = OPTIMIZERS[flags.optimizer](self.model, flags)
        self.step, self.seconds = 0, 0.0
        self.train_loss = torch.zeros(2, device=flags.device)  # sum, count since the last row
        self.rows = []  # of log.jsonl

    def state_dict(self):
        saved = {}
        for name, value in vars(self).items():
            saved[name] = value.state_dict() if hasattr(value, "state_dict") else value
        return saved | dict(optimizers=[optimizer.state_dict() for optimizer in self.optimizers])

    def load_state_dict(self, saved):
        for optimizer, value in zip(self.optimizers, saved.pop("optimizers"), strict=True):
            optimizer.load_state_dict(value)
        for name, value in saved.items():
            if hasattr(getattr(self, name), "load_state_dict"):
                getattr(self, name).load_state_dict(value)
            else:
                setattr(self, name, value)
        torch.set_num_threads(self.threads)


# ---- training


def predict(model, flags, index):
    """Return the predictions and the targets (B, N, symbols*K) of the examples `index` (B,)."""
    batch = config.sequences(flags, index.to(flags.device))
    with config.precision(flags):
        heads = frozen_heads(frozen_paths(flags), flags.problem, batch.positions)
        return model(batch.inputs, heads), batch.targets


@torch.no_grad()
def evaluate(model, flags, split="validation", n=1024):
    """Return the list of partial losses on n sequences that training never sees."""
    indices = held_out(split, n, flags.device).split(256)
    losses = [partial_losses(*predict(model, flags, index), flags.K) for index in indices]
    return torch.cat(losses).mean(0).tolist()


def evaluation(flags, state):
    """Evaluate the averaged model and return the row for log.jsonl."""
    losses = evaluate(state.averaged.module, flags)
    row = dict(
        step=state.step,
        seconds=round(state.seconds, 2),
        lr=flags.lr * schedule(state.step, flags),
        train=(state.train_loss[0] / state.train_loss[1]).item() if state.step else None,
        val=sum(losses) / len(losses),
        **dict(zip(flags.target_names, losses, strict=True)),
    )

    # the lowest of many validation losses is biased: more sequences confirm it
    if state.step == flags.steps or row["val"] < flags.target:
        losses = evaluate(state.averaged.module, flags, "confirmation", 8192)
        row["confirmed"] = sum(losses) / len(losses)
    return row


def train(flags, state, stopped=()):
    """Train from `state` to the end and return True, or return False once `stopped` is not empty.
    Raise FloatingPointError if a loss is not finite; state.pt then keeps the last good state."""
    run, model, averaged = flags.out, state.model, state.averaged.module
    compiled = torch.compile(model) if flags.compile else model
    start = time.monotonic() - state.seconds

    while True:  # here `step` steps are done: this is the state that is saved
        step, state.seconds = state.step, time.monotonic() - start
        if stopped:
            if state.train_loss.isfinite().all():
                config.write_tensors(run / "state.pt", state.state_dict())
            return False
        if flags.save_every and step % flags.save_every == 0:
            (run / "ckpt").mkdir(exist_ok=True)
            config.write_tensors(run / f"ckpt/{step:06d}.pt", averaged.state_dict())

        # evaluate and save; end when both losses are below the target, or after the last step
        if step % flags.eval_every == 0 or step == flags.steps:
            row = evaluation(flags, state)
            if not math.isfinite(row["val"] + (row["train"] or 0)):
                raise FloatingPointError(f"the loss is not finite at step {step}: lower --lr")
            config.write_tensors(run / "state.pt", state.state_dict())  # as before this row
            state.rows.append(row)
            config.write_rows(run / "log.jsonl", state.rows)
            print_row(flags, state.rows)
            if step == flags.steps or row.get("confirmed", math.inf) < flags.target:
                config.write_tensors(run / "model.pt", averaged.state_dict())
                draw_curves(run)
                return True
            state.train_loss.zero_()

        # take one step; the seed makes random numbers in it the same after --resume
        torch.manual_seed(hash((flags.seed, step)))
        index = batch_index(flags.seed, step, flags.batch, flags.examples)
        predictions, targets = predict(compiled, flags, index)
        loss = partial_losses(predictions, targets, flags.K).mean()
        loss.backward()
        if flags.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule(step, flags)
            optimizer.step()
            optimizer.zero_grad()
        state.averaged.update_parameters(model)
        state.train_loss += torch.stack([loss.detach(), torch.ones_like(loss)])
        state.step += 1


def print_row(flags, rows):
    """Print the last row, the speed since the row before, and the time left at this speed."""
    before, row = [*rows[:1], *rows][-2:]
    rate = (row["step"] - before["step"]) / max(row["seconds"] - before["seconds"], 0.01)
    left = f"{(flags.steps - row['step']) / rate / 60:.1f} min" if rate else "?"
    progress = f"step {row['step']:5d}/{flags.steps} {row['step'] / flags.steps:4.0%}"
    losses = f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  "
    losses += "  ".join(f"{name} {row[name]:.3f}" for name in flags.target_names)
    print(f"{progress}  {losses}  {rate:5.2f} steps/s  {left} left at most", flush=True)


# ---- the end of a run


def draw_curves(run):
    """Draw curves.png: the losses, the steps at which symbols were learned, and the plateaus."""
    import matplotlib.pyplot as plt

    flags, rows = config.read_flags(run), config.read_log(run)
    steps, validation = [row["step"] for row in rows], [row["val"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    figure.suptitle(f"{flags.title}: validation MSE {validation[-1]:.4f} at step {steps[-1]}")

    # left: all symbols together
    left.plot(steps[1:], [row["train"] for row in rows[1:]], color="tab:gray", label="training")
    left.plot(steps, validation, color="black", label="validation, 1024 sequences")
    if flags.target:
        left.axhline(flags.target, color="tab:green", ls="--", label=f"target {flags.target:g}")
    left.set(xlabel="training step", ylabel="mean squared error", yscale="log")
    left.legend(fontsize="small", loc="lower left")

    # right: each symbol alone
    for name, crossing in config.crossings(rows, flags).items():
        color, label = config.symbol_color(int(name[2:]), flags.problem.symbols - 1), f"${name}$"
        if crossing is not None:
            right.plot(crossing, flags.problem.learned, "o", color=color)
            label += f", below {flags.problem.learned:.3g} at step {crossing:.0f}"
        right.plot(steps, [row[name] for row in rows], color=color, label=label)
    right.set(xlabel="training step", ylabel="validation MSE of each symbol", ylim=(0, 1.2))
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)

    # both: the plateaus, and what a model on each of them does
    for level, meaning in flags.problem.plateaus:
        left.axhline(level, color="tab:red", ls=":")
        right.axhline(level, color="tab:red", ls=":")
        right.text(steps[-1], level, f"{level:.3g}: {meaning}", ha="right", va="bottom")
    config.save_figure(figure, run / "curves.png")


def summary(run):
    """Return the end of a run as lines of "name: value", easy to grep."""
    flags, rows = config.read_flags(run), config.read_log(run)
    last, lines = rows[-1], ["---", f"run: {run}"]
    if flags.target:
        lines.append(f"solved: {max(last['val'], last.get('confirmed', math.inf)) < flags.target}")
    lines += [f"{name}: {last[name]:.5g}" for name in last if name not in ("lr", "train")]
    for name, step in config.crossings(rows, flags).items():
        step = "never" if step is None else round(step)
        lines.append(f"{name}_below_{flags.problem.learned:.3g}_at_step: {step}")
    return "\n".join(lines)


# ---- the command line


def parse_flags(arguments=None):
    """Return the Flags of a run from the command line, or raise UserError."""
    flags = config.parse(arguments, __doc__)
    heads = 1 + max((path.head for path in frozen_paths(flags)), default=0)
    if flags.heads < heads:
        raise UserError(f"--circuit {flags.circuit} needs --heads {heads} or more")
    return flags


def keep_freed_memory():
    """Let glibc reuse freed memory: to return it costs each step thousands of page faults."""
    if sys.platform == "linux":
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
        glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes


def run_once(flags, stopped=()):
    """Train the run in its directory, or continue it; return and raise what `train` does."""
    run, file = flags.out, flags.out / "state.pt"
    state = State(flags, config.build if file.exists() else config.untrained)
    run.mkdir(parents=True, exist_ok=True)
    with config.alone_in(run):
        config.open_run(flags)
        if (run / "model.pt").exists():
            return True
        if file.exists():
            saved = config.read_tensors(file, flags.device)
            same_flags = saved["settings"].items() <= flags.settings.items()  # some may be new
            if saved.keys() != vars(state).keys() or not same_flags:
                raise UserError(f"{file} is of another run or other code: choose another --out")
            state.load_state_dict(saved)
            print(f"resumed {run} at step {state.step}")
        return train(flags, state, stopped)


def main():
    stopped = []
    with program("train.py"):
        flags = parse_flags()
        keep_freed_memory()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stopped.append(number))
        if not run_once(flags, stopped):
            command = shlex.join(word for word in sys.argv[1:] if word != "--resume")
            print(f"stopped and saved; to continue: python train.py {command} --resume")
            sys.exit(128 + stopped[0])
        print(summary(flags.out))


if __name__ == "__main__":
    main()
