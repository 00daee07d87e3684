"""Many runs -> one table -> Figure 4: how many layers does each token need (Section 7)?

python sweep.py --preset laptop              # a small Figure 4, an hour on 2 cores
python sweep.py --preset night               # Figure 4 with eight seeds: four hours on 2 cores
python sweep.py --preset law                 # what each depth can do, and what training finds
python sweep.py --layers 2 3 4 --seeds 5 --flags "--heads 8 --D 4"  # any grid of train.py
python sweep.py --preset laptop --plot-only  # the figures again, from results.jsonl alone
python sweep.py --preset paper --scheduler tls://10.0.0.1:8786 --out /shared/paper

Every run is a run directory as train.py leaves it, and one row of results.jsonl, written when the
run ends (pandas.read_json(..., lines=True) reads it). What is in the table is not run again; what
was stopped in the middle goes on where it was, on whichever worker takes it. On a GPU several
workers share the card: --workers says how many.

On a cluster of Dask all machines see the folder under the same name, and each worker is started in
a clone of this repository. Whoever reaches a scheduler or worker has it run any code, so let them
know each other by one certificate in that folder, named in the shell of each of these commands and
of sweep.py:

openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=sweep -keyout dask.pem -out dask.pem
export DASK_DISTRIBUTED__COMM__TLS__{CA_FILE,{SCHEDULER,WORKER,CLIENT}__CERT}=/shared/dask.pem
python -m dask scheduler --host tls://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
cd clone && python -m dask worker tls://10.0.0.1:8786 --nthreads 1 --nworkers 16
"""

import asyncio
import collections
import contextlib
import itertools
import logging
import math
import shlex
import statistics
import sys
import time
from pathlib import Path

from parts import Refused, program, runs
from parts.flags import ROWS, SETTINGS, Flags, check, command_line
from parts.flow import DEPTH_LAWS, causal_depth

import torch

import train
from data import chain


PLAIN = "--ema 0 --qk-std 0.02 --target 0"  # the last weights count
LAPTOP = f"{PLAIN} --heads 8 --lr 2e-3 --decay 0.3"
WITH_IC = f"{LAPTOP} --D 5 --steps 1500"
WITHOUT_IC = f"{LAPTOP} --D 3 --steps 1500 --no-ic"
PAPER = f"{PLAIN} --heads 8 --batch 512 --examples 1048576 --steps 10000"
HELD = f"{PLAIN} --D 8 --circuit minimal --steps 400"


def waiting():
    """How long models, most of them small, wait until x_1 is learned: each run ends when half of
    its loss at the plateau is gone."""
    small = f"{PLAIN} --heads 4 --width 64 --batch 64 --dtype float32"
    small += " --decay 0 --warmup 0 --eval-every 20"
    points = [f"--targets 1 --D {D}" for D in (2, 3, 5)]
    points += [f"--targets 1 --D 2 --task {task}" for task in ("unlinked", "first_step_first")]
    held = "previous", "query", "induction"
    points += [f"--targets 1 --D {D} --circuit {part}" for part in held for D in (1, 2)]
    points += [f"--targets 1 --D {D} --qk-std {std}" for std in (0.05, 0.1, 0.2) for D in (1, 2)]
    points += [f"--D 1 --batch {batch}" for batch in (32, 128, 256, 512)]
    points = {f"--D 1 --N {N}": N for N in (2, 3, 4, 6, 8, 12)} | dict.fromkeys(points, 4)
    groups = []
    for point, N in points.items():
        target = chain(N, 1).destroyed
        for optimizer, rotary in itertools.product(("muon", "adamw"), ("input", "qk")):
            own = f"{small} {point} --optimizer {optimizer} --rotary {rotary} --steps 2400"
            layers = (4, 2, 12) if point == "--D 1 --N 4" else [4]
            groups.append((f"{own} --target {target:.6g}", layers, 5))

    # three points at the size of the main command, which warms up
    for N, D in (4, 1), (8, 1), (4, 2):
        own = f"--qk-std 0.02 --N {N} --D {D} --targets 1 --eval-every 20"
        groups.append((f"{own} --target {chain(N, 1).destroyed:.6g}", [12], 3))
    return groups


