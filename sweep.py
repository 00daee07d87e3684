"""Train many runs -> one table -> Figure 4: how many layers does each symbol need (Section 7)?

    python sweep.py --layers 2 3 4 --heads 1 8 --seed 0 1 --D 4    # any grid: 12 runs
    python sweep.py --out results/sweep      # trains nothing, draws Figure 4 from the table there

    # Figure 4: asked for all symbols, and for the last alone. An hour on 2 cores
    small="--heads 8 --seed 0 1 2 --steps 3000 --out out/small"
    python sweep.py $small --layers 4 3 2 1
    python sweep.py $small --layers 4 2 --targets last

Further flags are those of train.py, with one value or several (of a flag given twice the last
counts), and --save-every 0 by default. Each run is a process, train.py --resume, that prints into
RUN.txt; if one fails, the others go on. The same command continues what has not ended. The table
keeps the runs whose directories are gone.

On a Dask cluster (pip install distributed) all machines see --out under one name, and each command
starts in a clone of this repository. If you stop it, what has begun there goes on. Keep the cluster
private: whoever reaches it can run any code there.

    python -m dask scheduler --host tcp://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
    python -m dask worker tcp://10.0.0.1:8786 --nthreads 16    # so many runs at once
    python sweep.py --layers 8 7 6 5 --scheduler tcp://10.0.0.1:8786 --out /shared/deep
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
from analyze import GRAY, INK, RED, crossings, panels, save_figure, shown_name, symbol_color
from data import Task, command_line


# ---- training


def grid(flags, folder):
    """{run directory: command line of train.py}, one for each choice of a value per flag of
    {flag: [value, ...]}. FileExistsError if a directory would have two runs, or has another."""
    flags = {"--save-every": ["0"]} | flags
    # --lr 1 2 becomes [["--lr", "1"], ["--lr", "2"]], and --no-mlp or --lr=1 a single choice
    choices = [[[flag, value] for value in flags[flag]] or [[flag]] for flag in flags]
    runs = {}
    for chosen in itertools.product(*choices):
        line = [*itertools.chain(*chosen), "--resume"]
        values = train.parse_flags(line, folder)
        line += ["--out", str(values.out)]
        if runs.setdefault(values.out, line) != line:
            raise FileExistsError(f"two runs would have one name, {values.out.name}")
        if (values.out / "config.json").exists():
            train.refuse_another(values)
    return runs


STARTED = []  # the processes that this machine has started


def train_in_a_process(out, line):
    """Run this command line of train.py; return how it ended."""
    command = [sys.executable, train.__file__, *line]
    with open(f"{out}.txt", "a") as printed:
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=one_thread, stdout=printed, stderr=printed)
    STARTED.append(process)
    code = process.wait()
    return f"FAILED, see {out}.txt" if code else f"val {train.read_log(out)[-1]['val']:.4f}"


def train_all(runs, pool):
    """Train these {run directory: command line} in their order; return how many failed."""
    began, failed = time.time(), 0
    waiting = {pool.submit(train_in_a_process, out, line): out for out, line in runs.items()}
    try:
        for ended, future in enumerate(as_completed(waiting), 1):
            said = future.result()
            failed += said.startswith("FAILED")
            left = f"about {(time.time() - began) * (len(runs) / ended - 1) / 60:.0f} min left"
            print(f"{ended}/{len(runs)}, {left}: {waiting[future].name} {said}", flush=True)
    finally:
        for future in waiting:  # after Ctrl-C or SIGTERM start no other, stop those here
            future.cancel()
        for process in STARTED:
            process.terminate()
    return failed


# ---- the table


def row_of(run):
    """The row of a finished run: its flags, the last row of its log, and the step at which each
    symbol was learned."""
    flags, log = train.read_flags(run), train.read_log(run)
    learned = crossings(log, train.task_of(flags)).items()
    learned = {f"{name}_learned": step for name, step in learned}
    ended = dict(run=run.name, git=flags.git, ended=log[-1]["step"])
    return log[-1] | train.values_of(flags) | ended | learned  # lr is the flag, not the last rate


def update_table(table):
    """Write the rows of all ended runs in the folder of a table into it; return its rows, with
    those of runs that are gone."""

    def key(row):  # a name leaves out the defaults, which may have changed since
        return row["run"], *map((train.DEFAULTS | row).get, train.DEFAULTS)

    rows = {key(row): row for row in train.read_file(table, [])}
    for file in sorted(table.parent.glob("*/model.pt")):
        try:
            row = row_of(file.parent)
            rows[key(row)] = row
        except (OSError, ValueError, LookupError) as error:  # a file is missing, damaged, empty
            print(f"no new row of {file.parent.name}, which cannot be read: {error!r}")
    train.write_file(table, [*rows.values()])
    return [train.DEFAULTS | row for row in rows.values()]


# ---- Figure 4, from the rows alone


def figure_4(rows):
    """Final losses by number of layers, for each optimizer and batch. Left: the mean of all symbols
    in runs asked for all, with the implicit curriculum (IC), and x_D in runs asked for it alone.
    Right: each symbol, with IC. If other flags than D vary too, each choice of values is a
    column."""
    groups = {}  # Muon first
    for row in sorted(rows, key=lambda row: (row["optimizer"] != "muon", row["batch"])):
        groups.setdefault((row["optimizer"], row["batch"]), []).append(row)
    figure, grid = panels(2 * len(groups), 2, 6.5, 4, sharey=True)
    for group, left, right in zip(groups.values(), grid[::2], grid[1::2], strict=True):
        draw_losses(left, right, group)
    figure.supxlabel("""Dots are runs, lines means. The law: $x_k$ takes floor(log2 k) + 2 layers
