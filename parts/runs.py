"""Run directories, of which everything downstream reads: written whole or not at all, opened once.

    model, config = load("results/A")     # ready to evaluate; config: all flags of the run

out/L12_H1_D3_s0/ (the name is made from the flags) holds config.json; log.jsonl, one row per
evaluation; model.pt, the final weights; state.pt, what --resume needs; ckpt/, with --save-every;
circuit.json and ablation.csv of ablate.py; emergence.json and figures of analyze.py.
"""

import contextlib
import io
import json
import os
import platform
import subprocess
from pathlib import Path

from parts.flags import (
    DEFAULTS,
    MACHINE_FLAGS,
    asked,
    check_values,
    cpu_capabilities,
    head_size,
    native_dtype,
)

import torch
from filelock import FileLock, Timeout

from data import ENCODINGS, TASKS, make_batch
from model import Transformer


BEFORE = {"optimizer": "adamw"}  # what a config.json older than the flag was trained with


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
        what = f"cannot write {path} ({error.strerror or error})"
        raise OSError(f"{what}: make room; what was written before is whole") from None


def flush(path):
    """Have the system put a file, or the names in a folder, onto the disk."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def write_text(path, text):
    write_file(path, lambda temporary: temporary.write_text(text))


def write_tensors(path, tensors):
    """torch.save, by way of memory: on a full disk it would raise RuntimeErrors of its own."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    write_file(path, lambda temporary: temporary.write_bytes(buffer.getbuffer()))


def read_tensors(path, device="cpu"):
    """What write_tensors wrote; ValueError with one line if it cannot be read."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise unusable(path, "is missing") from None
    except Exception as error:  # a damaged file raises whatever the unpickler stumbled on
        raise unusable(path, f"is damaged ({type(error).__name__})") from None


def read_json(path, kind=dict, lines=False):
    """The object of type `kind` in a JSON file, or with lines=True a list of them, one per line.
    ValueError with one line if the file holds anything else."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        objects = [json.loads(part) for part in (text.splitlines() if lines else [text])]
    except (OSError, RecursionError, ValueError) as error:
        raise unusable(path, f"cannot be read ({type(error).__name__})") from None
    if not objects or not all(isinstance(found, kind) for found in objects):
        raise unusable(path, "holds something else" if objects else "is empty")
    return objects if lines else objects[0]


def unusable(path, what):
    return ValueError(f"{path} {what}: restore it, or use another run directory")


def save_figure(figure, path):
    """Write a figure of matplotlib as a PNG and forget it."""
    import matplotlib.pyplot as plt

    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
    plt.close(figure)


def symbol_color(k, symbols):
    """The colour of x_k in every figure; x_1 is dark, the last one bright."""
    import matplotlib.pyplot as plt

    return plt.get_cmap("viridis")(0.9 * (k - 1) / max(1, symbols - 1))


# ---- reading a run


def read_config(run):
    """The flags of a run, a dict; flags that it does not know have their default."""
    path = Path(run, "config.json")
    if not path.is_file():
        raise ValueError(f"{run} is no run directory: it has no config.json; train.py makes one")
    config = DEFAULTS | BEFORE | read_json(path)
    try:
        check_values(config)
    except ValueError as error:
        raise ValueError(f"{path} cannot be: {error}") from None
    return config


def read_log(run):
    """The rows of log.jsonl, a list of dicts with one row per evaluation."""
    path = Path(run, "log.jsonl")
    rows = read_json(path, lines=True)
    for row in rows:
        values = (row | dict(train=row.get("train") or 0)).values()  # none before the first step
        numbers = all(isinstance(value, (int, float)) for value in values)
        if not numbers or not {"step", "val", *rows[0]} <= row.keys():
            raise unusable(path, "holds something else than a log")
    return rows


def first_below(steps, losses, level=0.5):
    """The step, linearly interpolated, at which a curve first passes below level: the first step if
    it begins there (with --init); None if never."""
    if losses and losses[0] < level:
        return steps[0]
    for i in range(1, len(steps)):
        before, after = losses[i - 1], losses[i]
        if after < level <= before:
            return steps[i - 1] + (steps[i] - steps[i - 1]) * (before - level) / (before - after)
    return None


def crossings(rows):
    """{symbol: the step at which its loss passes below 0.5, or None} of the rows of a log."""
    steps, names = [row["step"] for row in rows], [name for name in rows[0] if name[:2] == "x_"]
    return {name: first_below(steps, [row[name] for row in rows]) for name in names}


def in_order(steps):
    """Whether symbols were learned in order, the last ones perhaps never; None for fewer than two
    that were."""
    reached = [step for step in steps if step is not None]
    if len(reached) < 2:
        return None
    return reached == sorted(reached) and reached == steps[: len(reached)]


def task_of(config):
    return TASKS[config["task"]](config["N"], config["D"])


def build(config):
    """The untrained transformer of a config, on the CPU."""
    T, K, size = task_of(config).T, config["K"], head_size(config)
    encoding = ENCODINGS[config["rotary"]]
    return Transformer(
        T,
        config["N"],
        inputs=K + encoding.appended(T, K).shape[1] + config["mixture"] * config["D"],
        outputs=K * (1 if config["mixture"] else len(asked(config))),
        head_size=size,
        angles=encoding.angles and encoding.angles(T, size),
        **{key: config[key] for key in ("layers", "heads", "width", "mlp", "causal")},
    )


