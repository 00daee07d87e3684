"""What the stages share: config, circuit, theory, search, emergence, each of which imports only
those before it; and stats, which imports none of them."""

import argparse
import contextlib
import os
import sys


class UserError(ValueError):
    """A mistake that the user can correct. The program prints its message, which is one line and
    says what to do, and ends with exit code 2. Any other exception is a bug."""


@contextlib.contextmanager
def program(name):
    """Run the body as the main of a script called `name`: user errors, a loss that blew up and
    errors of the disk print one line and end with exit code 2; Ctrl-C ends with 130."""
    os.environ["MPLBACKEND"] = "Agg"  # the figures of a program are files; workers inherit this
    if "matplotlib" in sys.modules:
        sys.modules["matplotlib"].use("Agg")
    try:
        yield
    except BrokenPipeError:  # the reader is gone, as in `python train.py | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, FloatingPointError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def command_line(name, description):
    """Return an ArgumentParser that answers a wrong argument with one line and exit code 2."""
    layout = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(name, None, description, allow_abbrev=False, formatter_class=layout)
    p.error = lambda message: p.exit(2, f"{name}: {message}\n")
    return p
