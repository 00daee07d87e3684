"""The search and its certificate: against planted circuits, brute force, a model not of ours."""

import csv
import json
import random
from unittest import mock

from parts import runs, search
from parts.circuit import (
    Held,
    Path,
    mean_attention,
    paths_in,
    paths_of,
    read_report,
    write_pattern,
)

import pytest
import torch

import ablate
import train
from data import chain, held_out, partial_losses
from tests.common import TINY, assert_refused, contents, run_main
from tests.planted import CIRCUITS, Wrapped, needed, plant, settings


def circuits_found(model, D, layers, heads=1):
    """What is found with each fill and in each order."""
    config = settings(D, layers, heads)
    batch = runs.sequences(config, held_out("validation", 16))
    patterns = search.own_patterns(model, config, batch.inputs)
    means = mean_attention(patterns, runs.task_of(config), batch.positions)
    costs = search.candidates(model, config, batch, patterns, means)
    held = Held(model, config, means, batch)
    for fill in search.SIMPLE:
        found = search.search(held, fill, costs, means, 0.05)
        assert len(found) == 3
        for circuit, loss in found.values():
            assert loss < 0.05
            yield circuit


# ---- planted circuits


@pytest.mark.parametrize("D, texts", CIRCUITS)
def test_planted_circuits_are_recovered_exactly(D, texts):
    model, task, paths = plant(D, texts, layers=5)
    for circuit in circuits_found(model, D, 5):
        assert set(paths_of(circuit)) == set(needed(task, paths, 5))


@pytest.mark.parametrize(
    "texts",
    [
        ["1.1 1b 1a", "1.2 2b 2a", "2.3 q 1b", "3.1 q 2b"],
        ["1.2 1b 1a", "1.2 2b 2a", "3.1 1b 2b", "3.3 q 1b", "4.2 q 2b"],
    ],
)
def test_planted_circuits_of_several_heads_are_recovered_exactly(texts):
    model, task, paths = plant(2, texts, layers=4, heads=3)
    for circuit in circuits_found(model, 2, 4, heads=3):
        assert set(paths_of(circuit)) == set(needed(task, paths, 4))


def test_redundant_circuits_lose_one_of_their_copies():
    model, _, (below, *copies) = plant(1, ["1 1b 1a", "2 q 1b", "3 q 1b"], layers=4)
    for circuit in circuits_found(model, 1, 4):
        assert paths_of(circuit) in [[below, copy] for copy in copies]


# ---- the certificate


def test_certificate_of_a_planted_circuit(capsys):
    """Every removal destroys just what the simulation says, and the numbers say so."""
    D, texts = CIRCUITS[3]
    model, task, _ = plant(D, texts, layers=5)
    report = ablate.find_circuit(model, settings(D, 5), sequences=64)
    expected = dict(
        grade="literal",
        fill="zero",
        sufficient=True,
        paths=6,
        least_paths=6,
        layers_with_paths=3,
        least_layers=3,
        first_useful_layer_is_previous_token=True,
        orders_that_agree=3,
        # once all else is held, 2b -> 3b and q -> 2b alone cannot be spared: x_1 reaches q by way
        # of 2a and 2b
        removals_above_threshold=2,
        removals_that_cost_the_model=6,
        predictions_right=6,
    )
    assert {key: report[key] for key in expected} == expected
    known = [mse for mse in report["controls"].values() if mse is not None]
    assert min(known) > 0.2 and report["first_head_uniform"]["mse"] < 0.05
    for removal in report["removals"]:
        for k, loss in enumerate(removal["alive_everywhere"]["partial"], 1):
            assert abs(loss - (f"x_{k}" in removal["predicted"])) < 0.3


@pytest.mark.parametrize("D, texts", CIRCUITS)
def test_planted_circuits_are_certified(D, texts, capsys):
    """No control stands in the way by which all symbols can travel, if by detours."""
    model, task, paths = plant(D, texts, layers=5)
    report = ablate.find_circuit(model, settings(D, 5), sequences=32)
    assert (report["grade"], report["fill"]) == ("literal", "zero")
    assert set(paths_in(report, task)) == set(needed(task, paths, 5))


