"""The report on a circuit: against planted circuits and a model that is none of ours; the command
line."""

import json
import math
from types import SimpleNamespace
from unittest import mock

from parts import config
from parts.circuit import paths_in, read_report

import pytest
import torch

import ablate
import train
from data import chain, make_batch, partial_losses
from tests.common import TINY, assert_refused, run_main
from tests.planted import CIRCUITS, Wrapped, paths_from, plant, settings


# ---- planted circuits


@pytest.mark.parametrize("D, heads, texts", CIRCUITS[:-1])
def test_planted_circuits_are_validated(D, heads, texts, capsys):
    """Without a path the full model and the circuit lose the symbols that the model planted without
    it cannot predict."""
    layers = 1 + max(int(text[0]) for text in texts)
    model, task, paths = plant(D, texts, layers, heads)
    report = ablate.find_circuit(model, settings(D, layers, heads), sequences=1024)
    assert report["verdict"] == "validated"
    rows = paths_in(report, task)
    assert sorted(rows) == sorted(paths)

    batch = make_batch(0, torch.arange(64), D=D)
    for path, row in rows.items():
        others = [text for text in texts if paths_from(task, text) != [path]]
        predictions = plant(D, others, layers, heads)[0](batch.inputs)
        lost = partial_losses(predictions, batch.targets, 4).mean(0) > 0.5
        for key in ("necessary", "minimal"):
            assert [row[key][f"x_{k}"][1] > 0.3 for k in range(1, D + 1)] == lost.tolist()
        assert row["attention"] == pytest.approx(1) and row["stand_in"] is None


def test_what_the_report_says_of_a_planted_circuit(capsys):
    D, heads, texts = CIRCUITS[5]
    report = ablate.find_circuit(plant(D, texts, layers=5)[0], settings(D, 5), sequences=1024)
    for losses in report["full_model"], report["faithful"]:
        assert all(high < 0.01 for _, _, high in losses.values())

    # without two paths both lose the same; all other sets are unfaithful; all samples agree
    pairs = math.comb(len(texts), 2)
    assert report["complete"]["pairs"] == pairs and report["complete"]["mean"] < 0.3
    assert report["null"]["faithful"] == 0 and report["stability"] == dict(
        samples=5, same=5, always=3 + 3
    )

    # hard attention is that of the model, so the paper's test needs only what is necessary: 2b ->
    # 3b and q -> 2b; x_1 reaches q by way of 2a and 2b too
    paper = report["paper"]
    assert paper["held"] < 0.01 and len(paper["removed"]) == 3
    assert [loss >= ablate.REMOVAL for loss in paper["removed"]] == [False, True, True]
    assert not paper["passed"]


def test_a_model_of_another_kind_is_validated(capsys):
    task, flags = chain(4, 1), settings(1, 2, heads=2)
    report = ablate.find_circuit(Wrapped(task), flags, sequences=1024)
    assert report["validated"]
    assert sorted(paths_in(report, task)) == paths_from(task, "0 1b 1a", "1 q 1b")


def test_intervals_of_light_tails():
    losses = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)).square()
    rows = ablate.Sample.intervals(SimpleNamespace(flags=settings(2, 1)), losses)
    for (mean, low, high), column in zip(rows.values(), losses.unbind(1), strict=True):
        error = column.std().item() / 10
        assert mean == pytest.approx(column.mean().item())
        assert low == pytest.approx(mean - 1.96 * error, abs=0.5 * error)
        assert high == pytest.approx(mean + 1.96 * error, abs=0.8 * error)


# ---- the command line


def write_run(folder, *flags):
    """A run directory with the untrained weights of these flags."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, *map(str, flags)])
    folder.mkdir()
    values = {name: getattr(flags, name) for name in config.SETTINGS}
    (folder / "config.json").write_text(json.dumps(values))
    config.write_tensors(folder / "model.pt", config.build(flags).state_dict())
    return folder


def test_what_is_found_is_printed_and_written(tmp_path):
    run = write_run(tmp_path / "run", "--N", 4)
    flags = config.read_flags(run)
    with mock.patch.object(config, "load", return_value=(Wrapped(flags.problem), flags)):
        code, out, err = run_main(ablate, run, "--sequences", 1024)
    assert code == 0 and "verdict: validated" in out and "L1H0: q -> 1b" in out, err
    report = read_report(run)
    assert report["validated"] and len(report["paths"]) == 2 and report["sequences"] == 1024


def test_a_model_that_has_learned_nothing_has_no_circuit(tmp_path):
    run = write_run(tmp_path / "run")
    code, out, err = run_main(ablate, run)
    report = read_report(run)
    assert code == 0 and not report["validated"] and not report["paths"], err
    assert "not searched: the full model has a loss of" in report["verdict"]


def test_bad_input_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    assert_refused(ablate, write_run(tmp_path / "one", "--N", 1), says="--N 1")
    assert_refused(ablate, tmp_path, says="no run directory")
    for flag, value, says in (
        ("--threshold", "nan", "--threshold must be above 0"),
        ("--threshold", 1, "below 1"),
        ("--sequences", 63, "--sequences must be from"),
        ("--sequences", 2**21, "to 1048576"),
    ):
        assert_refused(ablate, run, flag, value, says=says)
    frozen = write_run(tmp_path / "frozen", "--heads", 1, "--circuit", "minimal")
    assert_refused(ablate, frozen, says="trained with --circuit")
    assert_refused(ablate, write_run(tmp_path / "last", "--D", 2, "--no-ic"), says="predicts some")
    (run / "config.json").write_text("{")
    assert_refused(ablate, run, says="config.json is damaged")
