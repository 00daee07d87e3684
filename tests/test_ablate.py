"""Paths, ablation and the search, against loops; the report on planted circuits."""

import functools
import itertools
import math
import random
from unittest import mock

import ablate
import data
from ablate import BOTH, RESAMPLE, PatchedModel, Path
from tests.common import random_model
from tests.planted import CIRCUITS, Planted, paths_from

import pytest
import torch


def tokens_of(token, task, places):
    """[the place of this token of chain n, or None if it is beyond the end, for each n] of the
    places (N, roles) of a sequence."""
    role, _, after = token.partition("+")
    number = [*task.roles].index(role)
    found = [places[n, number].item() + int(after or 0) for n in range(task.N)]
    return [place if place < task.T else None for place in found]


def edges_of(path, task, places):
    """[(reader, read), ...] the tokens of a path in a sequence, by loops."""
    readers, read = (tokens_of(token.rstrip("*"), task, places) for token in path[2:])
    pairs = itertools.product(enumerate(readers), enumerate(read))
    pairs = [(i, j) for (n, i), (m, j) in pairs if n == m or path.read[-1] == "*"]
    return [pair for pair in pairs if None not in pair]


def attention_by_loops(pattern, path, task, places):
    """The mean attention of the readers that are there, without that to themselves."""
    given, readers = 0.0, set()
    for b in range(len(places)):
        for i, j in edges_of(path, task, places[b]):
            if i != j:
                given, readers = given + pattern[b, i, j].item(), {*readers, (b, i)}
    return given / len(readers) if readers else math.nan


@pytest.fixture(scope="module")
def patched():
    """A transformer with random weights, on 6 sequences."""
    model, task, _ = random_model("--D", "2", "--N", "3")
    return PatchedModel(model, task, task.draw("validation", 6))


@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("keep", [True, False])
def test_ablation_against_loops(patched, by, keep):
    """All but the paths and what a token reads of itself is replaced, or the paths alone are.
    Gradients flow through."""
    task, T = patched.task, patched.task.T
    circuit = paths_from("0.1 q 1b+1", "0.1 1b 1a", "0 2b 2a*", "1 q 2b")

    kept = {}  # {(head, batch): [{(i, j)} the edges that are not replaced, for each sequence]}
    for head, name in itertools.product(patched.model.heads, ("clean", "corrupted")):
        kept[head, name], every = [], {*itertools.product(range(T), repeat=2)}
        own = [path for path in circuit if path[:2] == head]
        for places in getattr(patched, name).places:
            edges = {edge for path in own for edge in edges_of(path, task, places)}
            kept[head, name].append(edges if keep else every - edges)

    def write(head, pattern, values):
        there, brought = patched.corrupted_reads[head]
        z, instead = torch.zeros_like(values), torch.zeros_like(values)
        here, elsewhere = kept[head, "clean"], kept[head, "corrupted"]
        for b, i in itertools.product(range(6), range(T)):
            for j in {*range(T)} - {i}:
                if (i, j) not in elsewhere[b]:
                    instead[b, i] += there[b, i, j] * brought[b, j]
                if (i, j) in here[b]:
                    z[b, i] += pattern[b, i, j] * values[b, j]
            keeps = any((i, j) in here[b] for j in range(T))
            weight = there[b, i, i] if by == RESAMPLE else there[:, i, i].mean()
            z[b, i] += (pattern[b, i, i] if keeps else weight) * values[b, i]
        return z + (instead if by == RESAMPLE else instead.mean(0))

    heads = {head: functools.partial(write, head) for head in patched.model.heads}
    losses = (patched.keep_only if keep else patched.knock_out)(circuit, by)
    torch.testing.assert_close(losses, patched.losses(heads))
    losses.mean().backward()
    assert 0 < patched.model.blocks[0].qkv.weight.grad.norm() < math.inf


def test_an_unknown_ablation_is_refused(patched):
    with pytest.raises(ValueError, match="ablation must be"):
        patched.keep_only(paths_from("0 q 1b"), "zero")


def test_an_answer_is_lost_above_half_of_chance_if_the_full_model_has_it(patched, monkeypatch):
    """With N=3 above 1/3; a score of 1 is at a mean of 0.05, or where 1% are lost."""
    full = torch.tensor([[[0.1, 0.1], [0.4, 0.1], [0.1, 0.1]]])  # (B=1, N=3, symbols=2)
    losses = torch.tensor([[[0.3, 0.1], [0.9, 0.9], [0.3, 0.1]]])
    monkeypatch.setattr(patched, "full", full)
    _, shares, score = ablate.measure(patched, losses)
    assert shares == pytest.approx(dict(x_1=0, x_2=1 / 3), abs=1e-5)
    assert score == pytest.approx(100 / 3, abs=0.01)
    assert ablate.measure(patched, 0 * losses + 0.06)[-1] == pytest.approx(1.2)
    no_number = torch.tensor([1, torch.nan])  # on the last symbol alone
    assert not ablate.measure(patched, 0 * losses + no_number)[-1] < 1


