"""What a read matches: heads that were set by hand, and derivatives by autograd."""

import itertools

import analyze
from ablate import Path
from data import Task
from model import Transformer
from tests.common import random_model

import pytest
import torch
from matplotlib.figure import Figure


class Embed(torch.nn.Module):
    """The stream of a token at the start, (B, T, 3 K + T): its symbol, its place, two notes."""

    def forward(self, x):
        B, T, K = x.shape
        empty = torch.zeros(B, T, K)
        return torch.cat([x, torch.eye(T).expand(B, -1, -1), empty, empty], -1)


def planted(task, match, second):
    """A transformer of three layers with one head each, and nothing else. In layer 0 each token
    reads the one before it, by place, and notes its symbol. In layer 1 it reads the tokens whose
    note is its own symbol: the score is `match` x x. It notes the symbol of what it reads. In layer
    2 it does the same again, and `second` x x is added for its own second note and their symbol."""
    K, T = task.K, task.T
    width = 3 * K + T
    model = Transformer(T, task.N, K, K, 3, 1, width, width, mlp=False).eval()
    model.embed = Embed()
    symbol, place = slice(0, K), slice(K, K + T)
    note, other = slice(K + T, 2 * K + T), slice(2 * K + T, width)
    for layer, block in enumerate(model.blocks):
        block.ln1 = torch.nn.Identity()
        q, k, v = torch.zeros(3, width, width)  # [what it makes, of what]
        if layer == 0:
            q[place, place] = 1000 * torch.eye(T).roll(-1, 0)  # token t asks for t - 1
            k[place, place] = torch.eye(T)
            v[note, symbol] = torch.eye(K)
        else:
            q[symbol, symbol] = match * width**0.5 * torch.eye(K)
            k[symbol, note] = torch.eye(K)
            v[other, symbol] = torch.eye(K)
        if layer == 2:
            q[other, other] = second * width**0.5 * torch.eye(K)
            k[other, symbol] = torch.eye(K)
        block.qkv.weight.data, block.out.weight.data = torch.cat([q, k, v]), torch.eye(width)
        block.qkv.bias.data.zero_(), block.out.bias.data.zero_()
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


@pytest.mark.parametrize("N, K", [(2, 2), (4, 4), (3, 8)])
def test_a_planted_head_matches_the_symbols_that_it_compares(N, K):
    task = Task(N=N, D=3, K=K)
    model = planted(task, 8, 5)
    by_place = [Path(0, 0, f"{k}b", f"{k}a") for k in (1, 2, 3)]
    one = {Path(1, 0, "q", "1b"): ("q", "1a"), Path(1, 0, "1b", "2b"): ("1b", "2a")}
    one[Path(1, 0, "2b", "3b")] = "2b", "3a"
    again = Path(2, 0, "2b", "3b")  # in the last layer, by a token that is no query
    matches = analyze.measure_matches(model, task, [*by_place, *one, again])
    for path in by_place:
        M, score, letters = matches[path]
        assert pairs_of(M, task) == {} == letters and score > 100
    for path, pair in one.items():
        M, score, letters = matches[path]
        assert pairs_of(M, task) == {pair: pytest.approx(8, rel=1e-3)}
        assert letters == {task.roles[pair[0]]: pytest.approx(8, rel=1e-3)}
        assert score == pytest.approx(8 * K, rel=0.4)  # x x is K on average, x y is 0
    assert matches[again][-1][2] == pytest.approx(8, rel=1e-3)
    assert not any(block.q._forward_hooks or block.k._forward_hooks for block in model.blocks)


class Even(Task):
    """Symbols of one length, so that none is more like another than like itself."""

    def batch(self, size, rng):
        batch = super().batch(size, rng)
        return batch._replace(inputs=2 * torch.nn.functional.normalize(batch.inputs, dim=-1))


