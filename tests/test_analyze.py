"""Figures of one run: what they show, also for tasks with other roles; and how paths emerged."""

import itertools

import analyze
import train
from ablate import Path, attention_on, paths_in
from data import held_out
from model import Transformer
from tests.other_tasks import MIXED, TRIPLES, sequences_of

import pytest
import torch


def flags_of(task, **changes):
    """Flags whose problem is this task, with positions left to the model."""

    class Mine(train.Flags):
        problem = task

    flags = train.parse_flags(["--D", "2", "--device", "cpu", "--layers", "2"])
    return Mine(**{**vars(flags), **changes})


@pytest.mark.parametrize("task, borders", [(TRIPLES, [0, 6]), (MIXED, [0, 4, 8])])
def test_attention_maps_of_any_task(task, borders, monkeypatch):
    """Patterns in the run's dtype, token names, lines of blocks, the mark of a head with a path."""
    batch, flags = sequences_of(task, 1), flags_of(task, heads=2)
    torch.manual_seed(0)
    model = Transformer(task.T, task.N, 4, 8, layers=2, heads=2, width=32, head_size=8).eval()
    monkeypatch.setattr(train, "sequences", lambda flags, index: batch)
    figure = analyze.draw_attention_maps(model, flags, [Path(1, 0, "q", "1b")])
    *grid, _ = figure.axes  # without the colour bar
    assert [axes.get_title() for axes in grid] == ["L0H0", "L0H1", "L1H0", "L1H1"]
    colors = [axes.title.get_color() for axes in grid]
    assert colors == ["black", "black", analyze.CIRCUIT, "black"]
    with torch.no_grad(), train.precision(flags):
        patterns = torch.cat(model(batch.inputs, return_patterns=True)[1], 1)[0]
    for axes, pattern in zip(grid, patterns, strict=True):
        assert torch.equal(torch.tensor(axes.images[0].get_array()), pattern.float())
        across = [line.get_ydata()[0] for line in axes.lines if line.get_xdata()[0] == 0]
        assert across == [border - 0.5 for border in borders]
    texts = [label.get_text() for label in grid[0].get_yticklabels()]
    for n, (number, role) in itertools.product(range(task.N), enumerate(task.roles)):
        symbol = "ABC"[task.roles[role]]
        assert texts[batch.positions[0, n, number]] == f"{role} {symbol}{n + 1}"


def test_arrows_point_from_the_attended_token_to_the_token_that_reads_it():
    expected = {  # where an arrow begins and ends, and its label; the columns are those below
        Path(1, 0, "2b", "2a"): ((4, 0), (3, 1), "H0: 0.80"),
        Path(1, 1, "1b+1", "1b"): ((1, 0), (2, 1), "H1: 0.80"),
        Path(5, 0, "q", "1b"): ((1, 1), (5, 2), "H0: 0.40"),
        Path(5, 1, "q", "1b*"): ((1, 1), (5, 2), "H1: 0.40"),
        Path(5, 0, "1a", "2a"): ((4, 1), (0, 2), "H0: 0.40"),
    }
    rows = [path._asdict() | dict(attention=0.9 - path.layer / 10) for path in expected]
    report = dict(validated=False, sequences=64, mean=dict(x_2=0.5), paths=rows)
    figure = analyze.draw_circuit(flags_of(MIXED), report)
    (axes,) = figure.axes
    arrows = [text for text in axes.texts if not text.get_text()]
    labels = [text for text in axes.texts if text.get_text()]
    drawn = [
        (arrow.xyann, arrow.xy, label.get_text())
        for arrow, label in zip(arrows, labels, strict=True)
    ]
    assert sorted(drawn) == sorted((*ends, label) for *ends, label in expected.values())
    assert [arrow.arrow_patch.get_linestyle() for arrow in arrows].count("--") == 1  # the star
    assert len({text.get_position() for text in labels}) == len(expected)

    # the columns in reading order, the layers that have paths, and the caption
    names = [label.get_text().split("\n")[1] for label in axes.get_xticklabels()]
    assert names == ["1a", "1b", "1b+1", "2b", "2a", "q"]
    heights = [label.get_text() for label in axes.get_yticklabels()]
    assert heights == ["input", "after L1", "after L5"]
    for said in "mixed", "not validated", "x_2 0.500":
        assert said in figure.get_suptitle()


def test_emergence_is_the_attention_at_each_checkpoint(whole):
    paths = [Path(0, 0, "1b", "1a"), Path(0, 1, "q", "1b"), Path(1, 0, "q", "1b+1")]
    known, flags = analyze.measure_emergence(whole, paths), train.read_flags(whole)
    assert known["steps"] == [0, 20, 40] and [*paths_in(known)] == paths
    batch = train.sequences(flags, held_out("emergence", 32))
    for number, step in enumerate(known["steps"]):
        model, flags = train.load(whole, f"ckpt/{step:06d}.pt")
        with torch.no_grad(), train.precision(flags):
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in paths_in(known).items():
            pattern = patterns[path.layer][:, path.head]
            given = attention_on(pattern, path, flags.problem, batch.positions).mean(1)  # (32,)
            low, high = given.quantile(torch.tensor([0.1, 0.9]))
            for name, value in dict(mean=given.mean(), low=low, high=high).items():
                assert row[name][number] == pytest.approx(value.item(), abs=6e-5), name


def test_steps_are_interpolated():
    means = [0.1, 0.2, 0.8], [0, 0.2, 0.1]
    paths = Path(0, 0, "1b", "1a"), Path(1, 0, "q", "1b+1")
    rows = []
    for path, mean in zip(paths, means, strict=True):
        rows.append(path._asdict() | dict(mean=mean, low=mean, high=mean))
    known = dict(sequences=32, steps=[0, 100, 200], paths=rows)
    assert [*analyze.emergence_steps(known).values()] == [150.0, None]
    texts = analyze.draw_emergence(flags_of(MIXED), known).axes[0].texts
    assert {text.get_text() for text in texts} >= {"150", "never"}
