"""Run directories, of which everything downstream reads: written whole or not at all, opened once.

    model, flags = load("results/A")     # ready to evaluate; flags: all flags of the run

out/L12_H1_D3_s0/ (the name is made from the flags) holds config.json; log.jsonl, one row per
evaluation; model.pt, the final weights; state.pt, what --resume needs; ckpt/, with --save-every;
circuit.json of ablate.py; emergence.json and figures of analyze.py.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from parts import Refused
from parts.flags import ROWS, SETTINGS, Flags, check, cpu_capabilities, native_dtype

import torch
from filelock import FileLock, Timeout

from data import ENCODINGS, held_out, make_batch
from model import Transformer


BEFORE = {"optimizer": "adamw", "ema": 0.0, "qk_std": 0.02}  # what an older config.json means
MAKERS = "data model train parts/flags parts/flow parts/runs parts/circuit".split()  # of a run
MADE_BY = ["device", "hardware", "threads", "torch", "git", "code"]  # what else it says


# ---- files


def write_file(path, write):
    """Call write(temporary path), then rename: the file at `path` is always whole, the old or the
    new one, after a power loss too."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise OSError(error.errno, error.strerror or str(error), f"cannot write {path}") from None


def flush(path):
    """Have the system put a file, or the names in a folder, onto the disk."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_text(path, text):
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_rows(path, rows):
    """A file of JSON lines."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_tensors(path, tensors):
    """torch.save, by way of memory: on a full disk it would raise RuntimeErrors of its own. What
    could not be read again raises here."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    buffer.seek(0)
    torch.load(buffer, map_location="meta", weights_only=True)
    write_file(path, lambda temporary: temporary.write_bytes(buffer.getbuffer()))


def read_tensors(path, device="cpu"):
    """The dict that write_tensors wrote; Refused if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not look at the checksums
            damaged = file.testzip()
        found = None if damaged else torch.load(path, map_location=device, weights_only=True)
        if isinstance(found, dict):
            return found
        damaged = damaged or type(found).__name__
    except FileNotFoundError:
        raise unusable(path, "is missing") from None
    except Exception as error:  # a damaged file raises whatever the unpickler stumbled on
        damaged = type(error).__name__
    raise unusable(path, f"is damaged ({damaged})")


def read_json(path, lines=False):
    """The dict in a JSON file, or with lines=True a list of them, one per line. Refused if the file
    holds anything else, or numbers that are not finite."""

    def finite(text):
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text} is not finite")
        return value

    try:
        text = Path(path).read_text(encoding="utf-8")
        parts = text.splitlines() if lines else [text]
        found = [json.loads(part, parse_constant=finite, parse_float=finite) for part in parts]
    except (OSError, RecursionError, ValueError) as error:
        raise unusable(path, f"cannot be read ({type(error).__name__})") from None
    if not found or not all(isinstance(one, dict) for one in found):
        raise unusable(path, "holds something else" if found else "is empty")
    return found if lines else found[0]


def unusable(path, what):
    return Refused(f"{path} {what}: restore it, or use another run directory")


def save_figure(figure, path):
    """Write a figure of matplotlib as a PNG and forget it."""
    import matplotlib.pyplot as plt

    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
    plt.close(figure)


def symbol_color(k, symbols):
    """The colour of x_k in every figure; x_1 is dark, the last one bright."""
    import matplotlib.pyplot as plt

    return plt.get_cmap("viridis")(0.9 * (k - 1) / max(1, symbols - 1))


