"""Section 5: the information flow against sets, the depth laws against it, minimal circuits."""

import itertools
import math

import train
from data import chain, conditional, make_batch
from extras.studies import depth, theory
from extras.studies.places import shuffled
from tests.other_tasks import MIXED, TRIPLES, sequences_of, spans

import pytest
import torch


def test_depth_laws_against_the_simulation():
    for D in range(1, 65):
        task = chain(1, D)
        unmasked, causal = theory.least_layers(task, causal=False), theory.least_layers(task)
        assert unmasked[-1] == theory.unmasked_depth(D) == math.ceil(math.log(4 * D + 1, 3) - 1e-9)
        assert causal == [math.floor(math.log2(k)) + 2 for k in range(1, D + 1)]
        assert causal[-1] == theory.causal_depth(D)
        assert theory.paper_bound(D) == math.ceil(math.log(2 * D, 3) - 1e-9) <= unmasked[-1]
        wide = theory.least_layers(task, wide=True)
        assert wide == [layers - 1 for layers in causal] and wide[-1] == theory.wide_depth(D)


def layers_by_sets(task, batch, causal=True, wide=False):
    """The layers after which the first query holds each target symbol, token by token (Section 5).
    With distractors no other token of its place may hold all that is shared. wide: by slots."""
    shown = [tuple(symbol) for symbol in batch.inputs[0, :, :4].tolist()]
    answers = [tuple(symbol.tolist()) for symbol in batch.targets[0, 0].split(4)]
    known, slot_of, place_of = {}, {}, {}
    for number, (start, size, slots) in enumerate(spans(task)):
        for slot, place in itertools.product(range(slots), range(size)):
            token = start + slot * size + place
            slot_of[token], place_of[token] = (number, slot), (number, place)
            known[token] = {shown[token], slot_of[token]}
    query, layers = task.T - task.N, {}
    for layer in range(1, 9):
        after = {token: set(pieces) for token, pieces in known.items()}
        for token, read in itertools.product(known, known):
            shared = known[token] & known[read]
            rivals = {other for other in known if place_of[other] == place_of[read]} - {read}
            rivals = rivals if task.distractors else ()
            unique = shared and not any(shared <= known[other] for other in rivals)
            if unique and (read <= token or not causal):
                slot = [other for other in known if slot_of[other] == slot_of[read]]
                visible = [other for other in slot if other <= token or not causal]
                after[token] = after[token].union(*map(known.get, visible if wide else [read]))
        known = after
        for answer in {*answers} & known[query]:
            layers.setdefault(answer, layer)
    return [layers[answer] for answer in answers]


@pytest.mark.parametrize("causal", [True, False])
def test_least_layers_against_sets_on_a_real_sequence(causal):
    chains = [chain(2, D) for D in (1, 2, 3, 4, 5, 8)]
    for task in [*chains, TRIPLES, MIXED, conditional(2), conditional(3)]:
        batch = sequences_of(task, 1)
        assert layers_by_sets(task, batch, causal) == theory.least_layers(task, causal), task
        if task in chains and causal:
            wide = theory.least_layers(task, wide=True)
            assert layers_by_sets(task, batch, wide=True) == wide
    assert theory.least_layers(conditional(4), causal) == [2, 2, 3]


def test_any_reading_order_against_sets_on_shuffled_sequences():
    """For D = 4 all 24 orders of the steps occur, and both ways of counting agree in each."""
    task, seen = shuffled(2, 4), {}
    for number in range(200):
        batch = make_batch(0, torch.tensor([number]), 2, 4, task="shuffled")
        first = batch.positions[0, batch.positions[0, :, 0].argmin()]  # of the first query's chain
        order = tuple(1 + i for i in first[1::2].argsort().tolist())
        if order not in seen:
            seen[order] = layers_by_sets(task, batch)
            assert seen[order] == theory.least_layers(theory.in_order(order))
    assert len(seen) == 24
    last = [layers[-1] for layers in seen.values()]
    assert theory.shuffled_depths(4)[-1] == pytest.approx({k: last.count(k) / 24 for k in (3, 4)})


def test_minimal_circuits_reach_what_the_laws_allow():
    """At every depth all symbols that it allows and no more, only along what the mask shows."""
    for D, layers, causal in itertools.product((1, 2, 3, 5, 8, 17), range(1, 6), (True, False)):
        paths = theory.minimal_circuit(D, layers, causal)
        law = theory.causal_depth if causal else theory.unmasked_depth
        task, attended = chain(1, D), torch.zeros(layers, 2 * D + 1, 2 * D + 1, dtype=torch.bool)
        for layer, head, reader, read in paths:
            attended[layer, task.names.index(reader), task.names.index(read)] = True
            assert head in ((0,) if causal else (0, 1))
        assert not (attended & ~theory.may_attend(task, causal)).any()
        *_, reached = theory.known_to_query(task, attended)
        expected = [law(k) <= layers for k in range(1, D + 1)]
        assert reached.tolist() == expected, (D, layers, causal)


def test_interventions_find_the_address_and_the_memory(tmp_path):
    """On a model whose mechanism is known, theory.constructed(4)."""
    flags = "--layers 1 --heads 5 --head-size 16 --width 72 --D 1 --dtype float32 --seed 7"
    train.open_run(train.parse_flags([*flags.split(), "--device", "cpu", "--out", str(tmp_path)]))
    train.write_file(tmp_path / "model.pt", theory.constructed(4).state_dict())
    how = depth.mechanism(tmp_path)

    # what each head does, and reads
    kinds = [depth.kind_of(how, f"L0H{head}") for head in range(5)]
    assert kinds == ["place"] * 4 + ["content"] and how["address"] == ["L0H4"]
    assert depth.count(how, "place") == 4 and depth.count(how, "place", 1) == 0
    assert [how["reads"][f"L0H{i}"].index(1.0) for i in range(4)] == [1, 3, 5, 7]
    assert how["own"]["L0H4"] > 0.99

    # an address of another sequence fetches the value of its slot, all else that sequence's value
    for swap in ("swap", "swap_rest"):
        new, old = how[swap]
        assert new < 0.01 and 1.8 < old < 2.2
    assert max(how["full"] + how["by_slot"]) < 1e-3
    assert abs(how["fixed_values"]) < 1e-3 < 0.7 < how["fixed_keys"]
