"""The certificate: against planted circuits and a model that is none of ours; the command line."""

import json
from unittest import mock

from parts import config
from parts.circuit import paths_in, paths_of, read_report

import pytest
import torch

import ablate
import train
from data import chain, held_out, make_batch, partial_losses
from tests.common import TINY, assert_refused, run_main
from tests.planted import CIRCUITS, Wrapped, paths_from, plant, settings


# ---- planted circuits


@pytest.mark.parametrize("D, heads, texts", CIRCUITS[:-1])
def test_planted_circuits_are_certified(D, heads, texts, capsys):
    """Each removal destroys just the symbols that the model without the path does not say."""
    layers = 1 + max(int(text[0]) for text in texts)
    model, task, paths = plant(D, texts, layers, heads)
    report = ablate.find_circuit(model, settings(D, layers, heads), sequences=64)
    assert report["verdict"] == "certified" and report["fill"] == "zero"
    assert report["literal"] or heads > 1  # of many idle heads, averages add up
    found = paths_in(report, task)
    assert sorted(found) == sorted(paths)

    batch = make_batch(0, torch.arange(64), D=D)
    for path, row in found.items():
        others = [text for text in texts if paths_from(task, text) != [path]]
        said = plant(D, others, layers, heads)[0](batch.inputs)
        lost = partial_losses(said, batch.targets, 4).mean(0) > 0.5
        assert row["destroys"] == [f"x_{k}" for k in range(1, D + 1) if lost[k - 1]]
        assert row["attention"] == pytest.approx(1) and row["others"]["mse"] == 0
        assert row["carried"]["low"] > 0.2 < row["alone"]["low"]
        assert row["alone"] == row["everywhere"]


def test_the_certificate_of_a_planted_circuit(capsys):
    D, heads, texts = CIRCUITS[5]
    report = ablate.find_circuit(plant(D, texts, layers=5)[0], settings(D, 5), sequences=64)
    expected = dict(
        certified=True,
        layers_with_paths=3,
    )
    assert {key: report[key] for key in expected} == expected
    assert report["intact"]["mse"] == report["sufficient"]["mse"] == 0
    assert report["complete"]["together"]["mse"] == report["complete"]["rest"]["mse"] == 0
    assert [row["mechanism"] for row in report["heads"]].count("paths") == 3

    # the paper's own test: once all else is held, 2b -> 3b and q -> 2b alone cannot be spared, as
    # x_1 reaches q by way of 2a and 2b
    paper = report["paper"]
    assert paper["held"]["mse"] == 0 and len(paper["removed"]) == 3
    assert paper["at_threshold"] == paper["at_papers_least"] == 2


def test_what_is_certified_is_measured_on_sequences_that_the_search_never_saw(capsys):
    D, _, texts = CIRCUITS[0]
    flags = settings(D, 5)
    with mock.patch.object(ablate, "certify", wraps=ablate.certify) as certify:
        ablate.find_circuit(plant(D, texts, layers=5)[0], flags, sequences=64)
    (free, _, circuit, *_), fresh = certify.call_args.args, held_out("certificate", 64)
    assert certify.call_count == 1 and len(paths_of(circuit)) == 2
    assert torch.equal(free.batch.inputs, config.sequences(flags, fresh).inputs)


def test_a_model_of_another_kind_is_certified(capsys):
    task, flags = chain(4, 1), settings(1, 2, heads=2)
    report = ablate.find_circuit(Wrapped(task), flags, sequences=256)
    assert report["certified"] and report["literal"] and report["fill"] == "zero"
    assert sorted(paths_in(report, task)) == paths_from(task, "1 1b 1a", "2 q 1b")
    assert all(row["destroys"] == ["x_1"] for row in report["paths"])


def test_where_no_circuit_suffices_the_nearest_is_told(monkeypatch, capsys):
    def dearer(*args):
        for (circuit, _), loss in zip(search(*args), (0.3, 0.06, 0.2), strict=True):
            yield circuit, loss

    search = ablate.search
    monkeypatch.setattr(ablate, "search", dearer)
    report = ablate.find_circuit(Wrapped(chain(4, 1)), settings(1, 2, heads=2), sequences=128)
    assert report["fill"] == ablate.FILLS[1]


