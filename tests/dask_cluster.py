"""A Dask cluster on loopback, for the tests of sweep.py."""

import contextlib
import os
import socket
import subprocess
import sys

from tests.common import HERE, wait_for


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def cluster(folder, workers, scheme="tcp://", environment=None, threads=1, cwd=HERE):
    """(address, scheduler, worker, ...), processes started in this clone, once all workers are
    there; their logs in a folder."""
    processes, logs = [], []

    def dask(*arguments):
        logs.append(folder / f"dask{len(logs)}.log")
        command = [sys.executable, "-m", "dask", *map(str, arguments)]
        command += ["--dashboard-address", "127.0.0.1:0"]
        with open(logs[-1], "w") as log:
            started = subprocess.Popen(
                command, cwd=cwd, env=environment or os.environ, stdout=log, stderr=log
            )
        processes.append(started)

    address = f"{scheme}127.0.0.1:{free_port()}"
    try:
        dask("scheduler", "--host", address)
        for _ in range(workers):
            dask("worker", address, "--host", "127.0.0.1", "--nthreads", threads, "--no-nanny")
        wait_for(lambda: "Scheduler at:" in logs[0].read_text(), 120)
        wait_for(lambda: all("Registered to:" in log.read_text() for log in logs[1:]), 120)
        yield address, *processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
