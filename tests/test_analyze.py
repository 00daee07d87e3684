"""How paths emerged, when a curve passes a level, and what figures show."""

import itertools
import shutil

import analyze
import train
from ablate import Path, paths_in, record_reads
from data import Task
from tests.planted import paths_from

import matplotlib
import numpy
import pytest


def test_emergence_is_the_attention_at_each_checkpoint(whole):
    """Against a loop over the readers that are there: q+1 is behind the last token for one of the
    two queries."""
    paths = [Path(0, 0, "1b", "1a"), Path(0, 1, "q", "1b"), Path(1, 0, "q+1", "1b*")]
    known, flags = analyze.measure_emergence(whole, paths), train.read_flags(whole)
    assert known["steps"] == [0, 20, 40] and [*paths_in(known)] == paths
    task = train.task_of(flags)
    batch = task.draw("emergence", 32)
    q, a, b = batch.places.unbind(2)  # (32, N) each
    ends = [(b, 0, a), (q, 0, b), (q, 1, None)]  # reader, offset, what is read or all 1b
    for number, step in enumerate(known["steps"]):
        model, _, _ = train.load(whole, f"ckpt/{step:06d}.pt")
        reads = record_reads(model, batch.inputs)
        for path, (readers, offset, read), row in zip(paths, ends, known["paths"], strict=True):
            given = []
            for i, n in itertools.product(range(32), range(task.N)):
                reader = readers[i, n] + offset
                targets = b[i] if read is None else read[i, n : n + 1]
                if reader < task.T:
                    pattern = reads[path[:2]][0][i]
                    given.append(sum(pattern[reader, token].item() for token in targets))
            assert len(given) == (32 if offset else 64)
            assert row["mean"][number] == pytest.approx(numpy.mean(given), abs=6e-5)


def test_checkpoints_are_sorted_by_step(tmp_path):
    (tmp_path / "ckpt").mkdir()
    for step in 0, 20, 999980, 1000000:
        (tmp_path / f"ckpt/{step:06d}.pt").touch()
    assert [int(file.stem) for file in analyze.checkpoints_of(tmp_path)] == [0, 20, 999980, 10**6]


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


def texts_of(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_a_path_has_the_step_of_its_emergence_or_its_last_attention():
    flags = train.parse_flags("--D 1 --device cpu".split())
    rows = [dict(Path(0, 0, "1b", "1a")._asdict(), mean=[0, 0.2, 0.6, 0.9])]
    for last, text in (0.31, "(0.31)"), (0.55, "108"):
        rows[1:] = [dict(Path(1, 0, "q", "1b")._asdict(), mean=[0, 0.2, 0.45, last])]
        emergence = dict(sequences=32, steps=[0, 50, 100, 117], paths=rows)
        log = log_of([0, 50, 100], x_1=[1, 0.6, 0.4])  # of N = 4: learned below 0.5
        texts = texts_of(analyze.draw_emergence(flags, emergence, log))
        assert {"88", text} <= {*texts} and any("x_1 75." in t for t in texts)


# ---- losses


def log_of(steps, **losses):
    """The rows of a log."""
    rows = []
    for step, *values in zip(steps, *losses.values(), strict=True):
        row = dict(step=step, train=None, val=max(values))
        rows.append(row | dict(zip(losses, values, strict=True)))
    return rows


def test_red_are_the_reads_of_a_later_pair_and_stars_are_dashed():
    """Of these, 2b alone gets a symbol beyond its own pair."""
    flags = train.parse_flags("--D 3 --device cpu".split())
    paths = paths_from("0 1b 1a", "0 2b 2a", "0 3b 3a", "1 2b 3b", "1 q 1b", "1 q 1a*", "3 q 2b")
    rows = [dict(path._asdict(), attention=0.5, without=dict(x_1=0.7)) for path in paths]
    report = dict(verdict="validated", ablation="mean", mean=dict(x_1=0.5), sequences=9, paths=rows)
    texts = analyze.draw_circuit(flags, report, {}).axes[0].texts
    arrows = [text.arrow_patch for text in texts if getattr(text, "arrow_patch", None)]
    colors = [matplotlib.colors.to_hex(arrow.get_edgecolor()) for arrow in arrows]
    dashed = [arrow.get_linestyle() == "--" for arrow in arrows]
    assert len(arrows) == 7 and colors.count(analyze.RED) == sum(dashed) == 1


def test_maps_name_the_tokens_that_have_the_roles():
    """The heads of the circuit come first, with frames around its edges."""
    flags = train.parse_flags("--layers 2 --heads 2 --width 16 --D 2 --device cpu".split())
    model, task = train.build(flags), train.task_of(flags)
    figure = analyze.draw_attention_maps(model, flags, [Path(1, 0, "q", "1b")])
    batch, roles = task.draw("validation", 1), ["q", "1a", "1b", "2a", "2b"]
    tokens = batch.places[0].flatten().tolist()
    pattern, _ = record_reads(model, batch.inputs)[1, 0]

    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["L1H0", "L0H0", "L0H1", "L1H1", "", ""]
    large = figure.axes[0]  # that of the path
    names = [label.get_text() for label in large.get_xticklabels()]
    assert names == [label.get_text() for label in large.get_yticklabels()]
    assert names == roles * task.N
    shown = large.images[0].get_array()
    expected = pattern[0][tokens][:, tokens].numpy()
    assert shown.shape == expected.shape and numpy.allclose(shown, expected)
    frames = {tuple(map(round, point)) for point in large.lines[-1].get_xydata()}
    assert frames == {(n * len(roles) + 2, n * len(roles)) for n in range(task.N)}


def test_what_is_missing_for_emergence_is_said_in_one_line(tmp_path, whole, capsys):
    """Checkpoints, or those and a report of this circuit."""
    run = shutil.copytree(whole, tmp_path / "run")
    rows = [dict(layer=1, head=0, reader="q", read="1b", attention=0.5, without=dict(x_1=0.7))]
    report = dict(verdict="validated", ablation="mean", mean=dict(x_1=0.5), sequences=9, paths=rows)
    other = report | dict(paths=[rows[0] | dict(head=1)])
    for circuit, gone, drawn in (
        (report, [], True),
        (report, ["ckpt/000000.pt", "ckpt/000020.pt", "ckpt/000040.pt"], True),
        (other, [], False),
        (report, ["emergence.json"], False),
    ):
        train.write_file(run / "circuit.json", circuit)
        for name in gone:
            (run / name).unlink()
        assert ("emergence.png" in dict(analyze.figures_of(run))) == drawn
        out = capsys.readouterr().out
        assert out.count("\n") == (not drawn) and (drawn or "(train.py --save-every)" in out)
