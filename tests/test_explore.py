"""The explorer says what the model says and follows clicks in a browser; the film has frames."""

import json
import re
import shutil

import ablate
import test_all
import train
from extras import film
from extras.explore import __main__ as explore

import numpy
import pytest
import torch


PATHS = dict(layer=0, head=1, reader="1b", read="1a"), dict(layer=1, head=0, reader="q", read="1b")


def test_the_page_is_right_and_a_browser_draws_it(tmp_path):
    """Errors with and without paths; roles of pairs; no sideways scrolling at two widths; clicks,
    and Enter on what keeps the focus, change what is shown."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    train.run_once(train.parse_flags([*test_all.TINY.split(), "--out", str(run)]))
    report = dict(paths=[dict(path, cost=dict(x_1=0.5)) for path in PATHS], verdict="validated")
    train.write_file(run / "circuit.json", report)
    assert test_all.run_main(explore, f"{run} --out {page}")[0] == 0

    model, task, _ = train.load(run)
    batch = task.draw("validation", explore.SEQUENCES)
    (data,) = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"))[1])
    assert data["steps"] == [0, 20, 40]
    patched, (first, second) = ablate.PatchedModel(model, task, batch), ablate.paths_in(report)
    expected = [patched.full, patched.keep_only([first, second])]
    for removed, left in (first, second), (second, first):
        expected += [patched.knock_out([removed]), patched.keep_only([left])]
    errors = torch.tensor(data["answers"])[-1, ..., 1].flatten(0, 1)  # of the final weights
    torch.testing.assert_close(errors, torch.stack(expected), atol=6e-4, rtol=0)
    assert -1 in torch.tensor(data["answers"])[..., 0]  # an answer that is near no symbol
    for name, found in zip(data["names"], batch.places.unbind(2), strict=True):
        for sequence, chains, roles in zip(found, data["chains"], data["roles"], strict=True):
            assert [chains[token] for token in sequence] == [0, 1]
            assert {data["names"][roles[token]] for token in sequence} == {name}

    shown = task.labels[batch.symbols[0, 0]]
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in "--headless=new", "--no-sandbox", "--disable-dev-shm-usage":
        options.add_argument(flag)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        for width in 1366, 375:
            size = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(page.as_uri())
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            for target, view, says in (
                ("[data-layer='0'][data-head='0']", "map", "Attention of L0H0"),
                (".strip [data-token='0']", "strip", f"In L0H0, {shown} (1a) attends"),
                (".list [data-path='0']", "answers", "without L0H1: 1b reads 1a"),
            ):
                assert says not in browser.find_element("id", view).text, target
                browser.find_element("css selector", target).click()
                assert says in browser.find_element("id", view).text, target
            for removed in False, True:  # the new button in the place of the old one has the focus
                browser.switch_to.active_element.send_keys(webdriver.Keys.ENTER)
                assert ("1b reads 1a" in browser.find_element("id", "answers").text) == removed
        assert not [row for row in browser.get_log("browser") if row["level"] == "SEVERE"]


def test_a_task_that_is_no_chain_has_one_line(tmp_path):
    words = [*test_all.TINY.split(), "--task", "extras.lookup:Lookup", "--out", str(tmp_path)]
    train.open_run(train.parse_flags(words))
    (tmp_path / "model.pt").touch()
    code, _, err = test_all.run_main(explore, str(tmp_path))
    assert code == 2 and "chains alone" in err and err.count("\n") == 1


def test_the_film_has_a_redder_frame_for_each_step():
    flags, red = train.parse_flags(test_all.TINY.split()), []
    log = [dict(step=0, x_1=1.0), dict(step=40, x_1=0.1)]
    rows = [dict(path, mean=[0, 0.5, 1]) for path in PATHS]
    emergence = dict(steps=[0, 20, 40], sequences=32, paths=rows)
    for frame in film.draw_frames(flags, log, emergence):
        colors = numpy.asarray(frame, int)
        red.append((colors[..., 0] - colors[..., 1] > 100).sum())
    assert len(red) == 3 and red[0] < red[1] < red[2]
