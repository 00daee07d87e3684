"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

python train.py --layers 12 --heads 1 --D 3           # the size of transformers A, B, C
python train.py --layers 12 --heads 1 --D 3 --resume  # continue after a stop, to the same bits
python train.py --layers 12 --heads 1 --D 3 --optimizer adamw --steps 3000 --qk-std 0.02
python train.py --layers 4 --heads 2 --task conditional     # the last step depends on two symbols

A run directory, out/L12_H1_D3_s0/ or the like, holds config.json (the flags), log.jsonl (one row
per evaluation), model.pt (the final weights), state.pt (what --resume needs) and ckpt/ (with
--save-every). Later stages add circuit.json and the figures; load(run) gives them the model.
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import time
import zipfile


if __name__ == "__main__":  # before torch loads: waiting threads sleep soon and free their cores
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import data
from data import UserError, program
from model import Transformer, make_optimizers


CPU = getattr(torch.cpu, "get_capabilities", dict)()  # {} if this torch says nothing


# ---- the flags of a run


def parser():
    """Return the ArgumentParser of train.py. To add a flag, add a line."""
    p = data.command_line("train.py", __doc__)
    count, size, seed = data.number(int, 1), data.number(int, 0), data.number(int, 0, 2**63 - 1)
    real, share = data.number(float, 0), data.number(float, 0, 1)
    memory = data.number(float, 0, 0.999999)

    add = p.add_argument_group("problem").add_argument  # Section 6
    add("--task", default="chain", choices=data.TASKS, help="a row of data.TASKS")
    add("--N", type=count, default=4, help="chains per sequence")
    add("--D", type=count, default=3, help="retrieval steps per chain")
    add("--K", type=count, default=4, help="dimensions per symbol, an even number")
    add("--no-ic", dest="ic", action="store_false", help="predict x_D alone: no curriculum")
    add("--targets", type=int, nargs="+", default=[], help="predict only these: 1 3 for x_1, x_3")
    add("--examples", type=size, default=2**18, help="training set; 0 = fresh examples only")

    add = p.add_argument_group("model").add_argument  # Section 8.1
    add("--rotary", default="input", choices=data.ENCODINGS, help="input: in the tokens; qk: RoPE")
    add("--layers", type=count, default=12, help="number of layers")
    add("--heads", type=count, default=1, help="attention heads per layer")
    add("--width", type=count, default=128, help="size of the residual stream")
    add("--head-size", type=size, default=0, help="size of one head; 0 = width / heads")
    add("--no-mlp", dest="mlp", action="store_false", help="leave out the MLPs")
    add("--no-causal", dest="causal", action="store_false", help="leave out the causal mask")

    add = p.add_argument_group("training").add_argument
    add("--optimizer", default="muon", choices=("muon", "adamw"), help="the paper has adamw")
    add("--steps", type=count, default=1200, help="at most; the learning rate spans them")
    add("--stop-below", type=real, default=0.01, help="stop at this confirmed MSE; 0 = never")
    add("--batch", type=count, default=128, help="sequences per step")
    add("--lr", type=real, default=1e-3, help="learning rate, of Muon and of AdamW")
    add("--warmup", type=size, default=100, help="steps over which the rate rises from 0")
    add("--decay", type=share, default=0.5, help="last share of the steps: the rate falls to 0")
    add("--beta2", type=memory, default=0.99, help="Adam's second beta")
    add("--weight-decay", type=real, default=0.1, help="decoupled weight decay of the matrices")
    add("--ema", type=memory, default=0.98, help="decay of the averaged weights; 0 = no averaging")
    add("--clip", type=real, default=0.1, help="largest norm of the gradient; 0 = no clipping")
    add("--qk-std", type=real, default=0.1, help="initial std of W_Q and W_K; GPT-2 has 0.02")
    add("--init", default="", help="start from the weights of this run, which has the same shape")
    add("--seed", type=seed, default=0, help="of the data, their order, and the initial weights")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of products")
    add("--eval-every", type=count, default=50, help="steps between evaluations; each saves")
    add("--save-every", type=size, default=0, help="steps between checkpoints in ckpt/; 0 = none")

    add = p.add_argument_group("machine, may differ after --resume").add_argument
    add("--device", default="auto", help="cuda, mps or cpu; auto = the first of them that exists")
    add("--out", type=pathlib.Path, help="run directory; by default made from the flags, in out/")
    add("--resume", action="store_true", help="continue from state.pt, if it exists")
    return p


