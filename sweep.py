"""Many runs -> one table -> Figure 4: how many layers does each token need (Section 7)?

python sweep.py --preset laptop              # a small Figure 4, an hour on 2 cores
python sweep.py --preset night               # Figure 4 with eight seeds: four hours on 2 cores
python sweep.py --preset law                 # what each depth can do, and what training finds
python sweep.py --layers 2 3 4 --seeds 5 --flags "--heads 8 --D 4"  # any grid of train.py
python sweep.py --preset laptop --plot-only  # the figures again, from results.csv alone
python sweep.py --preset paper --scheduler tls://10.0.0.1:8786 --out /shared/paper

Every run is a run directory as train.py leaves it, and one row of results.csv, written when the run
ends. What is in the table is not run again; what was stopped in the middle goes on where it was, on
whichever worker takes it. On a GPU several workers share the card: --workers says how many.

On a cluster all machines see the folder under the same name. Whoever reaches a scheduler or worker
of Dask has it run any code, so let them know each other by one certificate in that folder, named in
the shell of each of these commands and of sweep.py:

openssl req -x509 -newkey rsa:2048 -nodes -days 365 -subj /CN=sweep -keyout dask.pem -out dask.pem
export DASK_DISTRIBUTED__COMM__TLS__{CA_FILE,{SCHEDULER,WORKER,CLIENT}__CERT}=/shared/dask.pem
dask scheduler --host tls://10.0.0.1:8786 --dashboard-address 127.0.0.1:8787
dask worker tls://10.0.0.1:8786 --nthreads 1 --nworkers 16 --dashboard-address 127.0.0.1:0
"""

import asyncio
import collections
import contextlib
import csv
import io
import json
import logging
import math
import shlex
import statistics
import sys
import time
from pathlib import Path

from parts import runs
from parts.flags import DEFAULTS, MACHINE_FLAGS, asked, command_line, run_directory
from parts.flow import DEPTH_LAWS, causal_depth

import torch

import train
from data import plateaus


LAPTOP = "--heads 8 --lr 2e-3 --decay 0.3 --target 0"
WITH_IC = f"{LAPTOP} --D 5 --steps 1500"
WITHOUT_IC = f"{LAPTOP} --D 3 --steps 1500 --no-ic"
PAPER = "--heads 8 --batch 512 --examples 1048576 --steps 10000 --target 0"
HELD = "--D 8 --circuit --steps 400 --target 0"
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
    "paper": [(f"{PAPER} --D 5", range(1, 9), 8), (f"{PAPER} --D 3 --no-ic", range(1, 9), 8)],
}
MOST_RUNS, MOST_WORKERS = 10_000, 1024
PATIENCE = 15  # seconds in which a scheduler must answer, and a worker come (back)
OURS = {"--layers": "--layers", "--seed": "--seeds", "--seeds": "--seeds", "--out": "--out"}


# ---- which runs


