"""One training step of ours beside the same step of well-known libraries: same shapes, batches, optimizer, machine.

    pip install -r bench/requirements.txt
    python bench/peers.py                                # all shapes, both tables; about 40 minutes on 2 cores
    python bench/peers.py --shapes b --tables matched    # one of them; about 2 minutes
    python bench/peers.py --stack 4                      # our models as a stack beside one by one; about 2 minutes
    python bench/peers.py --scaling bench/scaling.png    # steps/s by layers, D, batch and width; about 6 minutes

Matched: everyone in float32 with AdamW, not compiled. Best: everyone with the fastest of the settings that it offers
(bfloat16 or float32, compiled or not, plain or fused attention), chosen by a trial. The floor is the time of the matrix
products of one step alone, forward and backward. The loss of the first and the twentieth step is shown, so that
nobody runs a different model. Steps are timed in turns, one of each contestant per round, and the median counts.
A library without the option of a shape (no MLP, or a head narrower than the stream) is missing there.
"""
import argparse
import itertools
import math
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import batch_index, make_batch
from model import Stack
from train import build, keep_freed_memory

SHAPES = {
    "b": dict(layers=12, heads=1, head_size=128, width=128, mlp=True, D=3, batch=128),
    "a128": dict(layers=4, heads=8, head_size=16, width=128, mlp=True, D=5, batch=128),
    "a512": dict(layers=4, heads=8, head_size=16, width=128, mlp=True, D=5, batch=512),
    "d": dict(layers=24, heads=1, head_size=16, width=512, mlp=False, D=4, batch=256),
}
N, K = 4, 4
TRIAL, ROUNDS = 5, 15  # steps: to choose a setting, then to be timed in turns; the loss is shown after all of them


def tokens(shape):
    return N * (2 * shape["D"] + 1)


# ---- the contestants: each returns a module (B, T, 2K) -> (B, N or more, D*K), or None if it cannot have this shape

class Wrapped(nn.Module):
    """A library's stack of layers, called by `run`, between our input and output maps."""

    def __init__(self, shape, body, run):
        super().__init__()
        self.embed, self.body, self.run = nn.Linear(2 * K, shape["width"]), body, run
        self.head = nn.Linear(shape["width"], shape["D"] * K)

    def forward(self, x):
        return self.head(self.run(self.body, self.embed(x))[:, -N:])


def ours(shape, fused):
    return None if fused else build(shape | dict(N=N, K=K, ic=True, rotary="input", causal=True))


def transformers_gpt2(shape, fused):
    from transformers import GPT2Config, GPT2Model

    if not shape["mlp"] or shape["heads"] * shape["head_size"] != shape["width"]:
        return None
    body = GPT2Model(GPT2Config(
        vocab_size=1, n_positions=tokens(shape), n_embd=shape["width"], n_layer=shape["layers"], n_head=shape["heads"],
        activation_function="gelu", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        attn_implementation="sdpa" if fused else "eager"))
    return Wrapped(shape, body, lambda body, x: body(inputs_embeds=x).last_hidden_state)


def x_transformers(shape, fused):
    from x_transformers import ContinuousTransformerWrapper, Decoder

    layers = Decoder(dim=shape["width"], depth=shape["layers"], heads=shape["heads"], attn_dim_head=shape["head_size"],
                     attn_flash=fused, attn_project_out=True,
                     **({} if shape["mlp"] else dict(custom_layers=("a",) * shape["layers"])))
    return ContinuousTransformerWrapper(dim_in=2 * K, dim_out=shape["D"] * K, max_seq_len=tokens(shape),
                                        use_abs_pos_emb=False, attn_layers=layers)


def transformer_lens(shape, fused):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    if fused:
        return None
    body = HookedTransformer(HookedTransformerConfig(
        n_layers=shape["layers"], d_model=shape["width"], n_heads=shape["heads"], d_head=shape["head_size"],
        n_ctx=tokens(shape), d_vocab=1, d_vocab_out=shape["D"] * K, act_fn="gelu", normalization_type="LN",
        attn_only=not shape["mlp"], device="cpu"))
    wrapped = Wrapped(shape, body, lambda body, x: body(x, start_at_layer=0))  # x is a residual stream, not words
    wrapped.head = nn.Identity()  # its own output map serves
    return wrapped


