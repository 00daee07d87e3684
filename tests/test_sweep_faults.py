"""sweep.py when something is wrong: nothing lost, nothing open, one line that says what to do."""

import contextlib
import json
import socket
from pathlib import Path
from unittest import mock

from parts import Refused, runs

import psutil
import pytest
from distributed import Client

import sweep
import train
from sweep import read_table, row_of
from tests.common import HERE, assert_one_line, assert_refused, run_main, start, wait_for
from tests.dask_cluster import cluster


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --target 0"
TINY += " --device cpu"
COMMITTED = HERE / "results/sweep/results.jsonl"


def untrained(flags):
    """A row as if the run had ended, without its training."""
    found = dict(seconds=1.0, ended=40, val=0.9, x_1=0.9, x_1_learned=None)
    return row_of(flags, Refused("none")) | dict(error=None) | found


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


def grid(folder, *layers, seeds=1):
    return ["--layers", *layers, "--seeds", seeds, "--flags", TINY, "--out", folder]


# ---- the rows of several sweeps; that two at once are refused is tested in test_sweep.py


def test_rows_of_other_grids_stay(tmp_path):
    with sweeps_without_training(), mock.patch.object(sweep, "report"):
        for layers in 1, 2, 1:
            code, out, err = run_main(sweep, *grid(tmp_path, layers, seeds=2))
            assert code == 0, out + err
    layers = [row["layers"] for row in read_table(tmp_path / "results.jsonl").values()]
    assert layers == [1, 1, 2, 2]


def test_failed_rows_stay_until_they_are_made_again(tmp_path):
    def failing(flags):
        return row_of(flags, Refused("it blew up")) if flags.seed else untrained(flags)

    def errors():
        return [row["error"] for row in read_table(tmp_path / "results.jsonl").values()]

    with sweeps_without_training():
        with mock.patch.object(sweep, "run_and_report", failing):
            code, out, err = run_main(sweep, *grid(tmp_path, 1, seeds=2))
        assert code == 1 and "it blew up" in out and "learned in this order" in out, out
        assert_one_line(err, "1 runs failed")
        assert run_main(sweep, *grid(tmp_path, 2))[0] == 0
        assert sorted(errors(), key=str) == [None, None, "it blew up"]
        assert run_main(sweep, *grid(tmp_path, 1, seeds=2))[0] == 0
    assert errors() == [None] * 3


# ---- who can reach it


@pytest.mark.slow
def test_nothing_listens_beyond_this_machine():
    def listening(processes):
        connections = [found for process in processes for found in process.net_connections("inet")]
        return {found.laddr for found in connections if found.status == "LISTEN"}

    this = psutil.Process()
    before = listening([this])
    client = sweep.connect(None, 1)
    try:
        opened = listening([this, *this.children(recursive=True)]) - before
        assert len(opened) >= 4 and {address.ip for address in opened} == {"127.0.0.1"}, opened
    finally:
        client.cluster.close()
        client.close()


# ---- a full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is full")
def test_a_full_disk_loses_nothing_that_was_found(tmp_path):
    with sweeps_without_training():
        assert run_main(sweep, *grid(tmp_path, 1))[0] == 0
        kept = (tmp_path / "results.jsonl").read_bytes()
        for name in "results.jsonl", "law.png":
            (tmp_path / f"{name}.tmp").symlink_to("/dev/full")
            says = f"cannot write {tmp_path / name}: No space left on device"
            assert_refused(sweep, *grid(tmp_path, 1, 2), says=says, code=1)
            if name == "results.jsonl":
                assert (tmp_path / name).read_bytes() == kept
            assert run_main(sweep, *grid(tmp_path, 1, 2))[0] == 0
            assert len(read_table(tmp_path / "results.jsonl")) == 2


# ---- clusters that are none, or no more


