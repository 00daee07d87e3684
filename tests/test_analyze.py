"""How paths emerged, when a curve passes a level, and what figures show."""

import io
import itertools
import shlex
import shutil

import analyze
import sweep
import train
from ablate import Path, paths_in, read_report
from data import Task
from extras.lookup import Lookup
from tests.common import HERE

import matplotlib
import numpy
import pytest
import torch
from matplotlib.figure import Figure


RESULTS = HERE / "results"
COMMITTED = ["A", "B", "C", "D", "default_s0"]


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
        with torch.no_grad():
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, (readers, offset, read), row in zip(paths, ends, known["paths"], strict=True):
            given = []
            for i, n in itertools.product(range(32), range(task.N)):
                reader = readers[i, n] + offset
                targets = b[i] if read is None else read[i, n : n + 1]
                if reader < task.T:
                    pattern = patterns[path.layer][i, path.head]
                    given.append(sum(pattern[reader, token].item() for token in targets))
            assert len(given) == (32 if offset else 64)
            assert row["mean"][number] == pytest.approx(numpy.mean(given), abs=6e-5)


def test_checkpoints_are_sorted_by_number_and_other_files_are_none(tmp_path):
    steps = [0, 20, 999980, 1000000, 20000000]
    for name in [f"{step:06d}.pt" for step in steps] + ["best.pt", "000020.pt.7.tmp"]:
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        (tmp_path / "ckpt" / name).touch()
    assert [int(file.stem) for file in analyze.checkpoints_of(tmp_path)] == steps
    (tmp_path / "ckpt" / "20_old.pt").touch()
    with pytest.raises(ValueError, match="20_old"):
        analyze.checkpoints_of(tmp_path)


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


def test_arrows_of_many_heads_are_apart():
    """Those of 16 heads in one layer, from three kinds of tokens: no label hides another."""
    flags = train.parse_flags("--D 1 --layers 1 --heads 16 --device cpu".split())
    paths = [Path(0, head, "q", ["1b", "1b*", "1a"][head % 3]) for head in range(16)]
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    looks = dict.fromkeys(paths, ([("0.50", "white")], analyze.RED, 1))
    analyze.draw_diagram(axes, flags, looks)
    labels = [text for text in axes.texts if text.get_text()[:1] in ("H", "0")]
    expected = ["0.50"] * 16 + [f"H{head}" for head in range(16)]
    assert sorted(label.get_text() for label in labels) == sorted(expected)
    assert_apart(figure, labels)
    arrows = [text.arrow_patch for text in axes.texts if getattr(text, "arrow_patch", None)]
    styles = [arrow.get_linestyle() for arrow in arrows]
    assert styles.count("--") == 5 and styles.count("-") == 11


def assert_apart(figure, texts):
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in texts]
    assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))


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
        assert {"88", text} <= {*texts} and any("Learned at step: x_1 75." in t for t in texts)


# ---- losses


def log_of(steps, **losses):
    """The rows of a log."""
    rows = []
    for step, *values in zip(steps, *losses.values(), strict=True):
        row = dict(step=step, train=None, val=max(values))
        rows.append(row | dict(zip(losses, values, strict=True)))
    return rows


def test_curves_end_after_learning_or_with_the_run():
    """At half as many steps again and one evaluation; with the run if a target is not learned."""
    flags = train.parse_flags("--D 2 --eval-every 10 --device cpu".split())
    for x_2, end in ([1, 0, 0, 0], 85), ([1, 1, 1, 0.4], 1000), ([1, 1, 1, 1], 1000):
        log = log_of([0, 100, 200, 1000], x_1=[1, 0, 0, 0], x_2=x_2)
        figure = analyze.draw_curves(flags, log)
        assert figure.axes[1].get_xlim() == (0, end)
        says = f"The run ended at step 1000, the axis on the right ends at {end}."
        assert any(says in text for text in texts_of(figure))


def test_a_plateau_above_the_axis_is_not_drawn():
    """Nothing stands above the axis but half of a name of a plateau at its top."""
    flags = train.parse_flags("--D 1 --device cpu".split())
    for highest in 1.2, 0.9, 0.5:
        figure = analyze.draw_curves(flags, log_of([0, 50], x_1=[highest, 0.1]))
        assert {"0.75: averages the\n4 candidates", "1: knows nothing"} <= {*texts_of(figure)}
        figure.draw_without_rendering()
        axes = figure.axes[1]
        assert axes.get_tightbbox().y1 < axes.get_window_extent().y1 + 20


