"""What a read matches: heads that were set by hand, and derivatives by autograd."""

import itertools

import analyze
from ablate import Path
from data import Task
from model import Transformer
from tests.common import random_model

import pytest
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure


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


def pairs_of(M, task, smallest=1e-3):
    """{(u, v): c} of the pairs of roles whose M is not 0; it must be c I."""
    found = {}
    for (i, u), (j, v) in itertools.product(enumerate(task.roles), repeat=2):
        if M[i, j].abs().max() > smallest:
            found[u, v] = M[i, j].diagonal().mean().item()
            expected = found[u, v] * torch.eye(task.K)
            torch.testing.assert_close(M[i, j], expected, atol=smallest, rtol=0)
    return found


@pytest.mark.parametrize("N, K, match", [(2, 2, 8), (3, 8, 8), (4, 4, -3), (4, 4, 0.2)])
def test_a_planted_head_matches_the_symbols_that_it_compares(N, K, match):
    """Or avoids, with a negative c; 0.2 x x is 0.8 nats, too little."""
    task = Task(N=N, D=2, K=K)
    model = planted(task, match)
    by_place = [Path(0, 0, f"{k}b", f"{k}a") for k in (1, 2)]
    one = {Path(1, 0, "q", "1b"): ("q", "1a"), Path(1, 0, "1b", "2b"): ("1b", "2a")}
    matches = analyze.measure_matches(model, task, [*by_place, *one])
    for path in by_place:
        M, score, letters = matches[path]
        assert pairs_of(M, task) == {} == letters and score > 100
    for path, pair in one.items():
        M, score, letters = matches[path]
        c = pytest.approx(match, rel=1e-3)
        assert pairs_of(M, task) == {pair: c}
        assert letters == ({} if match == 0.2 else {task.roles[pair[0]]: c})
        assert score == pytest.approx(match * K, rel=0.4)  # x x is K on average, x y is 0
    assert all(len(block.q._forward_hooks) == 1 for block in model.blocks)  # ours alone


def by_autograd(model, task, path, n):
    """M of a path: the score as a function of x in the reader and of y in what is read, and its
    second derivative by both."""
    batch = task.draw("circuits", n)
    x, y = batch.inputs.clone().requires_grad_(), batch.inputs.clone().requires_grad_()
    block, kept = model.blocks[path.layer], {}
    block.q.register_forward_hook(lambda module, args, output: kept.update(q=output))
    block.k.register_forward_hook(lambda module, args, output: kept.update(k=output))
    model(x, heads={model.heads[-1]: torch.matmul})
    q = kept["q"][:, path.head]
    model(y, heads={model.heads[-1]: torch.matmul})
    k = kept["k"][:, path.head]
    if model.angles is not None:  # RoPE as a product of complex numbers
        turn = torch.polar(torch.ones_like(model.angles), model.angles)
        q, k = (torch.view_as_real(torch.complex(*z.chunk(2, -1)) * turn) for z in (q, k))
        q, k = q.flatten(-2), k.flatten(-2)
    roles, score, chains = [*task.roles], 0, [i % task.N for i in range(n)]
    for i, chain in enumerate(chains):
        own, other = batch.places[i, chain], batch.places[i, (chain + 1) % task.N]
        reader, read = own[roles.index(path.reader)], roles.index(path.read)
        score = score + q[i, reader] @ (k[i, own[read]] - k[i, other[read]]) / q.shape[-1] ** 0.5
    [slope] = torch.autograd.grad(score, x, create_graph=True)
    M = torch.zeros(len(roles), len(roles), task.inputs, task.inputs)
    for (u, _), a in itertools.product(enumerate(roles), range(task.inputs)):
        along = sum(slope[i, batch.places[i, chain, u], a] for i, chain in enumerate(chains))
        [second] = torch.autograd.grad(along, y, retain_graph=True, allow_unused=True)
        for (v, _), (i, chain) in itertools.product(enumerate(roles), enumerate(chains)):
            if second is not None:
                M[u, v, a] += second[i, batch.places[i, chain, v]] / n
    return M, score.item() / n


@pytest.mark.parametrize(
    "words", ["--D 1 --N 2 --task extras.lookup:Lookup", "--D 1 --N 3 --positions rope --no-causal"]
)
def test_maps_are_the_second_derivatives_of_autograd(words):
    model, task, _ = random_model(*words.split())
    paths = [Path(0, 0, "1b", "1a"), Path(1, 1, "q", "1b"), Path(1, 0, "1b", "1a")]
    matches = analyze.measure_matches(model, task, paths, n=5)
    for path in paths:
        M, score = by_autograd(model, task, path, 5)
        torch.testing.assert_close(matches[path][0], M, atol=2e-3 * M.abs().max().item(), rtol=0)
        assert matches[path][1] == pytest.approx(score, rel=1e-3)


def test_what_cannot_be_measured_is_left_out_or_an_error():
    model, task, _ = random_model()
    path = Path(0, 0, "1b", "1a")
    starred = [Path(0, 0, "1b+1", "1b"), Path(1, 0, "q", "1b+1"), Path(1, 0, "q", "1b*")]
    assert [*analyze.measure_matches(model, task, [*starred, path])] == [path]
    alone, one, _ = random_model("--N", "1")
    assert analyze.measure_matches(alone, one, [path]) == {}  # there is no other chain
    model.blocks[0].qkv.weight.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        analyze.measure_matches(model, task, [path])


def test_labels_of_a_diagram_are_apart():
    flags, paths = random_model("--heads", "4", "--layers", "9", "--D", "5")[2], []
    for head in range(4):
        paths += [Path(0, head, "q", "1b"), Path(6, head, "q", "3b"), Path(6, head, "1b", "2b")]
    figure = Figure(layout="constrained")
    axes, boxes = figure.subplots(), [("A=A", "blue"), ("B=B", "red")]
    analyze.draw_diagram(axes, flags, dict.fromkeys(paths, (boxes, "black", 1)))
    figure.draw_without_rendering()
    extents = [text.get_window_extent() for text in axes.texts if text.get_text()]
    assert len(extents) > 36
    assert not any(a.overlaps(b) for a, b in itertools.combinations(extents, 2))
