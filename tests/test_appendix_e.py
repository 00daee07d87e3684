"""The paper's own test: its losses against loops, and its search against all subsets."""

import itertools

import test_all
import train
from data import Task
from extras import appendix_e
from extras.appendix_e import OneHotModel, papers_test, possible_reads, simplest
from tests.common import TINY, assert_refused, output_of

import pytest
import torch


def mean_loss(model, task, batch, paths, others):
    """The mean loss under one-hot attention, by loops."""
    heads, T = {}, task.T
    for head, other in others.items():
        pattern = torch.zeros(len(batch.inputs), T, T)
        for b, t in itertools.product(range(len(pattern)), range(T)):
            if other == "uniform":
                pattern[b, t, : t + 1] = 1 / (t + 1)
            elif other == "identity":
                pattern[b, t, t] = 1
            for n, path in itertools.product(range(task.N), paths):
                place = dict(zip(task.roles, batch.places[b, n].tolist(), strict=True))
                if path[:2] == head and place[path.reader] == t:
                    pattern[b, t] = 0
                    pattern[b, t, place[path.read]] = 1
        heads[head] = lambda _, values, pattern=pattern: pattern @ values
    return task.losses(model(batch.inputs, heads), batch).mean().item()


class Toy:
    """A model of two chains of two steps, which finds its tokens by comparing symbols. Each of its
    heads has one read, with 0.9 of the attention. The query hears of x_1 from 1b, and of x_2 by
    `ahead` through 1b, which reads 2b, by `direct` in layer 1 and by `late` in layer 2 from 2b."""

    task = Task(N=2, D=2)
    heads = [(0, 0), (1, 0), (1, 1), (2, 0)]

    def __init__(self, ahead, direct, late):
        self.ahead, self.direct, self.late = ahead, direct, late

    def __call__(self, x, heads=None):
        same, sequence = (x[:, :, None] == x[:, None]).all(-1), torch.arange(len(x))[:, None]
        q = torch.tensor([[8, 9]]).expand(len(x), 2)
        first = 5 + 2 * same[:, 8:, 4:8:2].int().argmax(-1)  # 1b of each query
        second = 1 + 2 * same[sequence, first, :4:2].int().argmax(-1)  # 2b

        def read(head, reader, token):
            """(B, T, 8): what each token reads of what the tokens show and hold."""
            pattern = torch.eye(10).repeat(len(x), 1, 1)
            pattern[sequence, reader] *= 0.1
            pattern[sequence, reader, token] = 0.9
            return (heads or {}).get(head, torch.matmul)(pattern, torch.cat([x, held], -1))

        held = 0 * x
        held = read((0, 0), first, second)[..., :4]
        x_1, x_2 = read((1, 0), q, first)[:, -2:].chunk(2, -1)
        x_2 = self.ahead * x_2 + self.direct * read((1, 1), q, second)[:, -2:, :4]
        x_2 = x_2 + self.late * read((2, 0), q, second)[:, -2:, :4]
        return torch.cat([x_1, x_2], -1)


@pytest.mark.parametrize(
    "ahead, direct, late",
    [(1, 0, 0), (0, 0.9, 0.1), (0.1, 0.1, 0.9), (0, 0.5, 0.5), (0.34, 0.33, 0.33)],
)
def test_the_search_finds_the_smallest_of_all_mechanisms(ahead, direct, late):
    """All subsets of the reads, with all choices for the other tokens of every head."""
    model = Toy(ahead, direct, late)
    hard = OneHotModel(model, model.task, model.task.draw("search", 16))
    possible = possible_reads(hard)
    assert [path[:2] for path in sorted(possible)] == model.heads

    ways, losses = [], {}
    for path in possible:  # of each head: without its path, or with it
        ways.append([([], other) for other in appendix_e.OTHERS[:2]])
        ways[-1] += [([path], other) for other in appendix_e.OTHERS]
    for chosen in itertools.product(*ways):
        kept = frozenset(itertools.chain(*(paths for paths, _ in chosen)))
        others = {path[:2]: other for path, (_, other) in zip(possible, chosen, strict=True)}
        losses[kept] = min(hard.loss(kept, others), losses.get(kept, 1))
    fewest = min(len(kept) for kept, loss in losses.items() if loss < 0.045)
    paths, others = simplest(hard, possible)
    assert len(paths) == fewest and hard.loss(paths, others) == losses[frozenset(paths)] < 0.045


