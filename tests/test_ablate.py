"""The report on a circuit: against planted circuits and a model that is none of ours; the command
line."""

import json
from unittest import mock

import pytest
import torch

import ablate
import train
from ablate import paths_in, read_report
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
    report = ablate.find_circuit(model, settings(D, layers, heads))
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
        assert row["attention"] == pytest.approx(1)


def test_a_model_of_another_kind_is_validated(capsys):
    task, flags = chain(4, 1), settings(1, 2, heads=2)
    report = ablate.find_circuit(Wrapped(task), flags)
    assert report["validated"]
    assert sorted(paths_in(report, task)) == paths_from(task, "0 1b 1a", "1 q 1b")


# ---- the command line


def write_run(folder, *flags):
    """A run directory with the untrained weights of these flags."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, *map(str, flags)])
    folder.mkdir()
    values = {name: getattr(flags, name) for name in train.SETTINGS}
    (folder / "config.json").write_text(json.dumps(values))
    train.write_tensors(folder / "model.pt", train.build(flags).state_dict())
    return folder


def test_what_is_found_is_printed_and_written(tmp_path):
    run = write_run(tmp_path / "run", "--N", 4)
    flags = train.read_flags(run)
    with mock.patch.object(ablate, "load", return_value=(Wrapped(flags.problem), flags)):
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
        ("--threshold", "nan", "--threshold must be between 0 and 1"),
        ("--sequences", 63, "--sequences from 100"),
    ):
        assert_refused(ablate, run, flag, value, says=says)
    assert_refused(ablate, write_run(tmp_path / "last", "--D", 2, "--no-ic"), says="predicts some")
