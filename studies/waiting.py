"""What grows beneath the plateau: attention that the loss does not show yet.

    python -m studies.waiting out/waiting --seeds 3    # trains small models on x_1; goes on if rerun
    python -m studies.waiting out/waiting --run out/L12_H1_D3_s0  # one trained with --save-every 10

The excess of a path is how much more its source attends to the target of its own chain than to the
targets of other chains. The plateau of x_1 lasts until a third of its loss there is gone. It is cut
into a delay, until the excess of q -> 1b can be told from zero; growth, until it is 0.1; and a
rest. growth.jsonl holds a row for each run, with a number for every tenth step:

    loss: of x_1 on 256 held-out sequences, on which everything else is measured too
    excess, low: of q -> 1b in the head where it is largest at the end, and the lower end of its 95%
        interval over sequences
    previous: the excess of 1b -> 1a in the head where it is largest at that step
    held: R2 with which 1b holds x_0, read linearly before the layer of that head
    average: how much of the average of the candidates the prediction holds; 1 is all of it
    gradient_qk, gradient_v: the norm of the gradient of the weights of that head
"""

import contextlib
import functools
import io
import itertools
import math
import shlex
import shutil
import statistics
import tempfile
from pathlib import Path

from parts import command_line, config, program, theory
from parts.circuit import Path as AttentionPath
from parts.circuit import Place, frozen_heads, path_name, paths_in, read_report
from parts.config import Flags
from parts.stats import bootstrap

import numpy as np
import torch

import studies
import sweep
import train
from data import TASKS, Task, chain, held_out, partial_losses
from studies import markdown


LEVEL = 0.1  # the excess at which growth ends: the loss starts to move
SETTINGS = {  # name: flags
    "Muon, appended": "--optimizer muon --rotary input",
    "Muon, RoPE": "--optimizer muon --rotary qk",
    "AdamW, appended": "--optimizer adamw --rotary input",
    "AdamW, RoPE": "--optimizer adamw --rotary qk",
}
SMALL = f"{sweep.PLAIN} --layers 4 --heads 4 --width 64 --batch 64 --targets 1 --D 1 --decay 0"
SMALL += " --warmup 0 --steps 2400 --eval-every 20 --save-every 10 --dtype float32"
POINTS = {  # what differs from the base: flags
    "base": "",
    "first W_Q, W_K 0.1": "--qk-std 0.1",
    "first W_Q, W_K 0.05": "--qk-std 0.05",
    "first W_Q, W_K 0.005": "--qk-std 0.005",
    "1b -> 1a frozen": "--circuit previous",
    "rate 5e-4": "--lr 5e-4",
    "rate 4e-3": "--lr 4e-3",
    "batch 32": "--batch 32",
    "batch 256": "--batch 256",
    "N=2": "--N 2",
    "N=12, 36 tokens": "--N 12",
    "N=4, 36 tokens": "--task padded",
    "2 layers": "--layers 2",
    "8 layers": "--layers 8",
    "D=2": "--D 2",
    "D=2, read from step 1 on": "--D 2 --task first_step_first",
}
TRANSPLANTS = {  # which weights of the base at step 200 a run starts with; the others are fresh
    "all but W_Q, W_K from step 200": False,
    "only W_Q, W_K from step 200": True,
}
MAIN = {  # at the size of the main command
    "12 layers": "",
    "12 layers, N=8": "--N 8",
    "12 layers, D=2": "--D 2",
}
AT_MAIN_SIZE = "--layers 12 --heads 1 --width 128 --batch 128 --warmup 100 "


# ---- tasks and circuits


@functools.cache
def unlinked(N, D):
    """The chains of step 1 alone, after pairs that belong to no chain."""
    roles = [role._replace(symbol=-1) if role.block < D - 1 else role for role in chain(N, D).roles]
    return Task(f"unlinked_D={D}", N, tuple(roles))


