"""Figures of one run: what they show, for tasks of other roles too, and that none is forgotten."""

import itertools
import json
import shutil

from parts import circuit, emergence, runs
from parts.circuit import Path

import diagram
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_rgba

import analyze
import train
from data import Role, Task
from model import Transformer
from tests.common import TINY, assert_refused, contents, run_main
from tests.other_tasks import MIXED, TASKS, TRIPLES, sequences_of, write_circuit


def run_of(task, paths=None, heads=1):
    """An untrained Run of two layers; its sequences are not those of its config."""
    torch.manual_seed(0)
    config = train.parse_flags(["--D", "2", "--device", "cpu"]) | dict(heads=heads)
    model = Transformer(task.T, task.N, 4, 8, layers=2, heads=heads, width=32, head_size=8).eval()
    report = dict(grade="literal", fill="zero")
    return analyze.Run(None, model, config, task, report, paths or {}, None)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, kept instead of saved."""
    figures = []
    monkeypatch.setattr(runs, "save_figure", lambda figure, file: figures.append(figure))
    yield figures
    plt.close("all")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny run with checkpoints, with one drawing of everything that can be drawn."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
    write_circuit(run, (1, 1, "1b", "1a", 0.9), (1, 2, "q", "1b", 0.05), (2, 1, "q", "1a", 0.8))
    code, out, err = run_main(analyze, run)
    assert code == 0, err
    return run, out


# ---- every figure


def not_in_the_table(module, table):
    """The functions of a module that draw figures and are in no row of its table."""
    own = [value for value in vars(module).values() if callable(value)]
    own = [value for value in own if getattr(value, "__module__", "") == module.__name__]
    return [f.__name__ for f in own if f.__name__.startswith("draw_") and f not in table.values()]


def test_no_figure_is_missing_from_the_tables(monkeypatch):
    tables = [(analyze, analyze.FIGURES | analyze.CIRCUIT_FIGURES)]
    tables.append((emergence, emergence.FIGURES | emergence.HEAD_FIGURES))
    for module, table in tables:
        assert len(table) > 3 and not not_in_the_table(module, table)

        # a forgotten one would be found
        def draw_more(run, file):
            pass

        draw_more.__module__ = module.__name__
        monkeypatch.setattr(module, "draw_more", draw_more, raising=False)
        assert not_in_the_table(module, table) == ["draw_more"]


def test_every_figure_leaves_its_file(trained):
    run, out = trained
    tables = analyze.FIGURES | analyze.CIRCUIT_FIGURES | emergence.FIGURES
    tables |= emergence.HEAD_FIGURES
    for name in tables:
        start = {".png": b"\x89PNG", ".gif": b"GIF89a"}[(run / name).suffix]
        assert (run / name).read_bytes().startswith(start), name
        assert str(run / name) in out


def test_without_a_circuit_the_other_figures_are_drawn(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    for file in (*run.glob("*.png"), *run.glob("*.gif"), run / "circuit.json"):
        file.unlink()
    code, out, err = run_main(analyze, run)
    assert code == 0 and f"so none is drawn: run python ablate.py {run} first" in out, err
    assert {file.name for file in run.glob("*.png")} == set(analyze.FIGURES)
    (run / "circuit.json").write_text(json.dumps(dict(grade=None)))
    code, out, err = run_main(analyze, run)
    assert code == 0 and "ablate.py found no circuit here" in out, err


def test_what_cannot_be_analysed_is_refused_in_one_line(trained, tmp_path):
    assert_refused(analyze, tmp_path, says="is no run directory")
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    before = contents(run)
    for old in (dict(rows=[], heads=[]), dict(rows_without_a_path="mean", orders={})):
        (run / "circuit.json").write_text(json.dumps(old))
        assert_refused(analyze, run, says="is of an older form: run ablate.py again")
    write_circuit(run, (1, 1, "3b", "3a", 0.9))
    assert_refused(analyze, run, says="another task")
    after = contents(run)
    assert {file.name for file in after if after[file] != before[file]} == {"circuit.json"}
    held = tmp_path / "held"
    assert run_main(train, *TINY, "--heads", 1, "--circuit", "--out", held)[0] == 0
    assert_refused(analyze, held, says="there is nothing to find")


# ---- tasks of other roles


def test_sequences_of_another_task_are_refused(trained, monkeypatch):
    roles = [Role("q", 0, 1, 0), Role("1a", 0, 0, 1), Role("1b", 1, 0, 0)]  # the pair turned round
    for wrong in (Task(2, tuple(roles)), TRIPLES):
        monkeypatch.setattr(runs, "task_of", lambda config, wrong=wrong: wrong)
        assert_refused(analyze, trained[0], says="not of the table of roles")
    for name, task in TASKS.items():
        circuit.check_roles(task, sequences_of(task, 3), 4)
        if name != "triples":
            with pytest.raises(ValueError, match="not of the table of roles"):
                other = TASKS["mixed" if name == "chain" else "chain"]
                circuit.check_roles(other, sequences_of(task, 3), 4)


@pytest.mark.parametrize("name", TASKS)
def test_attention_maps_of_any_task(name, drawn, monkeypatch):
    """Names, block lines, the frame of the useful head, against the batch token by token."""
    task = TASKS[name]
    borders = {"chain": [3.5, 7.5], "triples": [5.5], "mixed": [3.5, 7.5]}[name]
    batch = sequences_of(task, 1)
    monkeypatch.setattr(runs, "sequences", lambda config, index: batch)
    run = run_of(task, {Path(1, 0, 0, 2): 0.9}, heads=2)
    analyze.draw_attention_maps(run, None)
    panels = [axes for axes in drawn[0].axes if axes.images and axes.get_title()]
    titles = [axes.get_title() for axes in panels]
    assert titles == [
        "layer 1, head 1",
        "layer 1, head 2",
        "layer 2, head 1, useful",
        "layer 2, head 2",
    ]
    for axes in panels:
        across = [line.get_ydata()[0] for line in axes.lines if line.get_xdata()[0] == 0]
        upward = [line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] == 0]
        assert across == upward == borders
    texts = [label.get_text() for label in panels[0].get_yticklabels()]
    for n, (number, role) in itertools.product(range(task.N), enumerate(task.roles)):
        assert texts[batch.positions[0, n, number]] == f"{'ABC'[role.symbol]}{n + 1}"


SHARED = {  # who shares a symbol, who shares a slot
    "chain": (["q 1a", "1b 2a"], ["1a 1b", "2a 2b"]),
    "triples": (["q 1a"], ["1a 1b", "1a 1c", "1b 1c"]),
    "mixed": (["q 1a", "1b 2a"], ["1a 1b", "2a 2b"]),
}


@pytest.mark.parametrize("name", TASKS)
def test_shared_information_of_any_task(name, drawn):
    task = TASKS[name]
    found = []
    for pairs in analyze.shared_information(task):
        found.append([f"{task.names[a]} {task.names[b]}" for a, b in pairs])
    assert tuple(found) == SHARED[name]

    # the arcs that are drawn: above from symbols, below from slots
    analyze.draw_shared_information(run_of(task), None)
    arcs = {True: [], False: []}
    for arc in drawn[0].axes[0].patches:
        (a, height), (b, _) = arc._posA_posB
        arcs[height > 0].append(f"{task.names[a]} {task.names[b]}")
    assert (arcs[True], arcs[False]) == SHARED[name]


@pytest.mark.parametrize("name", TASKS)
def test_information_map_before_any_layer_is_lemma_2(name, drawn, monkeypatch):
    """Each role holds its own symbol and no other; no hook stays behind."""
    run = run_of(TASKS[name])
    batch = sequences_of(run.task, 256)
    scores = analyze.information(run.model, run.task, batch, 4)
    own = torch.zeros(len(run.task.roles), run.task.symbols, dtype=torch.bool)
    for number, role in enumerate(run.task.roles):
        own[number, role.symbol] = True
    assert scores.shape == (3, *own.shape)
    assert (scores[0][own] > 0.99).all() and (scores[0][~own] < 0.1).all(), scores[0]
    assert not any(module._forward_hooks for module in run.model.modules())

    # drawn role by role
    monkeypatch.setattr(runs, "sequences", lambda config, index: batch)
    analyze.draw_information_map(run, None, n=128)
    panels = drawn[0].axes[: len(run.task.roles)]
    assert [axes.get_title() for axes in panels] == run.task.names
    shown = torch.stack([torch.tensor(axes.images[0].get_array()) for axes in panels], 1)
    torch.testing.assert_close(shown, scores)


# ---- the diagram of a circuit


def arrows_of(task, paths):
    """{path: ((x, y) of its foot, (x, y) of its head, its bend, its line, its text)}"""
    _, axes = plt.subplots()
    drawn = diagram.draw_diagram(axes, task, paths, lambda path: str(path[2:]), lambda path: "red")
    found = {}
    for path, (arrow, text) in drawn.items():
        foot, head = arrow._posA_posB
        bend = arrow.get_connectionstyle().rad
        found[path] = foot, head, bend, arrow.get_linestyle(), text.get_text()
    names = [label.get_text().split("\n")[1] for label in axes.get_xticklabels()]
    heights = [label.get_text() for label in axes.get_yticklabels()]
    plt.close("all")
    return found, names, heights


def test_arrows_lead_from_where_information_is_taken():
    paths = {
        Path(1, 0, 4, 3): 0.9,  # 2b -> 2a
        Path(5, 0, 0, 2): 0.05,  # q -> 1b, faint
        Path(5, 1, 0, 2): 0.7,  # the same in another head
        Path(5, 0, 1, 3): 0.9,  # 1a -> 2a, the other way
    }
    arrows, names, heights = arrows_of(MIXED, paths)
    assert names == ["1a", "1b", "2b", "2a", "q"]  # as they are read
    assert heights == ["input", "after layer 2", "after layer 6"]
    pair, faint, again, back = arrows.values()
    assert pair[:3] == ((3, 0), (2, 1), 0) and pair[3:] == ("-", "(4, 3)")
    assert faint[:3] == ((1, 1), (4, 2), 0) and faint[3] != "-"
    assert again[:2] == faint[:2] and again[2] != 0 and again[3] == "-"
    assert back == ((3, 1), (0, 2), 0, "-", "(1, 3)")
    assert "dashed" in diagram.faint_note(paths) and not diagram.faint_note({Path(0, 0, 1, 2): 0.9})


def test_a_circuit_of_triples_is_drawn(drawn):
    run = run_of(TRIPLES, {Path(0, 0, 3, 1): 0.9, Path(1, 0, 0, 3): 0.8, Path(0, 0, 0, 1): 0.6})
    analyze.draw_circuit(run, None)
    (axes,) = drawn[0].axes
    names = [label.get_text().split("\n")[1] for label in axes.get_xticklabels()]
    assert names == ["1a", "1b", "1c", "q"]
    colors = [arrow.get_edgecolor() for arrow in axes.patches]
    assert colors == [to_rgba(diagram.USEFUL)] * 3
    assert [text.get_text() for text in axes.texts] == ["0.90", "0.80", "0.60"]
    assert "Circuit (literal) of" in axes.get_title()
