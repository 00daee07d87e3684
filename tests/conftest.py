"""Before any test: one thread per process, no window for figures."""

import os
import signal

import pytest


os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tensors this small more threads only wait
os.environ.setdefault("MPLBACKEND", "Agg")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long by its nature; test_all.py --slow")


@pytest.fixture
def without_curves(monkeypatch):
    """Training in this process ends without its figure, which takes longer than a tiny run."""
    import train  # here, so that the tests of llm start without torch

    monkeypatch.setattr(train, "draw_curves", lambda run: None)
