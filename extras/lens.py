"""A trained model in TransformerLens, with all its hooks, its cache and its patching.

    python -m extras.lens results/A    # is it the same model? pip install "transformer-lens>=4.3"

    lens, task = to_lens("results/A")
    predictions, cache = lens.run_with_cache(task.draw("validation", 32).inputs)
    cache["pattern", 8]    # (32, heads, T, T)

Predictions are (B, T, outputs): the last N of T are at the queries. They are no logits, so leave
enable_compatibility_mode alone, which centres them.
"""

import train
from ablate import record_reads
from data import command_line

import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel


class Continuous(NativeModel):
    """The model of TransformerLens, for tokens that are numbers."""

    def forward(self, input_ids=None, inputs_embeds=None, **more):
        x = inputs_embeds  # (B, T, inputs); with start_at_layer the residual stream (B, T, width)
        if x.shape[-1] == self.cfg.d_vocab:
            x = self.tok_embed(torch.cat([x, self.appended.expand(len(x), -1, -1)], -1))
        return super().forward(inputs_embeds=x, **more)


def to_lens(run):
    """(TransformerBridge, task) of a run directory, in float32. With RoPE the numbers of q and k
    come in another order: those that are rotated together are neighbours."""
    model, task, flags = train.load(run)
    layer, width, rope = model.blocks[0], model.embed.out_features, flags.positions == "rope"
    config = TransformerBridgeConfig(
        d_model=width, d_head=layer.head_size, n_heads=flags.heads, n_layers=flags.layers,
        d_mlp=4 * width, n_ctx=task.T, d_vocab=task.inputs, d_vocab_out=task.outputs, act_fn="gelu",
        attn_only=not flags.mlp, attention_dir="causal" if flags.causal else "bidirectional",
        positional_embedding_type="rotary" if rope else "standard",
    )  # fmt: skip

    # our modules in the places of theirs
    lens, numbers = Continuous(config), torch.arange(flags.heads * layer.head_size)
    lens.register_buffer("appended", model.appended)
    lens.tok_embed, lens.ln_out, lens.head = model.embed, model.ln, model.head
    if rope:  # sort the pairs (i, i + head_size/2) of each head
        numbers = numbers.view(flags.heads, 2, -1).transpose(1, 2).flatten()
    else:  # the tokens hold their positions
        torch.nn.init.zeros_(lens.pos.weight)
    for ours, theirs in zip(model.blocks, lens.layers, strict=True):
        parts = zip("qkv", ours.qkv.weight.chunk(3), ours.qkv.bias.chunk(3), strict=True)
        for name, weight, bias in parts:
            rows = slice(None) if name == "v" else numbers
            getattr(theirs.attn, name).load_state_dict(dict(weight=weight[rows], bias=bias[rows]))
        theirs.ln1, theirs.attn.o = ours.ln1, ours.out
        if flags.mlp:
            theirs.ln2, theirs.mlp.fc_in, theirs.mlp.fc_out = ours.ln2, ours.up, ours.down
    return build_bridge_from_module(lens.eval(), "TransformerLensNative", tl_config=config), task


@torch.no_grad()
def main():
    p = command_line("python -m extras.lens", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory of train.py")
    run = p.parse_args().run
    (lens, task), (model, _, _) = to_lens(run), train.load(run)
    batch = task.draw("validation", 256)
    predictions, cache = lens.run_with_cache(batch.inputs)
    theirs, ours = predictions[:, -task.N :], model(batch.inputs)
    differ = []
    for (layer, head), (pattern, _) in record_reads(model, batch.inputs).items():
        differ.append((cache["pattern", layer][:, head] - pattern).abs().max())
    print("losses", task.losses(theirs, batch).mean((0, 1)).tolist())
    print("differences of predictions", (theirs - ours).abs().max().item())
    print("differences of attention", max(differ).item())


if __name__ == "__main__":
    main()
