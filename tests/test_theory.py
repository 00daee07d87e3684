"""Section 5: the information flow against sets, the depth laws against it, minimal circuits."""

import itertools
import math

import pytest
import torch

from data import chain, make_batch
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


def layers_by_sets(task, positions, causal):
    """The assumptions of Section 5 spelled out token by token, with all chains and the real order
    of tokens: the layers after which the first chain's query holds its last symbol."""
    known = {}
    for n, tokens in enumerate(positions.tolist()):
        for role, token in zip(task.roles, tokens, strict=True):
            slot = role.block, token - role.place  # where it starts
            known[token] = {("symbol", n, role.symbol), ("slot", *slot)}
    layers, query = 0, positions[0, 0].item()
    while ("symbol", 0, task.symbols - 1) not in known[query]:
        after = {}
        for token, pieces in known.items():
            visible = [known[other] for other in known if other <= token or not causal]
            after[token] = set.union(*(other for other in visible if other & pieces))
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
    assert rows[4] == "5 3 3 3 4 4".split()  # the paper's bound, without a mask, with one
