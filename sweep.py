"""Train many runs -> one table -> Figure 4: how many layers does each symbol need (Section 7)?

python sweep.py --preset laptop              # a small Figure 4, an hour on 2 cores
python sweep.py --preset night               # Figure 4, eight seeds with IC: four hours on 2 cores
python sweep.py --layers 2 3 4 --seeds 5 --heads 8 --D 4  # any grid
python sweep.py --preset paper --scheduler tcp://10.0.0.1:8786 --out /shared/paper

Further flags are those of train.py, for every run. A run is a run directory as train.py leaves it
and, when it ends, a row of results.jsonl. At the end the figure is drawn of all rows that are of
Section 7. After a stop the same command continues, and a second grid with the same --out joins the
table and the figure.

On a Dask cluster all machines see the folder under the same name, and every command is started in a
clone of this repository; --device and --dtype, if left out, are those of the machine that starts
the sweep. Whoever reaches a scheduler can run any code on its workers: keep it in a network of your
own, or add Dask's TLS.

python -m dask scheduler --host tcp://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
python -m dask worker tcp://10.0.0.1:8786 --nthreads 1 --nworkers 16
"""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import logging
import math
import pathlib
import statistics
import time
import traceback

from analyze import crossings, save_figure, symbol_color
from data import LOSS, UserError, average_loss, command_line, number, program
from train import (
    DEFAULTS,
    UNNAMED,
    keep_freed_memory,
    parse_flags,
    read_file,
    read_log,
    run_once,
    write_file,
    writing,
)

import torch
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
PATIENCE = 15  # seconds, with a scheduler that does not answer
GONE = (OSError, concurrent.futures.CancelledError)  # raised when the cluster is lost


# ---- running


def grid(words, layers, seeds, folder):
    """Return [Flags, ...], a run for each depth and seed; words: further flags of train.py, a list.
    A flag that train.py does not read ends the program."""
    if any(word.startswith("--seed") for word in words):
        raise UserError("leave out --seed: the grid has seeds 0, 1, ..., as many as --seeds says")
    runs = []
    for depth in layers:
        for seed in range(seeds):
            point = f"--layers {depth} --seed {seed} --resume".split()
            runs.append(parse_flags([*words, *point], folder))
    return runs


def cost(flags):
    """The cost of a run relative to others: how many tokens go through a layer."""
    return flags.steps * flags.batch * flags.layers * flags.problem.T


def unfinished(runs, path):
    """Return the runs that have no row in the table, or one with an error; UserError if a row has
    another setting that no name says."""
    table = read_table(path)
    missing = []
    for flags in runs:
        row = table.get(flags.out.name)
        if not row or row["error"]:
            missing.append(flags)
        elif any(row[name] != flags.settings[name] for name in UNNAMED):
            raise UserError(f"{flags.out} has other {' or '.join(UNNAMED)}: choose another --out")
    return missing


