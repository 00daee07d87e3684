"""Figures of one run: what they show, also for tasks with other roles."""

import itertools
import re
import shutil

import matplotlib.pyplot as plt
import pytest
import torch

import analyze
import train
from ablate import End, Path, to_row
from extras.pages import film, information
from model import Transformer
from tests.common import assert_refused, run_main
from tests.other_tasks import MIXED, TASKS, sequences_of, write_circuit


def run_of(folder, task, paths=(), heads=1):
    """An untrained Run of two layers; its sequences are not those of its flags."""
    torch.manual_seed(0)
    flags = train.parse_flags(["--D", "2", "--device", "cpu"]).replace(layers=2, heads=heads)
    model = Transformer(task.T, task.N, 4, 8, layers=2, heads=heads, width=32, head_size=8).eval()
    report = dict(
        validated=False,
        attention_sequences=256,
        sequences=64,
        worst="x_2",
        faithful=dict(x_2=[0.5, 0.4, 0.6]),
    )
    paths = {path: dict(attention=0.9 - path.layer / 10) for path in paths}
    return analyze.Run(folder, model, flags, task, train.read_log(folder), report, paths, {})


PATHS = Path(0, 0, End(2), End(1)), Path(1, 0, End(0), End(2, 1))


def emergence_of(steps, losses, *means):
    """What emergence.json holds of PATHS, of the task MIXED, with these mean attentions."""
    rows = [to_row(path, MIXED) | dict(mean=mean) for path, mean in zip(PATHS, means, strict=True)]
    return dict(sequences=32, steps=steps, losses=losses, paths=rows)


def test_every_figure_leaves_its_file_or_says_why_not(whole, tmp_path):
    run, tables = tmp_path / "run", [analyze.FIGURES]
    shutil.copytree(whole, run)

    def draw(says):
        names = [name for table in tables for name in table]
        code, out, err = run_main(analyze, run)
        assert code == 0 and out.split("\n")[: len(names)] == [f"{run / name}" for name in names]
        assert says in out, err
        for name in names:
            assert (run / name).read_bytes().startswith(b"\x89PNG"), name

    draw(f"run python ablate.py {run} first")
    (run / "circuit.json").write_text('{"verdict": "no circuit: x", "paths": []}')
    draw("no circuit to draw: no circuit: x")
    write_circuit(run, (0, 0, "1b", "1a", 0.9), (0, 1, "1b+1", "1b", 0.7), (1, 0, "q", "1b+1", 0.8))
    tables += [analyze.CIRCUIT_FIGURES, analyze.EMERGENCE_FIGURES]
    draw("paths.png")


def test_what_cannot_be_analyzed_is_refused_in_one_line(whole, tmp_path):
    assert_refused(analyze, tmp_path, says="is no run directory")
    shutil.copytree(whole, tmp_path / "run")
    assert_refused(film, whole, says="has no emergence.json")


# ---- tasks with other roles


@pytest.mark.parametrize("name", TASKS)
def test_attention_maps_of_any_task(name, whole, monkeypatch):
    """Token names, block lines and the mark of the head with a path, against the batch."""
    task, batch = TASKS[name], sequences_of(TASKS[name], 1)
    borders = [-0.5, 5.5] if name == "triples" else [-0.5, 3.5, 7.5]
    monkeypatch.setattr(analyze, "sequences", lambda flags, index: batch)
    run = run_of(whole, task, [Path(1, 0, End(0), End(2))], heads=2)
    *grid, _ = analyze.draw_attention_maps(run).axes  # without the colour bar
    assert [axes.get_title() for axes in grid] == ["L0H0", "L0H1", "L1H0", "L1H1"]
    colors = [axes.title.get_color() for axes in grid]
    assert colors == ["black", "black", analyze.CIRCUIT, "black"]
    for axes in grid:
        across = [line.get_ydata()[0] for line in axes.lines if line.get_xdata()[0] == 0]
        upward = [line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] == 0]
        assert across == upward == borders
    texts = [label.get_text() for label in grid[0].get_yticklabels(minor=True)]
    for n, (number, role) in itertools.product(range(task.N), enumerate(task.roles)):
        assert texts[batch.positions[0, n, number]] == f"{'ABC'[role.symbol]}{n + 1}"


