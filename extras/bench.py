"""Time a training step of ours beside one of transformers' GPT2Model.

    python -m extras.bench

Both have the size of the main command, the same batches and AdamW; they take turns.
"""

import statistics
import time

import train
from data import command_line
from extras.llm import package
from extras.studies import markdown

import torch


WARMUP, ROUNDS = 5, 15  # rounds that are not timed, then rounds that are


class GPT2(torch.nn.Module):
    """transformers' stack of layers, with its own positions, between two linear maps like ours."""

    def __init__(self, flags):
        super().__init__()
        transformers, task = package("transformers"), train.task_of(flags)
        shape = transformers.GPT2Config(
            n_layer=flags.layers, n_head=flags.heads, n_embd=flags.width, vocab_size=1,
            n_positions=task.T, bos_token_id=None, eos_token_id=None, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
        )  # fmt: skip
        self.embed = torch.nn.Linear(task.inputs, flags.width)
        self.head = torch.nn.Linear(flags.width, task.outputs)
        self.stack, self.N, self.dtype = transformers.GPT2Model(shape), task.N, flags.dtype

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return self.head(self.stack(inputs_embeds=self.embed(x))[0][:, -self.N :])


def training_step(kind, flags):
    """Return a function batch -> loss that trains a new model by one step."""
    model, task = kind(flags).to(flags.device), train.task_of(flags)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step(batch):
        loss = task.losses(model(batch.inputs), batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # when the device is done

    return step


def steps_table(flags):
    """Return a row for each dtype: the milliseconds of a step of both, and their ratio."""
    lines = []
    for dtype in "float32", "bfloat16":
        flags.dtype = dtype
        steps = [training_step(kind, flags) for kind in (train.build, GPT2)]
        seconds = [[], []]
        for number in range(WARMUP + ROUNDS):
            batch = train.task_of(flags).draw("training", flags.batch, number).to(flags.device)
            for step, measured in zip(steps, seconds, strict=True):
                began = time.perf_counter()
                step(batch)
                measured.append(time.perf_counter() - began)
        ours, theirs = (1000 * statistics.median(measured[WARMUP:]) for measured in seconds)
        lines.append([dtype, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}"])
    return markdown(["dtype", "ours, ms", "GPT2Model, ms", "GPT2Model / ours"], *lines)


if __name__ == "__main__":
    command_line("python -m extras.bench", __doc__).parse_args()
    print(steps_table(train.parse_flags([])))