def run_and_report(flags):
    """Train a run, or continue it, and return its row. This is what a worker does."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with open(f"{flags.out}.txt", "a", 1) as printed, contextlib.redirect_stdout(printed):
        try:
            run_once(flags)
        except Exception as error:
            traceback.print_exc(file=printed)
            return row_of(flags, error)
    return row_of(flags)


def sweep(runs, path, client):
    """Train the runs in their order. Whenever one ends, its row joins the table at `path`."""
    from distributed import as_completed

    merge(path, {})  # makes the folder
    print(f"{len(runs)} runs to do; their progress is in {path.parent}/*.txt")
    began = time.time()
    waiting = {client.submit(run_and_report, flags, pure=False): flags for flags in runs}
    done, total = 0, sum(map(cost, runs))
    for ended, future in enumerate(as_completed(waiting), 1):
        flags = waiting[future]
        error = future.exception()  # of the cluster; run_and_report catches those of the run
        row = row_of(flags, error) if error else future.result()
        merge(path, {row["run"]: row})

        # the time left, at the speed so far
        done += cost(flags)
        minutes = (time.time() - began) * (total / done - 1) / 60
        progress = f"{ended}/{len(runs)} runs, about {minutes:.0f} min left"
        print(f"{progress}: {row['run']} {row['error'] or round(row['val'], 4)}")


def connect(scheduler, workers):
    """Return a Dask client: of the cluster at this address or, without one, of new processes on
    this machine, which no other machine can reach. UserError if there is no such cluster."""
    from distributed import Client, rpc

    logging.disable(logging.ERROR)  # errors of the cluster are raised
    if not scheduler:
        size = dict(n_workers=workers, threads_per_worker=1, memory_limit=0)
        here = dict(host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs="CRITICAL")
        return Client(**here, **size)

    async def knock():  # a server of another kind would let a Client wait for ever
        async with rpc(scheduler) as server:
            await asyncio.wait_for(server.identity(), PATIENCE)

    try:
        asyncio.run(knock())
        client = Client(scheduler, timeout=PATIENCE)
        client.wait_for_workers(1, timeout=PATIENCE)
    except Exception as error:  # an address can be wrong in many ways
        text = f"no Dask cluster with workers at {scheduler}: {type(error).__name__} {error}"
        raise UserError(" ".join(text.split())) from None
    if max(client.nthreads().values()) > 1:  # torch has one random generator per process
        raise UserError("a worker has several threads: start workers with --nthreads 1")
    return client


# ---- the table, {run: row}


def row_of(flags, error=None):
    """Return the row of a run: its flags, and its error or its final losses (means over the
    evaluations of the last 100 steps) and the step at which each symbol was learned."""
    said = f"{type(error).__name__}: {error}" if error else None
    row = dict(flags.settings, run=flags.out.name, error=said)
    if error:
        return row
    log = read_log(flags.out)
    row["seconds"], row["ended"] = log[-1]["seconds"], log[-1]["step"]
    last = [entry for entry in log if entry["step"] > row["ended"] - 100]
    for name in ("val", *flags.target_names):
        row[name] = sum(entry[name] for entry in last) / len(last)
    for name, step in crossings(log, flags).items():
        row[f"{name}_learned"] = step
    return row


def merge(path, rows):
    """Join rows {run: row} to the table at `path`, while other sweeps may do so too."""
    with writing(path), open(f"{path}.lock", "w") as lock:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        write_file(path, {**read_table(path), **rows}.values())


def read_table(path):
    """Return the table, {} without a file; a flag that did not exist then has its default."""
    return {row["run"]: {**DEFAULTS, **row} for row in read_file(path, [])}


# ---- Figure 4, from the table alone


def section_7(rows):
    """Return the rows of runs as in Section 7: causal chains that predict all symbols or x_D alone,
    from random weights, without an intervention."""
    causal = [row for row in rows if row["task"] == "chain" and row["causal"]]
    return [row for row in causal if not (row["targets"] or row["init"] or row["intervene"])]


def figure_4(rows):
    """Above: final validation loss by layers, with and without the implicit curriculum. Below: each
    symbol's loss by layers, with an arrow at the floor(log2 k) + 2 layers of reading by content."""
    figure = Figure(figsize=(7.5, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    with_ic = [row for row in rows if row["ic"]]
    without = [row for row in rows if not row["ic"]]
    draw_losses(above, with_ic, "val", "tab:blue", label_of("with", with_ic), -0.12)
    draw_losses(above, without, "val", "tab:red", label_of("without", without), 0.12)
    above.set_title("Final loss: a dot per run, bars at the middle runs")

    # below: symbol by symbol
    last = max([row["D"] for row in with_ic], default=0)
    by_depth = {}
    for k in range(1, last + 1):
        shift = 0.15 * (k - (1 + last) / 2)
        draw_losses(below, with_ic, f"x_{k}", symbol_color(k, last), f"$x_{k}$", shift)
        depth = k.bit_length() + 1  # floor(log2 k) + 2
        by_depth.setdefault(depth, []).append(f"$x_{k}$")
    style = dict(textcoords="offset points", ha="center", fontsize="small")
    style["arrowprops"] = dict(arrowstyle="->")
    for depth, names in by_depth.items():
        below.annotate(f"{', '.join(names)}\nby content", (depth, 0.93), (0, 22), **style)
    below.set_title("Each symbol alone, with implicit curriculum")

    # both: the losses of averages
    for axes, columns in (above, 1), (below, 3):
        for N in sorted({row["N"] for row in rows} - {1}):
            label = f"average of {N} candidates"
            axes.axhline(average_loss(N), color="gray", ls=":", lw=1, label=label)
        axes.set(xlabel="layers", ylabel=f"validation {LOSS}")
        axes.set_ylim(0, 1.2 * average_loss(math.inf))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper right", ncols=columns, fontsize="small")
    return figure


def label_of(name, rows):
    D = " and ".join(str(D) for D in sorted({row["D"] for row in rows}))
    return f"{name} implicit curriculum (D={D}, {len(rows)} runs)"


def draw_losses(axes, rows, column, color, label, shift):
    """Draw every run as a dot, shifted sideways, and bars at the middle run, or the middle two;
    nothing without runs."""
    if not rows:
        return
    by_layers = {}
    for row in rows:
        if column in row:
            by_layers.setdefault(row["layers"] + shift, []).append(row[column])
    layers, middle = [], []
    for x, losses in by_layers.items():
        axes.plot([x] * len(losses), losses, "o", color=color, ms=4, alpha=0.4)
        layers += [x, x]
        middle += [statistics.median_low(losses), statistics.median_high(losses)]
    axes.plot(layers, middle, "_", color=color, ms=9, mew=2, label=label)


def main():
    p, count = command_line("sweep.py", __doc__), number(int, 1, 10**4)
    p.add_argument("--preset", choices=PRESETS, help="a ready-made grid; or make your own:")
    p.add_argument("--layers", type=count, nargs="+", help="depths of the grid")
    p.add_argument("--seeds", type=count, help="0, 1, ... per point; else 3, or the preset's")
    p.add_argument("--out", type=pathlib.Path, help="folder; by default out/sweep, or out/PRESET")
    cores = torch.get_num_threads()
    p.add_argument("--workers", type=count, default=cores, help="processes, with one thread each")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of processes here")
    with program("sweep.py"):
        args, words = p.parse_known_args()  # words: the flags of train.py
        if bool(args.preset) == bool(args.layers):
            raise UserError("give either a --preset, or the --layers of your own grid")
        folder = args.out or pathlib.Path("out", args.preset or "sweep")
        runs = {}  # by folder, since a depth, or with more flags a grid, may be there twice
        for text, layers, seeds in PRESETS.get(args.preset, [("", args.layers, 3)]):
            flags = [*text.split(), *words]
            for run in grid(flags, layers, args.seeds or seeds, folder.absolute()):
                runs[run.out] = run
        path = folder / "results.jsonl"

        # run what has no row yet, the longest first
        missing = sorted(unfinished(runs.values(), path), key=cost, reverse=True)
        lost = ""
        if missing:
            try:
                with connect(args.scheduler, args.workers) as client:
                    sweep(missing, path, client)
            except GONE as error:
                lost = f"the cluster is lost ({type(error).__name__}), "

        table = read_table(path)
        rows = section_7(row for row in table.values() if not row["error"])
        if rows:
            save_figure(figure_4(rows), folder / "figure4.png")
            print(f"{len(rows)} of {len(table)} runs: {folder / 'figure4.png'}")
        else:
            print("nothing to draw: no run ended that is of Section 7 (a causal chain)")
        failed = unfinished(runs.values(), path)
        if failed:
            text = f"{lost}{len(failed)} runs failed or never ended, see {path}"
            raise UserError(f"{text}; the same command continues")


if __name__ == "__main__":
    main()
