"""Tasks of one's own: with words and cross-entropy, without chains, without roles, and wrong."""

import itertools
from unittest import mock

import ablate
import analyze
import data
import sweep
import train
from data import Slot, Task
from extras.lookup import Lookup
from model import rotary_angles
from tests.common import TINY, assert_refused, output_of

import pytest
import torch


ANGLES = rotary_angles(7, 4)
POSITIONS = torch.cat([ANGLES.cos(), ANGLES.sin()], 1)  # (7, 4) as the model appends them


class Say(Task):
    """Six tokens and one query, which shows the position of the token to say: no chain."""

    def __post_init__(self):
        super().__post_init__()
        self.labels = [*"ABCDEFG"]  # A is the query, B the token to say
        self.slots[:1] = [Slot(1, {"t": 1}, 0), *(Slot(1, {"": number}) for number in range(2, 7))]

    def batch(self, size, rng):
        batch = super().batch(size, rng)
        batch.inputs[:, -1] = POSITIONS[batch.places[:, 0, 1]]
        return batch


class Copy(Task):
    """Without roles: each of the last N tokens is to be said where it stands, and its negative."""

    def __post_init__(self):
        super().__post_init__()
        self.slots = [slot._replace(chain=None) for slot in self.slots]
        self.outputs, self.target_names = 2 * self.K, ["word", "negative"]

    def batch(self, size, rng):
        batch = super().batch(size, rng)
        words = batch.inputs[:, -self.N :]
        return batch._replace(answers=torch.cat([words, -words], -1))


def changed(fields=(), **tensors):
    """A class of tasks with these fields, whose batch has these tensors, f(batch)."""

    class Changed(Task):
        def __post_init__(self):
            super().__post_init__()
            vars(self).update(fields)

        def batch(self, size, rng):
            batch = super().batch(size, rng)
            return batch._replace(**{name: f(batch) for name, f in tensors.items()})

    return Changed


Arrays = changed(inputs=lambda batch: batch.inputs.numpy())
OneHot = changed(inputs=lambda batch: batch.inputs.long())
Fewer = changed(inputs=lambda batch: batch.inputs[:, 1:])
Absent = changed(places=lambda batch: batch.places - 1)
Beyond = changed(places=lambda batch: batch.places + 1)
Roles = changed(places=lambda batch: batch.places[..., :1])
NotAsked = changed(answers=lambda batch: batch.answers.masked_fill(batch.answers > 2, torch.nan))
NoTargets = changed(dict(targets=()))
OwnKeys = changed(dict(target_names=["key", "val", "x"]))


class Losses(Task):
    def losses(self, predictions, batch):
        return super().losses(predictions, batch).mean(-1)


class Turned(Task):
    """The tokens before the queries are moved on by a pair in every second sequence, so that roles
    stand at two places."""

    def batch(self, size, rng):
        batch, before = super().batch(size, rng), self.T - self.N
        moved = torch.arange(before).roll(2).tolist() + [*range(before, self.T)]
        order = torch.tensor([[*range(self.T)], moved])[torch.arange(size) % 2]  # (B, T)
        places = order.argsort(1).gather(1, batch.places.flatten(1)).view_as(batch.places)
        inputs = batch.inputs.gather(1, order[:, :, None].expand_as(batch.inputs))
        return batch._replace(inputs=inputs, places=places, symbols=batch.symbols.gather(1, order))


def test_sequences_are_resampled_among_those_with_the_roles_at_the_same_places():
    model, task = mock.Mock(side_effect=record_nothing, heads=[]), Turned(D=2)
    clean, corrupted = task.draw("circuits", 200), task.draw("corrupted", 9)
    patched = ablate.PatchedModel(model, task, clean, corrupted)
    assert patched.resampled.remainder(2).tolist() == [0, 1] * 100
    assert len({*patched.resampled.tolist()}) == 9 and not patched.unmatched.any()
    one = data.Batch(*(x[:1] for x in corrupted))
    patched = ablate.PatchedModel(model, task, clean, one)
    assert patched.unmatched[:, 0].tolist() == [False, True] * 100 and not patched.resampled.any()


def record_nothing(inputs, heads):
    assert not heads


def test_a_decoy_is_another_chain_where_the_query_stands():
    task = Task(N=3, D=2)
    batch, names = task.draw("validation", 9), [*task.roles]
    decoy = task.decoy(batch)
    for b, n in itertools.product(range(9), range(3)):
        other = (n - 1) % 3
        assert decoy.places[b, n, 0] == batch.places[b, n, 0]
        assert torch.equal(decoy.places[b, n, 1:], batch.places[b, other, 1:])
        shown = [batch.inputs[b, decoy.places[b, n, names.index(role)]] for role in ("1b", "2b")]
        assert torch.equal(torch.cat(shown), decoy.answers[b, n])
    assert Task(N=1).decoy(batch) is None


