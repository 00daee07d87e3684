"""Studies of many runs, over run directories and rows made by hand; their statistics. What they
print of committed runs is pinned by test_results.py."""

import json
import math

import data
import train
from ablate import ANOTHER, MEAN, Path, Reference, find_circuit
from data import held_out
from extras.studies import circuits, claims, late, metrics, order, places, rows
from tests import adversaries
from tests.common import output_of
from tests.planted import paths_from, settings

import pytest
import torch


SMALL = "--layers 2 --heads 2 --width 16 --D 2 --N 3 --dtype float32 --device cpu".split()
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
    assert order.induction_first(row, 0.5) and order.reads_in_order(row, 0.5)
    assert order.new_heads(row, 0.5) == [1]  # x_1 is learned at step 150, x_2 at 250
    assert order.wait_and_fall(row) == (pytest.approx(132.5), pytest.approx(60))


@pytest.mark.parametrize("offset", [0, -2])
def test_a_late_read_is_as_if_the_token_were_not_there(offset):
    flags = train.parse_flags(SMALL)
    torch.manual_seed(0)
    model, batch = train.build(flags), train.sequences(flags, torch.tensor([5]))
    for weights in model.parameters():
        weights.data *= 4  # so that attention matters
    read = "1b -> 1a" + f"{offset or ''}"
    late_heads = late.heads_without(read, flags, batch.positions)
    without, ever = model(batch.inputs, late_heads), model(batch.inputs)
    reader, key = (flags.problem.names.index(name) for name in ("1b", "1a"))
    model.mask[batch.positions[0, :, reader], batch.positions[0, :, key] + offset] = -math.inf
    torch.testing.assert_close(model(batch.inputs), without)
    assert not torch.allclose(ever, without, atol=1e-3)


def test_a_late_read_is_free_from_its_step_on(tmp_path, monkeypatch):
    """In training and in evaluation, of 4 batches at steps 0, 2, 4, 6."""
    words = "--layers 1 --width 8 --D 1 --N 2 --batch 4 --steps 6 --eval-every 2 --device cpu"
    heads_without, seen = late.heads_without, []

    def recorded(read, flags, positions):
        def write(pattern, values):
            seen.append(torch.is_grad_enabled())
            return heads[0, 0](pattern, values)

        heads = heads_without(read, flags, positions)
        return {(0, 0): write}

    monkeypatch.setattr(late, "heads_without", recorded)
    late.run_once(train.parse_flags([*words.split(), "--out", str(tmp_path)]), "1b -> 1a", 4)
    assert seen.count(True) == 4 and seen.count(False) == 2 * 4


# ---- claims


def test_a_run_counts_once_and_by_its_settings(tmp_path):
    """Repeats in another precision are no further runs; one with another flag is."""
    found, words = [], ("", "--dtype float32", "--seed 1", "--optimizer adamw", "--rotary qk")
    for number, text in enumerate(words):
        found.append(row_of(tmp_path / str(number), f"--D 1 {text}", x_1=[1, number / 9]))
    kept = rows.once(found)
    assert [row["name"] for row in kept] == ["0", "2", "3", "4"]
    pairs = claims.by_column([(row["flags"], row["mse"] < 0.3) for row in kept])
    counted = {name: claims.count(pairs[name]) for name in pairs}
    assert counted == dict(AdamW="0 of 1", Muon="2 of 2", RoPE="0 of 1")


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


# ---- circuits


def copying_heads(model, flags):
    errors = circuits.errors(Reference(model, flags))
    return [head for head in errors if errors[head] < 1]


@torch.no_grad()
def test_a_head_that_copies_the_own_symbol_is_told_from_heads_that_cancel():
    """If two that cancel read themselves, it would seem that neither star is needed."""
    model, flags = adversaries.key_that_is_harmless_at_its_mean, settings(1, 2, 2)
    assert copying_heads(model, flags) == [(1, 1)]
    paths, part = circuits.search_copying(model, flags, [(1, 1)], 0.05, count=256)
    assert paths == {*paths_from("0 1b 1a", "1 q 1b")} and part["validated"]
    losses = circuits.replaced(model, flags, [(1, 1)], n=64)
    assert losses["nothing"] < 0.01 and losses["itself"] < 0.01 < 0.5 < losses[ANOTHER]

    model, flags = adversaries.canceller(torch.ones_like), settings(1, 2, 2)
    assert copying_heads(model, flags) == []
    assert find_circuit(model, flags, count=256)["validated"]
    wrong, part = circuits.search_copying(model, flags, [(1, 0), (1, 1)], 0.05, count=256)
    assert part["validated"] and wrong == {*paths_from("0 1b 1a", "1 q 1b")}


