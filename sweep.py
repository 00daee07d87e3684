"""Train many runs -> one table -> Figure 4: how many layers does each symbol need (Section 7)?

    python sweep.py --preset laptop          # a small Figure 4, an hour on 2 cores
    python sweep.py --preset night           # Figure 4, a night on 2 cores
    python sweep.py --layers 2 3 4 --heads 1 8 --seed 0 1 --D 4    # any grid: 12 runs
    python sweep.py --out results/sweep      # trains nothing, draws Figure 4 from the table there

Further flags are those of train.py, with one value or several, and --save-every 0 by default. Each
run is a process, train.py --resume, that prints into RUN.txt; if one fails, the others go on. The
same command continues what has not ended. The table keeps the runs whose directories are gone.

On a Dask cluster (pip install distributed) all machines see --out under one name, and each command
starts in a clone of this repository. Keep it private: whoever reaches it can run any code there.

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
from analyze import GRAY, INK, RED, crossings, panels, save_figure, symbol_color
from data import Task, command_line


LAPTOP = "--heads 8 --seed 0 1 2 --steps 3000 --layers 4 3 2 1"  # of a seed the slowest first
NIGHT = "--heads 8 --seed 0 1 2 --steps 10000 --layers 8 7 6 5 4 3 2 1"
PAPER = "--heads 8 --optimizer adamw --batch 512 --examples 1048576 --steps 10000 --stop-below 0"
PAPER += " --ema 0 --qk-std 0.02 --seed 0 1 2 3 4 5 6 7 --layers 8 7 6 5 4 3 2 1"
# asked for all symbols, and for the last of three alone. If a flag comes twice, the last counts
PRESETS = {
    "laptop": [LAPTOP, f"{LAPTOP} --targets last --layers 4 2"],
    "night": [f"{NIGHT} --D 5 --seed 0 1 2 3 4", f"{NIGHT} --targets last --layers 8 5 3 1"],
    "paper": [f"{PAPER} --D 5", f"{PAPER} --targets last"],
}


# ---- which runs


def split_flags(words):
    """Return {flag: [flag, value, ...]} of a command line; if a flag comes twice, the last one."""
    flags = {}
    for word in words:
        if word.startswith("--") or not flags:
            flag, *value = word.split("=", 1)
            flags[flag] = [flag, *value]
        else:
            flags[flag].append(word)
    return flags


def grid(flags, folder):
    """Return {run directory: command line of train.py}, one for each choice of a value per flag."""
    choices = []
    for flag, *values in flags.values():
        choices.append([[flag, value] for value in values] or [[flag]])
    runs = {}
    for chosen in itertools.product(*choices):
        line = [*itertools.chain(*chosen), "--resume"]
        out = train.parse_flags(line, folder).out
        line += ["--out", str(out)]
        if runs.setdefault(out, line) != line:
            train.parser().error(f"two runs would have one name, {out.name}: sweep them apart")
    return runs


# ---- training

STARTED = []  # the processes that this machine has started


def train_in_a_process(out, line):
    """Run this command line of train.py; return whether it failed, and why, or its final loss."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, train.__file__, *line]
    with open(f"{out}.txt", "a") as printed:
        process = subprocess.Popen(command, env=one_thread, stdout=printed, stderr=printed)
    STARTED.append(process)
    if code := process.wait():
        last = pathlib.Path(f"{out}.txt").read_text().strip().split("\n")[-1]
        return True, f"failed with exit code {code}: {last} (see {out}.txt)"
    return False, f"val {row_of(out)['val']:.4f}"


def sweep(runs, pool):
    """Train these {run directory: command line} in their order; return how many failed."""
    began, failed = time.time(), 0
    waiting = {pool.submit(train_in_a_process, out, line): out for out, line in runs.items()}
    try:
        for ended, future in enumerate(as_completed(waiting), 1):
            error = future.exception()  # of the cluster, or a file that cannot be read
            wrong, said = (True, error) if error else future.result()
            failed += wrong
            left = f"about {(time.time() - began) * (len(runs) / ended - 1) / 60:.0f} min left"
            print(f"{ended}/{len(runs)}, {left}: {waiting[future].name} {said}", flush=True)
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
    task, row = train.task_of(flags), train.values_of(flags)
    row.update(run=run.name, seconds=log[-1]["seconds"], ended=log[-1]["step"])
    last = [entry for entry in log if entry["step"] > row["ended"] - 100]
    for name in ("val", *task.target_names):
        row[name] = statistics.fmean(entry[name] for entry in last)
    return row | {f"{name}_learned": step for name, step in crossings(log, task).items()}


def update_table(table):
    """Write a row of each ended run beside a table into it; return all rows, of gone runs too."""
    rows = {row["run"]: row for row in train.read_file(table, [])}
    for file in sorted(table.parent.glob("*/model.pt")):
        try:
            rows[file.parent.name] = row_of(file.parent)
        except (OSError, ValueError, LookupError) as error:  # a file is missing, damaged, empty
            print(f"no new row of {file.parent.name}, which cannot be read: {error!r}")
    train.write_file(table, rows.values())
    return [train.DEFAULTS | row for row in rows.values()]


# ---- Figure 4, from the rows alone