PRESETS = {  # name: [(flags of train.py, layers, number of seeds), ...]
    "laptop": [
        (WITH_IC, range(1, 6), 3),
        (WITHOUT_IC, (1, 3, 5), 3),
    ],
    "night": [
        (WITH_IC, range(1, 9), 8),
        (WITHOUT_IC, range(1, 9), 3),
    ],
    "law": [
        (WITH_IC, range(1, 6), 3),
        (f"{LAPTOP} --D 5 --steps 2000 --no-causal --rotary qk", range(2, 5), 2),
        (f"{HELD} --heads 1", range(1, 6), 2),
        (f"{HELD} --heads 2 --no-causal", range(1, 5), 2),
    ],
    "waiting": waiting(),
    "paper": [(f"{PAPER} --D 5", range(1, 9), 8), (f"{PAPER} --D 3 --no-ic", range(1, 9), 8)],
}
PATIENCE = 15  # seconds in which a scheduler must answer, and a worker come (back)
OURS = {"--layers": "--layers", "--seed": "--seeds", "--seeds": "--seeds", "--out": "--out"}


# ---- which runs


def grid(groups, folder):
    """[Flags, ...] of every run of the groups, which are as in PRESETS. Refused for flags that are
    not those of all runs; a flag that train.py refuses ends the program as there."""
    by_name = {}  # the same run twice is one
    for text, layers, seeds in groups:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise Refused(f"--flags {text!r} is cut off ({error}): close the quote") from None
        for name in {word.partition("=")[0] for word in words} & OURS.keys():
            instead = f"give {OURS[name]} to sweep.py itself"
            raise Refused(f"--flags must not hold {name}, which the grid sets: {instead}")
        for count in layers:
            for seed in range(seeds):
                run = f"--layers {count} --seed {seed} --resume".split()
                own = train.parse_flags([*words, *run])
                own.out = folder / own.out.name
                if by_name.setdefault(own.out.name, own) != own:
                    what = f"two sets have a run {own.out.name}"
                    raise Refused(f"{what}: give each its own --out")
    return list(by_name.values())


def cost(flags):
    """What a run costs beside others: tokens that go through a layer."""
    return flags.steps * flags.batch * flags.layers * flags.problem.T


# ---- the table, {run: row}: a row is a dict of the run's flags, of how it ended, its final losses
# (the mean over the last 100 steps) and the step at which each symbol was learned


def row_of(flags, error=None):
    """The row of a run that has ended, or of one that failed, with the error."""
    row = {name: getattr(flags, name) for name in SETTINGS}
    row |= dict(run=flags.out.name, error=one_line(error) if error else None)
    if error:
        return row
    log = runs.read_log(flags.out)
    row |= dict(seconds=log[-1]["seconds"], ended=log[-1]["step"])
    late = [entry for entry in log if entry["step"] > row["ended"] - 100]
    for name in ("val", *flags.symbols):
        row[name] = sum(entry[name] for entry in late) / len(late)
    return row | {f"{name}_learned": step for name, step in runs.crossings(log, flags).items()}


def one_line(error):
    """An exception as printable text; ours say in a sentence what to do, others are named."""
    text = "".join(filter(str.isprintable, " ".join(str(error).split())))
    ours = isinstance(error, (FloatingPointError, Refused))
    return text if ours else f"{type(error).__name__}: {text}"


