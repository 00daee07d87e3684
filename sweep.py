"""Train many runs -> one table -> Figure 4: how many layers does each symbol need (Section 7)?

python sweep.py --preset laptop              # a small Figure 4, an hour on 2 cores
python sweep.py --preset night               # Figure 4 with eight seeds: four hours on 2 cores
python sweep.py --layers 2 3 4 --seeds 5 --flags "--heads 8 --D 4"  # any grid of train.py
python sweep.py --preset paper --scheduler tcp://10.0.0.1:8786 --out /shared/paper

Every run is a run directory as train.py leaves it, and one row of results.jsonl, written when the
run ends. After a stop the same command continues; when all have ended it draws the figure again.

On a Dask cluster all machines see the folder under the same name, and every command is started in a
clone of this repository. Whoever reaches a scheduler can run any code on its workers: keep it in a
network of your own, or add Dask's TLS.

python -m dask scheduler --host tcp://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
python -m dask worker tcp://10.0.0.1:8786 --nthreads 1 --nworkers 16
"""

import contextlib
import pathlib
import shlex
import statistics
import sys
import threading
import time

import matplotlib.pyplot as plt
import torch

import train
from analyze import crossings, save_figure, symbol_color
from data import UserError, command_line, number, program
from train import DEFAULTS, Flags, read_log, read_rows, write_rows


PLAIN = "--ema 0 --qk-std 0.02 --stop-below 0"  # the last weights are evaluated
LAPTOP = f"{PLAIN} --heads 8 --lr 2e-3 --decay 0.3"
WITH_IC = f"{LAPTOP} --D 5 --steps 1500"
WITHOUT_IC = f"{LAPTOP} --D 3 --steps 1500 --no-ic"
PAPER = f"{PLAIN} --heads 8 --batch 512 --examples 1048576 --steps 10000"
PRESETS = {  # name: [(flags of train.py, layers, number of seeds), ...]
    "laptop": [(WITH_IC, range(1, 6), 3), (WITHOUT_IC, (1, 3, 5), 3)],
    "night": [(WITH_IC, range(1, 9), 8), (WITHOUT_IC, range(1, 9), 3)],
    "paper": [(f"{PAPER} --D 5", range(1, 9), 8), (f"{PAPER} --D 3 --no-ic", range(1, 9), 8)],
}

PATIENCE = 15  # seconds within which a scheduler must answer, and a worker must come


def grid(groups, folder):
    """Return [Flags, ...] of every run of the groups, which are as in PRESETS, the longest run
    first. A wrong flag ends the program as in train.py."""
    by_name = {}  # two groups may share a run
    for text, layers, seeds in groups:
        for name in {"--layers", "--seed", "--out"} & {*text.replace("=", " ").split()}:
            raise UserError(f"--flags must not hold {name}, which the grid sets")
        for count in layers:
            for seed in range(seeds):
                run = f"{text} --layers {count} --seed {seed} --resume"
                flags = train.parse_flags(shlex.split(run), folder)
                by_name[flags.out.name] = flags
    return sorted(by_name.values(), key=cost, reverse=True)


def cost(flags):
    """The cost of a run relative to others: how many tokens go through a layer."""
    return flags.steps * flags.batch * flags.layers * flags.problem.T


# ---- the table, {run: row}


def row_of(flags, error=None):
    """Return the row of a run: its flags, its error or None, its final losses (means over the last
    100 steps), and the step at which each symbol was learned."""
    error = error and f"{type(error).__name__}: {error}"
    row = flags.settings | dict(run=flags.out.name, error=error)
    if error:
        return row
    log = read_log(flags.out)
    row |= dict(seconds=log[-1]["seconds"], ended=log[-1]["step"])
    last = [entry for entry in log if entry["step"] > row["ended"] - 100]
    for name in ("val", *flags.target_names):
        row[name] = sum(entry[name] for entry in last) / len(last)
    return row | {f"{name}_learned": step for name, step in crossings(log, flags).items()}


