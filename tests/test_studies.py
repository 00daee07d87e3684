"""Studies of many runs, over run directories made by hand: what came first, certificates, what
weight decay leaves."""

import json
import math

from parts import config
from parts.circuit import Path, Place
from parts.config import SETTINGS
from parts.emergence import Emergence, History

import matplotlib.pyplot as plt
import pytest

import train
from data import chain
from studies import by_kind, circuits, cleaning, kind_of, order
from tests.common import assert_refused, contents, run_main
from tests.other_tasks import TRIPLES


LOWER, UPPER, OTHER = (1, 1, "1b", "1a"), (2, 1, "q", "1b"), (3, 1, "q", "2b")


def cost(mse):
    return dict(mse=mse, low=mse / 2, high=2 * mse, partial=[mse, mse])


def write_run(run, flags="", learned=(30, 50)):
    """A run directory of these flags with D = 2, evaluated every ten steps; learned: when the error
    of each symbol falls from 1 to 0."""
    run.mkdir(parents=True)
    flags = train.parse_flags(["--D", "2", "--device", "cpu", *flags.split()])
    settings = {name: getattr(flags, name) for name in SETTINGS}
    (run / "config.json").write_text(json.dumps(settings))
    rows = []
    for step in range(0, 101, 10):
        symbols = {f"x_{k}": 1 - (step >= end) for k, end in enumerate(learned, 1)}
        val = sum(symbols.values()) / 2 or 0.004
        rows.append(json.dumps(dict(step=step, seconds=1, lr=0.1, val=val) | symbols))
    (run / "log.jsonl").write_text("\n".join(rows))
    return run


def write_emergence(run, emerges, needed=0.8):
    """emerges: {path: the step at which its attention passes 0.5}; needed: the loss of x_2 without
    each path."""
    steps, paths = list(range(0, 101, 10)), []
    for (layer, head, source, target), emerged in emerges.items():
        mean = [0.5 + 0.02 * min(20, max(-20, step - emerged)) for step in steps]
        without = dict(x_1=[0.9] * 11, x_2=[needed] * 11)
        row = dict(layer=layer, head=head, source=source, target=target, without=without)
        paths.append(row | dict(mean=mean, low=mean, high=mean, hits=mean))
    losses = dict(x_1=[0.0] * 11, x_2=[0.0] * 11)
    kept = dict(sequences=1, steps=steps, losses=losses, paths=paths, heads=[])
    (run / "emergence.json").write_text(json.dumps(kept))


def write_circuit(run, certified=True, zero_rows=0.02):
    """circuit.json with two paths, of which the targets bring 0.3 of 0.4 and all."""
    rows = []
    for (layer, head, source, target), others in (LOWER, 0.1), (UPPER, -0.001):
        row = dict(layer=layer, head=head, source=source, target=target, attention=0.9)
        row |= dict(carried=cost(0.3), others=cost(others), more=cost(0.2), alone=cost(0.5))
        rows.append(row | dict(everywhere=cost(0.5), destroys=["x_1"]))
    verdict = "certified" if certified else "not complete: layer 5 head 1 costs 0.91"
    paper = dict(held=cost(zero_rows), first_uniform=cost(0.07), removed=[0.04, 0.2])
    report = dict(
        certified=certified,
        verdict=verdict,
        uses=[],
        fill="zero",
        literal=True,
        layers_with_paths=2,
        sufficient=cost(0.02),
        intact=cost(0.01),
        heads=[dict(layer=1, head=1, mechanism="paths")],
        complete=dict(alone=[], together=cost(0.01)),
        paths=rows,
        paper=paper | dict(at_threshold=1, at_papers_least=1),
    )
    (run / "circuit.json").write_text(json.dumps(report))


# ---- kinds and command lines


def test_a_kind_differs_in_any_flag_but_the_seed(tmp_path):
    def kind(*flags):
        return kind_of(train.parse_flags(["--device", "cpu", *flags]))

    assert kind() == kind("--seed", "3", "--dtype", "float32", "--eval-every", "7") == ()
    for flags in ["--K", "2"], ["--steps", "9"], ["--no-ic"], ["--target", "0.15"]:
        assert kind(*flags) != kind()
    runs_of = [
        write_run(tmp_path / "b", "--steps 100 --seed 1"),
        write_run(tmp_path / "a", "--steps 100 --seed 0"),
        write_run(tmp_path / "c", "--steps 100 --lr 2e-3"),
    ]
    groups = by_kind(map(order.facts, runs_of))
    names = {name: [fact["run"].name for fact in group] for name, group in groups.items()}
    assert names == {"D=2, steps=100": ["a", "b"], "lr=0.002": ["c"]}


