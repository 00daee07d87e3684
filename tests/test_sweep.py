"""sweep.py: many runs, each once, on workers that may die; what their table shows."""

import math
import os
import shutil
import signal
import statistics
import subprocess
from unittest import mock

from parts import runs
from parts.flags import DEFAULTS, MACHINE_FLAGS

import psutil
import pytest
from dask.utils import key_split
from distributed import Client, Security

import sweep
from sweep import (
    claims,
    figure_4,
    figure_law,
    law_table,
    least_depths,
    read_table,
    write_table,
)
from tests.common import HERE, assert_refused, contents, run_main, start, wait_for
from tests.dask_cluster import cluster


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --target 0"
TINY += " --device cpu"


# ---- the runs


def test_a_sweep_runs_each_run_once(tmp_path):
    grid = ["--layers", 1, 2, "--seeds", 2, "--flags", TINY, "--flags", f"{TINY} --no-ic"]
    grid += ["--out", tmp_path]
    process = start("sweep", *grid, "--workers", 2)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0 and "8/8 runs, 0 failed" in out and not err, out + err
    assert len(read_table(tmp_path / "results.csv")) == 8
    before = contents(tmp_path)
    for name in ("figure4.png", "law.png"):
        (tmp_path / name).unlink()
    for more in [], ["--plot-only"]:  # nothing is left to run
        code, out, err = run_main(sweep, *grid, *more)
        assert code == 0 and "runs, 0 failed" not in out, out + err
        assert contents(tmp_path) == before


def test_dask_gets_the_runs_as_one_kind_and_the_longest_first(tmp_path):
    """Dask gives an idle worker what waits at a busy one only if it has seen how long such a task
    takes."""
    groups = [("--D 1 --device cpu", [1, 3, 2], 2)]
    with (
        Client(processes=False, n_workers=1, dashboard_address="127.0.0.1:0") as client,
        mock.patch.object(
            sweep, "run_and_report", lambda flags: sweep.row_of(flags, OSError("no"))
        ),
        mock.patch.object(client, "submit", wraps=client.submit) as submit,
    ):
        to_do, table = sweep.grid(groups, tmp_path), {}
        assert sweep.sweep(to_do, table, tmp_path / "results.csv", client) == 6
    assert {row["error"] for row in table.values()} == {"no"} and len(table) == 6
    submitted = [call.args[1] for call in submit.call_args_list]
    assert [flags["layers"] for flags in submitted] == [3, 3, 2, 2, 1, 1]
    priorities = [call.kwargs["priority"] for call in submit.call_args_list]
    assert priorities == [sweep.cost(flags) for flags in submitted]
    assert len({key_split(call.kwargs["key"]) for call in submit.call_args_list}) == 1


def test_presets_are_the_grids_of_the_committed_table(tmp_path):
    def settings(rows):
        names = [name for name in DEFAULTS if name not in (*MACHINE_FLAGS, "dtype")]
        return {str([row[name] for name in names]) for row in rows}

    grids = {name: sweep.grid(groups, tmp_path) for name, groups in sweep.PRESETS.items()}
    sizes = {name: len(grid) for name, grid in grids.items()}
    assert sizes == dict(laptop=24, night=88, law=39, paper=128)
    committed = settings(read_table(HERE / "results/sweep/results.csv").values())
    assert committed == settings(grids["night"] + grids["law"])
    assert settings(grids["laptop"]) <= committed
    assert len(sweep.grid([("--D 1", [2, 2], 1)], tmp_path)) == 1  # the same run twice is one
    with pytest.raises(ValueError, match="two sets have a run L1"):
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
    assert process.returncode == 0 and "4/4 runs, 0 failed" in out and not err, out + err

    # the run of the killed worker went on where it was
    rows = read_table(folder / "results.csv").values()
    assert len(rows) == 4
    assert "resumed" in "".join(path.read_text() for path in folder.glob("*.txt"))
    for row in rows:
        log = runs.read_log(folder / row["run"])
        assert [entry["step"] for entry in log] == list(range(0, 301, 10)) and row["ended"] == 300
        late = [entry["val"] for entry in log if entry["step"] > 200]  # the paper's last 100 steps
        assert abs(row["val"] - sum(late) / 10) < 1e-9 and len(late) == 10


