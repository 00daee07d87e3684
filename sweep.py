"""Train many runs -> one table -> Figure 4: how many layers does each symbol need (Section 7)?

    python sweep.py --preset laptop          # a small Figure 4, an hour on 2 cores
    python sweep.py --preset night           # Figure 4, eight seeds with IC: four hours on 2 cores
    python sweep.py --layers 2 3 4 --seeds 5 --heads 8 --D 4    # any grid

Further flags are those of train.py. Each run is a process, python train.py ... --resume, and prints
into RUN.txt; if one fails or is killed, the others go on. The same command continues what has not
ended. At the end the table and the figure are made of all finished run directories in --out.

On a Dask cluster (pip install distributed) all machines see --out under the same name, and each
command is started in a clone of this repository. Whoever reaches a scheduler can run any code on
its workers: keep it in a network of your own.

    python -m dask scheduler --host tcp://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
    python -m dask worker tcp://10.0.0.1:8786 --nthreads 16    # so many runs at once
    python sweep.py --preset paper --scheduler tcp://10.0.0.1:8786 --out /shared/paper
"""

import os
import pathlib
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import train
from analyze import crossings, save_figure, symbol_color
from data import Task, command_line

from matplotlib.figure import Figure


PLAIN = "--ema 0 --qk-std 0.02 --stop-below 0"  # as the paper says
LAPTOP = f"{PLAIN} --heads 8 --lr 2e-3 --decay 0.3"
WITH_IC = f"{LAPTOP} --D 5 --steps 1500"
WITHOUT_IC = f"{LAPTOP} --D 3 --steps 1500 --no-ic"
PAPER = f"{PLAIN} --optimizer adamw --heads 8 --batch 512 --examples 1048576 --steps 10000"
PRESETS = {  # name: [(flags of train.py, layers, number of seeds), ...]
    "laptop": [(WITH_IC, range(1, 6), 3), (WITHOUT_IC, (1, 3, 5), 3)],
    "night": [(WITH_IC, range(1, 9), 8), (WITHOUT_IC, range(1, 9), 3)],
    "paper": [(f"{PAPER} --D 5", range(1, 9), 8), (f"{PAPER} --D 3 --no-ic", range(1, 9), 8)],
}


# ---- training


def grid(words, layers, seeds, folder):
    """Return [(flags, command line), ...], a run for each depth and seed; words: further flags of
    train.py, a list."""
    runs = []
    for depth in layers:
        for seed in range(seeds):
            line = [*words, "--layers", str(depth), "--seed", str(seed), "--resume"]
            flags = train.parse_flags(line, folder)
            runs.append((flags, [*line, "--out", str(flags.out)]))
    return runs


def train_in_a_process(line, out):
    """Run this command line of train.py; return why it failed, or nothing."""
    command = [sys.executable, train.__file__, *line]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(f"{out}.txt", "a+") as printed:
        code = subprocess.run(command, env=one_thread, stdout=printed, stderr=printed).returncode
        printed.seek(0)
        last = "".join(printed.readlines()[-1:]).strip()
    return f"exit code {code}, {last}" if code else ""


def sweep(runs, pool):
    """Train these runs of `grid` in their order; return how many failed."""
    began, done, failed = time.time(), 0, 0
    total = sum(flags.layers for flags, _ in runs)
    waiting = {pool.submit(train_in_a_process, line, flags.out): flags for flags, line in runs}
    try:
        for ended, future in enumerate(as_completed(waiting), 1):
            flags = waiting[future]
            error = future.exception() or future.result()  # of the cluster, or of the run
            failed += bool(error)
            done += flags.layers  # each layer takes as long
            minutes = (time.time() - began) * (total / done - 1) / 60
            said = error or f"val {row_of(flags.out)['val']:.4f}"
            print(f"{ended}/{len(runs)}, about {minutes:.0f} min left: {flags.out.name} {said}")
    finally:
        # after Ctrl-C, at which each train.py ends, start no other
        for future in waiting:
            future.cancel()
    return failed


# ---- the table


def row_of(run):
    """Return the row of a finished run: its flags, its final losses (means over the evaluations of
    the last 100 steps) and the step at which each symbol was learned."""
    flags, log = train.read_flags(run), train.read_log(run)
    task, row = train.task_of(flags), train.settings_of(flags)
    row.update(run=run.name, seconds=log[-1]["seconds"], ended=log[-1]["step"])
    last = [entry for entry in log if entry["step"] > row["ended"] - 100]
    for name in ("val", *task.target_names):
        row[name] = sum(entry[name] for entry in last) / len(last)
    for name, step in crossings(log, task).items():
        row[f"{name}_learned"] = step
    return row


def section_7(rows):
    """Return the rows of runs as in Section 7: causal chains that predict all symbols or x_D."""
    causal = [row for row in rows if row["task"] == "chain" and row["causal"]]
    return [row for row in causal if not row["targets"]]


# ---- Figure 4, from the rows alone


