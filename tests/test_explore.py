"""Pages to point at: what they say is what the model says, a broken name runs nothing, and in a
real browser they draw without an error, a request or sideways scrolling."""

import json
import re
import shutil

from parts import config

import pytest
import torch

import train
from data import held_out
from pages import explore, index
from tests.common import TINY, assert_refused, run_main
from tests.other_tasks import write_circuit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with `run`, tiny, with checkpoints and a circuit; `bare`, without weights and
    circuit; begun, without a log; and a page of the first two."""
    folder = tmp_path_factory.mktemp("two words") / "my runs"
    run, bare, begun = (folder / name for name in ("run", "bare", "begun"))
    assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
    for other, files in ((bare, ["config.json", "log.jsonl"]), (begun, ["config.json"])):
        other.mkdir()
        for name in files:
            shutil.copy(run / name, other)
    write_circuit(run, (1, 1, "1b", "1a", 0.9), (1, 2, "q", "1b", 0.05), (2, 1, "q", "1b+1", 0.8))
    page = folder / "page.html"
    code, out, err = run_main(explore, run, bare, "--out", page)
    assert code == 0 and str(page) in out, err
    return folder


def data_of(page):
    """What a page holds of each run."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    return json.loads(text[1])


def test_the_page_says_what_the_model_says(folder):
    """The answer to each query of each sequence, against the model by hand."""
    model, flags = config.load(folder / "run")
    told, _ = data_of(folder / "page.html")
    batch = config.sequences(flags, held_out("validation", len(told["sequences"])))
    with torch.no_grad(), config.precision(flags):
        said = model(batch.inputs).float()
    errors = (said - batch.targets).square().view(len(said), flags.N, -1, flags.K).mean(-1)
    shown = told["said"][-1][0]  # of the last moment, with all paths
    for number, chains in enumerate(shown):
        for chain, cells in enumerate(chains):
            asked = batch.positions[number, chain, 0] - (flags.problem.T - flags.N)
            expected = errors[number, asked].tolist()
            assert [error for _, error in cells] == pytest.approx(expected, abs=0.002)


def test_what_is_missing_is_said(folder):
    _, bare = data_of(folder / "page.html")
    missing = " ".join(bare["missing"].values())
    assert "left no weights" in missing and "No circuit was looked for" in missing


def test_nothing_of_a_name_is_run(folder, tmp_path):
    """Names of runs and what their files say are text."""
    bad = tmp_path / "runs" / "a#b<img src=x onerror=alert(1)>"
    bad.mkdir(parents=True)
    for name in ("config.json", "log.jsonl"):
        shutil.copy(folder / "bare" / name, bad)
    shutil.copytree(folder / "begun", tmp_path / "runs" / "begun")
    page = tmp_path / "runs" / "page.html"
    assert run_main(explore, bad, "--out", page)[0] == 0
    code, _, err = run_main(index, tmp_path / "runs", "--out", tmp_path / "index.html")
    assert code == 0, err
    for file in (page, tmp_path / "index.html"):
        assert "<img src=x" not in file.read_text()
    text = (tmp_path / "index.html").read_text()
    assert 'href="./runs/page.html#run=1"' in text and "<td>begun</td>" in text

    # nor is another optimizer than there is read
    settings = json.loads((bad / "config.json").read_text()) | dict(optimizer="<img src=x>")
    (bad / "config.json").write_text(json.dumps(settings))
    assert_refused(index, tmp_path / "runs", says="--optimizer must be one of")


def test_what_is_no_run_is_refused(tmp_path):
    assert_refused(index, tmp_path, says="holds no run directories")
    assert_refused(explore, tmp_path, says="is no run directory")


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        pytest.skip("no chromium with its chromedriver here")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in "--headless=new --no-sandbox --disable-dev-shm-usage".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL", performance="ALL"))
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768, 1400])
def test_pages_draw_without_error_request_or_sideways_scrolling(width, folder, browser):
    assert run_main(index, folder, "--out", folder / "index.html")[0] == 0
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 500),
    )
    for page, hashes in (("page.html", ["", "#run=2", "#run=1&layer=2"]), ("index.html", [""])):
        for chosen in hashes:
            browser.get((folder / page).as_uri() + chosen)
            browser.implicitly_wait(2)
            assert browser.find_element("css selector", "h1").text
            script = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.execute_script(script) <= 0, (page, chosen)
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    urls = {event["params"]["request"]["url"].partition(":")[0] for event in sent}
    assert urls <= {"file", "data"}


@pytest.mark.slow
def test_what_is_chosen_lives_in_the_address(folder, browser):
    browser.get((folder / "page.html").as_uri() + "#run=1&layer=2&head=2")
    told = browser.execute_script("return location.hash")
    assert "layer=2" in told and "head=2" in told
    browser.refresh()
    assert browser.execute_script("return location.hash") == told


@pytest.mark.slow
def test_what_is_known_at_the_end_alone_turns_grey_before(folder, browser):
    grey = "return [...document.querySelectorAll('section.old')].map((one) => one.id)"
    for chosen, sections in (("#run=1", []), ("#run=1&moment=1", ["path", "information"])):
        browser.get((folder / "page.html").as_uri() + chosen)
        browser.refresh()  # else only the address changes
        assert browser.execute_script(grey) == sections
        for name in sections:
            assert "at the end, after" in browser.find_element("css selector", f"#{name} h2").text