def read_table(path):
    """The table; {} if there is no such file. A flag that is younger than it has its default.
    Refused if it holds anything else, or a row that is not what its run left."""
    if not path.exists():
        return {}
    table, defaults = {}, {name: ROWS[name].default for name in SETTINGS}
    for number, row in enumerate(runs.read_json(path, lines=True), 1):
        row = defaults | runs.BEFORE | row
        try:
            flags = Flags(**row, out=path.parent / row["run"])
            check(flags)
            numbers = [] if row["error"] else ["seconds", "ended", "val", *flags.symbols]
            learned = [f"{name}_learned" for name in numbers[3:]]  # a number, or None
            right = row.keys() == {*defaults, "run", "error", *numbers, *learned}
            right &= all(type(row[name]) in (int, float) for name in numbers)
            right &= all(isinstance(row[name], (int, float, type(None))) for name in learned)
            if not row["error"] and (flags.out / "model.pt").exists():
                right &= row == row_of(runs.read_flags(flags.out))
        except (KeyError, TypeError, ValueError):
            right = False
        if not right:
            again = "delete the file, and the same command makes it from the runs"
            raise Refused(f"{path}, line {number}, is no row of its run: {again}")
        table[row["run"]] = row
    return table


# ---- the cluster


def connect(scheduler, workers):
    """A Dask client: of the cluster at this address, or of so many processes here. Refused or
    ConnectionError with one line if there is none."""
    import dask
    from distributed import Client, LocalCluster

    # try a run again when its worker dies; notice within 30 seconds, and in one line, when a
    # scheduler does
    dask.config.set({"distributed.scheduler.allowed-failures": 10})
    dask.config.set({"distributed.comm.timeouts.connect": "5s"})
    dask.config.set({"distributed.comm.timeouts.tcp": "15s"})
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)

    # processes here, which nobody else reaches
    if not scheduler:
        where = dict(host="127.0.0.1", dashboard_address="127.0.0.1:0")
        size = dict(n_workers=workers, threads_per_worker=1)
        return Client(LocalCluster(**size, **where, silence_logs=logging.CRITICAL))

    # or a cluster; what is no Dask would keep Client waiting for ever
    try:
        asyncio.run(asyncio.wait_for(identity(scheduler), PATIENCE))
    except Exception as error:  # and fails in its own way
        what = f"no Dask scheduler answers at {scheduler} ({one_line(error)})"
        raise Refused(f"{what}: start one, or correct --scheduler") from None
    client = Client(scheduler, timeout=5)
    check_workers(client)
    if max(client.nthreads().values()) > 1:
        what = "a worker with several threads would mix up the runs"
        raise Refused(f"{what}: start workers with --nthreads 1")
    try:
        same = {*client.run(lambda: runs.code_hash()).values()} == {runs.code_hash()}
    except Exception:  # Dask says in its own way that there is no such module
        same = False
    if not same:
        what = "a worker has other code than this, or none"
        raise Refused(f"{what}: cd into a clone as this one, then python -m dask worker")
    return client


async def identity(address):
    """What a scheduler says of itself; raises for anything else."""
    from distributed import Security
    from distributed.core import rpc

    connection = Security().get_connection_args("client")
    async with rpc(address, timeout=5, connection_args=connection) as there:
        kind = (await there.identity())["type"]
    if kind != "Scheduler":
        raise Refused(f"this is a {kind}")


def check_workers(client):
    """ConnectionError with one line if there is no worker, nor comes one. Processes here are
    started again by Dask, however long it takes."""
    if client.cluster:
        return
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except (OSError, asyncio.TimeoutError):
        what = f"there is no worker at {client.scheduler.address}"
        again = "start some (see --help), and the same command goes on"
        raise lost(f"{what}: {again}") from None


def lost(what):
    return ConnectionError(None, what, "the cluster")


# ---- running


def run_and_report(flags):
    """Train a run, or go on with it, and return its row. This is what a worker does."""
    torch.set_num_threads(1)
    train.keep_freed_memory()
    try:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{flags.out}.txt", "a") as printed, contextlib.redirect_stdout(printed):
            train.run_once(flags)
        return row_of(flags)
    except Exception as error:
        return row_of(flags, error)