@functools.cache
def first_step_first(N, D):
    """Chains whose pairs are read from step 1 to step D, then the queries."""
    order = [*range(D - 1, -1, -1), D]
    roles = [role._replace(block=order[role.block]) for role in chain(N, D).roles]
    return Task(f"first_step_first_D={D}", N, tuple(roles))


def padded(N, D):
    """The chains of one step after three times as many pairs of no chain, whatever D is."""
    return unlinked(N, 4)


def previous(D, layers, causal):
    """The paths of the previous-token head of the minimal circuit."""
    return theory.minimal_circuit(D, 1, causal)


theory.CIRCUITS["previous", "chain"] = previous
TASKS |= dict(unlinked=unlinked, first_step_first=first_step_first, padded=padded)


# ---- measuring


def excess_on(pattern, path, task, positions):
    """Return (B,), the excess of a path in one head's pattern (B, T, T), its mean over chains."""
    source, target, exist = path.tokens(task, positions)
    sequence = torch.arange(len(positions))[:, None, None]
    attention = pattern[sequence, source[:, :, None], target[:, None]]  # (B, N, N)
    attention = attention * (exist[:, :, None] & exist[:, None])
    own = attention.diagonal(dim1=1, dim2=2)
    return (own - (attention.sum(2) - own) / (task.N - 1)).mean(1)