DEFAULTS = vars(parser().parse_args([]))
SETTINGS = [name for name in DEFAULTS if name not in ("device", "out", "resume")]  # of a run


class Flags(argparse.Namespace):
    """The flags of a run as attributes, and what follows from them."""

    @property
    def problem(self):
        """The data.Task: roles, symbols, tokens."""
        return data.TASKS[self.task](self.N, self.D)

    @property
    def target_symbols(self):
        """The k of the symbols x_k that each query predicts, in order."""
        symbols = [*range(1, self.problem.symbols)]
        return sorted({*self.targets}) or (symbols if self.ic else symbols[-1:])

    @property
    def target_names(self):
        """The names of the target symbols: x_1, x_2, ..."""
        return [f"x_{k}" for k in self.target_symbols]

    @property
    def title(self):
        """12 layers x 1 head, D=3, seed 0."""
        layers = f"{self.layers} layer{'s' * (self.layers > 1)}"
        heads = f"{self.heads} head{'s' * (self.heads > 1)}"
        return f"{layers} x {heads}, {self.problem.title}, seed {self.seed}"

    @property
    def settings(self):
        """{flag: value} of the flags that are fixed for a run."""
        return {name: getattr(self, name) for name in SETTINGS}

    @property
    def size(self):
        """The size of one head."""
        return self.head_size or self.width // self.heads

    def replace(self, **changes):
        """Return the same flags with some changed."""
        return Flags(**(vars(self) | changes))


def parse_flags(arguments=None, folder="out"):
    """Return the Flags of a run from the command line, with the device, the dtype and the run
    directory settled, in this folder. What cannot be trained ends the program in one line."""
    p = parser()
    flags = p.parse_args(arguments, Flags())
    data.check_problem(p, flags)
    if not {*flags.targets} <= {*range(1, flags.problem.symbols)}:
        p.error(f"--targets must be among 1 to {flags.problem.symbols - 1}")
    if flags.targets and not flags.ic:
        p.error("--no-ic means x_D alone: leave out either it or --targets")
    if flags.width % flags.heads and not flags.head_size:
        p.error(f"--width must be divisible by --heads {flags.heads}, or set --head-size")
    _, angles = data.ENCODINGS[flags.rotary]
    if angles and flags.size % 2:
        p.error(f"--rotary {flags.rotary} needs an even head size, not {flags.size}")

    flags.out = flags.out or pathlib.Path(folder, run_name(flags))  # before a machine sets dtype
    if flags.device == "auto":
        fallback = "mps" if torch.backends.mps.is_available() else "cpu"
        flags.device = "cuda" if torch.cuda.is_available() else fallback
    try:
        torch.empty(1, device=flags.device)
    except (RuntimeError, AssertionError):
        p.error(f"--device {flags.device} does not exist here: choose another")
    if flags.dtype == "auto":
        resumed = flags.resume and (flags.out / "config.json").exists()
        flags.dtype = read_flags(flags.out).dtype if resumed else native_dtype(flags.device)
    return flags


def run_name(flags):
    """Return L12_H1_D3_s0, with every other flag that differs from its default in the name."""
    name = f"L{flags.layers}_H{flags.heads}_{flags.problem.title.replace('=', '')}"
    for key, value in flags.settings.items():
        not_in_name = key in ("layers", "heads", "task", "D", "seed", "eval_every", "save_every")
        if not not_in_name and value != DEFAULTS[key]:
            text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
            name += f"_no-{key}" if value is False else f"_{key}{text}".replace("/", "-")
    return f"{name}_s{flags.seed}"


