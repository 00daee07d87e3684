"""Figures of one run: what they show, also for tasks with other roles; and how paths emerged."""

import itertools
import json
import shutil

import analyze
import train
from ablate import Path, attention_on, paths_in
from data import held_out
from model import Transformer
from tests.other_tasks import MIXED, TASKS, sequences_of, write_circuit

import pytest
import torch


def run_of(folder, task, paths=(), heads=1):
    """An untrained Run of two layers; its sequences are not those of its flags."""
    torch.manual_seed(0)
    flags = train.parse_flags(["--D", "2", "--device", "cpu"]).replace(layers=2, heads=heads)
    model = Transformer(task.T, task.N, 4, 8, layers=2, heads=heads, width=32, head_size=8).eval()
    report = dict(validated=False, path_sequences=256, sequences=64)
    report["mean"] = dict(x_2=[0.5, 0.4, 0.6])
    paths = {path: dict(attention=0.9 - path.layer / 10) for path in paths}
    return analyze.Run(folder, model, flags, task, train.read_log(folder), report, paths, {})


PATHS = Path(0, 0, "1b", "1a"), Path(1, 0, "q", "1b+1")


@pytest.mark.parametrize("name", TASKS)
def test_attention_maps_of_any_task(name, whole, monkeypatch):
    """Patterns in the run's dtype, token names, lines of blocks, the mark of a head with a path."""
    task, batch = TASKS[name], sequences_of(TASKS[name], 1)
    borders = [-0.5, 5.5] if name == "triples" else [-0.5, 3.5, 7.5]
    monkeypatch.setattr(analyze, "sequences", lambda flags, index: batch)
    run = run_of(whole, task, [Path(1, 0, "q", "1b")], heads=2)
    *grid, _ = analyze.draw_attention_maps(run).axes  # without the colour bar
    assert [axes.get_title() for axes in grid] == ["L0H0", "L0H1", "L1H0", "L1H1"]
    colors = [axes.title.get_color() for axes in grid]
    assert colors == ["black", "black", analyze.CIRCUIT, "black"]
    with torch.no_grad(), train.precision(run.flags):
        patterns = torch.cat(run.model(batch.inputs, return_patterns=True)[1], 1)[0]
    for axes, pattern in zip(grid, patterns, strict=True):
        assert torch.equal(torch.tensor(axes.images[0].get_array()), pattern.float())
        across = [line.get_ydata()[0] for line in axes.lines if line.get_xdata()[0] == 0]
        upward = [line.get_xdata()[0] for line in axes.lines if line.get_ydata()[0] == 0]
        assert across == upward == borders
    texts = [label.get_text() for label in grid[0].get_yticklabels(minor=True)]
    for n, (number, role) in itertools.product(range(task.N), enumerate(task.roles.values())):
        assert texts[batch.positions[0, n, number]] == f"{'ABC'[role]}{n + 1}"


def test_arrows_point_from_the_attended_token_to_the_token_that_reads_it(whole):
    expected = {  # where an arrow begins and ends, and its label; the columns are those below
        Path(1, 0, "2b", "2a"): ((4, 0), (3, 1), "H0: 0.80"),
        Path(1, 1, "1b+1", "1b"): ((1, 0), (2, 1), "H1: 0.80"),
        Path(5, 0, "q", "1b"): ((1, 1), (5, 2), "H0: 0.40"),
        Path(5, 1, "q", "1b*"): ((1, 1), (5, 2), "H1: 0.40"),
        Path(5, 0, "1a", "2a"): ((4, 1), (0, 2), "H0: 0.40"),
    }
    figure = analyze.draw_circuit(run_of(whole, MIXED, expected))
    (axes,) = figure.axes
    drawn = [arrow._posA_posB for arrow in axes.patches]
    drawn = [(*ends, text.get_text()) for ends, text in zip(drawn, axes.texts, strict=True)]
    assert sorted(drawn) == sorted(expected.values())
    assert [arrow.get_linestyle() for arrow in axes.patches].count("--") == 1  # the star
    assert len({text.get_position() for text in axes.texts}) == len(expected)

    # the columns in reading order, the layers that have paths, and the caption
    names = [label.get_text().split("\n")[1] for label in axes.get_xticklabels()]
    assert names == ["1a", "1b", "1b+1", "2b", "2a", "q"]
    heights = [label.get_text() for label in axes.get_yticklabels()]
    assert heights == ["input", "after L1", "after L5"]
    text = figure.get_suptitle() + axes.get_title()
    for said in "2 layers x 1 head, D=2, seed 0, step 40", "not validated", "x_2 0.500":
        assert said in text


def test_emergence_is_measured_at_checkpoints_and_read_without_them(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    write_circuit(run, (0, 0, "1b", "1a", 0.5), (0, 1, "q", "1b", 0.5), (1, 0, "q", "1b+1", 0.5))

    def measured():
        return analyze.with_emergence(analyze.read_run(run)).emergence

    assert analyze.read_run(run).emergence == {}  # to read is not to measure
    known, flags = measured(), train.read_flags(run)
    assert known["steps"] == [0, 20, 40] and known["sequences"] == 32 and len(known["paths"]) == 3
    batch, task = train.sequences(flags, held_out("emergence", 32)), flags.problem
    for number, step in enumerate(known["steps"]):
        model, flags = train.load(run, f"ckpt/{step:06d}.pt")
        with torch.no_grad(), train.precision(flags):
            _, patterns = model(batch.inputs, return_patterns=True)
        for path, row in paths_in(known).items():
            pattern = patterns[path.layer][:, path.head]
            given = attention_on(pattern, path, task, batch.positions)  # (32, N)
            reader = batch.positions[..., task.names.index(path.reader)]
            most = pattern[torch.arange(32)[:, None], reader].amax(-1)
            low, high = given.mean(1).quantile(torch.tensor([0.1, 0.9]))
            hits = (given == most).float().mean()
            expected = dict(mean=given.mean(), low=low, high=high, hits=hits)
            for name, value in expected.items():
                assert row[name][number] == pytest.approx(value.item(), abs=6e-5), name

    # with fewer paths, all of them known; with an unknown one, without checkpoints and with them
    (run / "ckpt").rename(tmp_path / "ckpt")
    for path in (0, 0, "1b", "1a", 0.5), (1, 1, "q", "1b", 0.5):
        write_circuit(run, path)
        assert measured() == known
    (tmp_path / "ckpt").rename(run / "ckpt")
    assert [*paths_in(measured())] == [Path(1, 1, "q", "1b")]
    assert json.loads((run / "emergence.json").read_text()) == measured()


def test_steps_are_interpolated_and_what_was_not_measured_is_said(whole):
    means = [0.1, 0.2, 0.8], [0, 0.2, 0.1]
    rows = [path._asdict() | dict(mean=mean) for path, mean in zip(PATHS, means, strict=True)]
    known = dict(sequences=32, steps=[0, 100, 200], losses={}, paths=rows)
    assert [*analyze.emergence_steps(known).values()] == [150.0, None]
    run = run_of(whole, MIXED, [*PATHS, Path(1, 0, "2b", "2a")])
    texts = analyze.draw_emergence(run._replace(emergence=known)).axes[1].texts
    assert {text.get_text() for text in texts} == {"150", "never", "not measured"}
