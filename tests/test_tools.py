"""TransformerLens, which others use, beside model.py."""

import train
from ablate import PatchedModel, record_reads
from tests.common import random_model

import pytest
import torch


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
    words = ["--layers", "3", *flags.split(), "--out", str(run)]
    model, _, flags = random_model(*words)
    train.open_run(flags)
    train.write_file(run / "model.pt", model.state_dict())

    lens, task = to_lens(run)
    clean = task.draw("validation", 6)
    with torch.no_grad():
        ours, reads = model(clean.inputs), record_reads(model, clean.inputs)
        theirs, cache = lens.run_with_cache(clean.inputs)
        torch.testing.assert_close(theirs[:, -task.N :], ours, atol=1e-4, rtol=1e-4)
        for (layer, head), (pattern, _) in reads.items():
            found = cache["pattern", layer][:, head]
            torch.testing.assert_close(found, pattern, atol=1e-5, rtol=1e-4)

        # the last head of layer 1 writes what it does in other sequences
        last = flags.heads - 1
        patched = PatchedModel(model, task, clean)
        pattern, values = patched.corrupted_reads[1, last]
        _, there = lens.run_with_cache(patched.corrupted.inputs)

        def replace(z, hook):  # (B, T, heads, head_size)
            z[:, :, last] = there["z", 1][:, :, last]
            return z

        hooks = [("blocks.1.attn.hook_z", replace)]
        theirs = lens.run_with_hooks(clean.inputs, fwd_hooks=hooks)[:, -task.N :]
        expected = patched.losses({(1, last): lambda *_: pattern @ values})
        torch.testing.assert_close(task.losses(theirs, clean), expected, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(expected, patched.full, atol=1e-2)

        # from the residual stream before layer 2
        again = lens(cache["resid_pre", 2], start_at_layer=2)[:, -task.N :]
        torch.testing.assert_close(again, ours, atol=1e-4, rtol=1e-4)
