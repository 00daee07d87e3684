"""One run: its log and its flags; killed and resumed, to the same bits."""

import math

import data
import train
from tests.common import TINY, assert_refused, outcome_of, output_of

import pytest
import torch


@pytest.fixture(autouse=True)
def fewer_sequences(monkeypatch):
    """Evaluations of 256 sequences, which saves most of the time."""
    evaluate = train.evaluate

    def fewer(model, task, split, n, device):
        return evaluate(model, task, split, 256, device)

    monkeypatch.setattr(train, "evaluate", fewer)


def test_losses_are_those_of_each_symbol():
    task = data.Task(N=4, D=3, K=4)
    batch = task.draw("validation", 5)
    predictions = torch.randn(5, 4, 12)
    expected = ((predictions - batch.answers) ** 2).view(5, 4, 3, 4).mean(3)
    torch.testing.assert_close(task.losses(predictions, batch), expected)


def test_learning_rate_rises_stays_and_falls():
    flags = train.parse_flags("--steps 100 --warmup 10 --decay 0.5".split())
    rates = [train.schedule(step, flags) for step in range(101)]
    assert rates[0] == 0.1 and rates[9:50] == [1] * 41
    assert abs(rates[75] - 0.5) < 1e-9 and rates[100] == 0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_the_log_has_means_since_the_last_row(tmp_path):
    """Of the training loss and the gradient's norm; in the first step they are by hand."""
    run = tmp_path / "run"
    words = [*TINY, "--D", 3, "--targets", "1,3", "--steps", 20]
    output_of(train, *words, "--eval-every", 1, "--out", run)
    model, task, _ = train.load(run, "ckpt/000000.pt")
    batch = task.draw("training", 8)
    loss = (model(batch.inputs) - batch.answers).square().mean()
    loss.backward()
    norm = math.hypot(*(parameter.grad.norm() for parameter in model.parameters()))
    untrained, first = train.read_log(run)[:2]
    assert untrained["train"] is None and "x_2" not in first
    assert first["val"] == (first["x_1"] + first["x_3"]) / 2
    assert (first["train"], first["grad_norm"]) == pytest.approx((loss.item(), norm), rel=0.02)

    output_of(train, *words, "--out", tmp_path / "tens")
    for row in train.read_log(tmp_path / "tens")[1:]:
        for name in "train", "grad_norm":
            values = [each[name] for each in train.read_log(run)[row["step"] - 9 : row["step"] + 1]]
            assert row[name] == pytest.approx(sum(values) / 10, rel=1e-5)


class Killed(BaseException):
    """Nothing catches it."""


def test_a_kill_before_each_write(tmp_path, monkeypatch):
    """Of config.json, 2 in ckpt/, 3 times state.pt and log.jsonl, model.pt."""
    words, write_file = [*TINY, "--steps", 20, "--examples", 48], train.write_file
    output_of(train, *words, "--out", tmp_path / "whole")
    for number in range(10):
        run, left = tmp_path / str(number), iter(range(number))

        def unless_killed(path, content, left=left):
            if next(left, None) is None:
                raise Killed
            write_file(path, content)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(train, "write_file", unless_killed)
            output_of(train, *words, "--out", run)
        output_of(train, *words, "--out", run, "--resume")
        assert outcome_of(run) == outcome_of(tmp_path / "whole"), f"killed before write {number}"


def test_a_flag_that_did_not_exist_when_a_run_began_has_its_default(tmp_path, whole):
    config = train.read_file(whole / "config.json")
    del config["targets"]
    train.write_file(tmp_path / "config.json", config)
    assert train.read_flags(tmp_path).targets == "all"


# ---- every flag


FEW = "--D 3 --steps 4 --eval-every 2 --warmup 1 --save-every 0"
FEW = [*TINY, *FEW.split()]
OTHER = """task=extras.lookup:Lookup N=3 D=2 K=2 targets=1 examples=8
    positions=rope layers=3 heads=4 width=24 head_size=4 mlp= causal= optimizer=adamw steps=3
    stop_below=0.4 batch=4 lr=0.01 warmup=3
    decay=1 beta2=0.5 weight_decay=50 ema=0.9 clip=1e-4 qk_std=0.5 init=INIT seed=1
    dtype=bfloat16 eval_every=1 save_every=1"""
OTHER = dict(flag.split("=") for flag in OTHER.split())


def typed(name):
    """Return the words of the command line that change a flag from its default."""
    no = "no-" if train.DEFAULTS[name] is True else ""
    return f"--{no}{name.replace('_', '-')} {OTHER[name]}".split()


def test_weights_of_another_shape_are_refused(tmp_path, whole):
    words = [*TINY, "--init", whole, "--width", 32, "--out", tmp_path / "run"]
    assert_refused(train, *words, says="is a model of another shape")


def trained(run, *words):
    output_of(train, *FEW, *words, "--out", run)
    return outcome_of(run)


def test_every_flag_does_something_and_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(OTHER, "init", tmp_path / "base")
    assert OTHER.keys() == train.DEFAULTS.keys()
    base, name_of_base = trained(tmp_path / "base", "--steps", 2), train.parse_flags(FEW).out
    for name in OTHER.keys() - {"stop_below"}:
        assert trained(tmp_path / name, "--steps", 2, *typed(name)) != base, name
    for name in OTHER:
        named = train.parse_flags([*FEW, *typed(name)]).out
        assert (named == name_of_base) == (name == "save_every"), name


def test_a_run_stops_below_a_confirmed_loss(tmp_path, monkeypatch):
    """Of other sequences; what is not confirmed goes on."""
    losses = dict(validation=iter([0.6, 0.4, 0.4]), confirmation=iter([0.6, 0.4]))

    def evaluate(model, task, split, *_):
        loss = next(losses[split])
        return dict(val=loss, x_1=loss)

    monkeypatch.setattr(train, "evaluate", evaluate)
    out = output_of(train, *TINY, "--stop-below", 0.45, "--out", tmp_path)
    rows = [(row["step"], row.get("confirmed")) for row in train.read_log(tmp_path)]
    assert rows == [(0, None), (10, 0.6), (20, 0.4)] and "solved: True" in out
