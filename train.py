"""Train one transformer on the retrieval problem and leave a run directory that every later stage reads.

    python train.py --layers 12 --heads 1 --D 3                          # transformers A, B, C (Section 8.1)
    python train.py --layers 12 --heads 1 --D 3 --steps 24000 --target 0 # as many steps as the paper's
    python train.py --layers 12 --heads 1 --D 3 --resume                 # go on after a stop, bitwise as if without it
"""
import argparse
import ctypes
import json
import math
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from data import batch_index, make_batch, minimal_circuit, one_hot, rotary_angles, validation_index
from model import Stack, Transformer


def parse_flags(arguments=None):
    """The flags as a dict: one word for flag, config key, checkpoint key and table column."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)

    def flag(group, name, default, help, **kwargs):
        group.add_argument(f"--{name}", default=default, type=kwargs.pop("type", type(default)),
                           help=f"{help} (default: {default})", **kwargs)

    def switch_off(group, name, help):
        group.add_argument(f"--no-{name}", dest=name, action="store_false", help=help)

    problem = p.add_argument_group("problem (Section 6)")
    flag(problem, "N", 4, "chains per sequence")
    flag(problem, "D", 3, "retrieval steps per chain")
    flag(problem, "K", 4, "dimensions per symbol, even")
    switch_off(problem, "ic", "target x_D alone instead of x_1..x_D: no implicit curriculum")
    flag(problem, "rotary", "input", "where the rotary encoding enters: appended to the tokens, or standard RoPE",
         choices=["input", "qk"])
    flag(problem, "examples", 2 ** 18, "size of the training set; 0 = never the same example twice")

    architecture = p.add_argument_group("model (Section 8.1)")
    flag(architecture, "layers", 12, "number of layers")
    flag(architecture, "heads", 1, "attention heads per layer")
    flag(architecture, "width", 128, "size of the residual stream")
    flag(architecture, "head-size", 0, "size of one head; 0 = width / heads")
    switch_off(architecture, "mlp", "attention layers only")
    switch_off(architecture, "causal", "let every token attend to every other")
    architecture.add_argument("--circuit", action="store_true", help="hold all attention at a circuit that takes in as many "
                              "symbols as the layers allow: what a depth can do, whatever training finds")

    training = p.add_argument_group("training")
    flag(training, "optimizer", "muon", "muon = Muon for the matrices inside the layers, AdamW for the rest; adamw = for "
         "all, as the paper: give it --steps 3000", choices=["muon", "adamw"])
    flag(training, "steps", 1200, "number of steps at most; the learning rate schedule spans them")
    flag(training, "target", 0.01, "stop when the validation MSE is below, also on 8192 sequences more; 0 = run all steps")
    flag(training, "batch", 128, "sequences per step")
    flag(training, "lr", 1e-3, "learning rate; a step of Muon has the size of one of AdamW")
    flag(training, "warmup", 100, "steps over which the learning rate rises from 0")
    flag(training, "decay", 0.5, "last fraction of the steps, over which it falls linearly to 0")
    flag(training, "beta2", 0.99, "Adam's second beta")
    flag(training, "weight-decay", 0.1, "decoupled weight decay of the matrices")
    flag(training, "clip", 0.1, "largest gradient norm; 0 = no clipping")
    flag(training, "seed", 0, "of the data, its order, and the initial weights")

    machine = p.add_argument_group("machine and files")
    flag(machine, "device", "auto", "cuda, mps or cpu; auto = the first that is there")
    flag(machine, "dtype", "auto", "of activations and matrix products; weights, attention scores and optimizer are "
         "always float32; auto = bfloat16 where the device multiplies it natively", choices=["auto", "float32", "bfloat16"])
    machine.add_argument("--compile", action="store_true", help="torch.compile the model")
    flag(machine, "seeds", 1, "train so many seeds at once, from --seed on, as one stack: pays on a GPU")
    flag(machine, "eval-every", 50, "steps between evaluations, each of which saves the state")
    flag(machine, "save-every", 0, "steps between checkpoints of the weights in ckpt/; 0 = none")
    machine.add_argument("--out", type=Path, help="run directory (default: out/, then a name made from the flags)")
    machine.add_argument("--resume", action="store_true", help="go on from the run directory's state.pt, if any")
    p.error = lambda message: p.exit(2, f"train.py: {message}\n")
    flags = vars(p.parse_args(arguments))
    try:
        check_flags(flags)
    except ValueError as error:
        p.error(error)
    return flags


def check_flags(flags):
    """Settle --device auto and --dtype auto. Raises ValueError with one line that says what to change."""
    at_least = dict(N=1, D=1, K=2, layers=1, heads=1, width=1, batch=1, steps=1, eval_every=1, seeds=1)
    at_least |= dict.fromkeys(["examples", "head_size", "target", "lr", "warmup", "decay", "beta2", "weight_decay",
                               "clip", "seed", "save_every"], 0)
    for name, least in at_least.items():
        if not flags[name] >= least:  # so written, nan fails too
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {flags[name]}")
    for name, highest in dict(decay=1, beta2=0.9999999, seed=2 ** 63 - 1).items():
        if flags[name] > highest:
            raise ValueError(f"--{name} must be at most {highest}, not {flags[name]}")
    if flags["K"] % 2:
        raise ValueError(f"--K must be even (the rotary encoding turns pairs of numbers), not {flags['K']}")
    if flags["width"] % flags["heads"] and not flags["head_size"]:
        raise ValueError(f"--width {flags['width']} is not divisible by --heads {flags['heads']}: change one of them, "
                         "or set --head-size")
    if flags["rotary"] == "qk" and head_size(flags) % 2:
        raise ValueError(f"--rotary qk turns pairs of numbers: the head size must be even, not {head_size(flags)}")
    if flags["seeds"] > 1 and flags["out"]:
        raise ValueError("--seeds makes a run directory for each seed, named after the flags: leave out --out")
    if flags["circuit"] and (flags["heads"] != (1 if flags["causal"] else 2) or flags["seeds"] > 1):
        raise ValueError("--circuit takes --heads 1, with --no-causal --heads 2, and one seed at a time")
    if flags["device"] == "auto":
        flags["device"] = ("cuda" if torch.cuda.is_available() else
                           "mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.empty(1, device=flags["device"])
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {flags['device']} is not there: choose cpu, or one that torch can use") from None
    if flags["dtype"] == "auto":
        flags["dtype"] = "bfloat16" if multiplies_bfloat16(torch.device(flags["device"]).type) else "float32"


def cpu_capabilities():
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # not in every torch


def multiplies_bfloat16(device_type):
    if device_type == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    return device_type == "cpu" and any(cpu_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))


def head_size(flags):
    return flags["head_size"] or flags["width"] // flags["heads"]


# ---- the run directory

MACHINE_FLAGS = ["device", "compile", "seeds", "out", "resume"]  # how a run is computed, not what: may change


def run_directory(flags):
    """out/L12_H1_D3_s0, with every other flag that differs from its default named in between."""
    defaults = parse_flags(["--device", flags["device"]])  # the default of --dtype is the device's
    named = ["layers", "heads", "D", "seed", "eval_every", "save_every", *MACHINE_FLAGS]
    others = [f"_{'' if value is not False else 'no-'}{key}{'' if isinstance(value, bool) else value}"
              for key, value in flags.items() if key not in named and value != defaults[key]]
    return Path("out", f"L{flags['layers']}_H{flags['heads']}_D{flags['D']}{''.join(others)}_s{flags['seed']}")


def write_file(path, write):
    """Call write(temporary path), then rename: the file at `path` is always whole, the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.replace(path)