def test_what_is_certified_is_measured_on_sequences_that_the_search_never_saw(capsys):
    D, texts = CIRCUITS[0]
    model, _, _ = plant(D, texts, layers=5)
    config = settings(D, 5)
    with mock.patch.object(ablate, "certify", wraps=ablate.certify) as certify:
        ablate.find_circuit(model, config, sequences=64)
    fresh = runs.sequences(config, held_out("certificate", 64))
    assert certify.call_count == 1
    assert torch.equal(certify.call_args.args[5].inputs, fresh.inputs)


def test_each_flaw_of_a_certificate_is_an_objection():
    def certificate(high=0.04, control=0.9, attended=True, rise=0.1):
        removal = dict(layer=1, head=1, source="q", target="1b", in_all_heads=0.4, relayed=0.0)
        removal |= dict(well_attended=attended, alive_everywhere=dict(low=rise))
        return dict(
            replaced=dict(mse=0.03, high=high),
            controls_that_must_fail=dict(random=control, no_path=None),
            removals=[removal],
        )

    assert ablate.objections(certificate(), 0.05) == []
    for flaw, says in (
        (dict(high=0.06), "the loss is 0.0300"),
        (dict(control=0.04), "a control passes: random"),
        (dict(attended=False), "q -> 1b gets 0.400 of the attention"),
        (dict(rise=-0.01), "can be taken from the model at no cost"),
    ):
        (text,) = ablate.objections(certificate(**flaw), 0.05)
        assert says in text


def test_a_model_is_held_from_any_layer_on_as_from_the_first():
    config = train.parse_flags(["--dtype", "float32", *TINY, "--layers", "4", "--heads", "2"])
    torch.manual_seed(0)
    model, task = runs.build(config).eval(), runs.task_of(config)
    batch = runs.sequences(config, held_out("validation", 8))
    patterns = search.own_patterns(model, config, batch.inputs)
    means = mean_attention(patterns, task, batch.positions)
    mechanisms = ["uniform", "identity", "position", None]
    mechanisms += [(Path(0, 0, 2, 1),), (Path(0, 0, 0, 2), Path(0, 0, 2, 1))]
    generator, held = random.Random(0), Held(model, config, means, batch)
    for _ in range(40):
        circuit = {head: generator.choice(mechanisms) for head in means}
        circuit = {head: own for head, own in circuit.items() if own}
        fill = generator.choice(list(search.SIMPLE))
        whole = {}
        for head, own in circuit.items():
            how = task, batch.positions, True, fill, means[head]
            whole[head] = write_pattern(own, *how)
        with torch.no_grad():
            expected = partial_losses(model(batch.inputs, whole), batch.targets, config["K"])
        keep = generator.random() < 0.3
        torch.testing.assert_close(held.errors(circuit, fill, keep), expected)
    assert held.can_start and held.layers_computed < 4 * 40


def test_the_interval_covers_the_mean():
    covered = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        errors = torch.randn(400, 3, generator=generator).square()
        interval = ablate.interval(errors, generator)
        covered += interval["low"] < 1 < interval["high"]
    assert 16 <= covered <= 20, covered


# ---- a model that is none of ours


def test_a_model_of_another_kind_is_certified(capsys):
    flags = "--D 1 --layers 2 --heads 2 --device cpu --dtype float32"
    config, task = train.parse_flags(flags.split()), chain(4, 1)
    report = ablate.find_circuit(Wrapped(task), config, sequences=256)
    assert report["grade"] == "literal" and report["fill"] == "zero" and report["sufficient"]
    assert [path[:4] for path in paths_in(report, task)] == [(0, 0, 2, 1), (1, 0, 0, 2)]
    assert report["removals_that_cost_the_model"] == report["predictions_right"] == 2
    assert report["fills"].keys() == search.SIMPLE.keys()
    for removal in report["removals"]:
        assert removal["predicted"] == removal["destroyed"] == ["x_1"]


# ---- the command line


