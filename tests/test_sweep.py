"""sweep.py: many runs, each once, on workers that may die; what their table shows."""

import math
import os
import shutil
import signal
import subprocess
from unittest import mock

from parts import Refused, runs
from parts.flags import SETTINGS, Flags

import psutil
import pytest
from dask.utils import key_split
from distributed import Client

import sweep
from sweep import counted, counted_by_law, figure_4, figure_law, least_depths, read_table
from tests.common import HERE, assert_refused, contents, run_main, start, wait_for
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
    assert process.returncode == 0 and "8/8 runs, about 0 min left" in out and not err, out + err
    assert len(read_table(tmp_path / "results.jsonl")) == 8
    before = contents(tmp_path)
    for name in ("figure4.png", "law.png"):
        (tmp_path / name).unlink()
    for more in [], ["--plot-only"]:  # nothing is left to run
        code, out, err = run_main(sweep, *grid, *more)
        assert code == 0 and "runs to do" not in out, out + err
        assert contents(tmp_path) == before


def fail(flags):
    return sweep.row_of(flags, Refused("no"))


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
    assert {row["error"] for row in table.values()} == {"no"} and len(table) == 6
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
    assert sizes == dict(laptop=24, night=88, law=39, waiting=589, paper=128)
    rows = read_table(HERE / "results/sweep/results.jsonl").values()
    committed = settings(Flags(**row) for row in rows)
    assert committed == settings(grids["night"] + grids["law"])
    assert settings(grids["laptop"]) <= committed
    assert len(sweep.grid([("--D 1", [2, 2], 1)], tmp_path)) == 1  # the same run twice is one
    with pytest.raises(Refused, match="two sets have a run L1"):
        sweep.grid([("--eval-every 10", [1], 1), ("--eval-every 20", [1], 1)], tmp_path)


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
        log = runs.read_log(folder / row["run"])
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
@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make a certificate")
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
            assert code == 2 and "no Dask scheduler" in err and err.count("\n") == 1, err
        where = ["--scheduler", address]
        folder = tmp_path / "sweep"
        check_sweep_with_a_killed_worker(folder, lambda _: first.pid, *where, env=environment)


# ---- what the table shows


def test_a_row_is_what_a_run_left(tmp_path):
    """Its flags, the means over the last 100 steps, when each symbol was learned. And a table older
    than a flag has its default."""
    log = [
        dict(step=k, seconds=9.5, lr=0.1, val=1 - k / 400, x_1=1 - k / 400)
        for k in range(0, 301, 50)
    ]
    to_do = sweep.grid([(TINY, [2], 1)], tmp_path)
    with mock.patch.object(runs, "read_log", lambda run: log):
        row = sweep.row_of(to_do[0])
    assert row["ended"] == 300 and row["val"] == row["x_1"] == (0.375 + 0.25) / 2
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3
    assert row["seconds"] == 9.5 and row["layers"] == 2
    path = tmp_path / "results.jsonl"
    old = {name: value for name, value in row.items() if name not in ("optimizer", "mixture")}
    runs.write_rows(path, [old])
    assert read_table(path) == {row["run"]: row | dict(optimizer="adamw")}


def test_least_depths_are_counted_by_seed():
    rows = [
        dict(seed=seed, layers=layers, x_1=loss, task="chain", N=4, D=1)
        for seed, layers, loss in (
            (0, 1, 0.9),
            (0, 2, 0.1),
            (0, 3, 0.0),
            (1, 2, 0.7),
            (1, 3, 0.4),
            (2, 3, None),
        )
    ]
    assert least_depths(rows, 1) == [2, 3] and least_depths(rows[:1], 1) == [math.inf]
    assert least_depths(rows[2:3], 1) == [3] and least_depths(rows, 2) == []


def test_the_claims_are_counted():
    def row(run, layers, *learned, ic=True, causal=True, **losses):
        fixed = dict(seed=0, D=2, N=4, task="chain", targets=[], circuit="", ic=ic)
        steps = {f"x_{k}_learned": step for k, step in enumerate(learned, 1)}
        return dict(run=run, layers=layers, causal=causal, **fixed, **losses, **steps)

    rows = [
        row("one", 2, 10.0, 20.0, x_1=0.1, x_2=0.2),
        row("two", 2, 30.0, None, x_1=0.1, x_2=0.8),
        row("three", 3, 40.0, 35.0, x_1=0.1, x_2=0.1),
        row("four", 3, None, None, x_1=0.8, x_2=0.8),
        row("five", 3, None, None, causal=False, x_1=0.9, x_2=0.9),
        row("six", 1, ic=False, val=0.74),
        row("seven", 1, ic=False, val=0.65),
    ]
    lines = counted([row for row in rows if row["causal"]])
    assert lines == [
        "learned by (median step):",
        "2 layers, 2 runs: x_1 2 (20), x_2 1 (20)",
        "3 layers, 2 runs: x_1 1 (40), x_2 1 (35)",
        "x_1, x_2, ... learned in this order: 1 of 2 runs",
        "without the implicit curriculum above 0.7: 1 of 2",
    ]
    lines = counted_by_law(rows)
    assert lines[1].endswith("causal mask, attention learned: x_1 2 (law 2), x_2 2 (law 3)")
    assert lines[3].endswith("no mask, attention learned: x_1 - (law 2), x_2 - (law 2)")
    assert lines[4].endswith(": one (x_2)") and len(lines) == 5


def test_the_figures_hold_every_run(tmp_path):
    """A dot per run and symbol, at its own loss, and a bar at the median run; the law's steps."""
    rows = list(read_table(HERE / "results/sweep/results.jsonl").values())
    section_7 = [row for row in rows if row["causal"] and not row["circuit"]]
    drawn = []
    with mock.patch.object(runs, "save_figure", lambda figure, path: drawn.append(figure)):
        figure_4(section_7, tmp_path / "figure4.png")
        figure_law(rows, tmp_path / "law.png")
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
        (["--layers", 1, "--plot-only"], "no finished run"),
        (["--preset", "laptop", "--seeds", 8], "instead of --preset"),
        (["--layers", 1, "--workers", 0], "at least 1"),
        (["--layers", 1, "--workers", 10**12], "at most 1024"),
        (["--layers", 1, "--seeds", 0], "from 1"),
        (["--layers", 1, "--seeds", 10**400], "to 10000"),
        (["--layers", 1, "--flags", "--seeds 4"], "give --seeds to sweep.py"),
        (["--layers", 1, "--flags=--D 1 --seed 3"], "give --seeds to sweep.py"),
        (["--layers", 1, "--flags", "--layers=3"], "give --layers to sweep.py"),
        (["--layers", 1, "--flags", "--out /tmp/elsewhere"], "give --out to sweep.py"),
        (["--layers", 1, "--flags", "--D 1 '--no-ic"], "close the quote"),
        (["--layers", 1, "--flags", "--Q 1"], "unrecognized arguments: --Q 1"),
    ):
        assert_refused(sweep, *flags, "--out", tmp_path, says=says)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
    assert sweep.grid([("--no-ic", [1], 1)], tmp_path)[0].ic is False
    (tmp_path / "file").write_text("")
    refused = ["--layers", 1, "--out", tmp_path / "file"]
    assert_refused(sweep, *refused, says=f"{tmp_path / 'file'}: File exists", code=1)