def test_a_planted_head_matches_two_symbols_at_once():
    """A with A, and B, which the query has fetched, with B, as far as it has fetched it."""
    task, path = Even(), Path(2, 0, "q", "1b")
    model = planted(task, 20, 16)
    M, _, letters = analyze.measure_matches(model, task, [path])[path]
    roles, c = [*task.roles], M.diagonal(dim1=2, dim2=3).mean(-1)
    c = {(u, v): c[i, j].item() for (i, u), (j, v) in itertools.product(enumerate(roles), repeat=2)}

    # how much of B the query has noted of the 1b of its own chain: its attention
    batch, kept = task.draw("circuits", 32), {}
    keep = model.blocks[1].pattern.register_forward_hook
    keep(lambda module, args, pattern: kept.update(pattern=pattern))
    with torch.no_grad():
        model(batch.inputs)
    expected = 0
    for i in range(32):
        q, b = batch.places[i, i % task.N, [roles.index("q"), roles.index("1b")]]
        expected += 16 * kept["pattern"][i, 0, q, b].item() / 32
    assert 14 < expected < 16
    assert c["q", "1a"] == pytest.approx(20, rel=1e-3)
    assert c["1b", "1b"] == pytest.approx(expected, rel=0.01)
    assert letters == {0: c["q", "1a"], 1: c["1b", "1b"]}


def test_a_planted_head_that_avoids_a_symbol_has_a_negative_c():
    task, path = Task(), Path(1, 0, "q", "1b")
    assert analyze.measure_matches(planted(task, -3, 0), task, [path])[path][-1] == {
        0: pytest.approx(-3, rel=1e-3)
    }
    weak = analyze.measure_matches(planted(task, 0.2, 0), task, [path])[path]
    assert weak[-1] == {}  # 0.2 x x is 0.8 nats


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
    "words",
    [
        "--D 1 --N 2",
        "--D 2 --N 3 --positions rope --no-mlp --heads 1",
        "--D 1 --N 2 --K 8 --no-causal --head-size 6",
        "--D 1 --N 4 --K 2 --positions rope --dtype bfloat16",
        "--D 1 --N 2 --task extras.lookup:Lookup",
    ],
)
def test_maps_are_the_second_derivatives_of_autograd(words):
    model, task, _ = random_model(*words.split(), "--dtype", "float32")
    last = len(model.blocks) - 1
    paths = [Path(0, 0, "1b", "1a"), Path(last, model.heads[-1][1], "q", "1b")]
    paths += [Path(last, 0, "1b", "1a"), Path(0, 0, "1a", "q")]
    matches = analyze.measure_matches(model, task, paths, n=5)
    for path in paths:
        M, score = by_autograd(model, task, path, 5)
        torch.testing.assert_close(matches[path][0], M, atol=2e-3 * M.abs().max().item(), rtol=0)
        assert matches[path][1] == pytest.approx(score, rel=1e-3)


def test_what_is_not_measured_is_left_out_and_drawn_as_a_question():
    model, task, flags = random_model("--heads", "1")
    starred = [Path(0, 0, "1b+1", "1b"), Path(1, 0, "q", "1b+1"), Path(1, 0, "q", "1b*")]
    path = Path(0, 0, "1b", "1a")
    matches = analyze.measure_matches(model, task, [*starred, path])
    assert [*matches] == [path] and analyze.measure_matches(model, task, []) == {}
    alone, one, _ = random_model("--heads", "1", "--N", "1")
    assert analyze.measure_matches(alone, one, [path]) == {}  # there is no other chain

    rows = [dict(p._asdict(), without=dict(x_1=0.5)) for p in (*starred, path)]
    report = dict(verdict="validated", ablation="mean", mean=dict(x_1=0.5), sequences=9, paths=rows)
    M, score, _ = matches[path]
    for letters, shown in ({}, "place"), ({0: 3.0, 1: 2.0}, "A=A"), ({1: 2.0}, "B=B"):
        figure = analyze.draw_circuit(flags, report, {path: (M, score, letters)})
        texts = [text.get_text() for text in figure.axes[0].texts]
        assert shown in texts and texts.count("?") == 3 and "?: not measured" in caption_of(figure)
    report["paths"] = rows[-1:]
    assert "?" not in caption_of(analyze.draw_circuit(flags, report, {path: (M, score, {})}))


def caption_of(figure):
    return figure.get_supxlabel()


def test_scores_that_are_not_finite_are_an_error():
    model, task, _ = random_model()
    model.blocks[0].qkv.weight.data[0] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        analyze.measure_matches(model, task, [Path(0, 0, "1b", "1a")])


def test_labels_of_a_diagram_are_apart_and_skipped_layers_are_marked():
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
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["input", "layer 0", "layer 6", "\N{VERTICAL ELLIPSIS}"]
