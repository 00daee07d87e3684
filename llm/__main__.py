"""python -m llm: Ctrl-C ends it with one line, also while modules load."""

import os
import signal
import sys


def stop(*_):
    os.write(2, b"llm: stopped; the same command goes on\n")
    os._exit(130)  # what was answered is in the file


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop)
    if sys.stdout:  # it may be closed
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    from llm.benchmark import main

    main()