def test_a_sweep_survives_a_killed_worker_process(tmp_path):
    def worker_of(process):
        children = psutil.Process(process.pid).children(recursive=True)
        return next(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))

    check_sweep_with_a_killed_worker(tmp_path, worker_of, "--workers", 2)


# ---- a cluster


def documented(command):
    """A line of sweep.py's docstring."""
    return next(line for line in sweep.__doc__.splitlines() if line.startswith(command))


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
        certificate = dict.fromkeys(("tls_ca_file", "tls_client_cert"), str(tmp_path / "dask.pem"))
        with Client(address, security=Security(**certificate)) as client:
            old_module = "import sys, types; sys.modules['data'] = types.ModuleType('data')"
            client.run(exec, old_module)  # as if an earlier sweep had sent it
            client.run_on_scheduler(exec, old_module)
        folder = tmp_path / "sweep"
        check_sweep_with_a_killed_worker(folder, lambda _: first.pid, *where, env=environment)


# ---- what the table shows


def test_the_table_is_read_as_it_was_written(tmp_path):
    committed = read_table(HERE / "results/sweep/results.csv")
    one, failed = (dict(row) for row in list(committed.values())[:2])
    assert one["ic"] is True and one["causal"] is True and one["lr"] == 0.002 and one["layers"] == 5
    assert one["error"] is None and one["x_5_below_half"] is None and one["ended"] == 1500
    failed |= dict(error="it, 'said' \"so\"", val=None)
    table = committed | {one["run"]: one, failed["run"]: failed}
    write_table(tmp_path / "results.csv", table)
    assert read_table(tmp_path / "results.csv") == table

    # a table from before there were these flags
    lines = (tmp_path / "results.csv").read_text().splitlines()
    younger = lines[0].split(",").index("optimizer")
    old = [
        ",".join(cell for i, cell in enumerate(line.split(",")) if i != younger) for line in lines
    ]
    (tmp_path / "results.csv").write_text("\n".join(old[:2]))
    assert list(read_table(tmp_path / "results.csv").values()) == [one | dict(optimizer="adamw")]


