"""What the stages share, each file importing only those before it: flags, flow, runs, circuit,
search, emergence; intervals. Imported before torch loads, which reads how threads wait."""

import os
from pathlib import Path


def how_threads_wait():
    """How many turns a thread of OpenMP waits in a circle for the others before it sleeps, as text.
    On a quiet machine many turns are fastest; on a busy one they take the time of the very thread
    that is waited for (bench/machine.py)."""
    try:
        running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
    except OSError:  # another system, another OpenMP
        return "0"
    return "10000" if int(running) <= 1 else "0"  # we are one of the running


os.environ.setdefault("GOMP_SPINCOUNT", how_threads_wait())  # read once, when torch loads
