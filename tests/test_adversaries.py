"""Models whose attention and whose work are not the same, with a known answer: relays, work shared
by slot, parallel heads, a head that carries nothing, a solver that needs no attention; and models
that are held by their means alone."""

import functools

from parts import runs, search
from parts.circuit import Path, mean_attention, path_name, paths_in, paths_of

import pytest
import torch

import ablate
from data import chain, held_out
from tests.planted import Tokens, attending, settings


# ---- models that solve the task as no arrow says, or as several say


CHAIN = chain(4, 1)  # the roles are q, 1a, 1b


def knows_its_a(holds, positions):
    """(B, N) whether each 1b holds x_0 of its chain, so that it can be found by it."""
    sequence = torch.arange(len(positions))[:, None]
    return holds[sequence, positions[:, :, 2], torch.arange(4), 0].float()


def to_the_token_before(task):
    return torch.eye(task.T)[(torch.arange(task.T) - 1).clamp(min=0)]


def certified(own, layers, heads=1, mute=()):
    model = Tokens(CHAIN, own, layers, heads, mute)
    return ablate.find_circuit(model, settings(1, layers, heads), sequences=64)


def names(report):
    return [path_name(path, CHAIN) for path in paths_in(report, CHAIN)]


def test_a_relay_is_no_arrow(capsys):
    """The query takes x_1 from the token after 1b, which took it from there: it never attends to 1a
    or 1b, and that one-hot maps to 1b would do as well proves nothing."""

    def own(head, holds, positions):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        found = knows_its_a(holds, positions)
        return attending(CHAIN, positions, 0, positions[:, :, 2] + 1, found)

    report = certified(own, layers=2)
    assert report["grade"] is None and "heads" not in report
    (relay,) = report["relays"]
    assert relay.pop("attention") > 0.9
    assert relay == dict(layer=2, head=1, source="q", target="1b")


def test_a_relay_beside_an_arrow_is_named(capsys):
    """In half of the slots the query goes to 1b itself, with 0.8 of its attention, in the others
    with 0.6 to the token after it. The other way round it is the relay that is used."""

    def own(head, holds, positions, near=0.8, far=0.6):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        found, by_way = knows_its_a(holds, positions), positions[:, :, 2] // 2 >= 2
        share = found * torch.where(by_way, far, near)
        return attending(CHAIN, positions, 0, positions[:, :, 2] + by_way, share)

    report = certified(own, layers=2)
    assert names(report) == ["layer 1 head 1, 1b -> 1a", "layer 2 head 1, q -> 1b"]
    arrow = report["removals"][1]
    assert abs(arrow["attention"] - 0.4) < 0.05 and arrow["alive"]["mse"] > 0.8
    (relay,) = arrow["relays"]
    assert relay["behind_target"] == 1 and abs(relay["attention"] - 0.3) < 0.05

    report = certified(functools.partial(own, near=0.6, far=0.8), layers=2)
    assert report["grade"] is None and "half of the attention" in report["no_circuit"]


