"""What is committed can be read, weights score what logs say, and pages say what they are printed
from."""

import io
import re
from pathlib import Path

import ablate
import analyze
import sweep
import train
from data import Task, describe
from extras.studies import rows
from extras.studies.__main__ import PAGES
from tests.common import HERE

import matplotlib
import pytest
import torch


RESULTS = HERE / "results"
COMMITTED = ["A", "B", "C", "D", "main"]
WEIGHTS = sorted(path.parent for path in RESULTS.glob("*/model.pt"))
NO_RESULT = (  # code, links, x_1, 1b, sections, laws
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\b(x_|[A-D])\d|\b\d[ab]\b|b?float\d\d|seed \d+"
    r"|Sections? [\d., and]+|Figures? \d"
    r"|floor\(log2 k\) \+ 2|log3\([^)]*\)+|O\(\d\^\(L-1\)\)|\| [\d.]+( i+v?)? \|"
)
NUMBERS = {  # that stand on a page by hand: settings, and what the paper says
    "README.md": "1 2 3 2025 0.01 0.75 3.1 5 7 8 600 2,500 7,000 128 512",
    "results/circuits.md": "0.05 0.17 0.89 1 2 10 32 256",
    "results/curriculum.md": "",
    "results/depth.md": "8 9 12 16 30 32 0.01 0.05 2,500 3,000 4,000 5,000 6,000 7,000 8,000 10,000"
    " 10,700 2,000 4,400 128 512",
    "results/paper.md": "1 2 16 0.01 0.7 0.75 3600 24,000 12,000 10,000 8,000 6,400 2,500 1,200"
    " 1e-3 0 0.02 0.05 0.1 0.05-0.1 7,000 4,500 0.031 0.045 0.9 0.99 100 128 512 800 2,048 262,000"
    " 262,144 1,048,576 40 1,024 9,000",
}
MARKDOWN = sorted({*HERE.glob("*.md"), *RESULTS.glob("*.md"), *HERE.glob("extras/*/*.md")})


def test_committed_runs_can_be_read():
    """A folder that kept its weights says the same as its row, but for the report."""
    found = {rows.name_of(row): row for row in rows.load(sorted(RESULTS.glob("runs/*.jsonl")))}
    assert all(row["losses"] for row in found.values())
    kept = rows.row_of(RESULTS / "main")
    assert all(kept[key] == found["main/s0"][key] for key in ("config", "log"))


@pytest.mark.parametrize("run", WEIGHTS, ids=lambda run: run.name)
def test_committed_weights_score_what_their_log_says(run):
    model, task, _ = train.load(run)
    val = train.evaluate(model, task, "circuits", 512, "cpu")["val"]
    logged = train.read_log(run)[-1]["val"]
    assert abs(val - logged) < 0.3 * logged + 1e-3, (val, logged)  # on other sequences


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_the_committed_rows_say(page, monkeypatch):
    """Each printed line stands there, and no number beside these lines and NUMBERS."""
    monkeypatch.chdir(HERE)
    text, missing = " ".join(Path(page).read_text(encoding="utf-8").split()), []
    lines = [" ".join(line.split()) for piece in PAGES[page]() for line in piece.splitlines()]
    for line in sorted(lines, key=len, reverse=True):  # one may be a part of another
        if line not in text:
            missing.append(line)
        text = text.replace(line, "", 1)
    missing = "\n".join(missing)
    assert not missing, f"{page} lacks what python -m extras.studies {page} prints:\n{missing}"
    left = {*re.findall(r"\d[\d.,e-]*\d|\d", re.sub(NO_RESULT, "", text))}
    by_hand = left - {*NUMBERS.get(page, " ".join(left)).split()}
    assert not by_hand, f"{page} has numbers that no code prints: {by_hand}"


def test_results_readme_has_the_commands_that_trained_the_runs():
    """Beside the verdicts on their circuits."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"# (\w+): (validated .*)\npython train.py (.*)", text)
    assert [name for name, *_ in commands] == COMMITTED
    for name, verdict, words in commands:
        flags, trained = train.parse_flags(words.split()), train.read_flags(RESULTS / name)
        assert train.values_of(flags) == train.values_of(trained), name
        assert verdict == ablate.read_report(RESULTS / name)["verdict"], name


def test_the_readme_shows_what_the_commands_and_examples_print(monkeypatch, capsys):
    """Each line of its text blocks begins one that is printed."""
    readme, run = (HERE / "README.md").read_text(encoding="utf-8"), RESULTS / "main"
    flags, log = train.read_flags(run), train.read_log(run)
    task = train.task_of(flags)
    for end in range(2, len(log) + 1):
        train.print_row(flags, task, log[end - 2 : end])
    ablate.print_report(ablate.read_report(run))
    describe(Task(), Task().draw("training", 1))
    monkeypatch.chdir(HERE)
    with torch.enable_grad():  # the examples turn it off
        exec("\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)), {})
    printed = capsys.readouterr().out.splitlines()
    for block in re.findall(r"```text\n(.*?)```", readme, re.DOTALL):
        for line in block.splitlines():
            assert not line or any(each.startswith(line) for each in printed), f"README.md: {line}"


def test_links_of_pages_lead_somewhere():
    for page in MARKDOWN:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            there = link.startswith("http") or (page.parent / link).exists()
            assert there, f"{page}: {link}"


# ---- committed pictures


def drawn_by(picture):
    """Return the matplotlib that drew a PNG, as it says in it."""
    data = picture.read_bytes()
    start = data.index(b"Matplotlib version") + len("Matplotlib version")
    return data[start : data.index(b",", start)].decode()


def assert_is_drawn(picture, figure):
    """The pixels of a committed picture are those of today's figure; steps of an 8-bit color may
    differ by a few, as the last bits of two processors do."""
    if drawn_by(picture) != matplotlib.__version__:
        pytest.skip(f"{picture.name} was drawn by matplotlib {drawn_by(picture)}")
    file = io.BytesIO()
    figure.savefig(file, dpi=130)
    file.seek(0)
    today, committed = matplotlib.image.imread(file), matplotlib.image.imread(picture)
    name = picture.relative_to(HERE)
    assert today.shape == committed.shape, f"{name} is not what the code draws: {today.shape}"
    differ = (abs(today - committed).max(2) > 0.1).sum()
    assert differ == 0, f"{name} is not what the code draws: {differ} pixels differ"


@pytest.mark.parametrize("run", COMMITTED)
def test_committed_pictures_of_runs_are_what_the_code_draws(run):
    """All but the attention maps, which take as long as all others together, of all but A."""
    for name, figure in analyze.figures_of(RESULTS / run):
        picture = RESULTS / run / name
        if picture.exists() and (name != "attention_maps.png" or run == "A"):
            assert_is_drawn(picture, figure)


def test_the_committed_figure_4_is_what_the_code_draws():
    rows = train.read_file(RESULTS / "sweep/results.jsonl")
    rows = [train.DEFAULTS | row for row in rows]
    assert_is_drawn(RESULTS / "sweep/figure4.png", sweep.figure_4(rows))
