"""Figures of one run: what they show, for tasks of other roles too, and that none is forgotten."""

import copy
import inspect
import itertools
import json
import re
import shutil

from parts import config
from parts.emergence import Emergence, History
from parts.theory import Path, Place

import matplotlib.pyplot as plt
import numpy
import pytest
import torch
from PIL import Image

import analyze
import train
from model import Transformer
from pages import film
from tests.common import assert_refused, contents, run_main
from tests.other_tasks import MIXED, TASKS, sequences_of, write_circuit


TABLES = analyze.FIGURES, analyze.CIRCUIT_FIGURES, analyze.EMERGENCE_FIGURES
ALL = {name: draw for table in TABLES for name, draw in table.items()}


def run_of(folder, task, paths=(), heads=1):
    """An untrained Run of two layers; its sequences are not those of its flags."""
    torch.manual_seed(0)
    flags = train.parse_flags(["--D", "2", "--device", "cpu"]).replace(layers=2, heads=heads)
    model = Transformer(task.T, task.N, 4, 8, layers=2, heads=heads, width=32, head_size=8).eval()
    report = dict(certified=False, fill="identity", sequences=64)
    report["heads"] = [dict(mechanism=name) for name in ("paths", "uniform", "position")]
    paths = {path: dict(attention=0.9 - path.layer / 10) for path in paths}
    return analyze.Run(folder, model, flags, task, report, paths, None)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn, kept instead of saved."""
    figures = []
    monkeypatch.setattr(config, "save_figure", lambda figure, file: figures.append(figure))
    yield figures
    plt.close("all")


@pytest.fixture
def copied(whole, tmp_path):
    """A tiny run with checkpoints and a circuit with a relay."""
    shutil.copytree(whole, tmp_path / "run")
    paths = (1, 1, "1b", "1a", 0.9), (1, 2, "1b+1", "1b", 0.7), (2, 1, "q", "1b+1", 0.8)
    write_circuit(tmp_path / "run", *paths)
    return tmp_path / "run"


def test_every_figure_leaves_its_file(copied):
    own = {value for value in vars(analyze).values() if inspect.isfunction(value)}
    figures = {one for one in own if [*inspect.signature(one).parameters][:2] == ["run", "file"]}
    assert figures == {*ALL.values()} - {ALL["curves.png"]}  # which is of train.py
    code, out, err = run_main(analyze, copied)
    assert code == 0 and out.split() == [str(copied / name) for name in ALL], err
    for name in ALL:
        start = {".png": b"\x89PNG", ".gif": b"GIF89a"}[(copied / name).suffix]
        assert (copied / name).read_bytes().startswith(start), name


def test_figures_of_what_is_no_more_are_removed(copied, monkeypatch):
    for table in TABLES:
        for name in table:
            monkeypatch.setitem(table, name, lambda run, file: file.touch())

    def left(says=""):
        code, out, err = run_main(analyze, copied)
        assert code == 0 and says in out, err
        return {file.name for file in copied.iterdir() if file.suffix in (".png", ".gif")}

    assert left() == {*ALL}
    measured = json.loads((copied / "emergence.json").read_text())
    shutil.rmtree(copied / "ckpt")
    (copied / "emergence.json").write_text(json.dumps(measured | dict(heads=[])))  # of older code
    assert left() == {*ALL} - {"heads.png"}
    (copied / "emergence.json").unlink()
    assert left() == {*analyze.FIGURES, *analyze.CIRCUIT_FIGURES}
    (copied / "circuit.json").write_text(json.dumps(dict(certified=False, verdict="no circuit: x")))
    assert left("is drawn: no circuit: x") == {*analyze.FIGURES}
    (copied / "circuit.json").unlink()
    assert left(f"run python ablate.py {copied} first") == {*analyze.FIGURES}


def test_what_cannot_be_analysed_is_refused_in_one_line(copied, tmp_path):
    assert_refused(analyze, tmp_path, says="is no run directory")
    before = contents(tmp_path)
    with config.alone_in(copied):
        assert_refused(analyze, copied, says="in use by another process")
    (copied / "circuit.json").write_text(json.dumps(dict(rows=[], heads=[])))
    assert_refused(analyze, copied, says="is of an older form: run ablate.py again")
    write_circuit(copied, (1, 1, "3b", "3a", 0.9))
    assert_refused(analyze, copied, says="another task")
    settings = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(settings | dict(circuit="minimal")))
    assert_refused(analyze, copied, says="there is nothing to find")
    changed = {path.name for path, _ in contents(tmp_path).items() ^ before.items()}
    assert changed <= {"config.json", "circuit.json", ".lock"}


# ---- tasks of other roles


@pytest.mark.parametrize("name", TASKS)
def test_attention_maps_of_any_task(name, whole, drawn, monkeypatch):
    """Names, block lines, the mark of the head with a path, against the batch token by token."""
    task, batch = TASKS[name], sequences_of(TASKS[name], 1)
    borders = [-0.5, 5.5] if name == "triples" else [-0.5, 3.5, 7.5]
    monkeypatch.setattr(config, "sequences", lambda flags, index: batch)
    run = run_of(whole, task, [Path(1, 0, Place(0), Place(2))], heads=2)
    analyze.draw_attention_maps(run, None)
    titles = ["layer 1, head 1", "layer 1, head 2", "layer 2, head 1, has a path"]
    *panels, _ = drawn[0].axes  # but for the scale
    assert [axes.get_title() for axes in panels] == [*titles, "layer 2, head 2"]
    for axes in panels:
        across = [line.get_ydata()[0] for line in axes.lines if line.get_xdata()[0] == 0]
        upward = [line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] == 0]
        assert across == upward == borders
    texts = [label.get_text() for label in panels[0].get_yticklabels(minor=True)]
    for n, (number, role) in itertools.product(range(task.N), enumerate(task.roles)):
        assert texts[batch.positions[0, n, number]] == f"{'ABC'[role.symbol]}{n + 1}"


@pytest.mark.parametrize("name", TASKS)
def test_information_map_before_any_layer_is_lemma_2(name, whole, drawn, monkeypatch):
    """Each role holds its own symbol and no other; no hook stays behind."""
    run, batch = run_of(whole, TASKS[name]), sequences_of(TASKS[name], 256)
    scores = analyze.information(run.model, run.task, batch, 4)
    own = run.task.column("symbol")[:, None] == torch.arange(run.task.symbols)
    assert scores.shape == (3, *own.shape)
    assert (scores[0][own] > 0.99).all() and (scores[0][~own] < 0.1).all(), scores[0]
    assert not any(module._forward_hooks for module in run.model.modules())

    # drawn role by role
    monkeypatch.setattr(config, "sequences", lambda flags, index: batch)
    analyze.draw_information_map(run, None, n=128)
    panels = drawn[0].axes[: len(run.task.roles)]
    assert [axes.get_title() for axes in panels] == run.task.names
    shown = torch.stack([torch.tensor(axes.images[0].get_array()) for axes in panels], 1)
    torch.testing.assert_close(shown, scores)


def test_layers_that_share_weights_give_as_many_streams(whole):
    """Four times one module says what four copies of it say."""
    run, batch, found = run_of(whole, MIXED), sequences_of(MIXED, 256), []
    block = run.model.blocks[0]
    for blocks in [block] * 4, [copy.deepcopy(block) for _ in range(4)]:
        run.model.blocks = torch.nn.ModuleList(blocks)
        found.append(analyze.information(run.model, MIXED, batch, 4))
    assert len(found[0]) == 5 and not torch.allclose(found[0][3], found[0][4], atol=0.01)
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


# ---- the diagram of a circuit, and how it emerged


def test_arrows_lead_from_where_information_is_taken(whole, drawn):
    (q, a1, b1, a2, b2), relay = map(Place, range(5)), Place(2, 1)
    expected = {  # foot, head, text; the columns are those below
        Path(1, 0, b2, a2): ((4, 0), (3, 1), "head 1: 0.80"),
        Path(1, 1, relay, b1): ((1, 0), (2, 1), "head 2: 0.80"),
        Path(5, 0, q, b1): ((1, 1), (5, 2), "head 1: 0.40"),
        Path(5, 1, q, b1): ((1, 1), (5, 2), "head 2: 0.40"),
        Path(5, 0, a1, a2): ((4, 1), (0, 2), "head 1: 0.40"),
    }
    analyze.draw_circuit(run_of(whole, MIXED, expected), None)
    (axes,) = drawn[0].axes
    found = [arrow._posA_posB for arrow in axes.patches]
    found = [(*ends, text.get_text()) for ends, text in zip(found, axes.texts, strict=True)]
    assert sorted(found) == sorted(expected.values())
    ways = {(*arrow._posA_posB, arrow.get_connectionstyle().rad) for arrow in axes.patches}
    assert len(ways) == len({text.get_position() for text in axes.texts}) == len(expected)

    # the columns as they are read, the layers that have paths, and what is said
    names = [label.get_text().split("\n") for label in axes.get_xticklabels()]
    assert names[:3] == [["A = $x_{0}$", "1a"], ["B = $x_{1}$", "1b"], ["relay", "1b+1"]]
    assert [name for _, name in names[3:]] == ["2b", "2a", "q"]
    heights = [label.get_text() for label in axes.get_yticklabels()]
    assert heights == ["input", "after layer 2", "after layer 6"]
    said = "mixed, seed 0, step 40: circuit, not certified.*64 seq.*position, uniform.*: identity$"
    assert re.search(said, axes.get_title(), re.DOTALL)


def emergence(steps, losses, *means):
    """Of two paths of MIXED with these mean attentions."""
    paths = Path(0, 0, Place(2), Place(1)), Path(1, 0, Place(0), Place(2, 1))
    histories = [History(mean, mean, mean, mean, losses) for mean in means]
    return Emergence(32, steps, losses, dict(zip(paths, histories, strict=True)), {})


def test_a_path_that_was_not_measured_is_not_said_to_emerge_never(whole, drawn):
    measured = emergence([0, 100], dict(x_1=[1, 0]), [0, 1], [0, 0.2])
    paths = [*measured.paths, Path(1, 0, Place(4), Place(3))]
    analyze.draw_emergence(run_of(whole, MIXED, paths)._replace(emergence=measured), None)
    assert {text.get_text() for text in drawn[0].axes[1].texts} == {"50", "never", "not measured"}


def test_the_film(whole, tmp_path, monkeypatch):
    """Its frames, their titles and how long it takes, against what was put in."""
    losses = dict(x_1=[1.0] * 20 + [0.3] * 20 + [0.6] * 20, x_2=[0.9] * 40 + [0.3] * 20)
    rising, titles = [k / 60 for k in range(60)], []
    measured = emergence([*range(0, 600, 10)], losses, rising, rising)
    monkeypatch.setattr(plt.Axes, "set_title", lambda axes, text, **how: titles.append(text))
    film.draw_film(run_of(whole, MIXED)._replace(emergence=measured), tmp_path / "film.gif")

    # the title of each frame
    known = dict(re.findall(r"Step (\d+): .* knows (.*)", "\n".join(titles)))
    assert len(known) > 20 and {"0", "200", "400", "590"} <= known.keys()
    for step, names in known.items():
        assert names == ["nothing", "$x_{1}$", "$x_{2}$"][int(step) // 200], step

    # how long and how large; the columns, light gray, are in the first frame, the relay's too
    assert (tmp_path / "film.gif").stat().st_size < 1e6
    with Image.open(tmp_path / "film.gif") as moving:
        upper = numpy.asarray(moving.convert("RGB")).astype(int)[: moving.height // 2]
        gray = (abs(upper - 211) < 20).all(-1).mean(0) > 0.4
        assert (numpy.diff(gray.astype(int)) == 1).sum() == len(MIXED.roles) + 1
        assert (upper[:, 0] > 240).all()  # nothing is cut off
        shown = [moving.seek(k) or moving.info["duration"] for k in range(moving.n_frames)]
    assert 3000 < sum(shown) <= 6000
