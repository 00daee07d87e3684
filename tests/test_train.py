"""One run: its log and its flags; stopped, killed and resumed, to the same bits."""

import math
import signal

import data
import train
from tests.common import TINY, assert_refused, outcome_of, output_of, start, train_until, wait_for

import pytest
import torch


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
    output_of(train, *TINY, "--D", 3, "--targets", "1,3", "--eval-every", 1, "--out", run)
    model, task, flags = train.load(run, "ckpt/000000.pt")
    batch = task.draw("training", 8)
    loss = (model(batch.inputs) - batch.answers).square().mean()
    loss.backward()
    norm = math.hypot(*(parameter.grad.norm() for parameter in model.parameters()))
    untrained, first = train.read_log(run)[:2]
    assert untrained["train"] is None and "x_2" not in first
    assert first["val"] == (first["x_1"] + first["x_3"]) / 2
    assert (first["train"], first["grad_norm"]) == pytest.approx((loss.item(), norm), rel=0.02)

    output_of(train, *TINY, "--D", 3, "--targets", "1,3", "--out", tmp_path / "tens")
    for row in train.read_log(tmp_path / "tens")[1:]:
        for name in "train", "grad_norm":
            values = [each[name] for each in train.read_log(run)[row["step"] - 9 : row["step"] + 1]]
            assert row[name] == pytest.approx(sum(values) / 10, rel=1e-5)


# ---- stopped, killed and resumed


def test_killed_and_stopped_it_ends_bitwise_as_uninterrupted(tmp_path):
    """kill -9, then Ctrl-C, each of a process that has gone on from the one before."""
    long = [*TINY, "--examples", 100, "--steps", 400]
    whole, run, rows = tmp_path / "whole", tmp_path / "run", 0
    output_of(train, *long, "--out", whole)
    for blow in signal.SIGKILL, signal.SIGINT:
        process, before = start("train", *long, "--out", run, "--resume"), rows
        wait_for(lambda: len(train.read_file(run / "log.jsonl", [{}])) > before + 5)  # noqa: B023
        process.send_signal(blow)
        _, err = process.communicate(timeout=100)
        rows = len(train.read_log(run))
        assert process.returncode and not (run / "model.pt").exists() and before < rows < 41
    last = train.read_log(run)[-1]["step"]
    assert err == f"train.py: stopped; --resume goes on from step {last}\n"
    out = output_of(train, *long, "--out", run, "--resume")
    assert "resumed" in out and outcome_of(run) == outcome_of(whole)


class Killed(BaseException):
    """Nothing catches it."""


def test_a_kill_before_each_write(tmp_path, whole, monkeypatch):
    write_file = train.write_file
    for number in range(15):  # config.json, 3 in ckpt/, 5 times state.pt and log.jsonl, model.pt
        run, left = tmp_path / str(number), iter(range(number))

        def unless_killed(path, content, left=left):
            if next(left, None) is None:
                raise Killed
            write_file(path, content)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(train, "write_file", unless_killed)
            output_of(train, *TINY, "--out", run)
        output_of(train, *TINY, "--out", run, "--resume")
        assert outcome_of(run) == outcome_of(whole), f"killed before write {number}"


def test_a_flag_that_did_not_exist_when_a_run_began_has_its_default(tmp_path, whole):
    run = tmp_path / "run"
    train_until(3, *TINY, "--out", run)
    config = train.read_file(run / "config.json")
    del config["targets"]
    train.write_file(run / "config.json", config)
    output_of(train, *TINY, "--out", run, "--resume")
    assert outcome_of(run) == outcome_of(whole)


# ---- every flag


FEW = "--D 3 --steps 4 --eval-every 2 --warmup 1 --save-every 0"
FEW = [*TINY, *FEW.split()]
OTHER = """task=extras.lookup:Lookup N=3 D=2 K=2 targets=1 examples=8
    positions=rope layers=3 heads=4 width=24 head_size=4 mlp= causal= optimizer=adamw steps=3
    stop_below=2 batch=4 lr=0.01 warmup=3
    decay=1 beta2=0.5 weight_decay=50 ema=0.9 clip=1e-4 qk_std=0.5 init=INIT seed=1
    dtype=bfloat16 eval_every=1 save_every=1"""
OTHER = dict(flag.split("=") for flag in OTHER.split())


def typed(name):
    """Return the words of the command line that change a flag from its default."""
    no = "no-" if train.DEFAULTS[name] is True else ""
    return f"--{no}{name.replace('_', '-')} {OTHER[name]}".split()


def test_a_run_may_start_from_the_weights_of_another(tmp_path, whole):
    words = [*TINY, "--init", whole]
    output_of(train, *words, "--steps", 0, "--out", tmp_path / "run")
    weights = train.read_file(whole / "model.pt")
    for name, weight in train.read_file(tmp_path / "run/model.pt").items():
        assert torch.equal(weight, weights[name])
    assert_refused(train, *words, "--width", 32, says="is a model of another shape")


def trained(run, *words):
    output_of(train, *FEW, *words, "--out", run, "--resume")
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


def test_a_run_stops_below_a_confirmed_loss(tmp_path):
    """At its first evaluation below it, on other sequences; what is not solved goes on."""
    words = "--layers 2 --D 1 --N 2 --width 32 --steps 600 --eval-every 50 --stop-below 0.45"
    out = output_of(train, *words.split(), "--device", "cpu", "--out", tmp_path)
    *before, last = train.read_log(tmp_path)
    assert "solved: True" in out and last["step"] < 600 and last["confirmed"] < 0.45
    assert all(max(row["val"], row.get("confirmed", 0)) > 0.45 for row in before)


@pytest.mark.parametrize("words", ["--stop-below 2", "--decay 5"])
def test_a_flag_that_makes_no_sense_is_refused(tmp_path, words):
    """An untrained model would pass as solved; the rate would fall from the start."""
    run = tmp_path / "run"
    assert_refused(train, *FEW, *words.split(), "--out", run, says=words.split()[0])
    assert not run.exists()


def test_a_run_with_every_flag_resumes_bitwise(tmp_path):
    """All but three that need or exclude others, and --stop-below."""
    words = []
    for name in OTHER.keys() - {"task", "targets", "init", "stop_below"}:
        words += typed(name)
    whole = trained(tmp_path / "whole", *words)
    train_until(3, *FEW, *words, "--out", tmp_path / "stopped")
    assert trained(tmp_path / "stopped", *words) == whole