if tokens are found by what they show, not by their places.
The paper has Adam, batch 512, and 10000 steps.""")
    return figure


def draw_losses(left, right, rows):
    """Draw the runs of one optimizer and batch into two panels of Figure 4."""
    varying = [name for name in train.DEFAULTS if len({row[name] for row in rows}) > 1]
    within = "seed", "targets", "D", "save_every"  # these may differ within a column
    varying = [name for name in varying if name not in within] or ["layers"]
    rows = sorted(rows, key=lambda row: [row[name] for name in varying])

    def column_of(row):
        return "\n".join(str(row[name]) for name in varying)

    def draw(axes, runs, name, color, label):
        """A loss of each of these runs as a pale dot, and a line through the means."""
        losses = {}  # {column: [loss of a run, ...]}
        for row in runs:
            losses.setdefault(column_of(row), []).append(row[name])
        for column, group in losses.items():
            axes.plot([column] * len(group), group, "o", color=color, ms=4, alpha=0.3)
        means = [statistics.fmean(group) for group in losses.values()]
        label = f"{label} (D={listed(runs, 'D')}, n={len(runs)})"
        axes.plot([*losses], means, ".-", color=color, label=label)

    for axes in left, right:
        axes.xaxis.update_units([column_of(row) for row in rows])  # the columns, in this order
    with_ic = [row for row in rows if row["targets"] == "all"]
    without = [row for row in rows if row["targets"] == "last"]
    if with_ic:
        draw(left, with_ic, "val", INK, "all symbols, with IC")
    if without:
        draw(left, without, "val", RED, "the last, without IC")
    settings = f"{listed(rows, 'optimizer')}, batch {listed(rows, 'batch')}"
    left.set_title(f"{settings}: asked for all symbols, or for the last alone", loc="left")
    left.set_ylabel(f"final validation loss, {Task.loss_name}")
    for k in range(1, 1 + max([row["D"] for row in with_ic], default=0)):
        label = f"{shown_name(f'x_{k}')}: {k.bit_length() + 1} layers by the law"
        draw(right, [row for row in with_ic if row["D"] >= k], f"x_{k}", symbol_color(k), label)
    right.set_title(f"{settings}: each symbol, with IC", loc="left")
    notes = f"""{", ".join(varying)}
{listed(rows, "dtype")}, {listed(rows, "steps")} steps, --stop-below {listed(rows, "stop_below")}"""
    for axes, N in itertools.product((left, right), sorted({row["N"] for row in rows})):
        axes.axhline(Task(N).chance, color=GRAY, ls=":", label=f"chance with {N} chains")
        axes.set(xlabel=notes, ylim=(-0.02, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def listed(rows, name):
    """The values of a flag as text: "3", or "3 or 5"."""
    return " or ".join(map(str, sorted({row[name] for row in rows})))


OWN = "--out", "--workers", "--scheduler", "--help", "-h"  # flags that train.py does not get


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops us as Ctrl-C does
    p = command_line("sweep.py", __doc__)
    p.add_argument("--out", type=pathlib.Path, default="out/sweep", help="folder of the runs")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once, one a core")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of this machine")

    # [flag, value, ...] for each, since those of train.py take several here: ours, and the others
    groups = [[]]  # the first: words before any flag, mostly none
    for word in sys.argv[1:]:
        name, *value = word.split("=", 1)
        if name.startswith(("--", "-h")):
            groups.append([name, *value])
        else:
            groups[-1].append(word)
    own = [group for group in groups if not group or group[0] in OWN]
    args = p.parse_args([*itertools.chain(*own)])
    flags = {group[0]: group[1:] for group in groups if group not in own}
    folder = args.out.absolute()
    if not (flags or [*folder.glob("*/model.pt"), *folder.glob("results.jsonl")]):
        p.error(f"there are no runs in {folder}: which flags of train.py shall vary?")
    try:
        runs = grid(flags, folder) if flags else {}
        pool = ThreadPoolExecutor(args.workers)  # each thread waits for one process
        if args.scheduler:
            from distributed import Client

            pool = Client(args.scheduler, timeout=15).get_executor()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        p.error(error)

    # train what has not ended
    ended = [out for out in runs if (out / "model.pt").exists()]
    missing = {out: line for out, line in runs.items() if out not in ended}
    if runs:
        print(f"{len(missing)} of {len(runs)} runs to do: see {folder}/*.txt", flush=True)
    if ended:
        commits = sorted({str(train.read_flags(out).git) for out in ended})
        print(f"the others are by the code of {', '.join(commits)}", flush=True)
    try:
        with pool:
            failed = train_all(missing, pool)
    except KeyboardInterrupt:
        sys.exit("sweep.py: stopped; the same command continues")

    # Figure 4 of the runs of Section 7, which has a mask, and asks for all symbols or the last
    rows = [row for row in update_table(folder / "results.jsonl") if row["task"] == "chain"]
    rows = [row for row in rows if row["targets"] in ("all", "last") and row["causal"]]
    if rows:
        save_figure(figure_4(rows), folder / "figure4.png")
        print(f"{len(rows)} runs: {folder / 'figure4.png'}")
    if failed:
        sys.exit(f"sweep.py: {failed} runs failed; the same command continues them")


if __name__ == "__main__":
    main()
