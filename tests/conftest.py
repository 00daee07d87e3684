"""Before any test: one thread per process, no window for figures, and the dtype of a processor."""

import os
import signal

import train
from tests.common import WHOLE, run_main

import pytest


os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
if forced := os.environ.get("FORCED_DTYPE"):  # float32 or bfloat16, as on another processor
    train.CPU = dict(amx_bf16=forced == "bfloat16", cpu_name="forced")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long by its nature; test_all.py --slow")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run of WHOLE without any interruption, to read only."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert run_main(train, *WHOLE, "--out", run)[0] == 0
    return run
