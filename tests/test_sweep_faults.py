"""sweep.py when something is wrong: nothing lost, nothing open, one line that says what to do."""

import contextlib
import socket
import sys
import threading
from pathlib import Path
from unittest import mock

import psutil
import pytest
from distributed import Client

import sweep
from sweep import read_table, row_of
from tests.common import HERE, assert_one_line, assert_refused, run_main, start, wait_for
from tests.dask_cluster import cluster


TINY = "--heads 2 --width 16 --D 1 --N 2 --batch 8 --steps 40 --eval-every 10 --target 0"
TINY += " --device cpu"
COMMITTED = HERE / "results/sweep/results.csv"


def untrained(flags):
    """A row as if the run had ended, without its training."""
    losses = dict.fromkeys(("val", f"x_{flags['D']}"), 0.9)
    return row_of(flags, OSError()) | dict(error=None, seconds=1.0, ended=40, **losses)


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
    with sweeps_without_training():
        for layers in 1, 2, 1:
            code, out, err = run_main(sweep, *grid(tmp_path, layers, seeds=2))
            assert code == 0, out + err
    layers = [row["layers"] for row in read_table(tmp_path / "results.csv").values()]
    assert layers == [1, 1, 2, 2]


def test_failed_rows_stay_until_they_are_made_again(tmp_path):
    def failing(flags):
        return row_of(flags, ValueError("it blew up")) if flags["seed"] else untrained(flags)

    with sweeps_without_training():
        with mock.patch.object(sweep, "run_and_report", failing):
            code, out, err = run_main(sweep, *grid(tmp_path, 1, seeds=2))
        assert code == 1 and "1 runs failed" in err and err.count("\n") == 1, err
        assert "it blew up" in out and "runs that learned several" in out, out
        assert run_main(sweep, *grid(tmp_path, 2))[0] == 0
        errors = [row["error"] for row in read_table(tmp_path / "results.csv").values()]
        assert sorted(errors, key=str) == [None, None, "it blew up"]
        assert run_main(sweep, *grid(tmp_path, 1, seeds=2))[0] == 0
    errors = [row["error"] for row in read_table(tmp_path / "results.csv").values()]
    assert errors == [None] * 3


# ---- who can reach it


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
        kept = (tmp_path / "results.csv").read_bytes()
        for name in "results.csv", "figure4.png", "law.png":
            (tmp_path / f"{name}.tmp").symlink_to("/dev/full")
            code, out, err = run_main(sweep, *grid(tmp_path, 1, 2))
            assert code == 1 and err.count("\n") == 1 and "No space left on device" in err, err
            assert "| 1 | 1 | 0 | 0 of 0 |" in out and "| 2 | 1 | 0 | 0 of 0 |" in out, out
            if name == "results.csv":
                assert (tmp_path / name).read_bytes() == kept
            assert run_main(sweep, *grid(tmp_path, 1, 2))[0] == 0
            assert len(read_table(tmp_path / "results.csv")) == 2


# ---- clusters that are none, or no more


def serve_once(greeting, served):
    """A server that is no Dask: it says this to everybody, and waits."""
    served.listen()
    connections = []
    while True:
        try:
            connections.append(served.accept()[0])
        except OSError:
            return
        connections[-1].sendall(greeting)


@pytest.mark.parametrize(
    "greeting", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n"]
)
def test_a_port_that_is_no_dask_is_refused_in_one_line(tmp_path, greeting):
    with socket.socket() as served, mock.patch.object(sweep, "PATIENCE", 2):
        served.bind(("127.0.0.1", 0))
        threading.Thread(target=serve_once, args=(greeting, served), daemon=True).start()
        address = f"tcp://127.0.0.1:{served.getsockname()[1]}"
        where = ["--scheduler", address]
        assert_refused(
            sweep, *grid(tmp_path, 1), *where, says=f"no Dask scheduler answers at {address}"
        )
        served.shutdown(socket.SHUT_RDWR)


def test_addresses_of_no_cluster_are_refused_in_one_line(tmp_path):
    for address in "nowhere", "tcp://127.0.0.1:9", "tls://127.0.0.1:9", "foo://127.0.0.1:9":
        where = ["--scheduler", address]
        assert_refused(
            sweep, *grid(tmp_path, 1), *where, says=f"no Dask scheduler answers at {address}"
        )


