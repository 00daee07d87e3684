"""Paths, ablation and the search, against loops; the report on planted circuits; ablate.py."""

import itertools
import json
import random
from unittest import mock

import pytest
import torch

import ablate
import data
import train
from ablate import (
    ANOTHER,
    MEAN,
    NOTHING,
    End,
    PatchedModel,
    Path,
    attended,
    attention_on,
    mask_of,
    paths_in,
    prune,
    reached,
    read_report,
)
from data import chain, conditional, held_out, make_batch, partial_losses
from test_all import address_and_values, planted
from tests.common import HERE, TINY, assert_refused, run_main
from tests.other_tasks import MIXED, TRIPLES, distracted, sequences_of
from tests.planted import (
    CIRCUITS,
    Planted,
    find_positions,
    following,
    paths_from,
    plant,
    settings,
)


TASKS = [chain(4, 3), TRIPLES, MIXED, conditional(3)]
each_task = pytest.mark.parametrize("task", TASKS, ids=["chain", "triples", "mixed", "conditional"])


def positions_of(task, B):
    """The tokens of every role in B sequences, (B, N, roles)."""
    if task.crossed:
        return make_batch(0, torch.arange(B), task.N, task="conditional").positions
    return sequences_of(task, B).positions


def ends_of(task):
    for role, offset in itertools.product(range(len(task.roles)), range(-2, 3)):
        yield End(role, offset)


def pairs_of(path, positions, b, T):
    """[(n, reader, read), ...] the tokens of a path in sequence b, where they exist, by a loop; n
    is the chain of the reader."""
    pairs = []
    for n, m in itertools.product(range(positions.shape[1]), repeat=2):
        tokens = [
            positions[b, chain, end.role].item() + end.offset
            for chain, end in ((n, path.reader), (m, path.read))
        ]
        if (n == m or path.read.every) and all(0 <= token < T for token in tokens):
            pairs.append((n, *tokens))
    return pairs


# ---- paths


@each_task
def test_attention_on_a_path_is_that_between_its_tokens(task):
    positions, pattern = positions_of(task, 3), torch.rand(3, task.T, task.T)
    pairs = itertools.islice(itertools.product(ends_of(task), ends_of(task)), 0, 999, 7)
    for (reader, read), every in itertools.product(pairs, (False, True)):
        path = Path(0, 0, reader, read._replace(every=every))
        given = attention_on(pattern, path, task, positions).sum(-1)  # (B, N)
        expected = torch.zeros(3, task.N)
        for b in range(3):
            for n, i, j in pairs_of(path, positions, b, task.T):
                expected[b, n] += pattern[b, i, j]
        torch.testing.assert_close(given, expected)


@each_task
def test_hard_attention_is_shared_among_what_is_read(task):
    positions, T, star = positions_of(task, 4), task.T, End(1, every=True)
    ends = (End(0), End(1)), (End(0), End(2, 1)), (End(2), star), (End(1, 1), End(2, -1))
    paths = [Path(0, 0, *pair) for pair in ends]
    mask = mask_of(paths, task, positions)
    written = ablate.frozen_heads(paths, task, positions)[0, 0](None, torch.eye(T).expand(4, T, T))
    for b in range(4):
        expected = torch.zeros(T, T)
        for path in paths:
            for _, reader, read in pairs_of(path, positions, b, T):
                expected[reader, read] = 1
        assert torch.equal(mask[b].float(), expected)
        torch.testing.assert_close(written[b], expected / expected.sum(-1, True).clamp(min=1))


@each_task
def test_paths_are_read_as_they_were_written(task):
    for reader, read, every in itertools.product(ends_of(task), ends_of(task), (False, True)):
        path = Path(3, 1, reader, read._replace(every=every))
        row = json.loads(json.dumps(ablate.to_row(path, task)))
        assert ablate.path_from(row, task) == path
    name = ablate.path_name(Path(3, 1, End(0), End(2, 1, True)), task)
    assert name == f"L3H1: q -> {task.names[2]}+1*"


def test_positions_are_found_by_symbols_alone():
    for task, more in (chain(4, 3), {}), (conditional(4), dict(task="conditional")):
        batch = make_batch(0, torch.arange(20), **more)
        positions = find_positions(batch.inputs, task, 4)
        order = batch.positions[:, :, 0].argsort(1)[..., None].expand_as(positions)
        assert torch.equal(positions, batch.positions.gather(1, order))


# ---- ablation, against a loop over sequences, tokens and what they read


