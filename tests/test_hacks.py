"""Changes that a researcher makes in a copy of the code work, or fail loudly."""

import sys
import types

import pytest
import torch

import analyze
import train
from tests.common import HERE, TINY, WHOLE, load_tensors, logged, run_main, train_until


def hacked(monkeypatch, *edits):
    """Replace the module train by train.py with some of its text edited."""
    text = (HERE / "train.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType("train")
    module.__file__ = str(HERE / "train.py")
    monkeypatch.setitem(sys.modules, "train", module)
    exec(compile(text, "train.py", "exec"), vars(module))
    return module


# ---- what training changes

ATTRIBUTES = "self.rows = []  # of log.jsonl\n"
STEP = "        state.step += 1\n"
PREDICTION = "predictions, targets = predict(model, flags, index)\n"
NOISE = "        predictions = predictions + torch.randn_like(predictions)\n"
MORE_ATTRIBUTES = """\
        self.total, self.lowest, self.norms = 0, None, []
        self.mean, self.slow = {}, torch.optim.swa_utils.AveragedModel(self.model)
"""
CHANGES = """\
        norm = sum(parameter.norm() for parameter in model.parameters()).item()
        state.lowest = norm if state.lowest is None else min(norm, state.lowest)
        state.total += norm / 2
        state.norms.append(norm)
        for name, weight in model.state_dict().items():
            state.mean.setdefault(name, weight.clone()).lerp_(weight, 0.1)
        state.slow.update_parameters(model)
"""


def test_what_is_added_to_the_state_comes_back_bitwise(tmp_path, monkeypatch):
    """Numbers, a list, tensors in a dict, a model; and random numbers that a step draws."""
    edits = (ATTRIBUTES, ATTRIBUTES + MORE_ATTRIBUTES), (STEP, CHANGES + STEP)
    changed = hacked(monkeypatch, *edits, (PREDICTION, PREDICTION + NOISE))
    train_until(20, *WHOLE, "--out", tmp_path / "stopped")
    states = []
    for run in (tmp_path / "whole", tmp_path / "stopped"):
        code, _, err = run_main(changed, *WHOLE, "--out", run, "--resume")
        assert code == 0, err
        states.append(load_tensors(run / "state.pt") | dict(seconds=0, rows=[]))
    assert len(states[0]["norms"]) == 40 and states[0]["slow"]["n_averaged"] == 40
    assert as_lists(states[0]) == as_lists(states[1])


def as_lists(saved):
    """Return dicts, lists and tensors with lists instead of tensors."""
    if isinstance(saved, dict):
        return {name: as_lists(value) for name, value in saved.items()}
    if isinstance(saved, list):
        return [as_lists(value) for value in saved]
    return saved.tolist() if isinstance(saved, torch.Tensor) else saved


# ---- what is logged

ROW = "        val=sum(losses) / len(losses),\n"


def test_an_added_column_is_no_symbol(tmp_path, monkeypatch):
    columns = "        x_1_norm=0.1, x_9=float(state.step),\n"
    changed, run = hacked(monkeypatch, (ROW, ROW + columns)), tmp_path / "run"
    code, out, err = run_main(changed, *WHOLE, "--out", run)
    assert code == 0 and "\nx_9: 40\n" in out, err
    assert [*analyze.crossings(train.read_log(run), train.read_flags(run))] == ["x_1"]
    assert "x_9" not in out.splitlines()[0]


# ---- flags

FEW = "--layers 2 --heads 2 --width 16 --D 3 --N 2 --batch 8 --steps 4 --eval-every 2 --warmup 1"
FEW = f"{FEW} --stop-below 0 --device cpu --dtype float32".split()
OTHER = dict(task="conditional", N="3", D="2", K="2", ic="", targets="1", examples="16")
OTHER |= dict(rotary="qk", layers="3", heads="4", width="24", head_size="4")
OTHER |= dict(mlp="", causal="", optimizer="adamw", steps="3", target="2", batch="4", lr="0.01")
OTHER |= dict(warmup="3", decay="0", beta2="0.5", weight_decay="50", ema="0.9", clip="1e-4")
OTHER |= dict(qk_std="0.5", init="{init}", seed="1", dtype="bfloat16", eval_every="1")
OTHER |= dict(save_every="1")
EXCLUDED = {"task", "targets", "target", "init"}


def typed(name, init=""):
    """Return the words of the command line that change a flag from its default."""
    no = "no-" if train.DEFAULTS[name] is True else ""
    return f"--{no}{name.replace('_', '-')} {OTHER[name].format(init=init)}".split()


@pytest.fixture
def quick(monkeypatch):
    """Evaluate on few sequences."""
    real = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *arguments: real(*arguments[:2], n=64))


def trained(run, *words):
    """Train, and return the log and all weights of the run."""
    code, _, err = run_main(train, *FEW, *words, "--out", run, "--resume")
    assert code == 0, err
    files = [run / "model.pt", *train.checkpoints_of(run)]
    return logged(run), {file.name: as_lists(load_tensors(file)) for file in files}


def test_every_flag_does_something(tmp_path, quick):
    """All flags but those of the machine, which may differ when a run is resumed."""
    assert OTHER.keys() == {*train.SETTINGS}
    short = ["--steps", 2]
    base = trained(tmp_path / "base", *short)
    for name in OTHER:
        words = typed(name, tmp_path / "base")
        assert trained(tmp_path / name, *short, *words) != base, name


def test_a_run_with_every_flag_resumes_bitwise(tmp_path, quick):
    """All flags but two that exclude others, and the target, which would end the run."""
    words = [word for name in OTHER.keys() - EXCLUDED for word in typed(name)]
    trained(tmp_path / "first", *words)
    words += ["--init", tmp_path / "first"]
    whole = trained(tmp_path / "whole", *words)
    train_until(2, *FEW, *words, "--out", tmp_path / "stopped")
    assert trained(tmp_path / "stopped", *words) == whole


# ---- what a model is made of


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_shared_weights_are_trained_once_and_gains_never_decay(optimizer):
    """Two layers share a module, two modules a weight, and each head has a gain (heads, size). With
    a zero gradient only weights of linear layers change: they lose the share lr * decay."""
    flags = train.parse_flags([*TINY, "--optimizer", optimizer, "--weight-decay", "2"])
    flags = flags.replace(layers=3, lr=0.1)
    model = train.build(flags)
    first, second, third = model.blocks
    second.up, third.qkv.weight = first.up, first.qkv.weight
    first.gain = torch.nn.Parameter(torch.ones(flags.heads, flags.size))
    for parameter in model.parameters():
        parameter.data.fill_(1)
        parameter.grad = torch.zeros_like(parameter)
    for part in train.make_optimizers(model, flags):
        part.step()
    for name, parameter in model.named_parameters():
        decays = name.endswith("weight") and ".ln" not in f".{name}"
        expected = torch.full_like(parameter, 0.8 if decays else 1)
        torch.testing.assert_close(parameter.data, expected)