def words_of(text):
    """--flags as a list. ValueError with one line if they cannot be the flags of all runs."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--flags {text!r} is cut off ({error}): close the quote") from None
    for word in words:
        name = word.partition("=")[0]
        if name in OURS:
            instead = f"give {OURS[name]} to sweep.py itself"
            raise ValueError(f"--flags must not hold {name}, which the grid sets: {instead}")
    return words


def grid(groups, folder):
    """[flags, ...] of every run of the groups, which are as in PRESETS. ValueError with one line if
    they are too many; a flag that train.py refuses ends the program as there."""
    asked = sum(len(layers) * seeds for _, layers, seeds in groups)
    if asked > MOST_RUNS:
        raise ValueError(f"these would be more than {MOST_RUNS} runs: lower --seeds")
    by_name = {}  # the same run twice is one
    for text, layers, seeds in groups:
        words = words_of(text)
        for count in layers:
            flags = train.parse_flags([*words, "--layers", str(count), "--resume"])
            for seed in range(seeds):
                name = run_directory(flags | dict(seed=seed)).name
                own = flags | dict(seed=seed, out=folder / name)
                if by_name.setdefault(name, own) != own:
                    raise ValueError(f"two sets have a run {name}: give each its own --out")
    return list(by_name.values())


def cost(flags):
    """What a run costs beside others: tokens that go through a layer."""
    return flags["steps"] * flags["batch"] * flags["layers"] * runs.task_of(flags).T


# ---- the table: {run: row}

RUN_FLAGS = {name: default for name, default in DEFAULTS.items() if name not in MACHINE_FLAGS}
RESULTS = {"seconds": float, "ended": int, "val": float}  # and x_1, x_1_below_half, ...


def row_of(flags, error=None):
    """The row of a run that has ended: its final losses (the mean over the last 100 steps) and the
    step at which each symbol was learned; or of one that failed, with the error."""
    row = {name: flags[name] for name in RUN_FLAGS}
    row |= dict(run=flags["out"].name, error=one_line(error) if error else None)
    if error:
        return row
    log = runs.read_log(flags["out"])
    row |= dict(seconds=log[-1]["seconds"], ended=log[-1]["step"])
    late = [entry for entry in log if entry["step"] > row["ended"] - 100]
    below_half = runs.crossings(log)
    for name in ("val", *below_half):
        row[name] = sum(entry[name] for entry in late) / len(late)
        if name in below_half:
            row[f"{name}_below_half"] = below_half[name]
    return row


def one_line(error):
    """An exception as printable text; ours say in a sentence what to do, others are named."""
    text = "".join(filter(str.isprintable, " ".join(str(error).split())))
    if text and isinstance(error, (FloatingPointError, OSError, ValueError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def write_table(path, table):
    columns = dict.fromkeys(column for row in table.values() for column in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(table.values())
    runs.write_file(path, lambda temporary: temporary.write_bytes(text.getvalue().encode()))


def read_table(path):
    """The table, None where a cell is empty; {} if there is no such file. ValueError with one line
    that names the file and its line if it holds anything else."""
    if not path.exists():
        return {}
    table, needed = {}, {"run", "error", "seed", "layers", "D"}
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.DictReader(file)
        try:
            if not needed <= set(reader.fieldnames or []):
                raise ValueError("no names of columns, with commas between them")
            for cells in reader:
                row = read_row(cells)
                table[row["run"]] = row
        except (csv.Error, ValueError) as error:
            where = f"{path}, line {max(1, reader.line_num)}"
            again = "mend or delete it, and the same command makes from the runs what is missing"
            raise ValueError(f"{where}: {error}; {again}") from None
    return table


def read_row(cells):
    """A row from texts; a flag that is younger than the table has its default."""
    if None in cells or None in cells.values():
        raise ValueError("more or fewer cells than columns")
    row = {name: runs.BEFORE.get(name, default) for name, default in RUN_FLAGS.items()}
    row |= {column: read_cell(column, text) for column, text in cells.items()}
    last = asked(row)[-1]
    if not row["error"] and None in (row.get("val"), row.get(f"x_{last}")):
        raise ValueError(f"neither an error nor losses val and x_{last}")
    return row


def read_cell(column, text):
    """The value of a cell. ValueError if its column holds no such values."""
    if column in RUN_FLAGS:
        kind = type(RUN_FLAGS[column])
        kind = list_of_numbers if kind is list else kind
    elif text in ("", "None"):  # some tables say it so
        return None
    else:
        kind = RESULTS.get(column, float if column.startswith("x_") else str)
    try:
        value = {"True": True, "False": False}[text] if kind is bool else kind(text)
        if text.isprintable() and (kind in (str, list_of_numbers) or math.isfinite(value)):
            return value
    except (KeyError, ValueError):
        pass
    raise ValueError(f"{column} cannot be {text[:40]!r}")


def list_of_numbers(text):
    """[1, 3], as Python writes it; ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise ValueError("no list of numbers")
    return value


# ---- the cluster


