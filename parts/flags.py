"""The flags of a run, in one table: defaults, bounds and help; their checks; the name they make.

One word for flag, config key, checkpoint key and table column. A new flag is one row here.
"""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data import ENCODINGS, NO_D, TASKS


class Flag(NamedTuple):
    """A default of True or False makes a switch, --no-name or --name; its help says what typing it
    does."""

    default: Any
    help: str
    least: float = 0
    most: float = 2**63 - 1


MUON_HELP = "muon = Muon for the matrices inside the layers, AdamW for the rest; adamw = AdamW for"
MUON_HELP += " all, as the paper: give it --steps 3000"
DTYPE_HELP = "of activations and matrix products; weights, attention scores and optimizer are"
DTYPE_HELP += " float32; auto = bfloat16 where the device multiplies it natively"

TASK_HELP = "chain = one step after another (Section 6); conditional = the last step depends on two"
TASK_HELP += " symbols, x_1, x_2, x_3 = x, y, z (Section 3.1)"
MIXTURE_HELP = "ask each query for one of the targets, at random, told by numbers in its token"
INIT_HELP = "start from the final weights of this run directory; of the outputs, those of symbols"
INIT_HELP += " that both are asked for"
HOLD_HELP = "hold attention at a circuit that does what the depth allows; layers that it"
HOLD_HELP += " does not use stay free"

FLAGS = {
    "problem (Section 6)": {
        "task": Flag("chain", TASK_HELP),
        "N": Flag(4, "chains per sequence", 1),
        "D": Flag(3, "retrieval steps per chain", 1, 1000),
        "K": Flag(4, "dimensions per symbol, even", 2),
        "ic": Flag(True, "target x_D alone instead of x_1..x_D: no implicit curriculum"),
        "targets": Flag([], "target x_1 and x_3 alone: 1 3 (default: all, x_1..x_D)"),
        "mixture": Flag(False, MIXTURE_HELP),
        "rotary": Flag("input", "rotary encoding: appended to the tokens, or RoPE"),
        "examples": Flag(2**18, "size of the training set; 0 = never the same example twice"),
    },
    "model (Section 8.1)": {
        "layers": Flag(12, "number of layers", 1),
        "heads": Flag(1, "attention heads per layer", 1),
        "width": Flag(128, "size of the residual stream", 1),
        "head_size": Flag(0, "size of one head; 0 = width / heads"),
        "mlp": Flag(True, "attention layers only"),
        "causal": Flag(True, "let every token attend to every other"),
        "circuit": Flag(False, HOLD_HELP),
    },
    "training": {
        "optimizer": Flag("muon", MUON_HELP),
        "steps": Flag(1200, "steps at most; the learning rate schedule spans them", 1),
        "target": Flag(0.01, "stop when the validation MSE is below, on 8192 more too; 0 = never"),
        "batch": Flag(128, "sequences per step", 1),
        "lr": Flag(1e-3, "learning rate; a step of Muon has the size of one of AdamW", 0, 1000),
        "warmup": Flag(100, "steps over which the learning rate rises from 0"),
        "decay": Flag(0.5, "last fraction of the steps, over which it falls linearly to 0", 0, 1),
        "beta2": Flag(0.99, "Adam's second beta", 0, 0.9999999),
        "weight_decay": Flag(0.1, "decoupled weight decay of the matrices", 0, 1000),
        "clip": Flag(0.1, "largest gradient norm; 0 = no clipping"),
        "init": Flag("", INIT_HELP),
        "seed": Flag(0, "of the data, its order, and the initial weights"),
    },
    "machine and files": {
        "device": Flag("auto", "cuda, mps or cpu; auto = the first that is there"),
        "dtype": Flag("auto", DTYPE_HELP),
        "compile": Flag(False, "torch.compile the model"),
        "eval_every": Flag(50, "steps between evaluations, each of which saves the state", 1),
        "save_every": Flag(0, "steps between checkpoints of the weights in ckpt/; 0 = none"),
        "out": Flag(None, "run directory (default: out/, then a name made from the flags)"),
        "resume": Flag(False, "go on from the run directory's state.pt, if any"),
    },
}
ROWS = {name: flag for group in FLAGS.values() for name, flag in group.items()}
DEFAULTS = {name: flag.default for name, flag in ROWS.items()}
MACHINE_FLAGS = ["device", "compile", "out", "resume"]  # may differ when a run is resumed
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


