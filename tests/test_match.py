"""What a read matches: heads that were set by hand, and their scores by what they attend to."""

import analyze
from ablate import Path, record_reads
from data import Task
from model import Transformer
from tests.common import random_model

import pytest
import torch
import torch.nn.functional as F


def planted(task, match):
    """A transformer of two layers with one head each. Layer 0 reads the token before, by place. The
    score of layer 1 is `match` x y, of the symbol of a reader and the one before what is read."""
    model, T, inputs = Transformer(task.T, task.N, task.K, task.K, 2, 1, 4, task.T), task.T, {}
    model.register_forward_pre_hook(lambda module, args: inputs.update(x=args[0]))

    def padded(x):
        return F.pad(x, (0, T - task.K))

    for layer, name, f in (
        (0, "q", lambda x: 1000 * torch.eye(T).roll(1, 0).expand(len(x), -1, -1)),
        (0, "k", lambda x: torch.eye(T).expand(len(x), -1, -1)),
        (1, "q", lambda x: match * T**0.5 * padded(x)),
        (1, "k", lambda x: padded(x).roll(1, 1)),
    ):
        point = getattr(model.blocks[layer], name)
        point.register_forward_hook(lambda module, args, output, f=f: f(inputs["x"])[:, None])
    return model


@pytest.mark.parametrize("N, K, match", [(2, 2, 8), (3, 8, 8), (4, 4, -3), (4, 4, 0.2)])
def test_a_planted_head_matches_the_symbols_that_it_compares(N, K, match):
    """Or avoids, with a negative c; 0.2 x x is 0.8 nats, too little."""
    task = Task(N=N, D=2, K=K)
    model = planted(task, match)
    by_place = [Path(0, 0, f"{k}b", f"{k}a") for k in (1, 2)]
    by_symbol = {Path(1, 0, "q", "1b"): ("q", "1a"), Path(1, 0, "1b", "2b"): ("1b", "2a")}
    matches = analyze.measure_matches(model, task, [*by_place, *by_symbol])
    for path in [*by_place, *by_symbol]:
        (M, score, letters), compared = matches[path], {}
        expected = torch.zeros(5, 5, K, K)  # of the roles q, 1a, 1b, 2a, 2b
        if path in by_symbol:
            u, v = ([*task.roles].index(role) for role in by_symbol[path])
            expected[u, v] = match * torch.eye(K)
            compared = {u // 2: pytest.approx(match, rel=1e-3)}  # q shows x_0, 1b shows x_1
            assert score == pytest.approx(match * K, rel=0.4)  # x x is K on average, x y is 0
        else:
            assert score > 100
        torch.testing.assert_close(M, expected, atol=1e-3, rtol=1e-3)
        assert letters == (compared if abs(match) > 1 else {})
    assert all(len(block.q._forward_hooks) == 1 for block in model.blocks)  # ours alone


@pytest.mark.parametrize(
    "words", ["--D 1 --N 2 --task extras.lookup:Lookup", "--D 1 --N 3 --positions rope"]
)
def test_scores_are_logarithms_of_attention(words):
    """That to the own chain over that to the next one, where no mask hides it."""
    model, task, _ = random_model("--no-causal", *words.split())
    paths = [Path(0, 0, "1b", "1a"), Path(1, 1, "q", "1b"), Path(1, 0, "1b", "1a")]
    matches, batch = analyze.measure_matches(model, task, paths, n=5), task.draw("circuits", 5)
    reads, sequence = record_reads(model, batch.inputs), torch.arange(5)
    for path in paths:
        own, other = (batch.places[sequence, (sequence + i) % task.N].T for i in (0, 1))
        reader, read = ([*task.roles].index(end) for end in path[2:])
        pattern = reads[path[:2]][0].log()
        score = pattern[sequence, own[reader], own[read]]
        score = score - pattern[sequence, own[reader], other[read]]
        assert matches[path][1] == pytest.approx(score.mean().item(), rel=1e-3, abs=1e-4)


def test_what_cannot_be_measured_is_left_out_or_an_error():
    model, task, _ = random_model()
    path = Path(0, 0, "1b", "1a")
    starred = [Path(0, 0, "1b+1", "1b"), Path(1, 0, "q", "1b+1"), Path(1, 0, "q", "1b*")]
    assert [*analyze.measure_matches(model, task, [*starred, path])] == [path]
    model.blocks[0].qkv.weight.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        analyze.measure_matches(model, task, [path])
