"""What checkpoints tell, found again token by token, written, and read without the checkpoints."""

import json
import shutil

import pytest
import torch

import analyze
import train
from ablate import paths_in
from data import held_out
from extras.studies import stats
from tests.other_tasks import write_circuit


ROWS = (0, 0, "1b", "1a", 0.5), (0, 1, "q", "1b", 0.5), (1, 0, "q", "1b+1", 0.5)


@pytest.fixture(scope="module")
def measured(whole, tmp_path_factory):
    """The run of `whole` with the paths of ROWS in its circuit.json, measured."""
    run = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(whole, run)
    write_circuit(run, *ROWS)
    analyze.read_emergence(run)
    return run


# ---- measuring


def attention_by_loops(patterns, task, batch, path):
    """[mean, low, high, hits] of the attention of a path, token by token."""
    pattern = patterns[path.layer][:, path.head]
    means, hits = [], []
    for b, chains in enumerate(batch.positions.tolist()):
        values = []
        for tokens in chains:
            source, target = (tokens[place.role] + place.offset for place in path[2:])
            exists = target < task.T
            values.append(pattern[b, source, target].item() if exists else 0.0)
            hits.append(exists and pattern[b, source].max().item() == values[-1])
        means.append(sum(values) / len(values))
    means = torch.tensor(means)
    low, high = (means.quantile(level).item() for level in (0.1, 0.9))
    return [means.mean().item(), low, high, sum(hits) / len(hits)]


def test_emergence_against_loops(measured):
    """All that is written, of each checkpoint; PatchedModel.knock_out has its own tests."""
    known, flags = analyze.read_emergence(measured), train.read_flags(measured)
    assert known["steps"] == [0, 20, 40] and known["sequences"] == 32 and len(known["paths"]) == 3
    batch = train.sequences(flags, held_out("emergence", 32))

    def assert_written(number, curves, expected):
        assert [curve[number] for curve in curves] == pytest.approx(expected, abs=6e-5)

    for number, step in enumerate(known["steps"]):
        model, flags = train.load(measured, f"ckpt/{step:06d}.pt")
        with torch.no_grad(), train.precision(flags):
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in paths_in(known, flags.problem).items():
            expected = attention_by_loops(patterns, flags.problem, batch, path)
            assert_written(
                number, [row[name] for name in ("mean", "low", "high", "hits")], expected
            )


# ---- reading


def test_emergence_is_read_without_checkpoints_and_measured_with_them(measured, tmp_path):
    run, known = tmp_path / "run", analyze.read_emergence(measured)
    shutil.copytree(measured, run, ignore=shutil.ignore_patterns("ckpt"))
    write_circuit(run, ROWS[0])  # fewer paths, all of them known
    assert analyze.read_emergence(run) == known
    write_circuit(run, (1, 1, "q", "1b", 0.5))  # unknown, but there are no checkpoints
    assert analyze.read_emergence(run) == known
    shutil.copytree(measured / "ckpt", run / "ckpt")
    (row,) = analyze.read_emergence(run)["paths"]
    assert (row["layer"], row["head"], row["reader"], row["read"]) == (1, 1, "q", "1b")
    assert json.loads((run / "emergence.json").read_text())["paths"] == [row]
    (run / "emergence.json").unlink()
    shutil.rmtree(run / "ckpt")
    assert analyze.read_emergence(run) == {}


# ---- what it says


def test_steps_are_interpolated_and_rises_are_differences():
    paths = [dict(layer=0, head=0, reader="1b", read=name) for name in ("1a", "q")]
    paths[0] |= dict(mean=[0.1, 0.2, 0.8], without=dict(x_1=[1.0, 0.25], x_2=[0.75, 0.5]))
    paths[1]["mean"] = [0.1, 0.1, 0.1]
    losses = dict(x_1=[0.5, 0.25], x_2=[1.0, 0.5])
    known = dict(steps=[0, 10, 20], losses=losses, paths=paths)
    task = train.parse_flags(["--D", "1"]).problem
    assert [*analyze.emergence_steps(known, task).values()] == [15.0, None]
    rises = stats.knock_out_rises(known, paths[0])
    assert rises == dict(x_1=[0.5, 0.0], x_2=[-0.25, 0.0])
