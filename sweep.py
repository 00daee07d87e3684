"""Train many runs -> one table -> Figure 4: how many layers does each symbol need (Section 7)?

    python sweep.py --preset laptop          # a small Figure 4, an hour on 2 cores
    python sweep.py --preset night           # Figure 4, eight seeds with IC: four hours on 2 cores
    python sweep.py --layers 2 3 4 --heads 1 8 --seed 0 1 --D 4    # any grid: 12 runs
    python sweep.py --out results/sweep      # trains nothing, draws Figure 4 from the table there

Further flags are those of train.py, with one value or several, and --save-every 0 by default. Each
run is a process, python train.py ... --resume, and prints into RUN.txt; if one fails or is killed,
the others go on. The same command continues what has not ended. The table holds each run that ever
ended in --out, also if its directory is gone.

On a Dask cluster (pip install distributed) all machines see --out under the same name, and each
command is started in a clone of this repository. Whoever reaches a scheduler can run any code on
its workers: keep it in a network of your own.

    python -m dask scheduler --host tcp://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
    python -m dask worker tcp://10.0.0.1:8786 --nthreads 16    # so many runs at once
    python sweep.py --preset paper --scheduler tcp://10.0.0.1:8786 --out /shared/paper
"""

import itertools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import train
from analyze import CIRCUIT, GRAY, INK, crossings, panels, save_figure, symbol_color
from data import Task, command_line


PLAIN = "--ema 0 --qk-std 0.02 --stop-below 0"  # as the paper says
LAPTOP = f"{PLAIN} --heads 8 --lr 2e-3 --decay 0.3 --steps 1500"
PAPER = f"{PLAIN} --heads 8 --optimizer adamw --batch 512 --examples 1048576 --steps 10000"
DEPTHS = "--layers 8 7 6 5 4 3 2 1"  # the slowest runs come first
THREE, EIGHT = "--seed 0 1 2", "--seed 0 1 2 3 4 5 6 7"
PRESETS = {  # flags of train.py, with IC and without
    "laptop": [
        f"{LAPTOP} --D 5 --layers 5 4 3 2 1 {THREE}",
        f"{LAPTOP} --targets last --layers 5 3 1 {THREE}",
    ],
    "night": [f"{LAPTOP} --D 5 {DEPTHS} {EIGHT}", f"{LAPTOP} --targets last {DEPTHS} {THREE}"],
    "paper": [f"{PAPER} --D 5 {DEPTHS} {EIGHT}", f"{PAPER} --targets last {DEPTHS} {EIGHT}"],
}


# ---- which runs


def options_of(words):
    """Return {flag: [flag, value, ...]} of a command line; if a flag comes twice, the last one."""
    options = {}
    for word in words:
        if word.startswith("--") or not options:
            flag, *value = word.split("=", 1)
            options[flag] = [flag, *value]
        else:
            options[flag].append(word)
    return options


def grid(options, folder):
    """Return {run directory: command line of train.py}: a run for each choice of one value for
    every flag."""
    choices = []
    for flag, *values in options.values():
        if len(values) < 2:
            choices.append([[flag, *values]])
        else:
            choices.append([[flag, value] for value in values])
    runs = {}
    for chosen in itertools.product(*choices):
        line = [*itertools.chain(*chosen), "--resume"]
        out = train.parse_flags(line, folder).out
        runs[out] = [*line, "--out", str(out)]
    return runs


# ---- training

STARTED = []  # the processes that this machine has started


