"""sweep.py: many runs, each once, on workers that may die; what their table shows."""

import contextlib
import os
import signal
import subprocess
from unittest import mock

from parts import UserError, config
from parts.config import SETTINGS, Flags

import psutil
import pytest
from dask.utils import key_split
from distributed import Client

import sweep
from studies import depth, waiting  # noqa: F401, its preset
from sweep import figure_4, read_table, row_of
from tests.common import (
    HERE,
    assert_one_line,
    assert_refused,
    contents,
    run_main,
    start,
    wait_for,
)
from tests.dask_cluster import cluster


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --target 0"
TINY += " --device cpu"


# ---- the runs


@pytest.mark.slow
def test_a_sweep_runs_each_run_once(tmp_path):
    grid = ["--layers", 1, 2, "--seeds", 2, "--flags", TINY, "--flags", f"{TINY} --no-ic"]
    grid += ["--out", tmp_path]
    process = start("sweep", *grid, "--workers", 2)
    out, err = process.communicate(timeout=400)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0 and "8/8 runs, about 0 min left" in out and not err, out + err
    assert len(read_table(tmp_path / "results.jsonl")) == 8
    before = contents(tmp_path)
    (tmp_path / "figure4.png").unlink()
    for more in [], ["--plot-only"]:  # nothing is left to run
        code, out, err = run_main(sweep, *grid, *more)
        assert code == 0 and "runs to do" not in out, out + err
        assert contents(tmp_path) == before


def fail(flags):
    return sweep.row_of(flags, UserError("no"))


def test_dask_gets_the_runs_as_one_kind_and_the_longest_first(tmp_path):
    """Dask gives an idle worker what waits at a busy one only if it has seen how long such a task
    takes."""
    groups = [("--D 1 --device cpu", [1, 3, 2], 2)]
    with (
        Client(processes=False, n_workers=1, dashboard_address="127.0.0.1:0") as client,
        mock.patch.object(sweep, "run_and_report", fail),
        mock.patch.object(client, "submit", wraps=client.submit) as submit,
    ):
        to_do, table = sweep.grid(groups, tmp_path), {}
        sweep.sweep(to_do, table, tmp_path / "results.jsonl", client)
    assert {row["error"] for row in table.values()} == {"UserError: no"} and len(table) == 6
    submitted = [call.args[1] for call in submit.call_args_list]
    assert [flags.layers for flags in submitted] == [3, 3, 2, 2, 1, 1]
    priorities = [call.kwargs["priority"] for call in submit.call_args_list]
    assert priorities == [sweep.cost(flags) for flags in submitted]
    assert len({key_split(call.kwargs["key"]) for call in submit.call_args_list}) == 1


def test_presets_are_the_grids_of_the_committed_table(tmp_path):
    def settings(all_flags):
        names = [name for name in SETTINGS if name != "dtype"]
        return {str([getattr(flags, name) for name in names]) for flags in all_flags}

    grids = {name: sweep.grid(groups, tmp_path) for name, groups in sweep.PRESETS.items()}
    sizes = {name: len(grid) for name, grid in grids.items()}
    assert sizes == dict(laptop=24, night=88, paper=128, law=39, waiting=589)
    rows = read_table(HERE / "results/sweep/results.jsonl").values()
    committed = settings(Flags(**row) for row in rows)
    assert committed == settings(grids["night"] + grids["law"])
    assert settings(grids["laptop"]) <= committed


def check_sweep_with_a_killed_worker(folder, worker_of, *more, **environment):
    """A sweep of which a worker process is killed in the middle: each run must end once, as if
    nothing had been."""
    grid = ["--layers", 1, 2, "--seeds", 2, "--out", folder]
    process = start("sweep", *grid, *more, "--flags", f"{TINY} --steps 300", **environment)
    wait_for(lambda: len(list(folder.glob("*/state.pt"))) >= 2, 120)
    os.kill(worker_of(process), signal.SIGKILL)
    other = ["--layers", 3, "--out", folder]  # it would write the same table
    assert_refused(sweep, *other, says="in use by another process")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0 and "4/4 runs, about 0 min left" in out and not err, out + err

    # the run of the killed worker went on where it was
    rows = read_table(folder / "results.jsonl").values()
    assert len(rows) == 4
    assert "resumed" in "".join(path.read_text() for path in folder.glob("*.txt"))
    for row in rows:
        log = config.read_log(folder / row["run"])
        assert [entry["step"] for entry in log] == list(range(0, 301, 10)) and row["ended"] == 300
        late = [entry["val"] for entry in log if entry["step"] > 200]  # the paper's last 100 steps
        assert abs(row["val"] - sum(late) / 10) < 1e-9 and len(late) == 10