def test_candidates_are_all_paths_with_enough_attention():
    """By the surplus over other chains; a star by all. Stars come last, the most attended first."""
    task, expected = data.Task(N=3, D=2), {}
    batch, size = task.draw("validation", 6), 6 * task.T * task.T
    torch.manual_seed(0)
    pattern = torch.linspace(0, 9, size)[torch.randperm(size)].view(6, task.T, -1).softmax(-1)
    pattern[:, -3:, 1::2] += 0.2  # the queries read all 1b and all 2b alike
    reads = {(0, 0): (pattern, None)}
    found = ablate.candidates(mock.Mock(corrupted_reads=reads, corrupted=batch, task=task))
    for reader, read in itertools.product(task.roles, repeat=2):
        path, star = (Path(0, 0, reader, end) for end in (read, f"{read}*"))
        own = attention_by_loops(pattern, path, task, batch.places)
        to_all = attention_by_loops(pattern, star, task, batch.places)
        expected |= {path: own - (to_all - own) / 2, star: to_all}
    enough = [path for path in expected if expected[path] >= 0.1 / 3]
    order = sorted(enough, key=lambda path: ("*" in path.read, -expected[path]))
    assert [path for path in found if "+" not in str(path)] == order
    kinds = [("*" in path.read, "+" in str(path)) for path in found]
    assert kinds == sorted(kinds)


def test_a_token_that_has_no_role_must_have_read_and_be_read():
    """In layers before and after; a role holds its own symbol, and is asked or read anyway."""
    none, ends = paths_from("0 q 1b+1", "2 2b+1 2b"), paths_from("0 1b+1 1b", "2 q 1b+1", "1 q 1b")
    assert ablate.connected([*none, *ends]) == ends


@pytest.mark.parametrize("monotone", [False, True])
def test_no_path_that_is_left_can_go(monotone):
    """Under tests that sets of paths pass at random, so that one may go once others went. If more
    paths never do harm, those that are left are what trying one after the other leaves."""
    ranked, generator = [Path(layer, 0, "q", "1a") for layer in range(6)], random.Random(0)
    every = [frozenset(s) for n in range(7) for s in itertools.combinations(ranked, n)]
    for _ in range(200):
        passes = {frozenset(ranked)} | {s for s in every if generator.random() < 0.1 + len(s) / 20}
        if monotone:
            passes = {s for s in every if any(s >= least for least in passes if len(least) > 2)}
        left = ablate.search(ranked, lambda paths, passes=passes: frozenset(paths) in passes)
        assert {*left} in passes and not any({*left} - {path} in passes for path in left)
        if monotone:
            one_by_one = ranked
            for path in reversed(ranked):
                fewer = [other for other in one_by_one if other != path]
                one_by_one = fewer if {*fewer} in passes else one_by_one
            assert left == one_by_one


@pytest.mark.parametrize("D, heads, texts", CIRCUITS)
def test_planted_circuits_are_validated(D, heads, texts):
    """Without a path is lost what the model planted without it cannot predict."""
    layers, task = 1 + max(int(text[0]) for text in texts), data.Task(D=D)
    paths = paths_from(*texts)
    model, batch = Planted(task, texts, layers, heads), task.draw("validation", 64)
    report = ablate.find_circuit(model, task, count=256)
    assert report["verdict"] == "validated under both ablations"
    rows, fresh = ablate.paths_in(report), PatchedModel(model, task, task.draw("circuits", 256))
    assert sorted(rows) == sorted(paths)
    assert report["mean"] == ablate.symbol_means(fresh.keep_only(paths), task)
    for path, text in zip(paths, texts, strict=True):
        others = [other for other in texts if other != text]
        predictions = Planted(task, others, layers, heads)(batch.inputs)
        lost = task.losses(predictions, batch).mean((0, 1)) > 0.5
        full = torch.tensor([rise > 0.3 for rise in rows[path]["cost"].values()])
        circuit = torch.tensor([loss > 0.3 for loss in rows[path]["without"].values()])
        assert torch.equal(full, lost) and (circuit >= lost).all()
        predicted = {k for k, gone in enumerate(lost, 1) if not gone}
        _, holds = ablate.arrivals({*paths} - {path}, task)[-1]
        assert predicted <= holds["q"]
        assert rows[path]["attention"] == pytest.approx(1)
