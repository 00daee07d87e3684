"""Tasks of one's own: with words and cross-entropy, with one query that is no chain, and wrong."""

import ablate
import analyze
import data
import train
from data import Task
from extras.lookup import Lookup
from model import rotary_angles
from test_all import follow
from tests.common import assert_refused, output_of

import torch


ANGLES = rotary_angles(7, 4)
POSITIONS = torch.cat([ANGLES.cos(), ANGLES.sin()], 1)  # (7, 4) as the model appends them


class Say(Task):
    """Six tokens and one query, which shows the position of the token to say: no chain."""

    def __post_init__(self):
        super().__post_init__()
        self.labels, self.T = [*"ABCDEFG"], 7  # the query is G
        self.roles, self.chain_slots = dict(q=0, t=1), [["t"], ["q"]]

    def batch(self, size, rng):
        inputs = torch.from_numpy(rng.standard_normal((size, 7, 4), dtype="float32"))
        row, said = torch.arange(size), torch.from_numpy(rng.integers(6, size=size))
        inputs[:, 6] = POSITIONS[said]
        places = torch.stack([0 * said + 6, said], 1)[:, None]  # (B, 1, 2)
        return data.Batch(inputs, inputs[row, said][:, None], places, torch.arange(7).tile(size, 1))


def changed(**tensors):
    """A class of tasks whose batch has these tensors, f(batch)."""

    class Changed(Task):
        def batch(self, size, rng):
            batch = super().batch(size, rng)
            return batch._replace(**{name: f(batch) for name, f in tensors.items()})

    return Changed


OneHot = changed(inputs=lambda batch: batch.inputs.long())
Absent = changed(places=lambda batch: batch.places - 1)
Beyond = changed(places=lambda batch: batch.places + 1)
Roles = changed(places=lambda batch: batch.places[..., :1])
NotAsked = changed(answers=lambda batch: batch.answers.masked_fill(batch.answers > 2, torch.nan))


class Losses(Task):
    def losses(self, predictions, batch):
        return super().losses(predictions, batch).mean(-1)


def test_answers_are_the_values_of_the_keys():
    batch = Lookup(N=3, D=1).draw("training", 50)
    for tokens, answers in zip(batch.inputs, batch.answers, strict=True):
        assert torch.equal(follow(tokens, 3, 1).argmax(-1), answers[:, 0])


def test_a_task_of_ones_own_is_trained_found_and_drawn(tmp_path):
    words = "--task tests.test_tasks:Say --D 1 --N 1 --layers 1 --width 64 --device cpu --lr 3e-3"
    words = f"{words} --steps 1500 --stop-below 0.02".split()
    assert "solved: True" in output_of(train, *words, "--out", tmp_path)
    assert "validated: True" in output_of(ablate, tmp_path)
    assert "L0H0: q reads t" in map(str, ablate.paths_in(ablate.read_report(tmp_path)))
    assert "circuit.png" in output_of(analyze, tmp_path)


def test_a_wrong_task_gets_one_line(tmp_path):
    ours = "OneHot Absent Beyond Roles NotAsked Losses".split()
    for task in [*(f"tests.test_tasks:{name}" for name in ours), "builtins:print"]:
        assert_refused(train, "--task", task, "--out", tmp_path / "run", says=f"{task}: ")
    assert [*tmp_path.iterdir()] == []  # before any file is written
