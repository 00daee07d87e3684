"""Conditional retrieval: sequences against a solver by hand, depth against sets, circuits held and
planted, and every stage at tiny size."""

import hashlib
import itertools
import math
from pathlib import Path

from parts import circuit, config, theory

import pytest
import torch

import ablate
import analyze
import data
import train
from data import conditional, make_batch, partial_losses
from tests.common import TINY, assert_refused, bits_behind, run_main
from tests.other_tasks import write_circuit
from tests.planted import Planted, attending, evidence, following, paths_from, symbols_reached


HELD = "--task conditional --N 2 --K 2 --heads 2 --width 32 --batch 64 --lr 0.003 --device cpu"


def sequences(B, N=4, K=4, **more):
    return make_batch(0, torch.arange(B), N, K=K, task="conditional", **more)


# ---- the problem, solved without our code


def parts(inputs, N, K):
    """The triples, the pairs (a, y), the pairs (a, x) and the queries of one sequence (T, K or
    more), symbols as tuples of numbers."""
    tokens = [tuple(token[:K].tolist()) for token in inputs]
    ends = 3 * N * N, 3 * N * N + 2 * N, 3 * N * N + 4 * N
    triples, y_pairs, x_pairs, queries = (
        tokens[start:end] for start, end in zip((0, *ends), (*ends, None), strict=True)
    )
    triples = list(zip(triples[0::3], triples[1::3], triples[2::3], strict=True))
    y_of = dict(zip(y_pairs[0::2], y_pairs[1::2], strict=True))
    x_of = dict(zip(x_pairs[0::2], x_pairs[1::2], strict=True))
    return triples, y_of, x_of, queries


def solve_conditional(inputs, N, K):
    """(N, 3*K) what the targets must be: look a's x and y up, then the triple that has both."""
    triples, y_of, x_of, queries = parts(inputs, N, K)
    answers = []
    for a in queries:
        (z,) = [z for x, y, z in triples if (x, y) == (x_of[a], y_of[a])]
        answers.append([*x_of[a], *y_of[a], *z])
    return torch.tensor(answers)


@pytest.mark.parametrize("N, K", [(1, 2), (2, 4), (4, 4)])
def test_targets_are_what_looking_up_gives(N, K):
    whole, last = sequences(20, N, K), sequences(20, N, K, targets=[3], rotary="qk")
    assert whole.inputs.shape == (20, 3 * N * N + 5 * N, 2 * K) and conditional(4).T == 68
    for i in range(20):
        solved = solve_conditional(whole.inputs[i], N, K)
        assert torch.equal(solved, whole.targets[i])
        assert torch.equal(solved[:, 2 * K :], last.targets[i])


def test_every_x_stands_with_every_y():
    N, K = 3, 4
    for inputs in sequences(20, N).inputs:
        triples, y_of, x_of, queries = parts(inputs, N, K)
        xs, ys = set(x_of.values()), set(y_of.values())
        assert {(x, y) for x, y, _ in triples} == set(itertools.product(xs, ys))
        assert set(queries) == x_of.keys() == y_of.keys()
        every = xs | ys | set(queries) | {z for *_, z in triples}
        assert len(every) == 3 * N + N * N  # all distinct


def test_roles_stand_where_the_table_says():
    task, batch = conditional(4), sequences(50)
    assert torch.equal(task.positions(task.slots(batch.positions)), batch.positions)


def test_what_belongs_together_is_random():
    """Which x, which y and which triple a query has, by the order in which they stand: uniform, and
    x and y independent."""
    N, B = 3, 12000
    task = conditional(N)
    slots = task.slots(sequences(B, N).positions)  # (B, N, blocks): triples, y, x, queries
    by_query = slots.gather(1, slots[..., 3].argsort(1)[..., None].expand_as(slots))
    code = (by_query * 9 ** torch.arange(N)[:, None]).sum(1)
    of_x, of_y = (code[:, k].unique(return_inverse=True)[1] for k in (2, 1))
    for cell, count in ((of_x, 6), (of_y, 6), (6 * of_x + of_y, 36), (by_query[:, 0, 0], 9)):
        counts = cell.bincount(minlength=count)
        chi2 = ((counts - B / count) ** 2 / (B / count)).sum()
        assert abs(chi2 - (count - 1)) < 4.5 * math.sqrt(2 * (count - 1)), (count, chi2)


def test_sequences_stay_the_same():
    """What was published must be able to be made again."""
    found = hashlib.sha256()
    batch = make_batch(7, torch.tensor([0, 1, 12345, -1]), task="conditional", rotary="qk")
    for whole in (bits_behind(batch.inputs), bits_behind(batch.targets), batch.positions):
        found.update(whole.contiguous().numpy().tobytes())
    assert found.hexdigest()[:16] == "5ebf381fe920d679"