@pytest.mark.parametrize("run", COMMITTED)
def test_red_are_the_reads_of_a_later_pair(run):
    flags, report = train.read_flags(RESULTS / run), read_report(RESULTS / run)
    red = (0.902, 0.224, 0.275)
    ahead = 0
    for path in paths_in(report):
        ahead += path.reader[0] < path.read[0] and path.reader != "q" and "+" not in path.reader
    figure = analyze.draw_circuit(flags, report, {})
    arrows = [text.arrow_patch for text in figure.axes[0].texts if hasattr(text, "arrow_patch")]
    colors = [arrow.get_edgecolor()[:3] for arrow in arrows if arrow]
    assert sum(color == pytest.approx(red, abs=0.01) for color in colors) == ahead > 0


@pytest.mark.parametrize(
    "task, D",
    [("chain", 3), ("extras.studies.tables:Shuffled", 2), ("extras.studies.places:random20", 1)],
)
def test_maps_name_the_tokens_that_have_the_roles(task, D):
    words = f"--layers 2 --heads 2 --width 16 --task {task} --D {D} --device cpu"
    flags = train.parse_flags(words.split())
    model, task = train.build(flags), train.task_of(flags)
    figure = analyze.draw_attention_maps(model, flags, [Path(1, 0, "q", "1b")])
    batch = task.draw("validation", 1)
    with torch.no_grad():
        _, patterns = model(batch.inputs, return_patterns=True)
    tokens, roles = batch.places[0].flatten().tolist(), [*task.roles]

    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["L1H0", "L0H0", "L0H1", "L1H1", "", ""]
    large = figure.axes[0]  # that of the path
    names = [label.get_text() for label in large.get_xticklabels()]
    assert names == [label.get_text() for label in large.get_yticklabels()]
    assert names == roles * task.N
    assert roles == ["q", *(f"{k}{side}" for k in range(1, D + 1) for side in "ab")]
    shown = large.images[0].get_array()
    expected = patterns[1][0, 0][tokens][:, tokens].numpy()
    assert shown.shape == expected.shape and numpy.allclose(shown, expected)
    frames = {tuple(map(round, point)) for point in large.lines[-1].get_xydata()}
    assert frames == {(n * len(roles) + 2, n * len(roles)) for n in range(task.N)}


def test_names_of_tokens_are_apart_or_left_out():
    """Of 36 tokens, as D of the paper has, and of 150, which would take minutes."""
    for words, names in ("--layers 4 --D 4", 36), ("--layers 8 --heads 4 --D 7 --N 10", 0):
        flags = train.parse_flags(f"{words} --width 32 --device cpu".split())
        figure = analyze.draw_attention_maps(train.build(flags), flags, [Path(1, 0, "q", "1b")])
        first, *_, last = [axes for axes in figure.axes if axes.get_title()]
        assert first.get_title() == "L1H0"
        texts = [*first.get_xticklabels(), *first.get_yticklabels(), last.title]
        assert len(texts) == 2 * names + 1
        assert_apart(figure, texts)


class Odd(Lookup):
    """A lookup with names that matplotlib could read as mathematics."""

    def __post_init__(self):
        super().__post_init__()
        self.target_names, self.labels = ["$a_b$c$^"], ["$x$", *self.labels[1:]]
        for slot in self.slots[: -self.N]:
            slot.shows["$1_a$"] = slot.shows.pop("1a")


