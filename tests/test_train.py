"""One run: losses, learning rate, optimizers, what is learned, and every choice of the flags."""

import math
from pathlib import Path
from unittest import mock

from parts import flags as table
from parts import runs

import pytest
import torch

import data
import train
from studies import compare
from tests.common import TINY, assert_refused, contents, logged, run_main, solve, weights_equal


# ---- numbers in, numbers out


def test_partial_losses_and_crossings():
    predictions, targets = torch.randn(2, 5, 4, 12)
    by_hand = []
    for k in range(3):
        numbers = [4 * k + i for i in range(4)]
        errors = [(predictions[..., i] - targets[..., i]).square().mean() for i in numbers]
        by_hand.append(sum(errors) / 4)
    losses = data.partial_losses(predictions, targets, 4)
    assert losses.shape == (5, 3)
    torch.testing.assert_close(losses.mean(0), torch.stack(by_hand))
    assert runs.first_below([0, 10, 20, 30], [1.0, 0.6, 0.4, 0.6]) == 15
    assert runs.first_below([0, 10], [1.0, 0.6]) is None
    assert runs.first_below([0, 10, 20, 30], [0.1, 0.2, 0.6, 0.1]) == 0  # known from the start
    rows = [dict(step=0, x_1=1.0, x_2=1.0, val=1.0), dict(step=10, x_1=0.0, x_2=0.6, val=0.3)]
    assert runs.crossings(rows) == {"x_1": 5, "x_2": None}


def test_learning_rate_rises_stays_and_falls():
    flags = train.parse_flags("--steps 100 --warmup 10 --decay 0.5 --lr 1".split())
    rates = [train.learning_rate(step, flags) for step in range(101)]
    assert rates[0] == 0.1 and rates[9:50] == [1] * 41
    assert abs(rates[75] - 0.5) < 1e-9 and rates[100] == 0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


