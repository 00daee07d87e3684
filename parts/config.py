"""The settings of a run, and the run directory that holds them.

    model, flags = load("results/A")     # a trained model, and the flags it was trained with

FLAGS is the only table of flags. To add a flag, add a row: to the part "model" if model.Transformer
takes it, to "machine" if it may differ when a run is resumed.

A run directory, out/L12_H1_D3_s0/ or the like, holds config.json (the flags), log.jsonl (one row
per evaluation), model.pt (the final weights), state.pt (what --resume needs), ckpt/ (with
--save-every), circuit.json of ablate.py, emergence.json and the figures of analyze.py.
"""

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from parts import UserError, command_line

import torch
from filelock import FileLock, Timeout

from data import ENCODINGS, TASKS, make_batch
from model import Transformer


# ---- the table of flags


class Flag(NamedTuple):
    """A default of True or False makes a switch, --no-name or --name, and its help says what typing
    the switch does."""

    default: Any
    help: str
    least: float = 0
    most: float = 10**6
    choices: tuple = ()


FLAGS = {
    "problem": {  # Section 6
        "task": Flag("chain", "chain (Section 6) or conditional (Section 3.1)", choices=TASKS),
        "N": Flag(4, "chains per sequence", 1, 1000),
        "D": Flag(3, "retrieval steps per chain", 1, 1000),
        "K": Flag(4, "dimensions per symbol, an even number", 2, 1000),
        "ic": Flag(True, "predict x_D alone instead of x_1..x_D: no implicit curriculum"),
        "targets": Flag([], "predict only these symbols: 1 3 for x_1 and x_3 (default: all)"),
        "circuit": Flag("", "freeze attention to a circuit: minimal = the least for this depth"),
        "examples": Flag(2**18, "size of the training set; 0 = fresh examples only", 0, 10**9),
    },
    "model": {  # Section 8.1
        "rotary": Flag("input", "input = appended to the tokens, qk = RoPE", choices=ENCODINGS),
        "layers": Flag(12, "number of layers", 1, 1000),
        "heads": Flag(1, "attention heads per layer", 1, 1000),
        "width": Flag(128, "size of the residual stream", 1, 20_000),
        "head_size": Flag(0, "size of one head; 0 = width / heads", 0, 20_000),
        "mlp": Flag(True, "leave out the MLPs: attention layers only"),
        "causal": Flag(True, "leave out the causal mask: every token may attend to every other"),
    },
    "training": {
        "optimizer": Flag(
            "muon",
            "adamw = AdamW for all weights, as in the paper (with --steps 3000 --qk-std 0.02)",
            choices=("muon", "adamw"),
        ),
        "steps": Flag(1200, "most steps to take; the learning rate schedule spans them", 1),
        "target": Flag(0.01, "stop below this MSE, confirmed on 8192 sequences; 0 = never"),
        "batch": Flag(128, "sequences per step", 1),
        "lr": Flag(1e-3, "learning rate; a step of Muon is as large as one of AdamW"),
        "warmup": Flag(100, "steps over which the learning rate rises from 0"),
        "decay": Flag(0.5, "last fraction of the steps, over which the rate falls to 0", 0, 1),
        "beta2": Flag(0.99, "Adam's second beta", 0, 0.9999999),
        "weight_decay": Flag(0.1, "decoupled weight decay of the matrices"),
        "ema": Flag(0.98, "decay per step of the averaged weights; 0 = no averaging", 0, 0.99999),
        "clip": Flag(0.1, "largest norm of the gradient; 0 = no clipping"),
        "qk_std": Flag(0.1, "initial std of W_Q and W_K (0.02 elsewhere): less for a wider model"),
        "init": Flag("", "start from the weights of this run, but for symbols that it lacks"),
        "seed": Flag(0, "seed of the data, its order, and the initial weights", 0, 2**63 - 1),
        "dtype": Flag(
            "auto",
            "dtype of activations and matrix products; auto = bfloat16 where it is faster",
            choices=("auto", "float32", "bfloat16"),
        ),
        "eval_every": Flag(50, "steps between evaluations; each of them saves the state", 1),
        "save_every": Flag(0, "steps between checkpoints of the weights in ckpt/; 0 = none"),
    },
    "machine": {
        "device": Flag("auto", "cuda, mps or cpu; auto = the first of these that exists"),
        "compile": Flag(False, "torch.compile the model"),
        "out": Flag(None, "run directory (default: out/ and a name made from the flags)"),
        "resume": Flag(False, "continue from state.pt of the run directory, if it exists"),
    },
}
ROWS = {name: flag for part in FLAGS.values() for name, flag in part.items()}
SETTINGS = [name for name in ROWS if name not in FLAGS["machine"]]  # fixed for a run


