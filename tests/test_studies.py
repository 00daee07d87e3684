"""Studies, over run directories made by hand; test_results.py pins what they print of ours."""

import json

import train
from extras.studies import claims, counts, rows
from extras.studies.places import random5
from extras.studies.tables import Conditional
from tests.common import HERE, output_of

import pytest
import torch


FALLING = dict(x_1=[1, 1, 0, 0, 0], x_2=[1, 1, 1, 0, 0])  # below 0.5 at steps 150 and 250


def write_run(run, flags="", **losses):
    """Write a finished run without weights, whose circuit was not searched; losses: each 100
    steps."""
    run.mkdir(parents=True)
    train.open_run(train.parse_flags(["--device", "cpu", *flags.split(), "--out", str(run)]))
    log = []
    for number, values in enumerate(zip(*losses.values(), strict=True)):
        row = dict(step=100 * number, seconds=1, val=sum(values) / len(values))
        log.append(row | dict(zip(losses, values, strict=True)))
    train.write_file(run / "log.jsonl", log)
    (run / "model.pt").touch()
    return run


def row_of(run, flags="", **losses):
    [row] = rows.load([write_run(run, flags, **losses)])
    return row


def test_a_row_says_what_the_run_directory_says(tmp_path):
    """From a directory and from a file alike; a run replaces the row of the same name, but not that
    of other settings."""
    automatic = train.run_name(train.parse_flags(["--D", "2", "--seed", "7"]))
    run = write_run(tmp_path / automatic, "--D 2 --seed 7", **FALLING)
    other = write_run(tmp_path / "other", "--D 2", **FALLING)
    for _ in range(2):
        assert "2 runs" in output_of(rows, "mine", other, run, "--out", tmp_path / "rows")
    of_file = {row["name"]: row for row in rows.load([tmp_path / "rows/mine.jsonl"])}
    of_folders = {row["name"]: row for row in rows.load([run, other])}
    assert of_file.keys() == of_folders.keys() == {"s7", "other"}
    for name, row in of_folders.items():
        same = row.keys() - {"folder", "group", "flags", "out"}
        assert all(row[key] == of_file[name][key] for key in same)

    # what is added to what the files say
    row = of_file["s7"]
    assert rows.name_of(row) == "mine/s7" and row["known"] == ["x_1", "x_2"] and row["solved"]
    assert row["learned"] == dict(x_1=150, x_2=250) and row["losses"] == dict(x_1=0, x_2=0)

    for count, more in (3, "--width 64"), (4, "--dtype bfloat16"):
        words = f"--D 2 --seed 7 {more}"
        name = train.run_name(train.parse_flags(words.split()))
        run = write_run(tmp_path / name, words, **FALLING)
        for _ in range(2):
            assert f"{count} runs" in output_of(rows, "mine", run, "--out", tmp_path / "rows")

    assert rows.rounded([0.123456789, 3, "1.23456789"]) == [0.12346, 3, "1.23456789"]


# ---- claims


def test_how_many_heads_come_with_each_symbol():
    """Each head has the attention 1 from a step on. No new heads are the induction head, of which
    the second part comes at 150, and the second path of the first."""
    steps, paths = [*range(0, 500, 100)], []
    for head, reader, read, emerged in [
        *((1, "1b", "1a", 100), (1, "2b", "2a", 300), (2, "q", "1b", 200)),
        *((3, "q", "2b", 300), (4, "q", "3b", 400)),
    ]:
        mean = [float(step >= emerged) for step in steps]
        paths.append(dict(layer=0, head=head, reader=reader, read=read, mean=mean))
    emergence = dict(steps=steps, paths=paths)
    row = dict(report=emergence, emergence=emergence, learned=dict(x_1=140, x_2=260, x_3=400))
    assert claims.new_heads(row) == [1, 1]  # at 250, and at 350