@pytest.mark.parametrize("allowed", [appendix_e.OTHERS, ("nothing",)])
def test_a_report_is_what_loops_find_and_can_be_printed(allowed):
    model = Toy(1, 0, 0)
    task, row = model.task, papers_test(model, model.task, allowed, count=8)
    batch, paths = task.draw("circuits", 8), [appendix_e.Path(*path) for path in row["paths"]]
    others = {(int(head[1]), int(head[3])): other for head, other in row["others"].items()}
    assert {others[path[:2]] for path in paths} <= {*allowed}
    expected = [mean_loss(model, task, batch, paths, others)]
    expected.append(mean_loss(model, task, batch, paths[1:], others | {(0, 0): "uniform"}))
    for path in paths:
        left = [kept for kept in paths if kept != path]
        has_more = any(kept[:2] == path[:2] for kept in left)
        choice = allowed if has_more else appendix_e.OTHERS[:2]  # uniform, identity
        ways = [others | {path[:2]: other} for other in choice]
        expected.append(min(mean_loss(model, task, batch, left, way) for way in ways))
    found = [row["held"], row["first_uniform"], *row["removed"]]
    assert found == pytest.approx(expected, abs=1e-5)
    cells = appendix_e.table([dict(run="toy", **row)]).splitlines()[-1].strip("| ").split(" | ")
    losses = [f"{loss:.3f}" for loss in (*found[:2], row["removed"][1])]
    assert cells[1:6] == ["2 of 4", "2", *losses]


def test_a_read_that_finds_a_place_is_not_needed():
    """The query of the planted model finds 1b because 1b has read 1a. A one-hot map is told where
    1b is, so q reads 1b alone answers, but not in the tests of ablate.py."""
    row = papers_test(test_all.planted, Task(N=4, D=1), count=64)
    assert row["possible"] == [(0, 0, "1b", "1a"), (1, 0, "q", "1b")]
    assert row["paths"] == [(1, 0, "q", "1b")]
    assert row["held"] < 1e-4 and row["holds"] and row["first_uniform"] > 0.5
    assert min(row["mean"]["x_1"], row["resample"]["x_1"]) > 0.5


def sums_up(x, heads=None):
    """A model of one head that answers, but gives each token 1b a quarter of the attention or none:
    the query adds up what it reads of its own, which no one-hot attention does."""
    same = (x[:, 8:, None] == x[:, None, :8:2]).all(-1)  # (B, 4, 4)
    pattern = torch.eye(12).repeat(len(x), 1, 1)
    pattern[:, 8:, 1:8:2] = same / 4
    values = 4 * x * (torch.arange(12) % 2 * (torch.arange(12) < 8))[:, None]
    return (heads or {}).get((0, 0), torch.matmul)(pattern, values)[:, 8:]


def looks_nowhere(x, heads=None):
    """A model of one head that reads all tokens alike."""
    pattern = torch.full((len(x), 12, 12), 1 / 12)
    return (heads or {}).get((0, 0), torch.matmul)(pattern, x)[:, 8:]


sums_up.heads = looks_nowhere.heads = [(0, 0)]


def test_the_command_adds_rows_to_a_file(tmp_path, monkeypatch):
    """Of a model that holds, and of one that needs soft attention."""
    task, out = Task(N=4, D=1), tmp_path / "rows"
    batch = task.draw("validation", 64)
    assert task.losses(sums_up(batch.inputs), batch).mean() < 1e-4
    for name, model in ("one", test_all.planted), ("two", sums_up):
        output_of(train, *TINY, "--out", tmp_path / name)
        monkeypatch.setattr(
            train, "load", lambda run, model=model: (model, task, train.read_flags(run))
        )
        said = output_of(appendix_e, tmp_path / name, "--out", out)
    lines = [line for line in said.splitlines() if line.startswith(("| one |", "| two |"))]
    assert ["not held" in line for line in lines] == [False, True]
    one, two = train.read_file(out / "appendix_e.jsonl")
    assert one["holds"] and not two["holds"] and two["held"] > 0.5
    assert (out / "figure5.png").exists()
    monkeypatch.setattr(train, "load", lambda run: (looks_nowhere, task, train.read_flags(run)))
    assert_refused(appendix_e, tmp_path / "one", "--out", out, says="no head attends from one role")