def test_clusters_that_cannot_do_it_are_refused_in_one_line(tmp_path):
    with cluster(tmp_path, 0) as (address, _), mock.patch.object(sweep, "PATIENCE", 1):
        code, _, err = run_main(sweep, *grid(tmp_path, 1), "--scheduler", address)
        assert code == 1, err
        assert_one_line(err, "there is no worker")
        gone = pytest.raises(ConnectionError, match="there is no worker")
        with Client(address) as client, gone:  # as when the last worker has gone
            next(sweep.rows_as_runs_end({client.submit(print): {}}, client))
    with cluster(tmp_path, 1, threads=2) as (address, *_):
        with Client(address) as client:
            (worker,) = client.nthreads()
        assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", address, says="--nthreads 1")
        assert_refused(sweep, *grid(tmp_path, 1), "--scheduler", worker, says="to a Worker")


def test_a_sweep_whose_scheduler_is_killed_ends_in_one_line(tmp_path):
    more = ["--flags", f"{TINY} --steps 100000", "--out", tmp_path / "sweep"]
    with cluster(tmp_path, 1) as (address, scheduler, _):
        process = start("sweep", *grid(tmp_path, 1)[:4], *more, "--scheduler", address)
        wait_for(lambda: list(tmp_path.glob("sweep/*/state.pt")), 120)
        scheduler.kill()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert_one_line(err, "the same command goes on")


def test_every_module_of_ours_that_is_loaded_is_sent():
    sent = {file.name for file in sweep.our_modules()}
    assert {"sweep.py", "train.py", "runs.py", "model.py", "data.py", "table.py"} <= sent
    ours = {f"{name}.py" for name in sys.modules if (HERE / f"{name}.py").is_file()}
    assert sent == ours


# ---- damaged tables


def damaged(text):
    """{what was done to it: (the bytes of the table, the line that is wrong)}"""
    lines = text.splitlines()
    cells = lines[2].split(",")

    def with_cell(column, value):
        changed = list(cells)
        changed[lines[0].split(",").index(column)] = value
        return "\n".join([*lines[:2], ",".join(changed), *lines[3:]]).encode()

    return {
        "semicolons": (text.replace(",", ";").encode(), 1),
        "no header": ("\n".join(lines[1:]).encode(), 1),
        "empty": (b"", 1),
        "text in a number": (with_cell("val", "abc"), 3),
        "not a number": (with_cell("x_1", "nan"), 3),
        "too large": (with_cell("x_1", "1e999"), 3),
        "half a layer": (with_cell("layers", "2.5"), 3),
        "no layers": (with_cell("layers", ""), 3),
        "neither true nor false": (with_cell("ic", "yes"), 3),
        "no loss": (with_cell("val", ""), 3),
        "not so many symbols": (with_cell("D", "1000000000000"), 3),
        "bytes": (with_cell("run", "L1").replace(b"L1", b"L\xff\xfe1"), None),
        "bytes in a number": (with_cell("x_1", "0.5").replace(b",0.5,", b",0\xff5,"), None),
        "zeros": (with_cell("val", "0\x00.5"), 3),
        "cut off": (text[: len(text) // 2].rpartition(",")[0].encode(), None),
        "too many cells": ("\n".join([*lines[:2], lines[2] + ",1", *lines[3:]]).encode(), 3),
        "an open quote": (with_cell("optimizer", '"muon'), None),
        "other letters": (text.encode("utf-16"), 1),
        "a picture": (bytes(range(256)) * 40, 1),
    }


@pytest.mark.parametrize("what", damaged(COMMITTED.read_text()))
def test_a_damaged_table_is_refused_in_one_line(tmp_path, what):
    content, line = damaged(COMMITTED.read_text())[what]
    (tmp_path / "results.csv").write_bytes(content)
    says = f"{tmp_path / 'results.csv'}, line {line or ''}"
    for more in [], ["--plot-only"]:
        assert_refused(sweep, *grid(tmp_path, 1), *more, says=says)
        assert (tmp_path / "results.csv").read_bytes() == content


def test_a_table_from_a_spreadsheet_is_read(tmp_path):
    """With a mark of its encoding in front, and lines that end otherwise."""
    text = COMMITTED.read_bytes().replace(b"\r\n", b"\n")
    (tmp_path / "results.csv").write_bytes(b"\xef\xbb\xbf" + text)
    assert read_table(tmp_path / "results.csv") == read_table(COMMITTED)
