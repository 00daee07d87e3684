"""sweep.py: runs that are killed, on a cluster or here; the table and Figure 4."""

import os
import select
import shutil
import subprocess
import sys
import time

import sweep
import train
from tests.common import HERE, assert_refused, output_of, run_main

import matplotlib.colors
import numpy as np
import psutil
import pytest


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --eval-every 20 --stop-below 0 --device cpu"
GRID = ["--layers", 1, "--no-mlp", "--seed", 0, 1, 2, *TINY.split(), "--workers", 2]
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


def test_a_killed_run_is_one_line_and_the_same_command_continues_it(tmp_path, monkeypatch):
    """Killed on a Dask cluster, continued on this machine."""
    distributed = pytest.importorskip("distributed")
    folder, killer = tmp_path / "sweep", tmp_path / "killer.py"
    words = [*GRID, "--steps", 40, "--out", folder]
    killer.write_text(KILLER)
    how = dict(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None)
    with distributed.LocalCluster(protocol="tcp", **how) as cluster, monkeypatch.context() as patch:
        patch.setattr(train, "__file__", str(killer))
        patch.setenv("PYTHONPATH", str(HERE))  # where the killer finds train
        code, out, err = run_main(sweep, *words, "--scheduler", cluster.scheduler_address)
    [failed] = folder.glob("*_s1.txt")
    assert code == 1 and "1 runs failed; the same command" in err
    assert out.count("FAILED, see") == 1 and "step    20/40" in failed.read_text()
    assert steps_of(folder) == [[0, 20, 40]] * 2
    assert "1 of 3 runs to do" in output_of(sweep, *words)
    assert steps_of(folder) == [[0, 20, 40]] * 3
    assert "resumed" in failed.read_text()


def test_two_runs_have_two_names_or_are_refused(tmp_path, whole):
    """Two folders that differ by a slash; and a directory has the run of its name."""
    words = [*TINY.split(), "--init"]
    names = {train.parse_flags([*words, init], tmp_path).out for init in ("x/y", "x-y")}
    assert len(names) == 2
    one_name = [*words, "x/y", "x,y", "--out", tmp_path]
    assert_refused(sweep, *one_name, says="two runs would have one name")
    assert not [*tmp_path.iterdir()]
    shutil.copytree(whole, max(names))
    assert_refused(sweep, *words, "x-y", "x/y", "--out", tmp_path, says="has another")


@pytest.mark.parametrize(
    "words, says",
    [
        ("--heads 1 0", "from 1 to"),
        ("--decay 0 2", "from 0 to 1"),
        ("--layers 1 --workers 1 2", "2"),
        ("--out nowhere", "nowhere"),
    ],
)
def test_a_mistake_is_said_before_anything_is_trained(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(sweep, *words.split(), says=says)
    assert not [*tmp_path.iterdir()]


def test_sigterm_ends_the_training_too(tmp_path):
    """What a sweep has printed by then can be read: into a pipe or a file Python writes late."""
    words = [*GRID, "--steps", 20, 10**6, "--workers", 1, "--out", tmp_path]
    command = [sys.executable, "sweep.py", *map(str, words)]
    process = subprocess.Popen(command, cwd=HERE, text=True, stdout=subprocess.PIPE)
    while len([*tmp_path.glob("*/state.pt")]) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    assert select.select([process.stdout], [], [], 0)[0]
    printed = os.read(process.stdout.fileno(), 9999).decode()
    assert "6 of 6 runs to do" in printed and "1/6, about" in printed
    [training] = psutil.Process(process.pid).children()
    process.terminate()
    process.communicate(timeout=60)
    assert not training.is_running()
    assert len([*tmp_path.glob("*/state.pt")]) == 2  # the others were never begun


def a_finished_run(folder, words):
    """Write what a run leaves, with a loss that falls to 1/4 in 300 steps; return its directory."""
    log = [dict(step=k, lr=0, val=1 - k / 400, x_1=1 - k / 400) for k in range(0, 301, 50)]
    flags = train.parse_flags(f"{TINY} {words}".split(), folder)
    train.write_file(flags.out / "config.json", train.values_of(flags))
    train.write_file(flags.out / "log.jsonl", log)
    (flags.out / "model.pt").touch()
    return flags.out


def test_a_row_is_what_a_run_left(tmp_path):
    row = sweep.row_of(a_finished_run(tmp_path, "--layers 2"))
    assert row["ended"] == 300 and row["val"] == row["x_1"] == 0.25 and row["lr"] == 1e-3
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3


def test_the_table_keeps_what_is_gone_or_cannot_be_read_and_the_figure_the_chains(tmp_path):
    committed, table = HERE / "results/sweep/results.jsonl", tmp_path / "results.jsonl"
    shutil.copy(committed, table)
    runs = [a_finished_run(tmp_path, f"--layers {layers}") for layers in range(1, 6)]
    lookup = a_finished_run(tmp_path, "--task extras.lookup:Lookup")
    (runs[1] / "log.jsonl").write_text("")
    (runs[2] / "log.jsonl").unlink()
    (runs[3] / "config.json").write_text("{}}")
    config = train.read_file(runs[4] / "config.json")
    train.write_file(runs[4] / "config.json", config | dict(rotary="qk"))  # of another train.py
    out = output_of(sweep, "--out", tmp_path)
    for run in runs[1:]:
        assert f"no new row of {run.name}, which cannot be read: " in out
    rows = train.read_file(table)
    assert rows[:-2] == train.read_file(committed)
    assert [row["run"] for row in rows[-2:]] == sorted([runs[0].name, lookup.name])
    assert f"\n{len(rows) - 1} runs: " in out and (tmp_path / "figure4.png").exists()


# ---- Figure 4


def markers(axes, marker):
    """Return {color: [(column, loss), ...]} of all such markers in a panel, sorted."""
    found = {}
    for line in axes.lines:
        if line.get_marker() == marker:
            color = matplotlib.colors.to_hex(line.get_color())
            found.setdefault(color, []).extend((round(x), y) for x, y in line.get_xydata())
    return {color: sorted(dots) for color, dots in found.items()}


def test_figure_4_holds_every_run():
    """In each series a dot per run at its own loss, and a line through the means of the columns."""
    rows = train.read_file(HERE / "results/sweep/results.jsonl")
    figure = sweep.figure_4([train.DEFAULTS | row for row in rows])
    left, right = figure.axes
    series = [(left, "last", "val", sweep.RED), (left, "all", "val", sweep.INK)]
    for k in range(1, 6):
        series.append((right, "all", f"x_{k}", sweep.symbol_color(k)))
    for axes, targets, name, color in series:
        runs = [(row["layers"] - 1, row[name]) for row in rows if row["targets"] == targets]
        assert markers(axes, "o")[color] == sorted(runs)
        columns, losses = np.array(runs).T
        means = [(x, losses[columns == x].mean()) for x in sorted({*columns})]
        np.testing.assert_allclose(markers(axes, ".")[color], means)


def test_figure_4_has_a_column_for_each_point_of_a_grid():
    row = train.DEFAULTS | dict(D=1, layers=2, x_1=0.5, seed=1)
    heads = [row | dict(heads=heads, val=heads / 10) for heads in (8, 16, 1)]
    left = sweep.figure_4(heads).axes[0]
    assert markers(left, "o")[sweep.INK] == [(0, 0.1), (1, 0.8), (2, 1.6)]