def rows_as_runs_end(waiting, client):
    """Yield the rows of the runs in waiting, {future: flags}, as they end, and take them out.
    ConnectionError with one line, within 30 seconds, when the cluster is lost."""
    from distributed import CancelledError, wait

    while waiting:
        try:
            for future in wait(list(waiting), timeout=5, return_when="FIRST_COMPLETED").done:
                flags = waiting.pop(future)
                if future.status == "error":  # Dask gave up on it: every worker of it died
                    yield row_of(flags, future.exception())
                else:
                    yield future.result()
        except asyncio.TimeoutError:
            check_workers(client)
        except CancelledError:
            what = f"the scheduler at {client.scheduler.address} is gone"
            again = "start it and its workers again, and the same command goes on"
            raise lost(f"{what}: {again}") from None


def sweep(to_do, table, path, client):
    """Train the runs to_do; whenever one ends its row joins the table, in `path` too. OSError when
    the cluster is lost or the table cannot be written."""
    # keys that begin alike: Dask times the runs as one kind, without which an idle worker is not
    # given what waits at a busy one; the longest first, so that none is left for the end
    began, waiting = time.time(), {}
    for flags in sorted(to_do, key=cost, reverse=True):
        key = ("run", flags.out.name, began)
        future = client.submit(run_and_report, flags, key=key, pure=False, priority=cost(flags))
        waiting[future] = flags
    how_far = f"a line here when one ends; how far each is: {path.with_name('*.txt')}"
    print(f"{len(to_do)} runs to do, {how_far}", flush=True)

    workers, total = len(client.nthreads()), sum(map(cost, to_do))
    for row in rows_as_runs_end(waiting, client):
        table[row["run"]] = row
        runs.write_rows(path, table.values())

        # time left, as if the runs at work were half done
        costs = [cost(other) for other in waiting.values()]
        left = sum(costs) - sum(costs[:workers]) / 2
        minutes = (time.time() - began) / (total - left) * left / 60
        ended = f"{len(to_do) - len(waiting)}/{len(to_do)} runs"
        outcome = row["error"] or f"val {row['val']:.4f}"
        print(f"{ended}, about {minutes:.0f} min left: {row['run']} {outcome}", flush=True)


def run_and_draw(to_do, folder, args):
    """Run what has no row yet, then report on all, also when the cluster is lost before."""
    path = folder / "results.jsonl"
    table = read_table(path)
    done = {name for name, row in table.items() if not row["error"]}
    missing = [flags for flags in to_do if flags.out.name not in done]
    try:
        if missing:
            client = connect(args.scheduler, args.workers)
            try:
                sweep(missing, table, path, client)
            finally:
                if client.cluster:
                    client.cluster.close()
                client.close()
    finally:
        finished = [row for row in table.values() if not row["error"]]
        if finished:
            report(finished, folder)
    failed = [flags.out.name for flags in to_do if table[flags.out.name]["error"]]
    if failed:
        what = f"{len(failed)} runs failed, see {path}"
        raise FloatingPointError(f"{what}; the same command tries them again")
    if not finished:
        raise Refused(f"{path} has no finished run: leave out --plot-only")


# ---- figures, from the table alone


def two_panels(height):
    """A figure, and the axes of its left and right half."""
    import matplotlib.pyplot as plt

    return plt.subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)


def symbols_in(rows):
    """The k of x_1, x_2, ..., of all that any of the runs was asked for."""
    return range(1, 1 + max([row["D"] for row in rows], default=0))


