"""What the scripts of this folder share: the command line, tables and curves over seeds. Each
script re-creates one system of the slides on mechanisms in transformers (Alberto Bietti).

    python -m mechanisms.recall                                        # into out/mechanisms
    python -m mechanisms.recall --plot-only --out results/mechanisms   # redraw the figure
"""

import importlib
import json
import sys
import time
from pathlib import Path

from parts import command_line, program
from parts.config import read_json, save_figure, write_text
from parts.stats import bootstrap

import torch


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "black")  # safe for colour-blind readers


def command(script, about, tasks, table, draw=None, seeds=1):
    """Measure the tasks of a script, write them as JSON, print a table and save a figure.

    tasks: pairs (function, arguments); function(seed, **arguments) is called for every seed.
    table(results) gives rows of cells, draw(results) a figure of the results, {name of function:
    [arguments | {"values": one per seed}, ...]}."""
    name = Path(script).stem
    p = command_line(f"mechanisms.{name}", about.splitlines()[0])
    p.add_argument("--seeds", type=int, default=seeds, help=f"number of seeds (default: {seeds})")
    out = Path("out/mechanisms")
    p.add_argument("--out", type=Path, default=out, help=f"results folder (default: {out})")
    p.add_argument("--plot-only", action="store_true", help="draw the results in the folder")
    args = p.parse_args()
    if args.seeds < 1:
        p.error(f"--seeds must be at least 1, not {args.seeds}")

    path = args.out / f"{name}.json"
    with program(f"mechanisms.{name}"):
        if not args.plot_only:
            args.out.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(measure(tasks, range(args.seeds))))
        results = read_json(path)
        print(markdown(table(results)))
        if draw:
            save_figure(draw(results), path.with_suffix(".png"))


def measure(tasks, seeds):
    """The results of the tasks for these seeds, with the command and the time that they took."""
    results, start = dict(command=sys.argv[1:]), time.time()
    for i, (function, arguments) in enumerate(tasks, 1):
        print(f"task {i} of {len(tasks)}: {function.__name__} {arguments}", flush=True)
        values = [function(seed, **arguments) for seed in seeds]
        results.setdefault(function.__name__, []).append(arguments | dict(values=values))
    return results | dict(seconds=time.time() - start, processor=time.process_time())


def results_of(name):
    """The committed results of a script."""
    return read_json(Path("results/mechanisms", f"{name}.json"))


def table_of(name):
    """The table of the committed results for the page, with the number of seeds and the time."""
    module, results = importlib.import_module(f"mechanisms.{name}"), results_of(name)
    row = results[module.TASKS[0][0].__name__][0]
    seeds, seconds = row.get("trials", len(row["values"])), results["processor"]
    return f"{markdown(module.table(results))}\n\n*{seeds} seeds, {seconds:.0f} s.*"


def markdown(rows):
    """A Markdown table of rows of cells; the first row is the header."""
    lines = [f"|{'|'.join(map(str, row))}|" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def interval(values):
    """The 95% bootstrap interval (low, high) of the mean of values (n,)."""
    return bootstrap(values, torch.Generator().manual_seed(0))


def mean(values, digits=2):
    """The mean of values (n,) with its interval, as in 0.75 [0.70, 0.80]."""
    low, high = interval(values)
    return f"{values.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def draw_means(axes, x, values, **style):
    """Plot the means of values (x, seeds) with their intervals."""
    means = values.mean(1)
    errors = (torch.tensor([interval(seeds) for seeds in values]).T - means).abs()
    axes.errorbar(x, means, errors, capsize=3, **style)


def draw_seeds(axes, x, values, label, **style):
    """Plot the mean of values (seeds, x) in a band from the lowest to the highest seed."""
    axes.fill_between(x, values.amin(0), values.amax(0), color=style["color"], alpha=0.15, lw=0)
    axes.plot(x, values.mean(0), label=label, **style)
