"""What is committed: runs can be read, weights score what logs say, pages say what they are
printed from."""

import base64
import json
import re

import train
from data import held_out
from extras.studies import rows
from tests.common import HERE

import pytest
import torch
from cogapp import Cog


RESULTS = HERE / "results"
WEIGHTS = sorted(path.parent for path in RESULTS.glob("*/model.pt"))
SLOW = [pytest.param(run, marks=pytest.mark.slow) for run in WEIGHTS[1:]]
PAGES = sorted({*HERE.glob("*.md"), *RESULTS.glob("*.md"), *HERE.glob("extras/*/*.md")})
PRINTED = [page for page in PAGES if "[[[cog" in page.read_text(encoding="utf-8")]


def test_committed_runs_can_be_read():
    """A folder that kept its weights says the same as its row."""
    found = {rows.name_of(row): row for row in rows.load(sorted(RESULTS.glob("runs/*.jsonl")))}
    assert all(row["log"] and row["flags"].title for row in found.values())
    for folder, name in (("default_s0", "default/s0"), ("rope_s4", "rope/s4")):
        kept = rows.row_of(RESULTS / folder)
        assert all(kept[key] == found[name][key] for key in kept if key != "name"), name


@pytest.mark.parametrize("run", [WEIGHTS[0], *SLOW], ids=lambda run: run.name)
def test_committed_weights_score_what_their_log_says(run):
    model, flags = train.load(run)
    losses, last = train.evaluate(model, flags, n=512), train.read_log(run)[-1]
    val, logged = sum(losses) / len(losses), last["val"]
    assert abs(val - logged) < 0.1 * logged + 1e-3, (val, logged)


@pytest.mark.parametrize("page", PRINTED, ids=lambda page: str(page.relative_to(HERE)))
def test_numbers_on_pages_are_those_of_what_is_committed(page, monkeypatch):
    monkeypatch.chdir(HERE)
    again = "python -m cogapp -r -I . README.md */*.md */*/*.md"
    assert Cog().main(["cog", "--check", "-I", ".", str(page)]) == 0, f"renew it: {again}"


def test_links_of_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            there = link.startswith("http") or (page.parent / link).exists()
            assert there, f"{page}: {link}"


def test_the_explorer_shows_the_weights_beside_it():
    """The maps of A, at the end, are the attention of its model.pt on the same sequence."""
    text = (RESULTS / "explorer.html").read_text(encoding="utf-8")
    page = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])[0]
    model, flags = train.load(HERE / page["name"])
    inputs = train.sequences(flags, held_out("validation", 1)).inputs
    with train.precision(flags):
        patterns = torch.stack(model(inputs, return_patterns=True)[1], 1)[0].float()
    maps = torch.frombuffer(bytearray(base64.b64decode(page["attention"])), dtype=torch.uint8) / 100
    maps = maps.view(-1, len(page["sequences"]), *patterns.shape)[-1]
    apart = (maps - patterns).abs().mean((1, 2, 3, 4))  # a number per sequence
    assert apart[0] < 5e-3 and apart[1:].min() > 1e-2, apart  # whole percent, in either dtype
