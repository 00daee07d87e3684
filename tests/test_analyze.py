"""How paths emerged, when a curve passes a level, and what figures show."""

import io
import itertools

import analyze
import sweep
import train
from ablate import Path, paths_in, read_report
from data import Batch, Slot, Task
from tests.common import HERE, TINY, output_of

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
    looks = dict.fromkeys(paths, ("0.50", analyze.CIRCUIT, 1))
    figure = Figure(layout="constrained")
    drawn = analyze.draw_diagram(figure.subplots(), flags, looks)
    figure.draw_without_rendering()
    assert {label.get_text() for _, label in drawn.values()} == {f"H{h} 0.50" for h in range(16)}
    boxes = [label.get_window_extent() for _, label in drawn.values()]
    for box, other in itertools.combinations(boxes, 2):
        assert not box.overlaps(other)
    for path, (arrow, _) in drawn.items():
        assert arrow.get_linestyle() == ("--" if path.star else "-")


@pytest.mark.parametrize("run", COMMITTED)
def test_red_are_the_reads_of_a_later_pair(run):
    flags, report = train.read_flags(RESULTS / run), read_report(RESULTS / run)
    red = (0.902, 0.224, 0.275)
    ahead = 0
    for path in paths_in(report):
        ahead += path.reader[0] < path.read[0] and path.reader != "q" and "+" not in path.reader
    figure = analyze.draw_circuit(flags, report)
    arrows = [text.arrow_patch for text in figure.axes[0].texts if hasattr(text, "arrow_patch")]
    colors = [arrow.get_edgecolor()[:3] for arrow in arrows if arrow]
    assert sum(color == pytest.approx(red, abs=0.01) for color in colors) == ahead > 0


def roles_by_equality(tokens, task):
    """Return {role: token} for the chain of each query, by the equality of symbols (T, K) alone: a
    pair is a token and the next one."""
    pairs, chains = task.T - task.N, []
    for query in range(pairs, task.T):
        chain, symbol = {"q": query}, tokens[query]
        for k in range(1, task.D + 1):
            # of the tokens that show this symbol, the one that is not the second of the pair before
            same = [t for t in range(pairs) if torch.equal(tokens[t], symbol)]
            [first] = [t for t in same if t != chain.get(f"{k - 1}b")]
            chain |= {f"{k}a": first, f"{k}b": first + 1}
            symbol = tokens[first + 1]
        chains.append(chain)
    return chains


@pytest.mark.parametrize(
    "words",
    [
        "--D 3",
        "--D 2 --task extras.studies.tables:Shuffled",
        "--D 1 --task extras.studies.places:random20",
    ],
)
def test_maps_name_the_tokens_that_have_the_roles(words):
    flags = train.parse_flags(f"--layers 2 --heads 2 --width 16 --device cpu {words}".split())
    model, task = train.build(flags), train.task_of(flags)
    path = Path(1, 0, "q", "1b")
    figure = analyze.draw_attention_maps(model, flags, [path])
    batch = task.draw("validation", 1)
    with torch.no_grad():
        _, patterns = model(batch.inputs, return_patterns=True)
    chains = roles_by_equality(batch.inputs[0, :, : task.K], task)
    tokens = [chain[role] for chain in chains for role in task.roles]

    large, *small = figure.axes  # that of the path
    assert large.get_title() == "L1H0" and len(small) == 3
    names = [label.get_text() for label in large.get_xticklabels()]
    assert names == [label.get_text() for label in large.get_yticklabels()]
    assert names == [role for _ in chains for role in chain_roles(task)]
    shown = large.images[0].get_array()
    expected = patterns[1][0, 0][tokens][:, tokens].numpy()
    assert shown.shape == expected.shape and numpy.allclose(shown, expected)
    frames = {tuple(map(round, point)) for point in large.lines[-1].get_xydata()}
    found = {(tokens.index(chain["1b"]), tokens.index(chain["q"])) for chain in chains}
    assert frames == found


def chain_roles(task):
    return ["q", *(f"{k}{side}" for k in range(1, task.D + 1) for side in "ab")]


class Say(Task):
    """A task that is no chain, without roles: one query, which asks for the first of seven tokens,
    and for its negative."""

    def __post_init__(self):
        super().__post_init__()
        self.slots = [Slot(0, {str(number): number}) for number in range(7)]
        self.inputs, self.outputs, self.target_names = self.K, 2 * self.K, ["word", "negative"]

    def batch(self, size, rng):
        words = torch.from_numpy(rng.standard_normal((size, 7, self.K), dtype=numpy.float32))
        targets = torch.cat([words[:, :1], -words[:, :1]], 2)
        places, symbols = torch.empty(size, 1, 0), torch.arange(7).expand(size, 7)
        return Batch(words, targets, places.long(), symbols)


def test_a_task_without_roles_has_curves_and_maps_by_number(tmp_path):
    words = [*TINY, "--N", 1, "--task", "tests.test_analyze:Say", "--out", tmp_path / "run"]
    output_of(train, *words)
    out = output_of(analyze, tmp_path / "run")
    assert "curves.png" in out and "attention_maps.png" in out and "there is no circuit" in out
    model, _, flags = train.load(tmp_path / "run")
    axes = analyze.draw_attention_maps(model, flags, []).axes
    assert [label.get_text() for label in axes[0].get_xticklabels()] == [*"0123456"]
    labels = [
        text.get_text()
        for text in analyze.draw_curves(flags, train.read_log(tmp_path / "run"))
        .legends[0]
        .get_texts()
    ]
    assert "$word$" in labels and "$negative$" in labels


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
    rows = [train.DEFAULTS | row for row in rows if row["causal"]]
    assert_is_drawn(RESULTS / "sweep/figure4.png", sweep.figure_4(rows))