@pytest.mark.slow
def test_a_sweep_survives_a_killed_worker_process(tmp_path):
    def worker_of(process):
        children = psutil.Process(process.pid).children(recursive=True)
        return next(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))

    check_sweep_with_a_killed_worker(tmp_path, worker_of, "--workers", 2)


# ---- a cluster


def documented(command):
    """A line of sweep.py's docstring."""
    return next(line for line in sweep.__doc__.splitlines() if line.startswith(command))


@pytest.mark.slow
def test_a_sweep_survives_a_killed_worker_of_a_cluster(tmp_path):
    """By the commands of the documentation: one certificate, without which nobody is let in."""
    make, export = documented("openssl"), documented("export").replace("/shared", str(tmp_path))
    shown = subprocess.run(
        ["bash", "-c", f"cd {tmp_path} && {make} && {export} && env"],
        capture_output=True,
        text=True,
        check=True,
    )
    tls = dict(line.split("=", 1) for line in shown.stdout.splitlines() if line[:4] == "DASK")
    assert len(tls) == 4
    environment = os.environ | tls
    with cluster(tmp_path, 2, "tls://", environment) as (address, _, first, _):
        for wrong in address, address.replace("tls", "tcp"):
            code, _, err = run_main(sweep, "--layers", 1, "--scheduler", wrong, "--out", tmp_path)
            assert code == 2 and "no Dask cluster" in err and err.count("\n") == 1, err
        where = ["--scheduler", address]
        folder = tmp_path / "sweep"
        check_sweep_with_a_killed_worker(folder, lambda _: first.pid, *where, env=environment)


def test_addresses_of_no_cluster_are_refused_in_one_line(tmp_path):
    with mock.patch.object(sweep, "PATIENCE", 1):
        for address in "nowhere", "tcp://127.0.0.1:9", "tls://127.0.0.1:9":
            where = ["--scheduler", address]
            assert_refused(sweep, *grid_in(tmp_path, 1), *where, says="no Dask cluster")


@pytest.mark.slow
def test_a_sweep_whose_scheduler_is_killed_ends_in_one_line(tmp_path):
    more = ["--flags", f"{TINY} --steps 100000", "--out", tmp_path / "sweep"]
    with cluster(tmp_path, 1) as (address, scheduler, _):
        process = start("sweep", *grid_in(tmp_path, 1)[:4], *more, "--scheduler", address)
        wait_for(lambda: list(tmp_path.glob("sweep/*/state.pt")), 120)
        scheduler.kill()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2, err
    assert_one_line(err, "the same command goes on")


def untrained(flags):
    """A row as if the run had ended, without its training."""
    found = dict(seconds=1.0, ended=40, val=0.9, x_1=0.9, x_1_learned=None)
    return row_of(flags, UserError("none")) | dict(error=None) | found


@contextlib.contextmanager
def sweeps_without_training():
    """Sweeps in this process on a Dask cluster in this process."""

    def connect(scheduler, workers):
        here = dict(dashboard_address="127.0.0.1:0", silence_logs=50)
        return Client(processes=False, n_workers=1, threads_per_worker=1, **here)

    with (
        mock.patch.object(sweep, "connect", connect),
        mock.patch.object(sweep, "run_and_report", untrained),
    ):
        yield


def grid_in(folder, *layers, seeds=1):
    return ["--layers", *layers, "--seeds", seeds, "--flags", TINY, "--out", folder]


# ---- the rows of several sweeps


