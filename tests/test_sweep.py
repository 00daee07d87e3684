"""sweep.py: runs that are killed, here or on a cluster; the table and Figure 4."""

import contextlib
import os
import subprocess
import sys

import sweep
import train
from tests.common import HERE, assert_refused, output_of, run_main, start, wait_for

import psutil
import pytest


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --eval-every 20 --stop-below 0 --device cpu"
GRID = ["--layers", 1, "--seed", 0, 1, 2, *TINY.split(), "--workers", 2]
KILLER = """# train.py, which kills itself at its second evaluation if the seed is 1
import os
import train
real = train.print_row
def print_row(flags, task, rows):
    real(flags, task, rows)
    if flags.seed == 1 and len(rows) == 2:
        os.kill(os.getpid(), 9)
train.print_row = print_row
train.main()
"""


def steps_of(folder):
    """Return the steps in the log of each run in the table of a sweep."""
    rows = train.read_file(folder / "results.jsonl")
    logs = [train.read_log(folder / row["run"]) for row in rows]
    return [[entry["step"] for entry in log] for log in logs]


@pytest.mark.parametrize("where", ["this machine", "a Dask cluster"])
def test_a_killed_run_is_one_line_and_the_same_command_continues_it(where, tmp_path, monkeypatch):
    folder, killer = tmp_path / "sweep", tmp_path / "killer.py"
    words = [*GRID, "--steps", 40, "--out", folder]
    killer.write_text(KILLER)
    with contextlib.ExitStack() as stack:
        if where == "a Dask cluster":
            distributed = pytest.importorskip("distributed")
            how = dict(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None)
            cluster = distributed.LocalCluster(protocol="tcp", **how)
            words += ["--scheduler", stack.enter_context(cluster).scheduler_address]
        with monkeypatch.context() as patch:
            patch.setattr(train, "__file__", str(killer))
            patch.setenv("PYTHONPATH", str(HERE))  # where the killer finds train
            code, out, err = run_main(sweep, *words)
        assert code == 1 and "1 runs failed; the same command" in err
        assert out.count("exit code -9") == 1 and steps_of(folder) == [[0, 20, 40]] * 2
        assert "1 of 3 runs to do" in output_of(sweep, *words)
    assert steps_of(folder) == [[0, 20, 40]] * 3
    assert "resumed" in next(folder.glob("*_s1.txt")).read_text()


def test_a_sweep_that_was_killed_ends_with_whole_logs(tmp_path):
    """Its trainings go on, beside those of the next sweep."""
    words = [*GRID, "--steps", 100, "--out", tmp_path]
    process = start("sweep", *words)
    wait_for(lambda: len([*tmp_path.glob("*/state.pt")]) == 2)
    trainings = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    output_of(sweep, *words)
    psutil.wait_procs(trainings, timeout=100)
    assert "0 of 3 runs to do" in output_of(sweep, *words)
    assert steps_of(tmp_path) == [[*range(0, 101, 20)]] * 3


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nothing", "no://where"])
def test_an_address_without_a_cluster_is_said(tmp_path, address):
    pytest.importorskip("distributed")
    code, _, err = run_main(sweep, *GRID, "--out", tmp_path, "--scheduler", address)
    assert code == 2 and "no Dask cluster at" in err  # Dask may add lines of its own


def test_a_sweep_takes_all_cores_though_each_run_has_one_thread():
    how = dict(env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=HERE, text=True)
    text = subprocess.check_output([sys.executable, "sweep.py", "--help"], **how)
    assert f"runs at once, one a core (default: {os.cpu_count()})" in " ".join(text.split())


def test_a_grid_is_every_choice_of_one_value(tmp_path):
    """Against four loops; of --layers the last counts."""
    words = (
        "--layers=9 --lr 1e-3 2e-3 --layers 1 2 4 2 --targets 1,3 --no-mlp --optimizer adamw muon"
        " --seed 0 1"
    )
    found = []
    for out, line in sweep.grid(sweep.options_of(words.split()), tmp_path).items():
        flags = train.parse_flags(line)
        assert flags.out == out and flags.resume
        assert flags.targets == "1,3" and not flags.mlp
        found.append((flags.lr, flags.layers, flags.optimizer, flags.seed))
    expected = []
    for lr in 1e-3, 2e-3:
        for layers in 1, 2, 4:
            for optimizer in "adamw", "muon":
                expected += [(lr, layers, optimizer, seed) for seed in (0, 1)]
    assert sorted(found) == sorted(expected)


def test_flags_change_a_preset():
    night = [sweep.options_of(text.split()) for text in sweep.PRESETS["night"]]
    options = sweep.options_of("--layers 2 3 --seed 0".split())
    grids = [sweep.grid(grid | options, "out") for grid in night]
    depths = [[train.parse_flags(line).layers for line in runs.values()] for runs in grids]
    assert depths == [[2, 3], [2, 3]]