def read_tensors(path, device="cpu"):
    """What torch.save wrote to `path`; ValueError with one line if it cannot be read."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except Exception as error:  # a damaged file raises whatever the unpickler stumbled on
        raise ValueError(f"{path} is damaged ({type(error).__name__}): restore it, or choose another --out") from None


def build(config):
    """The untrained transformer of a config (flags as a dict), on the CPU."""
    D, K = config["D"], config["K"]
    T, qk = config["N"] * (2 * D + 1), config["rotary"] == "qk"
    return Transformer(T, config["N"], inputs=K if qk else 2 * K, outputs=D * K if config["ic"] else K,
                       head_size=head_size(config), angles=rotary_angles(T, head_size(config)) if qk else None,
                       **{key: config[key] for key in ("layers", "heads", "width", "mlp", "causal")})


def read_file(path, parse=json.loads):
    """What parse makes of the text of a file in a run directory; ValueError with one line if it cannot be read."""
    try:
        return parse(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): restore it, or use another run directory") from None


def read_config(run):
    """The flags of a run, a dict."""
    return read_file(Path(run, "config.json"))


def load(run, weights="model.pt", device="cpu"):
    """(model, config) of a run directory, ready to evaluate; `weights` may name a checkpoint, "ckpt/000080.pt".
    ValueError with one line if the directory holds no such run."""
    run = Path(run)
    if not (run / "config.json").is_file():
        raise ValueError(f"{run} is no run directory: it has no config.json; train.py makes one")
    config = read_config(run) | dict(device=device)  # here, not where it was trained
    model = build(config)
    model.load_state_dict(read_tensors(run / weights))
    return model.to(device).eval(), config


def sequences(config, index):
    """The Batch of examples `index` of this run's problem and seed; of validation_index, none that it trained on."""
    return make_batch(config["seed"], index, **{key: config[key] for key in ("N", "D", "K", "ic", "rotary")})


