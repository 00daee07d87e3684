"""The flags of a run, in one table: what each is for, its default, bounds and help.

One word for flag, config key and table column. A new flag is one row here: of the part "model" if
model.Transformer takes it, of "machine" if it may differ when a run is resumed. Every program has
the flags of a run under one name, `flags`, with what follows from them beside them: flags.problem,
flags.asked, flags.size.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from parts import Refused

import torch

from data import ENCODINGS, TASKS


class Flag(NamedTuple):
    """A default of True or False makes a switch, --no-name or --name; its help says what typing it
    does."""

    default: Any
    help: str
    least: float = 0
    most: float = 10**6
    choices: tuple = ()


TASK = "chain = one step after another (Section 6); conditional = the last step depends on two"
TASK += " symbols, x_1, x_2, x_3 = x, y, z (Section 3.1); to compare, unlinked = chains of"
TASK += " one step among pairs of nobody, first_step_first = chains read in the other order"
MIXTURE = "ask each query for one of the targets, at random, told by numbers in its token"
CIRCUIT = "hold attention at minimal = a circuit that does what the depth allows, previous = its"
CIRCUIT += " first layer alone, query = what the query then reads of x_1, induction = both; other"
CIRCUIT += " heads stay free"
MUON = "muon = Muon for the matrices inside the layers, AdamW for the rest; adamw = AdamW for all,"
MUON += " as the paper: give it --steps 3000 --qk-std 0.02"
EMA = "the weights that are evaluated and kept are a mean of which each step keeps this share; 0 ="
EMA += " the last weights"
QK_STD = "standard deviation of the first W_Q and W_K, of other weights 0.02; that of the first"
QK_STD += " scores is its square times the width: choose less for a wider model"
INIT = "start from the final weights of this run directory; of the outputs, those of symbols that"
INIT += " both are asked for"
DTYPE = "of activations and matrix products; weights, attention scores and optimizer are float32;"
DTYPE += " auto = bfloat16 where the device is faster with it"

FLAGS = {
    "problem": {  # Section 6
        "task": Flag("chain", TASK, choices=tuple(TASKS)),
        "N": Flag(4, "chains per sequence", 1, 1000),
        "D": Flag(3, "retrieval steps per chain", 1, 1000),
        "K": Flag(4, "dimensions per symbol, even", 2, 1000),
        "ic": Flag(True, "target x_D alone instead of x_1..x_D: no implicit curriculum"),
        "targets": Flag([], "target x_1 and x_3 alone: 1 3 (default: all, x_1..x_D)"),
        "mixture": Flag(False, MIXTURE),
        "circuit": Flag("", CIRCUIT, choices=("", "minimal", "previous", "query", "induction")),
        "examples": Flag(
            2**18, "size of the training set; 0 = never the same example twice", 0, 10**9
        ),
    },
    "model": {  # Section 8.1
        "rotary": Flag(
            "input", "rotary encoding: appended to the tokens, or RoPE", choices=tuple(ENCODINGS)
        ),
        "layers": Flag(12, "number of layers", 1, 1000),
        "heads": Flag(1, "attention heads per layer", 1, 1000),
        "width": Flag(128, "size of the residual stream", 1, 20_000),
        "head_size": Flag(0, "size of one head; 0 = width / heads", 0, 20_000),
        "mlp": Flag(True, "attention layers only"),
        "causal": Flag(True, "let every token attend to every other"),
    },
    "training": {
        "optimizer": Flag("muon", MUON, choices=("muon", "adamw")),
        "steps": Flag(1200, "steps at most; the learning rate schedule spans them", 1, 10**9),
        "target": Flag(0.01, "stop when the validation MSE is below, on 8192 more too; 0 = never"),
        "batch": Flag(128, "sequences per step", 1),
        "lr": Flag(1e-3, "learning rate; a step of Muon has the size of one of AdamW", 0, 1000),
        "warmup": Flag(100, "steps over which the learning rate rises from 0", 0, 10**9),
        "decay": Flag(0.5, "last fraction of the steps, over which it falls linearly to 0", 0, 1),
        "beta2": Flag(0.99, "Adam's second beta", 0, 0.9999999),
        "weight_decay": Flag(0.1, "decoupled weight decay of the matrices", 0, 1000),
        "ema": Flag(0.98, EMA, 0, 0.99999),
        "clip": Flag(0.1, "largest gradient norm; 0 = no clipping"),
        "qk_std": Flag(0.1, QK_STD, 0, 10),
        "init": Flag("", INIT),
        "seed": Flag(0, "of the data, its order, and the initial weights", 0, 2**63 - 1),
        "dtype": Flag("auto", DTYPE, choices=("auto", "float32", "bfloat16")),
        "eval_every": Flag(50, "steps between evaluations, each of which saves the state", 1),
        "save_every": Flag(0, "steps between checkpoints of the weights in ckpt/; 0 = none"),
    },
    "machine": {
        "device": Flag("auto", "cuda, mps or cpu; auto = the first that is there"),
        "compile": Flag(False, "torch.compile the model"),
        "out": Flag(None, "run directory (default: out/, then a name made from the flags)"),
        "resume": Flag(False, "go on from the run directory's state.pt, if any"),
    },
}
ROWS = {name: flag for part in FLAGS.values() for name, flag in part.items()}
SETTINGS = [name for name in ROWS if name not in FLAGS["machine"]]  # the same when it is resumed


class Flags(argparse.Namespace):
    """The flags of a run as attributes, and what follows from them."""

    @property
    def problem(self):
        """The data.Task: roles, symbols, tokens."""
        return TASKS[self.task](self.N, self.D)

    @property
    def asked(self):
        """The k of the symbols x_k that each query is asked for, in order."""
        symbols = [*range(1, self.problem.symbols)]
        return sorted(self.targets) or (symbols if self.ic else symbols[-1:])

    @property
    def symbols(self):
        """Their names, x_1, x_2, ..."""
        return [f"x_{k}" for k in self.asked]

    @property
    def size(self):
        """Of one head."""
        return self.head_size or self.width // self.heads

    def but(self, **changed):
        """The same flags with some changed."""
        return Flags(**(vars(self) | changed))

    def part(self, name):
        """{flag: value} of one part of the table."""
        return {flag: getattr(self, flag) for flag in FLAGS[name]}


# ---- from the command line


def command_line(name, about):
    """The parser of a program. What it cannot take ends the program with one line, exit code 2."""
    p = argparse.ArgumentParser(
        prog=name,
        description=about,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.error = lambda message: p.exit(2, f"{name}: {message}\n")
    return p


def parse(arguments, description):
    """The Flags; --device auto, --dtype auto and the run directory are settled. A bad flag ends the
    program with one line and exit code 2."""
    p = command_line("train.py", description)
    for title, rows in FLAGS.items():
        group = p.add_argument_group(title)
        for name, flag in rows.items():
            add_flag(group, name, flag)
    flags = p.parse_args(arguments, Flags())
    try:
        check(flags)
        flags.device = find_device(flags.device)
    except Refused as error:
        p.error(error)

    # the same run said in two ways has one name
    last = flags.problem.symbols - 1
    if sorted(flags.targets) == [*range(1, last + 1)]:
        flags.targets = []
    if flags.targets == [last]:
        flags.targets, flags.ic = [], False
    flags.targets = sorted(flags.targets)
    flags.out = flags.out or run_directory(flags)  # the same on every machine
    if flags.dtype == "auto":
        flags.dtype = native_dtype(flags.device)
    return flags


def add_flag(group, name, flag):
    typed, default = f"--{name.replace('_', '-')}", flag.default
    if isinstance(default, bool):
        typed = typed.replace("--", "--no-") if default else typed
        action = "store_false" if default else "store_true"
        group.add_argument(typed, dest=name, action=action, help=flag.help)
    elif default is None:
        group.add_argument(typed, type=Path, help=flag.help)
    elif isinstance(default, list):
        group.add_argument(typed, default=default, type=int, nargs="+", help=flag.help)
    else:
        text = f"{flag.help} (default: {'none' if default == '' else default})"
        some = flag.choices or None
        group.add_argument(typed, default=default, type=type(default), choices=some, help=text)


# ---- what cannot be


def check(flags):
    """Refused, with one line that says what to change, unless these can be the flags of a run."""
    for name in SETTINGS:
        check_value(f"--{name.replace('_', '-')}", getattr(flags, name), ROWS[name])
    try:
        can, default = sorted(flags.problem.reachable)[1:], ROWS["D"].default
        if default != flags.D and flags.problem == flags.but(D=default).problem:
            raise Refused(f"--task {flags.task} is the same for every --D: leave out --D {flags.D}")
    except ValueError as error:
        raise Refused(error) from None
    if flags.targets and not flags.ic:
        raise Refused("--no-ic asks for x_D alone: leave it or --targets out")
    if not {*flags.asked} <= {*can}:
        most, said = (" ".join(map(str, some)) for some in (can, flags.asked))
        raise Refused(f"--targets must be among {most}, not {said}")
    if len({*flags.targets}) < len(flags.targets):
        raise Refused("--targets names a symbol twice: leave one out")
    if flags.K % 2:
        raise Refused(f"--K must be even (rotary encodings turn pairs), not {flags.K}")
    if flags.width % flags.heads and not flags.head_size:
        what = f"--width {flags.width} is not divisible by --heads {flags.heads}"
        raise Refused(f"{what}: change one of them, or set --head-size")
    if ENCODINGS[flags.rotary].angles and flags.size % 2:
        what = f"--rotary {flags.rotary} turns pairs of numbers"
        raise Refused(f"{what}: the head size must be even, not {flags.size}")


def check_value(typed, value, flag):
    """Refused unless this can be the value of a flag."""
    kind = (int, float) if isinstance(flag.default, float) else type(flag.default)
    several = value if isinstance(flag.default, list) and isinstance(value, list) else []
    right = isinstance(value, kind) and all(type(number) is int for number in several)
    if not right or isinstance(value, bool) != isinstance(flag.default, bool):
        raise Refused(f"{typed} must be a value as {flag.default!r}, not {value!r}")
    if flag.choices and value not in flag.choices:
        raise Refused(f"{typed} must be one of {', '.join(flag.choices)}, not {value}")
    if isinstance(value, (int, float)) and not flag.least <= value <= flag.most:  # nan is neither
        bound = f"at most {flag.most}" if value > flag.most else f"at least {flag.least}"
        raise Refused(f"{typed} must be {bound}, not {value}")


# ---- what the machine has


def find_device(name):
    """The first device there is, for auto; Refused for one that is not there."""
    if name == "auto":
        other = "mps" if torch.backends.mps.is_available() else "cpu"
        return "cuda" if torch.cuda.is_available() else other
    try:
        if torch.empty(1, device=name).device.type in ("cuda", "mps", "cpu"):
            return name
    except (RuntimeError, AssertionError, NotImplementedError):
        pass
    raise Refused(f"--device {name} is not there: choose cpu, or cuda or mps where they are")


def native_dtype(device):
    """bfloat16 where the device multiplies it faster than float32. Of Intel's processors those with
    AMX do; the others take twice as long."""
    kind = torch.device(device).type
    native = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if kind == "cpu":
        has = cpu_capabilities()
        native = has.get("amx_bf16") or has.get("avx512_bf16") and "AMD" in has.get("cpu_name", "")
    return "bfloat16" if native else "float32"


def cpu_capabilities():
    """Not in every torch."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


# ---- the name of a run


def run_directory(flags):
    """out/L12_H1_D3_s0, with every other flag that differs from its default named in between."""
    name = f"L{flags.layers}_H{flags.heads}_{flags.problem.title.replace('=', '')}"
    for key in SETTINGS:
        value, default = getattr(flags, key), ROWS[key].default
        told = key in ("layers", "heads", "task", "D", "seed", "eval_every", "save_every")
        if not told and value != default:
            text = "-".join(map(str, value)) if isinstance(value, list) else Path(str(value)).name
            name += f"_no-{key}" if value is False else f"_{key}{'' if value is True else text}"
    return Path("out", f"{name}_s{flags.seed}")
