"""What is committed: runs can be read, weights score what logs say, pages say what they are
printed from; and which file may know which."""

import ast
import base64
import json
import os
import re
import subprocess

import pytest
import torch
from cogapp import Cog

import analyze
import train
from data import held_out
from tests.common import HERE
from train import SETTINGS


RUNS = sorted(path.parent for path in (HERE / "results").rglob("config.json"))
WEIGHTS = [run for run in RUNS if (run / "model.pt").exists()]
SLOW = [pytest.param(run, marks=pytest.mark.slow) for run in WEIGHTS[1:]]


def test_committed_runs_can_be_read():
    assert RUNS and WEIGHTS
    for run in RUNS:
        flags, rows = train.read_flags(run), train.read_log(run)
        assert [*analyze.crossings(rows, flags)] == flags.target_names
        assert train.summary(run).startswith("---")


@pytest.mark.parametrize("run", [WEIGHTS[0], *SLOW], ids=lambda run: run.name)
def test_committed_runs_score_what_their_log_says(run):
    model, flags = train.load(run)
    losses, last = train.evaluate(model, flags, n=512), train.read_log(run)[-1]
    val, logged = sum(losses) / len(losses), last["val"]
    assert abs(val - logged) < 0.1 * logged + 1e-3, (val, logged)
    assert not flags.stop_below or last["confirmed"] < flags.stop_below


STAND_IN = """#!/bin/sh
echo "$@" >> {calls}
[ "$1" = train.py ] || exit 0
steps=0 every=1000000
while [ $# -gt 1 ]; do
  case $1 in --out) out=$2 ;; --steps) steps=$2 ;; --save-every) every=$2 ;; esac
  shift
done
mkdir -p "$out/ckpt"
touch "$out/model.pt" "$out/config.json" "$out/log.jsonl"
seq -f "$out/ckpt/%06g.pt" 0 $every $steps | xargs touch
"""


@pytest.mark.slow
def test_every_committed_run_has_its_command_in_reproduce_sh(tmp_path):
    """The script runs with a stand-in for python that notes its arguments. The flags of a command
    are those of config.json, but for how often it saves and what the machine decides."""
    folder, calls = tmp_path / "runs", tmp_path / "calls"
    for name in ("python", "chromium"):
        (tmp_path / name).write_text(STAND_IN.format(calls=calls))
        (tmp_path / name).chmod(0o755)
    environment = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = ["bash", HERE / "results/reproduce.sh", folder, "--all"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    # the flags of each run that the script trains, beside what is committed
    made = {}
    for line in calls.read_text().splitlines():
        if line.startswith("train.py"):
            flags = train.parse_flags(line.split()[1:])
            made[str(flags.out.relative_to(folder))] = flags
    names = [name for name in SETTINGS if name not in ("save_every", "eval_every", "dtype")]
    for run in RUNS:
        there = train.read_flags(run)
        if getattr(there, "mixture", False):  # a flag of an older commit
            continue
        flags = made[str(run.relative_to(HERE / "results"))]
        flags.init = flags.init.replace(f"{folder}/runs", "out")
        different = {key for key in names if getattr(flags, key) != getattr(there, key)}
        assert not different, (run, different)


# ---- pages


PAGES = [HERE / "README.md", *sorted(HERE.glob("[a-z]*/*.md"))]
PRINTED = [page for page in PAGES if "[[[cog" in page.read_text()]


@pytest.mark.parametrize("page", PRINTED, ids=lambda page: str(page.relative_to(HERE)))
def test_numbers_on_pages_are_those_of_what_is_committed(page, monkeypatch):
    monkeypatch.chdir(HERE)
    again = "python -m cogapp -r -I . README.md */*.md"
    assert Cog().main(["cog", "--check", "-I", ".", str(page)]) == 0, f"renew it: {again}"


def test_links_of_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            there = link.startswith("http") or (page.parent / link).exists()
            assert there, f"{page}: {link}"


def test_the_explorer_shows_the_weights_beside_it():
    """The maps of A, at the end, are the attention of its model.pt on the same sequence."""
    text = (HERE / "results/explorer.html").read_text()
    page = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])[0]
    model, flags = train.load(HERE / page["name"])
    inputs = train.sequences(flags, held_out("validation", 1)).inputs
    _, patterns = model(inputs, return_patterns=True)
    patterns = torch.stack(patterns, 1)[0]
    maps = torch.frombuffer(bytearray(base64.b64decode(page["attention"])), dtype=torch.uint8) / 100
    maps = maps.view(len(page["steps"]), len(page["sequences"]), *patterns.shape)[-1]
    apart = (maps - patterns).abs().mean((1, 2, 3, 4))  # a number per sequence
    assert apart[0] < 2e-3 and apart[1:].min() > 1e-2, apart  # rounded to whole percent


# ---- the form of the repository


def test_the_first_level_holds_what_it_should():
    listed = subprocess.run(["git", "ls-files"], cwd=HERE, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    files = "README.md requirements.txt LICENSE ruff.toml .gitignore .ci data.py model.py train.py"
    files += " sweep.py ablate.py analyze.py test_all.py"
    folders = "studies pages llm mechanisms tests bench results"
    first_level = {line.partition("/")[0] for line in listed.stdout.split()}
    assert first_level == {*files.split(), *folders.split()}


def test_the_core_imports_no_room():
    rooms = {"studies", "pages", "llm", "mechanisms", "bench", "tests"}
    for file in [*HERE.glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not rooms & {name.partition(".")[0] for name in names}, file
