"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

    python train.py --layers 12 --heads 1 --D 3           # the size of transformers A, B, C
    python train.py --layers 12 --heads 1 --D 3 --resume  # continue after a stop, to the same bits
    # with the paper's optimizer and GPT-2's initialisation, without averaging
    python train.py --layers 12 --heads 1 --D 3 --optimizer adamw --steps 3000 --qk-std 0.02 --ema 0

A run directory, out/L12_H1_D3_s0/ or the like, holds config.json (flags, machine), log.jsonl (one
row per evaluation), model.pt (the final weights, averaged as --ema says), state.pt (what --resume
needs) and ckpt/ (averaged weights while it trained). Later stages add circuit.json and figures;
load(run) gives them the model.
"""

import argparse
import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
import zipfile

import data  # before torch, which reads the GOMP_SPINCOUNT that it sets
from data import command_line
from model import Transformer, make_optimizers

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


# ---- training; `flags` are those of parse_flags below


def run_once(flags):
    """Train a run in its directory, or continue it."""
    run, task = flags.out, task_of(flags)
    open_run(flags)
    if (run / "model.pt").exists():
        read_file(run / "model.pt")  # raises an error if it is damaged
        print(f"{run} has finished before (git {read_flags(run).git}): nothing was done")
        return

    torch.manual_seed(flags.seed)
    model = build(flags).to(flags.device)
    if flags.init and not (run / "state.pt").exists():
        model.load_state_dict(read_file(pathlib.Path(flags.init, "model.pt")))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(flags.ema)).eval()
    how = flags.optimizer, flags.lr, flags.beta2, flags.weight_decay
    optimizers = make_optimizers(model, *how)
    step, seconds, rows = 0, 0.0, []  # rows of the log
    recent = []  # the loss and the gradient's norm in each step since the last row

    # resume
    if (run / "state.pt").exists():
        state = read_file(run / "state.pt", device=flags.device)
        step, seconds = state["step"], state["seconds"]
        rows, recent = state["rows"], state["recent"]
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        print(f"resumed {run} at step {step}")
        begun, now = read_flags(run).git, commit_of_this_code()
        if begun != now or now.endswith("dirty"):
            print(f"it was begun with the code of commit {begun}, and goes on with {now}")
    start = time.monotonic() - seconds

    # A run that is stopped goes on from state.pt, which is saved before the row of its step is
    # logged. model.pt comes last: with it a run has finished
    while True:  # here `step` steps are done
        last = step == flags.steps
        lr = flags.lr * schedule(step, flags)

        if last or step % flags.eval_every == 0:
            # evaluate
            seconds = time.monotonic() - start
            losses = evaluate(averaged.module, task, device=flags.device)  # (targets,)
            row = dict(step=step, seconds=round(seconds, 2), lr=lr, train=None, grad_norm=None)
            if recent:
                row["train"], row["grad_norm"] = torch.stack(recent).mean(0).tolist()
            row["val"] = losses.mean().item()
            row.update(zip(task.target_names, losses.tolist(), strict=True))
            if not math.isfinite(row["val"]):  # state.pt stays the last good one
                raise FloatingPointError(f"the loss is not finite at step {step}: lower --lr?")

            # save without this row: --resume evaluates again
            state = dict(step=step, seconds=seconds, rows=rows, recent=recent)
            state.update(model=model.state_dict(), averaged=averaged.state_dict())
            state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
            write_file(run / "state.pt", state)

            # a single low evaluation may be luck: other sequences must confirm it
            if last or row["val"] < flags.stop_below:
                losses = evaluate(averaged.module, task, "confirmation", 8192, flags.device)
                row["confirmed"] = losses.mean().item()
                last = last or row["confirmed"] < flags.stop_below

                if step == 0 and row["confirmed"] < flags.stop_below and not flags.init:
                    loss = f"an untrained model has a loss of {row['confirmed']:.3f}"
                    raise argparse.ArgumentTypeError(f"--stop-below {flags.stop_below}: {loss}")

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
        number = step % max(flags.examples // flags.batch, 1)  # of the batches of an epoch
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
    """Return the factor of the learning rate: linear warm-up, constant, then linear decay to 0."""
    warmup = (step + 1) / max(flags.warmup, 1)
    decay = (flags.steps - step) / max(flags.decay * flags.steps, 1)
    return min(warmup, 1, decay)


@torch.no_grad()
def evaluate(model, task, split="validation", n=1024, device="cpu"):
    """Return the mean losses (targets,) on n sequences, a multiple of 256, never trained on."""
    losses = []
    for number in range(n // 256):
        batch = task.draw(split, 256, number).to(device)
        losses.append(task.losses(model(batch.inputs), batch))  # (256, N, targets)
    return torch.cat(losses).mean((0, 1)).double()  # so that the log averages them exactly


def print_row(flags, task, rows):
    """Print the last row, the speed since the row before, and the time left at this speed."""
    row, before = rows[-1], rows[-2:][0]
    rate = (row["step"] - before["step"]) / max(row["seconds"] - before["seconds"], 0.01)
    left = f"{(flags.steps - row['step']) / rate / 60:.1f} min" if rate else "?"
    losses = f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  "
    losses += "  ".join(f"{name} {row[name]:.3f}" for name in task.target_names)
    speed = f"{rate:5.2f} steps/s  {left} left at most"
    print(f"step {row['step']:5d}/{flags.steps}  {losses}  {speed}", flush=True)


# ---- a task and a model from the flags of a run


def task_of(flags):
    """Return the data.Task of these flags. ValueError if there is none."""
    targets = [flags.D] if flags.targets == "last" else []  # [] stands for all
    if flags.targets not in ("all", "last"):
        targets = [int(k) for k in flags.targets.split(",")]
    return data.make_task(flags.task, flags.N, flags.D, flags.K, targets, flags.seed)


def build(flags):
    """Return the untrained transformer of these flags, on the CPU."""
    task, head_size = task_of(flags), flags.head_size or flags.width // flags.heads
    return Transformer(
        task.T, task.N, task.inputs, task.outputs,
        flags.layers, flags.heads, flags.width, head_size,
        flags.mlp, flags.causal, flags.positions, flags.qk_std, flags.dtype,
    )  # fmt: skip


CPU = getattr(torch.cpu, "get_capabilities", dict)()  # {} if this torch does not tell


def native_dtype(device):
    """Return "bfloat16" where the device multiplies it faster than float32. Among Intel's
    processors only those with AMX do."""
    amd = "AMD" in CPU.get("cpu_name", "")
    native = CPU.get("amx_bf16") or (amd and CPU.get("avx512_bf16"))
    if device.startswith("cuda"):
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    return "bfloat16" if native else "float32"


# ---- the run directory


def open_run(flags):
    """Make the directory of a run with its config.json. FileExistsError if the directory holds
    something else or another run, or this one, and --resume is missing."""
    run, values = flags.out, values_of(flags)
    if not (run / "config.json").exists():
        config = values | provenance_of(flags)
        run.mkdir(parents=True, exist_ok=True)
        if any(run.iterdir()):
            raise FileExistsError(f"{run} is not empty: choose another --out")
        write_file(run / "config.json", config)
        return

    saved = read_flags(run)
    if other := [name for name in values if getattr(saved, name) != values[name]]:
        raise FileExistsError(f"{run} has another {', '.join(other)}: choose another --out")
    if not flags.resume:
        finished = (run / "model.pt").exists()
        says = "has finished before:" if finished else "was begun before: add --resume, or"
        raise FileExistsError(f"{run} (git {saved.git}) {says} choose another --out")


LOGGED = "step seconds lr train grad_norm val confirmed run ended".split()  # in logs and tables
PROVENANCE = "device", "hardware", "threads", "torch", "git"


def provenance_of(flags):
    """Return what config.json says beside the flags, {name: value}."""
    hardware = CPU.get("cpu_name", platform.machine())
    if flags.device.startswith("cuda"):
        hardware = torch.cuda.get_device_name(flags.device)
    threads, git = torch.get_num_threads(), commit_of_this_code()
    values = flags.device, hardware, threads, torch.__version__, git
    return dict(zip(PROVENANCE, values, strict=True))


def commit_of_this_code():
    """Return "7cb5d1b", or "7cb5d1b-dirty" with changes since; "unknown" outside of a clone."""
    command = ["git", "--git-dir=.git", "describe", "--always", "--dirty"]  # not a parent's
    here = pathlib.Path(__file__).resolve().parent
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True)
    except OSError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"


def load(run, weights="model.pt"):
    """Return (model, task, flags) of a run directory, ready to evaluate on the CPU; `weights` may
    name a checkpoint, "ckpt/000080.pt"."""
    flags = read_flags(run)
    if native_dtype("cpu") == "float32":
        flags.dtype = "float32"  # bfloat16 would be slower
    model = build(flags)
    model.load_state_dict(read_file(pathlib.Path(run, weights)))
    return model.eval(), task_of(flags), flags


def run_directory(text):
    """The type of an argument that names a run."""
    if not pathlib.Path(text, "config.json").exists():
        raise argparse.ArgumentTypeError(f"{text} is no run directory of train.py")
    try:
        read_flags(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    return pathlib.Path(text)


def read_flags(run):
    """Return the flags of a run, with the device and what else config.json says; a flag that did
    not exist then has its default. ValueError if it has flags that do not exist now."""
    run = pathlib.Path(run)
    config = read_file(run / "config.json")
    if unknown := config.keys() - DEFAULTS.keys() - {*PROVENANCE}:
        says = f"{run} has unknown flags, {', '.join(sorted(unknown))}: use the code that made it"
        raise ValueError(f"{says}, commit {config.get('git')}")
    return argparse.Namespace(**(DEFAULTS | config), out=run)


def weights_hash(run):
    """Return a hash of the final weights, which tells whether a report is about these weights."""
    return hashlib.sha256(pathlib.Path(run, "model.pt").read_bytes()).hexdigest()[:16]


def read_log(run):
    """Return the rows of log.jsonl, a list with one dict per evaluation."""
    return read_file(pathlib.Path(run, "log.jsonl"))


def write_file(path, content):
    """Write tensors as .pt, a list of dicts as .jsonl, a dict as .json. At `path` there is always a
    whole file, the old one or the new one, also if the disk is full."""
    if path.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(content, buffer)
        whole = buffer.getvalue()
    elif path.suffix == ".jsonl":
        whole = "".join(json.dumps(row) + "\n" for row in content).encode()
    else:
        whole = (json.dumps(content, indent=1) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        new.write_bytes(whole)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def read_file(path, default=None, device="cpu"):
    """Return what write_file wrote, or `default` if there is one and no such file. ValueError if a
    file of tensors is damaged: torch.load does not compare its checksums."""
    if default is not None and not path.exists():
        return default
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return json.loads(path.read_text())
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # compares them
    except zipfile.BadZipFile as error:
        damaged = error
    if damaged:
        raise ValueError(f"{path} is damaged: {damaged}")
    return torch.load(path, device, weights_only=True)


# ---- the flags of a run


def parser():
    """Return the ArgumentParser of the flags of a run. To add a flag, add a line."""
    p = command_line("train.py", __doc__)

    def add(name, default, meaning, **more):
        p.add_argument(name, type=type(default), default=default, help=meaning, **more)

    def switch(name, meaning):  # on, unless --no-...
        action = argparse.BooleanOptionalAction
        p.add_argument(name, action=action, default=True, help=meaning)

    # the problem (Section 6)
    add("--task", "chain", "or module:Class, a task of your own")
    add("--N", 4, "chains per sequence")
    add("--D", 3, "retrieval steps per chain")
    add("--K", 4, "numbers per symbol")
    add("--targets", "all", "the x_k to predict: all, last (no implicit curriculum) or 1,3")
    add("--examples", 2**18, "size of the training set")

    # the model (Section 8.1)
    add("--positions", "appended", "appended to the tokens, or rope", choices=["appended", "rope"])
    add("--layers", 12, "number of layers")
    add("--heads", 1, "attention heads per layer")
    add("--width", 128, "size of the residual stream")
    add("--head-size", 0, "size of one head; 0 = width / heads")
    switch("--mlp", "an MLP in each layer")
    switch("--causal", "a causal mask")

    # training
    add("--optimizer", "muon", "the paper takes adamw", choices=["muon", "adamw"])
    add("--steps", 1200, "at most; the learning rate spans them")
    add("--stop-below", 0.01, "stop at this confirmed loss; 0 = never")
    add("--batch", 128, "sequences per step")
    add("--lr", 1e-3, "learning rate, of Muon and of AdamW")
    add("--warmup", 100, "steps over which the rate rises")
    add("--decay", 0.5, "share of the steps, the last ones, in which the rate falls to 0")
    add("--beta2", 0.99, "Adam's second beta")
    add("--weight-decay", 0.1, "decoupled weight decay of the matrices")
    add("--ema", 0.98, "decay of the averaged weights; 0 = no averaging")
    add("--clip", 0.1, "largest norm of the gradient; 0 = no clipping")
    add("--qk-std", 0.1, "initial std of W_Q and W_K; GPT-2 has 0.02")
    add("--init", "", "start from the weights of this run, of the same shape")
    add("--seed", 0, "of the data and the initial weights")
    add("--dtype", "auto", "of products", choices=["auto", "float32", "bfloat16"])
    add("--eval-every", 50, "steps between evaluations; each saves")
    add("--save-every", 50, "steps between checkpoints in ckpt/, for analyze.py; 0 = none")
    return p


DEFAULTS = vars(parser().parse_args([]))
POSITIVE = "layers", "heads", "width", "batch", "eval_every", "examples"


def values_of(flags):
    """Return {flag: value} of all flags but the device, the directory and --resume."""
    return {name: getattr(flags, name) for name in DEFAULTS}


def parse_flags(words=None, folder="out"):
    """Return the flags of a command line, with device, dtype and run directory chosen."""
    p = parser()
    p.add_argument("--device", default="auto", help="auto = cuda if there is one, else cpu")
    p.add_argument("--out", type=pathlib.Path, help="run directory; by default named by the flags")
    p.add_argument("--resume", action="store_true", help="continue from state.pt, if it exists")
    flags = p.parse_args(words)

    # check the values
    for name, value in values_of(flags).items():
        lowest = int(name in POSITIVE)
        if isinstance(value, (int, float)) and not lowest <= value < math.inf:
            p.error(f"--{name.replace('_', '-')} must be a number and not below {lowest}")
    if max(flags.ema, flags.beta2) >= 1:
        p.error("--ema and --beta2 must be below 1, or an average never changes")
    try:
        task = task_of(flags)
        data.check_task(task)
    except ValueError as error:
        p.error(error)
    if taken := {*LOGGED, *DEFAULTS} & {*task.target_names}:
        p.error(f"the task must not name a target {', '.join(taken)}, which logs and tables have")

    # runs are compared by their flags: one spelling for the same targets
    names = {(flags.D,): "last", (*range(1, flags.D + 1),): "all"}
    flags.targets = names.get((*task.targets,), ",".join(map(str, task.targets)))

    # choose what was left open: the name first, while the dtype is still "auto", so that a run has
    # the same name on every machine
    flags.out = flags.out or pathlib.Path(folder, run_name(flags))
    if flags.device == "auto":
        flags.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=flags.device)
    except (AssertionError, RuntimeError) as error:  # as torch says it, in many lines
        p.error(f"--device {flags.device}: {str(error).splitlines()[0]}")
    try:
        begun = (flags.out / "config.json").exists()
        dtype = read_flags(flags.out).dtype if begun else native_dtype(flags.device)
        if flags.dtype == "auto":  # a run that was begun keeps its dtype
            flags.dtype = dtype

        # check the shape of the model, and the weights to start from
        model = build(flags)
        if flags.init and not (flags.out / "state.pt").exists():
            model.load_state_dict(read_file(pathlib.Path(flags.init, "model.pt")))
    except (ValueError, FileNotFoundError) as error:
        p.error(error)
    except RuntimeError:
        p.error(f"--init {flags.init} is a model of another shape")
    return flags


def run_name(flags):
    """Return L12_H1_D3_s0, with all other flags that differ from their defaults before the
    seed, but for --save-every, which changes no result."""
    module = flags.task.rpartition(":")[0]  # of a task of one's own: two may have one title
    task = f"{module}.{task_of(flags).title}".lstrip(".")  # D=3 becomes D3 below
    name = f"L{flags.layers}_H{flags.heads}_{task}"
    for key, value in values_of(flags).items():
        if key in ("layers", "heads", "task", "D", "seed", "save_every") or value == DEFAULTS[key]:
            continue
        name += f"_no-{key}" if value is False else f"_{key}{value}"
    return f"{name}_s{flags.seed}".replace("=", "").replace(" ", "_").replace("/", ",")


def command_of(flags):
    """Return "python train.py --layers 12 --heads 1 --D 3", with all other flags that differ
    from their defaults after these."""
    values, command = values_of(flags), "python train.py"
    names = ["layers", "heads", "D"]
    names += [name for name in values if values[name] != DEFAULTS[name] and name not in names]
    for name in names:
        flag, value = name.replace("_", "-"), values[name]
        command += f" --no-{flag}" if value is False else f" --{flag} {value}"
    return command


# ---- the command line


def keep_freed_memory():
    """Let glibc reuse freed memory: to return it costs each step thousands of page faults."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc, nothing to set
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
        glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes


def main():
    flags = parse_flags()
    keep_freed_memory()
    try:
        run_once(flags)
    except (FileExistsError, argparse.ArgumentTypeError) as error:
        parser().error(error)
    except OSError as error:  # a full disk
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        step = read_file(flags.out / "state.pt", dict(step=0))["step"]
        sys.exit(f"train.py: stopped; --resume goes on from step {step}")


if __name__ == "__main__":
    main()