def figure_4(rows):
    """Final losses by number of layers. Left: the mean of all symbols in runs asked for all, with
    the implicit curriculum (IC), and x_D in runs asked for it alone. Right: each symbol, with IC.
    If other flags vary too, each choice of their values is a column."""
    with_ic = [row for row in rows if row["targets"] == "all"]
    without = [row for row in rows if row["targets"] == "last"]
    # D may differ between the two
    varying = [name for name in train.DEFAULTS if len({row[name] for row in with_ic or rows}) > 1]
    varying = [name for name in varying if name != "seed"] or ["layers"]
    columns = {}  # {its label: its runs}
    for row in sorted(rows, key=lambda row: [row[name] for name in varying]):
        columns.setdefault("\n".join(str(row[name]) for name in varying), []).append(row)

    # left: the mean of all symbols
    figure, (left, right) = panels(2, 2, 6.5, 4, sharey=True)
    draw_losses(left, columns, with_ic, "val", INK, "all symbols, with IC\n")
    draw_losses(left, columns, without, "val", RED, "the last alone, without IC\n")
    left.set_title("Asked for all symbols, or for the last alone", pad=18)
    left.set_ylabel(f"final validation loss, {Task.loss_name}")

    # right: each symbol, and a triangle above each column with floor(log2 k) + 2 layers
    for k in range(1, 1 + max([row["D"] for row in with_ic], default=0)):
        shift, color = 0.08 * (k - 3), symbol_color(k)  # side by side in a column
        asked = [row for row in with_ic if row["D"] >= k]
        draw_losses(right, columns, asked, f"x_{k}", color, f"$x_{k}$ ", shift)
        for x, group in enumerate(columns.values()):
            if group[0]["layers"] == k.bit_length() + 1:
                above = right.get_xaxis_transform()
                right.text(x + shift, 1.02, "▼", color=color, ha="center", transform=above)
    right.set_title("Each symbol, with IC", pad=18)

    for axes in left, right:
        for chance in {Task(row["N"]).chance for row in rows}:
            axes.axhline(chance, color=GRAY, ls=":", label=f"{chance:.3g}: averages N candidates")
        axes.set(xlabel=", ".join(varying), ylim=(-0.02, max(1, axes.get_ylim()[1])))
        axes.set_xticks(range(len(columns)), columns)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    caption = f"""Dots are runs, lines means. By content, $x_k$ takes floor(log2 k) + 2 layers (▼).
Here (in the paper): {listed(rows, "optimizer")} (adam), batch {listed(rows, "batch")} (512),
{listed(rows, "steps")} steps (10000), or until the loss is below {listed(rows, "stop_below")}."""
    figure.supxlabel(caption)
    return figure


def draw_losses(axes, columns, runs, name, color, label, shift=0):
    """Draw a loss of each of these runs as a pale dot, and a line through the means."""
    means = {}  # {x: mean}
    for x, group in enumerate(columns.values()):
        if losses := [row[name] for row in group if row in runs]:
            axes.plot([x + shift] * len(losses), losses, "o", color=color, ms=4, alpha=0.3)
            means[x + shift] = statistics.fmean(losses)
    label += f"(D={listed(runs, 'D')}, n={len(runs)})"
    axes.plot([*means], [*means.values()], ".-", color=color, label=label if runs else "")


def listed(rows, name):
    """Return the values of a flag as text: "3", or "3 or 5"."""
    return " or ".join(map(str, sorted({row[name] for row in rows})))


def main():
    p = command_line("sweep.py", __doc__)
    p.add_argument("--preset", choices=PRESETS, help="a ready-made grid; other flags change it")
    p.add_argument("--out", type=pathlib.Path, help="folder; by default out/sweep, or out/PRESET")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at once, one a core")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of this machine")

    # the flags above are ours, and all others those of train.py
    flags = split_flags(sys.argv[1:])
    ours = ["--preset", "--out", "--workers", "--scheduler", "--help", "-h"]
    args = p.parse_args([word for flag in ours for word in flags.pop(flag, [])])
    grids = PRESETS.get(args.preset, [""] if flags else [])
    if not grids and not (args.out and args.out.exists()):
        p.error("give either a --preset, flags of train.py, or an --out with a table")
    folder = (args.out or pathlib.Path("out", args.preset or "sweep")).absolute()

    # train what has not ended; flags of the command line replace those of a preset
    runs = {}
    for text in grids:
        runs |= grid(split_flags(f"--save-every 0 {text}".split()) | flags, folder)
    missing = {out: line for out, line in runs.items() if not (out / "model.pt").exists()}
    table = folder / "results.jsonl"
    try:
        pool = ThreadPoolExecutor(args.workers)  # each thread waits for one process
        train.write_file(table, train.read_file(table, []))  # if it fails, then now
        if args.scheduler:
            from distributed import Client

            pool = Client(args.scheduler, timeout=15).get_executor()
    except (OSError, ValueError) as error:
        p.error(f"nothing is trained or drawn: {error}")
    print(f"{len(missing)} of {len(runs)} runs to do: see {folder}/*.txt", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops us as Ctrl-C does
    with pool:
        failed = sweep(missing, pool)

    # Figure 4 of the runs of Section 7, which has a mask, and asks for all symbols or the last
    rows = [row for row in update_table(table) if row["targets"] in ("all", "last")]
    rows = [row for row in rows if row["task"] == "chain" and row["causal"]]
    if rows:
        save_figure(figure_4(rows), folder / "figure4.png")
        print(f"{len(rows)} runs: {folder / 'figure4.png'}")
    if failed:
        sys.exit(f"sweep.py: {failed} runs failed; the same command continues them")


if __name__ == "__main__":
    main()