def test_a_port_that_is_no_dask_is_refused_in_one_line(tmp_path):
    """The worst of them: it takes the call, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute, mock.patch.object(sweep, "PATIENCE", 1):
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        says = f"no Dask scheduler answers at {address}"
        assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", address, says=says)


def test_addresses_of_no_cluster_are_refused_in_one_line(tmp_path):
    with mock.patch.object(sweep, "PATIENCE", 1):
        for address in "nowhere", "tcp://127.0.0.1:9", "tls://127.0.0.1:9", "foo://127.0.0.1:9":
            says = f"no Dask scheduler answers at {address}"
            assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", address, says=says)


@pytest.mark.slow
def test_clusters_that_cannot_do_it_are_refused_in_one_line(tmp_path):
    with cluster(tmp_path, 0) as (address, _), mock.patch.object(sweep, "PATIENCE", 1):
        where = ["--scheduler", address]
        assert_refused(sweep, *grid(tmp_path, 1), *where, says="there is no worker", code=1)
        gone = pytest.raises(ConnectionError, match="there is no worker")
        with Client(address) as client, gone:  # as when the last worker has gone
            next(sweep.rows_as_runs_end({client.submit(print): {}}, client))
    with cluster(tmp_path, 1, threads=2) as (address, *_):
        with Client(address) as client:
            (worker,) = client.nthreads()
        assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", address, says="--nthreads 1")
        assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", worker, says="this is a Worker")
    with cluster(tmp_path, 1, cwd=tmp_path) as (address, *_):
        says = "a worker has other code than this, or none: cd into a clone"
        assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", address, says=says)


@pytest.mark.slow
def test_a_sweep_whose_scheduler_is_killed_ends_in_one_line(tmp_path):
    more = ["--flags", f"{TINY} --steps 100000", "--out", tmp_path / "sweep"]
    with cluster(tmp_path, 1) as (address, scheduler, _):
        process = start("sweep", *grid(tmp_path, 1)[:4], *more, "--scheduler", address)
        wait_for(lambda: list(tmp_path.glob("sweep/*/state.pt")), 120)
        scheduler.kill()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert_one_line(err, "the same command goes on")


# ---- damaged tables


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The folder of a sweep whose one run was trained here."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patched, sweeps_without_training():
        patched.setattr(train, "draw_curves", lambda run: None)
        patched.setattr(sweep, "run_and_report", train_here)
        patched.setattr(sweep, "report", lambda rows, folder: None)
        assert run_main(sweep, *grid(folder, 1))[0] == 0
    assert len(read_table(folder / "results.jsonl")) == 1
    return folder


def train_here(flags):
    with contextlib.redirect_stdout(None):
        train.run_once(flags)
    return row_of(flags)


def test_a_row_that_is_not_what_its_run_left_is_refused(swept, tmp_path):
    """Whatever was edited; where only the table is left, at least what can be no row."""
    row = json.loads((swept / "results.jsonl").read_text())
    impossible = [dict(run=["L1"]), dict(val="low"), dict(x_1=True), dict(val=None), dict(ic="yes")]
    impossible += [dict(layers=2.5), dict(layers=None), dict(D=10**12), dict(targets=[2])]
    impossible += [dict(flag_of_tomorrow=1), dict(seconds="long")]
    other = [dict(val=0.01), dict(x_1=0.01), dict(x_1_learned=3), dict(lr=0.5), dict(seed=1)]
    other += [dict(ended=400)]
    for folder, changes in (tmp_path, impossible), (swept, impossible + other):
        for change in changes:
            runs.write_rows(path := folder / "results.jsonl", [row | change])
            before, says = path.read_bytes(), f"{path}, line 1, is no row of its run"
            assert_refused(sweep, *grid(folder, 1), says=says)
            assert path.read_bytes() == before


def test_a_table_that_is_none_is_refused(tmp_path):
    path, text = tmp_path / "results.jsonl", COMMITTED.read_bytes()
    damaged = [b"", b"3\n", b"[]\n", b"{}\n", text[:-9], text.replace(b"0.2", b"1e999", 1)]
    damaged += [text.replace(b"0.2", b"NaN", 1), text.decode().encode("utf-16"), b"val;x_1\n1;2\n"]
    damaged += [text.replace(b"true", b"tr\x00ue", 1), bytes(range(256)) * 40]
    for damage in damaged:
        path.write_bytes(damage)
        for more in [], ["--plot-only"]:
            assert_refused(sweep, *grid(tmp_path, 1), *more, says=str(path))
            assert path.read_bytes() == damage