def connect(scheduler, workers):
    """A Dask client: of the cluster at this address, or of so many processes here. ValueError or
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
        try:
            cluster = LocalCluster(**size, **where, silence_logs=logging.CRITICAL)
        except (OSError, RuntimeError) as error:
            what = f"cannot start {workers} processes ({one_line(error)})"
            raise ConnectionError(f"{what}: lower --workers") from None
        return Client(cluster)

    # or a cluster, if it is one that can do this
    check_scheduler(scheduler)
    client = Client(scheduler, timeout=5)
    check_workers(client)
    if max(client.nthreads().values()) > 1:
        what = "a worker with several threads would mix up the runs"
        raise ValueError(f"{what}: start workers with --nthreads 1")
    send_our_modules(client)
    return client


def check_scheduler(address):
    """ValueError with one line if no scheduler answers: Client would wait for ever for a greeting
    from what is no Dask."""
    from distributed import Security
    from distributed.core import rpc

    async def identity():
        connection = Security().get_connection_args("client")
        async with rpc(address, timeout=5, connection_args=connection) as there:
            return await there.identity()

    try:
        kind = asyncio.run(asyncio.wait_for(identity(), PATIENCE))["type"]
    except Exception as error:  # what is no Dask fails in its own way
        what = f"no Dask scheduler answers at {address} ({one_line(error)})"
        raise ValueError(f"{what}: start one, or correct --scheduler") from None
    if kind != "Scheduler":
        raise ValueError(f"{address} belongs to a {kind}: give the scheduler's --scheduler")


def check_workers(client):
    """ConnectionError with one line if there is no worker, nor comes one."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except (OSError, asyncio.TimeoutError):
        what = f"there is no worker at {client.scheduler.address}"
        again = "start some (dask worker, see --help), and the same command goes on"
        raise ConnectionError(f"{what}: {again}") from None


def our_modules():
    """The files of ours that are loaded here; a worker elsewhere may have none of them."""
    here, files = Path(__file__).resolve().parent, set()
    for module in list(sys.modules.values()):
        files.add(Path(getattr(module, "__file__", None) or here).resolve())
    return sorted(file for file in files if file.parent == here and file.is_file())


def forget(names):
    """Have a process of the cluster import these anew: an earlier sweep may have sent others."""
    for name in names:
        sys.modules.pop(name, None)


def send_our_modules(client):
    """Each is imported when a run first needs it, after all have arrived."""
    modules = our_modules()
    for file in modules:
        client.upload_file(str(file), load=False)
    names = [file.stem for file in modules]
    client.run(forget, names)
    client.run_on_scheduler(forget, names)


# ---- running


def run_and_report(flags):
    """Train a run, or go on with it, and return its row. This is what a worker does."""
    torch.set_num_threads(1)
    train.keep_freed_memory()
    try:
        flags["out"].parent.mkdir(parents=True, exist_ok=True)
        with open(f"{flags['out']}.txt", "a") as printed, contextlib.redirect_stdout(printed):
            train.run_once(flags)
        return row_of(flags)
    except (FloatingPointError, OSError, ValueError) as error:
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
            raise ConnectionError(f"{what}: {again}") from None


def sweep(to_do, table, path, client):
    """Train the runs to_do; whenever one ends its row joins the table, in `path` too. The number of
    failed runs; OSError when the cluster is lost or the table cannot be written."""
    # keys that begin alike: Dask times the runs as one kind, without which an idle worker is not
    # given what waits at a busy one; the longest first, so that none is left for the end
    began, waiting = time.time(), {}
    for flags in sorted(to_do, key=cost, reverse=True):
        key = ("run", flags["out"].name, began)
        future = client.submit(run_and_report, flags, key=key, pure=False, priority=cost(flags))
        waiting[future] = flags
    how_far = f"a line here when one ends; how far each is: {path.with_name('*.txt')}"
    print(f"{len(to_do)} runs to do, {how_far}", flush=True)

    workers, total, failed = len(client.nthreads()), sum(map(cost, to_do)), 0
    for row in rows_as_runs_end(waiting, client):
        table[row["run"]] = row
        write_table(path, table)

        # time left, as if the runs at work were half done
        costs = [cost(other) for other in waiting.values()]
        left = sum(costs) - sum(costs[:workers]) / 2
        minutes = (time.time() - began) / (total - left) * left / 60
        failed += row["error"] is not None
        ended = f"{len(to_do) - len(waiting)}/{len(to_do)} runs, {failed} failed"
        outcome = row["error"] or f"val {row['val']:.4f}"
        print(f"{ended}, about {minutes:.0f} min left: {row['run']} {outcome}", flush=True)
    return failed