def read_table(path):
    """Return the table, {} without a file; a flag that did not exist then has its default."""
    rows = read_rows(path) if path.exists() else []
    return {row["run"]: Flags(**DEFAULTS).settings | row for row in rows}


# ---- running


def connect(scheduler, workers):
    """Return a Dask client: of the cluster at this address or, without one, of new processes on
    this machine, which no other machine can reach. UserError if there is no such cluster."""
    from distributed import Client

    if not scheduler:
        size = dict(n_workers=workers, threads_per_worker=1, silence_logs="CRITICAL")
        return Client(host="127.0.0.1", dashboard_address="127.0.0.1:0", **size)
    answers = []

    def ask():
        try:
            client = Client(scheduler, timeout=PATIENCE)
            client.wait_for_workers(1, timeout=PATIENCE)
            answers.append(client)
        except Exception as error:  # an address can be wrong in many ways
            answers.append(error)

    # in a thread, since a server of another kind may let a client wait for ever
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * PATIENCE)
    [client] = answers or [TimeoutError(f"no answer in {2 * PATIENCE} seconds")]
    if isinstance(client, Exception):
        raise UserError(f"no Dask cluster with workers at {scheduler}: {client}")
    if max(client.nthreads().values()) > 1:  # torch has one random generator per process
        raise UserError("a worker has several threads: start workers with --nthreads 1")
    return client


def run_and_report(flags):
    """Train a run, or continue it, and return its row. This is what a worker does."""
    torch.set_num_threads(1)
    train.keep_freed_memory()
    try:
        with open(f"{flags.out}.txt", "a") as printed, contextlib.redirect_stdout(printed):
            train.run_once(flags)
        return row_of(flags)
    except Exception as error:
        return row_of(flags, error)


def sweep(to_do, table, path, client):
    """Train the runs to_do in their order. Whenever one ends, its row joins the table and the file
    at `path`."""
    from distributed import as_completed

    print(f"{len(to_do)} runs to do; their progress is in {path.parent}/*.txt", flush=True)
    began, done, total, waiting = time.time(), 0, sum(map(cost, to_do)), {}
    for flags in to_do:
        waiting[client.submit(run_and_report, flags, pure=False, priority=cost(flags))] = flags
    for ended, future in enumerate(as_completed([*waiting]), 1):
        error, flags = future.exception(), waiting[future]  # an error of the cluster
        row = row_of(flags, error) if error else future.result()
        table[row["run"]] = row
        write_rows(path, table.values())

        # the time left, at the speed so far
        done += cost(flags)
        minutes = (time.time() - began) * (total / done - 1) / 60
        progress = f"{ended}/{len(to_do)} runs, about {minutes:.0f} min left"
        print(f"{progress}: {row['run']} {row['error'] or round(row['val'], 4)}", flush=True)


# ---- Figure 4, from the table alone


def section_7(rows):
    """Return the runs of the kind that Section 7 trains, with and without implicit curriculum."""
    rows = [row for row in rows if row["task"] == "chain" and row["causal"]]
    return [row for row in rows if not (row["targets"] or row["init"] or row.get("circuit"))]


def draw_losses(axes, rows, column, color, label, shift):
    """Draw every run as a dot, shifted sideways, and bars at the middle run, or the middle two."""
    by_layers = {}
    for row in [row for row in rows if column in row]:
        by_layers.setdefault(row["layers"] + shift, []).append(row[column])
    for x, losses in by_layers.items():
        axes.plot([x] * len(losses), losses, "o", color=color, ms=4, alpha=0.4)
    middle = [statistics.median_low(losses) for losses in by_layers.values()]
    middle += [statistics.median_high(losses) for losses in by_layers.values()]
    axes.plot([*by_layers] * 2, middle, "_", color=color, ms=9, mew=2, label=label)