def write_run(folder, *flags, weights=None):
    """A run directory with the untrained weights of these flags."""
    config = train.parse_flags(["--dtype", "float32", *TINY, *map(str, flags)])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    state = runs.build(config).state_dict()
    if weights:
        state = {name: torch.full_like(tensor, weights) for name, tensor in state.items()}
    runs.write_tensors(folder / "model.pt", state)
    return folder


@pytest.fixture
def wrapped(tmp_path):
    """A run directory whose model solves its task."""
    run = write_run(tmp_path / "run", "--N", 4)
    config = runs.read_config(run)
    with mock.patch.object(runs, "load", return_value=(Wrapped(runs.task_of(config)), config)):
        yield run


def test_what_is_found_is_printed_and_written(wrapped):
    code, out, err = run_main(ablate, wrapped, "--sequences", 64)
    assert code == 0 and "grade: literal" in out and str(wrapped / "circuit.json") in out, err
    report = read_report(wrapped)
    with open(wrapped / "ablation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    measured = [report["intact"], report["replaced"], *report["fills"].values()]
    measured.append(report["first_head_uniform"])
    for removal in report["removals"]:
        measured += [removal["frozen"], removal["alive"], removal["alive_everywhere"]]
    for row, expected in zip(rows, measured, strict=False):
        assert float(row["mse"]) == expected["mse"] and float(row["x_1"]) == expected["partial"][0]
    last, *controls = rows[len(measured) - 1 :]
    assert (last["source"], last["target"], last["destroyed"]) == ("q", "1b", "x_1")
    assert [row["what"] for row in controls] == [f"control {name}" for name in report["controls"]]


def test_a_full_disk_costs_no_result(wrapped):
    before = contents(wrapped)
    full = OSError(28, "No space left on device")
    with mock.patch.object(runs, "flush", side_effect=full):
        code, out, err = run_main(ablate, wrapped, "--sequences", 64)
    assert code == 1 and "without layer 2 head 1, q -> 1b" in out and "sufficient: True" in out
    assert err.count("\n") == 1 and "(No space left on device)" in err and str(wrapped) in err
    assert contents(wrapped) == before


def test_a_random_model_has_no_circuit(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "ablation.csv").write_text("of another threshold")
    code, out, err = run_main(ablate, run, "--sequences", 64)
    assert code == 0 and "circuit: none" in out and not (run / "ablation.csv").exists(), err
    report = read_report(run)
    assert report["grade"] is report["fill"] is None and "heads" not in report
    assert "the model itself has a loss of" in report["no_circuit"]


def test_a_model_that_has_learned_nothing_has_no_circuit_whatever_the_threshold(tmp_path):
    run = write_run(tmp_path / "run")
    code, out, err = run_main(ablate, run, "--sequences", 64, "--threshold", 9)
    assert code == 0 and "no_circuit: the model has learned no symbol" in out, err


def test_bad_input_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    assert_refused(ablate, write_run(tmp_path / "one", "--N", 1), says="trained with --N 1")
    assert_refused(ablate, tmp_path, says="no run directory")
    for flag, value, says in (
        ("--threshold", 0, "--threshold must be above 0"),
        ("--threshold", "nan", "--threshold must be above 0"),
        ("--threshold", "inf", "--threshold must be above 0"),
        ("--sequences", 1, "--sequences must be at least 2"),
        ("--sequences", 2**21 + 1, "there are 2097152 sequences held out for certificate"),
        ("--seed", 2**63, "--seed must be from 0 to 9223372036854775807"),
        ("--seed", -1, "--seed must be from 0"),
    ):
        assert_refused(ablate, run, flag, value, says=says)
    held = write_run(tmp_path / "held", "--heads", 1, "--circuit")
    assert_refused(ablate, held, says="trained with --circuit")
    assert_refused(ablate, write_run(tmp_path / "last", "--no-ic"), says="--no-ic")
    assert_refused(ablate, write_run(tmp_path / "nan", weights=torch.nan), says="not finite")
    huge = write_run(tmp_path / "huge", weights=1e38)
    assert_refused(ablate, huge, says=f"the loss of {huge} is not finite")
    (run / "config.json").write_text("{")
    assert_refused(ablate, run, says="config.json cannot be read")
