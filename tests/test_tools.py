"""EAP-IG and TransformerLens, which others use, beside ablate.py and model.py."""

import itertools

import train
from ablate import RESAMPLE, PatchedModel, Path, record_reads
from data import Task
from extras.studies import edges
from extras.studies.rows import name_of
from tests.adversaries import attend, find
from tests.common import random_model
from tests.planted import heads_of, paths_from

import pytest
import torch


# ---- EAP-IG


def paths_of(task, heads, ends):
    """All paths between these ends, in all heads."""
    pairs = itertools.product(heads, itertools.product(ends, ends))
    return [Path(*head, *pair) for head, pair in pairs if "*" not in pair[0]]


def test_attribution_is_the_slope_along_the_way_to_other_sequences():
    """Of a transformer: by finite differences, at five inputs on the way."""
    model, task, _ = random_model("--N", "3")
    clean, others = task.draw("search", 8), task.draw("corrupted", 5)
    patched = PatchedModel(model, task, clean, others)
    paths = paths_of(task, model.heads, ["q", "1a", "1b", "1b+1", "1a*"])
    reads, outputs = edges.effects(patched, paths)

    # what replacing adds to what a head writes: along a path, and at a role
    changes, before = {}, record_reads(model, clean.inputs)
    for path in paths:
        write = patched.patch(path[:2], [path], RESAMPLE, keep_them=False)
        pattern, values = before[path[:2]]
        changes[path] = write(pattern, values) - pattern @ values
    for head in model.heads:
        reads_of_head = before[head], patched.corrupted_reads[head]
        was, new = (pattern @ values for pattern, values in reads_of_head)
        for number, role in enumerate(task.roles):
            readers = torch.zeros(8, task.T, 1)
            for b, n in itertools.product(range(8), range(3)):
                readers[b, clean.places[b, n, number]] = 1
            changes[(*head, role)] = readers * (new[patched.resampled] - was)

    @torch.no_grad()
    def loss(inputs, head, change):
        written = model(inputs, heads={head: lambda pattern, values: pattern @ values + change})
        return task.losses(written, clean).mean().item()

    effects = reads | outputs
    assert effects.keys() == changes.keys()
    for key, change in changes.items():
        head, small, slopes = key[:2], 0.02 * change, []
        for share in 0, 0.2, 0.4, 0.6, 0.8:
            inputs = (1 - share) * clean.inputs + share * others.inputs[patched.resampled]
            slopes.append((loss(inputs, head, small) - loss(inputs, head, -small)) / 0.04)
        assert effects[key] == pytest.approx(sum(slopes) / 5, rel=0.02, abs=2e-4), key
    for found in reads, outputs:
        assert max(map(abs, found.values())) > 0.01


def decoyed(x, heads):
    """A circuit 1b -> 1a, q -> 1b, and two heads that read much of the own chain, of which the
    answer has next to nothing."""
    symbols, _, found = find(x, heads)
    answer = attend(heads, (1, 0), found, symbols)
    loud = attend(heads, (1, 1), found.roll(-1, -1), 100 * symbols)  # q -> 1a
    louder = attend(heads, (1, 2), found, 100 * symbols)
    return (answer + 1e-5 * (loud + louder))[:, 8:]


decoyed.heads = [*heads_of(1, 2), *((1, head) for head in range(3))]


def test_a_planted_circuit_ranks_first_and_is_all_that_is_needed(tmp_path, monkeypatch):
    """The table of a run; a run that is measured again has one row."""
    task = Task(N=4, D=1)
    truth = paths_from("0 1b 1a", "1 q 1b")
    absent = Path(1, 0, "1b+1", "1b*")  # is in no ranking
    paths = [path._asdict() for path in (*truth, absent)]
    monkeypatch.setattr(train, "load", lambda run: (decoyed, task, None))
    run = dict(folder="somewhere", name="mine", group="out", report=dict(paths=paths))
    others = [dict(run, report={}), dict(run, folder=None)]  # without a circuit, without weights
    train.write_file(tmp_path / "edges.jsonl", [dict(run="kept")])
    for _ in range(2):
        printed = edges.write([run, *others], tmp_path)
    kept, row = train.read_file(tmp_path / "edges.jsonl")
    assert kept == dict(run="kept")
    assert row["run"] == name_of(run) == "out/mine" and row["best"] == 2
    assert row["paths"][str(absent)] == [None, None]
    for path in truth:
        assert {*row["paths"][str(path)]} < {1, 2}, row
    assert row["of"][0] >= 4 and row["of"][1] == 15  # of five heads at three roles
    ranks = [f"1-2, not ranked of {total}" for total in row["of"]]
    assert printed.splitlines()[-1] == f"| out/mine | 3 | {ranks[0]} | {ranks[1]} | 2 |"


# ---- TransformerLens


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--heads 3 --head-size 4 --no-mlp --no-causal",
        "--heads 4 --positions rope",
        "--task extras.lookup:Lookup --width 32",  # as wide as its tokens
    ],
)
def test_a_model_is_the_same_in_transformerlens(flags, tmp_path):
    """Predictions, attention, a head that is replaced, and a start in the middle."""
    pytest.importorskip("transformer_lens", reason="extras/requirements.txt says how to install it")
    from extras.lens import to_lens

    run = tmp_path / "run"
    words = ["--layers", "3", "--dtype", "auto", *flags.split(), "--out", str(run)]
    model, _, flags = random_model(*words)
    train.open_run(flags)
    train.write_file(run / "model.pt", model.state_dict())
    model.dtype = torch.float32

    lens, task = to_lens(run)
    clean, others = task.draw("validation", 6, 0), task.draw("validation", 6, 1)
    with torch.no_grad():
        ours, patterns = model(clean.inputs, return_patterns=True)
        theirs, cache = lens.run_with_cache(clean.inputs)
        torch.testing.assert_close(theirs[:, -task.N :], ours, atol=1e-4, rtol=1e-4)
        for layer, pattern in enumerate(patterns):
            torch.testing.assert_close(cache["pattern", layer], pattern, atol=1e-5, rtol=1e-4)

        # the last head of layer 1 writes what it does in other sequences
        last = flags.heads - 1
        patched = PatchedModel(model, task, clean, others)
        pattern, values = patched.corrupted_reads[1, last]
        _, there = lens.run_with_cache(others.inputs)

        def replace(z, hook):  # (B, T, heads, head_size)
            z[:, :, last] = there["z", 1][:, :, last]
            return z

        hooks = [("blocks.1.attn.hook_z", replace)]
        theirs = lens.run_with_hooks(clean.inputs, fwd_hooks=hooks)[:, -task.N :]
        expected = patched.losses({(1, last): lambda *_: pattern @ values})
        torch.testing.assert_close(task.losses(theirs, clean), expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(expected, patched.baseline, atol=1e-2)

        # from the residual stream before layer 2
        again = lens(cache["resid_pre", 2], start_at_layer=2)[:, -task.N :]
        torch.testing.assert_close(again, ours, atol=1e-4, rtol=1e-4)
