"""One run: its losses, its flags and its files; stopped, killed, resumed, and extended."""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import time
from pathlib import Path

import analyze
import data
import train
from data import UserError
from extras.studies import places  # noqa: F401 (it adds --task shuffled)
from tests.common import WHOLE, contents, output_of, runs_equal, start, train_until, wait_for

import pytest
import torch


def test_partial_losses_and_crossings():
    predictions, targets = torch.randn(2, 5, 4, 12)
    expected = ((predictions - targets) ** 2).view(5, 4, 3, 4).mean((1, 3))
    torch.testing.assert_close(data.partial_losses(predictions, targets, 4), expected)
    assert analyze.first_below([0, 10, 20], [0.1, 0.6, 0.1], 0.5) == 0  # known from the start
    rows = [dict(step=0, x_1=1.0, x_2=1.0, x_9=1.0), dict(step=10, x_1=0.0, x_2=0.6, x_9=0.0)]
    crossings = analyze.crossings(rows, train.parse_flags(["--D", "2"]))
    assert crossings == dict(x_1=5, x_2=None)  # below 0.5; a column of yours is no symbol


def test_learning_rate_rises_stays_and_falls():
    flags = train.parse_flags("--steps 100 --warmup 10 --decay 0.5".split())
    rates = [train.schedule(step, flags) for step in range(101)]
    assert rates[0] == 0.1 and rates[9:50] == [1] * 41
    assert abs(rates[75] - 0.5) < 1e-9 and rates[100] == 0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_bfloat16_is_for_processors_that_are_faster_with_it(monkeypatch, whole):
    """Also of a run that was trained in bfloat16, once it is loaded."""
    trained = train.read_flags(whole).replace(dtype="bfloat16")
    monkeypatch.setattr(train, "read_flags", lambda run: trained)
    for name, capability, dtype in (
        ("Intel Xeon", "amx_bf16", "bfloat16"),
        ("Intel Xeon", "avx512_bf16", "float32"),
        ("AMD EPYC", "avx512_bf16", "bfloat16"),
    ):
        monkeypatch.setattr(train, "CPU", {capability: True, "cpu_name": name})
        assert train.native_dtype("cpu") == dtype == train.parse_flags(["--device", "cpu"]).dtype
        assert train.load(whole)[1].dtype == dtype


def test_checkpoints_are_the_weights_of_their_step(whole):
    losses = {row["step"]: row["val"] for row in train.read_log(whole)}
    files = [path.relative_to(whole) for path in train.checkpoints_of(whole)]
    assert [file.stem for file in files] == ["000000", "000020", "000040"]
    for file, step in zip([*files, "model.pt"], (0, 20, 40, 40), strict=True):
        model, flags = train.load(whole, file)
        assert train.evaluate(model, flags) == pytest.approx([losses[step]]), file
        assert not model.training


def test_a_run_of_some_symbols_and_what_it_leaves(tmp_path):
    """The first row is of the untrained model; the last is confirmed."""
    run, words = tmp_path / "run", "--D 3 --targets 1 3 --stop-below 0.999 --save-every 0".split()
    out = output_of(train, *WHOLE, *words, "--out", run)
    (first, *_, last), (model, flags) = train.read_log(run), train.load(run)
    assert first["train"] is None and abs(first["val"] - 1) < 0.1
    assert "x_2" not in first and first["val"] == (first["x_1"] + first["x_3"]) / 2
    below = max(last["val"], last["confirmed"]) < 0.999
    assert f"solved: {below}" in out and (below or last["step"] == 40)
    assert {*map(str, contents(run))} == {"config.json", "log.jsonl", "model.pt", "state.pt"}
    batch, whole = (train.sequences(f, torch.arange(3)) for f in (flags, flags.replace(targets=[])))
    assert model(batch.inputs).shape == batch.targets.shape
    assert torch.equal(batch.targets, whole.targets.unflatten(-1, (3, 4))[:, :, ::2].flatten(2))


def test_the_training_loss_is_the_mean_since_the_last_row(tmp_path, whole):
    output_of(train, *WHOLE, "--eval-every", 1, "--out", tmp_path / "run")
    losses = [row["train"] for row in train.read_log(tmp_path / "run")]  # of each step
    for row in train.read_log(whole)[1:]:
        expected = sum(losses[row["step"] - 9 : row["step"] + 1]) / 10
        assert row["train"] == pytest.approx(expected, rel=1e-5)


def test_one_run_has_one_name():
    for flags, name, *symbols in (
        ("", "L12_H1_D3_s0", 1, 2, 3),
        ("--no-mlp --resume --head-size 4", "L12_H1_D3_head_size4_no-mlp_s0", 1, 2, 3),
        ("--task conditional --rotary qk", "L12_H1_conditional_rotaryqk_s0", 1, 2, 3),
        ("--no-ic", "L12_H1_D3_no-ic_s0", 3),
        ("--targets 1 3 --init out/L2", "L12_H1_D3_targets1-3_initout-L2_s0", 1, 3),
        ("--task shuffled --D 2", "L12_H1_shuffled_D2_s0", 1, 2),
    ):
        parsed = train.parse_flags(flags.split())
        assert parsed.out == Path("out", name) and parsed.target_symbols == symbols


@pytest.mark.slow
def test_stopped_and_resumed_ends_bitwise_as_uninterrupted(tmp_path):
    long, whole = [*WHOLE, "--examples", 100, "--steps", 400], tmp_path / "whole"
    start("train", *long, "--out", whole).communicate(timeout=100)  # as many threads, same dtype
    for blow, code in (signal.SIGTERM, 143), (signal.SIGINT, 130):
        run = tmp_path / blow.name
        process = start("train", *long, "--out", run)
        wait_for(lambda log=run / "log.jsonl": log.exists() and len(train.read_file(log)) > 10)
        process.send_signal(blow)
        out, err = process.communicate(timeout=100)
        assert process.returncode == code and not (run / "model.pt").exists(), err
        assert out.endswith(f"-m train {shlex.join(map(str, long))} --out {run} --resume\n")
        out = output_of(train, *long, "--out", run, "--resume")
        assert "resumed" in out and runs_equal(run, whole)