def test_answers_are_the_values_of_the_keys():
    batch = Lookup(N=3, D=1).draw("training", 50)
    words = batch.inputs.argmax(-1)  # (50, T)
    for tokens, answers in zip(words.tolist(), batch.answers.tolist(), strict=True):
        value_of = dict(zip(tokens[:6:2], tokens[1:6:2], strict=True))
        assert answers == [[value_of[key]] for key in tokens[6:]]


def test_a_lookup_is_trained_found_and_drawn(tmp_path):
    words = "--task extras.lookup:Lookup --D 1 --layers 2 --width 64 --lr 3e-3 --device cpu"
    assert "solved: True" in output_of(train, *words.split(), "--out", tmp_path / "run")
    out = output_of(ablate, tmp_path / "run")
    assert "L0H0: 1b -> 1a" in out and "L1H0: q -> 1b" in out and "validated: True" in out
    assert "circuit.png" in output_of(analyze, tmp_path / "run")


def test_one_query_that_is_no_chain_gets_its_circuit(tmp_path):
    task = Say(N=1, D=1)
    batch = task.draw("training", 20)
    for tokens, answer in zip(batch.inputs, batch.answers, strict=True):
        said = tokens[:6][(POSITIONS[:6] == tokens[6]).all(1)]
        assert torch.equal(said, answer)
    words = "--N 1 --D 1 --layers 1 --width 64 --lr 3e-3 --steps 1500 --stop-below 0.02".split()
    words = ["--task", "tests.test_tasks:Say", *words, "--device", "cpu"]
    assert "solved: True" in output_of(train, *words, "--out", tmp_path / "run")
    out = output_of(ablate, tmp_path / "run")
    assert "L0H0: q -> t" in out and "validated under both ablations" in out
    assert "circuit.png" in output_of(analyze, tmp_path / "run")


def test_a_task_without_roles_has_no_circuit_but_curves_and_maps_by_number(tmp_path):
    run = tmp_path / "run"
    output_of(train, *TINY, "--task", "tests.test_tasks:Copy", "--out", run)
    assert "verdict: not searched: the task has no roles" in output_of(ablate, run)
    out = output_of(analyze, run)
    assert "curves.png" in out and "attention_maps.png" in out and "there is no circuit" in out
    model, _, flags = train.load(run)
    axes = analyze.draw_attention_maps(model, flags, []).axes
    assert [label.get_text() for label in axes[0].get_xticklabels()] == [*"012345"]
    [legend] = analyze.draw_curves(flags, train.read_log(run)).legends
    assert {"word", "negative"} <= {text.get_text() for text in legend.texts}


@pytest.mark.parametrize(
    "words, says",
    [
        ("--task nowhere:Nothing", "No module named 'nowhere'"),
        ("--task extras.lookup:Nothing", "no attribute 'Nothing'"),
        ("--task extras.lookup", "extras.lookup"),
        ("--task extras.lookup:Lookup --D 9", "more than 32 words"),
        ("--task extras.studies.tables:Conditional --D 2", "leave --D out"),
        ("--task tests.test_tasks:Arrays", "must have tensors"),
        ("--task tests.test_tasks:OneHot", "inputs of the type float32"),
        ("--task tests.test_tasks:Absent", "place of the task is not among 0 to 27"),
        ("--task tests.test_tasks:Beyond", "place of the task is not among 0 to 27"),
        ("--task tests.test_tasks:NotAsked", "let one that is not asked be 0"),
        ("--task tests.test_tasks:NoTargets", "must have the role q and targets"),
        ("--task tests.test_tasks:OwnKeys", "must not name a target val"),
        ("--task tests.test_tasks:Fewer", "have [(64, 27, 4), "),
        ("--task tests.test_tasks:Roles", "have [(64, 28, 4), (64, 4, 1), "),
        ("--task tests.test_tasks:Losses", "have [(64, 28, 4), (64, 4, 7), (64, 4)]"),
    ],
)
def test_a_task_that_there_is_not_gets_one_line(tmp_path, words, says):
    words = words.split()
    assert_refused(train, *words, "--out", tmp_path / "run", says=says)
    assert_refused(sweep, *words, "--layers", 1, "--out", tmp_path / "sweep", says=says)
    if "tests." not in words[1]:
        assert_refused(data, *words, says=says)
    assert [*tmp_path.iterdir()] == []
