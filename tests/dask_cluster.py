"""A Dask cluster on loopback, for the tests of sweep.py."""

import contextlib
import os
import socket
import subprocess
import sys

from tests.common import HERE, wait_for


@contextlib.contextmanager
def cluster(folder, workers, scheme="tcp://", environment=None):
    """Yield (address, scheduler, worker, ...), processes started in this clone, once all workers
    are there; their logs are in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{free.getsockname()[1]}"
    processes, logs = [], []

    def dask(*arguments):
        logs.append(folder / f"dask{len(logs)}.log")
        command = [sys.executable, "-m", "dask", *arguments, "--dashboard-address", "127.0.0.1:0"]
        with open(logs[-1], "w") as log:
            places = dict(cwd=HERE, env=environment or os.environ, stdout=log, stderr=log)
            processes.append(subprocess.Popen(command, **places))

    try:
        dask("scheduler", "--host", address)
        for _ in range(workers):
            dask("worker", address, "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny")
        wait_for(lambda: "Scheduler at:" in logs[0].read_text(), 120)
        wait_for(lambda: all("Registered to:" in log.read_text() for log in logs[1:]), 120)
        yield address, *processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
