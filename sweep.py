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
import contextlib
import logging
import shlex
import sys
import time
from pathlib import Path

import torch

import runs
import train
from flags import command_line, run_directory
from table import one_line, read_table, report, row_of, write_table


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