class Flags(argparse.Namespace):
    """The flags of a run as attributes, and what follows from them."""

    @property
    def problem(self):
        """The data.Task: roles, symbols, tokens."""
        return TASKS[self.task](self.N, self.D)

    @property
    def target_symbols(self):
        """The k of the symbols x_k that each query predicts, in order."""
        symbols = [*range(1, self.problem.symbols)]
        return sorted(self.targets) or (symbols if self.ic else symbols[-1:])

    @property
    def target_names(self):
        """The names of the target symbols: x_1, x_2, ..."""
        return [f"x_{k}" for k in self.target_symbols]

    @property
    def title(self):
        """12 layers x 1 head, D=3, seed 0."""
        heads = f"{self.heads} head{'s' * (self.heads > 1)}"
        return f"{self.layers} layers x {heads}, {self.problem.title}, seed {self.seed}"

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

    def part(self, name):
        """Return {flag: value} for one part of the table."""
        return {flag: getattr(self, flag) for flag in FLAGS[name]}


# ---- from the command line


def parse(arguments, description):
    """Return the Flags that these arguments of train.py give, with the device, the dtype and the
    run directory settled; UserError for a wrong value."""
    p = command_line("train.py", description)
    for title, rows in FLAGS.items():
        group = p.add_argument_group(title)
        for name, flag in rows.items():
            add_flag(group, name, flag)
    flags = p.parse_args(arguments, Flags())
    check(flags)
    flags.device = find_device(flags.device)

    # the same run may be written in two ways, and gets one name
    last = flags.problem.symbols - 1
    flags.targets = sorted({*flags.targets})
    if flags.targets == [*range(1, last + 1)]:
        flags.targets = []
    if flags.targets == [last]:
        flags.targets, flags.ic = [], False
    flags.out = flags.out or run_directory(flags)  # before dtype is settled: no machine differs
    if flags.dtype == "auto":
        flags.dtype = native_dtype(flags.device)
    return flags


def add_flag(group, name, flag):
    """Add a row of the table to a group of an ArgumentParser."""
    option, default = f"--{name.replace('_', '-')}", flag.default
    if isinstance(default, bool):
        option = option.replace("--", "--no-") if default else option
        action = "store_false" if default else "store_true"
        group.add_argument(option, dest=name, action=action, help=flag.help)
        return
    nargs = "+" if isinstance(default, list) else None
    kind = Path if default is None else int if nargs else type(default)
    text = flag.help if default in (None, "", []) else f"{flag.help} (default: {default})"
    choices = flag.choices or None
    group.add_argument(option, default=default, type=kind, nargs=nargs, choices=choices, help=text)


def check(flags):
    """Raise UserError unless these can be the flags of a run. This is the only place where the
    values of flags are checked."""
    for name in SETTINGS:
        value, row = getattr(flags, name), ROWS[name]
        if isinstance(value, (int, float)) and not row.least <= value <= row.most:  # catches nan
            bound = f"at most {row.most}" if value > row.most else f"at least {row.least}"
            raise UserError(f"--{name.replace('_', '-')} must be {bound}, not {value}")
    if ROWS["D"].default != flags.D and flags.problem == flags.replace(D=ROWS["D"].default).problem:
        raise UserError(f"--task {flags.task} is the same for every --D: leave --D out")
    possible = [*range(1, flags.problem.symbols)]
    if not {*flags.target_symbols} <= {*possible}:
        raise UserError(f"--targets must be among {' '.join(map(str, possible))}")
    if flags.targets and not flags.ic:
        raise UserError("--no-ic means x_D alone: leave out either it or --targets")
    if flags.K % 2:
        raise UserError(f"--K must be even (rotary encodings turn pairs), not {flags.K}")
    if flags.width % flags.heads and not flags.head_size:
        raise UserError(f"--width must be divisible by --heads {flags.heads}, or set --head-size")
    if ENCODINGS[flags.rotary].angles and flags.size % 2:
        raise UserError(f"--rotary {flags.rotary} needs an even head size, not {flags.size}")


