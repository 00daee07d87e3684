"""Kill a tiny training at many moments and go on with it each time: it must end bitwise as one that
nobody touched. With both optimizers; on systems with fork, so that torch is loaded once.

    python -m tests.kill_many                        # 200 kills, and one before every file event
    python -m tests.kill_many --kills 3 --every 30   # a few of each
"""

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from parts import command_line, config

import torch

import train
from tests.common import TINY, logged, run_main, weights_equal


FLAGS = [*TINY, *"--steps 80 --save-every 40 --target 0 --examples 100".split()]
EVENTS = ["open", "os.rename", "os.mkdir", "os.remove"]  # of Python, each about a path
OPTIMIZERS = ["muon", "adamw"]


def begin(run, optimizer, die_at=None):
    """Start or go on with a run, in a process of its own that kills itself before its file event
    number `die_at` in the run directory. Its id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(600)  # a run that hangs is found out too
    events = itertools.count()

    def die(event, arguments):
        if event in EVENTS and str(arguments[0]).startswith(str(run)) and next(events) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    sys.argv = ["train.py", *FLAGS, "--optimizer", optimizer, "--out", str(run), "--resume"]
    code = 1
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.stderr.flush()
        os._exit(code)


def end(child):
    """Wait: True if the run ended by itself, False if it was killed. Any other end ends us too."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"kill_many.py: a run that went on after a kill ended with exit code {code}")
    return code == 0


def compare(run, whole):
    """Ends us if two runs differ in a weight, a checkpoint or a row of the log."""
    files = ["model.pt", *(path.relative_to(whole) for path in (whole / "ckpt").iterdir())]
    if logged(run) != logged(whole) or not all(weights_equal(run, whole, name) for name in files):
        sys.exit(f"kill_many.py: {run} did not end as {whole}, which was never killed")


def kill_at_random(folder, whole, optimizer, kills, seconds, moments):
    """Run after run, each killed after random parts of `seconds` until it ends, until there were so
    many kills. The number of runs."""
    for number in itertools.count():
        if not kills:
            return number
        run, ended = folder / f"{optimizer}_random_{number}", False
        while not ended:
            child = begin(run, optimizer)
            if kills:
                time.sleep(moments.uniform(0, seconds))
                os.kill(child, signal.SIGKILL)
            ended = end(child)
            kills -= not ended
        compare(run, whole)


def kill_before_file_events(folder, whole, optimizer, every):
    """A run for each file event of a training, or for each so many, killed just before it. The
    number of kills."""
    for number in itertools.count():
        run = folder / f"{optimizer}_event_{number}"
        if end(begin(run, optimizer, die_at=number * every)):
            return number  # there were no more events
        end(begin(run, optimizer))
        compare(run, whole)


def main():
    p = command_line("kill_many.py", __doc__)
    p.add_argument("--kills", type=int, default=200, help="kills at random (default: 200)")
    p.add_argument("--every", type=int, default=1, help="kill at every so many (default: 1) events")
    flags = p.parse_args()
    if flags.kills < 0 or flags.every < 1:
        p.error("--kills must be at least 0, and --every at least 1")

    torch.set_num_threads(1)  # a fork would lose more

    # a figure takes longer than all else, and is a file as any other
    train.draw_curves = lambda run: config.write_text(run / "curves.png", "drawn")
    began, moments = time.time(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for number, optimizer in enumerate(OPTIMIZERS, 1):
            # as nobody touches it, here, so that what loads late is there; then how long it takes
            whole, again = (Path(folder, f"{optimizer}_{name}") for name in ("whole", "again"))
            run_main(train, *FLAGS, "--optimizer", optimizer, "--out", whole)
            started = time.time()
            end(begin(again, optimizer))
            seconds = time.time() - started
            compare(again, whole)

            # half of the kills for each optimizer
            kills = flags.kills * number // 2 - flags.kills * (number - 1) // 2
            count = kill_at_random(Path(folder), whole, optimizer, kills, seconds, moments)
            print(f"{optimizer}: {kills} kills at random, {count} runs ended alike", flush=True)
            kills = kill_before_file_events(Path(folder), whole, optimizer, flags.every)
            print(f"{optimizer}: {kills} kills before file events, {kills} runs ended alike")
            print(f"{number / len(OPTIMIZERS):.0%} done in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