def read_log(run):
    """The rows of log.jsonl, a list of dicts with one row per evaluation."""
    return read_file(Path(run, "log.jsonl"), lambda text: [json.loads(line) for line in text.splitlines()])


def held_patterns(config, batch):
    """{(layer, head): (B, T, T)} the attention of a run with --circuit; of others {}, they compute their own."""
    circuit = minimal_circuit(config["D"], config["layers"], config["causal"]) if config.get("circuit") else {}
    return {head: one_hot(paths, batch.positions) for head, paths in circuit.items()}


def open_run(run, flags, stacked_with):
    """Make the run directory with its config.json, or check that the one there is this very run. Returns its state.pt
    (the first of a stack keeps that of all), or None to start from scratch; ValueError with one line if neither will do."""
    compared = {key: value for key, value in flags.items() if key not in MACHINE_FLAGS}
    if (run / "config.json").exists():
        config = read_config(run)
        different = [key for key in compared if config.get(key) != compared[key]]
        if different:
            raise ValueError(f"{run} holds a run with other flags ("
                             + ", ".join(f"{key} {config.get(key)}, not {compared[key]}" for key in different)
                             + "): choose another --out")
        if not flags["resume"]:
            raise ValueError(f"{run} holds this run already: add --resume to go on, or choose another --out")
        if flags is not stacked_with[0]:  # the first keeps the state of all
            stacked = (stacked_with[0]["out"] / "state.pt").exists()
            if (run / "state.pt").exists() or (run / "log.jsonl").exists() and not stacked:
                raise ValueError(f"{run} holds a run that was not trained in this stack: choose other seeds")
            return None
        if (run / "state.pt").exists():
            state = read_tensors(run / "state.pt", flags["device"])
            if len(state["ended"]) != len(stacked_with):
                raise ValueError(f"{run} was trained with --seeds {len(state['ended'])}: go on with that")
            return state
        if (run / "log.jsonl").exists():  # to start over would overwrite it
            raise ValueError(f"{run} holds a run whose state.pt is missing: restore it, or choose another --out")
        return None
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                             cwd=Path(__file__).parent)
        git_hash = git.stdout.strip() or None
    except OSError:
        git_hash = None
    hardware = (torch.cuda.get_device_name(flags["device"]) if "cuda" in flags["device"]
                else cpu_capabilities().get("cpu_name", platform.machine()))
    config = compared | dict(device=flags["device"], hardware=hardware, threads=torch.get_num_threads(),
                             torch=torch.__version__, git=git_hash)
    try:
        run.mkdir(parents=True, exist_ok=True)
        if any(path.suffix != ".tmp" for path in run.iterdir()):
            raise ValueError(f"{run} holds something else than a run: choose another --out")
        write_file(run / "config.json", lambda path: path.write_text(json.dumps(config, indent=1) + "\n"))
    except OSError as error:
        raise ValueError(f"cannot write to {run} ({error.strerror}): choose another --out") from None


# ---- training