def linear_r2(x, y):
    """Return R2, on the second half of the rows, of the linear map from x (n, width) to y (n, K)
    that fits the first half best."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    half = len(x) // 2
    error = y - x @ torch.linalg.lstsq(x[:half], y[:half]).solution
    return 1 - (error[half:].square().sum() / (y - y.mean(0))[half:].square().sum()).item()


def measure_weights(model, flags, batch):
    """Return what a row holds of one step, as {name: a number, or a tensor with one for each
    head or each layer}; excess has them for each head and sequence."""
    task, positions, streams = flags.problem, batch.positions, []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, arguments: streams.append(arguments[0].detach()))
    heads = frozen_heads(theory.frozen_paths(flags), task, positions)
    predictions, patterns = model(batch.inputs, heads, return_patterns=True)
    loss = partial_losses(predictions, batch.targets, flags.K).mean()
    loss.backward()

    # the excess of both paths in every head
    q, a, b = (Place(task.names.index(name)) for name in ("q", "1a", "1b"))
    excesses = []
    for source, target in (q, b), (b, a):
        path = AttentionPath(0, 0, source, target)
        per_head = [p[:, i] for p in patterns for i in range(flags.heads)]
        excesses.append(torch.stack([excess_on(p, path, task, positions) for p in per_head]))

    # what 1b holds of x_0, and what the prediction holds of the average of the candidates
    sequence = torch.arange(len(positions))[:, None]
    x_0 = batch.inputs[sequence, positions[:, :, q.role], : flags.K].flatten(0, 1)
    of_1b = [stream[sequence, positions[:, :, b.role]].flatten(0, 1) for stream in streams]
    average = batch.targets.mean(1, keepdim=True)
    share = (predictions * average).sum() / (average**2).expand_as(predictions).sum()

    # the gradient of each head's W_Q and W_K, and of its W_V
    gradients = []
    for block in model.blocks:
        gradients.append(block.qkv.weight.grad.unflatten(0, (3, flags.heads, -1)))
    squares = torch.stack(gradients).square().sum((-2, -1))  # (layers, 3, heads)
    return dict(
        loss=loss.item(),
        excess=excesses[0].detach(),  # (heads of all layers, B)
        previous=excesses[1].detach().mean(1).max().item(),
        held=[linear_r2(stream, x_0) for stream in of_1b],
        average=share.item(),
        gradient_qk=squares[:, :2].sum(1).sqrt().flatten(),
        gradient_v=squares[:, 2].sqrt().flatten(),
    )


def measure(flags):
    """Return the row of growth.jsonl of a run with checkpoints."""
    batch, files = config.sequences(flags, held_out("emergence", 256)), config.checkpoints_of(flags.out)
    models = [config.load(flags.out, f"ckpt/{file.name}")[0] for file in files]
    measured = [measure_weights(model, flags, batch) for model in models]
    head = measured[-1]["excess"].mean(1).argmax().item()
    layer, generator = head // flags.heads, torch.Generator().manual_seed(0)
    log = config.read_log(flags.out)
    row = dict(head=f"L{layer}H{head % flags.heads}", plateau=config.crossings(log, flags)["x_1"])
    row["steps"] = [int(file.stem) for file in files]
    curves = dict(
        loss=[m["loss"] for m in measured],
        excess=[m["excess"][head].mean().item() for m in measured],
        low=[bootstrap(m["excess"][head], generator, 200)[0] for m in measured],
        previous=[m["previous"] for m in measured],
        held=[m["held"][layer] for m in measured],
        average=[m["average"] for m in measured],
        gradient_qk=[m["gradient_qk"][head].item() for m in measured],
        gradient_v=[m["gradient_v"][head].item() for m in measured],
    )
    return row | {name: [float(f"{x:.3g}") for x in curve] for name, curve in curves.items()}


# ---- training


def write_transplants(flags, folder):
    """Write, from a run of the base, the runs that the transplants start from."""
    first, later = (config.load(flags.out, f"ckpt/{step:06d}.pt")[0] for step in (0, 200))
    for point, only_scores in TRANSPLANTS.items():
        mixed = first.state_dict() if only_scores else later.state_dict()
        donor = later.state_dict() if only_scores else first.state_dict()
        for name in mixed:
            if ".qkv." in name:
                scores = 2 * len(mixed[name]) // 3
                mixed[name][:scores] = donor[name][:scores]
        run = folder / "starts" / f"{point}_s{flags.seed}".replace(" ", "_")
        run.mkdir(parents=True, exist_ok=True)
        shutil.copy(flags.out / "config.json", run)
        config.write_tensors(run / "model.pt", mixed)


def grid(folder, seeds):
    """Return {(point, setting, seed): flags as text}, a seed of all points before the next."""
    texts = {}
    for seed in range(seeds):
        for (point, text), setting in itertools.product(POINTS.items(), SETTINGS):
            texts[point, setting, seed] = f"{SMALL} {SETTINGS[setting]} {text} --seed {seed}"
        setting = "Muon, appended"
        for point, text in MAIN.items():
            flags = f"{SMALL} {SETTINGS[setting]} {AT_MAIN_SIZE} {text}"
            texts[point, setting, seed] = f"{flags} --seed {seed}"
        for point in TRANSPLANTS:
            start = folder / "starts" / f"{point}_s{seed}".replace(" ", "_")
            flags = f"{SMALL} {SETTINGS[setting]} --init {shlex.quote(str(start))}"
            texts[point, setting, seed] = f"{flags} --seed {seed}"
    return texts


def grow(folder, seeds):
    """Train and measure all runs of the grid that growth.jsonl in the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, texts = load_rows(folder), grid(folder, seeds)
    there = {(row["point"], row["setting"], row["seed"]) for row in rows}
    train.keep_freed_memory()
    for key in config.progress("run", [key for key in texts if key not in there]):
        with tempfile.TemporaryDirectory() as temporary:
            out = ["--out", f"{temporary}/run"]
            flags = train.parse_flags([*shlex.split(texts[key]), *out])
            flags.target = flags.problem.lost
            with contextlib.redirect_stdout(io.StringIO()):
                train.run_once(flags)
            rows.append(dict(zip(("point", "setting", "seed"), key, strict=True)) | measure(flags))
            if key[:2] == ("base", "Muon, appended"):
                write_transplants(flags, folder)
        config.write_rows(folder / "growth.jsonl", rows)


def load_rows(folder):
    """Return the rows of growth.jsonl in a folder, [] if it is not there yet."""
    file = folder / "growth.jsonl"
    return config.read_json(file, lines=True) if file.exists() else []