def draw_runs(axes, rows, column, color, label, aside):
    """Every run as a dot, so much aside, and a bar at the median run of each number of layers (the
    lower of two: a mean of both may be a loss that no run has)."""
    by_layers = {}
    for row in rows:
        if row.get(column) is not None:
            by_layers.setdefault(row["layers"] + aside, []).append(row[column])
    for x, losses in by_layers.items():
        axes.plot([x] * len(losses), losses, "o", color=color, ms=4, alpha=0.4)
    medians = [statistics.median_low(losses) for losses in by_layers.values()]
    axes.plot(list(by_layers), medians, "_", color=color, ms=9, mew=2, label=label)


def figure_4(rows, path):
    """Left: final validation loss by layers, with and without the implicit curriculum. Right: each
    symbol's loss by layers, with an arrow where the causal law first allows it."""
    # left: all that was asked for
    figure, (left, right) = two_panels(4.8)
    for ic, color, name, aside in (
        (True, "tab:blue", "with", -0.12),
        (False, "tab:red", "without", 0.12),
    ):
        if group := [row for row in rows if row["ic"] == ic]:
            D = " and ".join(map(str, sorted({row["D"] for row in group})))
            label = f"{name} implicit curriculum (D={D}, {len(group)} runs)"
            draw_runs(left, group, "val", color, label, aside)
    ylabel = "validation MSE, mean over the last 100 steps"
    left.set(ylabel=ylabel, title="Final loss: a dot per run, a bar at the median run")

    # right: symbol by symbol
    curriculum = [row for row in rows if row["ic"]]
    symbols, possible = symbols_in(curriculum), {}
    for k in symbols:
        color = runs.symbol_color(k, len(symbols))
        aside = 0.15 * (k - (1 + len(symbols)) / 2)
        draw_runs(right, curriculum, f"x_{k}", color, f"$x_{k}$", aside)
        possible.setdefault(causal_depth(k), []).append(f"$x_{k}$")
    above = dict(textcoords="offset points", ha="center", fontsize="small")
    for depth, names in possible.items():
        text, arrow = ", ".join(names) + "\npossible", dict(arrowstyle="->")
        right.annotate(text, (depth, 0.93), (0, 22), arrowprops=arrow, **above)
    right.set(title="Each symbol alone, with implicit curriculum")

    # both: the plateau, and the legends below
    for axes, side, columns in (left, "left", 1), (right, "right", 4):
        if rows:
            average, _ = Flags(**rows[0]).problem.plateaus[-1]
            axes.axhline(average, color="gray", ls=":", lw=1, label="average of the candidates")
        axes.set(xlabel="layers", ylim=(0, 1.15))
        axes.xaxis.get_major_locator().set_params(integer=True)
        where = dict(loc=f"outside lower {side}", ncols=columns, fontsize="small")
        figure.legend(*axes.get_legend_handles_labels(), **where)
    runs.save_figure(figure, path)


# ---- the depth law


def learned(row, k):
    """Whether a run ended with x_k learned."""
    return row.get(f"x_{k}") is not None and row[f"x_{k}"] < Flags(**row).problem.learned


def least_depths(rows, k):
    """The least number of layers in which each seed learned x_k, a list; infinite where in none of
    those tried."""
    depths = {}
    for row in rows:
        if row.get(f"x_{k}") is not None:
            depth = row["layers"] if learned(row, k) else math.inf
            depths[row["seed"]] = min(depth, depths.get(row["seed"], math.inf))
    return [depths[seed] for seed in sorted(depths)]


def with_attention(rows, causal, held):
    """The runs with the implicit curriculum, this mask, and attention held or learned."""
    wanted = (True, causal, "minimal" if held else "")
    return [row for row in rows if (row["ic"], row["causal"], row["circuit"]) == wanted]