def test_plateaus_are_what_averaging_gives():
    """The error of who averages all z, or those of the x that is known."""
    N, batch = 4, sequences(3000)
    z = batch.inputs[:, 2 : 3 * N * N : 3, :4]  # (B, 16, 4)
    x = batch.inputs[:, 0 : 3 * N * N : 3, :4]
    targets = batch.targets[..., 8:]
    fits = (x[:, None] == batch.targets[:, :, None, :4]).all(-1).float()  # (B, N, 16)
    assert torch.equal(fits.sum(-1), torch.full((3000, N), 4.0))
    said = [torch.zeros_like(targets), z.mean(1, keepdim=True).expand_as(targets), fits @ z / N]
    for predictions, (level, _) in zip(said, conditional(N).plateaus, strict=True):
        assert abs(partial_losses(predictions, targets, 4).mean() - level) < 0.02


# ---- depth


def layers_by_sets(N, causal, seed):
    """The layers after which the first query holds x, y and z, token by token on a real sequence
    and with sets: a token is attended to if no other of its place shows all that is shared."""
    task = conditional(N)
    inputs = make_batch(seed, torch.arange(1), N, task="conditional").inputs[0, :, :4].tolist()
    known, place_of = {}, {}
    for number, (start, size, slots) in enumerate(task.blocks):
        for token in range(start, start + slots * size):
            slot, place = divmod(token - start, size)
            known[token], place_of[token] = {tuple(inputs[token]), (number, slot)}, (number, place)
    wanted = solve_conditional(torch.tensor(inputs), N, 4)[0].view(3, 4).tolist()
    query, layers = task.blocks[-1].start, [None] * 3
    for layer in range(1, 9):
        after = {token: set(held) for token, held in known.items()}
        for token, at in itertools.product(known, known):
            shared = known[token] & known[at]
            alike = [other for other in known if place_of[other] == place_of[at] and other != at]
            told = shared and not any(shared <= known[other] for other in alike)
            if told and (at <= token or not causal):
                after[token] |= known[at]
        known = after
        for k, symbol in enumerate(wanted):
            if tuple(symbol) in known[query] and layers[k] is None:
                layers[k] = layer
        if None not in layers:
            return layers


@pytest.mark.parametrize("causal", [True, False])
def test_depth_against_sets_on_a_real_sequence(causal):
    for N, seed in ((2, 0), (2, 1), (3, 0)):
        assert layers_by_sets(N, causal, seed) == theory.least_layers(conditional(N), causal)
    assert theory.least_layers(conditional(2), causal) == [2, 2, 3]
    assert theory.least_layers(conditional(4), causal)[-1] == 3


def test_the_minimal_circuit_reaches_what_the_depth_allows():
    task, allowed = conditional(4), theory.may_attend(conditional(4))
    for layers in (1, 2, 3, 5):
        paths, heads = theory.conditional_circuit(3, layers, True), {}
        reached = symbols_reached(task, paths, layers).tolist()
        assert reached == [layers >= 2, layers >= 2, layers >= 3]
        for path in paths:
            assert allowed[path.source.role, path.target.role]
            assert heads.setdefault(path[:3], path) == path  # one target each
    whole = theory.conditional_circuit(3, 3, True)
    for path in whole:  # z needs every path
        others = [other for other in whole if other != path]
        assert not symbols_reached(task, others, 3)[2]


def test_a_triple_is_not_told_by_x_alone():
    """1b may not look z up: four triples show its x; once it knows y too, it may."""
    task = conditional(4)
    steps = ["1 1b 1a", "1 2b 2a", "1 3c 3a", "1 3c 3b", "2 1b 3c", "3 q 1b"]
    assert symbols_reached(task, paths_from(task, *steps), 4).tolist() == [True, False, False]
    steps = [*steps[:4], "2 1b 2b", "3 1b 3c", "4 q 1b"]
    assert symbols_reached(task, paths_from(task, *steps), 4).all()


@pytest.mark.slow
def test_held_circuits_learn_what_the_depth_allows(tmp_path, without_curves):
    for layers, solved in ((2, ["x_1", "x_2"]), (3, ["x_1", "x_2", "x_3"])):
        run = tmp_path / str(layers)
        flags = [
            *HELD.split(),
            "--circuit",
            "minimal",
            "--layers",
            layers,
            "--steps",
            120,
            "--target",
            0,
        ]
        code, _, err = run_main(train, *flags, "--out", run)
        assert code == 0, err
        last = config.read_log(run)[-1]
        assert [name for name in ("x_1", "x_2", "x_3") if last[name] < 0.3] == solved, last


