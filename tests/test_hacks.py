"""What a researcher changes in a copy of the code: right, or loud."""

import sys
import types

from parts import config
from parts import config as table

import pytest
import torch

import train
from pages import index
from tests.common import HERE, TINY, WHOLE, logged, run_main, train_until


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
        states.append(config.read_tensors(run / "state.pt") | dict(seconds=0, rows=[]))
    assert len(states[0]["norms"]) == 40 and states[0]["slow"]["n_averaged"] == 40
    assert numbers(states[0]) == numbers(states[1])


def numbers(kept):
    """With lists in place of tensors."""
    if isinstance(kept, dict):
        return {name: numbers(own) for name, own in kept.items()}
    if isinstance(kept, list):
        return [numbers(own) for own in kept]
    return kept.tolist() if isinstance(kept, torch.Tensor) else kept


# ---- what is logged

IN_A_ROW = "        val=sum(losses) / len(losses),\n"


def test_a_column_of_ones_own_is_no_symbol(tmp_path, monkeypatch):
    more = "        x_1_norm=0.1, x_9=float(step),\n"
    changed, run = hacked(monkeypatch, (IN_A_ROW, IN_A_ROW + more)), tmp_path / "run"
    code, out, err = run_main(changed, *WHOLE, "--out", run)
    assert code == 0 and "\nx_9: 40\n" in out and "x_9_below" not in out, err
    assert [*config.crossings(config.read_log(run), config.read_flags(run))] == ["x_1"]
    assert "x_9" not in out.splitlines()[0]
    train.draw_curves(run)
    index.index(tmp_path, tmp_path / "index.html")


# ---- flags

FEW = "--layers 2 --heads 2 --width 16 --D 3 --N 2 --batch 8 --steps 4 --eval-every 2 --warmup 1"
FEW = f"{FEW} --target 0 --device cpu --dtype float32".split()
OTHER = dict(task="conditional", N="3", D="2", K="2", ic="", targets="1", examples="16")
OTHER |= dict(circuit="previous", rotary="qk", layers="3", heads="4", width="24", head_size="4")
OTHER |= dict(mlp="", causal="", optimizer="adamw", steps="3", target="2", batch="4", lr="0.01")
OTHER |= dict(warmup="3", decay="0", beta2="0.5", weight_decay="50", ema="0.9", clip="1e-4")
OTHER |= dict(qk_std="0.5", init="{init}", seed="1", dtype="bfloat16", eval_every="1")
OTHER |= dict(save_every="1")


def typed(name, init=""):
    """What sets a flag to another value than its default, as words."""
    no = "no-" if table.ROWS[name].default is True else ""
    value = OTHER[name].format(init=init)
    return [f"--{no}{name.replace('_', '-')}", *([value] if value else [])]


@pytest.fixture
def quick(monkeypatch, without_curves):
    """Evaluations on few sequences."""
    real = train.evaluate

    def few(model, flags, split="validation", n=0):
        return real(model, flags, split, 64)

    monkeypatch.setattr(train, "evaluate", few)


def trained(run, *words):
    """All that a run leaves."""
    code, _, err = run_main(train, *FEW, *words, "--out", run, "--resume")
    assert code == 0, err
    weights = {file.name: numbers(config.read_tensors(file)) for file in run.rglob("*.pt")}
    return logged(run), {name: own for name, own in weights.items() if name != "state.pt"}


def test_every_flag_does_something(tmp_path, quick):
    """All but those of the machine, which may differ when a run is resumed."""
    assert OTHER.keys() == {*table.SETTINGS}
    short = ["--steps", 2]
    base = trained(tmp_path / "base", *short)
    for name in OTHER:
        words = typed(name, tmp_path / "base")
        assert trained(tmp_path / name, *short, *words) != base, name


@pytest.mark.parametrize("without", [["targets", "init"], ["ic", "optimizer"]])
def test_a_run_with_every_flag_resumes_bitwise(without, tmp_path, quick):
    """In two sets: some flags exclude each other."""
    words, own = [], [name for name in OTHER if name not in [*without, "task", "init", "target"]]
    for name in own:
        words += typed(name)
    if "init" not in without:
        trained(tmp_path / "first", *words)
        words += ["--init", tmp_path / "first"]
    whole = trained(tmp_path / "whole", *words)
    train_until(2, *FEW, *words, "--out", tmp_path / "stopped")
    assert trained(tmp_path / "stopped", *words) == whole


# ---- what a model is made of


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_shared_weights_are_trained_once_and_gains_never_decay(optimizer):
    """One module in two layers; one weight in two modules; a gain per head, (heads, size). Without
    a gradient a weight of a linear layer loses the share rate * decay of itself, the rest nothing.
    """
    flags = train.parse_flags([*TINY, "--optimizer", optimizer, "--weight-decay", "2"])
    flags = flags.replace(layers=3, lr=0.1)
    model = config.build(flags)
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
