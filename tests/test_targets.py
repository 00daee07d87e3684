"""Which symbols a run predicts (--targets), and from whose weights it starts (--init)."""

from pathlib import Path

import torch

import data
import train
from tests.common import TINY, run_main, solve
from tests.other_tasks import distracted


THREE = [*TINY, "--eval-every", "5", "--D", "3", "--heads", "1", "--steps", "10"]


def test_targets_are_the_target_symbols():
    N, D, K, index = 3, 4, 2, torch.arange(10)
    for targets in ([1], [2, 4], [1, 3, 4]):
        batch = data.make_batch(1, index, N, D, K, targets)
        for inputs, answers in zip(batch.inputs, batch.targets, strict=True):
            solved = solve(inputs, N, D, K).view(N, D, K)
            assert torch.equal(answers, solved[:, [k - 1 for k in targets]].flatten(1))


def test_one_run_has_one_name():
    for flags, name, symbols in (
        ("", "L12_H1_D3_s0", [1, 2, 3]),
        ("--no-mlp --resume --eval-every 7", "L12_H1_D3_no-mlp_s0", [1, 2, 3]),
        ("--stop-below 0 --head-size 4", "L12_H1_D3_head_size4_target0.0_s0", [1, 2, 3]),
        ("--task conditional --rotary qk", "L12_H1_conditional_rotaryqk_s0", [1, 2, 3]),
        ("--no-ic", "L12_H1_D3_no-ic_s0", [3]),
        ("--targets 1 3", "L12_H1_D3_targets1-3_s0", [1, 3]),
        ("--init out/L2_s0/", "L12_H1_D3_initL2_s0_s0", [1, 2, 3]),
    ):
        parsed = train.parse_flags(flags.split())
        assert parsed.out == Path("out", name) and parsed.target_symbols == symbols


def test_a_run_logs_its_target_symbols_alone(tmp_path):
    run = tmp_path / "run"
    assert run_main(train, *THREE, "--targets", 1, 3, "--out", run)[0] == 0
    rows, (model, flags) = train.read_log(run), train.load(run)
    assert "x_2" not in rows[0] and rows[0]["val"] == (rows[0]["x_1"] + rows[0]["x_3"]) / 2
    batch = train.sequences(flags, torch.arange(3))
    assert flags.targets == [1, 3] and model(batch.inputs).shape == batch.targets.shape


def test_a_task_is_trained_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(data.TASKS, "distracted", distracted)
    flags = [*TINY, "--D", 3, "--task", "distracted", "--out", tmp_path / "run"]
    code, out, err = run_main(train, *flags)
    assert code == 0 and "x_2: " in out and "x_3" not in out, err
