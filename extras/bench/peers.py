"""Time one training step of our transformer beside the same step of well-known libraries, and the
README's four commands beside steps of the best known of these.

    pip install -r extras/bench/requirements.txt
    python -m extras.bench.peers    # writes out/peers.jsonl; about 10 minutes on 2 cores

All models have the size of the main command and are trained on the same batches by the same AdamW,
without torch.compile. They take turns within each round, so that a change in the load of the
machine affects all of them, and the median over the rounds counts. A command counts in steps of
GPT2Model, in the best dtype of the machine, that were timed just before and just after it.
"""

import functools
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import train
from data import batch_index, command_line, partial_losses, program, progress
from extras.studies import markdown
from train import keep_freed_memory, parse_flags

import torch
import torch.nn as nn


WARMUP, ROUNDS = 5, 15  # rounds that are not timed, then rounds that are
GPT2 = "transformers GPT2Model, eager attention"
COMMANDS = [  # of the README; RUN is the run directory
    "train.py --layers 12 --heads 1 --D 3 --out RUN",
    "ablate.py RUN",
    "analyze.py RUN",
    "-m extras.pages.explore RUN --out RUN.html",
]


class Peer(nn.Module):
    """A library's stack of layers between an input map and an output map like ours; call(stack, x)
    applies it to the residual stream x (B, T, width)."""

    def __init__(self, flags, stack, call):
        super().__init__()
        ours = train.build(flags)
        self.embed, self.stack, self.head = ours.embed, stack, ours.head
        self.call, self.N = call, flags.N

    def forward(self, x):
        return self.head(self.call(self.stack, self.embed(x))[:, -self.N :])


def gpt2(attention, flags):
    from transformers import GPT2Config, GPT2Model

    sizes = dict(n_layer=flags.layers, n_head=flags.heads, n_embd=flags.width)
    sizes |= dict(n_positions=flags.problem.T, vocab_size=1)
    no_dropout = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0)
    no_tokens = dict.fromkeys(["bos_token_id", "eos_token_id"])
    kind = dict(activation_function="gelu", attn_implementation=attention, use_cache=False)
    shape = GPT2Config(**sizes, **no_dropout, **no_tokens, **kind)
    return Peer(flags, GPT2Model(shape), lambda stack, x: stack(inputs_embeds=x)[0])


def x_transformers(flags):
    from x_transformers import Decoder

    head_size = flags.width // flags.heads
    sizes = dict(dim=flags.width, depth=flags.layers, heads=flags.heads, attn_dim_head=head_size)
    stack = Decoder(**sizes, attn_flash=True, attn_project_out=True)
    return Peer(flags, stack, lambda stack, x: stack(x))


def torch_encoder(flags):
    sizes = flags.width, flags.heads, 4 * flags.width
    kind = dict(dropout=0, activation="gelu", batch_first=True, norm_first=True)
    layer = nn.TransformerEncoderLayer(*sizes, **kind)
    norm = nn.LayerNorm(flags.width)
    stack = nn.TransformerEncoder(layer, flags.layers, norm, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(flags.problem.T, flags.device)
    return Peer(flags, stack, lambda stack, x: stack(x, mask, is_causal=True))


MODELS = {
    "ours": train.build,
    GPT2: functools.partial(gpt2, "eager"),
    "transformers GPT2Model, fused attention": functools.partial(gpt2, "sdpa"),
    "x-transformers": x_transformers,
    "torch.nn.TransformerEncoder": torch_encoder,
}


def training_step(model, flags):
    """A function batch -> loss that trains a model by one step, from weights like all others'."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    rates = dict(lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), **rates, fused=True)

    def step(batch):
        with train.precision(flags):
            predictions = model(batch.inputs)
        loss = partial_losses(predictions, batch.targets, flags.K).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # when the device is done

    return step


def take_turns(steps, flags):
    """Return {key: the median seconds} of steps, {key: a function of a batch}."""
    seconds = {key: [] for key in steps}
    for number in range(WARMUP + ROUNDS):
        index = batch_index(flags.seed, number, flags.batch, flags.examples).to(flags.device)
        batch = train.sequences(flags, index)
        for key, step in steps.items():
            began = time.perf_counter()
            step(batch)
            seconds[key].append(time.perf_counter() - began)
    return {key: statistics.median(seconds[key][WARMUP:]) for key in steps}


def measure(flags):
    """A row for each dtype and model; "ours_faster_by": its time by ours in the same dtype."""
    steps, rows = {}, []
    for dtype, name in itertools.product(["float32", "bfloat16"], MODELS):
        torch.manual_seed(0)
        model = MODELS[name](flags).to(flags.device)
        steps[dtype, name] = training_step(model, flags.replace(dtype=dtype))
    medians = take_turns(steps, flags)
    for (dtype, name), median in medians.items():
        faster = round(median / medians[dtype, "ours"], 2)
        rows.append(dict(model=name, setting=dtype, ms=round(1000 * median), ours_faster_by=faster))
    return rows


def first_experience(flags):
    """Rows of JSON, one for each of COMMANDS: its seconds, and how many steps of GPT2 they are."""
    torch.manual_seed(0)
    step = training_step(MODELS[GPT2](flags).to(flags.device), flags)
    rows, before = [], take_turns({GPT2: step}, flags)[GPT2]
    with tempfile.TemporaryDirectory() as folder:
        for command in progress("command", COMMANDS):
            arguments, began = command.replace("RUN", f"{folder}/run").split(), time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            seconds = time.perf_counter() - began
            after = take_turns({GPT2: step}, flags)[GPT2]
            steps = round(seconds / statistics.fmean([before, after]))
            rows.append(dict(command=command, seconds=round(seconds), gpt2_steps=steps))
            before = after
    return rows


# ---- the tables of README.md


def read():
    """Return the provenance of peers.jsonl, its rows of models and those of commands."""
    provenance, *rows = train.read_file(Path(__file__).with_name("peers.jsonl"))
    commands = [row for row in rows if "command" in row]
    return provenance, [row for row in rows if "model" in row], commands


def steps_table(provenance, models, commands):
    """Return what was measured where, and a row for each model and dtype."""
    names = "setting", "model", "ms", "ours_faster_by"
    lines = [[row[name] for name in names] for row in models]
    table = markdown([name.replace("_", " ") for name in names], *lines)
    return ", ".join(f"{name} {value}" for name, value in provenance.items()) + f"\n\n{table}"


def commands_table(provenance, models, commands):
    """Return a row for each command of the README, and their sum."""
    lines = [[*row.values()] for row in commands]
    _, seconds, steps = zip(*lines, strict=True)
    head = "command", "seconds", "steps of GPT2Model"
    return markdown(head, *lines, ["all four", sum(seconds), sum(steps)])


if __name__ == "__main__":
    name = "python -m extras.bench.peers"
    with program(name):
        command_line(name, __doc__).parse_args()
        keep_freed_memory()  # all models share this process
        flags = parse_flags([])
        provenance = train.provenance_of(flags) | dict(date=time.strftime("%B %Y"))
        provenance |= {name: version(name) for name in ("transformers", "x-transformers")}
        measured = provenance, measure(flags), first_experience(flags)
        train.write_file(Path("out/peers.jsonl"), [provenance, *measured[1], *measured[2]])
        print(steps_table(*measured), commands_table(*measured), sep="\n\n")