@pytest.mark.parametrize(
    "words, says",
    [
        ("--heads 1 two", "invalid int value: 'two'"),
        ("--heads 1 0", "not below 1"),
        ("--layers 1 2 --targets 1,9", "among 1 to 3"),
        ("--layers 1 2 --workers 1 2", "unrecognized arguments: 2"),
        ("--layers 1 --out a b", "unrecognized arguments: b"),
        ("5 --layers 1", "unrecognized arguments: 5"),
        ("--layers 1 --workers 0", "--workers must not be below 1"),
        ("--out nowhere", "give either a --preset"),
    ],
)
def test_a_mistake_is_said_before_anything_is_trained(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(sweep, *words.split(), says=says)
    assert not [*tmp_path.iterdir()]


def test_sigterm_ends_the_trainings_too(tmp_path):
    process = start("sweep", *GRID, "--steps", 10**6, "--out", tmp_path)
    wait_for(lambda: len([*tmp_path.glob("*/state.pt")]) == 2)
    trainings = psutil.Process(process.pid).children()
    process.terminate()
    process.communicate(timeout=60)
    assert len(trainings) == 2 and not any(training.is_running() for training in trainings)
    assert len([*tmp_path.glob("*/state.pt")]) == 2  # the third was never begun


def test_a_figure_is_drawn_again_from_the_table_alone(tmp_path):
    committed = HERE / "results/sweep/results.jsonl"
    table = tmp_path / "results.jsonl"
    table.write_bytes(committed.read_bytes())
    assert "0 of 0 runs to do" in output_of(sweep, "--out", tmp_path)
    assert table.read_bytes() == committed.read_bytes() and (tmp_path / "figure4.png").exists()

    # new runs come after those whose directories are gone
    words = [*TINY.split(), "--steps", 20, "--layers", 1, "--out", tmp_path]
    output_of(sweep, *words)
    rows = train.read_file(table)
    assert rows[:-1] == train.read_file(committed) and rows[-1]["width"] == 16


def test_a_row_is_what_a_run_left(tmp_path):
    log = [dict(step=k, seconds=9.5, val=1 - k / 400, x_1=1 - k / 400) for k in range(0, 301, 50)]
    options = sweep.options_of([*TINY.split(), "--layers", "2"])
    [line] = sweep.grid(options, tmp_path).values()
    flags = train.parse_flags(line)
    train.write_file(flags.out / "config.json", train.settings_of(flags))
    train.write_file(flags.out / "log.jsonl", log)
    row = sweep.row_of(flags.out)
    assert row["ended"] == 300 and row["val"] == row["x_1"] == (0.375 + 0.25) / 2
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3


def dots_of(figure):
    """Return [(column, loss), ...] of all runs in Figure 4."""
    [axes] = figure.axes
    dots = [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]
    return sorted((round(x), y) for line in dots for x, y in line)


def test_figure_4_holds_every_run():
    """A dot per run and series, at its own loss, and one bar at the median of each place."""
    rows = train.read_file(HERE / "results/sweep/results.jsonl")
    rows = [train.DEFAULTS | row for row in rows if row["causal"]]
    expected, places = [], set()
    for row in rows:
        for name in ["val", *(f"x_{k}" for k in range(1, 6) if row["targets"] == "all")]:
            expected.append((row["layers"] - 1, row[name]))
            places.add((row["layers"], row["targets"], name))
    figure = sweep.figure_4(rows)
    assert dots_of(figure) == sorted(expected)
    bars = [line for line in figure.axes[0].lines if line.get_marker() == "_"]
    assert len(bars) == len(places)

    # the law: x_1 in 2 layers, x_2 and x_3 in 3, x_4 and x_5 in 4
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "v"]
    assert [round(mark.get_xdata()[0]) + 1 for mark in marks] == [2, 3, 3, 4, 4]


def test_figure_4_has_a_column_for_each_point_of_a_grid():
    row = train.DEFAULTS | dict(D=1, layers=2, x_1=0.5, seed=1)
    heads = [row | dict(heads=heads, val=heads / 10) for heads in (8, 16, 1)]
    figure = sweep.figure_4(heads)
    assert [x for x, y in dots_of(figure) if y != 0.5] == [0, 1, 2]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["1", "8", "16"]
    both = [other | dict(layers=layers) for layers in (3, 2) for other in heads]
    labels = [text.get_text() for text in sweep.figure_4(both).axes[0].get_xticklabels()]
    assert labels == ["2\n1", "2\n8", "2\n16", "3\n1", "3\n8", "3\n16"]
