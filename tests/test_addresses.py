"""Studies of addresses, on models whose mechanism is known: two by place, others by content."""

import train
from data import Task
from extras.studies import addresses
from tests.common import TINY, output_of
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


def assert_follows(errors):
    """The answers are the symbols of the other chain."""
    assert max(errors.values()) < 0.05


def test_a_model_by_place_passes_on_places():
    """From where a pair is found on, the answer follows."""
    how = addresses.measure(find_and_copy, Task(N=2, D=2))
    assert how["own"] == ["L0H0 1b", "L0H0 q"] and how["units"] == 9
    asked = {role: [*swap["written"]] for role, swap in how["swaps"].items()}
    assert asked == {"q": ["x_1", "x_2"], "1b": ["x_2"]}
    for swap in how["swaps"].values():
        assert swap["heads"] == ["L0H0"] and 440 < swap["n"] < 584  # half of 1024
        assert_follows(swap["pattern"])
        assert_follows(swap["written"])
        assert addresses.passes_on(swap, Task(N=2, D=2)) == "a place"


def test_a_model_of_one_layer_by_place():
    how = addresses.measure(address_and_values, Task(D=1))
    assert how["own"] == ["L0H0 q"] and how["units"] == 5
    assert addresses.passes_on(how["swaps"]["q"], Task(D=1)) == "a place"


@pytest.mark.parametrize("D, heads, texts", CIRCUITS)
def test_a_model_by_content_passes_on_symbols(D, heads, texts):
    """Only its pattern is followed; what it writes in another sequence is not."""
    model = Planted(Task(D=D), texts, 4, heads)
    how = addresses.measure(model, model.task, 200)

    # reads within a pair, or of the token before, are the same in every sequence
    paths = [path for path in model.paths if path.reader[0] != path.read[0]]
    finds = {f"L{path.layer}H{path.head} {path.reader}" for path in paths}
    assert {*how["own"]} == finds and how["swaps"]
    for role, swap in how["swaps"].items():
        name = f"x_{model.task.roles[role] + 1}"
        assert swap["pattern"][name] < 0.05 and swap["written"][name] > 1
        assert addresses.passes_on(swap, model.task) != "a place"


def test_the_command_keeps_the_rows_of_other_runs(tmp_path):
    for name in "one", "two", "one":
        if not (tmp_path / name).exists():
            output_of(train, *TINY, "--out", tmp_path / name)
        output_of(addresses, tmp_path / name, "--out", tmp_path)
    one, two = train.read_file(tmp_path / "addresses.jsonl")
    assert one["run"].endswith("one") and two["run"].endswith("two") and one["swaps"] == {}