def native_dtype(device):
    """Return "bfloat16" where the device multiplies it faster than float32. Among Intel's
    processors only those with AMX do; the others take twice as long."""
    kind = torch.device(device).type
    native = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if kind == "cpu":
        native = CPU.get("amx_bf16") or CPU.get("avx512_bf16") and "AMD" in CPU.get("cpu_name", "")
    return "bfloat16" if native else "float32"


# ---- the run directory


def write_file(path, write):
    """Call write(temporary path), then rename: at `path` there is always a whole file, the old one
    or the new one, also if two programs write it at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(temporary)
    temporary.replace(path)


def write_text(path, text):
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_rows(path, rows):
    """Write dicts as a file of JSON lines."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_tensors(path, tensors):
    write_file(path, lambda temporary: torch.save(tensors, temporary))


def read_file(path, read):
    """Return read(path); UserError if the file is damaged."""
    try:
        return read(pathlib.Path(path))
    except OSError:  # it is not there
        raise
    except Exception as error:  # whatever the reader of a damaged file stumbled on
        raise UserError(f"{path} is damaged ({type(error).__name__}): restore it") from None


def read_json(path):
    return read_file(path, lambda path: json.loads(path.read_text(encoding="utf-8")))


def read_rows(path):
    """Return what write_rows wrote, a list of dicts."""
    return read_file(path, lambda path: [*map(json.loads, path.open(encoding="utf-8"))])


def read_tensors(path, device="cpu"):
    """Return what write_tensors wrote."""

    def read(path):
        if zipfile.ZipFile(path).testzip():  # torch.load ignores the checksums
            raise zipfile.BadZipFile
        return torch.load(path, map_location=device, weights_only=True)

    return read_file(path, read)


def read_flags(run):
    """Return the Flags of a run; a flag that did not exist then has its default."""
    path = pathlib.Path(run, "config.json")
    if not path.exists():
        raise UserError(f"{run} is no run directory: it has no config.json; train.py makes one")
    return Flags(**(DEFAULTS | read_json(path) | dict(out=pathlib.Path(run))))


def read_log(run):
    """Return the rows of log.jsonl, a list with one dict per evaluation."""
    return read_rows(pathlib.Path(run, "log.jsonl"))


def checkpoints_of(run):
    """Return the checkpoint files of a run, the first step first."""
    return sorted(pathlib.Path(run, "ckpt").glob("*.pt"), key=lambda file: int(file.stem))


def build(flags):
    """Return the untrained transformer of these flags, on the CPU."""
    T = flags.problem.T
    appended, angles = data.ENCODINGS[flags.rotary]
    names = "layers", "heads", "width", "mlp", "causal", "qk_std"
    shape = {name: getattr(flags, name) for name in names} | dict(head_size=flags.size)
    shape["rotary"] = angles and angles(T, flags.size)
    inputs = flags.K + appended(T, flags.K).shape[1]
    return Transformer(T, flags.N, inputs, flags.K * len(flags.target_symbols), **shape)


def load_weights(model, path):
    """Load a file of weights into a model; UserError if they are those of another shape."""
    try:
        model.load_state_dict(read_tensors(path))
    except RuntimeError:
        raise UserError(f"{path} holds the weights of a model of another shape") from None


def load(run, weights="model.pt", device="cpu"):
    """Return (model, flags) of a run directory, ready to evaluate; `weights` may name a checkpoint,
    "ckpt/000080.pt"."""
    flags = read_flags(run).replace(device=device)  # this machine, not the one it was trained on
    if native_dtype(device) == "float32":
        flags.dtype = "float32"  # bfloat16 would be many times slower
    model = build(flags)
    load_weights(model, pathlib.Path(run, weights))
    return model.to(device).eval(), flags