def torch_encoder(shape, fused):
    if fused or not shape["mlp"] or shape["heads"] * shape["head_size"] != shape["width"]:
        return None
    layer = nn.TransformerEncoderLayer(shape["width"], shape["heads"], 4 * shape["width"], dropout=0,
                                       activation="gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, shape["layers"], norm=nn.LayerNorm(shape["width"]), enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(tokens(shape))
    return Wrapped(shape, body, lambda body, x: body(x, mask=mask, is_causal=True))


TORCH = {"ours": ours, "transformers GPT2Model": transformers_gpt2, "x-transformers": x_transformers,
         "transformer-lens": transformer_lens, "torch.nn.TransformerEncoder": torch_encoder}
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.99), 0.1, 0.1


def torch_step(module, dtype, compiled):
    """A function (x, y) -> loss that trains the module by one step; and its number of parameters."""
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():  # everyone from the same distribution
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    forward = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            predictions = forward(x)[:, -N:]
        loss = F.mse_loss(predictions.float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, sum(parameter.numel() for parameter in module.parameters())


def flax_step(shape, dtype):
    """The same for a jitted step of flax and optax."""
    import flax.linen as fnn
    import jax
    import jax.numpy as jnp
    import optax

    number = jnp.bfloat16 if dtype == "bfloat16" else jnp.float32
    weights = dict(kernel_init=fnn.initializers.normal(0.02), dtype=number)

    class Network(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            mask = fnn.make_causal_mask(jnp.ones((1, x.shape[1])))
            x = fnn.Dense(shape["width"], **weights)(x)
            for _ in range(shape["layers"]):
                x += fnn.MultiHeadDotProductAttention(
                    shape["heads"], qkv_features=shape["heads"] * shape["head_size"], out_features=shape["width"],
                    **weights)(fnn.LayerNorm(dtype=number)(x), mask=mask)
                if shape["mlp"]:
                    h = fnn.Dense(4 * shape["width"], **weights)(fnn.LayerNorm(dtype=number)(x))
                    x += fnn.Dense(shape["width"], **weights)(fnn.gelu(h, approximate=False))
            return fnn.Dense(shape["D"] * K, **weights)(fnn.LayerNorm(dtype=number)(x[:, -N:]))

    network = Network()
    parameters = network.init(jax.random.key(0), jnp.zeros((1, tokens(shape), 2 * K)))
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP),
                            optax.adamw(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY))
    state = [parameters, optimizer.init(parameters)]

    @jax.jit
    def update(parameters, optimizer_state, x, y):
        def loss_of(parameters):
            return jnp.square(network.apply(parameters, x).astype(jnp.float32) - y).mean()
        loss, gradient = jax.value_and_grad(loss_of)(parameters)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss

    def step(x, y):
        *state[:], loss = update(*state, x.numpy(), y.numpy())
        return loss.item()

    return step, sum(p.size for p in jax.tree.leaves(parameters))


def floor_step(shape, dtype):
    """A function that does the matrix products of one step, nothing else: three for each weight (forward, gradient of
    its input, gradient of itself), six for each attention pattern; in the last layer only what the queries need. Those
    of attention are always in float32: on a CPU, batches of such small matrices are slower in bfloat16."""
    B, T, width, A = shape["batch"], tokens(shape), shape["width"], shape["heads"] * shape["head_size"]
    products, outputs = [], {}

    def product(a, b):
        size = (*a.shape[:-1], b.shape[-1])
        products.append((a, b, outputs.setdefault(size, torch.empty(size, dtype=a.dtype))))

    def weight(rows, ins, outs, reads_data=False):
        x, w, y = (torch.randn(size).to(getattr(torch, dtype)) for size in [(rows, ins), (outs, ins), (rows, outs)])
        product(x, w.T)
        product(y.T, x)
        if not reads_data:
            product(y, w)

    def attention(rows):
        q, k, s = (torch.randn(B * shape["heads"], *size) for size in [(rows, shape["head_size"]),
                                                                       (T, shape["head_size"]), (rows, T)])
        for _ in "scores", "values":
            product(q, k.mT)
            product(s, k)
            product(s.mT, q)

    weight(B * T, 2 * K, width, reads_data=True)
    for layer in range(shape["layers"]):
        rows = T if layer < shape["layers"] - 1 else N
        weight(B * rows, width, A)
        weight(B * T, width, 2 * A)
        attention(rows)
        weight(B * rows, A, width)
        if shape["mlp"]:
            weight(B * rows, width, 4 * width)
            weight(B * rows, 4 * width, width)
    weight(B * N, width, shape["D"] * K)

    def step(x, y):
        for a, b, out in products:
            torch.matmul(a, b, out=out)
        return math.nan

    return step


