"""What is committed: every run directory can be read, and its weights score what its log says."""

import json
import os
import re
import subprocess
import sys

from parts import runs
from parts.flags import MACHINE_FLAGS, asked

import pytest

import sweep
import train
from tests.common import HERE


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


STAND_IN = """#!{python} -IS
import pathlib, sys
with open({calls!r}, "a") as file:
    print(*sys.argv[1:], file=file)
words = dict(zip(sys.argv, sys.argv[1:]))
if sys.argv[1] == "train.py":
    run = pathlib.Path(words["--out"])
    (run / "ckpt").mkdir(parents=True)
    steps = range(0, int(words.get("--steps", 0)) + 1, int(words.get("--save-every", 10**9)))
    for name in ["model.pt", "config.json", "log.jsonl", *(f"ckpt/{{k:06d}}.pt" for k in steps)]:
        (run / name).touch()
"""


def test_every_committed_run_has_its_command_in_reproduce_sh(tmp_path):
    """The script with a stand-in for python that notes what it is called with: the flags of a
    command are those that config.json tells, but for how often it is saved, and for what the
    machine decides."""
    folder, calls = tmp_path / "runs", tmp_path / "calls"
    (tmp_path / "python").write_text(STAND_IN.format(python=sys.executable, calls=str(calls)))
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = ["bash", HERE / "results/reproduce.sh", folder, "--all"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    # the flags of each run that the script trains
    made = {}
    for line in calls.read_text().splitlines():
        if line.startswith("train.py"):
            flags = train.parse_flags(line.split()[1:])
            made[str(flags["out"].relative_to(folder))] = flags
        if line.startswith("sweep.py --preset"):
            for flags in sweep.grid(sweep.PRESETS[line.split()[2]], folder):
                made[flags["out"].name] = flags

    # beside what is committed
    free = {*MACHINE_FLAGS, "save_every", "eval_every", "dtype"}
    for run in RUNS:
        name = str(run.relative_to(HERE / "results")).removeprefix("again/")
        name = re.sub("_at_[0-9]+$", "", name)
        assert name in made, name
        config, flags = runs.read_config(run), made[name]
        if config["init"]:
            flags["init"] = flags["init"].replace(str(folder), "out")
        different = {key for key in flags if key not in free and flags[key] != config[key]}
        assert not different, (name, different)