def sequences(flags, index):
    """Return the Batch of the examples `index` of a run's problem and seed."""
    problem = {name: getattr(flags, name) for name in ("task", "N", "D", "K", "rotary")}
    return data.make_batch(flags.seed, index, targets=flags.target_symbols, **problem)


def precision(flags):
    """Return a context in which activations and matrix products have the dtype of the flags.
    Weights, attention scores, LayerNorm's statistics, the loss and the optimizer stay float32."""
    kind = torch.device(flags.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=flags.dtype == "bfloat16")


def open_run(flags):
    """Make the directory of a run with its config.json; UserError if it holds a run with other
    flags, or this run already, and there is no --resume."""
    run, path = flags.out, flags.out / "config.json"
    run.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return write_text(path, json.dumps(flags.settings | provenance_of(flags), indent=1) + "\n")
    saved = read_flags(run)
    for name, value in flags.settings.items():
        if getattr(saved, name) != value:
            was = f"{name} {getattr(saved, name)}, not {value}"
            raise UserError(f"{run} holds a run with other flags ({was}): choose another --out")
    if not flags.resume:
        raise UserError(f"{run} holds this run already: add --resume, or choose another --out")


def provenance_of(flags):
    """Return what config.json says beside the flags; git is empty outside of a clone."""
    folder = shlex.quote(str(pathlib.Path(__file__).parent))
    failed, git = subprocess.getstatusoutput(f"git -C {folder} describe --always --dirty")
    cpu = CPU.get("cpu_name", platform.machine())
    hardware = torch.cuda.get_device_name() if "cuda" in flags.device else cpu
    machine = dict(device=flags.device, hardware=hardware, threads=torch.get_num_threads())
    return machine | dict(torch=torch.__version__, git="" if failed else git)


def schedule(step, flags):
    """Return the factor of the learning rate: linear warm-up, constant, then linear decay to 0."""
    warmup = (step + 1) / flags.warmup if flags.warmup else 1
    decay = (flags.steps - step) / (flags.decay * flags.steps) if flags.decay else 1
    return min(warmup, 1, decay)


