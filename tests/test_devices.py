"""A GPU without a GPU: under FakeTensorMode tensors have a device and a shape, and no numbers. No
operation may mix devices, in no stage and with no flag. The device is "meta", which every build of
PyTorch can index; "cuda" only one that is linked with CUDA."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import ablate
import train
from ablate import ANOTHER, MEAN, NOTHING
from data import batch_index, held_out, partial_losses


SMALL = "--layers 2 --heads 2 --width 16 --N 3 --batch 4 --D 2 --device cpu"
FLAGS = [
    "--dtype bfloat16",
    "--rotary qk --no-causal --no-mlp --optimizer adamw --ema 0 --clip 0",
    "--targets 2 --examples 0 --head-size 6",
    "--task conditional --D 3 --rotary qk",
]


@pytest.fixture
def meta(monkeypatch):
    """What PyTorch itself refuses on "meta": autocast, fused AdamW, and moving a fake module, which
    is made on its device instead."""
    autocast, adamw, build = torch.autocast, torch.optim.AdamW, train.build

    def build_there(flags):
        with torch.device(flags.device):
            return build(flags)

    monkeypatch.setattr(train, "build", build_there)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    monkeypatch.setattr(torch, "autocast", lambda kind, *more, **how: autocast("cpu", *more, **how))
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, fused, **how: adamw(*a, **how))
    return "meta"


@pytest.mark.parametrize("text", FLAGS)
def test_no_tensor_is_on_a_wrong_device(text, meta):
    flags = train.parse_flags([*SMALL.split(), *text.split()]).replace(device=meta)
    assert len(flags.problem.tokens) == 4  # made outside of the mode, with numbers
    index = batch_index(flags.seed, 0, flags.batch, flags.examples)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # a training step, and the evaluation of the averaged model
        state = train.State(flags)
        predictions, targets = train.predict(state.model, flags, index)
        loss = partial_losses(predictions, targets, flags.K).mean()
        loss.backward()
        if flags.clip:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), flags.clip)
        for optimizer in state.optimizers:
            optimizer.step()
        state.averaged.update_parameters(state.model)
        state.train_loss += torch.stack([loss.detach(), torch.ones_like(loss)])
        with torch.no_grad():
            split = held_out("validation", 4, flags.device)
            evaluated, _ = train.predict(state.averaged.module, flags, split)

        # patterns, and every kind of ablation
        batch, model = train.sequences(flags, held_out("search", 4, flags.device)), state.model
        with train.precision(flags), torch.no_grad():
            _, patterns = model(batch.inputs, return_patterns=True)
        patched = ablate.PatchedModel(model, flags, batch, ablate.Reference(model, flags, n=4))
        ends = ablate.End(0), ablate.End(2), ablate.End(1, 1), ablate.End(2, every=True)
        paths = [ablate.Path(0, 0, *pair) for pair in itertools.product(ends[:3], ends)]
        outcomes = [patched.circuit(paths, by) for by in (MEAN, ANOTHER, NOTHING)]
        frozen = ablate.frozen_heads(paths, flags.problem, batch.positions)
        outcomes += [patched.knock_out(paths), patched.losses(frozen), loss, evaluated]
        for path in paths:
            given = ablate.attention_on(patterns[0][:, :1], path, flags.problem, batch.positions)
            outcomes.append(given)
    assert {tensor.device.type for tensor in outcomes} == {meta}