def load(run, weights="model.pt", device="cpu"):
    """(model, config) of a run directory, ready to evaluate; `weights` may name a checkpoint,
    "ckpt/000080.pt". ValueError with one line if the directory holds no such run."""
    config = read_config(run) | dict(device=device)  # here, not where it was trained
    if native_dtype(device) == "float32":
        config["dtype"] = "float32"  # bfloat16 would be many times slower
    model, path = build(config), Path(run, weights)
    try:
        model.load_state_dict(read_tensors(path))
    except (AttributeError, RuntimeError, TypeError):
        raise unusable(path, "holds the weights of another model than config.json") from None
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise unusable(path, "holds weights that are not finite")
    return model.to(device).eval(), config


def untrained(flags):
    """The transformer of these flags before its first step, on the CPU: with --init the weights of
    that run, where it has such. ValueError with one line if it is of another shape."""
    model = build(flags)
    if not flags["init"]:
        return model
    try:
        other, config = load(flags["init"])
    except ValueError as error:
        raise ValueError(f"--init: {error}") from None

    # heads of another number may have weights of the same shape
    flags, config = (each | dict(head_size=head_size(each)) for each in (flags, config))
    shape = ["layers", "heads", "width", "head_size", "mlp", "K", "rotary", "mixture"]
    shape += ["D"] if flags["mixture"] else []
    different = [key for key in shape if flags[key] != config[key]]
    if different:
        said = ", ".join(f"{key} {config[key]}, not {flags[key]}" for key in different)
        what = f"--init {flags['init']} is of another shape ({said})"
        raise ValueError(f"{what}: choose the flags of that run, or another one")

    # the outputs of symbols that both are asked for; with --mixture the same K numbers say each
    symbols = [[0], [0]] if flags["mixture"] else [asked(flags), asked(config)]
    weights, ours = other.state_dict(), model.state_dict()
    for name in ("head.weight", "head.bias"):
        rows = ours[name].unflatten(0, (-1, flags["K"]))
        learned = weights.pop(name).unflatten(0, (-1, flags["K"]))
        for k in set(symbols[0]) & set(symbols[1]):
            rows[symbols[0].index(k)] = learned[symbols[1].index(k)]
    model.load_state_dict(ours | weights)
    return model


def sequences(config, index):
    """The Batch of the examples `index` of a run's problem and seed."""
    flags = {key: config[key] for key in ("task", "N", "D", "K", "rotary", "mixture")}
    return make_batch(config["seed"], index, targets=asked(config), **flags)


def precision(config):
    """A context in which activations, the residual stream among them, and matrix products are of
    --dtype. Weights, attention scores, LayerNorm's statistics, the loss and the optimizer stay
    float32."""
    kind, rounded = torch.device(config["device"]).type, config["dtype"] == "bfloat16"
    return torch.autocast(kind, torch.bfloat16, enabled=rounded)


# ---- opening a run to train it


@contextlib.contextmanager
def alone_in(folder):
    """Only one process at a time; ValueError for the others. A kill leaves nothing locked."""
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        what = f"{folder} is in use by another process"
        raise ValueError(f"{what}: wait until it ends, or choose another --out") from None


def check_folder(run):
    """ValueError if a folder holds something else than a run, or what a kill left of one."""
    left = [path for path in run.iterdir() if path.suffix != ".tmp" and path.name != ".lock"]
    if left and not (run / "config.json").exists():
        raise ValueError(f"{run} holds something else than a run: choose another --out")


def check_same_run(run, flags):
    """ValueError with one line if the run directory holds a run with other flags than these."""
    config = read_config(run)
    different = []
    for key, value in flags.items():
        if key not in MACHINE_FLAGS and config[key] != value:
            different.append(f"{key} {config[key]}, not {value}")
    if different:
        what = f"{run} holds a run with other flags ({', '.join(different)})"
        raise ValueError(f"{what}: choose another --out")
    if not flags["resume"]:
        what = f"{run} holds this run already"
        raise ValueError(f"{what}: add --resume to go on, or choose another --out")


def read_state(run, device):
    """state.pt of a run, or None if it never came so far."""
    if (run / "state.pt").exists():
        state = read_tensors(run / "state.pt", device)
        if not isinstance(state, dict) or not {"model", "optimizers", "step"} <= state.keys():
            raise unusable(run / "state.pt", "holds something else")
        return state
    if (run / "log.jsonl").exists():  # to start over would overwrite it
        raise unusable(run / "state.pt", "is missing")
    return None


def rows_before(run, state):
    """The rows of the log when the state was saved; ValueError if some are missing."""
    if state.get("rows") == 0:
        return []
    rows = [row for row in read_log(run) if row["step"] < state["step"]]
    if len(rows) != state.get("rows", len(rows)):  # an old state does not know
        raise unusable(run / "log.jsonl", f"has {len(rows)} of {state['rows']} rows")
    return rows


def check_log(run):
    """ValueError if the log of a run that has ended lacks rows; its state.pt, if kept, knows."""
    if (run / "state.pt").exists():
        state = read_state(run, "cpu")
        rows_before(run, state)
        if read_log(run)[-1]["step"] != state["step"]:
            raise unusable(run / "log.jsonl", f"does not end at step {state['step']}")


def create_run(run, flags):
    """Make config.json, with which a run directory begins."""
    cuda = "cuda" in flags["device"]
    processor = cpu_capabilities().get("cpu_name", platform.machine())
    made_by = dict(
        device=flags["device"],
        hardware=torch.cuda.get_device_name(flags["device"]) if cuda else processor,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        git=git_hash(),
    )
    config = {key: value for key, value in flags.items() if key not in MACHINE_FLAGS} | made_by
    write_text(run / "config.json", json.dumps(config, indent=1) + "\n")


def git_hash():
    """Of our code, "-dirty" if changed since; None outside a clone."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        folder = Path(__file__).parent
        git = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    except OSError:
        return None
    return git.stdout.strip() or None