class State:
    """Everything that a training step changes: what state.pt holds and --resume restores."""

    def __init__(self, flags):
        torch.manual_seed(flags.seed)
        self.model = build(flags).to(flags.device)
        if flags.init:
            load_weights(self.model, pathlib.Path(flags.init, "model.pt"))
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(flags.ema))
        self.optimizers = make_optimizers(self.model, flags)
        self.step, self.seconds, self.rows = 0, 0.0, []  # rows of log.jsonl
        self.train_loss = torch.zeros(2, device=flags.device)  # sum, count since the last row

    def state_dict(self):
        """Return all of it; a running mean of yours goes in here, and out in load_state_dict."""
        saved = dict(model=self.model.state_dict(), averaged=self.averaged.state_dict())
        saved["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        saved |= dict(step=self.step, seconds=self.seconds, rows=self.rows)
        return saved | dict(train_loss=self.train_loss, threads=torch.get_num_threads())

    def load_state_dict(self, saved):
        self.model.load_state_dict(saved["model"])
        self.averaged.load_state_dict(saved["averaged"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seconds, self.rows = saved["step"], saved["seconds"], saved["rows"]
        self.train_loss = saved["train_loss"]
        torch.set_num_threads(saved["threads"])  # sums over other threads differ in the last bits


# ---- training


def predict(model, flags, index):
    """Return the predictions and the targets (B, N, symbols*K) of the examples `index` (B,)."""
    batch = sequences(flags, index.to(flags.device))
    with precision(flags):
        return model(batch.inputs), batch.targets


@torch.no_grad()
def evaluate(model, flags, split="validation", n=1024):
    """Return the list of partial losses on n sequences that training never sees."""
    indices = data.held_out(split, n, flags.device).split(256)
    losses = [data.partial_losses(*predict(model, flags, index), flags.K) for index in indices]
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
    if state.step == flags.steps or row["val"] < flags.stop_below:
        losses = evaluate(state.averaged.module, flags, "confirmation", 8192)
        row["confirmed"] = sum(losses) / len(losses)
    return row


def train(flags, state, stopped=()):
    """Train from `state` to the end and return True, or return False once `stopped` is not empty.
    UserError if a loss is not finite; state.pt then keeps the last good state."""
    run, model, averaged = flags.out, state.model, state.averaged.module
    start = time.monotonic() - state.seconds

    while True:  # here `step` steps are done: this is the state that is saved
        step, state.seconds = state.step, time.monotonic() - start
        if stopped:
            if state.train_loss.isfinite().all():
                write_tensors(run / "state.pt", state.state_dict())
            return False
        if flags.save_every and step % flags.save_every == 0:
            (run / "ckpt").mkdir(exist_ok=True)
            write_tensors(run / f"ckpt/{step:06d}.pt", averaged.state_dict())

        # evaluate and save; end when both losses are below --stop-below, or after the last step
        if step % flags.eval_every == 0 or step == flags.steps:
            row = evaluation(flags, state)
            if not math.isfinite(row["val"] + (row["train"] or 0)):
                raise UserError(f"the loss is not finite at step {step}: lower --lr")
            write_tensors(run / "state.pt", state.state_dict())  # as before this row
            state.rows.append(row)
            write_rows(run / "log.jsonl", state.rows)
            print_row(flags, state.rows)
            if step == flags.steps or row.get("confirmed", math.inf) < flags.stop_below:
                write_tensors(run / "model.pt", averaged.state_dict())
                return True
            state.train_loss.zero_()

        # take one step; the seed makes random numbers in it the same after --resume
        torch.manual_seed(hash((flags.seed, step)))
        index = data.batch_index(flags.seed, step, flags.batch, flags.examples)
        predictions, targets = predict(model, flags, index)
        loss = data.partial_losses(predictions, targets, flags.K).mean()
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
    losses = f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  "
    losses += "  ".join(f"{name} {row[name]:.3f}" for name in flags.target_names)
    speed = f"{rate:5.2f} steps/s  {left} left at most"
    print(f"step {row['step']:5d}/{flags.steps}  {losses}  {speed}", flush=True)


def summary(run):
    """Return the end of a run as lines of "name: value", easy to grep."""
    flags, rows = read_flags(run), read_log(run)
    last, lines = rows[-1], ["---", f"run: {run}"]
    if flags.stop_below:
        lines.append(f"solved: {last['confirmed'] < flags.stop_below}")
    lines += [f"{name}: {last[name]:.5g}" for name in last if name not in ("lr", "train")]
    return "\n".join(lines)


def keep_freed_memory():
    """Let glibc reuse freed memory: to return it costs each step thousands of page faults."""
    if sys.platform == "linux":
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
        glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes


def run_once(flags, stopped=()):
    """Train the run in its directory, or continue it; return and raise what `train` does."""
    run, state = flags.out, State(flags)
    open_run(flags)
    if (run / "model.pt").exists():
        return True
    if (run / "state.pt").exists():
        state.load_state_dict(read_tensors(run / "state.pt", flags.device))
        print(f"resumed {run} at step {state.step}")
    return train(flags, state, stopped)


def main():
    stopped = []
    with program("train.py"):
        flags = parse_flags()
        keep_freed_memory()
        for kind in signal.SIGINT, signal.SIGTERM:
            signal.signal(kind, lambda kind, frame: stopped.append(kind))
        if not run_once(flags, stopped):
            command = shlex.join(word for word in sys.argv[1:] if word != "--resume")
            print(f"stopped and saved; to continue: python train.py {command} --resume")
            sys.exit(128 + stopped[0])
        print(summary(flags.out))


if __name__ == "__main__":
    main()