@pytest.mark.slow
def test_a_run_does_not_go_on_without_its_intervention(tmp_path):
    words, stopped = [*map(str, WHOLE), "--out", str(tmp_path / "run")], []

    def silent(step, positions):
        stopped.append(step)  # after the first step
        return {(0, 0): lambda pattern, values: 0 * values}

    assert not train.run_once(train.parse_flags(words), stopped, silent)
    with pytest.raises(UserError, match="intervene 'silent', not ''"):
        train.run_once(train.parse_flags([*words, "--resume"]))


def test_a_second_ctrl_c_ends_a_slow_step_at_once(tmp_path):
    slow = [*WHOLE, "--width", 512, "--batch", 30000, "--examples", 0]
    process = start("train", *slow, "--out", tmp_path / "run")
    wait_for((tmp_path / "run/log.jsonl").exists)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.slow
def test_a_kill_before_each_write(tmp_path, whole, monkeypatch):
    for number in itertools.count():
        run, renames = tmp_path / str(number), itertools.count()

        def replace(path, target, number=number, renames=renames):
            if next(renames) == number:
                raise Killed
            os.replace(path, target)

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Path, "replace", replace)
            output_of(train, *WHOLE, "--out", run)
            break  # there was no such write
        output_of(train, *WHOLE, "--out", run, "--resume")
        assert runs_equal(run, whole), f"killed before write {number}, it ends otherwise"
    assert number == 15  # config.json, 3 checkpoints, 5 evaluations with state.pt, model.pt


def test_threads_dtype_and_younger_flags_are_restored(tmp_path, whole, monkeypatch):
    """As sums over threads differ in the last bits; a younger flag has its default."""
    run, before = tmp_path / "run", torch.get_num_threads()
    train_until(20, *WHOLE, "--out", run)
    settings = json.loads((run / "config.json").read_text())
    for younger in ("targets", "init", "task"):
        del settings[younger]
    (run / "config.json").write_text(json.dumps(settings))
    torch.set_num_threads(before + 1)
    other = "float32" if train.native_dtype("cpu") == "bfloat16" else "bfloat16"
    monkeypatch.setattr(train, "native_dtype", lambda device: other)  # of another processor
    try:
        train.State(train.read_flags(run)).load_state_dict(train.read_file(run / "state.pt"))
        assert torch.get_num_threads() == before + 1  # to look at a run changes nothing
        output_of(train, *WHOLE, "--out", run, "--resume")
        assert torch.get_num_threads() == before and runs_equal(run, whole)
    finally:
        torch.set_num_threads(before)


def test_a_finished_run_is_never_overwritten(tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    out = output_of(train, *WHOLE, "--out", run, "--resume")
    assert out == train.summary(run) + "\n" and contents(run) == contents(whole)


# ---- every flag

FEW = "--layers 2 --heads 2 --width 16 --D 3 --N 2 --batch 8 --steps 4 --eval-every 2 --warmup 1"
FEW = f"{FEW} --stop-below 0 --device cpu --dtype float32".split()
OTHER = """task=conditional N=3 D=2 K=2 ic= targets=1 examples=16 rotary=qk layers=3 heads=4
    width=24 head_size=4 mlp= causal= optimizer=adamw steps=3 stop_below=2 batch=4 lr=0.01 warmup=3
    decay=0 beta2=0.5 weight_decay=50 ema=0.9 clip=1e-4 qk_std=0.5 init={init} seed=1
    dtype=bfloat16 eval_every=1 save_every=1"""
OTHER = dict(flag.split("=") for flag in OTHER.split())
EXCLUDED = {"task", "targets", "stop_below", "init"}


def typed(name, init=""):
    """Return the words of the command line that change a flag from its default."""
    no = "no-" if train.DEFAULTS[name] is True else ""
    return f"--{no}{name.replace('_', '-')} {OTHER[name].format(init=init)}".split()


@pytest.fixture
def quick(monkeypatch):
    """Evaluate on few sequences."""
    real = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda model, flags, *_, **how: real(model, flags, n=64))


def trained(run, *words):
    output_of(train, *FEW, *words, "--out", run, "--resume")
    return run


def test_every_flag_does_something(tmp_path, quick):
    """All flags but those of the machine, which may differ when a run is resumed."""
    base = trained(tmp_path / "base", "--steps", 2)
    for name in OTHER:
        other = trained(tmp_path / name, "--steps", 2, *typed(name, base))
        assert not runs_equal(base, other), name


def test_a_run_with_every_flag_and_noise_of_yours_resumes_bitwise(tmp_path, quick, monkeypatch):
    """All but two that exclude others, and --stop-below; the run that --init names is gone."""
    predict = train.predict

    def noisy(model, flags, index, *more):
        predictions, targets = predict(model, flags, index, *more)
        training = torch.is_grad_enabled()
        return predictions + training * torch.randn_like(predictions), targets

    monkeypatch.setattr(train, "predict", noisy)
    words = [word for name in OTHER.keys() - EXCLUDED for word in typed(name)]
    words += ["--init", trained(tmp_path / "first", *words)]
    whole = trained(tmp_path / "whole", *words)
    train_until(2, *FEW, *words, "--out", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "first")
    assert runs_equal(trained(tmp_path / "stopped", *words), whole)