def timed(step, batch):
    """(seconds, loss) of one step."""
    started = time.perf_counter()
    loss = step(batch.inputs, batch.targets)
    return time.perf_counter() - started, loss


def measure(shape, table):
    """One dict per contestant: name, setting, parameters, losses of its steps, seconds (median of the rounds)."""
    batches = [make_batch(0, batch_index(0, step, shape["batch"], 0), N, shape["D"], K) for step in range(TRIAL + ROUNDS)]
    dtypes = ["float32"] if table == "matched" else ["bfloat16", "float32"]
    fastest = {}

    def enter(name, setting, make):
        step, parameters = make()
        times, losses = zip(*(timed(step, batch) for batch in batches[:TRIAL]))
        trial = statistics.median(times[-3:])
        print(f"  trial {name}, {setting}: {1 / trial:.2f} steps/s", file=sys.stderr, flush=True)
        if name not in fastest or trial < fastest[name]["trial"]:
            fastest[name] = dict(name=name, setting=setting, parameters=parameters, losses=list(losses), trial=trial,
                                 step=step, times=[])

    for name, contestant in TORCH.items():
        tried = {}
        for dtype, fused in itertools.product(dtypes, [False, True]):
            if contestant(shape, fused) is not None:
                setting = dtype + (", fused attention" if fused else "")
                tried[setting] = dtype, fused
                enter(name, setting, lambda: torch_step(contestant(shape, fused), dtype, compiled=False))
        if tried and table == "best":  # compiling takes a minute: only the fastest of the others
            setting = fastest[name]["setting"]
            dtype, fused = tried[setting]
            enter(name, f"{setting}, compiled", lambda: torch_step(contestant(shape, fused), dtype, compiled=True))
    for dtype in dtypes:
        enter("flax + optax, jitted", dtype, lambda: flax_step(shape, dtype))
    for dtype in dtypes:
        fastest[f"floor {dtype}"] = dict(name="floor", setting=dtype, parameters=None, losses=[],
                                         step=floor_step(shape, dtype), times=[])
    for batch in batches[TRIAL:]:
        for contestant in fastest.values():
            seconds, loss = timed(contestant["step"], batch)
            contestant["times"].append(seconds)
            contestant["losses"].append(loss)
    for contestant in fastest.values():
        contestant["seconds"] = statistics.median(contestant["times"])
    return list(fastest.values())


