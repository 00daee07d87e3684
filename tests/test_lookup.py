"""A task of your own, with words and cross-entropy, goes through every script."""

import ablate
import analyze
import sweep
import train
from extras.lookup import WORDS, Lookup
from tests.common import output_of

import torch


TASK = ["--task", "extras.lookup:Lookup", "--D", 1, "--device", "cpu"]


def test_answers_are_the_values_of_the_keys():
    batch = Lookup(N=3, D=1).batch(torch.arange(50))
    words = batch.inputs[..., :WORDS].argmax(-1)  # (50, T)
    for tokens, answers in zip(words.tolist(), batch.targets.tolist(), strict=True):
        value_of = dict(zip(tokens[:6:2], tokens[1:6:2], strict=True))
        assert answers == [[value_of[key]] for key in tokens[6:]]


def test_it_is_trained_found_and_drawn(tmp_path):
    words = [*TASK, "--layers", 2, "--width", 64, "--lr", 3e-3, "--out", tmp_path / "run"]
    assert "solved: True" in output_of(train, *words)
    out = output_of(ablate, tmp_path / "run")
    assert "L0H0: 1b -> 1a" in out and "L1H0: q -> 1b" in out and "validated: True" in out
    assert "circuit.png" in output_of(analyze, tmp_path / "run")


def test_it_is_swept(tmp_path):
    words = [*TASK, "--width", 16, "--steps", 2, "--batch", 8, "--seeds", 1, "--layers", 1, 2]
    assert "2 of 2 runs to do" in output_of(sweep, *words, "--out", tmp_path)
    assert [row["layers"] for row in train.read_file(tmp_path / "results.jsonl")] == [1, 2]