def run_missing(to_do, table, path, flags):
    """Train the runs to_do that have no row yet. The number of failed runs; raises what connect and
    sweep raise."""
    done = {name for name, row in table.items() if not row["error"]}
    to_do = [run for run in to_do if run["out"].name not in done]
    if not to_do:
        return 0
    client = connect(flags.scheduler, flags.workers)
    try:
        return sweep(to_do, table, path, client)
    finally:
        if client.cluster:
            client.cluster.close()
        client.close()


def run_and_draw(to_do, folder, flags):
    """Run what is missing, then report on all. The number of failed runs; OSError for what kept it
    from the end, after the report on what had been found."""
    path, failed, trouble = folder / "results.csv", 0, None
    table = read_table(path)
    try:
        failed = run_missing(to_do, table, path, flags)
    except OSError as error:
        trouble = error
    finished = [row for row in table.values() if not row["error"]]
    if finished:
        report(finished, folder)
    if trouble:
        raise trouble
    if not finished and not failed:
        raise ValueError(f"{path} has no finished run: leave out --plot-only")
    return failed


# ---- figures, from the table alone


def two_panels(height):
    """A figure, and the axes of its left and right half."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)


def symbols_in(rows):
    """The k of x_1, x_2, ..., of all that any of the runs was asked for."""
    return range(1, 1 + max([row["D"] for row in rows], default=0))


def draw_runs_and_mean(axes, rows, column, color, label, aside=0):
    """Every run as a dot, so much aside, and a line through the means at each number of layers."""
    by_layers = {}
    for row in sorted(rows, key=lambda row: row["layers"]):
        if row.get(column) is not None:
            by_layers.setdefault(row["layers"], []).append(row[column])
    for layers, losses in by_layers.items():
        axes.plot([layers + aside] * len(losses), losses, "o", color=color, ms=4, alpha=0.4)
    means = [statistics.fmean(losses) for losses in by_layers.values()]
    axes.plot(list(by_layers), means, color=color, label=label)


def figure_4(rows, path):
    """Left: final validation loss by layers, with and without the implicit curriculum. Right: each
    symbol's loss by layers, with an arrow where the causal law first allows it."""
    # left: all that was asked for
    figure, (left, right) = two_panels(4.8)
    for ic, color, name in (True, "tab:blue", "with"), (False, "tab:red", "without"):
        if group := [row for row in rows if row["ic"] == ic]:
            D = " and ".join(map(str, sorted({row["D"] for row in group})))
            label = f"{name} implicit curriculum (D={D}, {len(group)} runs)"
            draw_runs_and_mean(left, group, "val", color, label)
    ylabel = "validation MSE, mean over the last 100 steps"
    left.set(ylabel=ylabel, title="Final loss: every run and the mean")

    # right: symbol by symbol
    curriculum = [row for row in rows if row["ic"]]
    symbols, possible = symbols_in(curriculum), {}
    for k in symbols:
        color = runs.symbol_color(k, len(symbols))
        aside = 0.1 * (k - (1 + len(symbols)) / 2)
        draw_runs_and_mean(right, curriculum, f"x_{k}", color, f"$x_{k}$", aside)
        possible.setdefault(causal_depth(k), []).append(f"$x_{k}$")
    above = dict(textcoords="offset points", ha="center", fontsize="small")
    for depth, names in possible.items():
        text, arrow = ", ".join(names) + "\npossible", dict(arrowstyle="->")
        right.annotate(text, (depth, 0.93), (0, 22), arrowprops=arrow, **above)
    right.set(title="Each symbol alone, with implicit curriculum")

    # both: the plateau, and the legends below
    for axes, side, columns in (left, "left", 1), (right, "right", 4):
        if rows:
            average, _ = plateaus(runs.task_of(rows[0]))[-1]
            axes.axhline(average, color="gray", ls=":", lw=1, label="average of the candidates")
        axes.set(xlabel="layers", ylim=(0, 1.15))
        axes.xaxis.get_major_locator().set_params(integer=True)
        where = dict(loc=f"outside lower {side}", ncols=columns, fontsize="small")
        figure.legend(*axes.get_legend_handles_labels(), **where)
    runs.save_figure(figure, path)


