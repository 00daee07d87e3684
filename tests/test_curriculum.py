"""Runs that are asked for different symbols: counted and drawn against logs made by hand."""

import json

from parts import config
from parts.config import SETTINGS

import pytest

import train
from studies import by_kind, curriculum
from tests.common import assert_refused, run_main


def write_run(folder, flags, **losses):
    """A run directory with a row every 100 steps; losses: a list for each symbol."""
    folder.mkdir()
    made = train.parse_flags([*flags.split(), "--device", "cpu"])
    settings = {name: getattr(made, name) for name in SETTINGS}
    (folder / "config.json").write_text(json.dumps(settings))
    rows = []
    for number, values in enumerate(zip(*losses.values(), strict=True)):
        symbols = dict(zip(losses, values, strict=True))
        row = dict(step=100 * number, seconds=1, lr=0.1, train=1.0, val=sum(values) / len(values))
        rows.append(json.dumps(row | symbols))
    (folder / "log.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def made(tmp_path):
    first = write_run(tmp_path / "first", "--targets 1", x_1=[1, 0.6, 0.4, 0.1])
    staged = f"--targets 1 2 --init {first}"
    return [
        write_run(tmp_path / "a", "--targets 1 3", x_1=[1, 0.8, 0.2], x_3=[1, 0.9, 0.8]),
        write_run(tmp_path / "b", "--targets 1 3 --seed 1", x_1=[1, 0.4, 0.2], x_3=[1, 0.6, 0.1]),
        write_run(tmp_path / "c", staged, x_1=[0.1, 0.1], x_2=[1, 0.0]),
        write_run(tmp_path / "d", f"--init {tmp_path / 'c'}", x_1=[0.1], x_2=[0.1], x_3=[1]),
    ]


def test_runs_are_grouped_and_counted(made):
    groups = list(by_kind(map(curriculum.facts, made)).values())
    assert [len(group) for group in groups] == [2, 1, 1]
    assert curriculum.cell(groups[0], 1) == "2 of 2, step 117 (83\N{EN DASH}150)"
    assert curriculum.cell(groups[0], 3) == "1 of 2, step 120"
    assert curriculum.cell(groups[0], 2) == ""
    labels = [group[0]["label"] for group in groups]
    assert labels[0] == "x_1, x_3"


def test_what_lies_above_a_missing_rung(made):
    """Of a and b, asked for x_1 and x_3, b learned x_3; the others have no rung missing."""
    assert curriculum.without_a_rung(made) == (1, 2)


def test_stages_count_together(made):
    """x_1 was learned in the first stage, between the steps 100 and 200, x_2 in the second."""
    fact = curriculum.facts(made[3])
    assert fact["label"] == "x_1; then x_1, x_2; then x_1, x_2, x_3"
    assert fact["ends"] == [300, 400, 400]
    assert fact["learned"] == {1: pytest.approx(150), 2: pytest.approx(350), 3: None}


def test_the_figure_has_a_dot_per_run_and_symbol(made, tmp_path, monkeypatch):
    drawn, out = [], tmp_path / "out"
    monkeypatch.setattr(config, "save_figure", lambda figure, file: drawn.append(figure))
    code, said, err = run_main(curriculum, *made, "--out", out)
    assert code == 0 and said.count("\n| ") == 3 and str(out / "curriculum.png") in said, err
    (axes,) = drawn[0].axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    counts = {}
    for line, hollow in zip(dots[::2], dots[1::2], strict=True):
        counts[line.get_label()[4]] = len(line.get_xdata()), len(hollow.get_xdata())
        assert hollow.get_markerfacecolor() == "none" and all(x > 400 for x in hollow.get_xdata())
    assert counts == {"1": (4, 0), "2": (2, 0), "3": (1, 2)}  # learned, not at the end
    assert sorted(dots[2].get_xdata()) == [350, 350]  # of both runs that had this stage


def test_bad_input_is_refused(made, tmp_path):
    assert_refused(curriculum, tmp_path, says="is no run directory")
    other = write_run(tmp_path / "other", "--task conditional", x_1=[1], x_2=[1], x_3=[1])
    code, out, err = run_main(curriculum, made[0], other, "--out", tmp_path / "out")
    assert code == 2 and "draw each apart" in err and "| conditional" in out
