"""How paths emerged, when a curve passes a level, and what figures show."""

import shutil

import analyze
import train
from ablate import Path, mean_attention, paths_in, record_reads
from data import Task
from tests.planted import paths_from

import matplotlib
import numpy
import pytest


def test_emergence_is_the_attention_at_each_checkpoint(whole):
    paths = [Path(0, 0, "1b", "1a"), Path(0, 1, "q", "1b"), Path(1, 0, "q+1", "1b*")]
    known, task = analyze.measure_emergence(whole, paths), train.task_of(train.read_flags(whole))
    assert known["steps"] == [0, 20, 40] and [*paths_in(known)] == paths
    batch = task.draw("emergence", 32)
    for number, step in enumerate(known["steps"]):
        reads = record_reads(train.load(whole, f"ckpt/{step:06d}.pt")[0], batch.inputs)
        for path, row in zip(paths, known["paths"], strict=True):
            attention = mean_attention(reads[path[:2]][0], path, task, batch.places).item()
            assert row["mean"][number] == pytest.approx(attention, abs=6e-5)


def test_steps_are_where_an_interpolated_curve_first_passes_a_level():
    """Against each of its points; of a loss this is half of the plateau."""
    generator, steps, points = numpy.random.default_rng(0), [0, 10, 40, 100], numpy.arange(0, 101)
    path = Path(0, 0, "q", "1b")
    for _ in range(50):
        curve = generator.random(4)
        above = points[numpy.interp(points, steps, curve) >= 0.5]
        row = path._asdict() | dict(mean=[*curve])
        emerged = analyze.emergence_steps(dict(steps=steps, paths=[row]))[path]
        log = [dict(step=step, x_1=1 - x) for step, x in zip(steps, curve, strict=True)]
        for step in emerged, analyze.crossings(log, Task(D=1))["x_1"]:
            assert ([] if step is None else [numpy.ceil(step)]) == [*above[:1]]


def report_of(paths):
    """A report of ablate.py on these paths."""
    rows = [dict(path._asdict(), attention=0.5, without=dict(x_1=0.7)) for path in paths]
    return dict(verdict="validated", ablation="mean", mean=dict(x_1=0.5), sequences=9, paths=rows)


def test_red_are_the_reads_of_a_later_pair_and_stars_are_dashed():
    """Of these, 2b alone gets a symbol beyond its own pair."""
    flags = train.parse_flags("--D 3 --device cpu".split())
    paths = paths_from("0 1b 1a", "0 2b 2a", "0 3b 3a", "1 2b 3b", "1 q 1b", "1 q 1a*", "3 q 2b")
    texts = analyze.draw_circuit(flags, report_of(paths), {}).axes[0].texts
    arrows = [text.arrow_patch for text in texts if getattr(text, "arrow_patch", None)]
    colors = [matplotlib.colors.to_hex(arrow.get_edgecolor()) for arrow in arrows]
    dashed = [arrow.get_linestyle() == "--" for arrow in arrows]
    assert len(arrows) == 7 and colors.count(analyze.RED) == sum(dashed) == 1


def test_maps_name_the_tokens_that_have_the_roles():
    flags = train.parse_flags("--layers 2 --heads 2 --width 16 --D 2 --device cpu".split())
    model, task = train.build(flags), train.task_of(flags)
    first = analyze.draw_attention_maps(model, flags, [Path(1, 0, "q", "1b")]).axes[0]
    batch = task.draw("validation", 1)
    names = [label.get_text() for label in first.get_xticklabels()]
    assert names == ["q", "1a", "1b", "2a", "2b"] * task.N
    tokens = batch.places[0].flatten()
    pattern, _ = record_reads(model, batch.inputs)[1, 0]
    expected = pattern[0][tokens][:, tokens].numpy()
    assert numpy.allclose(first.images[0].get_array(), expected)
    frames = {tuple(map(round, point)) for point in first.lines[-1].get_xydata()}
    assert frames == {(n * 5 + 2, n * 5) for n in range(task.N)}


def test_emergence_of_another_circuit_is_not_drawn(tmp_path, whole):
    """Where checkpoints are gone, what they gave once is there for one circuit alone."""
    run, measured, other = tmp_path / "run", paths_from("1 q 1b"), paths_from("1.1 q 1b")
    shutil.copytree(whole, run)
    train.write_file(run / "emergence.json", analyze.measure_emergence(run, measured))
    shutil.rmtree(run / "ckpt")
    for paths, drawn in (measured, True), (other, False):
        train.write_file(run / "circuit.json", report_of(paths))
        assert ("emergence.png" in dict(analyze.figures_of(run))) == drawn