@pytest.fixture(scope="module")
def patched():
    """A transformer with random weights, whose attention is far from uniform, on 6 sequences."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, "--D", "2", "--N", "3"])
    torch.manual_seed(0)
    model = train.build(flags).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    reference = ablate.Reference(model, flags, n=16)
    batch = train.sequences(flags, held_out("validation", 6))
    return PatchedModel(model, flags, batch, reference)


def named_by_loops(batch, head, paths, task, itself):
    """(B, T, T) bool: what a head reads along these paths and, with itself, of the token itself."""
    kept = (itself * torch.eye(task.T)).bool().repeat(len(batch.inputs), 1, 1)
    for b, path in itertools.product(range(len(kept)), paths):
        for _, reader, read in pairs_of(path, batch.positions, b, task.T):
            kept[b, reader, read] |= path[:2] == head
    return kept


def losses(patched, heads):
    with torch.no_grad():
        predictions = patched.model(patched.batch.inputs, heads)
    return partial_losses(predictions, patched.batch.targets, patched.flags.K)


PATHS = [
    Path(0, 1, End(0), End(2, 1)),
    Path(0, 1, End(2), End(1)),
    Path(0, 0, End(4), End(3, every=True)),
    Path(1, 0, End(0), End(4)),
]


@pytest.mark.parametrize("by", [MEAN, ANOTHER, NOTHING])
def test_a_circuit_keeps_its_paths_and_the_token_itself(patched, by):
    """What all else reads is replaced: by its mean, by that of one sequence for all heads, or 0."""
    task, heads = patched.task, {}
    for head, (pattern, values) in patched.reference.reads.items():
        there = named_by_loops(patched.reference.batch, head, PATHS, task, True)
        kept = named_by_loops(patched.batch, head, PATHS, task, True)
        rest = torch.stack([(p * ~k) @ v for p, k, v in zip(pattern, there, values, strict=True)])
        instead = {
            MEAN: rest.mean(0).expand(6, -1, -1),
            ANOTHER: torch.stack([rest[number] for number in patched.drawn.tolist()]),
            NOTHING: torch.zeros_like(rest[:6]),
        }[by]
        heads[head] = lambda p, v, kept=kept, instead=instead: (p * kept) @ v + instead
    torch.testing.assert_close(patched.circuit(PATHS, by), losses(patched, heads))


def test_a_path_is_knocked_out_and_the_layers_above_respond(patched):
    task, heads = patched.task, {}
    for head in (0, 0), (0, 1):
        here = named_by_loops(patched.batch, head, PATHS[:3], task, False)
        there = named_by_loops(patched.reference.batch, head, PATHS[:3], task, False)
        pattern, values = patched.reference.reads[head]
        mean = ((pattern * there) @ values).mean(0)
        heads[head] = lambda p, v, here=here, mean=mean: (p * ~here) @ v + mean
    torch.testing.assert_close(patched.knock_out(PATHS[:3]), losses(patched, heads))


def test_lost_sequences_are_those_that_lose_what_the_full_model_has(patched, monkeypatch):
    """With N=3 a symbol is lost above 1/3."""
    monkeypatch.setitem(vars(patched), "baseline", torch.tensor([[0.1, 0.1], [0.4, 0.1]] * 3))
    losses = [[0.1, 0.1], [0.9, 0.1], [0.1, 0.9], [0.9, 0.3], [0.9, 0.9], [0.9, 0.9]]
    assert patched.lost(torch.tensor(losses)) == pytest.approx(3 / 6)


# ---- the search


def test_attended_paths_against_loops():
    """More to the own chain than to each other one, by 0.4 / N; a star takes 0.4 of the reader."""
    flags = train.parse_flags("--D 2 --N 3 --layers 2 --heads 1 --device cpu".split())
    task, batch = flags.problem, make_batch(0, torch.arange(6), N=3, D=2)
    torch.manual_seed(0)
    patterns = torch.rand(2, 6, task.T, task.T).pow(8).softmax(-1)
    for b, n in itertools.product(range(6), range(3)):  # q -> 1b* in layer 0, q -> 2b in layer 1
        q, b1, b2 = batch.positions[b, n, [0, 2, 4]]
        patterns[0, b, q] = torch.zeros(task.T).scatter(0, batch.positions[b, :, 2], 1 / 3)
        patterns[1, b, q] = torch.eye(task.T)[b2]
    reads = {(layer, 0): (patterns[layer], None) for layer in (0, 1)}
    plain, stars = attended(mock.Mock(reads=reads, batch=batch), task)
    roles = [End(role) for role in range(5)]
    expected, expected_stars = set(), set()
    for layer, reader, read in itertools.product((0, 1), roles, roles):
        own, others = 0.0, 0.0
        for b, n, m in itertools.product(range(6), range(3), range(3)):
            i, j = batch.positions[b, n, reader.role], batch.positions[b, m, read.role]
            given = patterns[layer, b, i, j].item() / 18
            own, others = (own + given, others) if n == m else (own, others + given)
        if reader != read and own - others / 2 >= 0.4 / 3:
            expected.add(Path(layer, 0, reader, read))
        if others + own * (reader != read) >= 0.4:
            expected_stars.add(Path(layer, 0, reader, read._replace(every=True)))
    assert {path for path in plain if not (path.reader.offset or path.read.offset)} == expected
    assert stars == expected_stars and Path(0, 0, End(0), End(2, every=True)) in stars
    assert Path(1, 0, End(0), End(4)) in plain


def test_an_intermediate_token_is_read_after_it_has_read_something():
    flags, (model, task, paths) = settings(2, 4), plant(2, CIRCUITS[-1][2], layers=4)
    assert {*paths} <= attended(ablate.Reference(model, flags, n=32), task)[0]
    model.attend = plant(2, ["3 q 2b+2"], layers=4)[0].attend  # nothing that it could have read
    assert not attended(ablate.Reference(model, flags, n=32), task)[0]


def test_a_set_is_left_from_which_nothing_can_be_dropped():
    """Of 6 paths, one is needed, and one of a pair that can replace each other."""
    paths, tried = [Path(layer, 0, End(0), End(1)) for layer in range(6)], []

    def faithful(kept):
        tried.append(kept)
        missing = {path.layer for path in paths if path not in kept}
        return 4 not in missing and not {2, 3} <= missing

    kept = prune(paths, faithful)
    assert {path.layer for path in kept} == {3, 4} and len(tried) < 2**6 / 2
    assert prune(paths, lambda kept: True) == frozenset()


@pytest.mark.parametrize("D, heads, texts", CIRCUITS)
def test_every_symbol_is_reached_along_the_whole_circuit(D, heads, texts):
    """And without one path the symbols that a planted model then cannot predict are missing."""
    layers = 1 + max(int(text[0]) for text in texts)
    batch = make_batch(0, torch.arange(16), D=D)
    assert {*range(1, D + 1)} <= reached(paths_from(chain(4, D), *texts), chain(4, D))
    for text in texts:
        others = [other for other in texts if other != text]
        model, task, paths = plant(D, others, layers, heads)
        error = partial_losses(model(batch.inputs), batch.targets, 4).mean(0)
        predicted = {k for k in range(1, D + 1) if error[k - 1] < 0.1}
        assert predicted <= reached(paths, task)


# ---- the report


@pytest.mark.parametrize("D, heads, texts", CIRCUITS[2:-2])
def test_planted_circuits_are_validated(D, heads, texts, capsys):
    """Without a path the full model loses the symbols that the model planted without it cannot
    predict. So does the circuit, which then reads of another sequence and may lose more."""
    layers = 1 + max(int(text[0]) for text in texts)
    model, task, paths = plant(D, texts, layers, heads)
    report = ablate.find_circuit(model, settings(D, layers, heads), count=256)
    assert report["verdict"] == "validated, complete"
    rows = paths_in(report, task)
    assert sorted(rows) == sorted(paths) and report["lost"] == dict(faithful=0, resampled=0)

    batch, keys = make_batch(0, torch.arange(64), D=D), ("necessary", "minimal")
    for path, row in rows.items():
        others = [text for text in texts if paths_from(task, text) != [path]]
        predictions = plant(D, others, layers, heads)[0](batch.inputs)
        lost = partial_losses(predictions, batch.targets, 4).mean(0) > 0.5
        high = [[row[key][f"x_{k}"][1] > 0.3 for k in range(1, D + 1)] for key in keys]
        assert high[0] == lost.tolist()
        assert all(it_is for it_is, needed in zip(high[1], high[0], strict=True) if needed)
        assert row["attention"] == pytest.approx(1)


CONDITIONAL = "0 1b 1a,0 3c 3a,0.1 2b 2a,0.1 3c 3b,1 q 1b,1.1 q 2b,2 q 3c"
DISTRACTED = "0 1b 1a,0 2b 2a,1 q 1b,2 q 2b"


@pytest.mark.parametrize(
    "name, layers, heads, texts",
    [("conditional", 3, 2, CONDITIONAL), ("distracted", 3, 1, DISTRACTED)],
)
def test_planted_circuits_of_other_tasks_are_found(name, layers, heads, texts, monkeypatch, capsys):
    monkeypatch.setitem(data.TASKS, "distracted", distracted)
    flags = f"--task {name} --layers {layers} --heads {heads} --device cpu --dtype float32"
    flags = train.parse_flags(flags.split())
    task, idle = flags.problem, [(0, 0, 0.01)]
    paths = paths_from(task, *texts.split(","))
    moves = {head: idle for head in itertools.product(range(layers), range(heads))}
    moves |= {path[:2]: [(0, 0, 1.0)] for path in paths}
    model = Planted(task, following(task, paths), layers, heads, moves)
    report = ablate.find_circuit(model, flags, count=256)
    assert report["validated"], report["verdict"]
    assert sorted(paths_in(report, task)) == sorted(paths)


# ---- the command line


def write_run(folder, *flags):
    """A run directory with the untrained weights of these flags."""
    flags = train.parse_flags(["--dtype", "float32", *TINY, *map(str, flags)])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(flags.settings))
    train.write_tensors(folder / "model.pt", train.build(flags).state_dict())
    return folder


def test_what_is_found_is_printed_and_written(tmp_path):
    """A circuit, a circuit with stars, and none; with the fewest sequences that are allowed."""
    for model, shape, says in (
        (planted, "--heads 1", "L1H0: q -> 1b "),
        (address_and_values, "--layers 1 --heads 5 --head-size 8", "L0H4: q -> 1b*"),
        (None, "", "verdict: not searched: the full model has x_1"),
    ):
        run = write_run(tmp_path / f"run {says[:4]}", "--N", 4, *shape.split())
        untrained, flags = train.load(run)
        with mock.patch.object(ablate, "load", return_value=(model or untrained, flags)):
            code, out, err = run_main(ablate, run, "--sequences", 100)
        assert code == 0 and says in out, out + err
        report = read_report(run)
        assert report["validated"] == bool(report["paths"]) == bool(model)
        assert report["sequences"] == 100 and f"verdict: {report['verdict']}\n" in out


def test_bad_input_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    assert_refused(ablate, write_run(tmp_path / "one", "--N", 1), says="--N 1")
    for flag, value, says in (
        ("--threshold", "nan", "--threshold: must be from 1e-06 to 1"),
        ("--sequences", 99, "--sequences: must be from 100"),
    ):
        assert_refused(ablate, run, flag, value, says=says)
    assert_refused(ablate, write_run(tmp_path / "last", "--D", 2, "--no-ic"), says="predicts some")


# ---- circuits of trained models, changed: none may be as good as the model's own


def changed(circuit, heads, task, draw):
    """Yield (what was done, paths), in turns: as many random paths in the same heads, and one path
    moved to another head or between other roles."""
    roles = [End(number) for number in task.in_reading_order]
    allowed = [pair[::-1] for pair in itertools.combinations(roles, 2)]  # reads what was before
    while True:
        ends = draw.sample(allowed, len(circuit))
        pairs = zip(sorted(circuit), ends, strict=True)
        yield "random", frozenset(Path(*path[:2], *pair) for path, pair in pairs)
        path, head, pair = draw.choice(sorted(circuit)), draw.choice(heads), draw.choice(allowed)
        moved = Path(*head, *path[2:]) if draw.random() < 0.5 else Path(*path[:2], *pair)
        if moved not in circuit:
            yield f"{ablate.path_name(path, task)} moved", circuit - {path} | {moved}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["A", "B", "C"])
def test_no_changed_circuit_is_faithful(run):
    model, flags = train.load(HERE / "results" / run)
    report = read_report(HERE / "results" / run)
    by = ANOTHER if "complete" in report["verdict"] else MEAN
    circuit = frozenset(paths_in(report, flags.problem))
    patched = PatchedModel(model, flags, train.sequences(flags, held_out("validate", 128)))
    assert patched.circuit(circuit, by).mean(0).max() < 0.05
    heads = [*patched.reference.reads]
    tries, faithful = changed(circuit, heads, flags.problem, random.Random(0)), []
    for _, (text, paths) in zip(range(30), tries, strict=False):
        if patched.circuit(paths, by).mean(0).max() < 0.05:
            faithful.append(text)
    assert not faithful
