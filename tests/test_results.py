"""What is committed: every run directory can be read, and its weights score what its log says."""

import json

import pytest
from common import HERE

import runs
import train
from flags import asked


RUNS = sorted(path.parent for path in (HERE / "results").rglob("config.json"))
WEIGHTS = [run for run in RUNS if (run / "model.pt").exists()]


def test_committed_runs_can_be_read():
    """With every flag of today, and with what the file says of its own."""
    assert RUNS and WEIGHTS
    for run in RUNS:
        config, rows = runs.read_config(run), runs.read_log(run)
        assert config.items() >= json.loads((run / "config.json").read_text()).items()
        assert [*runs.crossings(rows)] == [f"x_{k}" for k in asked(config)]
        assert train.summary(run).startswith("---")


@pytest.mark.parametrize("run", WEIGHTS, ids=lambda run: run.name)
def test_committed_runs_score_what_their_log_says(run):
    model, config = runs.load(run)
    losses, last = train.evaluate(model, config, n=512), runs.read_log(run)[-1]
    val, logged = sum(losses) / len(losses), last["val"]
    assert abs(val - logged) < 0.1 * logged + 1e-3, (val, logged)
    assert not config["target"] or last["confirmed"] < config["target"]
