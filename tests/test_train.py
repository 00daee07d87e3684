"""One run: losses, learning rate, optimizers, what is learned, and the files that it leaves."""

import math

import pytest
import torch

import analyze
import data
import train
from tests.common import TINY, WHOLE, contents, load_tensors, run_main, solve


# ---- numbers in, numbers out


def test_partial_losses_and_crossings():
    predictions, targets = torch.randn(2, 5, 4, 12)
    squares = (predictions - targets) ** 2
    expected = [squares[..., first : first + 4].mean((1, 2)) for first in (0, 4, 8)]
    losses = data.partial_losses(predictions, targets, 4)
    torch.testing.assert_close(losses, torch.stack(expected, -1))
    steps = [0, 10, 20, 30]
    assert analyze.first_below(steps, [1.0, 0.6, 0.4, 0.6], 0.5) == 15
    assert analyze.first_below([0, 10], [1.0, 0.6], 0.5) is None
    assert analyze.first_below(steps, [0.1, 0.2, 0.6, 0.1], 0.5) == 0  # known from the start
    rows = [dict(step=0, x_1=1.0, x_2=1.0, val=1.0), dict(step=10, x_1=0.0, x_2=0.6, val=0.3)]
    flags = train.parse_flags(["--D", "2"])
    assert analyze.crossings(rows, flags) == {"x_1": 5, "x_2": None}
    few, many = flags.replace(N=2), flags.replace(N=12)  # their plateaus are 1/2 and 11/12
    assert analyze.crossings(rows, few) == pytest.approx({"x_1": 20 / 3, "x_2": None})
    assert analyze.crossings(rows, many) == pytest.approx({"x_1": 35 / 9, "x_2": 35 / 3.6})


def test_learning_rate_rises_stays_and_falls():
    flags = train.parse_flags("--steps 100 --warmup 10 --decay 0.5".split())
    rates = [train.schedule(step, flags) for step in range(101)]
    assert rates[0] == 0.1 and rates[9:50] == [1] * 41
    assert abs(rates[75] - 0.5) < 1e-9 and rates[100] == 0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


# ---- whole runs


def test_training_learns_one_retrieval_step(tmp_path):
    flags = "--layers 2 --width 32 --D 1 --N 2 --rotary qk --no-mlp --lr 1e-2 --batch 64"
    flags += " --warmup 10 --steps 2000 --stop-below 0.2 --device cpu"
    code, out, err = run_main(train, *flags.split(), "--out", tmp_path / "run")
    assert code == 0 and "solved: True" in out, out + err

    # other sequences, with targets found by following the chains; no retrieval would give 0.5
    model, _ = train.load(tmp_path / "run")
    batch = data.make_batch(99, torch.arange(500), N=2, D=1, rotary="qk")
    solved = torch.stack([solve(tokens, 2, 1, 4) for tokens in batch.inputs])
    assert (model(batch.inputs) - solved).square().mean() < 0.22


def test_checkpoints_are_the_weights_of_their_step(whole):
    assert [file.stem for file in train.checkpoints_of(whole)] == ["000000", "000020", "000040"]
    first, flags = train.load(whole, "ckpt/000000.pt")
    torch.manual_seed(0)
    untrained = train.build(flags).parameters()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), untrained, strict=True))
    losses = train.evaluate(train.load(whole, "ckpt/000020.pt")[0], flags)
    assert abs(losses[0] - train.read_log(whole)[2]["val"]) < 1e-6
    last, final = (load_tensors(whole / name) for name in ("ckpt/000040.pt", "model.pt"))
    assert all(torch.equal(last[name], final[name]) for name in final)


def test_the_log_holds_the_losses_and_what_was_confirmed(tmp_path):
    """The first row is of the untrained model."""
    run = tmp_path / "run"
    code, out, _ = run_main(train, *TINY, "--stop-below", 0.999, "--out", run)
    rows = train.read_log(run)
    assert code == 0 and rows[0]["train"] is None and abs(rows[0]["val"] - 1) < 0.1
    assert all(math.isfinite(row["train"]) for row in rows[1:])
    ends = [row["step"] for row in rows if "confirmed" in row]
    assert ends and ends[-1] == rows[-1]["step"]
    below = max(rows[-1]["val"], rows[-1]["confirmed"]) < 0.999
    assert f"solved: {below}" in out and (below or rows[-1]["step"] == 40)
    files = {str(path) for path in contents(run)} - {".lock"}
    assert files == {"config.json", "log.jsonl", "model.pt", "state.pt"}


def test_the_training_loss_is_the_mean_since_the_last_row(tmp_path, whole):
    assert run_main(train, *WHOLE, "--eval-every", 1, "--out", tmp_path)[0] == 0
    losses = [row["train"] for row in train.read_log(tmp_path)]  # of each step
    for row in train.read_log(whole)[1:]:
        expected = sum(losses[row["step"] - 9 : row["step"] + 1]) / 10
        assert row["train"] == pytest.approx(expected, rel=1e-5)
