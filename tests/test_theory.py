"""Section 5: the information flow against sets, the depth laws against it, minimal circuits."""

import itertools
import math

import pytest
import torch

from data import chain, make_batch, shuffled
from extras.studies import theory
from tests.common import run_main
from tests.other_tasks import MIXED, TRIPLES, sequences_of
from tests.planted import symbols_reached


def test_depth_laws_against_the_simulation():
    for D in range(1, 65):
        task = chain(1, D)
        unmasked, causal = theory.least_layers(task, causal=False), theory.least_layers(task)
        assert unmasked[-1] == theory.unmasked_depth(D) == math.ceil(math.log(4 * D + 1, 3) - 1e-9)
        assert causal == [math.floor(math.log2(k)) + 2 for k in range(1, D + 1)]
        assert causal[-1] == theory.causal_depth(D)
        assert theory.paper_bound(D) == math.ceil(math.log(2 * D, 3) - 1e-9) <= unmasked[-1]


def layers_by_sets(task, positions, causal, wide=False):
    """The assumptions of Section 5 spelled out token by token, with all chains and the real order
    of tokens: the layers after which the first chain's query holds its last symbol. wide: who
    shares a piece with a token reads what all visible tokens of its slot hold."""
    known, slot_of = {}, {}
    for n, tokens in enumerate(positions.tolist()):
        for role, token in zip(task.roles, tokens, strict=True):
            slot_of[token] = token - role.place % task.blocks[role.block].size  # where it starts
            known[token] = {("symbol", n, role.symbol), ("slot", slot_of[token])}
    layers, query = 0, positions[0, 0].item()
    while ("symbol", 0, task.symbols - 1) not in known[query]:
        after = {}
        for token, pieces in known.items():
            visible = [other for other in known if other <= token or not causal]
            read = {other for other in visible if known[other] & pieces}
            slots = {slot_of[other] for other in read}
            read |= {other for other in visible if wide and slot_of[other] in slots}
            after[token] = set.union(*(known[other] for other in read))
        known, layers = after, layers + 1
    return layers


@pytest.mark.parametrize("causal", [True, False])
def test_depth_laws_against_sets_on_a_real_sequence(causal):
    for D in (1, 2, 3, 4, 5, 8):
        task, positions = chain(2, D), make_batch(D, torch.arange(1), 2, D, 2).positions[0]
        assert layers_by_sets(task, positions, causal) == theory.least_layers(task, causal)[-1]
    for task in (TRIPLES, MIXED):
        positions = sequences_of(task, 1).positions[0]
        assert layers_by_sets(task, positions, causal) == theory.least_layers(task, causal)[-1]


def test_width_saves_one_layer():
    for D in range(1, 41):
        layers = theory.least_layers(chain(1, D), wide=True)
        assert layers == [math.floor(math.log2(k)) + 1 for k in range(1, D + 1)]
        assert layers[-1] == theory.wide_depth(D) == theory.causal_depth(D) - 1
    for D in (1, 2, 3, 4, 8):
        task, positions = chain(2, D), make_batch(D, torch.arange(1), 2, D, 2).positions[0]
        assert layers_by_sets(task, positions, True, True) == theory.wide_depth(D)


def test_any_reading_order_against_sets_on_shuffled_sequences():
    """For D = 4 all 24 orders of the steps occur, and both ways of counting agree in each."""
    task, seen = shuffled(2, 4), {}
    for positions in make_batch(0, torch.arange(200), 2, 4, 2, task="shuffled").positions:
        order = tuple(1 + i for i in positions[0, 1::2].argsort().tolist())
        layers = layers_by_sets(task, positions, True)
        assert seen.setdefault(order, layers) == layers
        assert theory.least_layers(theory.in_order(order))[-1] == layers
    assert len(seen) == 24 and seen[1, 2, 4, 3] == 3 and seen[4, 3, 2, 1] == 4
    expected = {depth: [*seen.values()].count(depth) / 24 for depth in (3, 4)}
    assert theory.shuffled_depths(4)[-1] == pytest.approx(expected)


# ---- width


def test_no_fixed_mixtures_beat_the_gates():
    """What is left of N Gaussian values once H mixtures of them are known: the trace of the
    posterior covariance is N - H; and the gates reach it."""
    for N, H in ((2, 1), (4, 1), (4, 3), (8, 2), (8, 7)):
        mixtures = torch.randn(H, N, generator=torch.Generator().manual_seed(H)).double()
        posterior = torch.eye(N).double() - torch.linalg.pinv(mixtures) @ mixtures
        assert posterior.trace().item() / N == pytest.approx(theory.gates_error(N, H))
        assert theory.gates_simulated(N, H) == pytest.approx(theory.gates_error(N, H), abs=0.02)
        assert theory.gates_error(N, H) == theory.address_error(N, H + 1)
    assert theory.gates_simulated(4, 4) < 1e-4 and theory.address_error(4, 1) == 0.75


@pytest.mark.parametrize("N", [2, 3, 4])
def test_one_layer_whose_weights_are_a_formula_solves_one_step(N):
    batch = make_batch(0, torch.arange(512), N, 1, 4)
    losses = []
    for scale in (25, 50, 100):
        with torch.no_grad():
            predictions, (pattern,) = theory.constructed(N, scale)(
                batch.inputs, return_patterns=True
            )
        losses.append((predictions - batch.targets).square().mean().item())
    assert losses[0] / 8 > losses[1] and losses[1] / 8 > losses[2] and losses[2] < 2e-5

    # heads 0 to N-1 read a fixed token, and the last head the own 1a
    query, key = batch.positions[:, :, 0], batch.positions[:, :, 1]
    read = pattern[torch.arange(512)[:, None], :, query]  # (512, N, heads, T)
    assert all((read[:, :, i, 2 * i + 1] > 0.999).all() for i in range(N))
    assert (read[:, :, N].gather(2, key[:, :, None]) > 0.9).all()


def test_a_token_is_told_apart_from_its_rivals():
    """Token 0 shares piece 0 with token 1 and its rival 2; only piece 1 is token 1's alone."""
    known = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    allowed, rivals = torch.ones(3, 3, dtype=torch.bool), [(1, 2), (2, 1)]
    assert theory.attend(known, allowed, rivals)[0].tolist() == [True, False, False]
    assert theory.attend(known, allowed)[0].tolist() == [True, True, True]
    known[0, 1] = True
    assert theory.attend(known, allowed, rivals)[0].tolist() == [True, True, False]


def test_minimal_circuits_reach_what_the_laws_allow():
    """At every depth all symbols that it allows and no more, only along what the mask shows."""
    for D, layers, causal in itertools.product((1, 2, 3, 5, 8, 17), range(1, 6), (True, False)):
        paths, law = theory.minimal_circuit(D, layers, causal), theory.DEPTH_LAWS[causal]
        task = chain(1, D)
        reached = symbols_reached(task, paths, layers).tolist()
        assert reached == [law(k) <= layers for k in range(1, D + 1)], (D, layers, causal)
        allowed = theory.may_attend(task, causal)
        assert all(allowed[path.reader.role, path.read.role] for path in paths)
        assert {head for _, head, *_ in paths} == ({0} if causal else {0, 1})


def test_the_table_of_depths():
    code, out, _ = run_main(theory)
    rows = [line.split() for line in out.splitlines()[1:]]
    assert code == 0 and [row[0] for row in rows] == [str(D) for D in range(1, 21)]
    assert rows[4] == "5 3 3 3 4 4 3 3".split()  # the paper's bound, no mask, a mask, width
