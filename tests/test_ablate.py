"""Paths, ablation and the search, against loops; the report on planted circuits."""

import itertools
import random
from unittest import mock

import ablate
import data
from ablate import MEAN, RESAMPLE, PatchedModel, Path, mark_edges
from extras.studies import tables
from test_all import planted
from tests.common import random_model
from tests.planted import CIRCUITS, Planted, paths_from

import pytest
import torch


def pairs_of(path, task, places, b):
    """[(n, reader, read), ...] the tokens of a path of each chain n in sequence b, by a loop."""
    pairs = []
    for n, m in itertools.product(range(places.shape[1]), repeat=2):
        tokens = []
        for number, (role, offset) in zip((n, m), map(ablate.split_token, path[2:]), strict=True):
            tokens.append(places[b, number, [*task.roles].index(role)].item() + offset)
        if (n == m or path.read[-1] == "*") and all(0 <= token < task.T for token in tokens):
            pairs.append((n, *tokens))
    return pairs


# ---- paths


@pytest.mark.parametrize("task", [data.Task(), tables.Conditional()], ids=["chain", "conditional"])
def test_paths_against_loops(task):
    """Mean attention of the readers that are there, without that to themselves; a path in a report;
    the mask of several paths."""
    T, pattern, ends = task.T, torch.rand(3, task.T, task.T), []
    places = task.draw("validation", 3).places
    for name, offset in itertools.product(task.roles, ("", "+1", "+2")):
        ends.append(name + offset)
        assert ablate.split_token(f"{name}{offset}*") == (name, int(offset or 0))
    pairs = itertools.islice(itertools.product(ends, ends), 0, 999, 5)
    for (reader, read), star in itertools.product(pairs, ("", "*")):
        path, total, readers = Path(3, 1, reader, read + star), torch.zeros(()), set()
        for b, n in itertools.product(range(3), range(task.N)):
            role, offset = ablate.split_token(reader)
            token = places[b, n, [*task.roles].index(role)].item() + offset
            readers |= {(b, token)} if token < task.T else set()
        for b in range(3):
            for _, i, j in pairs_of(path, task, places, b):
                total = total + pattern[b, i, j] * (i != j)
        given = ablate.mean_attention(pattern, path, task, places)
        torch.testing.assert_close(given, total / max(len(readers), 1))
        assert [*ablate.paths_in(dict(paths=[path._asdict()]))] == [path]
        assert path.star == bool(star)

    paths = paths_from("0 q 1a", "0 q 1b+1", "0 1b 1a*", "0 1a+1 1b", "0 2a 2a*")
    mask = torch.zeros(3, T, T, dtype=torch.bool)
    for path, b in itertools.product(paths, range(3)):
        for _, reader, read in pairs_of(path, task, places, b):
            mask[b, reader, read] = True
    assert torch.equal(mark_edges(paths, task, places), mask)


# ---- ablation


@pytest.fixture(scope="module")
def patched():
    """A transformer with random weights, on 6 sequences."""
    model, task, _ = random_model("--D", "2", "--N", "3")
    return PatchedModel(model, task, task.draw("validation", 6), task.draw("corrupted", 16))


@pytest.mark.parametrize("by", [MEAN, RESAMPLE])
@pytest.mark.parametrize("keep", [True, False])
def test_ablation_against_loops(patched, by, keep):
    """All but the paths and what a token reads of itself is replaced, or the paths alone are."""
    task, heads, itself = patched.task, {}, torch.eye(patched.task.T).bool()
    circuit = paths_from("0.1 q 1b+1", "0.1 1b 1a", "0 2b 2a*", "1 q 2b")
    for head, (pattern, values) in patched.corrupted_reads.items():
        paths, kept = [path for path in circuit if path[:2] == head], []
        for batch in patched.corrupted, patched.clean:
            read = mark_edges(paths, task, batch.places)
            kept.append((read if keep else ~read) | itself)
        there, here = kept
        alone = ~read.any(-1)  # a path may lead a token to itself
        rest = (pattern * ~there) @ values
        chosen = (lambda x: x[patched.resampled]) if by == RESAMPLE else (lambda x: x.mean(0)[None])
        instead, weights = chosen(rest).expand(6, -1, -1), chosen(pattern).expand(6, -1, -1)

        def write(p, v, here=here, instead=instead, weights=weights, alone=alone):
            p = p * here
            for b, i in itertools.product(range(6), range(task.T)):
                if keep and alone[b, i]:
                    p[b, i, i] = weights[b, i, i]
            return p @ v + instead

        heads[head] = write
    losses = (patched.keep_only if keep else patched.knock_out)(circuit, by)
    torch.testing.assert_close(losses, patched.losses(heads))