def progress(what, done, total, began):
    """The line on stderr that says how far a measurement is."""
    left = (time.time() - began) / done * (total - done)
    end = "\n" if done == total else ""
    print(f"\r{what} {done}/{total}, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)


# ---- reading a run


def read_flags(run):
    """The Flags of a run; those that it does not know have their default. Refused if they cannot
    be, or if it knows one that we do not: it was trained by other code."""
    path = Path(run, "config.json")
    if not path.is_file():
        raise Refused(f"{run} is no run directory: it has no config.json; train.py makes one")
    config = read_json(path)
    unknown = config.keys() - {*SETTINGS, *MADE_BY}
    if unknown or "layers" not in config:
        what = f"has flags that are not known here: {', '.join(sorted(unknown))}"
        raise unusable(path, what if unknown else "holds no flags")
    defaults = {name: flag.default for name, flag in ROWS.items()}
    flags = Flags(**(defaults | BEFORE | config | dict(out=Path(run))))
    try:
        check(flags)
    except Refused as error:
        raise Refused(f"{path} cannot be: {error}") from None
    return flags


def read_log(run):
    """The rows of log.jsonl, a list of dicts with one row per evaluation; Refused if it holds
    anything else."""
    path, flags = Path(run, "log.jsonl"), read_flags(run)
    rows = read_json(path, lines=True)
    if not are_rows(rows, flags):
        raise unusable(path, "holds something else than the rows of a log, in order")
    return rows


def are_rows(rows, flags):
    """Whether dicts are the rows of a log: their steps rise, their values are finite numbers."""
    needed = {"step", "seconds", "lr", "val", *flags.symbols}
    steps = [row.get("step") for row in rows]
    values = [one for row in rows for one in (row | {"train": row.get("train") or 0}).values()]
    right = all(type(one) in (int, float) and abs(one) < math.inf for one in values)
    if not right or not all(needed <= row.keys() for row in rows):  # train is none at first
        return False
    return steps == sorted({*steps}) and all(isinstance(step, int) for step in steps)


def first_below(steps, losses, level):
    """The step, linearly interpolated, at which a curve first passes below level: the first step if
    it begins there (with --init); None if never."""
    if losses and losses[0] < level:
        return steps[0]
    for i in range(1, len(steps)):
        before, after = losses[i - 1], losses[i]
        if after < level <= before:
            return steps[i - 1] + (steps[i] - steps[i - 1]) * (before - level) / (before - after)
    return None


def crossings(rows, flags):
    """{symbol: the step at which it was learned, or None} of the rows of a log."""
    steps, level = [row["step"] for row in rows], flags.problem.learned
    return {name: first_below(steps, [row[name] for row in rows], level) for name in flags.symbols}


def in_order(steps):
    """Whether symbols were learned in order, the last ones perhaps never; None for fewer than two
    that were."""
    reached = [step for step in steps if step is not None]
    if len(reached) < 2:
        return None
    return reached == sorted(reached) and reached == steps[: len(reached)]


def build(flags):
    """The untrained transformer of these flags, on the CPU."""
    T, encoding = flags.problem.T, ENCODINGS[flags.rotary]
    told = flags.problem.symbols - 1 if flags.mixture else 0
    own = flags.part("model") | dict(head_size=flags.size, qk_std=flags.qk_std)
    own["rotary"] = encoding.angles and encoding.angles(T, flags.size)
    inputs = flags.K + encoding.appended(T, flags.K).shape[1] + told
    outputs = flags.K * (1 if flags.mixture else len(flags.asked))
    return Transformer(T, flags.N, inputs, outputs, **own)


def load(run, weights="model.pt", device="cpu"):
    """(model, flags) of a run directory, ready to evaluate; `weights` may name a checkpoint,
    "ckpt/000080.pt". Refused if the directory holds no such run."""
    flags = read_flags(run).but(device=device)  # here, not where it was trained
    if native_dtype(device) == "float32":
        flags.dtype = "float32"  # bfloat16 would be many times slower
    model, path = build(flags), Path(run, weights)
    try:
        model.load_state_dict(read_tensors(path))
    except (AttributeError, RuntimeError, TypeError):
        raise unusable(path, "holds the weights of another model than config.json") from None
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise unusable(path, "holds weights that are not finite")
    model = model.to(device).eval()
    if weights == "model.pt" and not flags.circuit and not flags.mixture:
        check_score(model, flags, run)
    return model, flags


@torch.no_grad()
def check_score(model, flags, run):
    """Refused unless a model has the validation error that the last row of its log says."""
    batch = sequences(flags, held_out("validation", 1024, flags.device))
    with precision(flags):
        now = (model(batch.inputs) - batch.targets).square().mean().item()
    logged = read_log(run)[-1]["val"]
    if not abs(now - logged) < 0.1 * logged + 0.002:
        what = f"{run} has a loss of {now:.4f}, and its log says {logged:.4f}"
        raise Refused(f"{what}: it was trained by other code, check that out")


def untrained(flags):
    """The transformer of these flags before its first step, on the CPU: with --init the weights of
    that run, where it has such. Refused if it is of another shape."""
    model = build(flags)
    if not flags.init:
        return model
    try:
        other, theirs = load(flags.init)
    except Refused as error:
        raise Refused(f"--init: {error}") from None

    # heads of another number may have weights of the same shape
    def shape(one):
        given = one.part("model") | dict(head_size=one.size, K=one.K, mixture=one.mixture)
        return given | (dict(D=one.D) if one.mixture else {})

    different = [f"{key} {was}" for key, was in shape(theirs).items() if shape(flags)[key] != was]
    if different:
        what = f"--init {flags.init} is of another shape ({', '.join(different)})"
        raise Refused(f"{what}: choose the flags of that run, or another one")

    # the outputs of symbols that both are asked for; with --mixture the same K numbers say each
    asked, known = ([0], [0]) if flags.mixture else (flags.asked, theirs.asked)
    weights, ours = other.state_dict(), model.state_dict()
    for name in ("head.weight", "head.bias"):
        rows = ours[name].unflatten(0, (-1, flags.K))
        learned = weights.pop(name).unflatten(0, (-1, flags.K))
        for k in {*asked} & {*known}:
            rows[asked.index(k)] = learned[known.index(k)]
    model.load_state_dict(ours | weights)
    return model


def sequences(flags, index):
    """The Batch of the examples `index` of a run's problem and seed."""
    same = {name: getattr(flags, name) for name in ("task", "N", "D", "K", "rotary", "mixture")}
    return make_batch(flags.seed, index, targets=flags.asked, **same)


def precision(flags):
    """A context in which activations, the residual stream among them, and matrix products are of
    --dtype. Weights, attention scores, LayerNorm's statistics, the loss and the optimizer stay
    float32."""
    kind = torch.device(flags.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=flags.dtype == "bfloat16")


# ---- opening a run to change it


@contextlib.contextmanager
def alone_in(folder):
    """Only one process at a time; Refused for the others. A kill leaves nothing locked."""
    lock = FileLock(folder / ".lock")
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        what = f"{folder} is in use by another process"
        raise Refused(f"{what}: wait until it ends, or choose another --out") from None


def code_hash():
    """Of the files that make a model and its batches."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in MAKERS:
        digest.update((root / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def open_run(flags):
    """Make the folder and config.json of a new run, or see that those of an old one are the same.
    Refused if they are not; OSError if it cannot be written."""
    run = flags.out
    run.mkdir(parents=True, exist_ok=True)
    path = run / "config.json"
    if not path.exists():
        left = [one for one in run.iterdir() if one.suffix != ".tmp" and one.name != ".lock"]
        if left:
            raise Refused(f"{run} holds something else than a run: choose another --out")
        config = {name: getattr(flags, name) for name in SETTINGS} | made_by(flags)
        write_text(path, json.dumps(config, indent=1) + "\n")
        return
    there, different = read_flags(run), []
    for name in SETTINGS:
        if getattr(there, name) != getattr(flags, name):
            different.append(f"{name} {getattr(there, name)}, not {getattr(flags, name)}")
    if different:
        what = f"{run} holds a run with other flags ({', '.join(different)})"
        raise Refused(f"{what}: choose another --out")
    if not flags.resume:
        what = f"{run} holds this run already"
        raise Refused(f"{what}: add --resume to go on, or choose another --out")
    if getattr(there, "code", code_hash()) != code_hash():
        what = f"the code of {', '.join(MAKERS)} has changed since this run began"
        print(f"{run}: {what}: it ends as no run from its start would", file=sys.stderr)


def made_by(flags):
    """What config.json says beside the flags."""
    cuda = "cuda" in flags.device
    processor = cpu_capabilities().get("cpu_name", platform.machine())
    command = ["git", "describe", "--always", "--dirty"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        git = None
    return dict(
        device=flags.device,
        hardware=torch.cuda.get_device_name(flags.device) if cuda else processor,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        git=(git and git.stdout.strip()) or None,  # -dirty: changed since; None: no clone
        code=code_hash(),
    )


def checkpoints_of(run):
    """The checkpoints of a run, first step first."""
    return sorted(Path(run, "ckpt").glob("*.pt"), key=lambda file: int(file.stem))
