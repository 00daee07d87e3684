"""What checkpoints tell, found again token by token, kept, and read without the checkpoints."""

import itertools
import json
import shutil

from parts import config, emergence
from parts.circuit import paths_in, read_report
from parts.theory import Path, Place

import pytest
import torch

import train
from data import held_out, partial_losses
from tests.common import TINY, run_main
from tests.other_tasks import write_circuit
from tests.planted import paths_from


TEXTS = ["1.1 1b 1a", "1.2 q 1b", "2.1 q 1b+1"]


def write_paths(run, *texts):
    where = [text.split() for text in texts]
    write_circuit(run, *((*map(int, head.split(".")), *ends, 0.5) for head, *ends in where))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run with checkpoints and the paths of TEXTS, measured."""
    run = tmp_path_factory.mktemp("trained") / "run"
    more = ["--dtype", "float32", "--save-every", 20]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "draw_curves", lambda run: None)
        assert run_main(train, *TINY, *more, "--out", run)[0] == 0
    write_paths(run, *TEXTS)
    assert emergence.read_emergence(run)
    return run


@pytest.fixture
def copied(trained, tmp_path):
    """The run without its checkpoints."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("ckpt"))
    return tmp_path / "run"


# ---- measuring


def losses_of(model, batch, patterns=None):
    with torch.no_grad():
        return partial_losses(model(batch.inputs, patterns), batch.targets, 4).mean(0).tolist()


def measured_by_loops(model, task, batch, path):
    """What is measured of a path at a checkpoint, token by token: mean, low, high, hits; and the
    losses without it."""
    with torch.no_grad():
        pattern = model(batch.inputs, return_patterns=True)[1][path.layer][:, path.head].clone()
    means, hits = [], []
    for b, tokens in enumerate(batch.positions.tolist()):
        values = []
        for own in tokens:
            source, target = (own[end.role] + end.offset for end in path[2:])
            there = target < task.T
            values.append(pattern[b, source, target].item() if there else 0.0)
            hits.append(there and pattern[b, source].max().item() == values[-1])
            if there:
                pattern[b, source, target] = 0
        means.append(sum(values) / len(values))
    means = torch.tensor(means)
    low, high = (means.quantile(level).item() for level in (0.1, 0.9))
    without = losses_of(model, batch, {path[:2]: pattern})
    return [means.mean().item(), low, high, sum(hits) / len(hits)], without


def test_emergence_against_loops(trained):
    flags = config.read_flags(trained)
    found = emergence.measure_emergence(trained, flags, paths_from(flags.problem, *TEXTS))
    assert found.steps == [0, 20, 40] and found.sequences == 32 and len(found.paths) == 3
    batch = config.sequences(flags, held_out("emergence", 32))
    for number, step in enumerate(found.steps):
        model, _ = config.load(trained, f"ckpt/{step:06d}.pt")
        intact = losses_of(model, batch)
        assert [curve[number] for curve in found.losses.values()] == pytest.approx(intact, abs=1e-4)
        for path, history in found.paths.items():
            numbers, without = measured_by_loops(model, flags.problem, batch, path)
            assert [curve[number] for curve in history[:4]] == pytest.approx(numbers, abs=1e-4)
            curves = history.without.values()
            assert [curve[number] for curve in curves] == pytest.approx(without, abs=1e-4)
        for (layer, head), without in found.heads.items():
            expected = without_weights(model, batch, layer, head)
            curves = without.values()
            assert [curve[number] for curve in curves] == pytest.approx(expected, abs=1e-4)
    assert [*found.heads] == [*itertools.product(range(2), range(2))]


def without_weights(model, batch, layer, head):
    """The losses when a head is removed by taking its columns out of the layer's output matrix."""
    weight = model.blocks[layer].out.weight
    kept = weight.data.clone()
    weight.data[:, 8 * head : 8 * head + 8] = 0
    losses = losses_of(model, batch)
    weight.data = kept
    return losses


# ---- kept and read


