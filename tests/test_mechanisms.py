"""What the files of mechanisms/ share: the command line, with a planted measurement; every file at
a tiny size, and with the numbers that are kept; the tables of the page."""

import json
import runpy
import shutil
from functools import partial
from types import SimpleNamespace
from unittest import mock

import matplotlib.pyplot as plt
import pytest

import mechanisms
from mechanisms import bigrams, hops, layers, memories, noise, recall, samples, theorems
from tests.common import HERE, assert_one_line, assert_refused, contents, run_main


# ---- the command line


def planted(seed, steps):
    return seed * steps


def tasks(seeds, steps):
    return [(1, planted, dict(steps=steps), seeds), (1, planted, dict(steps=2 * steps), seeds)]


def table(results):
    return f"values {[row['values'] for row in results['planted']]}"


def draw(results):
    figure, axes = plt.subplots()
    axes.plot(results["planted"][0]["values"])
    return figure


def program(tasks=tasks, table=table, draw=draw):
    command = partial(mechanisms.command, "planted.py", "About.", tasks, table, draw)
    return SimpleNamespace(main=partial(command, steps=5, seeds=3), __file__="planted.py")


def test_results_are_kept_printed_drawn_and_redrawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(program(), "--seed", 7, "--seeds", 2)
    assert (code, err) == (0, "") and "s left" in out
    assert out.endswith("values [[35, 40], [70, 80]]\n")
    results, picture = (tmp_path / f"out/mechanisms/planted{end}" for end in (".json", ".png"))
    found, drawn = json.loads(results.read_text()), picture.read_bytes()
    assert found["command"] == ["--seed", "7", "--seeds", "2"] and found["seconds"] > 0
    assert found["planted"][1] == dict(steps=10, values=[70, 80])

    picture.unlink()
    wrong = program(lambda seeds, steps: [(1, planted, {}, None)])  # measures nothing
    assert run_main(wrong, "--plot-only") == (0, "values [[35, 40], [70, 80]]\n", "")
    assert picture.read_bytes() == drawn and json.loads(results.read_text()) == found


def test_refusals(tmp_path):
    assert_refused(program(), "--seeds", 0, says="--seeds must be 1 to 2^32 - 1, not 0")
    assert_refused(program(), "--steps", "ten", says="--steps")
    assert_refused(program(), "--seed", -1, says="--seed must be 0 to 2^32 - 1, not -1")
    assert_refused(program(), "--seed", 2**70, says="--seed")
    assert_refused(program(), "--see", 5, says="--see")
    (tmp_path / "file").touch()
    assert_refused(program(), "--out", tmp_path / "file", says="File exists")


@pytest.mark.parametrize("text", [None, "", "[", "[]", "{}", '{"other": []}', '{"seconds": 1'])
def test_files_that_cannot_be_drawn(text, tmp_path):
    if text is not None:
        (tmp_path / "planted.json").write_text(text)
    before = contents(tmp_path)
    assert_refused(program(), "--plot-only", "--out", tmp_path, says="planted.json")
    assert contents(tmp_path) == before


def test_a_full_disk_is_found_before_measuring(tmp_path):
    full = mock.patch.object(mechanisms.tempfile, "TemporaryFile", side_effect=OSError("full"))
    measuring = mock.Mock(__name__="planted")
    with full:
        never = program(lambda seeds, steps: [(1, measuring, {}, seeds)])
        assert_refused(never, "--out", tmp_path, says="full")
    assert not measuring.called


def test_a_measurement_that_cannot_be_written_is_printed(tmp_path):
    with mock.patch.object(mechanisms, "write_text", side_effect=OSError("full")):
        code, out, err = run_main(program(), "--out", tmp_path)
    assert code == 2 and json.loads(out.splitlines()[-1])["planted"][0]["values"] == [0, 5, 10]
    assert_one_line(err, "full")


def test_a_bug_keeps_its_traceback(tmp_path):
    def broken(*_, **__):
        raise KeyError("a bug")

    run_main(program(), "--out", tmp_path)
    for bug in (dict(tasks=broken), dict(table=broken), dict(draw=broken)):
        with pytest.raises(KeyError, match="a bug"):
            run_main(program(**bug), "--plot-only", "--out", tmp_path)
    broken.__name__ = "planted"
    with pytest.raises(KeyError, match="a bug"):
        run_main(program(lambda seeds, steps: [(1, broken, {}, seeds)]), "--out", tmp_path)


# ---- every file


SMALL_WIDTHS = {"one step": (16, 24), "matrix": (4, 6), "MLP": (4, 6)}
SMALL_GRID = [(2, 4, regime, token) for regime in hops.REGIMES for token in (False, True)]
TINY = {  # what is replaced, the defaults of train, and what tasks takes
    memories: (dict(WIDTHS=SMALL_WIDTHS, LOADS=(0.1,)), None, [5]),
    recall: (dict(TABLES=[(4, 2, 2, 0.1)], HEADS=(1, 2), HIDDEN=(0, 4)), None, [16]),
    bigrams: ({}, (8, 16, 8), [10]),
    layers: ({}, (8, 16, 8), [2]),
    theorems: (dict(SIZES=((16, 512), (32, 256))), None, []),
    noise: (dict(KEPT=(0, 13, 26, 128)), (16, 24, 8, 10), [50]),
    samples: (dict(CHARACTERS=(8, 12), SAMPLES=(1, 4, 16)), None, []),
    hops: (dict(GRID=SMALL_GRID), None, [2]),
}


@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__)
def test_at_a_tiny_size(module, tmp_path, monkeypatch):
    replaced, defaults, arguments = TINY[module]
    for name, value in replaced.items():
        monkeypatch.setattr(module, name, value)
    if defaults:
        monkeypatch.setattr(module.train, "__defaults__", defaults)
    mechanisms.measure(tmp_path / "a.json", module.tasks(range(3, 5), *arguments))
    results = json.loads((tmp_path / "a.json").read_text())
    text = module.table(results)
    if hasattr(module, "draw"):
        plt.close(module.draw(results))
    head, line, *rows = text.splitlines()
    assert rows and all(row.count("|") == head.count("|") for row in [line, *rows])


@pytest.mark.parametrize("module", TINY, ids=lambda module: module.__name__)
def test_what_is_kept_is_drawn(module, tmp_path):
    name = module.__name__.split(".")[1]
    shutil.copy(HERE / f"results/mechanisms/{name}.json", tmp_path)
    main = partial(runpy.run_module, module.__name__, run_name="__main__")
    started = SimpleNamespace(main=main, __file__=f"{name}.py")
    code, out, err = run_main(started, "--plot-only", "--out", tmp_path)
    assert (code, err) == (0, "") and out.startswith("|")
    assert (tmp_path / f"{name}.png").exists() == hasattr(module, "draw")