def test_each_question_that_fails_is_in_the_verdict():
    def certificate(
        high=0.04, alone=0.01, together=0.02, destroys=(), left=(), more=0.1, needed=0.1
    ):
        path = dict(layer=1, head=1, source="q", target="1b", everywhere=dict(low=needed))
        path |= dict(more=dict(low=more), carried=dict(mse=0.3), others=dict(mse=0.4))
        complete = dict(alone=[dict(layer=5, head=2, mse=alone)], together=dict(mse=together))
        complete |= dict(rest=dict(destroys=destroys), left_out=left)
        return dict(sufficient=dict(mse=0.03, high=high), complete=complete, paths=[path])

    row = dict(layer=1, head=1, source="q", target="2b", mse=0.2, destroys=[])
    elsewhere, lost = row | dict(layer=2), row | dict(layer=2, destroys=["x_1"])
    assert ablate.why_not(certificate(), 0.05) == []
    assert ablate.why_not(certificate(left=[elsewhere]), 0.05) == []
    for flaw, says in (
        (dict(high=0.06), "not sufficient: the loss is 0.0300"),
        (dict(alone=0.91), "not complete: layer 5 head 2 costs 0.91"),
        (dict(together=0.05), "not complete: all heads without a path together cost 0.05"),
        (dict(destroys=["x_2"]), "tokens without a path, held as it says, cost x_2"),
        (dict(left=[row]), "not complete: layer 1 head 1, q -> 2b, left out, costs 0.20"),
        (dict(left=[lost]), "not complete: layer 2 head 1, q -> 2b, left out, costs 0.20"),
        (dict(more=-0.01), "q -> 1b: 0.30 by its targets, 0.40 by others"),
        (dict(needed=0.0), "not needed: layer 1 head 1, q -> 1b"),
    ):
        (text,) = ablate.why_not(certificate(**flaw), 0.05)
        assert text.endswith(says), text


def test_the_interval_of_light_tails():
    generator, errors = torch.Generator().manual_seed(0), torch.randn(100, 3).square()
    found = ablate.interval(errors, generator)
    mean, error = errors.mean(), errors.mean(1).std() / 10
    assert found["mse"] == pytest.approx(mean.item())
    assert found["partial"] == pytest.approx(errors.mean(0).tolist())
    assert found["low"] == pytest.approx((mean - 1.96 * error).item(), abs=0.5 * error.item())
    assert found["high"] == pytest.approx((mean + 1.96 * error).item(), abs=0.8 * error.item())


# ---- the command line


def write_run(folder, *flags, weights=None):
    """A run directory with the untrained weights of these flags, and its log."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, *map(str, flags)])
    folder.mkdir()
    settings = {name: getattr(flags, name) for name in config.SETTINGS}
    (folder / "config.json").write_text(json.dumps(settings))
    model = config.build(flags)
    state = model.state_dict()
    if weights:
        state = {name: torch.full_like(tensor, weights) for name, tensor in state.items()}
    config.write_tensors(folder / "model.pt", state)
    batch = config.sequences(flags, held_out("validation", 1024))
    with torch.no_grad():
        val = (model(batch.inputs) - batch.targets).square().mean().item()
    row = dict(step=0, seconds=0, lr=0, train=None, val=val) | dict.fromkeys(
        flags.target_names, val
    )
    (folder / "log.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def wrapped(tmp_path):
    """A run directory whose model solves its task."""
    run = write_run(tmp_path / "run", "--N", 4)
    flags = config.read_flags(run)
    with mock.patch.object(config, "load", return_value=(Wrapped(flags.problem), flags)):
        yield run


def test_what_is_found_is_printed_and_written(wrapped):
    (wrapped / "circuit.png").write_text("of an older certificate")
    code, out, err = run_main(ablate, wrapped, "--sequences", 64)
    assert code == 0 and "verdict: certified" in out and str(wrapped / "circuit.json") in out, err
    assert "layer 2 head 1, q -> 1b" in out and not (wrapped / "circuit.png").exists()
    report = read_report(wrapped)
    assert report["certified"] and len(report["paths"]) == 2 and report["sequences"] == 64


def test_a_model_that_has_learned_nothing_has_no_circuit(tmp_path):
    run = write_run(tmp_path / "run")
    for threshold in (0.05, 0.999):
        code, out, err = run_main(ablate, run, "--sequences", 64, "--threshold", threshold)
        report = read_report(run)
        assert code == 0 and not report["certified"] and "paths" not in report, err
        assert "not searched: the model itself has a loss of" in report["verdict"]


def test_bad_input_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    assert_refused(ablate, write_run(tmp_path / "one", "--N", 1), says="trained with --N 1")
    assert_refused(ablate, tmp_path, says="no run directory")
    for flag, value, says in (
        ("--threshold", 0, "--threshold must be above 0"),
        ("--threshold", "nan", "--threshold must be above 0"),
        ("--threshold", 1, "below 1"),
        ("--sequences", 63, "--sequences must be from 64"),
        ("--sequences", 2**21, "--sequences must be from 64 to 1048576"),
    ):
        assert_refused(ablate, run, flag, value, says=says)
    held = write_run(tmp_path / "held", "--heads", 1, "--circuit", "minimal")
    assert_refused(ablate, held, says="trained with --circuit")
    assert_refused(ablate, write_run(tmp_path / "last", "--D", 2, "--no-ic"), says="--no-ic")
    some = write_run(tmp_path / "some", "--D", 2, "--targets", 1)
    assert_refused(ablate, some, says="trained with --targets")
    (run / "config.json").write_text("{")
    assert_refused(ablate, run, says="config.json cannot be read")
