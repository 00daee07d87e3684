"""Studies, over run directories made by hand; test_results.py pins what they print of ours."""

import itertools
import json

import train
from data import Task
from extras.studies import claims, directions, metrics, order, rows, tables
from tests.common import HERE, TINY, output_of
from tests.planted import CIRCUITS, Planted

import pytest
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
    assert order.path_steps(row) == [*steps, (350, (4, 0), "q -> 1b")]
    assert order.reads_in_order(row)
    assert order.new_heads(row) == [1]  # x_1 is learned at step 150, x_2 at 250


def test_which_orders_count(tmp_path):
    """Two symbols between the same evaluations, or one alone, tell no order."""
    late, never = [1, 1, 1, 0, 0], [1] * 5
    for number, (first, second, ordered) in enumerate(
        [(FALLING["x_1"], late, True), (late, FALLING["x_1"], False), (late, late, None)]
        + [(late, never, None), (never, late, None)]
    ):
        row = row_of(tmp_path / str(number), "--D 2 --eval-every 100", x_1=first, x_2=second)
        assert order.in_order(row) is ordered


# ---- claims


def test_a_run_counts_once_and_by_its_settings(tmp_path):
    """Repeats in another precision are no further runs, and must agree; one with another flag is
    one. What could not disagree does not count."""
    found, words = [], ("", "--dtype float32", "--seed 1", "--optimizer adamw", "--stop-below 0.5")
    for number, text in enumerate((*words, "--positions rope", "--seed 3 --heads 2")):
        found.append(row_of(tmp_path / str(number), f"--D 1 {text}", x_1=[1, number / 10]))
    kept = rows.once(found)
    assert [row["name"] for row in kept] == ["0", "2", "3", "5", "6"]

    def agrees(row):
        return None if row["flags"].optimizer == "adamw" else row["mse"] < 0.35

    claim = claims.Claim("", "it is low", "heads == 1", "", agrees, "seed", rows=lambda: found)
    counted = [(row["name"], agree) for row, agree in claims.count(claim)]
    assert counted == [("0", False), ("2", True), ("5", False)]  # 4 repeats 0, and is high
    assert claims.fails(claim) == "seed 0: 2 of 2"
    each = claims.count(claim._replace(repeats=True))
    assert [agree for _, agree in each] == [True, True, True, False, False]


def test_a_claim_about_no_run_is_an_error_that_names_it():
    for runs, answer in ("layers == 99", True), ("layers == 1", None):
        claim = claims.Claim("", "it holds", runs, "", lambda row, answer=answer: answer)
        with pytest.raises(LookupError, match="the claim 'it holds'"):
            claims.count(claim)


def test_short_rows_have_the_flags_of_their_runs():
    """Some runs have both a short row and a whole one."""
    short, whole = {}, {}
    for row in rows.all_runs():
        if row["group"] in ("depth_width", "one_layer", "shuffled"):
            found = short if row["group"] == "depth_width" else whole
            found[row["name"]] = row["settings"], row["flags"].seed, row["task"].learned_below
    both = short.keys() & whole.keys()
    assert len(both) > 8 and all(short[name] == whole[name] for name in both)


def test_a_claim_counts_what_the_files_say():
    """The main command, counted from the files without our code."""
    solved, flags = {}, dict(layers=12, heads=1, D=3, targets="all", optimizer="muon", ema=0.98)
    flags |= dict(width=128, positions="appended", steps=1200, qk_std=0.1, weight_decay=0.1)
    for file in (HERE / "results/runs").glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            config = row.get("config", {})
            if config.get("task") == "chain" and flags.items() <= config.items():
                last = row["log"][-1]
                low = last.get("confirmed", last["val"]) < 0.01
                solved[config["seed"]] = solved.get(config["seed"], True) and low
    [claim] = [claim for claim in claims.CLAIMS if claim.text == "The main command ends solved"]
    counted = {row["flags"].seed: agrees for row, agrees in claims.count(claim)}
    assert counted == solved and len(solved) > 20


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


def measured_directions(monkeypatch, tmp_path, model, task):
    """The orders of a model's row of directions.jsonl."""
    flags = train.parse_flags(["--D", str(task.D)])
    monkeypatch.setattr(train, "load", lambda run: (model, task, flags))
    row = dict(name="any", group="directions", folder=tmp_path)
    return directions.measure(row, 64)["orders"]


def test_the_reads_of_a_planted_circuit_are_those_that_are_needed(monkeypatch, tmp_path):
    """Pair 2 reads pair 3, and the query both pairs before it."""
    D, heads, texts = CIRCUITS[3]
    model = Planted(Task(D=D), texts, 4, heads)
    orders = measured_directions(monkeypatch, tmp_path, model, model.task)
    assert orders.keys() == {"321"} and orders["321"]["n"] == 4 * 64
    rises = orders["321"]["without"]
    assert {read for read, rise in rises.items() if rise > 0.5} == {"q -> 1", "q -> 2", "2 -> 3"}
    assert max(rises.values(), key=abs) < 2 and sorted(map(abs, rises.values()))[-4] < 0.05


def test_orders_are_told_apart(monkeypatch, tmp_path):
    """By a model that answers only if the pair of the last step stands before that of the step
    before it, and whose head does nothing."""
    task = tables.Shuffled(D=3)

    def model(x, heads=()):
        dict(heads).get((0, 0), torch.matmul)(torch.eye(task.T).expand(len(x), -1, -1), x)
        said = x.new_zeros(len(x), task.N, 3, 4)
        for b, n in itertools.product(range(len(x)), range(task.N)):
            same, end = (x[b, :, None] == x[b]).all(-1), task.T - task.N
            place, places = end + n, []
            for _ in range(3):  # the other token that shows this symbol is the first of its pair
                place = [i for i in range(0, end, 2) if same[place, i]][0] + 1
                places.append(place)
            said[b, n] = x[b, places] * (places[2] < places[1])
        return said.flatten(2)

    model.heads = [(0, 0)]
    orders = measured_directions(monkeypatch, tmp_path, model, task)
    assert len(orders) == 6 and sum(order["n"] for order in orders.values()) == 4 * 64
    for name, found in orders.items():
        answered = name.index("3") < name.index("2")
        assert found["loss"] == pytest.approx(0 if answered else 1, abs=0.4 * (not answered))
        assert not any(found["without"].values())


def test_runs_without_two_steps_of_pairs_have_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(directions, "FILE", tmp_path / "directions.jsonl")
    monkeypatch.setattr(directions, "measured_runs", list)
    tasks = {"one": "--D 1", "conditional": "--D 3 --task extras.studies.tables:Conditional"}
    for name, flags in tasks.items():
        output_of(train, *TINY, *flags.split(), "--out", tmp_path / name)
    printed = output_of(directions, *(tmp_path / name for name in tasks)).splitlines()
    assert "one step" in printed[0] and "no chains" in printed[1]
    assert not directions.FILE.exists()
