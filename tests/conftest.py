"""Before any test: one thread per process; a run that all may read."""

import os

import train
from tests.common import TINY, output_of

import pytest


os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run of TINY without any interruption, to read only."""
    run = tmp_path_factory.mktemp("whole") / "run"
    output_of(train, *TINY, "--out", run)
    return run
