"""What checkpoints tell, found again token by token, kept, and drawn without the checkpoints."""

import itertools
import json
import shutil
from pathlib import Path as File

from parts import emergence, runs
from parts.circuit import Path

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

import analyze
import data
import train
from model import Transformer
from studies import order
from tests.common import TINY, assert_refused, run_main
from tests.other_tasks import TASKS, sequences_of, write_circuit


PATHS = [(1, 1, "1b", "1a"), (1, 2, "q", "1b"), (2, 1, "q", "1a")]
IN_NUMBERS = [Path(0, 0, 2, 1), Path(0, 1, 0, 2), Path(1, 0, 0, 1)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run with checkpoints and the paths PATHS, analysed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
    write_circuit(run, *(path + (0.5,) for path in PATHS))
    code, out, err = run_main(analyze, run)
    assert code == 0 and "checkpoint 3/3, 0 s left" in err, err
    return run


@pytest.fixture
def copied(trained, tmp_path):
    """The run without its checkpoints."""
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ckpt")
    return tmp_path / "run"


# ---- measuring


def measured_by_loops(model, config, task, batch, path):
    """What measure_checkpoint says of a path, token by token."""
    with torch.no_grad():
        patterns = model(batch.inputs, return_patterns=True)[1]
    pattern, means, hits = patterns[path.layer][:, path.head].clone(), [], []
    for b in range(len(batch.inputs)):
        values = []
        for n in range(task.N):
            tokens = [*batch.positions[b, n].tolist()]
            source, target = tokens[path.source], tokens[path.target]
            values.append(pattern[b, source, target].item())
            hits.append(pattern[b, source].max().item() == values[-1])
            pattern[b, source, target] = 0
        means.append(sum(values) / len(values))
    with torch.no_grad():
        predictions = model(batch.inputs, patterns={path[:2]: pattern})
    without = data.partial_losses(predictions, batch.targets, config["K"]).mean(0).tolist()
    means = torch.tensor(means)
    low, high = (torch.quantile(means, level).item() for level in (0.1, 0.9))
    numbers = dict(mean=means.mean().item(), low=low, high=high, hits=sum(hits) / len(hits))
    return numbers, without


def assert_as_by_loops(row, model, config, task, batch, paths):
    assert len(row["paths"]) == len(paths) > 0
    for found, path in zip(row["paths"], paths, strict=True):
        numbers, without = measured_by_loops(model, config, task, batch, path)
        assert found.keys() == numbers.keys() | {"without"}
        for name, value in numbers.items():
            assert abs(found[name] - value) < 1e-4, (path, name)
        assert len(found["without"]) == len(without)
        assert max(abs(a - b) for a, b in zip(found["without"], without, strict=True)) < 1e-4


def test_emergence_against_loops(trained):
    kept = json.loads((trained / "emergence.json").read_text())
    steps = [int(file.stem) for file in sorted((trained / "ckpt").iterdir())]
    assert [row["step"] for row in kept["rows"]] == steps == [0, 20, 40]
    assert [tuple(path) for path in kept["paths"]] == PATHS and kept["sequences"] == 32
    for row in kept["rows"]:
        model, config = runs.load(trained, f"ckpt/{row['step']:06d}.pt")
        batch = runs.sequences(config, data.held_out("emergence", 32))
        assert_as_by_loops(row, model, config, runs.task_of(config), batch, IN_NUMBERS)
        with torch.no_grad():
            predictions = model(batch.inputs)
        losses = data.partial_losses(predictions, batch.targets, 4).mean(0).tolist()
        assert row["losses"] == [round(loss, 4) for loss in losses]


@pytest.mark.parametrize("name", TASKS)
def test_a_checkpoint_of_any_task_against_loops(name, monkeypatch):
    task, config = TASKS[name], train.parse_flags(["--D", "2", "--device", "cpu"])
    monkeypatch.setattr(runs, "task_of", lambda config: task)
    torch.manual_seed(0)
    model = Transformer(task.T, task.N, 4, 8, layers=2, heads=2, width=32, head_size=8).eval()
    for parameter in model.parameters():  # patterns away from uniform
        parameter.data += 0.3 * torch.randn_like(parameter)
    batch = sequences_of(task, 6)
    paths = [Path(1, 1, *ends) for ends in itertools.permutations(range(len(task.roles)), 2)]
    row = emergence.measure_checkpoint(model, config, paths, batch)
    assert_as_by_loops(row, model, config, task, batch, paths)
    assert_heads_as_by_weights(row, model, config, batch)


def assert_heads_as_by_weights(row, model, config, batch):
    """A head is removed by taking its columns out of the layer's output matrix."""
    found = iter(row["heads"])
    for block, head in itertools.product(model.blocks, range(2)):
        weight = block.out.weight
        kept = weight.data.clone()
        weight.data[:, 8 * head : 8 * head + 8] = 0
        with torch.no_grad():
            predictions = model(batch.inputs)
        weight.data = kept
        expected = data.partial_losses(predictions, batch.targets, config["K"]).mean(0)
        assert torch.allclose(torch.tensor(next(found)), expected, atol=1e-4)
    assert next(found, None) is None


# ---- reading


def test_emergence_is_read_path_by_path(copied):
    kept = json.loads((copied / "emergence.json").read_text())
    found = emergence.read_emergence(copied, IN_NUMBERS[::-1])
    assert (found.sequences, found.steps, list(found.paths)) == (32, [0, 20, 40], IN_NUMBERS[::-1])
    assert list(found.losses["x_1"]) == [row["losses"][0] for row in kept["rows"]]
    for number, path in enumerate(IN_NUMBERS):
        history, rows = found.paths[path], [row["paths"][number] for row in kept["rows"]]
        for name in ("mean", "low", "high", "hits"):
            assert getattr(history, name) == [row[name] for row in rows]
        assert list(history.without["x_1"]) == [row["without"][0] for row in rows]


def test_emergence_of_fewer_other_and_foreign_paths(copied, trained, capsys):
    # fewer paths than were measured
    kept = (copied / "emergence.json").read_text()
    assert list(emergence.read_emergence(copied, IN_NUMBERS[1:2]).paths) == IN_NUMBERS[1:2]

    # another circuit: measured anew with checkpoints, said clearly without
    other = [Path(1, 1, 0, 2)]
    capsys.readouterr()
    assert emergence.read_emergence(copied, other) is None
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is of another circuit, and there are no checkpoints" in err
    assert (copied / "emergence.json").read_text() == kept
    shutil.copytree(trained / "ckpt", copied / "ckpt")
    assert list(emergence.read_emergence(copied, other).paths) == other
    assert (copied / "emergence.json").read_text() != kept

    # a file of another task, a damaged one; none at all
    foreign = json.loads(kept)
    foreign["paths"][0] = (1, 1, "2b", "2a")
    for wrong in (foreign, json.loads(kept) | dict(rows=[{}]), {}):
        (copied / "emergence.json").write_text(json.dumps(wrong))
        assert_refused(analyze, copied, says="of another task or damaged: remove it")
    (copied / "emergence.json").unlink()
    shutil.rmtree(copied / "ckpt")
    capsys.readouterr()
    assert emergence.read_emergence(copied, other) is None and not capsys.readouterr().err


def test_a_previous_token_of_an_older_circuit_is_passed_over(copied):
    known = emergence.read_emergence(copied, IN_NUMBERS)
    older = json.loads((copied / "emergence.json").read_text())
    older["paths"].insert(1, (1, 1, "q", "previous token"))
    for row in older["rows"]:
        values = dict(mean=2, low=2, high=2, hits=2, without=[2])  # of no path that is read
        row["paths"].insert(1, values)
    (copied / "emergence.json").write_text(json.dumps(older))
    found = emergence.read_emergence(copied, IN_NUMBERS)
    assert found == known and list(found.paths) == IN_NUMBERS

    # any other name that is no role is still refused
    older["paths"][1] = (1, 1, "q", "next token")
    (copied / "emergence.json").write_text(json.dumps(older))
    with pytest.raises(ValueError, match="of another task or damaged: remove it"):
        emergence.read_emergence(copied, IN_NUMBERS)


def history(means, without=()):
    return emergence.History(means, means, means, means, dict(without))


def test_emergence_steps_are_interpolated():
    paths = {"one": history([0.1, 0.2, 0.8]), "other": history([0.1, 0.1, 0.1])}
    found = emergence.Emergence(32, [0, 10, 20], {}, paths)
    assert order.emergence_steps(found) == {"one": 15.0, "other": None}


def test_rises_are_losses_without_less_losses():
    losses = dict(x_1=[0.5, 0.25], x_2=[0.75, 0.5])
    paths = {
        "one": history([], dict(x_1=[1.0, 0.25], x_2=[1.0, 1.5])),
        "other": history([], dict(x_1=[0.5, 0.5], x_2=[0.75, 0.25])),
    }
    removed = [path.without for path in paths.values()]
    rises = order.removal_rises(emergence.Emergence(32, [0, 10], losses, paths), removed)
    assert rises == dict(x_1=[[0.5, 0.0], [0.0, 0.25]], x_2=[[0.25, 1.0], [0.0, -0.25]])


# ---- drawing


def test_every_figure_without_checkpoints(copied):
    for name in emergence.FIGURES:
        (copied / name).unlink()
    code, out, err = run_main(analyze, copied)
    assert code == 0 and not err, err
    for name in emergence.FIGURES:
        assert str(copied / name) in out and (copied / name).stat().st_size > 1000
    assert not list(copied.glob("*.tmp*"))
    with Image.open(copied / "emergence.gif") as gif:
        shown = 0
        for frame in range(gif.n_frames):
            gif.seek(frame)
            shown += gif.info["duration"]
    assert shown == pytest.approx((3 + 8) * 125, abs=11 * 10)  # a GIF counts hundredths of a second


def test_figures_show_what_was_measured(copied, monkeypatch):
    run, figures = analyze.read_run(File(copied)), []
    monkeypatch.setattr(runs, "save_figure", lambda figure, file: figures.append(figure))
    curves = dict(x_1=[0.9, 0.6, 0.1])
    paths = {
        IN_NUMBERS[0]: history([0.1, 0.3, 0.9], dict(x_1=[0.9, 0.9, 0.8])),
        IN_NUMBERS[1]: history([0.1, 0.7, 0.9], dict(x_1=[0.9, 0.6, 0.1])),
        IN_NUMBERS[2]: history([0.1, 0.2, 0.3], dict(x_1=[1.0, 0.6, 1.1])),
    }
    run = run._replace(emergence=emergence.Emergence(32, [0, 20, 60], curves, paths))

    # Figure 7: the steps, on the arrows of the right panel
    emergence.draw_emergence(run, None)
    texts = [text.get_text() for text in figures[0].axes[1].texts]
    assert texts == ["33", "13", "never"]

    # Appendix D: a panel per path, its curve and its step
    emergence.draw_paths(run, None)
    arrow = "\N{RIGHTWARDS ARROW}"
    titles = [axes.get_title() for axes in figures[1].axes]
    assert titles[:2] == [f"layer 1 head 1: 1b {arrow} 1a", f"layer 1 head 2: q {arrow} 1b"]
    assert titles[2:] == [f"layer 2 head 1: q {arrow} 1a", ""]
    for axes, curve in zip(figures[1].axes, paths.values(), strict=False):
        assert list(axes.lines[0].get_ydata()) == curve.mean
    marks = [[text.get_text() for text in axes.texts] for axes in figures[1].axes]
    assert marks == [["33"], ["13"], [], []]

    # removals: a row per path, the step at which the symbol was learned
    emergence.draw_removal(run, None)
    panel = figures[2].axes[0]
    shown = panel.collections[0].get_array().reshape(3, 3).tolist()
    expected = [[0.0, 0.3, 0.7], [0.0, 0.0, 0.0], [0.1, 0.0, 1.0]]
    assert torch.allclose(torch.tensor(shown), torch.tensor(expected))
    assert panel.lines[0].get_xdata()[0] == pytest.approx(28)
    edges = panel.collections[0].get_coordinates()[0, :, 0].tolist()
    assert edges == [0, 10, 40, 60]  # half way between the checkpoints
    plt.close("all")


def test_heads_are_drawn_where_they_were_measured(copied, monkeypatch):
    """A row per head, those of the circuit marked."""
    run, figures = analyze.read_run(File(copied)), []
    monkeypatch.setattr(runs, "save_figure", lambda figure, file: figures.append(figure))
    heads = {(0, 0): dict(x_1=[0.5, 1.5]), (1, 1): dict(x_1=[0.5, 0.25])}
    losses, paths = dict(x_1=[0.5, 0.25]), {IN_NUMBERS[0]: history([0, 1])}
    seen = emergence.Emergence(32, [0, 10], losses, paths, heads)
    emergence.draw_heads(run._replace(emergence=seen, paths={IN_NUMBERS[0]: 1.0}), None)
    axes = figures[0].axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["layer 1 head 1 *", "layer 2 head 2"]
    assert axes.collections[0].get_array().reshape(2, 2).tolist() == [[0, 1.25], [0, 0]]
    plt.close("all")
