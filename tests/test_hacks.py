"""What a researcher changes in a copy of the code: right, or loud."""

import pickle
import sys
import types

from parts import runs

import pytest
import torch

import train
from tests.common import HERE, TINY, WHOLE, assert_refused, run_main, train_until


def hacked(monkeypatch, *edits):
    """train.py with some of its text replaced, in place of the module."""
    text = (HERE / "train.py").read_text()
    for old, new in (*edits, ("                draw_curves(run)\n", "")):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType("train")
    module.__file__ = str(HERE / "train.py")
    monkeypatch.setitem(sys.modules, "train", module)
    exec(compile(text, "train.py", "exec"), vars(module))
    return module


# ---- what training changes

AT_THE_START = "self.rows = []  # of log.jsonl\n"
IN_A_STEP = "        state.step += 1\n"
KEPT = """\
        self.seen, self.lowest, self.norms = 0, None, []
        self.mean, self.slow = {}, torch.optim.swa_utils.AveragedModel(self.model)
"""
CHANGED = """\
        norm = sum(one.norm() for one in model.parameters()).item()
        state.lowest = norm if state.lowest is None else min(norm, state.lowest)
        state.seen += norm / 2
        state.norms.append(norm)
        for name, weight in model.state_dict().items():
            state.mean.setdefault(name, weight.clone()).lerp_(weight, 0.1)
        state.slow.update_parameters(model)
"""


def test_what_is_added_to_the_state_comes_back_bitwise(tmp_path, monkeypatch):
    """Numbers, a list, tensors in a dict, a model; and what is drawn at random in a step."""
    asked = "predictions, targets = predict(compiled, flags, index)\n"
    noise = f"{asked}        predictions = predictions + torch.randn_like(predictions)\n"
    edits = (AT_THE_START, AT_THE_START + KEPT), (IN_A_STEP, CHANGED + IN_A_STEP), (asked, noise)
    changed, states = hacked(monkeypatch, *edits), []
    for stop in (0, 20):
        run = tmp_path / str(stop)
        if stop:
            train_until(stop, *WHOLE, "--out", run)
        code, _, err = run_main(changed, *WHOLE, "--out", run, "--resume")
        assert code == 0, err
        states.append(runs.read_tensors(run / "state.pt") | dict(seconds=0, rows=[]))
    assert len(states[0]["norms"]) == 40 and states[0]["slow"]["n_averaged"] == 40
    assert numbers(states[0]) == numbers(states[1])

    # a run of before knows nothing of it
    train_until(20, *WHOLE, "--out", tmp_path / "before")
    again = [*WHOLE, "--out", tmp_path / "before", "--resume"]
    assert_refused(train, *again, says="state.pt is of another run")


def numbers(kept):
    """With lists in place of tensors."""
    if isinstance(kept, dict):
        return {name: numbers(own) for name, own in kept.items()}
    if isinstance(kept, list):
        return [numbers(own) for own in kept]
    return kept.tolist() if isinstance(kept, torch.Tensor) else kept


def test_what_could_not_come_back_raises_at_once(tmp_path, monkeypatch):
    deque = f"{AT_THE_START}        self.last = __import__('collections').deque()\n"
    changed = hacked(monkeypatch, (AT_THE_START, deque))
    with pytest.raises(pickle.UnpicklingError, match="collections.deque"):
        run_main(changed, *WHOLE, "--out", tmp_path / "run")


# ---- what a model is made of


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_shared_weights_are_trained_once_and_gains_never_decay(optimizer):
    """One module in two layers; one weight in two modules; a gain per head, (heads, size). Without
    a gradient a weight of a linear layer loses the share rate * decay of itself, the rest nothing.
    """
    flags = train.parse_flags([*TINY, "--optimizer", optimizer, "--weight-decay", "2"])
    flags = flags.but(layers=3, lr=0.1)
    model = runs.build(flags)
    first, second, third = model.blocks
    second.up, third.qkv.weight = first.up, first.qkv.weight
    first.gain = torch.nn.Parameter(torch.ones(flags.heads, flags.size))
    for parameter in model.parameters():
        parameter.data.fill_(1)
        parameter.grad = torch.zeros_like(parameter)
    for each in train.OPTIMIZERS[optimizer](model, flags):
        each.step()
    for name, parameter in model.named_parameters():
        decays = name.endswith("weight") and ".ln" not in f".{name}"
        expected = torch.full_like(parameter, 0.8 if decays else 1)
        torch.testing.assert_close(parameter.data, expected)