def show(name, shape, table, rows):
    """The table in markdown. Floor: of the contestant's own dtype."""
    floors = {row["setting"]: row["seconds"] for row in rows if row["name"] == "floor"}
    us = next(row["seconds"] for row in rows if row["name"] == "ours")
    words = ", ".join(f"{key} {value}" for key, value in shape.items())
    print(f"\n**{name}, {table}** ({words})\n\n| | setting | parameters | steps/s | ms | ours is faster by | step / floor "
          f"| loss at step 1, {TRIAL + ROUNDS} |\n|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["seconds"]):
        floor = floors[row["setting"].split(",")[0]]
        if row["name"] == "floor":
            cells = ["matrix products alone", row["setting"], "", "", f"{row['seconds'] * 1000:.0f}", "", "", ""]
        else:
            cells = [row["name"], row["setting"], f"{row['parameters']:,}", f"{1 / row['seconds']:.2f}",
                     f"{row['seconds'] * 1000:.0f}", f"{row['seconds'] / us:.2f}", f"{row['seconds'] / floor:.2f}",
                     f"{row['losses'][0]:.3f}, {row['losses'][-1]:.3f}"]
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()


SWEPT = {"layers": [1, 2, 4, 8, 12, 16, 24], "D": [1, 2, 3, 4, 6, 8], "batch": [32, 64, 128, 256, 512, 1024],
         "width": [64, 128, 256, 512]}


def scaling(path, rounds=3):
    """One figure: how the time of our step grows along each axis around shape b, with the floor beside it."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(SWEPT), figsize=(15, 4), layout="constrained", sharey=True)
    for axes, (swept, values) in zip(panels, SWEPT.items()):
        for dtype, color in ("float32", "tab:blue"), ("bfloat16", "tab:orange"):
            seconds, floors = [], []
            for value in values:
                shape = SHAPES["b"] | {swept: value}
                shape["head_size"] = shape["width"]
                step, _ = torch_step(ours(shape, fused=False), dtype, compiled=False)
                floor = floor_step(shape, dtype)
                batch = make_batch(0, batch_index(0, 0, shape["batch"], 0), N, shape["D"], K)
                times = [(timed(step, batch)[0], timed(floor, batch)[0]) for _ in range(rounds + 1)][1:]
                seconds.append(statistics.median(time for time, _ in times))
                floors.append(statistics.median(time for _, time in times))
                print(f"{swept} {value}, {dtype}: {1 / seconds[-1]:.2f} steps/s, step / floor "
                      f"{seconds[-1] / floors[-1]:.2f}", flush=True)
            axes.plot(values, [1 / time for time in seconds], "o-", color=color, label=f"ours, {dtype}")
            axes.plot(values, [1 / time for time in floors], ":", color=color, label=f"matrix products alone, {dtype}")
        axes.set(xscale="log", yscale="log", xlabel=swept, xticks=values, xticklabels=values)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="training steps per second")
    panels[0].legend(fontsize="small")
    figure.suptitle(f"One training step around layers 12, D 3, batch 128, width 128 (one head); {torch.get_num_threads()} "
                    f"threads, median of {rounds}")
    figure.savefig(path, dpi=120)


def stacks(models, rounds=5):
    """Forward and backward of so many models as one stack beside one after another, in turns."""
    small = dict(layers=4, heads=1, head_size=32, width=32, mlp=True, D=2, batch=32)
    print(f"| shape | dtype | {models} models one after another, ms | as a stack, ms | ratio |\n|---|---|---|---|---|")
    for (name, shape), dtype in itertools.product({"b": SHAPES["b"], "a128": SHAPES["a128"], "small": small}.items(),
                                                  ["float32", "bfloat16"]):
        each = [ours(shape, fused=False) for _ in range(models)]
        stack = Stack(each)
        batch = make_batch(0, batch_index(0, 0, shape["batch"], 0), N, shape["D"], K)

        def run(forward, x, y):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                predictions = forward(x)
            F.mse_loss(predictions.float(), y.expand_as(predictions)).backward()

        def one_by_one(x, y):
            for model in each:
                run(model, x, y)

        def as_stack(x, y):
            run(stack, x.expand(models, *x.shape).contiguous(), y)

        times = [(timed(one_by_one, batch)[0], timed(as_stack, batch)[0]) for _ in range(rounds + 2)][2:]
        solo, stacked = (1000 * statistics.median(column) for column in zip(*times))
        print(f"| {name} | {dtype} | {solo:.0f} | {stacked:.0f} | {solo / stacked:.2f} |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="(default: all)")
    p.add_argument("--tables", nargs="+", default=["matched", "best"], choices=["matched", "best"], help="(default: both)")
    p.add_argument("--scaling", type=Path, help="instead of the tables, draw how our step grows into this PNG file")
    p.add_argument("--stack", type=int, help="instead, time so many of our models as one stack and one by one")
    flags = p.parse_args()
    keep_freed_memory()  # for everyone: all share the process
    if flags.scaling:
        return scaling(flags.scaling)
    if flags.stack:
        return stacks(flags.stack)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{time.strftime('%B %Y')}, medians of {ROUNDS} rounds")
    for name, table in itertools.product(flags.shapes, flags.tables):
        show(name, SHAPES[name], table, measure(SHAPES[name], table))


if __name__ == "__main__":
    main()
