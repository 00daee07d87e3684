"""What is committed: runs can be read, weights score what logs say, pages say what they are
printed from."""

import base64
import json
import os
import re
import subprocess

from parts import config
from parts.config import SETTINGS

import pytest
import torch
from cogapp import Cog

import train
from data import held_out
from tests.common import HERE


RUNS = sorted(path.parent for path in (HERE / "results").rglob("config.json"))
WEIGHTS = [run for run in RUNS if (run / "model.pt").exists()]
SLOW = [pytest.param(run, marks=pytest.mark.slow) for run in WEIGHTS[1:]]


def test_committed_runs_can_be_read():
    """With every flag of today, and with what the file says of its own."""
    assert RUNS and WEIGHTS
    for run in RUNS:
        flags, rows = config.read_flags(run), config.read_log(run)
        assert vars(flags).items() >= json.loads((run / "config.json").read_text()).items()
        assert [*config.crossings(rows, flags)] == flags.target_names
        assert train.summary(run).startswith("---")


@pytest.mark.parametrize("run", [WEIGHTS[0], *SLOW], ids=lambda run: run.name)
def test_committed_runs_score_what_their_log_says(run):
    model, flags = config.load(run)
    losses, last = train.evaluate(model, flags, n=512), config.read_log(run)[-1]
    val, logged = sum(losses) / len(losses), last["val"]
    assert abs(val - logged) < 0.1 * logged + 1e-3, (val, logged)
    assert not flags.target or last["confirmed"] < flags.target


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
    """The script with a stand-in for python that notes what it is called with: the flags of a
    command are those that config.json tells, but for how often it is saved, and for what the
    machine decides."""
    folder, calls = tmp_path / "runs", tmp_path / "calls"
    for name in ("python", "chromium"):
        (tmp_path / name).write_text(STAND_IN.format(calls=calls))
        (tmp_path / name).chmod(0o755)
    environment = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = ["bash", HERE / "results/reproduce.sh", folder, "--all"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    # the flags of each run that the script trains
    made = {}
    for line in calls.read_text().splitlines():
        if line.startswith("train.py"):
            flags = train.parse_flags(line.split()[1:])
            made[str(flags.out.relative_to(folder))] = flags

    # beside what is committed
    names = [name for name in SETTINGS if name not in ("save_every", "eval_every", "dtype")]
    for run in RUNS:
        name = str(run.relative_to(HERE / "results"))
        assert name in made, name
        there, flags = config.read_flags(run), made[name]
        flags.init = flags.init.replace(f"{folder}/runs", "out")
        different = {key for key in names if getattr(flags, key) != getattr(there, key)}
        assert not different, (name, different)


# ---- pages


PAGES = [HERE / "README.md", *sorted(HERE.glob("[a-z]*/*.md"))]
PRINTED = [page for page in PAGES if "[[[cog" in page.read_text()]
WORDS = {  # at most, of tables too; what is printed counts, what prints it does not
    "README.md": 900,
    "bench/README.md": 600,
    "llm/README.md": 250,
    "mechanisms/README.md": 1500,
    "results/circuits.md": 900,
    "results/cleaning.md": 900,
    "results/conditional.md": 700,
    "results/curriculum.md": 700,
    "results/departures.md": 450,
    "results/depth.md": 700,
    "results/emergence.md": 350,
    "results/laws.md": 1200,
    "results/order.md": 500,
    "results/waiting.md": 700,
}


def differs(page):
    return Cog().main(["cog", "--check", "-I", str(HERE), str(page)]) != 0


@pytest.mark.parametrize("page", PRINTED, ids=lambda page: str(page.relative_to(HERE)))
def test_numbers_on_pages_are_those_of_what_is_committed(page, monkeypatch):
    monkeypatch.chdir(HERE)
    again = "python -m cogapp -r -I . README.md */*.md"
    assert not differs(page), f"renew it: {again}"


def test_a_number_typed_into_a_page_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    text, page = (HERE / "results/order.md").read_text(), tmp_path / "order.md"
    ours = re.search(r"\*\*Ours: (\d+) of the", text)
    page.write_text(text)
    assert not differs(page)
    page.write_text(text[: ours.start(1)] + "1" + text[ours.start(1) :])
    assert differs(page)


def test_pages_are_short():
    total, long = 0, {}
    for page in PAGES:
        shown = re.sub("<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        count = sum(any(map(str.isalnum, word)) for word in shown.split())
        total, name = total + count, str(page.relative_to(HERE))
        if count > WORDS.get(name, count):
            long[name] = count
    assert not long and total <= 10_000, (long, total)


def test_links_of_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            there = link.startswith("http") or (page.parent / link).exists()
            assert there, f"{page}: {link}"


@pytest.fixture(scope="module")
def explorer():
    """What results/explorer.html holds of each run."""
    text = (HERE / "results/explorer.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert [page["name"] for page in data] == ["results/A", "results/D"]
    return data


def test_the_explorer_shows_the_certificates_beside_it(explorer):
    """Its numbers are those of circuit.json and log.jsonl, not of older ones."""
    for page in explorer:
        folder = HERE / page["name"]
        report, log = json.loads((folder / "circuit.json").read_text()), config.read_log(folder)
        for drawn, row in zip(page["paths"], report["paths"], strict=True):
            assert {name: drawn[name] for name in ("carried", "alone", "everywhere")}.items() <= (
                row.items()
            )
        assert page["losses"] == {name: [row[name] for row in log] for name in page["losses"]}
        assert f"MSE {report['sufficient']['mse']:.4f} [" in page["about"]["said"]


def test_the_explorer_shows_the_weights_beside_it(explorer):
    """The maps of A, at the end, are the attention of its model.pt on the same sequence."""
    page, (model, flags) = explorer[0], config.load(HERE / "results/A")
    _, patterns = model(config.sequences(flags, held_out("validation", 1)).inputs, None, True)
    patterns = torch.stack(patterns, 1)[0]
    maps = torch.frombuffer(bytearray(base64.b64decode(page["maps"])), dtype=torch.uint8) / 100
    maps = maps.view(len(page["steps"]), len(page["sequences"]), *patterns.shape)[-1]
    apart = (maps - patterns).abs().mean((1, 2, 3, 4))  # a number per sequence
    assert apart[0] < 2e-3 and apart[1:].min() > 1e-2, apart  # rounded to whole percent