# ---- from the command line to a dict


def command_line(name, about):
    """The parser of a program. What it cannot take ends the program with one line, exit code 2."""
    p = argparse.ArgumentParser(
        description=about,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.error = lambda message: p.exit(2, f"{name}: {message}\n")
    return p


def parse(arguments, description, choices):
    """The flags as a dict, --device auto and --dtype auto settled; choices: {name: [value, ...]}. A
    bad flag ends the program with one line and exit code 2."""
    p = command_line("train.py", description)
    for title, rows in FLAGS.items():
        group = p.add_argument_group(title)
        for name, flag in rows.items():
            add_flag(group, name, flag, choices.get(name))
    p.set_defaults(D=None)  # to know whether it was given
    flags = vars(p.parse_args(arguments))
    try:
        if flags["task"] != "chain" and flags["D"] is not None:
            raise ValueError(NO_D.format(flags["task"]))
        flags["D"] = DEFAULTS["D"] if flags["D"] is None else flags["D"]
        check_values(flags)
        settle_targets(flags)
        flags["device"] = find_device(flags["device"])
        if flags["dtype"] == "auto":
            flags["dtype"] = native_dtype(flags["device"])
        check_memory(flags)
    except ValueError as error:
        p.error(error)
    return flags


def add_flag(group, name, flag, choices):
    typed, default = name.replace("_", "-"), flag.default
    if isinstance(default, bool):
        action = "store_false" if default else "store_true"
        no = "no-" if default else ""
        group.add_argument(f"--{no}{typed}", dest=name, action=action, help=flag.help)
    elif default is None:
        group.add_argument(f"--{typed}", type=Path, help=flag.help)
    elif isinstance(default, list):
        group.add_argument(f"--{typed}", default=default, type=int, nargs="+", help=flag.help)
    else:
        text = f"{flag.help} (default: {'none' if default == '' else default})"
        kind = type(default)
        group.add_argument(f"--{typed}", default=default, type=kind, choices=choices, help=text)


# ---- which symbols are asked for


def asked(flags):
    """The k of the symbols x_k that each query is asked for, in order."""
    if flags["targets"]:
        return sorted(flags["targets"])
    return range(1, flags["D"] + 1) if flags["ic"] else [flags["D"]]


def settle_targets(flags):
    """Change the flags in place so that the same targets are always said in one way: all symbols
    need no word, the last alone is --no-ic."""
    targets, D = [*asked(flags)], flags["D"]
    if targets == [*range(1, D + 1)]:
        flags["targets"] = []
    elif targets == [D]:
        flags["targets"], flags["ic"] = [], False
    else:
        flags["targets"] = targets


def check_targets(flags):
    """ValueError with one line if these cannot be the symbols asked for."""
    targets, D = flags["targets"], flags["D"]
    if not all(isinstance(k, int) and 1 <= k <= D for k in targets):
        said = " ".join(map(str, targets))
        raise ValueError(f"--targets must be from 1 to {D}, the number of symbols, not {said}")
    if len(set(targets)) < len(targets):
        raise ValueError("--targets names a symbol twice: leave one out")
    if targets and not flags["ic"]:
        raise ValueError("--no-ic asks for x_D alone: leave it or --targets out")


# ---- what cannot be, in one line each


def head_size(flags):
    return flags["head_size"] or flags["width"] // flags["heads"]


def check_values(flags):
    """ValueError with one line that says what to change, of flags or of a config.json."""
    for name, (default, _, least, most) in ROWS.items():
        value, typed = flags[name], f"--{name.replace('_', '-')}"
        kind = (int, float) if isinstance(default, float) else type(default)
        if name not in MACHINE_FLAGS and not isinstance(value, kind):
            raise ValueError(f"{typed} must be a value as {default!r}, not {value!r}")
        if isinstance(value, (int, float)) and not least <= value <= most:  # nan is neither
            bound = f"at most {most}" if value > most else f"at least {least}"
            raise ValueError(f"{typed} must be {bound}, not {value}")
    for name, choices in ("task", TASKS), ("rotary", ENCODINGS):
        if flags[name] not in choices:
            raise ValueError(f"--{name} must be one of {', '.join(choices)}, not {flags[name]}")
    if flags["task"] != "chain" and flags["D"] != DEFAULTS["D"]:
        raise ValueError(NO_D.format(flags["task"]))
    check_targets(flags)
    if flags["K"] % 2:
        raise ValueError(f"--K must be even (rotary encodings turn pairs), not {flags['K']}")
    if flags["width"] % flags["heads"] and not flags["head_size"]:
        what = f"--width {flags['width']} is not divisible by --heads {flags['heads']}"
        raise ValueError(f"{what}: change one of them, or set --head-size")
    if ENCODINGS[flags["rotary"]].angles and head_size(flags) % 2:
        what = f"--rotary {flags['rotary']} turns pairs of numbers"
        raise ValueError(f"{what}: the head size must be even, not {head_size(flags)}")
    heads = 1 if flags["causal"] and flags["task"] == "chain" else 2
    if flags["circuit"] and flags["heads"] != heads:
        wide = "with --no-causal or --task conditional"
        raise ValueError(f"--circuit takes --heads 1, {wide} --heads 2")


def find_device(name):
    """The first device there is, for auto; ValueError for one that is not there."""
    if name == "auto":
        other = "mps" if torch.backends.mps.is_available() else "cpu"
        return "cuda" if torch.cuda.is_available() else other
    try:
        if torch.empty(1, device=name).device.type in ("cuda", "mps", "cpu"):
            return name
    except (RuntimeError, AssertionError, NotImplementedError):
        pass
    raise ValueError(f"--device {name} is not there: choose cpu, or cuda or mps where they are")


def native_dtype(device):
    """bfloat16 where the device multiplies it natively, else float32."""
    kind = torch.device(device).type
    native = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if kind == "cpu":
        native = any(cpu_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    return "bfloat16" if native else "float32"


def cpu_capabilities():
    """Not in every torch."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def check_memory(flags):
    """ValueError if a run would need more memory than there is, by a low estimate in bytes: float32
    weights, gradients and two averages; bfloat16 activations; the order of one epoch."""
    T = TASKS[flags["task"]](flags["N"], flags["D"]).T
    size = head_size(flags) * flags["heads"]
    weights = flags["layers"] * flags["width"] * (4 * size + 8 * flags["width"] * flags["mlp"])
    per_token = flags["width"] * (2 + 8 * flags["mlp"]) + 4 * size + flags["heads"] * T
    activations = flags["batch"] * T * (flags["layers"] * per_token + flags["K"])
    needed = 16 * weights + 2 * activations + 4 * T * T + 24 * flags["examples"]
    if flags["device"].startswith("cuda"):
        there = torch.cuda.get_device_properties(flags["device"]).total_memory
    elif hasattr(os, "sysconf"):
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if needed > there:
        gigabytes = f"{needed / 1e9:.3g} GB of memory, and there are {there / 1e9:.3g}"
        raise ValueError(f"this run would need at least {gigabytes}: choose smaller sizes")


def problem_name(flags):
    """D=3, or the name of a task that has no D."""
    return f"D={flags['D']}" if flags["task"] == "chain" else flags["task"]


def run_directory(flags):
    """out/L12_H1_D3_s0, with every other flag that differs from its default named in between; the
    default of dtype is this machine's."""
    defaults = DEFAULTS | {"dtype": native_dtype(flags["device"])}
    named = ["layers", "heads", "task", "D", "seed", "eval_every", "save_every", *MACHINE_FLAGS]
    name = f"L{flags['layers']}_H{flags['heads']}_{problem_name(flags).replace('=', '')}"
    for key, value in flags.items():
        if key not in named and value != defaults[key]:
            no = "no-" if value is False else ""
            text = "-".join(map(str, value)) if isinstance(value, list) else Path(str(value)).name
            name += f"_{no}{key}" + ("" if isinstance(value, bool) else text)
    return Path("out", f"{name}_s{flags['seed']}")