# ---- circuits


TEXTS = ["1.1 1b 1a", "1.1 3c 3a", "1.2 2b 2a", "1.2 3c 3b", "2.1 q 1b", "2.2 q 2b", "3.1 q 3c"]


def said_of(attend, heads=2, moves=None):
    flags = f"--task conditional --layers 3 --heads {heads} --device cpu --dtype float32"
    model = Planted(conditional(4), attend, 3, heads, moves)
    return ablate.find_circuit(model, train.parse_flags(flags.split()), sequences=64)


def test_a_planted_circuit_is_certified(capsys):
    task = conditional(4)
    paths = paths_from(task, *TEXTS)
    report = said_of(following(task, paths))
    assert report["verdict"] == "certified", report["verdict"]
    assert sorted(circuit.paths_in(report, task)) == sorted(paths)
    assert report["layers_with_paths"] == 3
    destroyed = {tuple(row["destroys"]) for row in report["paths"]}
    assert destroyed == {("x_1", "x_3"), ("x_2", "x_3"), ("x_3",)}


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_one_head_may_look_for_two_symbols(share, capsys):
    """Both of its targets are named, of which one gets this share of its attention."""
    task = conditional(4)
    texts = ["1 1b 1a", "1 2b 2a", "1 3b 3a", "2 3c 3b", "2 q 1b", "2 q 2b", "3 q 3c"]
    paths = paths_from(task, *texts)
    others = following(task, [path for path in paths if path not in paths[4:6]])

    def attend(head, holds, positions):
        pattern, given = others(head, holds, positions), []
        for path, own in zip(paths[4:6], (share, 1 - share), strict=True):
            if path[:2] == head:
                tokens, _ = path.target.tokens(task, positions)
                found = evidence(task, path, holds, positions)
                given.append((path.source, tokens, own * found))
        both = attending(task, positions, *given)
        return torch.cat([pattern[:, :-4], both[:, -4:]], 1) if given else pattern

    report = said_of(attend, heads=1, moves={(1, 0): [(0, 0, 4.0)]})
    assert sorted(circuit.paths_in(report, task)) == sorted(paths), report["verdict"]


# ---- every stage


def test_one_sequence_told_in_words():
    code, out, err = run_main(data, "--task", "conditional", "--seed", 5)
    assert code == 0 and "68 tokens" in out, err
    words = out.split()
    triples = set(zip(words, words[1:], words[2:], strict=False))
    line = next(line for line in out.splitlines() if line.startswith("  A3: "))
    assert line == "  A3: B3 C3 D3"
    assert ("B3", "C3", "D3") in triples and ("B3", "C1", "D3.1") in triples
    code, out, _ = run_main(theory, "--task", "conditional")
    assert code == 0 and "causal mask" in out


def test_conditional_runs_have_no_D(tmp_path):
    parsed = train.parse_flags("--task conditional --layers 4 --heads 2 --targets 1 3".split())
    assert parsed.out == Path("out/L4_H2_conditional_targets1-3_s0")
    for module in (data, train):
        assert_refused(module, "--task", "conditional", "--D", 4, says="leave out --D 4")
    assert_refused(train, "--task", "trees", says="--task")
    assert_refused(train, "--task", "conditional", "--targets", 4, says="among 1 2 3")
    held = ["--task", "conditional", "--circuit", "minimal"]
    assert_refused(train, *held, "--heads", 1, says="--heads 2")


def test_every_stage_reads_a_conditional_run(tmp_path, monkeypatch):
    run, tiny = tmp_path / "run", [word for word in TINY if word not in ("--D", "1")]
    flags = [*tiny, "--task", "conditional", "--save-every", 20]
    assert run_main(train, *flags, "--out", run)[0] == 0
    write_circuit(run, (1, 1, "3c", "3a", 0.9), (1, 2, "q", "2b", 0.8), (2, 1, "q", "3c", 0.7))
    drawn = []
    monkeypatch.setattr(config, "save_figure", lambda figure, file: drawn.append(file.name))
    monkeypatch.setitem(analyze.EMERGENCE_FIGURES, "emergence.gif", lambda run, file: None)
    code, out, err = run_main(analyze, run)
    assert code == 0 and {"curves.png", "attention_maps.png", "removal.png"} < {*drawn}, err
    code, out, err = run_main(ablate, run, "--sequences", 64)
    assert code == 0 and "not searched" in out and not circuit.read_report(run)["certified"], err