def test_failed_rows_stay_until_they_are_made_again(tmp_path):
    def failing(flags):
        return row_of(flags, UserError("it blew up")) if flags.seed else untrained(flags)

    def errors():
        return [row["error"] for row in read_table(tmp_path / "results.jsonl").values()]

    with sweeps_without_training():
        with mock.patch.object(sweep, "run_and_report", failing):
            code, out, err = run_main(sweep, *grid_in(tmp_path, 1, seeds=2))
        assert code == 2 and "it blew up" in out and "figure4.png" in out, out
        assert_one_line(err, "1 runs failed")
        assert run_main(sweep, *grid_in(tmp_path, 2))[0] == 0
        assert sorted(errors(), key=str) == [None, None, "UserError: it blew up"]
        assert run_main(sweep, *grid_in(tmp_path, 1, seeds=2))[0] == 0
    assert errors() == [None] * 3


# ---- what the table shows


def test_a_row_is_what_a_run_left(tmp_path):
    """Its flags, the means over the last 100 steps, when each symbol was learned. And a table older
    than a flag has its default."""
    log = [
        dict(step=k, seconds=9.5, lr=0.1, val=1 - k / 400, x_1=1 - k / 400)
        for k in range(0, 301, 50)
    ]
    to_do = sweep.grid([(TINY, [2], 1)], tmp_path)
    with mock.patch.object(config, "read_log", lambda run: log):
        row = sweep.row_of(to_do[0])
    assert row["ended"] == 300 and row["val"] == row["x_1"] == (0.375 + 0.25) / 2
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3
    assert row["seconds"] == 9.5 and row["layers"] == 2
    path = tmp_path / "results.jsonl"
    old = {name: value for name, value in row.items() if name not in ("optimizer", "circuit")}
    config.write_rows(path, [old])
    assert read_table(path) == {row["run"]: row | dict(optimizer="adamw")}


def test_the_figures_hold_every_run(tmp_path):
    """A dot per run and symbol, at its own loss, and a bar at the median run; the law's steps."""
    rows = list(read_table(HERE / "results/sweep/results.jsonl").values())
    section_7 = [row for row in rows if row["causal"] and not row["circuit"]]
    drawn = []
    with mock.patch.object(config, "save_figure", lambda figure, path: drawn.append(figure)):
        figure_4(section_7, tmp_path / "figure4.png")
        depth.figure_law(rows, tmp_path / "law.png")
    left, right = drawn[0].axes

    # Figure 4: every run, and bars where half of the runs are no better
    def dots(axes):
        lines = [line for line in axes.lines if line.get_marker() == "o"]
        return sorted(tuple(point) for line in lines for point in line.get_xydata())

    assert dots(left) == sorted(
        (row["layers"] + (-0.12 if row["ic"] else 0.12), row["val"]) for row in section_7
    )
    symbols = [(row, k) for row in section_7 if row["ic"] for k in range(1, 6)]
    assert dots(right) == sorted(
        (row["layers"] + 0.15 * (k - 3), row[f"x_{k}"]) for row, k in symbols
    )
    with_ic = next(line for line in left.lines if line.get_label().startswith("with "))
    for x, bar in zip(*with_ic.get_data(), strict=True):
        losses = [row["val"] for row in section_7 if row["ic"] and row["layers"] == round(x)]
        assert sorted(losses)[3] == bar and len(losses) == 8

    # the law
    law = next(line for line in drawn[1].axes[0].lines if line.get_label() == "the law")
    assert list(law.get_ydata()[:8]) == [2, 3, 3, 4, 4, 4, 4, 5]
    counts = [int(text.get_text()) for text in drawn[1].axes[0].texts]
    assert sum(counts) == 5 * 8 + 8 * 2  # x_1 to x_5 by 8 seeds, x_1 to x_8 held by 2


# ---- the command line


def test_sweep_refuses_in_one_line(tmp_path):
    for flags, says in (
        ([], "--preset"),
        (["--layers", 1, "--flags=--D 1 --seed 3"], "--flags must not hold --seed"),
        (["--layers", 1, "--flags", "--layers=3"], "--flags must not hold --layers"),
        (["--layers", 1, "--flags", "--out /tmp/elsewhere"], "--flags must not hold --out"),
        (["--layers", 1, "--flags", "--Q 1"], "unrecognized arguments: --Q 1"),
    ):
        assert_refused(sweep, *flags, "--out", tmp_path, says=says)
    assert not [*tmp_path.iterdir()]