def test_a_run_named_twice_counts_once_and_nothing_is_written_beside_it(tmp_path):
    run, out = write_run(tmp_path / "runs" / "a"), tmp_path / "out"
    before = contents(run.parent)
    code, said, err = run_main(order, run, run.parent / "." / "a", "--out", out)
    assert code == 0 and "| D=2 | 1 |" in said, (said, err)
    assert contents(run.parent) == before and [file.name for file in out.iterdir()] == ["order.png"]


@pytest.mark.parametrize("study", [order, circuits, cleaning])
def test_bad_input_is_refused(study, tmp_path):
    run = write_run(tmp_path / "run")
    if study is not circuits:  # of runs without a circuit.json it reads nothing
        (run / "config.json").unlink()
        assert_refused(study, run, says="is no run directory")


# ---- what came first


def test_what_emerged_first_is_counted(tmp_path):
    """Four runs by hand: an induction head first and needed later, one that nothing needs, another
    head, a close finish; and one of which nothing more is known."""
    folders = []
    for seed, (needed, emerges) in enumerate(
        [
            (0.8, {LOWER: 5, UPPER: 15, OTHER: 55}),
            (0.2, {LOWER: 35, UPPER: 15, OTHER: 55}),
            (0.8, {LOWER: 65, UPPER: 55, OTHER: 15}),
            (0.8, {LOWER: 5, UPPER: 12, OTHER: 17}),
        ]
    ):
        folders.append(write_run(tmp_path / f"s{seed}", f"--seed {seed}"))
        write_emergence(folders[-1], emerges, needed)
    folders.append(write_run(tmp_path / "s4", "--seed 4", learned=(50, 30)))
    every = [order.facts(folder) for folder in folders]
    told = order.claims_table(every).splitlines()
    assert told[0].count("|") == told[2].count("|") == len(order.CLAIMS) + 5
    assert told[2] == (
        "| D=2 | 5 | 20 (-20\N{EN DASH}20) | 100 (100\N{EN DASH}100) | "
        "4 of 5 [0.38, 0.96] | 3 of 4 [0.30, 0.95] | "
        "2 of 3 [0.21, 0.94] | 1 of 3 [0.06, 0.79] | 2 of 3 [0.21, 0.94] | 3 of 4 [0.30, 0.95] |"
    )
    first, _, late, _, unknown = order.runs_table(every).splitlines()[2:]
    ends = "100 | x_1 0, x_2 0 | 0.0040"
    assert f"| s0 | 25, 45 | {ends} | layer 1, 1b -> 1a: 5; layer 2, q -> 1b: 15; layer 3" in first
    assert late.endswith("| layer 3, q -> 2b: 15 |") and unknown.endswith(f"| 45, 25 | {ends} |  |")


def place(role):
    return Place(role, 0)


def test_the_induction_head_of_any_task():
    # only with the lower path of its own, in a layer below; not from or to a relay
    read_b, read_c = Path(0, 0, place(2), place(1)), Path(1, 0, place(3), place(1))
    find_c, find_a = Path(1, 0, place(0), place(3)), Path(0, 0, place(0), place(1))
    when = {find_a: 5, read_c: 10, read_b: 20, find_c: 30}
    assert order.induction_head(when, TRIPLES) == [find_c, None]
    later = find_c._replace(layer=2)
    assert order.induction_head({read_c: 10, later: 40}, TRIPLES) == [later, read_c]
    relay = later._replace(target=Place(3, 1))
    assert order.induction_head({read_c: 10, relay: 40}, TRIPLES) == [None, None]


def test_an_induction_head_without_its_lower_path_is_not_first():
    lower, upper = Path(0, 0, place(2), place(1)), Path(1, 0, place(0), place(2))
    other = Path(2, 0, place(0), place(4))
    for means in ([0, 0, 0.9], [0, 0.4, 0.45]):  # after the other path, and never
        without = dict(x_1=[1, 1, 1], x_2=[1, 1, 1])
        curves = {lower: means, upper: [0, 0.9, 0.9], other: [0, 0.6, 0.9]}
        histories = {path: History(*[curve] * 4, without) for path, curve in curves.items()}
        seen = Emergence(1, [0, 10, 20], dict(x_1=[0] * 3, x_2=[0] * 3), histories, {})
        found = order.what_came_first(seen, dict(x_1=5, x_2=9), chain(4, 2))
        assert next(path for path in found["first_paths"] if path != lower) == upper
        assert found["head_first"] is False and "upper_first" not in found
        assert ("lower_step" in found) == (means[-1] > 0.5)


