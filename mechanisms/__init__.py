"""Systems of the slides on mechanisms in transformers (Alberto Bietti), one file each; here is what
the files share: their command line, and how seeds are drawn.

    python -m mechanisms.recall                                        # into out/mechanisms
    python -m mechanisms.recall --plot-only --out results/mechanisms   # the figure again
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

from parts import command_line
from parts.config import read_json, save_figure, write_text
from parts.stats import bootstrap

import torch


ABOUT = ("command", "seconds", "processor")  # in a file of results, beside what was measured
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "black")  # all readers can tell these apart


def command(script, about, tasks, table, draw=None, **counts):
    """The command line of a file: measure tasks(seeds, ...), keep that as JSON, and of the JSON
    print table(results) and make the figure draw(results), if any. counts: {flag: default}, "seeds"
    and what tasks takes. Bad input and a folder that cannot be written end in one line and exit
    code 2."""
    name = f"mechanisms.{Path(script).stem}"
    p = command_line(name, about.splitlines()[0])
    p.prog, p.formatter_class = f"python -m {name}", argparse.ArgumentDefaultsHelpFormatter
    for flag, default in counts.items():
        p.add_argument(f"--{flag}", type=int, default=default, help=f"number of {flag}")
    p.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    p.add_argument("--out", type=Path, default=Path("out/mechanisms"), help="folder")
    p.add_argument("--plot-only", action="store_true", help="of what is kept there")
    args = p.parse_args()
    for flag in ("seed", *counts):
        least, value = int(flag in counts), vars(args)[flag]
        if not least <= value < 2**32:
            p.error(f"--{flag} must be {least} to 2^32 - 1, not {value}")

    seeds = range(args.seed, args.seed + args.seeds)
    todo = tasks(seeds, **{flag: vars(args)[flag] for flag in counts if flag != "seeds"})
    path = args.out / f"{Path(script).stem}.json"
    try:
        if not args.plot_only:
            measure(path, todo)
        try:
            results = read_json(path)
            if not {function.__name__ for _, function, _, _ in todo} <= results.keys():
                raise unusable(path, "holds something else")
        except ValueError as error:
            p.error(f"{error}; without --plot-only it is made")
        print(table(results))
        if draw:
            save_figure(draw(results), path.with_suffix(".png"))
    except OSError as error:
        p.error(f"{error}; --out must be a folder with room")


def measure(path, todo):
    """Write {function: [arguments | {"values": one a seed}, ...]} of tasks, each of them (its rough
    share of the time, function, arguments, seeds). Prints the time left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent) as probe:  # fails now, not after the measurement
        probe.write(bytes(2**20))
    start, done = time.time(), 0
    results = dict(command=sys.argv[1:])
    for share, function, arguments, seeds in todo:
        values = [function(seed, **arguments) for seed in seeds]
        results.setdefault(function.__name__, []).append(arguments | dict(values=values))
        done += share
        left = (time.time() - start) * (sum(task[0] for task in todo) / done - 1)
        print(f"{function.__name__} {arguments}: about {left:.0f} s left", flush=True)
    results |= dict(seconds=time.time() - start, processor=time.process_time())
    try:
        write_text(path, json.dumps(results))
    except OSError:
        print(json.dumps(results))  # not lost
        raise


def interval(values):
    """(low, high), the 95% interval of the mean of values (n,)."""
    return bootstrap(values, torch.Generator().manual_seed(0))


def mean(values, digits=2):
    """The mean of values (n,) and its interval, as in 0.75 [0.70, 0.80]."""
    low, high = interval(values)
    return f"{values.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown(*rows):
    """A table of rows of cells, the first its head."""
    lines = [f"|{'|'.join(map(str, row))}|" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def results_of(name):
    """A file's numbers in results/mechanisms."""
    return read_json(Path("results/mechanisms", f"{name}.json"))


def table_of(name):
    """The table of these numbers, for the page; below it seeds and seconds."""
    results = results_of(name)
    row = next(rows[0] for what, rows in results.items() if what not in ABOUT)
    seeds, seconds = row.get("trials", len(row["values"])), results["processor"]
    table = importlib.import_module(f"mechanisms.{name}").table(results)
    return f"{table}\n\n*{seeds} seeds, {seconds:.0f} s.*"


def draw_means(axes, x, values, **style):
    """Means of values (x, seeds) with 95% intervals."""
    means = values.mean(1)
    spread = (torch.tensor([interval(some) for some in values]).T - means).abs()
    axes.errorbar(x, means, spread, capsize=3, **style)


def draw_seeds(axes, x, values, label, **style):
    """The mean of values (seeds, x), in a band from the lowest to the highest seed."""
    axes.fill_between(x, values.amin(0), values.amax(0), color=style["color"], alpha=0.15, lw=0)
    axes.plot(x, values.mean(0), label=label, **style)
