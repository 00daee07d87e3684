"""sweep.py: many runs, each once, here or on a cluster, on workers that may die; the table."""

import os
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import sweep
import train
from data import UserError
from tests.common import HERE, assert_refused, contents, output_of, start, wait_for
from train import Flags

import psutil
import pytest
from distributed.client import FutureCancelledError


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --eval-every 20 --stop-below 0 --device cpu"
GRID = ["--layers", 1, 2, "--seeds", 2, *TINY.split(), "--steps", 200]


@pytest.mark.slow
def test_a_sweep_survives_a_killed_worker_and_runs_nothing_twice(tmp_path):
    process = start("sweep", *GRID, "--out", tmp_path, "--workers", 2)
    wait_for(lambda: len(list(tmp_path.glob("*/state.pt"))) >= 2)
    children = psutil.Process(process.pid).children(recursive=True)
    [worker, *_] = [child for child in children if "spawn_main" in str(child.cmdline())]
    worker.kill()

    # every run has ended once, and one of them was resumed
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0 and "about 0 min left" in out, out + err
    table = sweep.read_table(tmp_path / "results.jsonl")
    assert len(table) == 4 and all(row["ended"] == 200 for row in table.values())
    assert "resumed" in "".join(path.read_text() for path in tmp_path.glob("*.txt"))
    for run in table:
        log = train.read_log(tmp_path / run)
        assert [entry["step"] for entry in log] == [*range(0, 201, 20)]

    # nothing is left to run
    before = contents(tmp_path)
    (tmp_path / "figure4.png").unlink()
    assert "runs to do" not in output_of(sweep, *GRID, "--out", tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_the_cluster_of_the_docstring(tmp_path):
    """Its own commands, in this clone, with ports and a folder of this test."""
    text = sweep.__doc__.replace("--nworkers 16", "--nworkers 1").replace("/shared", str(tmp_path))
    for address in "10.0.0.1:8786", "127.0.0.1:8787":
        with socket.create_server(("127.0.0.1", 0)) as server:
            text = text.replace(address, f"127.0.0.1:{server.getsockname()[1]}")
    where = re.search(r"--scheduler .*? --out \S+", text)[0].split()
    how = dict(
        cwd=HERE, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    cluster = [subprocess.Popen(line.split(), **how) for line in text.strip().splitlines()[-2:]]
    try:
        with mock.patch.object(sweep, "PATIENCE", 100):  # the scheduler may still be starting
            words = "--layers", 1, "--seeds", 2, *TINY.split(), "--steps", 10, *where
            out = output_of(sweep, *words)
    finally:
        for started in cluster:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    [table] = tmp_path.glob("*/results.jsonl")
    rows = sweep.read_table(table).values()
    assert "2/2 runs" in out and [(row["error"], row["ended"]) for row in rows] == [(None, 10)] * 2


@pytest.mark.slow
def test_workers_of_this_machine_may_take_its_memory():
    with sweep.connect(None, 1) as client:
        [worker] = client.scheduler_info()["workers"].values()
    assert worker["memory_limit"] == 0 and worker["nthreads"] == 1  # 0: no nanny kills it


def test_two_sweeps_may_write_one_table(tmp_path):
    path = tmp_path / "table" / "results.jsonl"
    rows = [{str(number): dict(run=str(number))} for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: sweep.merge(path, row), rows))
    assert len(sweep.read_table(path)) == 40


def test_a_server_of_another_kind_is_no_cluster(tmp_path, monkeypatch):
    """It says nothing and lets a client wait for ever: sweep.py keeps its patience."""
    monkeypatch.setattr(sweep, "PATIENCE", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        words = *GRID, "--out", tmp_path, "--scheduler", address
        assert_refused(sweep, *words, says=f"no Dask cluster with workers at {address}")


def test_the_longest_run_comes_first_and_failed_ones_are_run_again(tmp_path, monkeypatch):
    flags = ["--layers", 1, 3, "--seeds", 2, *TINY.split(), "--out", tmp_path]

    def submit(function, flags, **options):
        return mock.Mock(exception=lambda: None, result=lambda: function(flags))

    def lost(flags):
        raise FutureCancelledError("run_and_report-1", "scheduler-connection-lost")

    def untrained(flags, error=None):
        row = sweep.row_of(flags, UserError("it blew up")) | dict(error=error)
        return row | dict(seconds=1.0, ended=40, val=0.9, x_1=0.9, x_1_learned=None)

    def failing(flags):
        return untrained(flags, "it blew up" if flags.seed else None)

    client = mock.MagicMock()
    client.__enter__.return_value.submit = submit
    monkeypatch.setattr(sweep, "connect", lambda scheduler, workers: client)
    monkeypatch.setattr("distributed.as_completed", iter)
    monkeypatch.setattr(sweep, "run_and_report", failing)
    out = assert_refused(sweep, *flags, says="sweep.py: 2 runs failed")
    assert out.count("it blew up") == 2 and "figure4.png" in out, out

    # the cluster dies; what has ended before is drawn all the same
    monkeypatch.setattr(sweep, "run_and_report", lost)
    says = "the cluster is lost (FutureCancelledError), 2 runs failed"
    assert "figure4.png" in assert_refused(sweep, *flags, says=says)

    monkeypatch.setattr(sweep, "run_and_report", untrained)
    assert "2 runs to do" in output_of(sweep, *flags)
    table = sweep.read_table(tmp_path / "results.jsonl").values()
    assert [(row["layers"], row["error"]) for row in table] == [(3, None)] * 2 + [(1, None)] * 2


def test_a_row_is_what_a_run_left(tmp_path):
    """And a table that is older than a flag has its default."""
    losses = {k: 1 - k / 400 for k in range(0, 301, 50)}
    log = [dict(step=k, seconds=9.5, lr=0.1, val=loss, x_1=loss) for k, loss in losses.items()]
    [flags] = sweep.grid(TINY.split(), [2], 1, tmp_path)
    with mock.patch.object(sweep, "read_log", lambda run: log):
        row = sweep.row_of(flags)
    assert row["ended"] == 300 and row["val"] == row["x_1"] == (0.375 + 0.25) / 2
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3
    assert row["seconds"] == 9.5 and row["layers"] == 2
    path = tmp_path / "results.jsonl"
    train.write_file(path, [{name: row[name] for name in row if name != "clip"}])
    assert sweep.read_table(path) == {row["run"]: row | dict(clip=0.1)}


def test_presets_are_the_grids_of_the_committed_tables(tmp_path):
    """So the same command draws the committed figure again. A row has the flags of its name."""
    committed = sweep.read_table(HERE / "results/sweep/results.jsonl")
    for name in "laptop", "night":
        for text, layers, seeds in sweep.PRESETS[name]:
            for flags in sweep.grid(text.split(), layers, seeds, tmp_path):
                row = Flags(**committed[flags.out.name])
                assert row.settings == flags.replace(dtype=row.dtype).settings
    for text, layers, seeds in sweep.PRESETS["paper"]:
        assert len(sweep.grid(text.split(), layers, seeds, tmp_path)) == 64


def test_figure_4_holds_every_run():
    """A dot per run and symbol, at its own loss, and bars at the two middle runs of eight."""
    rows = sweep.section_7(sweep.read_table(HERE / "results/sweep/results.jsonl").values())
    with_ic = [row for row in rows if row["ic"]]
    above, below = sweep.figure_4(rows).axes

    def points(lines):
        return sorted((round(x), y) for line in lines for x, y in line.get_xydata())

    losses = [(row["layers"], row["val"]) for row in rows]
    symbols = [(row["layers"], row[f"x_{k}"]) for row in with_ic for k in range(1, 6)]
    for axes, expected in (above, losses), (below, symbols):
        assert points(line for line in axes.lines if line.get_marker() == "o") == sorted(expected)
    bars = points(line for line in above.lines if line.get_label().startswith("with "))
    for layers in range(1, 9):
        losses = sorted(row["val"] for row in with_ic if row["layers"] == layers)
        assert bars[2 * layers - 2 : 2 * layers] == [(layers, y) for y in losses[3:5]]