def test_which_orders_count(tmp_path):
    """Two symbols between the same evaluations, or one alone, tell no order."""
    late, never = [1, 1, 1, 0, 0], [1] * 5
    for number, (first, second, ordered) in enumerate(
        [(FALLING["x_1"], late, True), (late, FALLING["x_1"], False), (late, late, None)]
        + [(late, never, None), (never, late, None)]
    ):
        row = row_of(tmp_path / str(number), "--D 2 --eval-every 100", x_1=first, x_2=second)
        assert claims.in_order(row, row["flags"]) is ordered


def test_a_run_counts_once_and_by_its_settings(tmp_path):
    """Repeats in another precision are no further runs, and must agree; one with another flag is
    one. What could not disagree does not count."""
    found, losses = [], {"": 0, "--dtype bfloat16": 0.4, "--seed 1": 0.2, "--optimizer adamw": 0.3}
    losses |= {"--stop-below 0.5": 0.1, "--positions rope": 0.5, "--seed 3 --heads 2": 0.6}
    for number, (text, loss) in enumerate(losses.items()):
        found.append(row_of(tmp_path / str(number), f"--D 1 {text}", x_1=[1, loss]))

    @claims.claim("", by="seed", of=lambda: found)
    def low(row, flags):
        """It is low:
        with one head"""
        if flags.heads == 1 and flags.optimizer != "adamw":
            return row["losses"]["x_1"] < 0.35

    claims.CLAIMS.remove(low)
    counted = [(row["name"], row["agrees"]) for row in counts.count(low)]
    assert counted == [("0", False), ("2", True), ("5", False)]  # 1 and 4 repeat 0, and 1 is high
    assert counts.fails(low) == "seed 0: 2 of 2"
    assert counts.which(low) == "with one head; D 1; seed 0-1; positions appended/rope"


def test_a_claim_counts_what_the_files_say():
    """The main command, counted from the files without our code."""
    solved, flags = {}, dict(layers=12, heads=1, D=3, targets="all", optimizer="muon", ema=0.98)
    flags |= dict(width=128, positions="appended", steps=1200, qk_std=0.05, weight_decay=0.1)
    for file in (HERE / "results/runs").glob("*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            config = row.get("config", {})
            is_main = config.get("task") == "chain" and flags.items() <= config.items()
            if is_main and config["seed"] >= claims.FRESH:
                last = row["log"][-1]
                low = last.get("confirmed", last["val"]) < 0.01
                solved[config["seed"]] = solved.get(config["seed"], True) and low
    counted = counts.count(claims.the_main_command_is_solved)
    counted = {row["seed"]: row["agrees"] for row in counted}
    assert counted == solved and len(solved) > 9


# ---- tasks


@pytest.mark.parametrize("task", [Conditional(), random5(N=2, D=2), random5(N=3, D=1)])
def test_each_role_shows_its_symbol(task):
    """And each symbol is one vector, which the answers have too; every place has one token."""
    batch, N = task.draw("training", 50), task.N
    first = batch.symbols[:, -N:]  # (B, N) x_0 of the chain of each query
    shown = batch.symbols.gather(1, batch.places.flatten(1)).view_as(batch.places)
    assert (shown == first[:, :, None] + torch.tensor([*task.roles.values()])).all()
    answers = batch.answers.unflatten(-1, (-1, task.K))  # (B, N, targets, K)
    for inputs, symbols, starts, asked in zip(
        batch.inputs, batch.symbols.tolist(), first.tolist(), answers, strict=True
    ):
        vectors = dict(zip(symbols, inputs, strict=True))
        assert all(map(torch.equal, inputs, (vectors[symbol] for symbol in symbols)))
        for start, of_query in zip(starts, asked, strict=True):
            right = [vectors[start + k] for k in task.targets]
            assert all(map(torch.equal, of_query, right))
    for slot in task.chain_slots:  # the tokens of a slot are neighbours
        numbers = [[*task.roles].index(role) for role in slot]
        assert (batch.places[..., numbers].diff() == 1).all()


def test_pairs_stand_anywhere_in_their_block():
    task = random5(N=2, D=2)
    places = task.draw("training", 500).places
    assert {*places[..., 1].flatten().tolist()} == {*range(9, 17)}  # 1a
    assert {*places[..., 3].flatten().tolist()} == {*range(8)}  # 2a