def find_device(name):
    """Return the device with this name, or the first that exists for "auto"; UserError if there is
    no such device."""
    if name == "auto":
        fallback = "mps" if torch.backends.mps.is_available() else "cpu"
        return "cuda" if torch.cuda.is_available() else fallback
    try:
        torch.empty(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"--device {name} does not exist here: choose another") from None
    return name


def native_dtype(device):
    """Return "bfloat16" where the device multiplies it faster than float32. Among Intel's
    processors only those with AMX do; the others take twice as long."""
    kind = torch.device(device).type
    native = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if kind == "cpu":
        cpu = getattr(torch.cpu, "get_capabilities", dict)()  # older torch has no such function
        native = cpu.get("amx_bf16") or cpu.get("avx512_bf16") and "AMD" in cpu.get("cpu_name", "")
    return "bfloat16" if native else "float32"


def run_directory(flags):
    """Return out/L12_H1_D3_s0, with every other flag that differs from its default in the name."""
    name = f"L{flags.layers}_H{flags.heads}_{flags.problem.title.replace('=', '')}"
    for key in SETTINGS:
        value, default = getattr(flags, key), ROWS[key].default
        implied = key in ("layers", "heads", "task", "D", "seed", "eval_every", "save_every")
        if not implied and value != default:
            text = "-".join(map(str, value)) if isinstance(value, list) else Path(str(value)).name
            name += f"_no-{key}" if value is False else f"_{key}{'' if value is True else text}"
    return Path("out", f"{name}_s{flags.seed}")


# ---- files


def write_file(path, write):
    """Call write(temporary path), then rename: at `path` there is always a whole file, the old one
    or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.replace(path)


def write_text(path, text):
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_rows(path, rows):
    """Write dicts as a file of JSON lines."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_tensors(path, tensors):
    write_file(path, lambda temporary: torch.save(tensors, temporary))


def read_tensors(path, device="cpu"):
    """Return what write_tensors wrote; UserError if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load ignores the checksums of the zip
            damaged = file.testzip()
        if not damaged:
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a damaged file raises whatever the unpickler stumbled on
        damaged = type(error).__name__
    raise UserError(f"{path} is damaged ({damaged}): restore it, or use another --out")


def read_json(path, lines=False):
    """Return what a JSON file holds, or with lines=True a list with what each of its lines holds;
    UserError if the file is damaged."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}): restore it") from None


def save_figure(figure, path):
    """Write a matplotlib figure as a PNG and close it."""
    import matplotlib.pyplot as plt

    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
    plt.close(figure)


def symbol_color(k, symbols):
    """Return the colour of x_k in every figure: x_1 is dark, the last symbol is bright."""
    import matplotlib.pyplot as plt

    return plt.get_cmap("viridis")(0.9 * (k - 1) / max(1, symbols - 1))