def test_the_figure_shows_each_step_in_its_line(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(config, "save_figure", lambda figure, file: figures.append(figure))
    folders = [
        write_run(tmp_path / "a", "--seed 0"),
        write_run(tmp_path / "b", "--seed 1", (30, 500)),
    ]
    write_emergence(folders[0], {LOWER: 5, UPPER: 15, OTHER: 55})
    folders.append(write_run(tmp_path / "c", "--lr 2e-3"))
    assert run_main(order, *folders, "--out", tmp_path / "out")[0] == 0
    (axes,) = figures[0].axes
    marks = {mark.get_label(): mark.get_offsets().tolist() for mark in axes.collections}
    lines = dict(zip(["a", "b", "c"], axes.get_yticks(), strict=True))
    assert marks == {
        "$x_{1}$ learned (n = 3)": [[25, lines[name]] for name in "abc"],
        "$x_{2}$ learned (n = 2)": [[45, lines[name]] for name in "ac"],
        "upper path of an induction head (n = 1)": [[15, lines["a"]]],
        "lower path (n = 1)": [[5, lines["a"]]],
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["seed 0", "seed 1", "seed 0"]
    names = [text.get_text() for text in axes.texts]
    assert names == ["D=2 (n = 2)", "lr=0.002 (n = 1)"] and axes.get_xscale() == "log"
    plt.close("all")


def test_order_everywhere_counts_a_kind_and_seed_once(tmp_path):
    """Crossings at 25 and 45 are told apart by evaluations ten steps apart, not by fifty."""
    for name, flags, learned in (
        ("a", "--eval-every 10", (30, 50)),
        ("again/a", "--eval-every 10", (30, 50)),
        ("b", "--seed 1 --eval-every 50", (30, 50)),
        ("late", "--seed 2 --eval-every 10", (50, 30)),
        ("one", "--seed 3", (30, 500)),
        ("some", "--targets 1", (30, 50)),
        ("alone", "--no-ic", (500, 500)),
    ):
        write_run(tmp_path / name, flags, learned)
    found = order.everywhere(tmp_path)
    assert found == dict(several=3, in_order=2, resolved=2, alone=1, lost=1)


# ---- certificates


def test_certificates_are_told_and_counted(tmp_path):
    folders = [write_run(tmp_path / f"s{seed}", f"--seed {seed}") for seed in range(4)]
    write_circuit(folders[0])
    write_circuit(folders[1], certified=False)
    report = dict(certified=False, verdict="not searched: the model itself has a loss of 0.7")
    (folders[2] / "circuit.json").write_text(json.dumps(report))
    code, said, err = run_main(circuits, *folders)
    assert code == 0, err
    told = "2/4 in 2/3 | 0 | zero | 0 | 0.020 | 0.010 | 0.75 | 0.500"
    assert f"s0 | certified | {told} |" in said, said
    assert f"s1 | not complete: layer 5 head 1 costs 0.91 | {told} |" in said
    assert "s2 | not searched: the model itself has a loss of 0.7 |  |" in said and "s3" not in said
    assert "| s0 | 0.020 | 0.070 | 0.040 | 1 of 2 | 1 of 2 |" in said
    assert "| D=2 | 1 of 2 | 1 of 2 |" in said
    assert circuits.tables(folders[3:]).count("\n|---") == 3


# ---- cleaning


def test_folds_are_the_sum_of_rate_times_decay():
    flags = train.parse_flags(
        "--weight-decay 0.5 --lr 0.01 --warmup 0 --decay 0 --steps 10".split()
    )
    assert math.isclose(cleaning.folds_of(flags, 10), 0.05)
    falling = flags.replace(decay=1.0)
    assert 0.02 < cleaning.folds_of(falling, 10) < 0.03


def test_what_decay_leaves(tmp_path, monkeypatch):
    """zero_rows.jsonl is read where there is no circuit.json of today."""
    kept = [dict(step=50, paths=6, mse=0.2), dict(step=100, paths=6, mse=0.1)]
    folders = [write_run(tmp_path / f"s{seed}", f"--seed {seed}") for seed in range(3)]
    for folder in folders[:2]:
        text = "".join(json.dumps(row) + "\n" for row in kept)
        (folder / "zero_rows.jsonl").write_text(text)
    write_circuit(folders[0], zero_rows=0.03)
    found = [[loss for _, loss in cleaning.facts(folder)["zero_rows"]] for folder in folders]
    assert found == [[0.03], [0.2, 0.1], []]
    row = cleaning.folds_table(folders).splitlines()[2]
    assert row.startswith("| muon, --rotary input, width 128 | ")
    assert row.endswith(" | 3 of 3 | 0.004 | 1 of 2 | 0.030 to 0.100 |"), row

    figures = []
    monkeypatch.setattr(config, "save_figure", lambda figure, file: figures.append(figure))
    assert run_main(cleaning, *folders, "--out", tmp_path / "out")[0] == 0
    (axes,) = figures[0].axes
    drawn = [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata())]
    assert drawn == [[0.03], [0.2, 0.1], [0.05, 0.05]]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    plt.close("all")


def test_how_often_a_run_was_solved_and_lost(tmp_path):
    run = write_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    rows[8]["val"] = 0.9  # after it was learned
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    row = cleaning.stability_table([run]).splitlines()[2]
    assert row == "| run | 100 | 25, 45 | 5 of 11 | 1 | 0.90 | 0.004 |"