# ---- optimizers


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon of its own")
def test_muon_is_pytorchs_muon():
    torch.manual_seed(0)
    ours = [torch.randn(shape, requires_grad=True) for shape in ((24, 8), (8, 24), (8, 8), (24, 8))]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    both = [
        train.Muon(ours, weight_decay=0.1, dtype=torch.bfloat16),
        torch.optim.Muon(theirs, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for group in both[0].param_groups + both[1].param_groups:
        group["lr"] = 0.1
    before = [matrix.detach().clone() for matrix in ours]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in both:
            optimizer.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        assert (a - b).norm() < 0.01 * (a - start).norm(), a.shape


def test_muon_makes_updates_orthogonal():
    torch.manual_seed(0)
    update = torch.randn(3, 8, 24)
    u, _, vh = torch.linalg.svd(update, full_matrices=False)
    assert (train.orthogonalize(update) - u @ vh).norm() < 0.25 * (u @ vh).norm()
    assert torch.equal(train.orthogonalize(update.mT), train.orthogonalize(update).mT)


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_optimizers_train_every_parameter_once(optimizer):
    """And in the order of the model: by it a state.pt names them."""
    flags = train.parse_flags([*TINY, "--optimizer", optimizer])
    model, trained = runs.build(flags), []
    order = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    for built in train.optimizers(model, flags):
        for group in built.param_groups:
            places = [order[id(parameter)] for parameter in group["params"]]
            assert places == sorted(places)
            trained += places
    assert sorted(trained) == [*order.values()]


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_without_a_gradient_weights_shrink_by_the_e_folds(optimizer):
    wanted = f"--optimizer {optimizer} --steps 60 --warmup 20 --weight-decay 2 --width 16"
    flags = train.parse_flags([*wanted.split(), "--layers", "1", "--D", "1"])
    model = runs.untrained(flags)
    trained_by = train.optimizers(model, flags)
    weight = next(matrix for matrix in model.blocks.parameters() if matrix.ndim > 1)
    before = weight.norm().item()
    for step in range(50):
        for group in (group for one in trained_by for group in one.param_groups):
            group["lr"] = train.learning_rate(step, flags)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for one in trained_by:
            one.step()
    shrunk = math.exp(-compare.decay_of(flags, 50))
    assert weight.norm().item() == pytest.approx(before * shrunk, rel=1e-3)


# ---- choices


def test_a_choice_without_code_cannot_exist(monkeypatch):
    """The dicts that hold the code give the choices: what is in them can be chosen and is used,
    what is not in them cannot be."""
    flags = "--rotary none --optimizer sgd".split()
    for i in (0, 2):
        assert_refused(train, *flags[i : i + 2], says="invalid choice")

    def sgd(model, flags):
        return [torch.optim.SGD(model.parameters(), lr=flags["lr"])]

    nowhere = data.Encoding(appended=data.no_numbers, angles=None)
    monkeypatch.setitem(train.OPTIMIZERS, "sgd", sgd)
    monkeypatch.setitem(data.ENCODINGS, "none", nowhere)
    chosen = train.parse_flags([*TINY, *flags])
    model = runs.build(chosen)
    assert [type(built) for built in train.optimizers(model, chosen)] == [torch.optim.SGD]
    assert model.embed.in_features == 4 and model.angles is None

    # every flag that takes one of a few words is refused another, the device in words of its own
    words = [name for name, default in table.DEFAULTS.items() if isinstance(default, str)]
    for name in words:
        assert_refused(train, f"--{name}", "nothing", says=f"--{name}")


@pytest.mark.parametrize("rotary", data.ENCODINGS)
@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_every_choice_trains_something_of_its_own(rotary, optimizer, tmp_path):
    chosen = ["--rotary", rotary, "--optimizer", optimizer]
    few = [*TINY, "--steps", 10]
    assert run_main(train, *few, "--out", tmp_path / "default")[0] == 0
    assert run_main(train, *few, *chosen, "--out", tmp_path / "chosen")[0] == 0
    alike = logged(tmp_path / "default") == logged(tmp_path / "chosen")
    assert alike == (chosen == ["--rotary", "input", "--optimizer", "muon"])

    # nor is it an encoding that says nothing of where a token stands
    nothing = data.Encoding(appended=data.no_numbers, angles=None)
    with mock.patch.dict(data.ENCODINGS, {rotary: nothing}):
        assert run_main(train, *few, *chosen, "--out", tmp_path / "nothing")[0] == 0
    assert logged(tmp_path / "nothing") != logged(tmp_path / "chosen")


def test_every_command_line_at_tiny_size(tmp_path):
    for i, flags in enumerate(
        (
            "--no-ic",
            "--rotary qk",
            "--no-mlp --head-size 4",
            "--no-causal",
            "--dtype bfloat16",
            "--examples 0",
            "--optimizer adamw",
            "--clip 0 --warmup 0 --decay 0",
            "--D 3 --heads 1 --K 2",
        )
    ):
        run = tmp_path / str(i)
        code, out, err = run_main(train, *TINY, *flags.split(), "--steps", 20, "--out", run)
        assert code == 0 and "val: " in out, err
        assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


# ---- whole runs


def test_training_learns_one_retrieval_step(tmp_path):
    flags = (
        "--layers 2 --heads 2 --width 32 --D 1 --N 2 --rotary qk --lr 3e-3 --batch 64 "
        "--steps 2000 --target 0.05 --device cpu"
    )
    code, out, err = run_main(train, *flags.split(), "--out", tmp_path / "run")
    assert code == 0 and "solved: True" in out, out + err
    files = {str(path) for path in contents(tmp_path / "run")} - {".lock"}
    assert files == {"config.json", "curves.png", "log.jsonl", "model.pt", "state.pt"}

    # measured again on other sequences, following the chains instead of trusting the targets
    model, _ = runs.load(tmp_path / "run")
    batch = data.make_batch(99, torch.arange(500), N=2, D=1, rotary="qk")
    solved = torch.stack([solve(tokens, 2, 1, 4) for tokens in batch.inputs])
    assert (model(batch.inputs) - solved).square().mean() < 0.06


def test_held_circuits_learn_what_the_depth_allows(tmp_path):
    """Two layers held at a circuit learn x_1, which one layer cannot."""
    flags = (
        "--heads 1 --width 32 --D 2 --N 2 --batch 64 --steps 150 --lr 0.003 --target 0 --circuit "
        "--device cpu"
    )
    for layers, learned in ((1, False), (2, True)):
        run = tmp_path / str(layers)
        code, _, err = run_main(train, *flags.split(), "--layers", layers, "--out", run)
        assert code == 0, err
        last = runs.read_log(run)[-1]
        assert (last["x_1"] < 0.25) == learned and last["x_2"] > 0.4, last
    assert_refused(train, "--circuit", "--heads", 8, says="--circuit takes --heads 1")


def test_same_seed_twice_is_bitwise_equal(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert run_main(train, *TINY, "--seed", seed, "--out", tmp_path / name)[0] == 0
    assert weights_equal(tmp_path / "a", tmp_path / "b")
    assert logged(tmp_path / "a") == logged(tmp_path / "b")
    assert not weights_equal(tmp_path / "a", tmp_path / "c")


def test_checkpoints_are_the_weights_of_their_step(tmp_path):
    run = tmp_path / "run"
    assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
    names = sorted(path.name for path in (run / "ckpt").iterdir())
    assert names == ["000000.pt", "000020.pt", "000040.pt"]

    first, config = runs.load(run, "ckpt/000000.pt")
    torch.manual_seed(0)
    untrained = runs.build(config).parameters()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), untrained, strict=True))
    losses = train.evaluate(runs.load(run, "ckpt/000020.pt")[0], config)
    assert abs(losses[0] - runs.read_log(run)[2]["val"]) < 1e-6
    last, end = runs.load(run, "ckpt/000040.pt")[0], runs.load(run)[0]
    assert all(torch.equal(a, b) for a, b in zip(last.parameters(), end.parameters(), strict=True))


def test_the_log_tells_loss_rate_and_what_was_confirmed(tmp_path):
    """The first row is of the untrained model; the training loss is the mean since the last row."""
    run = tmp_path / "run"
    code, out, _ = run_main(train, *TINY, "--target", 0.999, "--out", run)
    rows = runs.read_log(run)
    assert code == 0 and rows[0]["train"] is None and abs(rows[0]["val"] - 1) < 0.1
    assert all(math.isfinite(row["train"]) for row in rows[1:])
    ends = [row["step"] for row in rows if "confirmed" in row]
    assert ends and ends[-1] == rows[-1]["step"]
    below = max(rows[-1]["val"], rows[-1]["confirmed"]) < 0.999
    assert f"solved: {below}" in out and (below or rows[-1]["step"] == 40)


def test_help_says_how_to_run_it():
    for module in (data, train):
        name = Path(module.__file__).name
        code, out, err = run_main(module, "--help")
        assert code == 0 and f"python {name}" in out and not err