def print_progress(what, done, total, began):
    """Print on stderr, over the line before, how far a measurement is and how long it will take;
    began: time.time() at its start."""
    left = (time.time() - began) / done * (total - done)
    end = "\n" if done == total else ""
    print(f"\r{what} {done}/{total}, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)


def progress(what, items):
    """Yield the items of a list; print after each how far it is and how long it will take."""
    began = time.time()
    for done, item in enumerate(items, 1):
        yield item
        print_progress(what, done, len(items), began)


# ---- reading a run


def read_flags(run):
    """Return the Flags of a run; a flag that is younger than the run has its default."""
    path = Path(run, "config.json")
    if not path.exists():
        raise UserError(f"{run} is no run directory: it has no config.json; train.py makes one")
    defaults = {name: flag.default for name, flag in ROWS.items()}
    return Flags(**(defaults | read_json(path) | dict(out=Path(run))))


def read_log(run):
    """Return the rows of log.jsonl, a list with one dict per evaluation."""
    return read_json(Path(run, "log.jsonl"), lines=True)


def first_below(steps, losses, level):
    """Return the step, linearly interpolated, at which a curve first passes below level; the first
    step if it begins there (with --init); None if it never does."""
    if losses and losses[0] < level:
        return steps[0]
    for i in range(1, len(steps)):
        before, after = losses[i - 1], losses[i]
        if after < level <= before:
            return steps[i - 1] + (steps[i] - steps[i - 1]) * (before - level) / (before - after)
    return None


def crossings(rows, flags):
    """Return {symbol: the step at which it was learned, or None} from the rows of a log."""
    steps, level = [row["step"] for row in rows], flags.problem.learned
    names = flags.target_names
    return {name: first_below(steps, [row[name] for row in rows], level) for name in names}


def checkpoints_of(run):
    """Return the checkpoint files of a run, the first step first."""
    return sorted(Path(run, "ckpt").glob("*.pt"), key=lambda file: int(file.stem))


def build(flags):
    """Return the untrained transformer of these flags, on the CPU."""
    T, encoding = flags.problem.T, ENCODINGS[flags.rotary]
    shape = flags.part("model") | dict(head_size=flags.size, qk_std=flags.qk_std)
    shape["rotary"] = encoding.angles and encoding.angles(T, flags.size)
    inputs = flags.K + encoding.appended(T, flags.K).shape[1]
    return Transformer(T, flags.N, inputs, flags.K * len(flags.target_symbols), **shape)


def load(run, weights="model.pt", device="cpu"):
    """Return (model, flags) of a run directory, ready to evaluate; `weights` may name a checkpoint,
    "ckpt/000080.pt"."""
    flags = read_flags(run).replace(device=device)  # this machine, not the one it was trained on
    if native_dtype(device) == "float32":
        flags.dtype = "float32"  # bfloat16 would be many times slower
    model, path = build(flags), Path(run, weights)
    try:
        model.load_state_dict(read_tensors(path))
    except RuntimeError:
        raise UserError(f"{path} holds the weights of another model than config.json") from None
    return model.to(device).eval(), flags


def untrained(flags):
    """Return the transformer of these flags before its first step, on the CPU. With --init it has
    the weights of that run; of its output layer, those of symbols that both runs predict."""
    model = build(flags)
    if not flags.init:
        return model
    other, theirs = load(flags.init)
    if any(getattr(theirs, key) != getattr(flags, key) for key in (*flags.part("model"), "K")):
        raise UserError(f"--init {flags.init} has another shape: use the model flags of that run")
    weights, fresh = other.state_dict(), model.state_dict()
    for name in ("head.weight", "head.bias"):
        rows, learned = (state[name].unflatten(0, (-1, flags.K)) for state in (fresh, weights))
        for k in {*flags.target_symbols} & {*theirs.target_symbols}:
            rows[flags.target_symbols.index(k)] = learned[theirs.target_symbols.index(k)]
        weights[name] = fresh[name]
    model.load_state_dict(weights)
    return model


def sequences(flags, index):
    """Return the Batch of the examples `index` of a run's problem and seed."""
    problem = {name: getattr(flags, name) for name in ("task", "N", "D", "K", "rotary")}
    return make_batch(flags.seed, index, targets=flags.target_symbols, **problem)


def precision(flags):
    """Return a context in which activations and matrix products have the dtype of the flags.
    Weights, attention scores, LayerNorm's statistics, the loss and the optimizer stay float32."""
    kind = torch.device(flags.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=flags.dtype == "bfloat16")


# ---- writing into a run


@contextlib.contextmanager
def alone_in(folder):
    """Let only one process at a time into a folder; UserError for the others. A killed process
    leaves nothing locked."""
    lock = FileLock(folder / ".lock")
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        raise UserError(f"{folder} is in use by another process: wait until it ends") from None


def open_run(flags):
    """Write config.json of a new run, or check that the run in the folder has the same flags and
    may be resumed; UserError if not."""
    run, path, provenance = flags.out, flags.out / "config.json", provenance_of(flags)
    if not path.exists():
        names = [file.name for file in run.iterdir() if file.suffix != ".tmp"]
        if {*names} - {".lock"}:
            raise UserError(f"{run} holds files that are no run's: choose another --out")
        return write_text(path, json.dumps(flags.settings | provenance, indent=1) + "\n")
    saved = read_flags(run)
    for name, value in flags.settings.items():
        if getattr(saved, name) != value:
            was = f"{name} {getattr(saved, name)}, not {value}"
            raise UserError(f"{run} holds a run with other flags ({was}): choose another --out")
    if not flags.resume:
        raise UserError(f"{run} holds this run already: add --resume, or choose another --out")
    if saved.git != provenance["git"] and not (run / "model.pt").exists():
        was = f"git {saved.git or 'unknown'}"
        print(f"{run}: the code has changed since it began ({was})", file=sys.stderr)


def provenance_of(flags):
    """Return what config.json says beside the flags. git ends with -dirty if files were changed
    since the commit, and is empty outside of a clone."""
    command, git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"], ""
    with contextlib.suppress(OSError):
        git = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    cpu = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", platform.machine())
    return dict(
        device=flags.device,
        hardware=torch.cuda.get_device_name() if "cuda" in flags.device else cpu,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        git=git,
    )
