"""Every stage against something independent: brute force, PyTorch's own op, or a planted answer.

python test_all.py              # the tests of tests/ that are fast, on all cores
python test_all.py rotary law   # those whose name, or whose file's, contains one of these words
python test_all.py --slow       # the slow ones too: clusters, kills, disks
"""

import importlib.util
import os
import sys
from pathlib import Path


def main():
    words = " ".join(sys.argv[1:]).split()
    speed = [] if "--slow" in words else ["-m", "not slow"]
    words = [word for word in words if word != "--slow"]
    if not all(word.isidentifier() for word in words):
        sys.exit("test_all.py: give words that names of tests contain, or --slow")
    if not all(map(importlib.util.find_spec, ("pytest", "xdist"))):
        sys.exit("test_all.py: needs pytest and pytest-xdist: pip install -r requirements.txt")
    import pytest

    here = Path(__file__).parent
    flags = ["-q", "--disable-warnings", "-p", "no:cacheprovider", "--rootdir", str(here)]
    flags += ["-o", f"pythonpath={here}"]
    flags += ["-n", str(os.cpu_count()), "--dist", "worksteal", "--durations", "5"]
    chosen = ["-k", " or ".join(words)] if words else []
    flags += [*speed, *chosen, str(here / "tests")]
    sys.exit(pytest.main(flags))  # 5 if there is no such test


if __name__ == "__main__":
    main()
