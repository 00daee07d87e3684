"""What is committed can be read, weights score what logs say, and pages say what they are printed
from."""

import re
from pathlib import Path

import ablate
import train
from data import describe
from extras.studies import rows
from extras.studies.__main__ import PAGES, pieces_of
from tests.common import HERE

import pytest
import torch


RESULTS = HERE / "results"
WEIGHTS = sorted(path.parent for path in RESULTS.glob("*/model.pt"))
NO_RESULT = (  # code, links, x_1, 1b, sections, laws
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\b(x_|[A-D])\d|\b\d[ab]\b|Sections? [\d., and]+|Figures? \d"
    r"|floor\(log2 k\) \+ 2|log3\([^)]*\)+|\| [\d.]+( i+v?)? \||E 5, 6"
)
NUMBERS = {  # that stand on a page by hand: settings, and what the paper says
    "README.md": "2025 0.75 1 5 0 8",
    "results/circuits.md": "0-9 1-9 0.5 24 0.05 0.17",
    "results/curriculum.md": "4 128 512 2,400 4,000 10,000",
    "results/depth.md": "8 9 15 16 23 32 0.05 1,500 3,000 5,000 6,000 8,000",
    "results/paper.md": "3600 24,000 1,200 1e-3 0 0.02 0.1 0.9 0.99 1.6 5.1",
}
MARKDOWN = sorted({*HERE.glob("*.md"), *RESULTS.glob("*.md"), *HERE.glob("extras/*/*.md")})


def test_committed_runs_can_be_read():
    """A folder that kept its weights says the same as its row, but for the report."""
    found = {rows.name_of(row): row for row in rows.load(sorted(RESULTS.glob("runs/*.jsonl")))}
    assert all(row["log"] and row["task"].T for row in found.values())
    kept = rows.row_of(RESULTS / "default_s0")
    assert all(kept[key] == found["default/s0"][key] for key in ("config", "log"))


@pytest.mark.parametrize("run", WEIGHTS, ids=lambda run: run.name)
def test_committed_weights_score_what_their_log_says(run):
    model, task, _ = train.load(run)
    val, logged = train.evaluate(model, task, n=512).mean(), train.read_log(run)[-1]["val"]
    assert abs(val - logged) < 0.3 * logged + 1e-3, (val, logged)  # on other sequences


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_the_committed_rows_say(page, monkeypatch):
    """Each piece of text stands on its page, beside which there is no number but NUMBERS."""
    monkeypatch.chdir(HERE)
    text = " ".join(Path(page).read_text(encoding="utf-8").split())
    for piece in pieces_of(page):
        words = " ".join(piece.split())
        assert words in text, f"{page} lacks this of python -m extras.studies {page}:\n{piece}"
        text = text.replace(words, "")
    left = {*re.findall(r"\d[\d.,e-]*\d|\d", re.sub(NO_RESULT, "", text))}
    by_hand = left - {*NUMBERS.get(page, " ".join(left)).split()}
    assert not by_hand, f"{page} has numbers that no code prints: {by_hand}"


def test_the_readme_shows_what_the_commands_print(monkeypatch, capsys):
    """Each line of its text blocks begins one that a command prints."""
    readme, run = (HERE / "README.md").read_text(encoding="utf-8"), RESULTS / "default_s0"
    flags, log = train.read_flags(run), train.read_log(run)
    task = train.task_of(flags)
    for end in range(2, len(log) + 1):
        train.print_row(flags, task, log[end - 2 : end])
    ablate.print_report(ablate.read_report(run))
    monkeypatch.chdir(HERE)
    example = describe(task, task.draw("training", 1))
    solved = log[-1]["confirmed"] < flags.stop_below
    printed = f"{example}\n{capsys.readouterr().out}\nsolved: {solved}\n---\n  ...".splitlines()
    for block in re.findall(r"```text\n(.*?)```", readme, re.DOTALL):
        for line in block.splitlines():
            assert not line or any(each.startswith(line) for each in printed), f"README.md: {line}"


def test_the_readme_examples_run(monkeypatch, capsys):
    """And the hook does what the text says: without its queries layer 8 loses C and D."""
    monkeypatch.chdir(HERE)
    readme = Path("README.md").read_text(encoding="utf-8")
    with torch.enable_grad():  # the examples turn it off
        exec("\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)), {})
    *_, last = capsys.readouterr().out.splitlines()
    assert min(map(float, re.findall(r"\d\.\d+", last)[1:])) > 0.5, last


def test_links_of_pages_lead_somewhere():
    for page in MARKDOWN:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            there = link.startswith("http") or (page.parent / link).exists()
            assert there, f"{page}: {link}"