def draw_least_depths(axes, rows, deepest, marker, color, shift, name):
    """Marks at the least depths that learned each x_k, above the deepest if none did, each with
    the number of its seeds."""
    seeds, tried = len({row["seed"] for row in rows}), [row["layers"] for row in rows]
    marks = collections.Counter()
    for k in symbols_in(rows):
        for depth in least_depths(rows, k):
            marks[k + shift, min(depth, deepest + 1)] += 1
    D, steps = (", ".join(map(str, sorted({row[key] for row in rows}))) for key in ("D", "steps"))
    label = f"{name}: D={D}, {min(tried)} to {max(tried)} layers, {steps} steps, {seeds} seeds"
    axes.plot(*zip(*marks, strict=True), marker, color=color, ms=11, label=label)
    for (x, depth), count in marks.items():
        axes.text(x, depth, count, color="white", fontsize=8, ha="center", va="center")


def figure_law(rows, path):
    """For each x_k the least depth in which it was learned, with attention held at a minimal
    circuit (what a depth can do) and with attention learned (what training finds), with the number
    of seeds, beside the law; left with a causal mask, right without."""
    figure, (left, right) = two_panels(4.6)
    deepest = max(row["layers"] for row in rows)
    for axes, causal, side, title in (
        (left, True, "left", "causal mask: floor(log$_2$ k) + 2"),
        (right, False, "right", "no mask: ceil(log$_3$(4k+1))"),
    ):
        # the law as steps, then the runs
        group = [row for row in rows if row["ic"] and row["causal"] == causal]
        most = max(symbols_in(group), default=1)
        law = [DEPTH_LAWS[causal](k) for k in range(1, most + 2)]
        edges = [k + 0.5 for k in range(most + 1)]
        axes.step(edges, law, where="post", color="black", label="the law")
        if held := with_attention(rows, causal, held=True):
            draw_least_depths(axes, held, deepest, "s", "tab:green", -0.15, "minimal circuit held")
        if found := with_attention(rows, causal, held=False):
            draw_least_depths(axes, found, deepest, "o", "tab:blue", 0.15, "attention learned")

        # above the deepest that was tried: learned in none of them
        axes.axhspan(deepest + 0.5, deepest + 1.5, color="0.92")
        axes.set_yticks(range(1, deepest + 2), [*range(1, deepest + 1), "in none"])
        axes.set(xlabel="k", title=title, xlim=(0.4, most + 0.6), xticks=range(1, most + 1))
        axes.grid(axis="y", lw=0.3)
        where = dict(loc=f"outside lower {side}", fontsize="small")
        figure.legend(*axes.get_legend_handles_labels(), **where)
    label = "fewest layers that learn $x_k$\n(in a mark: how many seeds)"
    left.set(ylabel=label, ylim=(0.5, deepest + 1.5))
    runs.save_figure(figure, path)


# ---- the same in words


def counted(rows):
    """The claims of Section 7.2, counted, as lines of text."""
    curriculum = [row for row in rows if row["ic"]]
    lines = ["learned by (median step):"] if curriculum else []
    for layers in sorted({row["layers"] for row in curriculum}):
        group, cells = [row for row in curriculum if row["layers"] == layers], []
        for k in symbols_in(group):
            steps = [row[f"x_{k}_learned"] for row in group]
            steps = [step for step in steps if step is not None]
            cells += [f"x_{k} {len(steps)} ({statistics.median(steps):.0f})"] if steps else []
        told = ", ".join(cells) or "nothing"
        lines.append(f"{layers} layers, {len(group)} runs: {told}")
    learned_at = [[row[f"{name}_learned"] for name in Flags(**row).symbols] for row in curriculum]
    orders = [runs.in_order(steps) for steps in learned_at]
    many = len(orders) - orders.count(None)
    lines.append(f"x_1, x_2, ... learned in this order: {orders.count(True)} of {many} runs")
    without = [row["val"] > 0.7 for row in rows if not row["ic"]]
    lines.append(f"without the implicit curriculum above 0.7: {sum(without)} of {len(without)}")
    return lines


