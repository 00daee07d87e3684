"""Time one training step of ours beside the same step of transformers' GPT2Model, and count what
the README's commands take in steps of GPT2Model.

    python -m extras.bench            # about a minute for the steps, and as long as the commands
    python -m extras.bench --steps    # the steps alone

Both models have the size of the main command, and are trained on the same batches by the same
AdamW. They take turns, so that a change in the load of the machine affects both; the median over
the rounds counts. A command counts in steps of GPT2Model timed just before and just after it.
"""

import statistics
import subprocess
import sys
import tempfile
import time

import train
from data import batch_index, command_line, partial_losses
from extras.llm import package
from extras.studies import markdown

import torch


WARMUP, ROUNDS = 5, 15  # rounds that are not timed, then rounds that are
COMMANDS = [  # RUN is the run directory
    "train.py --layers 12 --heads 1 --D 3 --out RUN",
    "ablate.py RUN",
    "analyze.py RUN",
    "-m extras.explore RUN",
]


class GPT2(torch.nn.Module):
    """transformers' stack of layers between an input map and an output map like ours."""

    def __init__(self, flags):
        super().__init__()
        transformers = package("transformers")
        ours = train.build(flags)
        shape = transformers.GPT2Config(
            n_layer=flags.layers, n_head=flags.heads, n_embd=flags.width, vocab_size=1,
            n_positions=flags.problem.T, bos_token_id=None, eos_token_id=None, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
        )  # fmt: skip
        self.embed, self.head, self.N = ours.embed, ours.head, flags.N
        self.stack = transformers.GPT2Model(shape)

    def forward(self, x):
        states = self.stack(inputs_embeds=self.embed(x)).last_hidden_state
        return self.head(states[:, -self.N :])


def training_step(kind, flags):
    """Return a function batch -> loss that trains a new model by one step."""
    model = kind(flags).to(flags.device)
    rates = dict(lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), **rates, fused=True)

    def step(batch):
        with train.precision(flags):
            predictions = model(batch.inputs)
        loss = partial_losses(predictions, batch.targets, flags.K).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
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


def steps_table(flags):
    """Return a row for each dtype: the milliseconds of a step of both, and their ratio."""
    lines = []
    for dtype in "float32", "bfloat16":
        kinds = {"ours": train.build, "GPT2Model": GPT2}
        steps = {}
        for name, kind in kinds.items():
            steps[name] = training_step(kind, flags.replace(dtype=dtype))
        ours, theirs = take_turns(steps, flags).values()
        lines.append([dtype, f"{1000 * ours:.0f}", f"{1000 * theirs:.0f}", f"{theirs / ours:.2f}"])
    return markdown(["dtype", "ours, ms", "GPT2Model, ms", "GPT2Model / ours"], *lines)


def commands_table(flags):
    """Return a row for each of COMMANDS: its seconds, and how many steps of GPT2Model they are."""
    steps = {"GPT2Model": training_step(GPT2, flags)}  # in the best dtype of the machine
    lines, before = [], take_turns(steps, flags)["GPT2Model"]
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            arguments = command.replace("RUN", f"{folder}/run").split()
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds = time.perf_counter() - began
            after = take_turns(steps, flags)["GPT2Model"]
            lines.append([command, round(seconds), round(2 * seconds / (before + after))])
            before = after
    total = [sum(line[i] for line in lines) for i in (1, 2)]
    return markdown(["command", "seconds", "steps of GPT2Model"], *lines, ["all", *total])


if __name__ == "__main__":
    p = command_line("python -m extras.bench", __doc__)
    p.add_argument("--steps", action="store_true", help="leave out the commands")
    only_steps = p.parse_args().steps
    train.keep_freed_memory()  # both models share this process
    flags = train.parse_flags([])
    print(steps_table(flags))
    if not only_steps:
        print(f"\n{commands_table(flags)}")
