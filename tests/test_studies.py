"""Studies, over run directories made by hand; test_results.py pins what they print of ours."""

import json

import train
from extras.studies import metrics, order, rows
from tests.common import output_of

import torch


FALLING = dict(x_1=[1, 1, 0, 0, 0], x_2=[1, 1, 1, 0, 0])  # below 0.5 at steps 150 and 250


def write_run(run, flags="", paths=(), **losses):
    """Write a run; losses: each 100 steps; paths: (layer, reader, read, step of its emergence)."""
    run.mkdir(parents=True)
    flags = ["--device", "cpu", *flags.split(), "--out", str(run)]
    train.open_run(train.parse_flags(flags))

    # the losses, and that no circuit was searched
    log = []
    for number, values in enumerate(zip(*losses.values(), strict=True)):
        row = dict(step=100 * number, seconds=1, val=sum(values) / len(values))
        log.append(row | dict(zip(losses, values, strict=True)))
    train.write_file(run / "log.jsonl", log)
    (run / "circuit.json").write_text('{"paths": [], "verdict": "not searched"}')

    # how the paths emerged
    found, steps = [], [*range(0, 500, 100)]
    for layer, reader, read, emerged in paths:
        mean = [float(step >= emerged) for step in steps]
        found.append(dict(layer=layer, head=0, reader=reader, read=read, mean=mean))
    (run / "emergence.json").write_text(json.dumps(dict(steps=steps, paths=found)))
    return run


def row_of(run, flags="", **more):
    [row] = rows.load([write_run(run, flags, **more)])
    return row


def test_a_row_says_what_the_run_directory_says(tmp_path):
    """From a directory and from a file alike; a run replaces the row of the same name."""
    automatic = train.run_name(train.parse_flags(["--D", "2", "--seed", "7"]))
    run = write_run(tmp_path / automatic, "--D 2 --seed 7", [(1, "1b", "1a", 100)], **FALLING)
    other = write_run(tmp_path / "mine_other", "--D 2", **FALLING)
    for _ in range(2):
        assert "2 runs" in output_of(rows, "mine", other, run, "--out", tmp_path / "rows")
    of_file = {row["name"]: row for row in rows.load([tmp_path / "rows/mine.jsonl"])}
    of_folders = {row["name"].removeprefix("mine_"): row for row in rows.load([run, other, run])}
    assert of_file.keys() == of_folders.keys() == {"s7", "other"}
    for name, row in of_folders.items():
        same = row.keys() - {"folder", "group", "name", "flags"}
        assert all(row[key] == of_file[name][key] for key in same)

    # what is added to what the files say
    row = of_file["s7"]
    assert rows.name_of(row) == "mine/s7" and row["known"] == ["x_1", "x_2"]
    assert row["learned"] == dict(x_1=150, x_2=250) and row["mse"] == 0 and row["steps"] == 400
    assert rows.rounded([0.123456789, 3, "1.23456789"]) == [0.12346, 3, "1.23456789"]


# ---- order


def test_which_paths_came_first(tmp_path):
    lower, upper, last = (1, "1b", "1a", 100), (2, "q", "1b", 200), (3, "q", "2b", 300)
    paths = last, upper, (4, "q", "1b", 400), lower
    row = row_of(tmp_path / "a", "--D 2", paths=paths, **FALLING)
    steps = [(50, (1, 0), "1b -> 1a"), (150, (2, 0), "q -> 1b"), (250, (3, 0), "q -> 2b")]
    assert order.path_steps(row, 0.5) == [*steps, (350, (4, 0), "q -> 1b")]
    assert order.reads_in_order(row, 0.5)
    assert order.new_heads(row, 0.5) == [1]  # x_1 is learned at step 150, x_2 at 250


# ---- claims


def test_a_run_counts_once_and_by_its_settings(tmp_path):
    """Repeats in another precision are no further runs; one with another flag is."""
    found, words = [], ("", "--dtype float32", "--seed 1", "--optimizer adamw", "--positions rope")
    for number, text in enumerate(words):
        found.append(row_of(tmp_path / str(number), f"--D 1 {text}", x_1=[1, number / 9]))
    kept = rows.once(found)
    assert [row["name"] for row in kept] == ["0", "2", "3", "4"]
    pairs = [(row["flags"], row["mse"] < 0.3) for row in kept]
    assert order.count(pairs) == "2 of 4 (2)"


def test_metrics_agree_with_all_distances():
    """On predictions made by hand, with nothing known and with nearly all known."""
    targets, noise = torch.randn(2, 50, 4, 3, generator=torch.Generator().manual_seed(0))
    for predictions in noise, targets + 0.1 * noise:
        losses = torch.cdist(predictions, targets).square() / 3  # (50, 4, 4)
        own = losses.diagonal(dim1=1, dim2=2).mean(1)
        others = (losses.sum((1, 2)) - 4 * own) / 12
        nearest = (losses.argmin(2) == torch.arange(4)).float().mean(1)
        cosine = torch.cosine_similarity(predictions, targets, dim=-1).mean(1)
        found = metrics.measures(predictions, targets)
        torch.testing.assert_close([*found["mse"]], [own, others - own])
        torch.testing.assert_close([found["nearest"][0], found["cosine"][0]], [nearest, cosine])
