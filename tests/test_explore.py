"""Pages to point at, in a real browser: what they show, that they ask nothing of any network, and
what they say where something is missing. Skipped where there is no Chromium with its driver."""

import itertools
import json
import re
import shutil

import numpy
import pytest
import torch
from matplotlib.colors import to_rgb

from tests.common import HERE, TINY, assert_refused, run_main
from tests.other_tasks import write_circuit


pytest.importorskip("altair", reason="needs altair and vl-convert-python")

from parts import runs  # noqa: E402

import train  # noqa: E402
from data import held_out  # noqa: E402
from pages import (
    explore,  # noqa: E402
    index,  # noqa: E402
)
from pages.views import CHAINS  # noqa: E402


SCHEMA = "https://vega.github.io/schema/vega-lite/"  # a name, of the language of the charts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a space in its name: `run`, tiny, with checkpoints and a circuit, its page;
    `bare`, with neither weights nor circuit; a page to choose between them."""
    folder = tmp_path_factory.mktemp("two words") / "my runs"
    run, bare = folder / "run", folder / "bare"
    assert run_main(train, *TINY, "--save-every", 20, "--out", run)[0] == 0
    bare.mkdir()
    for name in ("config.json", "log.jsonl"):
        shutil.copy(run / name, bare)
    write_circuit(run, (1, 1, "1b", "1a", 0.9), (1, 2, "q", "1b", 0.05), (2, 1, "q", "1a", 0.8))
    for chosen in [run], [run, bare]:
        code, out, err = run_main(explore, *chosen)
        assert code == 0 and "MB" in out, err
    return folder


@pytest.fixture(scope="module")
def browser():
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        pytest.skip("no chromium with its chromedriver here")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for (
        flag
    ) in "--headless=new --no-sandbox --disable-dev-shm-usage --window-size=1300,1000".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", dict(browser="ALL", performance="ALL"))
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def until(condition, what, seconds=90):
    """Wait, for a machine may be slow."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(None, seconds, 0.1).until(lambda _: condition(), what)


def texts(browser):
    """All that is written in the views."""
    script = "return [...document.querySelectorAll('#views svg text')].map(t => t.textContent)"
    return " | ".join(browser.execute_script(script))


def show(browser, file):
    """Open a page, and wait until it is drawn."""
    for kind in "browser", "performance":
        browser.get_log(kind)
    browser.get(file.as_uri())
    until(lambda: browser.execute_script("return document.body.dataset.seconds"), "not drawn")


def point_at(browser, mark, click=False):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    action = ActionChains(browser).move_to_element(mark)
    (action.click() if click else action).perform()


def marks(browser, name, kind):
    return browser.find_elements("css selector", f"#views .{name}_marks {kind}")


def tooltip(browser):
    found = browser.find_elements("css selector", "#vg-tooltip-element")
    return found[0].text if found else ""


def assert_quiet(browser, file):
    """Nothing in the console; nothing was asked of the network, or of another file."""
    assert browser.get_log("browser") == []
    asked = []
    for entry in browser.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            asked.append(event["params"]["request"]["url"])
    assert set(asked) == {file.as_uri()}


# ---- the page of a run


def test_a_page_is_drawn_and_quiet(folder, browser):
    file = folder / "run" / "explorer.html"
    show(browser, file)
    assert file.stat().st_size < 5e6
    assert "after 40 steps" in texts(browser)
    assert_quiet(browser, file)


@torch.no_grad()
def test_sliders_change_the_map_by_keyboard(folder, browser):
    """The opacities of the cells are the attention that the model itself gives."""
    from selenium.webdriver.common.keys import Keys

    def shown():
        script = "return [...document.querySelectorAll('#views .cells_marks path')]"
        script += ".map(cell => Number(cell.getAttribute('opacity') ?? 1).toFixed(2))"
        return sorted(browser.execute_script(script))

    def expected(weights, layer, head):
        model, config = runs.load(folder / "run", weights)
        inputs = runs.sequences(config, held_out("validation", 8)).inputs
        pattern = model(inputs, return_patterns=True)[1][layer][0, head].flatten()
        return sorted(f"{value:.2f}" for value in pattern.tolist() if round(100 * value))

    show(browser, folder / "run" / "explorer.html")
    assert shown() == expected("model.pt", 1, 0)
    for name, key, weights, layer, head in (
        ("layer", Keys.ARROW_LEFT, "model.pt", 0, 0),
        ("head", Keys.ARROW_RIGHT, "model.pt", 0, 1),
        ("checkpoint", Keys.HOME, "ckpt/000020.pt", 0, 1),
    ):
        browser.find_element("css selector", f"#{name} input").send_keys(key)
        want = expected(weights, layer, head)
        until(lambda want=want: shown() == want, f"{name}: {shown()} is not {want}")