@pytest.mark.parametrize("name", TASKS)
def test_information_before_any_layer_is_lemma_2(name, whole, monkeypatch):
    """Each role holds its own symbol and no other, and is drawn so; no hook is left; layers that
    share weights are as many as layers that do not."""
    run, batch = run_of(whole, TASKS[name]), sequences_of(TASKS[name], 256)
    monkeypatch.setattr(train, "sequences", lambda flags, index: batch)
    scores = information.information(run.model, run.task, batch, 4)
    shown = torch.tensor([role.symbol for role in run.task.roles])
    shows = shown[:, None] == torch.arange(run.task.symbols)
    assert scores.shape == (3, *shows.shape)
    assert (scores[0][shows] > 0.99).all() and (scores[0][~shows] < 0.1).all(), scores[0]
    assert not any(module._forward_hooks for module in run.model.modules())
    grid = information.draw_information_map(run, n=128).axes[: len(run.task.roles)]
    assert [axes.get_title() for axes in grid] == run.task.names
    shown = torch.stack([torch.tensor(axes.images[0].get_array()) for axes in grid], 1)
    torch.testing.assert_close(shown, scores)
    run.model.blocks = torch.nn.ModuleList([run.model.blocks[0]] * 4)
    assert len(information.residual_streams(run.model, batch.inputs)) == 5


# ---- the diagram of a circuit, and its emergence


def test_arrows_point_from_the_attended_token_to_the_token_that_reads_it(whole):
    (q, a1, b1, a2, b2), intermediate = map(End, range(5)), End(2, 1)
    expected = {  # where an arrow begins and ends, and its label; the columns are those below
        Path(1, 0, b2, a2): ((4, 0), (3, 1), "H0: 0.80"),
        Path(1, 1, intermediate, b1): ((1, 0), (2, 1), "H1: 0.80"),
        Path(5, 0, q, b1): ((1, 1), (5, 2), "H0: 0.40"),
        Path(5, 1, q, b1): ((1, 1), (5, 2), "H1: 0.40"),
        Path(5, 0, a1, a2): ((4, 1), (0, 2), "H0: 0.40"),
    }
    figure = analyze.draw_circuit(run_of(whole, MIXED, expected))
    (axes,) = figure.axes
    drawn = [arrow._posA_posB for arrow in axes.patches]
    drawn = [(*ends, text.get_text()) for ends, text in zip(drawn, axes.texts, strict=True)]
    assert sorted(drawn) == sorted(expected.values())
    arrows = {(*arrow._posA_posB, arrow.get_connectionstyle().rad) for arrow in axes.patches}
    assert len(arrows) == len({text.get_position() for text in axes.texts}) == len(expected)

    # the columns in reading order, the layers that have paths, and the caption
    names = [label.get_text().split("\n")[1] for label in axes.get_xticklabels()]
    assert names == ["1a", "1b", "1b+1", "2b", "2a", "q"]
    heights = [label.get_text() for label in axes.get_yticklabels()]
    assert heights == ["input", "after L1", "after L5"]
    text = figure.get_suptitle() + axes.get_title()
    assert (
        "2 layers x 1 head, D=2, seed 0, step 40" in text
        and "not validated" in text
        and "0.500" in text
    )


def test_a_path_that_was_not_measured_is_not_said_to_emerge_never(whole):
    known = emergence_of([0, 100], dict(x_1=[1, 0]), [0, 1], [0, 0.2])
    run = run_of(whole, MIXED, [*PATHS, Path(1, 0, End(4), End(3))])
    texts = analyze.draw_emergence(run._replace(emergence=known)).axes[1].texts
    assert {text.get_text() for text in texts} == {"50", "never", "not measured"}


def test_the_film_names_what_is_learned_in_each_frame(whole, tmp_path, monkeypatch):
    losses = dict(x_1=[1.0] * 20 + [0.3] * 20 + [0.6] * 20, x_2=[0.9] * 40 + [0.3] * 20)
    rising, titles = [k / 60 for k in range(60)], []
    known = emergence_of([*range(0, 600, 10)], losses, rising, rising)
    monkeypatch.setattr(plt.Axes, "set_title", lambda axes, text, **how: titles.append(text))
    film.draw_film(run_of(whole, MIXED)._replace(emergence=known), tmp_path / "film.gif")
    learned = dict(re.findall(r"Step (\d+): .* learned (.*)", "\n".join(titles)))
    assert len(learned) > 20 and {"0", "200", "400", "590"} <= learned.keys()
    for step, names in learned.items():
        assert names == ["nothing", "$x_{1}$", "$x_{2}$"][int(step) // 200], step
    assert (tmp_path / "film.gif").read_bytes().startswith(b"GIF89a")