def figure_4(rows):
    """Above: final validation loss by layers, with and without the implicit curriculum. Below: each
    symbol's loss by layers, with an arrow at the floor(log2 k) + 2 layers of reading by content."""
    size = dict(figsize=(7.5, 8), layout="constrained", sharex=True)
    figure, (above, below) = plt.subplots(2, 1, **size)
    groups = ("with", True, "tab:blue", -0.12), ("without", False, "tab:red", 0.12)
    for name, ic, color, shift in groups:
        group = [row for row in rows if row["ic"] == ic]
        D = " and ".join(map(str, sorted({row["D"] for row in group})))
        label = f"{name} implicit curriculum (D={D}, {len(group)} runs)"
        draw_losses(above, group, "val", color, label, shift)
    above.set_title("Final loss: a dot per run, bars at the middle runs")

    # below: symbol by symbol
    curriculum, possible = [row for row in rows if row["ic"]], {}
    last = max([row["D"] for row in curriculum], default=0)
    for k in range(1, last + 1):
        color, shift = symbol_color(k, last), 0.15 * (k - (1 + last) / 2)
        draw_losses(below, curriculum, f"x_{k}", color, f"$x_{k}$", shift)
        possible.setdefault(k.bit_length() + 1, []).append(f"$x_{k}$")
    style = dict(textcoords="offset points", ha="center", fontsize="small")
    for depth, names in possible.items():
        text, arrow = ", ".join(names) + "\nby content", dict(arrowstyle="->")
        below.annotate(text, (depth, 0.93), (0, 22), arrowprops=arrow, **style)
    below.set_title("Each symbol alone, with implicit curriculum")

    # both: the plateau
    for axes, columns in (above, 1), (below, 3):
        average, _ = Flags(**rows[0]).problem.plateaus[-1]
        axes.axhline(average, color="gray", ls=":", lw=1, label="average of the candidates")
        axes.set(xlabel="layers", ylabel="validation MSE", ylim=(0, 1.2))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="upper right", ncols=columns, fontsize="small")
    return figure


def main():
    p, cores, count = command_line("sweep.py", __doc__), torch.get_num_threads(), number(int, 1)
    p.add_argument("--preset", choices=PRESETS, help="a ready-made grid; or make your own:")
    p.add_argument("--layers", type=count, nargs="+", help="depths of the grid")
    p.add_argument("--seeds", type=count, help="seeds 0, 1, ... per point, 3 by default")
    p.add_argument("--flags", action="append", help="of train.py for all runs; twice for two sets")
    p.add_argument("--out", type=pathlib.Path, help="folder; by default out/sweep, or out/PRESET")
    p.add_argument("--workers", type=count, default=cores, help="processes, with one thread each")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of processes here")
    # the value of --flags begins with --, which argparse takes only after =
    args = p.parse_args(shlex.split(shlex.join(sys.argv[1:]).replace("--flags ", "--flags=")))
    if bool(args.preset) == bool(args.layers or args.flags or args.seeds) or not (
        args.preset or args.layers
    ):
        p.error("give a --preset, or your own grid with --layers, --seeds and --flags")
    with program("sweep.py"):
        folder = args.out or pathlib.Path("out", args.preset or "sweep")
        groups = [(text, args.layers, args.seeds or 3) for text in args.flags or [""]]
        to_do = grid(PRESETS.get(args.preset, groups), folder.absolute())
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.jsonl"
        table = read_table(path)
        done = {name for name, row in table.items() if not row["error"]}

        # run what has no row yet, then draw the table, also when the cluster is lost before
        try:
            if missing := [flags for flags in to_do if flags.out.name not in done]:
                with connect(args.scheduler, args.workers) as client:
                    sweep(missing, table, path, client)
        finally:
            if rows := section_7(row for row in table.values() if not row["error"]):
                save_figure(figure_4(rows), folder / "figure4.png")
                print(f"{len(rows)} of {len(table)} runs: {folder / 'figure4.png'}", flush=True)
        if failed := sum(bool(table[flags.out.name]["error"]) for flags in to_do):
            raise UserError(f"{failed} runs failed, see {path}; the same command tries them again")


if __name__ == "__main__":
    main()