def test_figures_of_a_task_of_ones_own_say_nothing_that_is_only_true_of_chains(tmp_path):
    words = "--D 1 --layers 2 --width 16 --task tests.test_analyze:Odd --device cpu".split()
    flags = train.parse_flags([*words, "--out", str(tmp_path / "$x_{$")])
    paths = Path(0, 0, "1b", "$1_a$"), Path(1, 0, "q", "1b*")
    rows = [dict(path._asdict(), attention=0.5, without=dict(a=1), mean=[0.1]) for path in paths]
    report = dict(verdict="validated", ablation="mean", mean=dict(a=0.5), sequences=9, paths=rows)
    for figure in (
        analyze.draw_curves(flags, log_of([0, 50], **{"$a_b$c$^": [4, 1]})),
        analyze.draw_attention_maps(train.build(flags), flags, paths),
        analyze.draw_circuit(flags, report, {}),
        analyze.draw_emergence(flags, report | dict(steps=[0]), log_of([0], **{"$a_b$c$^": [4]})),
        analyze.draw_paths(flags, report | dict(steps=[0])),
    ):
        figure.draw_without_rendering()  # raises an error if it cannot read what it reads as such
        texts = figure.findobj(matplotlib.text.Text)
        for text in texts:
            assert "chain" not in text.get_text() and "candidates" not in text.get_text()
            math = text.get_parse_math() and matplotlib.cbook.is_math_text(text.get_text())
            assert not math or "mathdefault" in text.get_text(), text  # a number of a log axis
        [command] = [text.get_text() for text in texts if "train.py" in text.get_text()]
        command = command[command.index("python train.py") :].replace("\\\n", " ")
        again = train.parse_flags(shlex.split(command)[2:])
        assert train.values_of(again) == train.values_of(flags)


def test_an_index_of_two_digits_is_one_index():
    for name, shown in ("x_12", "$x_{12}$"), ("x_a", "x_a"), ("ax_1", "ax_1"), ("$", r"\$"):
        assert analyze.shown_name(name) == shown


def test_what_is_missing_for_emergence_is_said_in_one_line(tmp_path, whole, capsys):
    """Checkpoints, or those and a report of this circuit."""
    run = shutil.copytree(whole, tmp_path / "run")
    rows = [dict(layer=1, head=0, reader="q", read="1b", attention=0.5, without=dict(x_1=0.7))]
    report = dict(verdict="validated", ablation="mean", mean=dict(x_1=0.5), sequences=9, paths=rows)
    train.write_file(run / "circuit.json", report)
    assert "emergence.png" in dict(analyze.figures_of(run)) and capsys.readouterr().out == ""
    shutil.rmtree(run / "ckpt")
    assert "emergence.png" in dict(analyze.figures_of(run)) and capsys.readouterr().out == ""
    train.write_file(run / "circuit.json", report | dict(paths=[rows[0] | dict(head=1)]))
    assert "emergence.png" not in dict(analyze.figures_of(run))
    out = capsys.readouterr().out
    assert "emergence.json is of another circuit, and" in out and out.count("\n") == 1
    (run / "emergence.json").unlink()
    assert "emergence.png" not in dict(analyze.figures_of(run))
    out = capsys.readouterr().out
    assert "no checkpoints (train.py --save-every)" in out and out.count("\n") == 1


# ---- committed pictures


def drawn_by(picture):
    """Return the matplotlib that drew a PNG, as it says in it."""
    data = picture.read_bytes()
    start = data.index(b"Matplotlib version") + len("Matplotlib version")
    return data[start : data.index(b",", start)].decode()


def assert_is_drawn(picture, figure):
    """The pixels of a committed picture are those of today's figure; steps of an 8-bit color may
    differ by a few, as the last bits of two processors do."""
    if drawn_by(picture) != matplotlib.__version__:
        pytest.skip(f"{picture.name} was drawn by matplotlib {drawn_by(picture)}")
    file = io.BytesIO()
    figure.savefig(file, dpi=130)
    file.seek(0)
    today, committed = matplotlib.image.imread(file), matplotlib.image.imread(picture)
    name = picture.relative_to(HERE)
    assert today.shape == committed.shape, f"{name} is not what the code draws: {today.shape}"
    differ = (abs(today - committed).max(2) > 0.1).sum()
    assert differ == 0, f"{name} is not what the code draws: {differ} pixels differ"


@pytest.mark.parametrize("run", COMMITTED)
def test_committed_pictures_of_runs_are_what_the_code_draws(run, monkeypatch):
    """All but the attention maps, which take as long as all others together, of all but A. In the
    dtype of the training, which is that of the picture."""
    monkeypatch.setattr(train, "native_dtype", lambda device: "bfloat16")
    for name, figure in analyze.figures_of(RESULTS / run):
        picture = RESULTS / run / name
        if picture.exists() and (name != "attention_maps.png" or run == "A"):
            assert_is_drawn(picture, figure)


def test_the_committed_figure_4_is_what_the_code_draws():
    rows = train.read_file(RESULTS / "sweep/results.jsonl")
    rows = [train.DEFAULTS | row for row in rows]
    assert_is_drawn(RESULTS / "sweep/figure4.png", sweep.figure_4(rows))
