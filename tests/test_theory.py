"""Section 5: the information flow against sets, the depth laws against it, minimal circuits."""

import itertools
import math

from parts import theory
from parts.circuit import one_hot
from parts.theory import Path, Place, frozen_paths

import pytest
import torch

import train
from data import chain, make_batch
from studies import waiting  # noqa: F401, registers circuits
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


def layers_needed(task, positions, causal):
    """The assumptions of Section 5 spelled out token by token, with all chains and the real order
    of tokens: the layers after which the first chain's query holds its last symbol."""
    known = {}
    for n, tokens in enumerate(positions.tolist()):
        for role, token in zip(task.roles, tokens, strict=True):
            pair = role.block, token - role.place  # where it starts
            known[token] = {("symbol", n, role.symbol), ("pair", *pair)}
    layers, query = 0, positions[0, 0].item()
    while ("symbol", 0, task.symbols - 1) not in known[query]:
        after = {}
        for token, mine in known.items():
            seen = [known[at] for at in known if at <= token or not causal]
            after[token] = set.union(*(other for other in seen if other & mine))
        known, layers = after, layers + 1
    return layers


@pytest.mark.parametrize("causal", [True, False])
def test_depth_laws_against_sets_on_a_real_sequence(causal):
    for D in (1, 2, 3, 4, 5, 8):
        task, positions = chain(2, D), make_batch(D, torch.arange(1), 2, D, 2).positions[0]
        assert layers_needed(task, positions, causal) == theory.least_layers(task, causal)[-1]
    for task in (TRIPLES, MIXED):
        positions = sequences_of(task, 1).positions[0]
        assert layers_needed(task, positions, causal) == theory.least_layers(task, causal)[-1]


def test_information_of_tasks_made_by_hand():
    """What each role shows, x_0, x_1, x_2; and what it may see."""
    assert TRIPLES.shown.int().tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    seen = theory.may_attend(TRIPLES).int()
    assert seen.tolist() == [[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert theory.may_attend(TRIPLES, causal=False).all()


def test_minimal_circuits_reach_what_the_laws_allow():
    """At every depth all symbols that it allows and no more, only along what the mask shows."""
    for D, layers, causal in itertools.product((1, 2, 3, 5, 8, 17), range(1, 6), (True, False)):
        paths, law = theory.minimal_circuit(D, layers, causal), theory.DEPTH_LAWS[causal]
        task = chain(1, D)
        reached = symbols_reached(task, paths, layers).tolist()
        assert reached == [law(k) <= layers for k in range(1, D + 1)], (D, layers, causal)
        allowed = theory.may_attend(task, causal)
        assert all(allowed[path.source.role, path.target.role] for path in paths)
        assert {head for _, head, *_ in paths} == ({0} if causal else {0, 1})


def test_symbols_are_reached_along_the_paths_alone():
    """The paper's circuit of three steps: without a path, what lies behind it is lost."""
    task, q, b1, b2, b3 = chain(4, 3), 0, 2, 4, 6
    pairs = [Path(0, 0, Place(b), Place(b - 1)) for b in (b1, b2, b3)]
    chained = [Path(k, 0, Place(q), Place(b)) for k, b in enumerate((b1, b2, b3), 1)]
    assert symbols_reached(task, pairs + chained, 4).tolist() == [True, True, True]
    for k in range(3):
        without = [path for path in pairs + chained if path != chained[k]]
        reached = symbols_reached(task, without, 4).tolist()
        assert reached == [i < k for i in range(3)]
    assert not symbols_reached(task, chained, 4).any()  # no b knows its a: no symbol shared


def test_one_hot_attention_is_where_the_roles_stand():
    task, batch = chain(4, 3), make_batch(0, torch.arange(8))
    paths = [Path(1, 0, Place(0), Place(2)), Path(1, 0, Place(4), Place(3))]
    pattern = one_hot(paths, task, batch.positions)
    for b, n in itertools.product(range(8), range(4)):
        tokens = batch.positions[b, n].tolist()
        assert pattern[b, tokens[0], tokens[2]] == 1 and pattern[b, tokens[4], tokens[3]] == 1
    assert pattern.sum() == 2 * 4 * 8


def test_the_table_of_depths():
    code, out, _ = run_main(theory)
    rows = [line.split() for line in out.splitlines()[2:]]
    assert code == 0 and [row[0] for row in rows] == [str(D) for D in range(1, 21)]
    assert rows[4] == "5 3 3 3 4 4".split()  # the paper's bound, without a mask, with one


def test_parts_of_a_circuit_are_held_each_alone():
    """The induction head is 1b -> 1a with q -> 1b, whatever else a minimal circuit has."""
    roles = chain(4, 3).names

    def held(part):
        flags = train.parse_flags(f"--layers 4 --circuit {part}".split())
        return {
            (path.layer, *(roles[end.role] for end in path[2:])) for path in frozen_paths(flags)
        }

    pairs = {(0, f"{k}b", f"{k}a") for k in (1, 2, 3)}
    assert held("previous") == pairs and held("query") == {(1, "q", "1b")}
    assert held("induction") == pairs | {(1, "q", "1b")} < held("minimal")
