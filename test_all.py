"""Every stage against something independent: brute force, PyTorch's own op, or a planted answer.

python test_all.py              # the tests of tests/ that are fast, on all cores
python test_all.py rotary law   # those whose name, or whose file's, contains one of these words
python test_all.py --slow       # the slow ones too: clusters, kills
"""

import os
import sys

import pytest


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--slow"]
    flags = "-q --disable-warnings -p no:cacheprovider --dist worksteal --durations 5".split()
    flags += [] if "--slow" in sys.argv else ["-m", "not slow"]
    flags += ["-n", str(os.cpu_count()), "-o", "pythonpath=.", "-k", " or ".join(words), "tests"]
    sys.exit(pytest.main(flags))  # 5 if there is no such test