def counted_by_law(rows):
    """The fewest layers in which each seed learned x_k beside the law, then the runs that beat the
    law, as lines of text."""
    lines, beaten = [], []
    for causal, mask in (True, "causal mask"), (False, "no mask"):
        for held, name in (True, "held at a minimal circuit"), (False, "learned"):
            some, cells = with_attention(rows, causal, held), []
            for k in symbols_in(some):
                depths = ",".join(map(str, least_depths(some, k))).replace("inf", "-")
                cells.append(f"x_{k} {depths} (law {DEPTH_LAWS[causal](k)})")
            lines.append(f"fewest layers by seed, {mask}, attention {name}: {', '.join(cells)}")
    for row in rows:
        law = DEPTH_LAWS[row["causal"]]
        too_early = [k for k in symbols_in([row]) if learned(row, k) and row["layers"] < law(k)]
        beaten += [f"{row['run']} (x_{k})" for k in too_early]
    return [*lines, f"in fewer layers than the law allows: {', '.join(beaten) or 'nothing'}"]


def plain(rows):
    """The runs of which Section 7 and the law speak."""
    own = ("targets", "mixture", "init")
    return [row for row in rows if row["task"] == "chain" and not any(row[name] for name in own)]


def report(rows, folder):
    """Print what the runs found, then draw it."""
    every, rows = rows, plain(rows)
    if len(rows) < len(every):
        what = "runs of another task, or with --targets, --mixture or --init, are not drawn"
        print(f"{len(every) - len(rows)} {what}: python -m studies.curriculum", flush=True)
    if not rows:
        return
    section_7 = [row for row in rows if row["causal"] and not row["circuit"]]
    print("\n".join(["---", *counted(section_7), *counted_by_law(rows)]), flush=True)
    figure_4(section_7, folder / "figure4.png")
    figure_law(rows, folder / "law.png")
    print(f"figures: {folder / 'figure4.png'} {folder / 'law.png'}", flush=True)


# ---- the command line


def parse_arguments():
    """Our own flags; a bad one ends the program with one line and exit code 2."""
    p = command_line("sweep.py", __doc__)
    cores = torch.get_num_threads()
    p.add_argument("--preset", choices=PRESETS, help="a grid made for you; or your own:")
    p.add_argument("--layers", type=int, nargs="+", help="depths of the grid")
    p.add_argument("--seeds", type=int, help="runs per point: seeds 0, 1, ... (default: 3)")
    p.add_argument("--flags", action="append", help="of train.py for all runs; twice for two sets")
    p.add_argument("--out", type=Path, help="folder (default: out/sweep, or out/PRESET)")
    p.add_argument("--workers", type=int, default=cores, help="processes (default: one per core)")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of processes here")
    p.add_argument("--plot-only", action="store_true", help="draw the table, run nothing")
    typed = shlex.join(sys.argv[1:]).replace("--flags ", "--flags=")  # the value begins with --
    args = p.parse_args(shlex.split(typed))
    if bool(args.preset) == bool(args.layers):
        p.error("give a --preset, or your own grid with --layers")
    if args.preset and (args.seeds is not None or args.flags):
        p.error("--seeds and --flags are for your own grid: give --layers instead of --preset")
    if args.seeds is not None and not 1 <= args.seeds <= 10_000:
        p.error(f"--seeds must be from 1 to 10000, not {args.seeds}")
    if not 1 <= args.workers <= 1024:
        p.error(f"--workers must be at least 1 and at most 1024, not {args.workers}")
    return args


def main():
    with program("sweep.py"):
        args = parse_arguments()
        folder = args.out or Path("out", args.preset or "sweep")
        if args.plot_only:
            return run_and_draw([], folder, args)
        own = [(text, args.layers, args.seeds or 3) for text in args.flags or [""]]
        to_do = grid(PRESETS.get(args.preset, own), folder.absolute())
        folder.mkdir(parents=True, exist_ok=True)
        with runs.alone_in(folder):
            run_and_draw(to_do, folder, args)


if __name__ == "__main__":
    main()