def test_least_depths_are_counted_by_seed():
    rows = [
        dict(seed=seed, layers=layers, x_1=loss)
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
    def row(run, layers, ic=True, causal=True, **losses):
        fixed = dict(seed=0, D=2, circuit=False)
        return dict(run=run, layers=layers, ic=ic, causal=causal, **fixed, **losses)

    rows = [
        row("one", 2, x_1=0.1, x_2=0.2, x_1_below_half=10.0, x_2_below_half=20.0),
        row("two", 2, x_1=0.1, x_2=0.8, x_1_below_half=30.0, x_2_below_half=None),
        row("three", 3, x_1=0.1, x_2=0.1, x_1_below_half=40.0, x_2_below_half=35.0),
        row("four", 3, x_1=0.8, x_2=0.8, x_1_below_half=None, x_2_below_half=None),
        row("five", 3, causal=False, x_1=0.9, x_2=0.9, x_1_below_half=None, x_2_below_half=None),
        row("six", 1, ic=False, val=0.74),
        row("seven", 1, ic=False, val=0.65),
    ]
    table, counted = "\n".join(claims([row for row in rows if row["causal"]])).split("\n\n")
    assert "| 2 | 2 | 2, 20 | 1, 20 | 1 of 1 |" in table, table
    assert "| 3 | 2 | 1, 40 | 1, 35 | 0 of 1 |" in table, table
    assert "above 0.7: 1 of 2 runs" in counted and "in this order: 1 of 2 runs" in counted, counted
    law, beaten = "\n".join(law_table(rows)).split("\n\n")
    assert "causal mask: the law | 2 | 3 |" in law, law
    assert "causal mask: attention learned | 2 | 2 |" in law, law
    assert "no mask: the law | 2 | 2 |" in law and "no mask: attention learned | - | - |" in law, (
        law
    )
    assert beaten.endswith(": one (x_2)"), beaten


def test_the_figures_hold_every_run(tmp_path):
    """A dot per run and symbol, at its own loss, and a mean per depth; the law's steps."""
    rows = list(read_table(HERE / "results/sweep/results.csv").values())
    section_7 = [row for row in rows if row["causal"] and not row["circuit"]]
    drawn = []
    with mock.patch.object(runs, "save_figure", lambda figure, path: drawn.append(figure)):
        figure_4(section_7, tmp_path / "figure4.png")
        figure_law(rows, tmp_path / "law.png")
    left, right = drawn[0].axes

    # Figure 4: every run, and the means
    def dots(axes):
        lines = [line for line in axes.lines if line.get_marker() == "o"]
        return sorted(tuple(point) for line in lines for point in line.get_xydata())

    assert dots(left) == sorted((row["layers"], row["val"]) for row in section_7)
    symbols = [(row, k) for row in section_7 if row["ic"] for k in range(1, 6)]
    assert dots(right) == sorted(
        (row["layers"] + 0.1 * (k - 3), row[f"x_{k}"]) for row, k in symbols
    )
    with_ic = next(line for line in left.lines if line.get_label().startswith("with "))
    for layers, mean in zip(*with_ic.get_data(), strict=True):
        losses = [row["val"] for row in section_7 if row["ic"] and row["layers"] == layers]
        assert len(losses) == 8 and abs(statistics.fmean(losses) - mean) < 1e-12

    # the law
    law = next(line for line in drawn[1].axes[0].lines if line.get_label() == "the law")
    assert list(law.get_ydata()[:8]) == [2, 3, 3, 4, 4, 4, 4, 5]
    counts = [int(text.get_text()) for text in drawn[1].axes[0].texts]
    assert sum(counts) == 5 * 8 + 8 * 2  # x_1 to x_5 by 8 seeds, x_1 to x_8 held by 2


# ---- the command line


def test_flags_of_the_runs_that_the_grid_sets_are_refused(tmp_path):
    for text, says in (
        ("--seeds 4", "give --seeds to sweep.py"),
        ("--D 1 --seed 3", "give --seeds to sweep.py"),
        ("--layers=3", "give --layers to sweep.py"),
        ("--out /tmp/elsewhere", "give --out to sweep.py"),
        ("--D 1 '--no-ic", "close the quote"),
        ("--Q 1", "unrecognized arguments: --Q 1"),
    ):
        for form in ["--flags", text], [f"--flags={text}"]:
            assert_refused(sweep, "--layers", 1, *form, "--out", tmp_path, says=says)
    assert not list(tmp_path.iterdir())


def test_flags_of_one_word_begin_with_dashes(tmp_path):
    for form in ["--flags", "--no-ic"], ["--flags=--no-ic"]:
        asked = sweep.parse_flags(["--layers", "1", *form, "--seeds", "2"])
        assert asked.flags == ["--no-ic"] and asked.seeds == 2
    assert sweep.grid([("--no-ic", [1], 1)], tmp_path)[0]["ic"] is False


def test_sweep_refuses_in_one_line(tmp_path):
    here = ["--out", tmp_path]
    assert_refused(sweep, *here, says="--preset")
    assert_refused(sweep, "--layers", 1, "--plot-only", *here, says="no finished run")
    assert_refused(sweep, "--preset", "laptop", "--seeds", 8, *here, says="instead of --preset")
    for count in 0, 10**12:
        assert_refused(sweep, "--layers", 1, "--workers", count, *here, says="at least 1")
    assert_refused(sweep, "--layers", 1, "--seeds", 0, *here, says="at least 1")
    for count in 10**12, 10**400:
        assert_refused(sweep, "--layers", 1, "--seeds", count, *here, says="than 10000 runs")
    (tmp_path / "file").write_text("")
    refused = ["--layers", 1, "--out", tmp_path / "file"]
    assert_refused(sweep, *refused, says="choose another --out")