def orthogonalize(x, iterations=5):
    """(B, rows, columns) -> nearly the closest matrix whose singular values are all 1, by Newton-Schulz iterations."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum with every matrix of the update made orthogonal (Jordan et al., 2024), and of the size of an update of
    AdamW (Liu et al., 2025). The same as torch.optim.Muon (tested), which goes matrix by matrix and always in bfloat16,
    slow on most laptops; here all matrices of one shape go through the same products, in the dtype given."""

    def __init__(self, matrices, weight_decay, dtype, momentum=0.95):
        shapes = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        super().__init__([dict(params=group) for group in shapes.values()],
                         dict(lr=0.0, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            gradient = torch.stack([matrix.grad for matrix in group["params"]])
            state = self.state[group["params"][0]]
            if not state:
                state["average"] = torch.zeros_like(gradient)
            average = state["average"].lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(average, group["momentum"]).to(self.dtype)
            update = orthogonalize(update.flatten(0, -3)).view(update.shape).float()  # a stack has one dimension more
            size = 0.2 * math.sqrt(max(gradient.shape[-2:]))  # Adam's updates have a root mean square near 0.2
            for matrix, change in zip(group["params"], update):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"] * size)


def weights_of(model, i):
    """The state dict of the i-th run."""
    if isinstance(model, Stack):
        return {name: stacked[i].detach().clone() for name, stacked in model.weights().items()}
    return model.state_dict()


def optimizers(model, flags):
    """The optimizers that together train all parameters. Biases and LayerNorms do not decay."""
    matrix = 3 if isinstance(model, Stack) else 2  # its number of dimensions
    inside = [p for name, p in model.named_parameters()
              if p.ndim == matrix and name.startswith("blocks") and flags["optimizer"] == "muon"]
    outside = [p for p in model.parameters() if p.ndim == matrix and not any(p is other for other in inside)]
    vectors = [p for p in model.parameters() if p.ndim < matrix]
    adamw = torch.optim.AdamW([dict(params=outside, weight_decay=flags["weight_decay"]),
                               dict(params=vectors, weight_decay=0.0)], betas=(0.9, flags["beta2"]), fused=True)
    if not inside:
        return [adamw]
    return [adamw, Muon(inside, flags["weight_decay"], getattr(torch, flags["dtype"]))]


def learning_rate(step, flags):
    """Linear warm-up, constant, then linear to 0 over the last `decay` fraction of the steps."""
    rise = (step + 1) / flags["warmup"] if flags["warmup"] else 1
    fall = (flags["steps"] - step) / (flags["decay"] * flags["steps"]) if flags["decay"] else 1
    return flags["lr"] * min(rise, 1, fall)


def partial_losses(predictions, targets, K):
    """(..., N, symbols*K) twice -> (..., symbols) the mean squared error of each sequence on each symbol alone."""
    return (predictions.float() - targets).square().unflatten(-1, (-1, K)).mean((-3, -1))


def precision(flags):
    """A context in which activations, the residual stream among them, and matrix products are of --dtype. Weights,
    attention scores, LayerNorm's statistics, the loss and the optimizer stay float32."""
    return torch.autocast(torch.device(flags["device"]).type, torch.bfloat16, enabled=flags["dtype"] == "bfloat16")


def predict(forward, runs, index):
    """Predictions and targets of each run's own examples index, as they are, or of several runs as a stack."""
    batches = [sequences(run, index[i]) for i, run in enumerate(runs)]
    with precision(runs[0]):
        if len(runs) == 1:
            return forward(batches[0].inputs, held_patterns(runs[0], batches[0])), batches[0].targets
        return forward(torch.stack([batch.inputs for batch in batches])), torch.stack([batch.targets for batch in batches])


@torch.no_grad()
def evaluate(forward, runs, n=1024, first=0):
    """The partial losses of each run, a list of lists, on n sequences that training never sees."""
    losses = []
    for chunk in validation_index(n, first, runs[0]["device"]).split(256):
        predictions, targets = predict(forward, runs, [chunk] * len(runs))
        losses.append(partial_losses(predictions, targets, runs[0]["K"]))
    return torch.cat(losses, -2).mean(-2).view(len(runs), -1).tolist()


def first_below(steps, losses, level=0.5):
    """The step, linearly interpolated, at which a curve first passes below level; None if it never does."""
    for i in range(1, len(steps)):
        if losses[i] < level <= losses[i - 1]:
            return steps[i - 1] + (steps[i] - steps[i - 1]) * (losses[i - 1] - level) / (losses[i - 1] - losses[i])
    return None


def train(runs, state=None, stopped=()):
    """Train the runs (flags that differ in seed and out alone; several are trained as one stack) from the state, which
    the first of them keeps (None = from the start), to the target or the last step. True when all have ended, False
    when `stopped` fills up first.

    Raises FloatingPointError when a loss is no longer finite; state.pt then holds the last time all still were.
    ValueError for a stack with --circuit: its runs would need different patterns."""
    flags, device = runs[0], runs[0]["device"]
    if flags["circuit"] and len(runs) > 1:
        raise ValueError("--circuit trains one seed at a time")
    models = []
    for run in runs:
        torch.manual_seed(run["seed"])
        models.append(build(run).to(device))
    model = Stack(models) if len(runs) > 1 else models[0]
    forward = torch.compile(model) if flags["compile"] else model
    trained_by = optimizers(model, flags)
    step, seconds, logs, ended = 0, 0.0, [[] for _ in runs], [False for _ in runs]
    train_loss = torch.zeros(2, len(runs), device=device)  # sum and number of the losses since the last evaluation
    if state:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(trained_by, state["optimizers"]):
            optimizer.load_state_dict(saved)
        step, seconds, train_loss, ended = (state[key] for key in ("step", "seconds", "train_loss", "ended"))
        logs = [[row for row in read_log(run["out"]) if row["step"] < step or done] for run, done in zip(runs, ended)]
        print(f"resumed {flags['out']} at step {step}")
    names = [f"x_{k}" for k in (range(1, flags["D"] + 1) if flags["ic"] else [flags["D"]])]
    started, since = time.time() - seconds, (time.time(), step)

    def save_state():
        now = dict(model=model.state_dict(), optimizers=[optimizer.state_dict() for optimizer in trained_by], step=step,
                   train_loss=train_loss, seconds=time.time() - started, ended=ended)
        write_file(flags["out"] / "state.pt", lambda path: torch.save(now, path))

    while True:  # the top of the loop is the state that is saved: after `step` steps, before the evaluation
        if flags["save_every"] and step % flags["save_every"] == 0:
            for i, run in enumerate(runs):
                (run["out"] / "ckpt").mkdir(exist_ok=True)
                write_file(run["out"] / f"ckpt/{step:06d}.pt", lambda path: torch.save(weights_of(model, i), path))
        last = step == flags["steps"]
        if step % flags["eval_every"] == 0 or last:
            evaluated, means = evaluate(forward, runs), (train_loss[0] / train_loss[1]).tolist()
            solved = [not end and sum(losses) / len(losses) < flags["target"] for end, losses in zip(ended, evaluated)]
            if last or any(solved):  # few sequences make most of so small an error, and the lowest of many is biased
                confirmed = [sum(losses) / len(losses) for losses in evaluate(forward, runs, n=8192, first=1024)]
            alive, ending = [i for i in range(len(runs)) if not ended[i]], []
            for i in alive:
                row = dict(step=step, seconds=round(time.time() - started, 2), lr=learning_rate(step, flags),
                           train=means[i] if step else None, val=sum(evaluated[i]) / len(evaluated[i]),
                           **dict(zip(names, evaluated[i])))
                if not math.isfinite(row["val"] + (row["train"] or 0)):
                    raise FloatingPointError(f"the loss is no longer finite at step {step}: start again with a lower --lr "
                                             f"or --clip and another --out; {flags['out']} keeps the last good state")
                if last or solved[i]:
                    row["confirmed"] = confirmed[i]
                    if last or confirmed[i] < flags["target"]:
                        ending.append(i)
                logs[i].append(row)
                lines = "".join(json.dumps(row) + "\n" for row in logs[i])
                write_file(runs[i]["out"] / "log.jsonl", lambda path: path.write_text(lines))
            save_state()
            rate = (step - since[1]) / (time.time() - since[0])
            left = f"{(flags['steps'] - step) / rate / 60:.1f} min" if rate else "?"
            vals = sorted(logs[i][-1]["val"] for i in alive)
            what = (f"train {row['train'] or math.nan:.4f}  val {row['val']:.4f}  "
                    + "  ".join(f"{name} {row[name]:.3f}" for name in names) if len(runs) == 1 else
                    f"val {vals[0]:.4f} to {vals[-1]:.4f} in {len(alive)} of {len(runs)} runs")
            print(f"step {step:5d}/{flags['steps']} {step / flags['steps']:4.0%}  {what}  {rate:5.2f} steps/s  {left} left "
                  "at most", flush=True)
            since = time.time(), step
            for i in ending:
                ended[i] = True
                write_file(runs[i]["out"] / "model.pt", lambda path: torch.save(weights_of(model, i), path))
                draw_curves(runs[i]["out"])
            if all(ended):
                return True
            train_loss.zero_()
        if stopped:
            # after an evaluation it has just been saved, with the losses that the log needs; what blew up never is
            if step % flags["eval_every"] and train_loss.isfinite().all():
                save_state()
            return False
        for group in (group for optimizer in trained_by for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, flags)
        predictions, targets = predict(forward, runs, [
            batch_index(run["seed"], step, run["batch"], run["examples"]).to(device) for run in runs])
        loss = partial_losses(predictions, targets, flags["K"]).mean((-2, -1))  # (), of a stack (models,)
        loss.sum().backward()
        if flags["clip"] and isinstance(model, Stack):
            model.clip_gradients(flags["clip"])
        elif flags["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), flags["clip"])
        for optimizer in trained_by:
            optimizer.step()
            optimizer.zero_grad()
        train_loss += torch.stack([loss.detach(), torch.ones_like(loss)]).view(2, -1)
        step += 1


def save_figure(figure, path):
    """Write a figure of matplotlib as a PNG and forget it."""
    import matplotlib.pyplot as plt

    write_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
    plt.close(figure)


def draw_curves(run):
    """curves.png: training and validation loss, and the partial losses with the step where each passes 0.5."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    config, rows = read_config(run), read_log(run)
    steps, names = [row["step"] for row in rows], [name for name in rows[0] if name.startswith("x_")]
    figure, (whole, partial) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    whole.plot(steps[1:], [row["train"] for row in rows[1:]], color="tab:gray", label="training")
    whole.plot(steps, [row["val"] for row in rows], color="black", label="validation, 1024 sequences")
    heads = f"{config['heads']} head" + ("s" if config["heads"] > 1 else "")
    whole.set(yscale="log", ylabel="mean squared error",
              title=f"{config['layers']} layers x {heads}, D={config['D']}, seed {config['seed']}: "
                    f"MSE {rows[-1].get('confirmed', rows[-1]['val']):.4f} at step {steps[-1]}")
    if config["target"]:
        whole.axhline(config["target"], color="tab:green", ls="--", lw=1, label=f"target {config['target']:g}")
    colors = plt.get_cmap("viridis")
    for i, name in enumerate(names):
        losses, color = [row[name] for row in rows], colors(0.9 * i / max(1, len(names) - 1))
        crossing = first_below(steps, losses)
        label = f"${name}$" + (f", below 0.5 at step {crossing:.0f}" if crossing else "")
        partial.plot(steps, losses, color=color, label=label)
        if crossing:
            partial.plot(crossing, 0.5, "o", color=color)
    partial.set(ylim=(0, 1.2), ylabel="validation MSE", title="each symbol alone")
    for axes in (whole, partial):
        for level, meaning in (1, "knows nothing"), (1 - 1 / config["N"], f"averages the {config['N']} candidates"):
            axes.axhline(level, color="tab:red", ls=":", lw=1)
            axes.annotate(f"{level:.3g}: {meaning}", (1, level), (-4, 2), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", fontsize="small", color="tab:red")
        axes.set(xlabel="training step")
    whole.legend(fontsize="small", loc="lower left")  # where curves rarely are: no run is solved in its first steps,
    partial.legend(fontsize="small", loc="center right")  # none ends half way
    save_figure(figure, run / "curves.png")


def summary(run):
    """The end of a run in lines of "name: value", easy to grep."""
    config, rows = read_config(run), read_log(run)
    last = rows[-1]
    lines = ["---", f"run: {run}"]
    if config["target"]:
        lines.append(f"solved: {max(last['val'], last['confirmed']) < config['target']}")
    lines += [f"{name}: {last[name]:.5g}" for name in last if name not in ("lr", "train")]
    for name in (name for name in last if name.startswith("x_")):
        step = first_below([row["step"] for row in rows], [row[name] for row in rows])
        lines.append(f"{name}_below_0.5_at_step: {'never' if step is None else round(step)}")
    return "\n".join(lines)


def keep_freed_memory():
    """Let glibc keep what a step frees for the next one: handing it back costs thousands of page faults per step."""
    try:
        glibc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library
        return
    glibc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor in a mapping of its own
    glibc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD, in bytes


def main():
    flags, stopped = parse_flags(), []
    keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    runs = [flags | dict(seed=flags["seed"] + i) for i in range(flags["seeds"])]
    for run in runs:
        run["out"] = flags["out"] or run_directory(run)
    try:
        state = [open_run(run["out"], run, stacked_with=runs) for run in runs][0]
        ended = train(runs, state, stopped)
    except (FloatingPointError, OSError, ValueError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    if not ended:
        again = shlex.join(argument for argument in sys.argv[1:] if argument != "--resume")
        print(f"stopped and saved; to go on: python train.py {again} --resume")
        sys.exit(128 + stopped[0])
    for run in runs:
        print(summary(run["out"]))


if __name__ == "__main__":
    main()
