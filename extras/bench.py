"""How much longer does a training step of transformers' GPT2Model take than one of ours?

python -m extras.bench    # both with the size of the main command; they take turns
"""

import statistics
import time

import train
from data import command_line
from extras.llm import package

import torch


class GPT2(torch.nn.Module):
    """transformers' stack of layers, with its own positions, between two linear maps like ours."""

    def __init__(self, flags, task):
        super().__init__()
        transformers = package("transformers")
        shape = transformers.GPT2Config(
            n_layer=flags.layers, n_head=flags.heads, n_embd=flags.width, vocab_size=1,
            n_positions=task.T, bos_token_id=None, eos_token_id=None, use_cache=False,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager",
        )  # fmt: skip
        self.embed = torch.nn.Linear(task.inputs, flags.width)
        self.head = torch.nn.Linear(flags.width, task.outputs)
        self.stack, self.N = transformers.GPT2Model(shape), task.N

    def forward(self, x):
        return self.head(self.stack(inputs_embeds=self.embed(x))[0][:, -self.N :])


def main():
    command_line("python -m extras.bench", __doc__).parse_args()
    flags = train.parse_flags([])
    task, ratios = train.task_of(flags), []
    models = [model.to(flags.device) for model in (train.build(flags), GPT2(flags, task))]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for number in range(20):
        batch, seconds = task.draw("training", flags.batch, number).to(flags.device), []
        for model, optimizer in zip(models, optimizers, strict=True):
            began = time.perf_counter()
            loss = task.losses(model(batch.inputs), batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for the device
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[1] / seconds[0])
    print(f"GPT2Model / ours: {statistics.median(ratios[5:]):.2f}")  # the first warm up


if __name__ == "__main__":
    main()
