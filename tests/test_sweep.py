"""sweep.py: runs that are killed, here or on a cluster; the table and Figure 4."""

import contextlib
import os
import subprocess
import sys

import sweep
import train
from tests.common import HERE, output_of, run_main, start, wait_for

import psutil
import pytest


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --eval-every 20 --stop-below 0 --device cpu"
GRID = ["--layers", 1, "--seeds", 3, *TINY.split(), "--workers", 2]
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


def test_a_row_is_what_a_run_left(tmp_path):
    log = [dict(step=k, seconds=9.5, val=1 - k / 400, x_1=1 - k / 400) for k in range(0, 301, 50)]
    [(flags, _)] = sweep.grid(TINY.split(), [2], 1, tmp_path)
    train.write_file(flags.out / "config.json", train.settings_of(flags))
    train.write_file(flags.out / "log.jsonl", log)
    row = sweep.row_of(flags.out)
    assert row["ended"] == 300 and row["val"] == row["x_1"] == (0.375 + 0.25) / 2
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3


def test_figure_4_holds_every_run():
    """A dot per run and symbol, at its own loss."""
    committed = train.read_file(HERE / "results/sweep/results.jsonl")
    rows = sweep.section_7([train.DEFAULTS | row for row in committed])
    above, below = sweep.figure_4(rows).axes
    losses = [(row["layers"], row["val"]) for row in rows]
    symbols = [(row["layers"], row[f"x_{k}"]) for row in rows if row["ic"] for k in range(1, 6)]
    for axes, expected in (above, losses), (below, symbols):
        dots = [line.get_xydata() for line in axes.lines if line.get_marker() == "o"]
        assert sorted((round(x), y) for line in dots for x, y in line) == sorted(expected)