# ---- the depth law


def learned(row, k):
    """Whether a run ended with x_k below 0.5."""
    return row.get(f"x_{k}") is not None and row[f"x_{k}"] < 0.5


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
    wanted = (True, causal, held)
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


# ---- the same as text


def text_table(heads, rows):
    """A table of Markdown, as lines."""
    rows = [heads, *rows]
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


def learned_at(row, k):
    """The step at which x_k passed below 0.5 in a run, None if it never did."""
    return row.get(f"x_{k}_below_half")


def count_in_order(rows):
    """How many of the runs that learned several symbols learned x_1 first, then x_2, ...: "n of
    m"."""
    ordered = [runs.in_order([learned_at(row, k) for k in symbols_in([row])]) for row in rows]
    return f"{ordered.count(True)} of {len(rows) - ordered.count(None)}"


def claims(rows):
    """The claims of Section 7.2, counted, as lines of text: a table of the crossings by depth, and
    what it comes to."""
    curriculum = [row for row in rows if row["ic"]]
    symbols, table = symbols_in(curriculum), []
    for layers in sorted({row["layers"] for row in curriculum}):
        group, cells = [row for row in curriculum if row["layers"] == layers], []
        for k in symbols:
            steps = [learned_at(row, k) for row in group if learned_at(row, k) is not None]
            median = f", {statistics.median(steps):.0f}" if steps else ""
            cells.append(f"{len(steps)}{median}")
        table.append([layers, len(group), *cells, count_in_order(group)])
    heads = [f"x_{k} below 0.5: runs, median step" for k in symbols]
    without = [row["val"] > 0.7 for row in rows if not row["ic"]]
    ordered = count_in_order(curriculum)
    return [
        *text_table(["layers", "runs", *heads, "in this order"], table),
        "",
        f"without the implicit curriculum above 0.7: {sum(without)} of {len(without)} runs",
        f"x_1, x_2, ... pass below 0.5 in this order: {ordered} runs that learned several",
    ]


def law_table(rows):
    """The fewest layers in which each seed learned x_k beside the law, as a table; then the runs
    that beat the law."""
    symbols, table, beaten = symbols_in(rows), [], []
    for causal, mask in (True, "causal mask"), (False, "no mask"):
        table.append([f"{mask}: the law", *map(DEPTH_LAWS[causal], symbols)])
        for held, name in (True, "held at a minimal circuit"), (False, "learned"):
            if some := with_attention(rows, causal, held):
                depths = [" ".join(map(str, least_depths(some, k))) for k in symbols]
                cells = [cell.replace("inf", "-") for cell in depths]
                table.append([f"{mask}: attention {name}", *cells])
    for row in rows:
        law = DEPTH_LAWS[row["causal"]]
        too_early = [k for k in symbols if learned(row, k) and row["layers"] < law(k)]
        beaten += [f"{row['run']} (x_{k})" for k in too_early]
    heads = ["fewest layers, a number per seed", *(f"x_{k}" for k in symbols)]
    last = f"learned in fewer layers than the law allows: {', '.join(beaten) or 'nothing'}"
    return [*text_table(heads, table), "", last]


def plain(rows):
    """The runs of which Section 7 and the law speak."""
    own = ("targets", "mixture", "init")
    return [row for row in rows if row["task"] == "chain" and not any(row[name] for name in own)]


