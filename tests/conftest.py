"""Before any test: one thread per process, no window for figures."""

import os
import signal

import pytest

from tests.common import WHOLE, run_main


os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only wait on tensors this small
os.environ.setdefault("MPLBACKEND", "Agg")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long by its nature; test_all.py --slow")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run of WHOLE without any interruption, to read only."""
    import train

    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_main(train, *WHOLE, "--out", run)[0] == 0
    return run
