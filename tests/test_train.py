"""One run: its log and its flags; stopped and resumed, to the same bits."""

import itertools
import math
from unittest import mock

import train
from tests.common import TINY, outcome_of, output_of, run_main

import pytest


def test_learning_rate_rises_stays_and_falls():
    flags = train.parse_flags("--steps 100 --warmup 10 --decay 0.5".split())
    rates = [train.schedule(step, flags) for step in range(101)]
    assert rates[0] == 0.1 and rates[9:50] == [1] * 41
    assert abs(rates[75] - 0.5) < 1e-9 and rates[100] == 0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_the_log_has_means_since_the_last_row(tmp_path):
    """Of the training loss and the gradient's norm; those of the first step by hand."""
    words = [*TINY, "--D", 3, "--targets", "1,3", "--steps", 20, "--out"]
    output_of(train, *words, tmp_path / "tens")
    output_of(train, *words, tmp_path / "ones", "--eval-every", 1)
    tens, ones = (train.read_log(tmp_path / name) for name in ("tens", "ones"))
    model, task, _ = train.load(tmp_path / "ones", "ckpt/000000.pt")
    batch = task.draw("training", 8)
    loss = (model(batch.inputs) - batch.answers).square().mean()
    loss.backward()
    norm = math.hypot(*(parameter.grad.norm() for parameter in model.parameters()))
    assert (ones[1]["train"], ones[1]["grad_norm"]) == pytest.approx((loss.item(), norm), rel=0.02)
    assert ones[0]["train"] is None and ones[1]["val"] == (ones[1]["x_1"] + ones[1]["x_3"]) / 2
    for row, name in itertools.product(tens[1:], ("train", "grad_norm")):
        values = [each[name] for each in ones[row["step"] - 9 : row["step"] + 1]]
        assert row[name] == pytest.approx(sum(values) / 10, rel=1e-5)


@pytest.mark.parametrize("how", ["", "--optimizer adamw --dtype bfloat16"])
def test_a_run_that_is_stopped_before_any_write_resumes_to_the_same_bits(how, tmp_path):
    """By Ctrl-C before config.json, 2 in ckpt/, 3 times state.pt and log.jsonl, model.pt."""
    words = [*TINY, *how.split(), "--steps", 20, "--examples", 48, "--out"]
    output_of(train, *words, tmp_path / "whole")
    for number in range(10):
        run, writes = tmp_path / str(number), [mock.DEFAULT] * number + [KeyboardInterrupt]
        with mock.patch.object(train, "write_file", wraps=train.write_file, side_effect=writes):
            code, _, err = run_main(train, *words, run)
        assert code == 1 and "--resume goes on from step" in err
        output_of(train, *words, run, "--resume")
        assert outcome_of(run) == outcome_of(tmp_path / "whole"), f"stopped at write {number}"


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
