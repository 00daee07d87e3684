"""How the time of one training step of ours grows with layers, D, batch and width, beside the
matrix products alone.

    python -m bench.scaling    # writes bench/scaling.png; about 6 minutes on 2 cores
"""

import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from bench.contestants import K, N, floor_step, ours, torch_step
from bench.peers import SHAPES, timed
from data import batch_index, make_batch
from train import keep_freed_memory


SWEPT = {
    "layers": [1, 2, 4, 8, 12, 16, 24],
    "D": [1, 2, 3, 4, 6, 8],
    "batch": [32, 64, 128, 256, 512, 1024],
    "width": [64, 128, 256, 512],
}
ROUNDS = 3


def medians(swept, value, dtype):
    """Seconds of our step and of its floor, with one size of shape b changed."""
    shape = SHAPES["b"] | {swept: value}
    shape["head_size"] = shape["width"]
    step, _ = torch_step(ours(shape, fused=False), dtype, compiled=False)
    floor = floor_step(shape, dtype)
    batch = make_batch(0, batch_index(0, 0, shape["batch"], 0), N, shape["D"], K)

    # in turns; the first round warms up
    times = [(timed(step, batch)[0], timed(floor, batch)[0]) for _ in range(ROUNDS + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main():
    keep_freed_memory()
    figure, panels = plt.subplots(1, len(SWEPT), figsize=(15, 4), layout="constrained", sharey=True)
    for axes, (swept, values) in zip(panels, SWEPT.items(), strict=True):
        for dtype, color in ("float32", "tab:blue"), ("bfloat16", "tab:orange"):
            rates, floors = [], []
            for value in values:
                seconds, floor = medians(swept, value, dtype)
                rates.append(1 / seconds)
                floors.append(1 / floor)
                ratio = f"step / floor {seconds / floor:.2f}"
                print(f"{swept} {value}, {dtype}: {1 / seconds:.2f} steps/s, {ratio}", flush=True)
            alone = f"matrix products alone, {dtype}"
            axes.plot(values, rates, "o-", color=color, label=f"ours, {dtype}")
            axes.plot(values, floors, ":", color=color, label=alone)
        axes.set(xscale="log", yscale="log", xlabel=swept, xticks=values, xticklabels=values)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="training steps per second")
    panels[0].legend(fontsize="small")
    around = "One training step around layers 12, D 3, batch 128, width 128 (one head)"
    figure.suptitle(f"{around}; {torch.get_num_threads()} threads, median of {ROUNDS}")
    figure.savefig(Path(__file__).with_name("scaling.png"), dpi=120)


if __name__ == "__main__":
    main()