def report(rows, folder):
    """Print what the runs found, then draw it."""
    every, rows = rows, plain(rows)
    if len(rows) < len(every):
        what = "runs of another task, or with --targets, --mixture or --init"
        print(f"{len(every) - len(rows)} {what}: curriculum.py compares them", flush=True)
    if not rows:
        return
    section_7 = [row for row in rows if row["causal"] and not row["circuit"]]
    print("\n".join(["---", *claims(section_7), "", *law_table(rows), ""]), flush=True)
    figure_4(section_7, folder / "figure4.png")
    figure_law(rows, folder / "law.png")
    print(f"table: {folder / 'results.csv'}")
    print(f"figures: {folder / 'figure4.png'} {folder / 'law.png'}")


# ---- the command line


def joined(arguments):
    """--flags and its value as one word: a value that begins with dashes argparse takes for a flag
    of ours."""
    words = []
    for word in arguments:
        if words and words[-1] == "--flags":
            words[-1] = f"--flags={word}"
        else:
            words.append(word)
    return words


def parse_flags(arguments):
    """Our own flags; a bad one ends the program with one line and exit code 2."""
    p = command_line("sweep.py", __doc__)
    cores = torch.get_num_threads()
    p.add_argument("--preset", choices=list(PRESETS), help="a grid made for you; or your own:")
    p.add_argument("--layers", type=int, nargs="+", help="depths of the grid")
    p.add_argument("--seeds", type=int, help="runs per point: seeds 0, 1, ... (default: 3)")
    p.add_argument("--flags", action="append", help="of train.py for all runs; twice for two sets")
    p.add_argument("--out", type=Path, help="folder (default: out/sweep, or out/PRESET)")
    p.add_argument("--workers", type=int, default=cores, help="processes (default: one per core)")
    p.add_argument("--scheduler", help="address of a Dask cluster, instead of processes here")
    p.add_argument("--plot-only", action="store_true", help="draw the table, run nothing")
    flags = p.parse_args(joined(arguments))

    # what cannot be
    if bool(flags.preset) == bool(flags.layers):
        p.error("give a --preset, or your own grid with --layers")
    if flags.preset and (flags.seeds is not None or flags.flags):
        p.error("--seeds and --flags are for your own grid: give --layers instead of --preset")
    if flags.seeds is not None and flags.seeds < 1:
        p.error(f"--seeds must be at least 1, not {flags.seeds}")
    if not 1 <= flags.workers <= MOST_WORKERS:
        p.error(f"--workers must be at least 1 and at most {MOST_WORKERS}, not {flags.workers}")
    return flags


def make_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot write to {folder} ({error.strerror})"
        raise ValueError(f"{what}: choose another --out") from None


def stop(code, message):
    print(f"sweep.py: {message}", file=sys.stderr)
    sys.exit(code)


def main():
    flags = parse_flags(sys.argv[1:])
    folder = flags.out or Path("out", flags.preset or "sweep")
    own = [(text, flags.layers, flags.seeds or 3) for text in flags.flags or [""]]
    try:
        if flags.plot_only:
            failed = run_and_draw([], folder, flags)
        else:
            to_do = grid(PRESETS.get(flags.preset, own), folder.absolute())
            make_folder(folder)
            with runs.alone_in(folder):
                failed = run_and_draw(to_do, folder, flags)
    except KeyboardInterrupt:
        print(f"stopped; to go on: python sweep.py {shlex.join(sys.argv[1:])}")
        sys.exit(130)
    except (ConnectionError, ValueError) as error:
        stop(2 if isinstance(error, ValueError) else 1, one_line(error))
    except OSError as error:
        what = f"cannot write to {folder} ({error.strerror or one_line(error)})"
        stop(1, f"{what}: once that is mended the same command goes on")
    if failed:
        again = "the same command tries them again"
        stop(1, f"{failed} runs failed, see {folder / 'results.csv'}; {again}")


if __name__ == "__main__":
    main()
