"""Studies of addresses, on models whose mechanism is known: two by place, others by content."""

import train
from data import Task
from extras.studies import addresses, depth
from tests.common import TINY, assert_refused, output_of
from tests.planted import CIRCUITS, Planted, address_and_values

import pytest
import torch


def find_and_copy(x, heads=None):
    """A model of two layers by place that solves N=2, D=2, whose tokens are two pairs 2a 2b, two
    pairs 1a 1b, and q q. L0H0 tells each query where its own 1b stands, and each 1b where its own
    2b stands. Four heads bring the four b to the queries, each from its own place, with what that
    token has been told. Of these x_1 and x_2 are picked by place."""
    heads, B, ends = heads or {}, len(x), [1, 3, 5, 7]

    # layer 0: queries read 1a, and 1b read 2a, by the same symbol; an a brings the place after it
    pattern = torch.eye(10).repeat(B, 1, 1)
    for readers, keys in (slice(8, 10), slice(4, 8, 2)), (slice(5, 8, 2), slice(0, 4, 2)):
        distance = torch.cdist(x[:, readers], x[:, keys])
        pattern[:, readers] = 0
        pattern[:, readers, keys] = (-50 * distance.square()).softmax(-1)
    after = torch.eye(10).roll(1, 1) * torch.tensor([1, 0] * 4 + [0, 0])[:, None]
    told = heads.get((0, 0), torch.matmul)(pattern, after.expand(B, 10, 10))

    # layer 1
    held, brought = torch.cat([x, told], -1), []
    for head, end in enumerate(ends):
        pattern = torch.eye(10)[end].expand(B, 10, 10)
        brought.append(heads.get((1, head), torch.matmul)(pattern, held))
    brought = torch.stack(brought, 2)[:, 8:]  # (B, N, ends, 4 + 10)
    first = (told[:, 8:, ends, None] * brought).sum(2)
    second = (first[..., 4:][..., ends, None] * brought).sum(2)
    return torch.cat([first[..., :4], second[..., :4]], -1)


find_and_copy.heads = [(0, 0), *((1, head) for head in range(4))]


def assert_follows(pair):
    """The answers are the other symbols, not the own."""
    own, other = pair
    assert own > 1.5 and other < 0.05


def test_a_model_by_place_is_found_to_pass_on_places():
    """And to pick values by place; from where a pair is found on, the answer follows."""
    how = addresses.measure(find_and_copy, Task(N=2, D=2))
    assert how["own"] == ["L0H0 1b", "L0H0 q"] and how["units"] == 9
    assert max(how["full"].values()) < 0.02 and max(how["mean"].values()) < 0.02
    assert {role: [*swap["written"]] for role, swap in how["swaps"].items()} == {
        "q": ["x_1", "x_2"],
        "1b": ["x_2"],
    }
    for swap in how["swaps"].values():
        assert swap["heads"] == ["L0H0"] and 440 < swap["n"] < 584  # half of 1024
        for kind in addresses.SWAPS:
            [*map(assert_follows, swap[kind].values())]
        assert addresses.passes_on(swap, how) == "a place"
    assert_follows(how["exchange"])


def test_a_model_of_one_layer_by_place():
    how = addresses.measure(address_and_values, Task(D=1))
    assert how["own"] == ["L0H0 q"] and how["units"] == 5
    assert addresses.passes_on(how["swaps"]["q"], how) == "a place"
    assert_follows(how["exchange"])


def test_interventions_find_the_address_of_one_layer(monkeypatch):
    """On a model whose mechanism is known: an address of another sequence fetches what stands
    there."""
    monkeypatch.setattr(train, "load", lambda run: (address_and_values, Task(D=1), None))
    how = depth.mechanism(None)
    assert how["address"] == ["H0"] and how["full"] < 0.01
    there, own = how["swap"]
    assert there < 0.01 and own > 1


@pytest.mark.parametrize("D, heads, texts", CIRCUITS)
def test_a_model_by_content_passes_on_symbols(D, heads, texts):
    """Only its pattern is followed; what it writes in another sequence is not, nor are values that
    stand elsewhere."""
    model = Planted(Task(D=D), texts, 4, heads)
    how = addresses.measure(model, model.task, 200)

    # reads within a pair, or of the token before, are the same in every sequence
    paths = [path for path in model.paths if path.reader[0] != path.read[0]]
    finds = {f"L{path.layer}H{path.head} {path.reader}" for path in paths}
    assert {*how["own"]} == finds
    for role, swap in how["swaps"].items():
        name = f"x_{model.task.roles[role] + 1}"
        assert_follows(swap["pattern"][name])
        assert swap["written"][name][1] > 1 and addresses.passes_on(swap, how) != "a place"
    assert how["swaps"] and how["exchange"][0] < 0.05 < 1.5 < how["exchange"][1]


def test_a_run_that_shows_nothing_has_one_line(tmp_path):
    """Whether it is not solved, has no such chains, or no head to spare."""
    runs = {"unsolved": "", "conditional": "--task extras.studies.tables:Conditional --D 3"}
    runs["one_head"] = "--layers 1 --heads 1"
    for name, flags in runs.items():
        output_of(train, *TINY, *flags.split(), "--out", tmp_path / name)
    printed = output_of(addresses, *(tmp_path / name for name in runs), "--out", tmp_path)
    *_, unsolved, conditional, one_head = printed.splitlines()
    assert "no chains" in conditional and "no head to spare" in one_head
    [row] = train.read_file(tmp_path / "addresses.jsonl")
    assert row["run"] in unsolved and row["swaps"] == {} and "exchange" not in row
    assert_refused(addresses, tmp_path / "none", says="is no run directory")