def test_heads_that_share_work_by_slot_are_all_named(capsys):
    """Each of four layers serves one slot: together, not alone, they attend as the arrow says."""

    def own(head, holds, positions):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        found = knows_its_a(holds, positions) * (positions[:, :, 2] // 2 == head[0] - 1)
        return attending(CHAIN, positions, 0, positions[:, :, 2], found)

    report = certified(own, layers=5)
    assert report["grade"] == "literal" and names(report)[0] == "layer 1 head 1, 1b -> 1a"
    shared = report["removals"][1:]
    assert len(shared) in (2, 3) and all(path["in_all_heads"] >= 0.5 for path in shared)
    for path in shared:
        assert abs(path["attention"] - 0.25) < 0.05 and abs(path["alive"]["mse"] - 0.25) < 0.1
        assert path["alive_everywhere"]["mse"] > 0.8
        assert path["predicted"] == path["destroyed"] == ["x_1"]


def test_heads_that_do_the_same_work_do_not_add_up(capsys):
    """In one slot of four the query goes to 1b, in layer 2, 3 and 4 alike; in the others it takes
    x_1 from the token after. The same work counted three times is no half of all work."""

    def own(head, holds, positions):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        found, near = knows_its_a(holds, positions), positions[:, :, 2] // 2 == 0
        share = found * (near | (head[0] == 1))
        return attending(CHAIN, positions, 0, positions[:, :, 2] + ~near, share)

    report = certified(own, layers=4)
    assert report["grade"] is None and "half of the attention" in report["no_circuit"]


def test_one_of_two_parallel_heads_is_enough(capsys):
    def own(head, holds, positions):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        found = knows_its_a(holds, positions)
        return attending(CHAIN, positions, 0, positions[:, :, 2], found)

    report = certified(own, layers=2, heads=2)
    assert report["grade"] == "literal" and report["paths"] == 2
    for path in report["removals"]:  # the other head makes up for the loss of one, not of both
        assert abs(path["alive"]["mse"]) < 0.01 and path["alive_everywhere"]["mse"] > 0.8


def test_a_path_is_named_in_the_head_that_the_model_misses_most():
    """If the circuit does as well with it there; else it stays where it was found."""
    first, second, third = (Path(layer, 0, 0, 2) for layer in (1, 2, 3))
    costs = {first: 0.1, second: 0.5, third: 0.9}
    circuit = {(1, 0): (first,), (2, 0): "uniform", (3, 0): "uniform"}

    def loss(circuit, keep=False):
        return 0.04 if third in paths_of(circuit) else 0.01

    def sound(circuit):
        return True

    settled = search.settle(loss, sound, circuit, costs, ["uniform"], 0.05)
    assert paths_of(settled) == [second]


def test_a_head_that_attends_and_carries_nothing_is_not_named(capsys):
    def own(head, holds, positions):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        found = knows_its_a(holds, positions)
        return attending(CHAIN, positions, 0, positions[:, :, 2], found)

    report = certified(own, layers=3, mute=[(1, 0)])
    assert names(report) == ["layer 1 head 1, 1b -> 1a", "layer 3 head 1, q -> 1b"]


def test_a_model_that_needs_no_attention_has_no_circuit(capsys):
    """It solves the task by another route, and every circuit would do, the wrong ones too."""

    class Solver(Tokens):
        def __call__(self, x, patterns=None, return_patterns=False):
            out = super().__call__(x, None, return_patterns)
            return out

    def own(head, holds, positions):
        if head[0] == 0:
            return to_the_token_before(CHAIN)
        return attending(CHAIN, positions, 0, positions[:, :, 2], knows_its_a(holds, positions))

    model, config = Solver(CHAIN, own, 2), settings(1, 2)
    report = ablate.find_circuit(model, config, sequences=64)
    assert report["grade"] is None

    # and were it found, the controls would refuse it
    batch = runs.sequences(config, held_out("validation", 16))
    patterns = search.own_patterns(model, config, batch.inputs)
    means = mean_attention(patterns, CHAIN, batch.positions)
    circuit = {(0, 0): (Path(0, 0, 2, 1),), (1, 0): (Path(1, 0, 0, 2),)}
    certificate = ablate.certify(model, config, means, circuit, "zero", batch, 0)
    assert certificate["controls"]["complement"] is None  # so small a task leaves nothing for it
    against = ablate.objections(certificate, 0.05)
    for name in ("random", "no_path"):
        assert any(f"a control passes: {name}" in text for text in against)
    assert any("can be taken from the model at no cost" in text for text in against)


# ---- models that only their own means can hold


class Watched(Tokens):
    """Says 0 unless in this layer these tokens, (B, N), give token 0 this share."""

    def __init__(self, own, layer, tokens, share):
        super().__init__(CHAIN, own, layers=2)
        self.layer, self.tokens, self.share = layer, tokens, share

    def __call__(self, x, patterns=None, return_patterns=False):
        predictions, seen = super().__call__(x, patterns, True)
        rows = seen[self.layer][:, 0].expand(len(x), -1, -1)
        given = rows[:, :, 0].gather(1, self.tokens.expand(len(x), -1))
        right = ((given - self.share).abs() < 0.1).all(1)
        predictions = predictions * right[:, None, None]
        return (predictions, seen) if return_patterns else predictions


QUERIES = torch.arange(CHAIN.T - 4, CHAIN.T)[None]


def finds_1b(head, holds, positions, first=0.0, second=0.0):
    """In layer 1 every token attends to the one before, in layer 2 the query to 1b; of it queries
    give token 0 these shares of their attention."""
    if head[0] == 0:
        share, pattern = first, to_the_token_before(CHAIN).repeat(len(positions), 1, 1)
        pattern[:, QUERIES[0]] *= 1 - share
    else:
        share, found = second, knows_its_a(holds, positions)
        pattern = attending(CHAIN, positions, 0, positions[:, :, 2], found * (1 - share))
        pattern[:, QUERIES[0], QUERIES[0]] -= share
    pattern[:, QUERIES[0], 0] += share
    return pattern


@pytest.mark.parametrize("grade, layer, share", [("positional", 0, 0.7), ("by slot", 1, 0.3)])
def test_a_model_that_needs_more_than_its_paths_is_graded_so(grade, layer, share, capsys):
    """Tokens without a path must attend by position; or one with a path must not be one-hot."""
    shares = dict(first=share) if layer == 0 else dict(second=share)
    model = Watched(functools.partial(finds_1b, **shares), layer, QUERIES, share)
    report = ablate.find_circuit(model, settings(1, 2), sequences=64)
    assert report["grade"] == grade, report
    assert names(report) == ["layer 1 head 1, 1b -> 1a", "layer 2 head 1, q -> 1b"]