@torch.no_grad()
def test_reads_of_the_token_itself_by_hand():
    """A copying head reads the token itself outside of its paths; or the mean of all else."""
    flags = train.parse_flags(SMALL)
    torch.manual_seed(0)
    model, head, path = train.build(flags), (1, 0), Path(1, 0, "q", "1b")
    patched = circuits.Copying(model, flags, held_out("circuits", 3), [head])
    sequence, (q, _, read) = torch.arange(3)[:, None], patched.batch.positions[..., :3].unbind(-1)
    pattern, values = torch.rand(3, 15, 15), torch.randn(3, 15, 8)
    expected = pattern.sum(-1, keepdim=True) * values
    change = values[sequence, read] - values[sequence, q]
    expected[sequence, q] += pattern[sequence, q, read][..., None] * change
    for by in MEAN, ANOTHER:
        written = patched.ablate(head, (path,), by=by)(pattern, values)
        torch.testing.assert_close(written, expected)

    (rest, values_there), there = patched.reference.reads[head], patched.reference.batch.positions
    rest, along = rest.clone(), torch.zeros(3, 15, 15)
    rest[torch.arange(len(there))[:, None], there[..., 0], there[..., 2]] = 0
    along[sequence, q, read] = 1

    def changed(pattern, values):
        return (pattern * along) @ values + (rest @ values_there).mean(0).to(values)

    losses = circuits.without_own_tokens(patched, frozenset([path]), head)
    torch.testing.assert_close(losses, patched.circuit([path], changed={head: changed}))


# ---- places that say nothing


@pytest.mark.parametrize("task, G, N", [("random20", 20, 2), ("fixed20", 20, 2), ("random6", 6, 4)])
def test_pairs_stand_whole_among_distractors(task, G, N):
    """Who equals whom, what is asked, where pairs stand, what stays in place."""
    B, K, end = 1000, 4, 2 * N + G
    batch = data.make_batch(3, torch.arange(B), N, 1, K, task=task)
    again = data.make_batch(3, torch.arange(B - 7, B), N, 1, K, task=task)
    assert torch.equal(again.inputs, batch.inputs[-7:])
    shown, sequence = batch.inputs[..., :K], torch.arange(B)[:, None]
    query, key, value = batch.positions.unbind(-1)  # (B, N)
    assert torch.equal(value, key + 1) and value.max() < end <= query.min()
    assert torch.equal(shown[sequence, query], shown[sequence, key])
    assert torch.equal(batch.targets[sequence, query - end], shown[sequence, value])
    for tokens, numbers in zip(shown.tolist(), batch.symbols.tolist(), strict=True):
        assert len({*map(tuple, tokens)}) == len({*numbers}) == end == len(tokens) - N
    assert torch.equal(batch.inputs[..., K:], batch.inputs[:1, :, K:].expand(B, -1, -1))
    assert abs(shown.mean()) < 0.02
    assert {*key.flatten().tolist()} == ({5, 17} if task == "fixed20" else {*range(end - 1)})
    if task == "random20":  # each place is as likely as any other, but for the ends
        counts = key.flatten().bincount()[1:-1]
        assert counts.min() > 0.6 * counts.float().mean()


def test_losses_are_sorted_by_the_place_of_the_value(tmp_path):
    """Of a model that answers with the token at place 6, whatever is asked."""
    flags = train.parse_flags("--task fixed20 --N 2 --D 1 --device cpu".split())

    def model(inputs):
        return inputs[:, 6:7, :4].expand(-1, 2, -1)

    loss, by_place = places.losses_by_place(model, flags, "random20")
    assert {*by_place} == {*range(1, 24)} and by_place[6] < 1e-3
    elsewhere = min(by_place[place] for place in by_place if place != 6)
    assert elsewhere > 1.7 and 1.7 < loss < 2.1
    _, by_place = places.losses_by_place(model, flags, "fixed20")
    assert {*by_place} == {6, 18} and by_place[6] < 1e-3