def test_what_is_kept_is_what_was_measured(trained, copied):
    flags, task = config.read_flags(copied), config.read_flags(copied).problem
    paths = [*paths_from(task, *TEXTS), Path(1, 1, Place(2, -1), Place(1))]
    measured = emergence.measure_emergence(trained, flags, paths)
    kept = json.loads(json.dumps(emergence.to_json(measured, task)))
    again = emergence.from_json(kept, flags.problem)
    assert [*again.paths] == paths and again.heads.keys() == measured.heads.keys()
    assert emergence.to_json(again, task) == kept
    for path, history in measured.paths.items():
        assert again.paths[path].mean == pytest.approx(history.mean, abs=6e-5)
        assert again.paths[path].without["x_1"] == pytest.approx(history.without["x_1"], abs=6e-5)


def test_what_is_kept_is_read_without_checkpoints(trained, copied):
    first, known = emergence.read_emergence(trained), emergence.read_emergence(copied)
    assert known == first
    assert known.paths.keys() == paths_in(read_report(copied), chain_of(copied)).keys()
    (copied / "emergence.json").unlink()
    assert emergence.read_emergence(copied) is None


def chain_of(run):
    return config.read_flags(run).problem


def test_paths_that_are_not_known_are_measured_where_there_are_checkpoints(trained, copied):
    kept = (copied / "emergence.json").read_text()
    write_paths(copied, TEXTS[0])  # fewer: known
    assert len(emergence.read_emergence(copied).paths) == 3
    write_paths(copied, "2.2 q 1b")
    assert len(emergence.read_emergence(copied).paths) == 3
    assert (copied / "emergence.json").read_text() == kept
    shutil.copytree(trained / "ckpt", copied / "ckpt")
    found = emergence.read_emergence(copied)
    assert [*found.paths] == paths_from(chain_of(copied), "2.2 q 1b")
    assert (copied / "emergence.json").read_text() != kept


# ---- what it says


def history(means, without=()):
    return emergence.History(means, means, means, means, dict(without))


def test_emergence_steps_are_interpolated():
    paths = {"one": history([0.1, 0.2, 0.8]), "other": history([0.1, 0.1, 0.1])}
    found = emergence.Emergence(32, [0, 10, 20], {}, paths, {})
    assert emergence.emergence_steps(found) == {"one": 15.0, "other": None}


def test_rises_are_losses_without_less_losses():
    losses = dict(x_1=[0.5, 0.25], x_2=[0.75, 0.5])
    removed = [dict(x_1=[1.0, 0.25], x_2=[1.0, 1.5]), dict(x_1=[0.5, 0.5], x_2=[0.75, 0.25])]
    found = emergence.Emergence(32, [0, 10], losses, {}, {})
    rises = emergence.removal_rises(found, removed)
    assert rises == dict(x_1=[[0.5, 0.0], [0.0, 0.25]], x_2=[[0.25, 1.0], [0.0, -0.25]])


def test_a_planted_path_emerges_where_it_was_planted(trained, monkeypatch):
    """The checkpoints are models that attend along the path with these shares."""
    flags, shares = (
        config.read_flags(trained),
        {"000000.pt": 0.0, "000020.pt": 0.25, "000040.pt": 0.75},
    )
    (path,), own = paths_from(flags.problem, "2.1 q 1b"), config.load

    def load(run, weights="model.pt"):
        model, flags = own(run, weights)
        share = shares[weights.removeprefix("ckpt/")]

        def attending(x, patterns=None, return_patterns=False):
            batch = config.sequences(flags, held_out("emergence", 32))
            T = flags.problem.T
            pattern = torch.eye(T).repeat(32, 1, 1)
            for b, n in itertools.product(range(32), range(flags.N)):
                q, _, target = batch.positions[b, n].tolist()
                pattern[b, q, q], pattern[b, q, target] = 1 - share, share
            return model(x, {path[:2]: pattern} | (patterns or {}), return_patterns)

        return attending, flags

    monkeypatch.setattr(config, "load", load)
    found = emergence.measure_emergence(trained, flags, [path])
    assert found.paths[path].mean == pytest.approx([0, 0.25, 0.75])
    assert found.paths[path].hits == [0, 0, 1] and emergence.emergence_steps(found)[path] == 30
