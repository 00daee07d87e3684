"""One training step of ours beside the same step of well-known libraries: the same shapes, batches,
optimizer and machine.

    pip install -r bench/requirements.txt
    python -m bench.peers                              # everything; 40 minutes on 2 cores
    python -m bench.peers --shapes b --tables matched  # one table; about 2 minutes

Matched: everyone in float32 with AdamW, not compiled. Best: everyone with the fastest of the
settings that it offers (bfloat16 or float32, compiled or not, plain or fused attention), chosen by
a trial. The floor is the time of the matrix products of one step alone, forward and backward. The
loss of the first and the twentieth step is shown, so that nobody runs a different model. Steps are
timed in turns, one of each contestant per round, and the median counts. A library without the
option of a shape (no MLP, or a head narrower than the stream) is missing there.
"""

import argparse
import functools
import itertools
import platform
import statistics
import sys
import time

import torch

from bench.contestants import TORCH, K, N, flax_step, floor_step, torch_step
from data import batch_index, make_batch
from train import keep_freed_memory


NARROW = {"layers": 4, "heads": 8, "head_size": 16, "width": 128, "mlp": True, "D": 5}
SHAPES = {
    "b": dict(layers=12, heads=1, head_size=128, width=128, mlp=True, D=3, batch=128),
    "a128": NARROW | {"batch": 128},
    "a512": NARROW | {"batch": 512},
    "d": dict(layers=24, heads=1, head_size=16, width=512, mlp=False, D=4, batch=256),
}
TRIAL, ROUNDS = 5, 15  # steps: to choose a setting, then to be timed in turns


def timed(step, batch):
    """(seconds, loss) of one step."""
    started = time.perf_counter()
    loss = step(batch.inputs, batch.targets)
    return time.perf_counter() - started, loss


def settings_of(name, contestant, shape, table):
    """[(setting, a function that makes (step, parameters)), ...] of one torch contestant."""
    dtypes = ["float32"] if table == "matched" else ["bfloat16", "float32"]
    made = []
    for dtype, fused in itertools.product(dtypes, [False, True]):
        if contestant(shape, fused) is not None:
            setting = dtype + (", fused attention" if fused else "")
            make = functools.partial(make_step, contestant, shape, fused, dtype)
            made.append((setting, make))
    return made


def make_step(contestant, shape, fused, dtype, compiled=False):
    return torch_step(contestant(shape, fused), dtype, compiled)


def try_out(name, setting, make, batches):
    """One entry of the table: a contestant in one setting, timed in a trial."""
    step, parameters = make()
    times, losses = [], []
    for batch in batches[:TRIAL]:
        seconds, loss = timed(step, batch)
        times.append(seconds)
        losses.append(loss)
    trial = statistics.median(times[-3:])
    print(f"  trial {name}, {setting}: {1 / trial:.2f} steps/s", file=sys.stderr, flush=True)
    entry = {"name": name, "setting": setting, "parameters": parameters, "losses": losses}
    return entry | {"trial": trial, "step": step, "times": []}


def fastest_settings(shape, table, batches):
    """One entry per contestant, in the fastest of its settings."""
    fastest = []
    for name, contestant in TORCH.items():
        settings = settings_of(name, contestant, shape, table)
        entries = [try_out(name, setting, make, batches) for setting, make in settings]
        entries.sort(key=lambda entry: entry["trial"])

        # compiling takes a minute: only the fastest of the others
        if entries and table == "best":
            setting = entries[0]["setting"]
            make = functools.partial(dict(settings)[setting], compiled=True)
            entries.append(try_out(name, f"{setting}, compiled", make, batches))
        fastest += sorted(entries, key=lambda entry: entry["trial"])[:1]

    dtypes = ["float32"] if table == "matched" else ["bfloat16", "float32"]
    entries = []
    for dtype in dtypes:
        make = functools.partial(flax_step, shape, dtype)
        entries.append(try_out("flax + optax, jitted", dtype, make, batches))
    fastest.append(min(entries, key=lambda entry: entry["trial"]))
    for dtype in dtypes:
        floor = {"name": "floor", "setting": dtype, "step": floor_step(shape, dtype)}
        fastest.append(floor | {"losses": [], "times": []})
    return fastest


def measure(shape, table):
    """One dict per contestant: name, setting, parameters, losses of its steps, seconds (median)."""
    batches = []
    for step in range(TRIAL + ROUNDS):
        index = batch_index(0, step, shape["batch"], 0)
        batches.append(make_batch(0, index, N, shape["D"], K))
    entries = fastest_settings(shape, table, batches)

    # in turns
    for batch in batches[TRIAL:]:
        for entry in entries:
            seconds, loss = timed(entry["step"], batch)
            entry["times"].append(seconds)
            entry["losses"].append(loss)
    for entry in entries:
        entry["seconds"] = statistics.median(entry["times"])
    return entries


def show(name, shape, table, entries):
    """The table in markdown. Floor: of the contestant's own dtype."""
    floors = {entry["setting"]: entry["seconds"] for entry in entries if entry["name"] == "floor"}
    us = next(entry["seconds"] for entry in entries if entry["name"] == "ours")
    words = ", ".join(f"{key} {value}" for key, value in shape.items())
    print(f"\n**{name}, {table}** ({words})\n")
    titles = "setting | parameters | steps/s | ms | ours is faster by | step / floor"
    print(f"| | {titles} | loss at step 1, {TRIAL + ROUNDS} |\n|" + "---|" * 8)
    for entry in sorted(entries, key=lambda entry: entry["seconds"]):
        seconds, setting = entry["seconds"], entry["setting"]
        if entry["name"] == "floor":
            cells = ["matrix products alone", setting, "", "", f"{seconds * 1000:.0f}", "", "", ""]
        else:
            floor, losses = floors[setting.split(",")[0]], entry["losses"]
            cells = [entry["name"], setting, f"{entry['parameters']:,}", f"{1 / seconds:.2f}"]
            cells += [f"{seconds * 1000:.0f}", f"{seconds / us:.2f}", f"{seconds / floor:.2f}"]
            cells.append(f"{losses[0]:.3f}, {losses[-1]:.3f}")
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = ["matched", "best"]
    p.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="default: all")
    p.add_argument("--tables", nargs="+", default=tables, choices=tables, help="default: both")
    flags = p.parse_args()
    keep_freed_memory()  # for everyone: all share the process
    processor = platform.processor() or platform.machine()
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    when = time.strftime("%B %Y")
    print(f"{processor}, {threads}, {when}, medians of {ROUNDS} rounds")
    for name, table in itertools.product(flags.shapes, flags.tables):
        show(name, SHAPES[name], table, measure(SHAPES[name], table))


if __name__ == "__main__":
    main()
