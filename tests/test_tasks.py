"""Tasks that a researcher adds as tables of roles: distractors, and what cannot be."""

from parts import theory
from parts.circuit import paths_in

import pytest
import torch

import ablate
import analyze
import data
import train
from pages import explore
from tests.common import TINY, assert_refused, run_main, solve
from tests.other_tasks import write_circuit
from tests.planted import Planted, following, paths_from


def distracted(N, D):
    """A chain of two steps, between its pairs a block of pairs that are nobody's."""
    roles = [("q", 0, 3, 0), ("1a", 0, 2, 0), ("1b", 1, 2, 1), ("2a", 1, 0, 0), ("2b", 2, 0, 1)]
    roles += [("da", -1, 1, 0), ("db", -1, 1, 1)]
    return data.Task("distracted", N, tuple(data.Role(*role) for role in roles))


@pytest.fixture
def with_distracted(monkeypatch):
    monkeypatch.setitem(data.TASKS, "distracted", distracted)


def test_distractors_are_nobodys_wherever_they_are_named(tmp_path, with_distracted):
    task, N = distracted(4, 3), 4
    batch = data.make_batch(0, torch.arange(20), task="distracted")
    assert batch.inputs.shape == (20, 28, 8) and batch.targets.shape == (20, N, 8)
    for inputs, targets, positions in zip(*batch, strict=True):
        shown = [tuple(numbers) for numbers in inputs[:, :4].tolist()]
        nobodys = shown[8:16]
        assert torch.equal(solve(inputs, N, 2, 4), targets)
        assert len({*nobodys}) == 8 and not {*nobodys} & {*shown[:8], *shown[16:]}
        names = data.token_names(task, inputs[:, :4], positions)
        assert len({*zip(names, shown, strict=True)}) == len({*names}) == len({*shown})
        assert sorted(names[8:16]) == sorted(f"d{x}.{n}" for x in "ab" for n in range(1, 5))
    assert [loss for loss, _ in task.plateaus] == [1, 0.75]

    # trained a little, then drawn
    few = [*TINY, "--task", "distracted", "--D", 3, "--N", 4, "--out", tmp_path / "run"]
    code, out, err = run_main(train, *few)
    assert code == 0 and "x_2: " in out and "x_3" not in out, err
    write_circuit(tmp_path / "run", (1, 1, "1b", "1a", 0.9), (2, 1, "q", "da", 0.9))
    for program, more in (analyze, []), (explore, ["--out", tmp_path / "explorer.html"]):
        code, out, err = run_main(program, tmp_path / "run", *more)
        assert code == 0, out + err


def test_a_planted_circuit_is_found_among_distractors(with_distracted, capsys):
    task, texts = distracted(4, 3), ["1 1b 1a", "1 2b 2a", "2 q 1b", "3 q 2b"]
    paths = paths_from(task, *texts)
    flags = train.parse_flags("--task distracted --layers 4 --device cpu --dtype float32".split())
    model = Planted(task, following(task, paths), 4)
    report = ablate.find_circuit(model, flags, sequences=64)
    assert report["certified"] and sorted(paths_in(report, task)) == sorted(paths)


PAIR = [("q", 0, 1, 0), ("1a", 0, 0, 0), ("1b", 1, 0, 1)]


@pytest.mark.parametrize(
    "roles, says",
    [
        ([*PAIR[:2], ("1a", 1, 0, 1)], "two roles have one name"),
        ([*PAIR, ("1c", 2, 0, 1)], "a place has no role, or two"),
        ([*PAIR[:2], ("1b", 1, 0, 2)], "a place has no role, or two"),
        ([("q", 0, 2, 0), *PAIR[1:]], "a place has no role, or two"),
        ([("q", 0, 0, 0), ("1a", 0, 1, 0), ("1b", 1, 1, 1)], "the last block is not x_0 alone"),
        ([("q", 1, 1, 0), *PAIR[1:]], "the last block is not x_0 alone"),
        ([*PAIR[1:], PAIR[0]], "the last block is not x_0 alone"),
        ([*PAIR, ("1c", 2, 1, 1)], "the last block is not x_0 alone"),
        ([("q", 0, 1, 1), *PAIR[1:], ("1c", 2, 1, 0)], "the last block is not x_0 alone"),
        ([("q", 0, 2, 0), *PAIR[1:], ("2a", 2, 1, 0)], "--targets must be among 1, not 1 2"),
        ([*PAIR[:2], ("1b", 2, 0, 1)], "--targets must be among 2, not 1 2"),
    ],
)
def test_a_table_of_roles_that_cannot_be_gets_one_line(roles, says, with_distracted, monkeypatch):
    def broken(N, D):
        return data.Task("broken", N, tuple(data.Role(*role) for role in roles))

    monkeypatch.setitem(data.TASKS, "distracted", broken)
    assert_refused(train, "--task", "distracted", says=says)
    with pytest.raises(ValueError, match="one block of triples"):
        data.Task("crossed", 4, distracted(4, 3).roles, crossed=(0,))


def test_a_task_that_ignores_D_is_loud(with_distracted):
    says = "--task distracted is the same for every --D: leave out --D 2"
    assert_refused(train, "--task", "distracted", "--D", 2, says=says)


def test_symbols_that_nothing_leads_to_are_never_asked_for(monkeypatch, with_distracted):
    """In a chain whose second step begins with a symbol of its own."""
    roles = [("q", 0, 2, 0), ("1a", 0, 1, 0), ("1b", 1, 1, 1), ("2a", 2, 0, 0), ("2b", 3, 0, 1)]
    lost = tuple(data.Role(*role) for role in roles)
    monkeypatch.setitem(data.TASKS, "distracted", lambda N, D: data.Task("lost", N, lost))
    assert train.parse_flags("--task distracted --targets 1".split()).asked == [1]
    assert_refused(train, "--task", "distracted", says="--targets must be among 1, not 1 2 3")
    assert_refused(theory, "--task", "distracted", says="the query can never hold some symbol")
