"""What is committed can be read, weights score what logs say, and pages say what they are printed
from; the explorer says what the model says, runs nothing that a name says, and draws in a browser.
"""

import base64
import itertools
import json
import re
import shutil

import train
from data import held_out
from extras.pages import explore
from extras.studies import rows
from tests.common import HERE, assert_refused, output_of
from tests.other_tasks import write_circuit

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
    for name in "default/s0", "rope/s4":
        kept = rows.row_of(RESULTS / name.replace("/", "_"))
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
    again = "renew it: python -m cogapp -r -I . README.md */*.md */*/*.md"
    assert Cog().main(["cog", "--check", "-I", ".", str(page)]) == 0, again


def test_links_of_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            there = link.startswith("http") or (page.parent / link).exists()
            assert there, f"{page}: {link}"


# ---- the explorer


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    """A folder with `run`, with checkpoints and a circuit; `bare`, without either; and a page."""
    folder = tmp_path_factory.mktemp("two words") / "my runs"
    run, bare, page = (folder / name for name in ("run", "bare", "page.html"))
    shutil.copytree(whole, run)
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("ckpt"))
    write_circuit(run, (0, 0, "1b", "1a", 0.9), (0, 1, "q", "1b", 0.05), (1, 0, "q", "1b+1", 0.8))
    assert str(page) in output_of(explore, run, bare, "--out", page)
    return folder


def test_the_page_says_what_the_model_says(folder):
    """The error on each query of each sequence, all attention; what is missing."""
    model, flags = train.load(folder / "run")
    page = (folder / "page.html").read_text(encoding="utf-8")
    run, bare = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    batch = train.sequences(flags, held_out("validation", len(run["sequences"])))
    with torch.no_grad(), train.precision(flags):
        predictions, patterns = model(batch.inputs, return_patterns=True)
    errors = (predictions - batch.targets).square().unflatten(-1, (-1, flags.K)).mean(-1)
    final = run["answers"][-1]
    assert len(final) == 4  # of the full model, and without each path
    for number, chains in enumerate(final[0]):
        for chain, cells in enumerate(chains):
            query = batch.positions[number, chain, 0] - (flags.problem.T - flags.N)
            expected = errors[number, query].tolist()
            assert [error for _, error in cells] == pytest.approx(expected, abs=0.002)
    maps = torch.tensor([*base64.b64decode(run["attention"])]).view(len(run["steps"]), -1)
    patterns = torch.stack(patterns, 1).float().flatten()
    torch.testing.assert_close(maps[-1] / 100, patterns, atol=6e-3, rtol=0)
    assert "There is no circuit.json" in bare["missing"]


def test_nothing_in_a_name_is_run(folder, tmp_path):
    """Names of runs and what their files say are text; folders that are no runs are refused."""
    bad, page = tmp_path / "a#b<img src=x onerror=alert(1)>", tmp_path / "page.html"
    shutil.copytree(folder / "bare", bad)
    output_of(explore, bad, "--out", page)
    assert "<img src=x" not in page.read_text(encoding="utf-8")
    assert_refused(explore, bad / "empty", says="is no run directory")
    (bad / "model.pt").unlink()
    assert_refused(explore, bad, says="has no weights")


@pytest.mark.slow
def test_pages_draw_without_error_request_or_sideways_scrolling(folder):
    """In a real browser, narrow and wide."""
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        pytest.skip("no chromium with its chromedriver here")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in "--headless=new --no-sandbox --disable-dev-shm-usage".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL", performance="ALL"))
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        for width, number in itertools.product((360, 1400), (0, 1)):
            size = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(f"{folder.as_uri()}/page.html")
            browser.execute_script(f"begin({number})")
            assert browser.find_element("css selector", "h1").text
            script = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.execute_script(script) <= 0, number
        assert not [row for row in browser.get_log("browser") if row["level"] == "SEVERE"]
        events = [json.loads(row["message"])["message"] for row in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    urls = {event["params"]["request"]["url"].partition(":")[0] for event in sent}
    assert urls <= {"file", "data"}
