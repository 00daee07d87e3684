"""The explorer says what the model says and follows clicks in a browser; the film has frames."""

import json
import re
import shutil

import test_all
import train
from data import held_out
from extras import film
from extras.explore import __main__ as explore

import numpy
import pytest
import torch


PATHS = dict(layer=0, head=1, reader="1b", read="1a"), dict(layer=1, head=0, reader="q", read="1b")


def test_the_page_is_right_and_a_browser_draws_it(tmp_path):
    """Errors on each query; no sideways scrolling at two widths; a click changes what is shown."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    train.run_once(train.parse_flags([*test_all.TINY.split(), "--out", str(run)]))
    rows = [dict(path, cost=dict(x_1=0.5)) for path in PATHS]
    train.write_file(run / "circuit.json", dict(paths=rows, sequences=512, verdict="validated"))
    code, _, err = test_all.run_main(explore, f"{run} --out {page}")
    assert code == 0, err

    model, task, _ = train.load(run)
    batch = task.batch(held_out("validation", explore.SEQUENCES))
    expected = (model(batch.inputs) - batch.targets).square().unflatten(-1, (-1, task.K)).mean(-1)
    (data,) = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"))[1])
    (_, errors), *_ = data["answers"][-1]  # of the last checkpoint, of the full model
    torch.testing.assert_close(torch.tensor(errors), expected, atol=6e-3, rtol=0)
    assert data["steps"] == [0, 20, 40]

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
            script = "return document.documentElement.scrollWidth"
            assert browser.execute_script(script) <= width
            for target, view, says in (
                ("[data-layer='0'][data-head='0']", "map", "Attention of L0H0"),
                (".list [data-path='0']", "answers", "full model without L0H1: 1b -> 1a"),
                (".strip [data-token='0']", "strip", "In L0H1, A"),
            ):
                assert says not in browser.find_element("id", view).text, target
                browser.find_element("css selector", target).click()
                assert says in browser.find_element("id", view).text, target
        assert not [row for row in browser.get_log("browser") if row["level"] == "SEVERE"]


def test_the_film_has_a_redder_frame_for_each_step():
    flags, red = train.parse_flags(test_all.TINY.split()), []
    log = [dict(step=0, x_1=1.0), dict(step=40, x_1=0.1)]
    rows = [dict(path, mean=[0, 0.5, 1]) for path in PATHS]
    emergence = dict(steps=[0, 20, 40], sequences=32, paths=rows)
    for frame in film.draw_frames(flags, log, emergence):
        colors = numpy.asarray(frame, int)
        red.append((colors[..., 0] - colors[..., 1] > 100).sum())
    assert len(red) == 3 and red[0] < red[1] < red[2]
