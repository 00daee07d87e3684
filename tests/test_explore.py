"""Pages: they say what the model says, a name in them runs nothing, and in a real browser they draw
without an error, a request or sideways scrolling."""

import itertools
import json
import re
import shutil

import train
from data import held_out
from extras.pages import explore
from tests.common import assert_refused, output_of
from tests.other_tasks import write_circuit

import pytest
import torch


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
    """The error on each query of each sequence, against the model by hand; what is missing."""
    model, flags = train.load(folder / "run")
    page = (folder / "page.html").read_text(encoding="utf-8")
    run, bare = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    batch = train.sequences(flags, held_out("validation", len(run["sequences"])))
    with torch.no_grad(), train.precision(flags):
        predictions = model(batch.inputs).float()
    errors = (predictions - batch.targets).square().unflatten(-1, (-1, flags.K)).mean(-1)
    final = run["answers"][-1]
    assert len(final) == 4  # of the full model, and without each path
    for number, chains in enumerate(final[0]):
        for chain, cells in enumerate(chains):
            query = batch.positions[number, chain, 0] - (flags.problem.T - flags.N)
            expected = errors[number, query].tolist()
            assert [error for _, error in cells] == pytest.approx(expected, abs=0.002)
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
