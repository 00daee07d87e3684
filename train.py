"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

    python train.py --layers 12 --heads 1 --D 3           # the size of transformers A, B, C
    python train.py --layers 12 --heads 1 --D 3 --resume  # continue after a stop, to the same bits
    # with the paper's optimizer and GPT-2's initialisation, without averaging
    python train.py --layers 12 --heads 1 --D 3 --optimizer adamw --steps 3000 --qk-std 0.02 --ema 0

A run directory, out/L12_H1_D3_s0/ or the like, holds config.json (the flags), log.jsonl (one row
per evaluation), model.pt (the final weights, averaged as --ema says), state.pt (what --resume
needs) and ckpt/ (averaged weights while it trained). Later stages add circuit.json and figures;
load(run) gives them the model.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time

from data import command_line, make_task  # before torch, since it sets GOMP_SPINCOUNT
from model import Transformer, make_optimizers

import numpy
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


# ---- training; `flags` are those of parse_flags below


def run_once(flags):
    """Train a run in its directory, or continue it."""
    run, task = flags.out, task_of(flags)
    torch.manual_seed(flags.seed)
    model = build(flags).to(flags.device)
    if flags.init and not (run / "state.pt").exists():
        before, _, _ = load(flags.init)
        shapes = [(*m.heads, *(w.shape for w in m.parameters())) for m in (before, model)]
        if shapes[0] != shapes[1]:
            raise OSError(f"--init {flags.init} is a model of another shape")
        model.load_state_dict(before.state_dict())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(flags.ema)).eval()
    optimizers = make_optimizers(model, flags.optimizer, flags.lr, flags.beta2, flags.weight_decay)
    parts = model, averaged, *optimizers  # what state.pt keeps
    step, seconds, rows = 0, 0.0, []  # rows of the log
    recent = []  # the loss and the gradient's norm in each step since the last row

    open_run(flags)
    if (run / "model.pt").exists():
        print(f"{run} has finished before: nothing was done")
        return
    if (run / "state.pt").exists():
        state = read_file(run / "state.pt", device=flags.device)
        step, seconds, rows, recent = (state[key] for key in ("step", "seconds", "rows", "recent"))
        for part, saved in zip(parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        begun, now = vars(read_flags(run)), made_by(flags.device)
        other = ", ".join(name for name in now if now[name] != begun[name])
        print(f"resumed {run} at step {step}" + (other and f", with another {other} than before"))
    start = time.monotonic() - seconds

    while True:  # here `step` steps are done
        last = step == flags.steps
        lr = flags.lr * schedule(step, flags)

        if last or step % flags.eval_every == 0:
            # evaluate
            seconds = time.monotonic() - start
            loss, norm = torch.stack(recent).mean(0).tolist() if recent else (None, None)
            row = dict(
                step=step, seconds=round(seconds, 2), lr=lr, train=loss, grad_norm=norm,
                **evaluate(averaged.module, task, "validation", 1024, flags.device),
            )  # fmt: skip
            if not math.isfinite(row["val"]):  # state.pt stays the last good one
                raise FloatingPointError(f"the loss is not finite at step {step}: lower --lr?")

            # save the state without this row: --resume makes it again, to the same bits
            state = dict(step=step, seconds=seconds, rows=rows, recent=recent)
            state["parts"] = [part.state_dict() for part in parts]
            write_file(run / "state.pt", state)

            # a single low evaluation may be luck: other sequences must confirm it
            if last or row["val"] < flags.stop_below:
                again = evaluate(averaged.module, task, "confirmation", 8192, flags.device)
                row["confirmed"] = again["val"]
                last = last or row["confirmed"] < flags.stop_below

            # log
            rows, recent = [*rows, row], []
            write_file(run / "log.jsonl", rows)
            print_row(flags, task, rows)

        if flags.save_every and (last or step % flags.save_every == 0):
            write_file(run / f"ckpt/{step:06d}.pt", averaged.module.state_dict())
        if last:
            write_file(run / "model.pt", averaged.module.state_dict())
            print(f"---\nrun: {run}\nconfirmed: {row['confirmed']:.5f}")
            if flags.stop_below:
                print(f"solved: {row['confirmed'] < flags.stop_below}")
            return

        # one step: forward, backward, clip, update
        torch.manual_seed(step)  # if you add dropout, it resumes to the same bits
        number = step % max(flags.examples // flags.batch, 1)  # drawn again in each epoch
        batch = task.draw("training", flags.batch, number).to(flags.device)
        loss = task.losses(model(batch.inputs), batch).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip or math.inf)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        averaged.update_parameters(model)
        recent.append(torch.stack([loss.detach(), norm]))
        step += 1


def schedule(step, flags):
    """The factor of the learning rate: linear warm-up, constant, then linear decay to 0."""
    warmup = (step + 1) / max(flags.warmup, 1)
    decay = (flags.steps - step) / max(flags.decay * flags.steps, 1)
    return min(warmup, 1, decay)


@torch.no_grad()
def evaluate(model, task, split, n, device):
    """{"val": the mean loss, "x_1": that of each target, ...} on n sequences, a multiple of 256,
    never trained on."""
    losses = []
    for number in range(n // 256):
        batch = task.draw(split, 256, number).to(device)
        losses.append(task.losses(model(batch.inputs), batch))  # (256, N, targets)
    means = torch.cat(losses).mean((0, 1)).double()  # float64: val is exactly their mean in the log
    each = dict(zip(task.target_names, means.tolist(), strict=True))
    return dict(val=means.mean().item(), **each)


def print_row(flags, task, rows):
    """Print the last row, the speed since the row before, and the time left at this speed."""
    row, before = rows[-1], rows[-2:][0]  # the same, if there is one alone
    rate = (row["step"] - before["step"]) / max(row["seconds"] - before["seconds"], 0.01)
    left = f"{(flags.steps - row['step']) / rate / 60:.1f} min" if rate else "?"
    losses = f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  "
    losses += "  ".join(f"{name} {row[name]:.3f}" for name in task.target_names)
    speed = f"{rate:5.2f} steps/s  {left} left at most"
    print(f"step {row['step']:5d}/{flags.steps}  {losses}  {speed}", flush=True)


# ---- a task and a model from the flags of a run


def task_of(flags):
    """The data.Task of these flags. ValueError if there is none."""
    targets = {"all": [], "last": [flags.D]}.get(flags.targets)  # [] stands for all
    if targets is None:  # what is no number becomes 0, which no task has
        targets = [int(k) if k.isdecimal() else 0 for k in flags.targets.split(",")]
    return make_task(flags.task, flags.N, flags.D, flags.K, targets, flags.seed)


def build(flags):
    """The untrained transformer of these flags, on the CPU. ValueError if they do not fit."""
    if flags.width % flags.heads and not flags.head_size:
        raise ValueError("--heads does not divide --width: choose --head-size")
    task, head_size = task_of(flags), flags.head_size or flags.width // flags.heads
    return Transformer(
        task.T, task.N, task.inputs, task.outputs,
        flags.layers, flags.heads, flags.width, head_size,
        flags.mlp, flags.causal, flags.positions, flags.qk_std, flags.dtype,
    )  # fmt: skip


# ---- the run directory


def open_run(flags):
    """Make a run directory with its config.json, or with --resume open it again. FileExistsError
    if it holds another run, or this one, and --resume is missing."""
    run = flags.out
    if not (run / "config.json").exists():
        write_file(run / "config.json", values_of(flags) | made_by(flags.device))
        return
    refuse_another(flags)
    if not flags.resume:
        raise FileExistsError(f"{run} was begun before: add --resume, or choose another --out")


def refuse_another(flags):
    """FileExistsError if the run directory of these flags has another run."""
    saved, values = read_flags(flags.out), values_of(flags)
    if other := [name for name in values if getattr(saved, name) != values[name]]:
        other, git = ", ".join(other), saved.git
        raise FileExistsError(f"{flags.out} (git {git}) has another {other}: choose another --out")


MADE_BY = "device", "hardware", "threads", "torch", "numpy", "git"


def made_by(device):
    """What config.json says beside the flags: {name: value} of MADE_BY."""
    # older versions of PyTorch do not know the processor's name
    hardware = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", platform.machine())
    if device == "cuda":
        hardware = torch.cuda.get_device_name()

    # the commit of this clone, and not of a repository around it
    git = "git --git-dir=.git describe --always --dirty"
    here = pathlib.Path(__file__).resolve().parent
    git = subprocess.run(git, cwd=here, shell=True, capture_output=True, text=True).stdout.strip()
    versions = torch.__version__, numpy.__version__, git or "unknown"
    values = device, hardware, torch.get_num_threads(), *versions
    return dict(zip(MADE_BY, values, strict=True))


def load(run, weights="model.pt"):
    """(model, task, flags) of a run directory, ready to evaluate on the CPU in float32, whatever
    it was trained in; `weights` may name a checkpoint, "ckpt/000080.pt"."""
    flags = read_flags(run)
    model = build(argparse.Namespace(**vars(flags) | dict(dtype="float32")))
    model.load_state_dict(read_file(pathlib.Path(run, weights)))
    return model.eval(), task_of(flags), flags


def run_directory(text):
    """The type of an argument that names a finished run."""
    try:
        run = read_flags(text).out
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no run directory: {error}") from None
    if not (run / "model.pt").exists():
        raise argparse.ArgumentTypeError(f"{run} has no model.pt: finish it with --resume")
    real = run.resolve()  # of . and .. it has the name, which rows and figures bear
    return run if run.name == real.name else real


def read_flags(run):
    """The flags of a run, with MADE_BY; one that is newer than the run has its default.
    FileExistsError if it has flags that do not exist now."""
    run = pathlib.Path(run)
    config = read_file(run / "config.json")
    if unknown := config.keys() - DEFAULTS.keys() - {*MADE_BY}:
        unknown = ", ".join(sorted(unknown))
        git = config.get("git")
        raise FileExistsError(f"{run} has unknown flags, {unknown}: use its commit, {git}")
    return argparse.Namespace(**dict.fromkeys(MADE_BY) | DEFAULTS | config, out=run)


def read_log(run):
    """The rows of log.jsonl, a list with one dict per evaluation."""
    return read_file(pathlib.Path(run, "log.jsonl"))


def write_file(path, content):
    """Write tensors as .pt, a list of dicts as .jsonl, a dict as .json. At `path` there is always a
    whole file, the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    if path.suffix == ".pt":
        with open(new, "wb") as file:  # torch.save would write a name into the content
            torch.save(content, file)
    elif path.suffix == ".jsonl":
        new.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(path)


def read_file(path, default=None, device="cpu"):
    """What write_file wrote, or `default` if there is one and no such file."""
    if default is not None and not path.exists():
        return default
    if path.suffix == ".pt":
        return torch.load(path, device, weights_only=True)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(path.read_text())


# ---- the flags of a run

DTYPES, DEVICES = ["float32", "bfloat16"], ["cuda"] * torch.cuda.is_available() + ["cpu"]
POSITIVE = "layers", "heads", "width", "batch", "eval_every", "examples"
HIGHEST = dict(decay=1, beta2=0.9999, ema=0.9999)


def parser():
    """The ArgumentParser of the flags of a run. To add a flag, add a line."""
    p = command_line(None, __doc__)  # named by what runs: train.py, sweep.py

    def add(name, default, meaning, **more):
        if isinstance(default, bool):  # a switch: --no-mlp
            more["action"] = argparse.BooleanOptionalAction
        else:
            more["type"] = type(default)
        p.add_argument(name, default=default, help=meaning, **more)

    # the problem (Section 6)
    add("--task", "chain", "the retrieval problem, or module:Class, a task of your own")
    add("--N", 4, "chains per sequence")
    add("--D", 3, "retrieval steps per chain")
    add("--K", 4, "numbers per symbol")
    add("--targets", "all", "the x_k to predict: all, last (no implicit curriculum) or 1,3")
    add("--examples", 2**18, "size of the training set, in whole batches")

    # the model (Section 8.1)
    add("--positions", "appended", "appended to the tokens, or rope", choices=["appended", "rope"])
    add("--layers", 12, "number of layers")
    add("--heads", 1, "attention heads per layer")
    add("--width", 128, "size of the residual stream")
    add("--head-size", 0, "size of one head; 0 = width / heads")
    add("--mlp", True, "an MLP in each layer")
    add("--causal", True, "a causal mask")

    # training
    add("--optimizer", "muon", "the paper takes adamw", choices=["muon", "adamw"])
    add("--steps", 1200, "the most steps")
    add("--stop-below", 0.01, "stop at a loss below it, confirmed on others; 0 = never")
    add("--batch", 128, "sequences per step")
    add("--lr", 1e-3, "learning rate, of Muon and of AdamW")
    add("--warmup", 100, "steps over which the rate rises")
    add("--decay", 0.5, "share of the steps, the last ones, in which the rate falls to 0")
    add("--beta2", 0.99, "Adam's second beta")
    add("--weight-decay", 0.1, "decoupled weight decay of the matrices")
    add("--ema", 0.98, "decay of the averaged weights; 0 = no averaging")
    add("--clip", 0.1, "largest norm of the gradient; 0 = no clipping")
    add("--qk-std", 0.05, "initial std of W_Q and W_K; GPT-2 has 0.02")
    add("--init", "", "start from the weights of this run, of the same shape")
    add("--seed", 0, "of the data and the initial weights")
    add("--dtype", "float32", "of matrix products; bfloat16 is faster on some", choices=DTYPES)
    add("--eval-every", 50, "steps between evaluations; each saves")
    add("--save-every", 50, "steps between checkpoints in ckpt/, for analyze.py; 0 = none")
    return p


DEFAULTS = vars(parser().parse_args([]))


def values_of(flags):
    """{flag: value} of all flags but the device, the directory and --resume."""
    return {name: getattr(flags, name) for name in DEFAULTS}


def parse_flags(words=None, folder="out"):
    """The flags of a command line, with the run directory chosen."""
    p = parser()
    p.add_argument("--device", default=DEVICES[0], choices=DEVICES, help="what computes")
    p.add_argument("--resume", action="store_true", help="continue from state.pt, if it exists")
    p.add_argument("--out", type=pathlib.Path, help="run directory, else one named by the flags")
    flags = p.parse_args(words)
    for name, value in values_of(flags).items():
        lowest, highest = int(name in POSITIVE), HIGHEST.get(name, 2**63 - 1)
        if isinstance(value, (int, float)) and not lowest <= value <= highest:
            p.error(f"--{name.replace('_', '-')} must be a number from {lowest} to {highest}")
    try:
        task, _ = task_of(flags), build(flags)
    except ValueError as error:  # of the task, or the shape
        p.error(error)
    if flags.stop_below and flags.stop_below >= task.chance:
        p.error(f"--stop-below must be below chance, {task.chance:.3g}")

    # one name for the same targets
    names = {(flags.D,): "last", (*range(1, flags.D + 1),): "all"}
    flags.targets = names.get((*task.targets,), ",".join(map(str, task.targets)))
    flags.out = flags.out or pathlib.Path(folder, run_name(flags))
    return flags


def run_name(flags):
    """L12_H1_D3_s0, with all other flags that differ from their defaults before the seed, but
    for --save-every, which changes no result."""
    name = f"L{flags.layers}_H{flags.heads}_D{flags.D}"
    for key, value in values_of(flags).items():
        if value != DEFAULTS[key] and key not in ("layers", "heads", "D", "seed", "save_every"):
            name += f"_{key}{value}"
    return f"{name}_s{flags.seed}".replace("/", ",")


# ---- the command line


def main():
    flags = parse_flags()
    try:
        run_once(flags)
    except OSError as error:
        parser().error(error)
    except KeyboardInterrupt:
        step = read_file(flags.out / "state.pt", dict(step=0))["step"]
        sys.exit(f"train.py: stopped; --resume goes on from step {step}")


if __name__ == "__main__":
    main()
