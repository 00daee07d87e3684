"""How paths emerged, and when a curve passes a level."""

import analyze
import train
from ablate import Path, mean_attention, paths_in
from data import Task, held_out

import numpy
import pytest
import torch
from matplotlib.figure import Figure


def test_emergence_is_the_attention_at_each_checkpoint(whole):
    paths = [Path(0, 0, "1b", "1a"), Path(0, 1, "q", "1b"), Path(1, 0, "q", "1b+1")]
    known, flags = analyze.measure_emergence(whole, paths), train.read_flags(whole)
    assert known["steps"] == [0, 20, 40] and [*paths_in(known)] == paths
    batch = train.task_of(flags).batch(held_out("emergence", 32))
    for number, step in enumerate(known["steps"]):
        model, task, _ = train.load(whole, f"ckpt/{step:06d}.pt")
        with torch.no_grad():
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in paths_in(known).items():
            pattern = patterns[path.layer][:, path.head]
            given = mean_attention(pattern, path, task, batch.positions).item()
            assert row["mean"][number] == pytest.approx(given, abs=6e-5)


def test_steps_are_where_an_interpolated_curve_first_passes_a_level():
    """Against each of its points; of a loss this is half of the plateau."""
    task = Task(D=2)
    generator, steps, points = numpy.random.default_rng(0), [0, 10, 40, 100], numpy.arange(0, 101)
    for _ in range(50):
        curves, expected = generator.random((2, 4)), []
        for curve in curves:
            above = points[numpy.interp(points, steps, curve) >= 0.5]
            expected.append(above[0] if len(above) else None)
        rows = []
        for layer, curve in enumerate(curves):
            rows.append(Path(layer, 0, "q", "1b")._asdict() | dict(mean=[*curve]))
        found = [*analyze.emergence_steps(dict(steps=steps, paths=rows)).values()]
        log = []
        for step, x_1, x_2 in zip(steps, *curves, strict=True):
            log.append(dict(step=step, x_1=1 - x_1, x_2=1 - x_2))
        for given in found, [*analyze.crossings(log, task).values()]:
            assert [step if step is None else numpy.ceil(step) for step in given] == expected


def test_heads_that_read_the_same_have_an_arrow_each():
    flags = train.parse_flags("--D 1 --layers 1 --heads 3".split())
    paths = Path(0, 0, "q", "1b"), Path(0, 2, "q", "1b*"), Path(0, 1, "q", "1a")
    looks = dict.fromkeys(paths, ("0.50", analyze.CIRCUIT, 1))
    drawn = analyze.draw_diagram(Figure().subplots(), flags, looks)
    assert {label.get_text() for _, label in drawn.values()} == {"H0 0.50", "H1 0.50", "H2 0.50"}
    assert len({label.get_position() for _, label in drawn.values()}) == len(drawn) == 3
    assert [drawn[path][0].get_linestyle() for path in paths] == ["-", "--", "-"]