def figure_4(rows):
    """Above: the final loss by layers, with and without the implicit curriculum. Below: the loss of
    each symbol, with an arrow at the floor(log2 k) + 2 layers that x_k takes by content."""
    figure = Figure(figsize=(7.5, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    with_ic = [row for row in rows if row["ic"]]
    without = [row for row in rows if not row["ic"]]
    draw_losses(above, with_ic, "val", "tab:blue", f"with {curriculum_of(with_ic)}", -0.12)
    draw_losses(above, without, "val", "tab:red", f"without {curriculum_of(without)}", 0.12)
    above.set_title("Final loss: a dot per run, bars at the middle runs")

    last = max([row["D"] for row in with_ic], default=0)
    for k in range(1, last + 1):
        color, shift = symbol_color(k), 0.15 * (k - (1 + last) / 2)
        draw_losses(below, with_ic, f"x_{k}", color, f"$x_{k}$", shift)
        x = k.bit_length() + 1 + shift  # floor(log2 k) + 2
        below.text(x, 0.9, "↓", color=color, size=16, ha="center", clip_on=True)
    below.set_title("Each symbol with implicit curriculum; ↓ the layers it takes by content")

    for axes, columns in (above, 1), (below, 3):
        for N in {row["N"] for row in rows}:
            for level, meaning in Task(N).plateaus[1:]:
                axes.axhline(level, color="gray", ls=":", lw=1, label=meaning)
        axes.set(xlabel="layers", ylabel=f"validation {Task.loss_name}", ylim=(0, 1.2))
        axes.set(xticks=range(1, 1 + max(row["layers"] for row in rows)))
        axes.legend(loc="upper right", ncols=columns, fontsize="small")
    return figure


def curriculum_of(rows):
    D = " and ".join(str(D) for D in sorted({row["D"] for row in rows}))
    return f"implicit curriculum (D={D}, {len(rows)} runs)"


def draw_losses(axes, rows, column, color, label, shift):
    """Draw each run as a dot, shifted sideways, and bars at the middle run, or the middle two."""
    by_depth = {}
    for row in rows:
        if column in row:
            by_depth.setdefault(row["layers"], []).append(row[column])
    for depth, losses in sorted(by_depth.items()):
        x = [depth + shift]
        axes.plot(x * len(losses), losses, "o", color=color, ms=4, alpha=0.4)
        middle = [statistics.median_low(losses), statistics.median_high(losses)]
        axes.plot(x * 2, middle, "_", color=color, ms=9, mew=2, label=label)
        label = None  # one entry in the legend


def main():
    p = command_line("sweep.py", __doc__)
    p.add_argument("--preset", choices=PRESETS, help="a ready-made grid; or make your own:")
    p.add_argument("--layers", type=int, nargs="+", help="depths of the grid")
    p.add_argument("--seeds", type=int, help="0, 1, ... per point; else 3, or the preset's")
    p.add_argument("--out", type=pathlib.Path, help="folder; by default out/sweep, or out/PRESET")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once, one a core")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of this machine")
    args, words = p.parse_known_args()  # words: the flags of train.py
    if bool(args.preset) == bool(args.layers):
        p.error("give either a --preset, or the --layers of your own grid")
    if any(word.startswith("--seed") for word in words):
        p.error("leave out --seed: --seeds says how many, from 0")
    folder = (args.out or pathlib.Path("out", args.preset or "sweep")).absolute()
    table = folder / "results.jsonl"
    for row in train.read_file(table, []):
        if not (folder / row["run"]).exists():
            p.error(f"{table} has {row['run']}, whose directory is gone: choose another --out")

    # train what has not ended, the deepest first, since they take longest
    runs = []
    for text, layers, seeds in PRESETS.get(args.preset, [("", args.layers, 3)]):
        seeds = seeds if args.seeds is None else args.seeds
        runs += grid([*text.split(), *words], layers, seeds, folder)
    missing = [run for run in runs if not (run[0].out / "model.pt").exists()]
    missing.sort(key=lambda run: run[0].layers, reverse=True)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {len(runs)} runs to do: see {folder}/*.txt")
    pool = ThreadPoolExecutor(args.workers)  # each thread waits for one process
    if args.scheduler:
        from distributed import Client

        try:
            pool = Client(args.scheduler, timeout=15).get_executor()
        except (OSError, ValueError) as error:
            p.error(f"no Dask cluster at {args.scheduler}: {error}")
    with pool:
        failed = sweep(missing, pool)

    # the table and the figure of all that is in the folder
    rows = [row_of(file.parent) for file in sorted(folder.glob("*/model.pt"))]
    train.write_file(table, rows)
    if shown := section_7(rows):
        save_figure(figure_4(shown), folder / "figure4.png")
        print(f"{len(shown)} of {len(rows)} runs: {folder / 'figure4.png'}")
    if failed:
        sys.exit(f"sweep.py: {failed} runs failed; the same command continues them")


if __name__ == "__main__":
    main()