def train_in_a_process(out, line):
    """Run this command line of train.py; return how it failed, or nothing."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, train.__file__, *line]
    with open(f"{out}.txt", "a") as printed:
        process = subprocess.Popen(command, env=one_thread, stdout=printed, stderr=printed)
    STARTED.append(process)
    code = process.wait()
    return f"failed with exit code {code}: see {out}.txt" if code else ""


def sweep(runs, pool):
    """Train these {run directory: command line} in their order; return how many failed."""
    began, failed = time.time(), 0
    waiting = {pool.submit(train_in_a_process, out, line): out for out, line in runs.items()}
    try:
        for ended, future in enumerate(as_completed(waiting), 1):
            out = waiting[future]
            error = future.exception() or future.result()  # of the cluster, or of the run
            failed += bool(error)
            minutes = (time.time() - began) * (len(runs) / ended - 1) / 60
            said = error or f"val {row_of(out)['val']:.4f}"
            print(f"{ended}/{len(runs)}, about {minutes:.0f} min left: {out.name} {said}")
    finally:
        # after Ctrl-C or SIGTERM, start no other, and end those of this machine; a cluster's go on
        for future in waiting:
            future.cancel()
        for process in STARTED:
            process.terminate()
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
        row[name] = statistics.fmean(entry[name] for entry in last)
    for name, step in crossings(log, task).items():
        row[f"{name}_learned"] = step
    return row


def update_table(folder):
    """Write a row of each run that has ended into the table of a folder, beside those of runs that
    are gone; return all rows."""
    table = folder / "results.jsonl"
    rows = {row["run"]: row for row in train.read_file(table, [])}
    for file in sorted(folder.glob("*/model.pt")):
        rows[file.parent.name] = row_of(file.parent)
    train.write_file(table, rows.values())
    return [train.DEFAULTS | row for row in rows.values()]


# ---- Figure 4, from the rows alone


def figure_4(rows):
    """The final loss of each run as a dot, and medians as bars: of x_D alone without the implicit
    curriculum, and with it of each symbol. Triangles stand at the floor(log2 k) + 2 layers that
    x_k takes if tokens find one another by content, the symbols that they share. Across: the
    layers, or each combination of the flags that vary."""
    with_ic = [row for row in rows if row["targets"] == "all"]
    without = [row for row in rows if row["targets"] != "all"]

    # a column for each choice of the flags that vary
    varying = []
    for name in train.DEFAULTS:
        if name != "seed" and len({str(row[name]) for row in with_ic or without}) > 1:
            varying.append(name)
    varying = varying or ["layers"]
    columns = {}  # {the values of these flags: the rows that have them}
    for row in sorted(rows, key=lambda row: [row[name] for name in varying]):
        values = "\n".join(str(row[name]) for name in varying)
        columns.setdefault(values, []).append(row)

    # each series has its own place in a column: label, with IC, loss, color, layers by content
    D = " or ".join(sorted({str(row["D"]) for row in without}))
    series = [
        (f"$x_D$ alone, without IC (D={D}, n={len(without)})", False, "val", CIRCUIT, None),
        (f"mean of all, with IC (n={len(with_ic)})", True, "val", INK, None),
    ]
    for k in range(1, 1 + max([row["D"] for row in with_ic], default=0)):
        layers = k.bit_length() + 1  # floor(log2 k) + 2
        series.append((f"$x_{k}$", True, f"x_{k}", symbol_color(k), layers))
    figure, [axes] = panels(1, 1, max(10, len(columns)), 4.5)
    for number, (label, ic, name, color, layers) in enumerate(series):
        for column, group in enumerate(columns.values()):
            losses = [row[name] for row in group if (row["targets"] == "all") == ic and name in row]
            if losses:
                x = column + 0.11 * (number - len(series) / 2)
                axes.plot([x] * len(losses), losses, "o", color=color, ms=4, alpha=0.4, mew=0)
                middle = statistics.median(losses)
                axes.plot(x, middle, "_", color=color, ms=10, mew=2.5, label=label)
                label = None  # one entry in the legend
                if group[0]["layers"] == layers:
                    above = axes.get_xaxis_transform()
                    axes.plot(x, 1.03, "v", color=color, transform=above, clip_on=False)

    for N in {row["N"] for row in rows}:
        axes.axhline(Task(N).chance, color=GRAY, ls=":", label=f"averages the {N} candidates")
    law = "▼ the $\\lfloor\\log_2 k\\rfloor + 2$ layers that $x_k$ takes by content"
    axes.set_title(f"{len(rows)} runs, bars at medians;  {law}", loc="left", pad=18)
    axes.set(yscale="log", xlabel=", ".join(varying), ylabel=f"final {Task.loss_name}")
    axes.set_xticks(range(len(columns)), columns)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def main():
    p = command_line("sweep.py", __doc__)
    p.add_argument("--preset", choices=PRESETS, help="a ready-made grid; other flags change it")
    p.add_argument("--out", type=pathlib.Path, help="folder; by default out/sweep, or out/PRESET")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once, one a core")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of this machine")

    # the flags above are ours, and all others those of train.py
    options = options_of(sys.argv[1:])
    ours = ["--preset", "--out", "--workers", "--scheduler", "--help", "-h"]
    args = p.parse_args([word for flag in ours for word in options.pop(flag, [])])
    if args.workers < 1:
        p.error("--workers must not be below 1")
    grids = PRESETS.get(args.preset, [""] if options else [])
    if not grids and not (args.out and args.out.exists()):
        p.error("give either a --preset, flags of train.py, or an --out with a table")
    folder = (args.out or pathlib.Path("out", args.preset or "sweep")).absolute()

    # train what has not ended; flags of the command line replace those of a preset
    runs = {}
    for text in grids:
        runs |= grid(options_of(f"--save-every 0 {text}".split()) | options, folder)
    missing = {out: line for out, line in runs.items() if not (out / "model.pt").exists()}
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(missing)} of {len(runs)} runs to do: see {folder}/*.txt")
    pool = ThreadPoolExecutor(args.workers)  # each thread waits for one process
    if args.scheduler:
        from distributed import Client

        try:
            pool = Client(args.scheduler, timeout=15).get_executor()
        except (OSError, ValueError) as error:
            p.error(f"no Dask cluster at {args.scheduler}: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops us as Ctrl-C does
    with pool:
        failed = sweep(missing, pool)

    # Figure 4 of the runs of Section 7, which has a mask, and asks for all symbols or the last
    rows = update_table(folder)
    rows = [row for row in rows if row["targets"] in ("all", "last")]
    rows = [row for row in rows if row["task"] == "chain" and row["causal"]]
    if rows:
        save_figure(figure_4(rows), folder / "figure4.png")
        print(f"{len(rows)} runs: {folder / 'figure4.png'}")
    if failed:
        sys.exit(f"sweep.py: {failed} runs failed; the same command continues them")


if __name__ == "__main__":
    main()
