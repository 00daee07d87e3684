"""Train one transformer on the retrieval problem and leave a run directory for every later stage.

python train.py --layers 12 --heads 1 --D 3           # the size of transformers A, B, C
python train.py --layers 12 --heads 1 --D 3 --resume  # continue after a stop, to the same bits
python train.py --layers 12 --heads 1 --D 3 --optimizer adamw --steps 3000 --qk-std 0.02 --ema 0
python train.py --layers 4 --heads 2 --task conditional     # the last step depends on two symbols

A run directory, out/L12_H1_D3_s0/ or the like, holds config.json (the flags), log.jsonl (one row
per evaluation), model.pt (the final weights, averaged as --ema says), state.pt (what --resume
needs) and ckpt/ (averaged weights, with --save-every). Later stages add circuit.json and figures;
load(run) gives them the model.
"""

import argparse
import contextlib
import ctypes
import io
import json
import math
import os
import pathlib
import pickle
import platform
import shlex
import signal
import subprocess
import sys
import time
import zipfile

import data
from data import UserError, command_line, number, program
from model import Transformer, make_optimizers

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


# ---- training; `flags` are the Flags below


class State:
    """Everything that a training step changes: what state.pt holds and --resume restores."""

    def __init__(self, flags):
        torch.manual_seed(flags.seed)
        self.model = build(flags).to(flags.device)
        if flags.init and not (flags.out / "state.pt").exists():
            weights = read_file(pathlib.Path(flags.init, "model.pt"))
            # models with other numbers of heads may have the same shapes
            alike = read_flags(flags.init).heads == flags.heads
            try:
                self.model.load_state_dict(weights)
            except RuntimeError:
                alike = False
            if not alike:
                raise UserError(f"--init {flags.init} is a model of another shape")
        average = get_ema_multi_avg_fn(flags.ema)
        self.averaged = AveragedModel(self.model, multi_avg_fn=average).eval()
        self.optimizers = make_optimizers(self.model, flags)
        self.step = 0
        self.seconds = 0.0
        self.rows = []  # of log.jsonl
        self.train_loss = torch.zeros(2, device=flags.device)  # sum, count since the last row

    def state_dict(self):
        """Return all of it. Add what else you let training change, here and in load_state_dict."""
        return dict(
            model=self.model.state_dict(),
            averaged=self.averaged.state_dict(),
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
            step=self.step,
            seconds=self.seconds,
            rows=self.rows,
            train_loss=self.train_loss,
            threads=torch.get_num_threads(),
        )

    def load_state_dict(self, saved):
        self.model.load_state_dict(saved["model"])
        self.averaged.load_state_dict(saved["averaged"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step = saved["step"]
        self.seconds = saved["seconds"]
        self.rows = saved["rows"]
        self.train_loss = saved["train_loss"]


def train(flags, state, stopped=(), intervene=None):
    """Train from `state` to the end and return True, or return False once `stopped` is not empty.
    UserError if a loss in the log is not finite; state.pt then keeps the last good state.

    intervene: f(step, positions (B, N, roles)) -> heads as in Transformer.forward, or None, in
    every training step and evaluation."""
    run, model, averaged = flags.out, state.model, state.averaged.module
    start = time.monotonic() - state.seconds

    while True:  # here `step` steps are done: this is the state that is saved
        step = state.step
        state.seconds = time.monotonic() - start
        if stopped:
            if all(weight.isfinite().all() for weight in model.parameters()):
                write_file(run / "state.pt", state.state_dict())
            return False
        if flags.save_every and step % flags.save_every == 0:
            write_file(run / f"ckpt/{step:06d}.pt", averaged.state_dict())

        # evaluate and save
        if step % flags.eval_every == 0 or step == flags.steps:
            row = log_row(flags, state, intervene)
            if not math.isfinite(row["val"] + (row["train"] or 0)):
                raise UserError(f"the loss is not finite at step {step}: is --lr too high?")
            # without this row, and with the sum of train_loss: --resume evaluates this step again
            write_file(run / "state.pt", state.state_dict())
            state.rows.append(row)
            write_file(run / "log.jsonl", state.rows)
            print_row(flags, state.rows)
            if is_last(flags, row):
                write_file(run / "model.pt", averaged.state_dict())
                return True
            state.train_loss.zero_()

        # take one step; the seed is for what you add, such as dropout: --resume draws the same
        torch.manual_seed(hash((flags.seed, step)))
        index = data.batch_index(flags.seed, step, flags.batch, flags.examples)
        predictions, targets = predict(model, flags, index, step, intervene)
        loss = data.partial_losses(predictions, targets, flags.K).mean()
        loss.backward()
        if flags.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = flags.lr * schedule(step, flags)
            optimizer.step()
            optimizer.zero_grad()
        state.averaged.update_parameters(model)
        state.train_loss += torch.stack([loss.detach(), torch.ones_like(loss)])
        state.step += 1


def is_last(flags, row):
    """Return whether training ends with this row of the log. To stop when x_1 is learned, add
    `or row.get("x_1", 1) < 0.5`."""
    return is_solved(flags, row) or row["step"] == flags.steps


def is_solved(flags, row):
    """Return whether the confirmed loss of a row of the log is below --stop-below."""
    return row.get("confirmed", math.inf) < flags.stop_below


def schedule(step, flags):
    """Return the factor of the learning rate: linear warm-up, constant, then linear decay to 0."""
    warmup = (step + 1) / flags.warmup if flags.warmup else 1
    decay = (flags.steps - step) / (flags.decay * flags.steps) if flags.decay else 1
    return min(warmup, 1, decay)


def predict(model, flags, index, step=0, intervene=None):
    """Return predictions and targets (B, N, target symbols * K) of the examples `index` (B,)."""
    batch = sequences(flags, index.to(flags.device))
    heads = intervene(step, batch.positions) if intervene else None
    with precision(flags):
        return model(batch.inputs, heads=heads), batch.targets


@torch.no_grad()
def evaluate(model, flags, split="validation", n=1024, step=0, intervene=None):
    """Return the list of partial losses on n sequences that training never sees."""
    losses = []
    for index in data.held_out(split, n, flags.device).split(256):
        predictions, targets = predict(model, flags, index, step, intervene)
        losses.append(data.partial_losses(predictions, targets, flags.K))
    return torch.cat(losses).mean(0).tolist()


def log_row(flags, state, intervene=None):
    """Evaluate the averaged model and return the row for log.jsonl."""
    model, step = state.averaged.module, state.step
    losses = evaluate(model, flags, step=step, intervene=intervene)
    row = dict(step=step, seconds=round(state.seconds, 2), lr=flags.lr * schedule(step, flags))
    row["train"] = (state.train_loss[0] / state.train_loss[1]).item() if step else None
    row["val"] = sum(losses) / len(losses)
    row.update(zip(flags.target_names, losses, strict=True))

    # the lowest of many validation losses is biased: more sequences confirm it
    if step == flags.steps or row["val"] < flags.stop_below:
        losses = evaluate(model, flags, "confirmation", 8192, step, intervene)
        row["confirmed"] = sum(losses) / len(losses)
    return row


def print_row(flags, rows):
    """Print the last row, the speed since the row before, and the time left at this speed."""
    row, before = rows[-1], rows[max(len(rows) - 2, 0)]
    rate = (row["step"] - before["step"]) / max(row["seconds"] - before["seconds"], 0.01)
    left = f"{(flags.steps - row['step']) / rate / 60:.1f} min" if rate else "?"
    losses = f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  "
    losses += "  ".join(f"{name} {row[name]:.3f}" for name in flags.target_names)
    speed = f"{rate:5.2f} steps/s  {left} left at most"
    print(f"step {row['step']:5d}/{flags.steps}  {losses}  {speed}")


# ---- a model from the flags of a run


def build(flags):
    """Return the untrained transformer of these flags, on the CPU."""
    if flags.width % flags.heads and not flags.head_size:
        raise UserError(f"--width must be divisible by --heads {flags.heads}: set --head-size")
    head_size = flags.head_size or flags.width // flags.heads
    T = flags.problem.T
    encoding = data.ENCODINGS[flags.rotary]
    return Transformer(
        T,
        flags.N,
        inputs=flags.K + encoding.numbers(T, flags.K, "cpu").shape[1],
        outputs=flags.K * len(flags.target_symbols),
        layers=flags.layers,
        heads=flags.heads,
        width=flags.width,
        head_size=head_size,
        mlp=flags.mlp,
        causal=flags.causal,
        angles=encoding.angles and encoding.angles(T, head_size),
        bias=encoding.bias and encoding.bias(T, flags.heads),
        qk_std=flags.qk_std,
    )


def sequences(flags, index):
    """Return the Batch of the examples `index` of a run's problem and seed."""
    return data.make_batch(
        flags.seed, index, flags.N, flags.D, flags.K, flags.target_symbols, flags.rotary, flags.task
    )


def precision(flags):
    """Return a context in which activations and matrix products have the dtype of the flags.
    Weights, attention between its projections, the loss and averages stay float32."""
    kind = torch.device(flags.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=flags.dtype == "bfloat16")


# what the processor can do and its name; {} if this torch does not tell
CPU = getattr(torch.cpu, "get_capabilities", dict)()


def native_dtype(device):
    """Return "bfloat16" where the device multiplies it faster than float32. Among Intel's
    processors only those with AMX do; the others take twice as long."""
    kind = torch.device(device).type
    if kind == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    elif kind == "cpu":
        amd = "AMD" in CPU.get("cpu_name", "")
        native = CPU.get("amx_bf16") or (amd and CPU.get("avx512_bf16"))
    else:
        native = False
    return "bfloat16" if native else "float32"


# ---- the run directory


def load(run, weights="model.pt"):
    """Return (model, flags) of a run directory, ready to evaluate on the CPU; `weights` may name a
    checkpoint, "ckpt/000080.pt"."""
    flags = read_flags(run).replace(device="cpu")  # config.json has that of the training
    if native_dtype("cpu") == "float32":
        flags.dtype = "float32"  # bfloat16 would be slower
    model = build(flags)
    model.load_state_dict(read_file(pathlib.Path(run, weights)))
    return model.eval(), flags


def read_flags(run):
    """Return the Flags of a run, with the device and what else config.json says; a flag that did
    not exist then has its default."""
    path = pathlib.Path(run, "config.json")
    if not path.exists():
        raise UserError(f"{run} is no run directory: it has no config.json; train.py makes one")
    flags = Flags(**{**DEFAULTS, **read_file(path), "out": pathlib.Path(run)})
    for name, known in ("task", data.TASKS), ("rotary", data.ENCODINGS):
        value = getattr(flags, name)
        if value not in known:
            text = f"{run} has --{name} {value}, unknown here"
            raise UserError(f"{text}: python -m extras.studies.stage knows tasks of the studies")
    return flags


def read_log(run):
    """Return the rows of log.jsonl, a list with one dict per evaluation."""
    return read_file(pathlib.Path(run, "log.jsonl"))


def checkpoints_of(run):
    """Return the checkpoint files of a run, the first step first."""
    files = pathlib.Path(run, "ckpt").glob("*.pt")
    steps = [file for file in files if file.stem.isdigit()]  # and no file of yours
    return sorted(steps, key=lambda file: int(file.stem))


def open_run(flags):
    """Make the directory of a run with its config.json; UserError if it holds a run with other
    flags or, without --resume, this run already."""
    run = flags.out
    if not (run / "config.json").exists():
        if (run / "state.pt").exists():
            raise UserError(f"{run} has lost the config.json of its run: choose another --out")
        write_file(run / "config.json", {**flags.settings, **provenance_of(flags)})
        return
    saved = read_flags(run)
    for name, value in flags.settings.items():
        if getattr(saved, name) != value:
            was = f"{name} {getattr(saved, name)!r}, not {value!r}"
            raise UserError(f"{run} holds a run with other flags ({was}): choose another --out")
    if not flags.resume:
        raise UserError(f"{run} holds this run already: add --resume, or choose another --out")


def provenance_of(flags):
    """Return what config.json says beside the flags; git is empty where there is no repository."""
    git = ["git", "-C", pathlib.Path(__file__).parent, "describe", "--always", "--dirty"]
    try:
        version = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        version = ""
    hardware = CPU.get("cpu_name", platform.machine())
    if "cuda" in flags.device:
        hardware = torch.cuda.get_device_name(flags.device)
    return dict(
        device=flags.device,
        hardware=hardware,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        git=version,
    )


def write_file(path, content):
    """Write tensors as .pt, a list of dicts as .jsonl, a dict as .json. At `path` there is always a
    whole file, the old one or the new one, even if two programs write it at once."""
    if path.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getvalue()
    elif path.suffix == ".jsonl":
        content = "".join(json.dumps(row) + "\n" for row in content).encode()
    else:
        content = (json.dumps(content, indent=1) + "\n").encode()
    with writing(path):
        temporary = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.tmp")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path):
    """Make the folder of a file that the body writes; UserError if the disk refuses either."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def read_file(path, default=None, device="cpu"):
    """Return what write_file wrote, or `default` if there is one and no such file; UserError if
    there is neither, or the file is damaged."""
    if not path.exists():
        if default is not None:
            return default
        text = "a run that is not finished goes on with python train.py ... --resume"
        raise UserError(f"there is no file {path}; {text}")
    try:
        if path.suffix == ".pt":
            if zipfile.ZipFile(path).testzip():  # torch.load ignores the checksums
                raise zipfile.BadZipFile
            return torch.load(path, map_location=device, weights_only=True)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except pickle.UnpicklingError:  # an object in it that is no tensor
        raise
    except Exception as error:  # whatever the reader of a damaged file stumbled on
        raise UserError(f"{path} is damaged ({type(error).__name__}): restore it") from None


# ---- the flags of a run


def parser():
    """Return the ArgumentParser of train.py. To add a flag, add a line."""
    p = command_line("train.py", __doc__)
    count, count_or_0, amount = number(int, 1), number(int, 0), number(float, 0)
    share, below_one = number(float, 0, 1), number(float, 0, 0.999999)
    seed = number(int, 0, 2**63 - 1)
    flag = p.add_argument

    def add(name, kind, default, meaning):  # a flag with a value
        flag(name, type=kind, default=default, help=meaning)

    # the problem (Section 6)
    flag("--task", default="chain", choices=data.TASKS, help="a row of data.TASKS")
    add("--N", count, 4, "chains per sequence")
    add("--D", count, 3, "retrieval steps per chain")
    add("--K", count, 4, "numbers per symbol; even with --rotary input")
    flag("--no-ic", dest="ic", action="store_false", help="predict x_D alone: no curriculum")
    flag("--targets", type=int, nargs="+", default=[], help="predict only these: 1 3 for x_1, x_3")
    add("--examples", count_or_0, 2**18, "training set; 0 = fresh examples only")

    # the model (Section 8.1)
    flag("--rotary", default="input", choices=data.ENCODINGS, help="input: in the tokens; qk: RoPE")
    add("--layers", count, 12, "number of layers")
    add("--heads", count, 1, "attention heads per layer")
    add("--width", count, 128, "size of the residual stream")
    add("--head-size", count_or_0, 0, "size of one head; 0 = width / heads")
    flag("--no-mlp", dest="mlp", action="store_false", help="leave out the MLPs")
    flag("--no-causal", dest="causal", action="store_false", help="leave out the causal mask")

    # training
    flag("--optimizer", default="muon", choices=["muon", "adamw"], help="the paper has adamw")
    add("--steps", count, 1200, "at most; the learning rate spans them")
    add("--stop-below", amount, 0.01, "stop at this confirmed loss; 0 = never")
    add("--batch", count, 128, "sequences per step")
    add("--lr", amount, 1e-3, "learning rate, of Muon and of AdamW")
    add("--warmup", count_or_0, 100, "steps over which the rate rises")
    add("--decay", share, 0.5, "last share of the steps: the rate falls to 0")
    add("--beta2", below_one, 0.99, "Adam's second beta")
    add("--weight-decay", amount, 0.1, "decoupled weight decay of the matrices")
    add("--ema", below_one, 0.98, "decay of the averaged weights; 0 = no averaging")
    add("--clip", amount, 0.1, "largest norm of the gradient; 0 = no clipping")
    add("--qk-std", amount, 0.1, "initial std of W_Q and W_K; GPT-2 has 0.02")
    add("--init", str, "", "start from the weights of this run, which has the same shape")
    add("--seed", seed, 0, "of the data, their order, and the initial weights")
    flag("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of products")
    add("--eval-every", count, 50, "steps between evaluations; each saves")
    add("--save-every", count_or_0, 0, "steps between checkpoints in ckpt/; 0 = none")

    p.set_defaults(intervene="")  # a setting without a flag: the name of run_once's function

    # the machine and the folder, which are no settings of a run
    add("--device", str, "auto", "auto = cuda if there is one, else cpu; mps is not tested")
    add("--out", pathlib.Path, None, "run directory; by default named by the flags")
    flag("--resume", action="store_true", help="continue from state.pt, if it exists")
    return p


DEFAULTS = vars(parser().parse_args([]))
for name in "device", "out", "resume":
    del DEFAULTS[name]  # what is left are the settings, which are fixed for a run


class Flags(argparse.Namespace):
    """The flags of a run as attributes, and what follows from them."""

    @property
    def problem(self):
        """The data.Task: roles, symbols, tokens."""
        return data.TASKS[self.task](self.N, self.D)

    @property
    def target_symbols(self):
        """The k of the symbols x_k that each query predicts, in order."""
        last = self.problem.symbols - 1
        if self.targets:
            return sorted(set(self.targets))
        return list(range(1, last + 1)) if self.ic else [last]

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
        return {name: getattr(self, name) for name in DEFAULTS}

    def replace(self, **changes):
        """Return the same flags with some changed."""
        return Flags(**{**vars(self), **changes})


def parse_flags(arguments=None, folder="out"):
    """Return the Flags of a command line, with its device and dtype chosen, and its run directory,
    by default one in `folder`."""
    flags = parser().parse_args(arguments, Flags())
    last = flags.problem.symbols - 1
    for k in flags.targets:
        if not 1 <= k <= last:
            raise UserError(f"--targets must be among 1 to {last}")
    if flags.targets and not flags.ic:
        raise UserError("--no-ic means x_D alone: leave out either it or --targets")

    # the folder is named while dtype is still "auto", alike on every machine
    flags.out = flags.out or pathlib.Path(folder, run_name(flags))
    if flags.device == "auto":
        flags.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=flags.device).item()
    except Exception:  # torch refuses in many ways
        raise UserError(f"--device {flags.device} cannot be used here: choose another") from None
    if flags.dtype == "auto":
        begun = (flags.out / "config.json").exists()  # then it goes on as it began
        flags.dtype = read_flags(flags.out).dtype if begun else native_dtype(flags.device)
    return flags


UNNAMED = "eval_every", "save_every"  # settings that no name of a run says


def run_name(flags):
    """Return L12_H1_D3_s0, with all other settings before the seed that differ from their
    defaults, but for UNNAMED ones."""
    name = f"L{flags.layers}_H{flags.heads}_{flags.problem.title}"  # D=3 becomes D3 below
    left_out = "layers", "heads", "task", "D", "seed", *UNNAMED
    for key, value in flags.settings.items():
        if key in left_out or value == DEFAULTS[key]:
            continue
        if isinstance(value, bool):
            name += f"_{key}" if value else f"_no-{key}"
        elif isinstance(value, list):
            name += f"_{key}{'-'.join(map(str, value))}"
        else:
            name += f"_{key}{value}"
    return f"{name}_s{flags.seed}".replace("=", "").replace(" ", "_").replace("/", "-")


# ---- the command line


def run_once(flags, stopped=(), intervene=None):
    """Train the run in its directory, or continue it; return and raise what `train` does. The name
    of `intervene` is a setting of the run; give such a run an --out of its own."""
    run = flags.out
    if intervene:
        flags.intervene = getattr(intervene, "__name__", "unnamed")
    state = State(flags)  # first, since a wrong flag leaves no folder
    check_device(flags)
    open_run(flags)
    if (run / "model.pt").exists():
        return True
    if (run / "state.pt").exists():
        saved = read_file(run / "state.pt", device=flags.device)
        state.load_state_dict(saved)
        torch.set_num_threads(saved["threads"])  # with another number the last bits differ
        print(f"resumed {run} at step {state.step}")
    elif flags.resume:
        print(f"nothing to resume in {run}: from the start")
    return train(flags, state, stopped, intervene)


def check_device(flags):
    """UserError if the device makes other sequences than the CPU, as a silent bug of it would."""
    index = torch.arange(16)
    here, there = sequences(flags, index), sequences(flags, index.to(flags.device))
    for expected, made in zip(here, there, strict=True):
        if not torch.allclose(made.cpu(), expected, atol=1e-4):
            raise UserError(f"--device {flags.device} makes other sequences than the CPU")


def summary(run):
    """Return the end of a run as lines of "name: value", easy to grep."""
    flags, last = read_flags(run), read_log(run)[-1]
    lines = ["---", f"run: {run}"]
    if flags.stop_below:
        lines.append(f"solved: {is_solved(flags, last)}")
    for name in last:
        if name not in ("lr", "train"):
            lines.append(f"{name}: {round(last[name], 5)}")
    return "\n".join(lines)


def keep_freed_memory():
    """Let glibc reuse freed memory: to return it costs each step thousands of page faults."""
    if sys.platform == "linux":
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
        glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes


def main():
    stopped = []

    def stop(kind, frame):
        stopped.append(kind)  # after the step that it is in
        signal.signal(kind, signal.SIG_DFL)  # the second signal stops at once

    with program("train.py"):
        flags = parse_flags()
        keep_freed_memory()
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        if not run_once(flags, stopped):
            words = [word for word in sys.orig_argv if word != "--resume"]
            print(f"stopped; to continue: {shlex.join(words)} --resume")
            sys.exit(128 + stopped[0])
        print(summary(flags.out))


if __name__ == "__main__":
    main()