def test_lost_answers_are_those_that_the_full_model_has(patched, monkeypatch):
    """With N=3 an answer is lost above 1/3, whatever the others of its sequence."""
    full = torch.tensor([[[0.1, 0.1], [0.4, 0.1], [0.1, 0.1]]] * 2)  # (B=2, N=3, symbols=2)
    losses = torch.tensor([[[0.9, 0.1], [0.9, 0.9], [0.1, 0.3]], [[0.1, 0.1], [0.2, 0.1], [0, 0]]])
    monkeypatch.setitem(vars(patched), "baseline", full)
    lost = ablate.symbol_means(ablate.lost_answers(patched, losses), patched.task)
    means = ablate.symbol_means(losses, patched.task)
    assert [*lost.values()] == [pytest.approx(1 / 6, abs=1e-5)] * 2
    assert means["x_1"] == pytest.approx(losses[..., 0].mean().item(), abs=1e-5)
    few = torch.tensor([[[0.0, 0.0], [0.0, 0.4], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
    for level, faithful in (0.06, False), (0.04, True):
        assert (not ablate.failures(patched, 0 * losses + level)) == faithful
    monkeypatch.setattr(patched.task, "faithful_below", 0.1)
    assert ablate.failures(patched, few)  # a sixth is lost
    assert not ablate.failures(patched, few * 0.5)


def test_gradients_flow_through_an_ablation(patched):
    model, task, batch = patched.model, patched.task, patched.clean
    mine = PatchedModel(model, task, batch, measure=lambda predictions, batch: predictions.sum())
    [gradient] = torch.autograd.grad(mine.knock_out([Path(0, 1, "q", "1b")]), model.embed.weight)
    assert gradient.abs().sum() > 0


# ---- the search


def test_candidates_by_the_tokens_of_all_pairs_of_roles():
    """By the surplus over other chains; a star by all. Stars come last, the most attended first."""
    task = data.Task(N=3, D=2)
    batch = task.draw("validation", 6)
    torch.manual_seed(0)
    patterns = torch.rand(2, 6, task.T, task.T).pow(8).softmax(-1)
    for b, n in itertools.product(range(6), range(3)):  # q -> 1b* in layer 0, q -> 2b in layer 1
        q, b1, b2 = batch.places[b, n, [0, 2, 4]]
        patterns[0, b, q] = torch.zeros(task.T).scatter(0, batch.places[b, :, 2], 1 / 3)
        patterns[1, b, q] = torch.eye(task.T)[b2]
    reads = {(layer, 0): (patterns[layer], None) for layer in (0, 1)}
    itself = torch.eye(task.T, dtype=torch.bool)
    patched = mock.Mock(corrupted_reads=reads, corrupted=batch, task=task, itself=itself)
    found = ablate.candidates(patched)
    plain, stars, sequence = {}, {}, torch.arange(6)[:, None, None]
    for layer, reader, read in itertools.product((0, 1), task.roles, task.roles):
        i, j = (batch.places[..., [*task.roles].index(name)] for name in (reader, read))
        given = patterns[layer][sequence, i[:, :, None], j[:, None]] / 18  # (6, 3, 3)
        own = given.diagonal(dim1=1, dim2=2).sum().item()
        others = given.sum().item() - own
        own *= reader != read
        if reader != read and own - others / 2 >= 0.1 / 3:
            plain[Path(layer, 0, reader, read)] = own - others / 2
        if own + others >= 0.1 / 3:
            stars[Path(layer, 0, reader, read + "*")] = own + others
    assert {path: x for path, x in found.items() if path.star} == pytest.approx(stars)
    of_roles = {path for path in found if {path.reader, path.read} <= task.roles.keys()}
    assert {path: found[path] for path in of_roles} == pytest.approx(plain)
    order, names = [*found.values()], [*map(str, found)]
    for group in order[: -len(stars)], order[-len(stars) :]:
        assert group == sorted(group, reverse=True)
    assert "L0H0: q -> 1b*" in names and names[0] == "L1H0: q -> 2b"


def test_an_intermediate_token_that_no_head_reads_is_no_end():
    task = data.Task(N=4, D=2)
    model = Planted(task, ["0 2b+1 2b"], layers=1)
    patched = PatchedModel(model, task, task.draw("validation", 9))
    assert not [path for path in ablate.candidates(patched) if "+" in str(path)]


def test_no_path_of_those_that_are_left_can_go():
    """Under tests that sets of five paths pass at random, so that one may go once others went."""
    paths, generator = [Path(layer, 0, "q", "1a") for layer in range(5)], random.Random(0)
    for _ in range(200):
        passes = {frozenset(paths)}
        for size in range(5):
            for subset in itertools.combinations(paths, size):
                if generator.random() < 0.5:
                    passes.add(frozenset(subset))
        kept = ablate.prune(paths, passes.__contains__)
        assert kept in passes and not any(kept - {path} in passes for path in kept)


# ---- the report


TWO_HEADS = "0 1b 1a,0 3c 3a,0.1 2b 2a,0.1 3c 3b,1 q 1b,1.1 q 2b,2 q 3c".split(",")
PLANTED = [pytest.param(data.Task(D=D), *circuit) for D, *circuit in CIRCUITS]
PLANTED.append((tables.Conditional(), 2, TWO_HEADS))


@pytest.mark.parametrize("task, heads, texts", PLANTED)
def test_planted_circuits_are_validated(task, heads, texts):
    """Without a path is lost what the model planted without it cannot predict."""
    layers = 1 + max(int(text[0]) for text in texts)
    paths = paths_from(*texts)
    report = ablate.find_circuit(Planted(task, texts, layers, heads), task, count=256)
    assert report["verdict"] == "validated under both ablations"
    rows, batch = ablate.paths_in(report), task.draw("validation", 64)
    assert sorted(rows) == sorted(paths)
    for by in MEAN, RESAMPLE:
        assert not any(report["lost"][by].values())

    # what is lost without each path
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


def test_a_circuit_is_validated_on_fresh_sequences_and_may_leave_the_mean_alone(monkeypatch):
    """They fail here under resample ablation alone, and paths are searched again."""
    batches, tried, judge = [], [], ablate.validate

    def spy(*arguments):
        patched = PatchedModel(*arguments)
        batches.append([*patched.clean.inputs])
        batches.append([*patched.corrupted.inputs])
        return patched

    def strict(fresh, paths, ablations):
        tried.append(ablations)
        with monkeypatch.context() as patch:
            if RESAMPLE in ablations:
                patch.setattr(fresh.task, "faithful_below", 0, raising=False)
            return judge(fresh, paths, ablations)

    monkeypatch.setattr(ablate, "PatchedModel", spy)
    monkeypatch.setattr(ablate, "validate", strict)
    report = ablate.find_circuit(planted, data.Task(D=1), count=256)
    assert report["verdict"] == "validated under mean ablation alone"
    assert tried == [ablate.BOTH, ablate.BOTH, [MEAN]]
    searched, reference, fresh, donors = (
        {tuple(x.flatten().tolist()) for x in batch} for batch in batches[:4]
    )
    assert len(fresh) == 256 and not (searched | reference) & fresh and not donors & searched