def test_pointing_at_a_path_shows_its_numbers_and_history(folder, browser):
    show(browser, folder / "run" / "explorer.html")
    point_at(browser, marks(browser, "arrows", "line")[0])  # layer 1 head 1: 1b -> 1a
    emerged = json.loads((folder / "run" / "emergence.json").read_text())
    attention = f"{emerged['rows'][-1]['paths'][0]['mean']:.2f}"
    for word in "layer 1 head 1: 1b", attention:
        until(lambda word=word: word in tooltip(browser), word)
    assert "Over training: layer 2 head 1: q" in texts(browser)
    point_at(browser, marks(browser, "arrows", "line")[0], click=True)
    until(lambda: "Over training: layer 1 head 1: 1b" in texts(browser), "no history")
    assert "Attention of layer 1, head 1" in texts(browser)
    point_at(browser, marks(browser, "tiles", "path")[0])
    until(lambda: "A1 (q) in layer 1" in texts(browser), "the token is not chosen")


def test_what_is_missing_is_said(folder, browser):
    """In a page to choose from, whose other run has neither weights nor circuit."""
    from selenium.webdriver.support.ui import Select

    show(browser, folder / "explorer.html")
    assert "Over training" in texts(browser)
    Select(browser.find_element("css selector", "#run select")).select_by_index(1)
    until(lambda: "no weights" in texts(browser), "the other run is not shown")
    assert "No circuit was looked for: run python ablate.py" in texts(browser)
    assert "Without a circuit" in texts(browser) and "The error of each symbol" in texts(browser)
    assert_quiet(browser, folder / "explorer.html")


def test_the_index_names_what_is_pointed_at(browser, tmp_path):
    """Over two committed runs and the committed sweep."""
    for name in "L12_H1_D3_s3", "L12_H1_D3_s8":
        (tmp_path / name).mkdir()
        for file in "config.json", "log.jsonl":
            shutil.copy(HERE / "results" / name / file, tmp_path / name)
    shutil.copytree(HERE / "results" / "sweep", tmp_path / "sweep")
    (tmp_path / "L12_H1_D3_s8" / "explorer.html").write_text("")
    code, out, err = run_main(index, tmp_path)
    assert code == 0 and "index.html" in out, err
    show(browser, tmp_path / "index.html")
    link = browser.find_element("css selector", "#about a").get_attribute("href")
    assert link == (tmp_path / "L12_H1_D3_s8" / "explorer.html").as_uri()
    for name, words in (
        (
            "learned",
            ["L12_H1_D3_s3", "seed", "x_1 below 0.5", "437"],
        ),  # 437: as in order.png
        ("final", ["L5_H8_D5", "0.211"]),  # the first row of the table
        ("held", ["circuit_s"]),
    ):
        point_at(browser, marks(browser, name, "path")[0])
        until(lambda words=words: all(word in tooltip(browser) for word in words), words)
    assert_quiet(browser, tmp_path / "index.html")


# ---- without a browser


def test_refusals(folder, tmp_path):
    assert_refused(explore, tmp_path, says="is no run directory")
    assert_refused(index, tmp_path, says="holds no run directories")


def test_no_page_names_another_host(folder):
    """Outside of the library, which is told by default-src 'none' that it may fetch nothing."""
    text = (folder / "run" / "explorer.html").read_text().replace(explore.library(), "")
    assert "default-src 'none'" in text
    assert not re.search("(src|href) *=|https?:", text.replace(SCHEMA, ""))


def test_arrows_join_the_roles_of_a_chain(folder):
    run = explore.read_run(folder / "run")
    story, rows = explore.tell(run)
    assert story.missing == {} and story.steps == [0, 20, 40]
    who = {(row["sequence"], row["token"]): row for row in rows["tokens"]}
    joined = {(1, 1): "1b 1a", (1, 2): "q 1b", (2, 1): "q 1a"}
    assert len(rows["arrows"]) == len(joined) * 8 * run.task.N
    for row in rows["arrows"]:
        source, target = (who[row["sequence"], row[end]] for end in ("token", "other"))
        assert source["chain"] == target["chain"]
        assert f"{source['role']} {target['role']}" == joined[row["layer"], row["head"]]


SEEN = {  # linear RGB as seen by those who lack a kind of cones (Machado et al., 2009)
    "protan": "0.152 1.053 -0.205 0.115 0.786 0.099 -0.004 -0.048 1.052",
    "deutan": "0.367 0.861 -0.228 0.280 0.673 0.047 -0.012 0.043 0.969",
    "tritan": "1.256 -0.077 -0.179 -0.078 0.931 0.148 0.005 0.691 0.304",
    "all cones": "1 0 0 0 1 0 0 0 1",
}


@pytest.mark.parametrize("kind", SEEN)
def test_colours_can_be_told(kind):
    """Chains, and symbols, are at least 15 apart in CIELAB, where 2 can just be told."""
    to_xyz = [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
    for colors in CHAINS, [runs.symbol_color(k, 5)[:3] for k in range(1, 6)]:
        rgb = numpy.array([to_rgb(color) for color in colors])
        linear = numpy.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        seen = linear @ numpy.array(SEEN[kind].split(), float).reshape(3, 3).T
        x, y, z = numpy.cbrt(seen.clip(0.001, 1) @ numpy.array(to_xyz).T / [0.95, 1, 1.089]).T
        lab = numpy.stack([116 * y, 500 * (x - y), 200 * (y - z)], 1)
        least = min(numpy.linalg.norm(a - b) for a, b in itertools.combinations(lab, 2))
        assert least > 15, (colors, least)
