"""What the stages share, each file importing only those before it: flags, flow, runs, circuit,
search, emergence; intervals. Imported before torch loads, which then reads how threads wait."""

import contextlib
import errno
import os
import sys
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
say = sys.excepthook  # but for Ctrl-C while torch loads: Python then ends by the signal, quietly
sys.excepthook = lambda kind, *what: kind is KeyboardInterrupt or say(kind, *what)
os.environ["MPLBACKEND"] = "Agg"  # figures are files; read when matplotlib loads


class Refused(ValueError):
    """What a user can mend, in one line that says how. Anything else that is raised is a bug."""


ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
}


@contextlib.contextmanager
def program(name):
    """Around the main of a script: what its user can mend ends it with one line and exit code 2, a
    disk or a loss that blew up with 1, Ctrl-C with 130; a bug keeps its traceback. A pipe whose
    reader is gone (`| head -1`) ends it quietly."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where a pipe that is gone is expected
        return
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        code, said = 130, "stopped"
    except Refused as error:
        code, said = 2, error
    except FloatingPointError as error:
        code, said = 1, error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        code, said = 1, "there is too little memory: choose smaller sizes"
    except OSError as error:
        advice = ADVICE.get(error.errno, "once that is mended, run the same command again")
        code, said = 1, f"{error.filename}: {error.strerror or error}: {advice}"
    print(f"{name}: {said}", file=sys.stderr)
    sys.exit(code)
