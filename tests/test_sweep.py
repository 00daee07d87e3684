"""sweep.py: runs that are killed, on a cluster or here; the table and Figure 4."""

import shutil
import subprocess
import sys
import time

import sweep
import train
from tests.common import HERE, assert_refused, outcome_of, output_of, run_main

import numpy as np
import psutil
import pytest


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --eval-every 20 --stop-below 0 --device cpu"
GRID = ["--layers", 1, "--no-mlp", "--seed", 0, 1, 2, *TINY.split(), "--workers", 2]
KILLER = """# train.py, which kills itself at its second evaluation if the seed is 1
import os
import train
def print_row(flags, task, rows):
    if flags.seed == 1 and len(rows) == 2:
        os.kill(os.getpid(), 9)
train.print_row = print_row
train.main()
"""


def test_the_same_command_continues_a_killed_run_to_the_same_bits(tmp_path, monkeypatch):
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
    assert out.count("FAILED, see") == 1
    assert "1 of 3 runs to do" in output_of(sweep, *words)
    assert "resumed" in failed.read_text()
    [killed] = folder.glob("*_s1")
    flags = ["--layers", 1, "--no-mlp", *TINY.split(), "--steps", 40, "--seed", 1]
    output_of(train, *flags, "--save-every", 0, "--out", tmp_path / "whole")
    assert outcome_of(killed) == outcome_of(tmp_path / "whole")
    assert len(train.read_file(folder / "results.jsonl")) == 3


def test_another_run_of_the_same_name_is_refused(tmp_path, whole):
    """In the same grid, or in the directory of that name."""
    words = [*TINY.split(), "--out", tmp_path, "--init"]
    assert_refused(sweep, *words, "x/y", "x,y", says="two runs would have one name")
    shutil.copytree(whole, train.parse_flags([*TINY.split(), "--init", "x/y"], tmp_path).out)
    assert_refused(sweep, *words, "x-y", "x/y", says="has another")


def test_a_mistake_is_said_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(sweep, "--heads", 1, 0, says="from 1 to")
    assert_refused(sweep, "--heads", 4, 3, says="does not divide --width")
    assert_refused(sweep, "--out", "nowhere", says="nowhere")
    assert_refused(sweep, "--out", tmp_path, says="there are no runs")
    assert not [*tmp_path.iterdir()]


def test_sigterm_ends_the_training_too(tmp_path):
    words = [*GRID, "--steps", 20, 10**6, "--workers", 1, "--out", tmp_path]
    process = subprocess.Popen([sys.executable, "sweep.py", *map(str, words)], cwd=HERE)
    while len([*tmp_path.glob("*/state.pt")]) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    [training] = psutil.Process(process.pid).children()
    process.terminate()
    process.wait(timeout=60)
    assert not training.is_running()
    assert len([*tmp_path.glob("*/state.pt")]) == 2  # the others were never begun


def a_finished_run(folder, words):
    """Write what a run left, before --examples existed, with a loss that falls to 1/4 in 300 steps;
    return its directory."""
    log = [dict(step=k, lr=0, val=1 - k / 400, x_1=1 - k / 400) for k in range(0, 301, 50)]
    flags = train.parse_flags(f"{TINY} {words}".split(), folder)
    config = train.values_of(flags)
    del config["examples"]
    train.write_file(flags.out / "config.json", config)
    train.write_file(flags.out / "log.jsonl", log)
    (flags.out / "model.pt").touch()
    return flags.out


def test_the_table_keeps_what_is_gone_and_adds_what_can_be_read(tmp_path):
    committed, table = HERE / "results/sweep/results.jsonl", tmp_path / "results.jsonl"
    shutil.copy(committed, table)
    runs = [a_finished_run(tmp_path, f"--layers {layers}") for layers in range(1, 5)]
    lookup = a_finished_run(tmp_path, "--task extras.lookup:Lookup")
    # of the name that a row with other flags has
    renamed = a_finished_run(tmp_path, "--layers 5").rename(tmp_path / "L4_H8_D5_steps2500_s0")
    (runs[1] / "log.jsonl").write_text("")
    (runs[2] / "config.json").write_text("{}}")
    train.write_file(runs[3] / "config.json", dict(rotary="qk"))  # of another train.py
    out = output_of(sweep, "--out", tmp_path)
    for run in runs[1:]:
        assert f"no new row of {run.name}, which cannot be read: " in out
    rows = train.read_file(table)
    assert rows[:-3] == train.read_file(committed)
    added = [row["run"] for row in rows[-3:]]
    assert added == sorted([runs[0].name, lookup.name, renamed.name])
    [row] = (row for row in rows if row["run"] == runs[0].name)
    assert row["ended"] == 300 and row["val"] == 0.25 and row["lr"] == 1e-3
    assert row["x_1_learned"] == pytest.approx(800 / 3)  # N=2: two thirds of 1/2 is 1/3
    assert row["examples"] == train.DEFAULTS["examples"]
    assert f"\n{len(rows) - 1} runs: " in out and (tmp_path / "figure4.png").exists()


def points(axes, color, marker):
    """Return [(column, loss), ...] of all such markers in a panel, sorted."""
    found = []
    for line in axes.lines:
        if (line.get_color(), line.get_marker()) == (color, marker):
            found += [(round(x), y) for x, y in line.get_xydata()]
    return sorted(found)


def test_figure_4_holds_every_run():
    """For each optimizer and batch, in each series a dot per run at its own loss, and a line
    through the means of the columns."""
    rows = train.read_file(HERE / "results/sweep/results.jsonl")
    panels = sweep.figure_4([train.DEFAULTS | row for row in rows]).axes
    groups = (128, "muon"), (128, "adamw"), (512, "adamw")
    for (batch, optimizer), left, right in zip(groups, panels[::2], panels[1::2], strict=True):
        own = [row for row in rows if (row["batch"], row["optimizer"]) == (batch, optimizer)]
        columns = sorted({(row["layers"], row["steps"]) for row in own})
        series = [(left, "last", "val", sweep.RED), (left, "all", "val", sweep.INK)]
        series += [(right, "all", f"x_{k}", sweep.symbol_color(k)) for k in range(1, 6)]
        for axes, targets, name, color in series:
            runs = [row for row in own if row["targets"] == targets]
            runs = [(columns.index((row["layers"], row["steps"])), row[name]) for row in runs]
            assert points(axes, color, "o") == sorted(runs)
            means = {x: np.mean([loss for each, loss in runs if each == x]) for x, _ in runs}
            np.testing.assert_allclose(points(axes, color, "."), sorted(means.items()))


def test_figure_4_has_a_column_for_each_point_of_a_grid():
    """In the order of its values, also where only the last symbol was asked for."""
    row, rows = train.DEFAULTS | dict(D=1, layers=2, x_1=0.5, seed=1), []
    for heads, targets in (8, "all"), (16, "all"), (4, "last"), (1, "all"):
        rows.append(row | dict(heads=heads, val=heads / 20, targets=targets))
    left = sweep.figure_4(rows).axes[0]
    assert points(left, sweep.INK, "o") == [(0, 0.05), (2, 0.4), (3, 0.8)]
    assert points(left, sweep.RED, "o") == [(1, 0.2)]
