"""Many runs -> one table -> Figure 4: how many layers does each token need (Section 7)?

    python sweep.py --preset laptop                                  # a small Figure 4, an hour on 2 cores
    python sweep.py --preset law                                     # what each depth can do, and what training finds
    python sweep.py --layers 2 3 4 --seeds 5 --flags "--heads 8 --D 4" # any grid: --flags are those of train.py
    python sweep.py --preset laptop --plot-only                      # the figures again, from results.csv alone
    python sweep.py --preset paper --scheduler tcp://host:8786       # on a Dask cluster whose machines share the folder

Every run is a run directory as train.py leaves it, and one row of results.csv, written when the run ends. What is in the
table is not run again; what was stopped in the middle goes on where it was, on whichever worker takes it.
"""
import argparse
import contextlib
import csv
import math
import shlex
import statistics
import sys
import time
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import train
from data import causal_depth, unmasked_depth

PRESETS = {  # name: [(flags of train.py, layers, number of seeds)]; final loss = mean over the last 100 steps
    "laptop": [("--heads 8 --D 5 --steps 1500 --lr 2e-3 --decay 0.3 --target 0", range(1, 6), 3),
               ("--heads 8 --D 3 --steps 1500 --lr 2e-3 --decay 0.3 --target 0 --no-ic", (1, 3, 5), 3)],
    "law": [("--heads 8 --D 5 --steps 1500 --lr 2e-3 --decay 0.3 --target 0", range(1, 6), 3),
            ("--heads 8 --D 5 --steps 2000 --lr 2e-3 --decay 0.3 --target 0 --no-causal --rotary qk", range(2, 5), 2),
            ("--heads 1 --D 8 --circuit --steps 400 --target 0", range(1, 6), 2),
            ("--heads 2 --D 8 --circuit --no-causal --steps 400 --target 0", range(1, 5), 2)],
    "paper": [("--heads 8 --D 5 --batch 512 --examples 1048576 --steps 10000 --target 0", range(1, 9), 8),
              ("--heads 8 --D 3 --batch 512 --examples 1048576 --steps 10000 --target 0 --no-ic", range(1, 9), 8)],
}


def grid(groups, folder):
    """Flags of every run of the groups (flags of train.py, layers, seeds); a bad flag ends the program as in train.py."""
    runs = {}  # by run directory: the same run twice is one
    for text, layers, seeds in groups:
        for count in layers:
            for seed in range(seeds):
                flags = train.parse_flags([*shlex.split(text), "--layers", str(count), "--seed", str(seed), "--resume"])
                name = train.run_directory(flags).name
                runs[name] = flags | dict(out=folder / name)
    return list(runs.values())


# ---- running

def cost(flags):
    """What a run costs beside others: tokens that go through a layer."""
    return flags["steps"] * flags["batch"] * flags["layers"] * flags["N"] * (2 * flags["D"] + 1)


def row_of(flags, error=""):
    """The table row of a run, a dict: its flags, how it ended, its final losses and when each symbol was learned."""
    row = {key: value for key, value in flags.items() if key not in train.MACHINE_FLAGS}
    row |= dict(run=flags["out"].name, error=error)
    if not error:
        log = train.read_log(flags["out"])
        steps, late = [entry["step"] for entry in log], [entry for entry in log if entry["step"] > log[-1]["step"] - 100]
        row |= dict(seconds=log[-1]["seconds"], ended=steps[-1])
        for name in (name for name in log[-1] if name == "val" or name.startswith("x_")):
            row[name] = sum(entry[name] for entry in late) / len(late)
            if name != "val":
                row[f"{name}_below_half"] = train.first_below(steps, [entry[name] for entry in log])
    return row


def run_together(runs):
    """Train runs that differ in the seed alone (one, or on a GPU several as a stack), or go on with them, and return
    their rows. This is what a worker does."""
    torch.set_num_threads(1)
    train.keep_freed_memory()
    for flags in runs:
        flags["out"].parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(f"{runs[0]['out']}.txt", "a") as printed, contextlib.redirect_stdout(printed):
            if not all((flags["out"] / "model.pt").exists() for flags in runs):
                train.train(runs, [train.open_run(flags["out"], flags, runs) for flags in runs][0])
        return [row_of(flags) for flags in runs]
    except (ValueError, FloatingPointError, OSError) as error:
        return [row_of(flags, str(error)) for flags in runs]


def connect(scheduler, workers):
    """A Dask client: of the cluster at this address, or of one worker process per core here."""
    import dask
    from distributed import Client, LocalCluster

    dask.config.set({"distributed.scheduler.allowed-failures": 10, "distributed.comm.timeouts.connect": "5s"})
    if scheduler:
        client = Client(scheduler, timeout=5)
        if max(client.nthreads().values(), default=1) > 1:
            raise ValueError("a worker with several threads would mix up the runs: start workers with --nthreads 1")
        for name in "data.py", "model.py", "train.py":  # a worker elsewhere may have none of ours on its path
            client.upload_file(str(Path(__file__).with_name(name)))
        return client
    return Client(LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0", silence_logs=50))


def write_table(path, rows):
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)


def read_table(path):
    """The rows of the runs that ended well, dicts of strings; "" where a row has no value."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["error"] == "" and row["val"]]  # a cut-off row has no error


def sweep(runs, folder, client):
    """Train the runs, and write the table whenever one ends. The number of failed runs."""
    from distributed import as_completed

    rows, together = read_table(folder / "results.csv"), {}
    for flags in runs:  # on a GPU the seeds of one setting form a stack
        setting = (tuple((key, value) for key, value in flags.items() if key not in ("seed", "out"))
                   if "cuda" in flags["device"] and not flags["circuit"] else flags["out"].name)
        together.setdefault(setting, []).append(flags)
    began, failed, ended, spent, total = time.time(), 0, 0, 0, sum(map(cost, runs))
    # keys that begin alike: Dask times the runs as one kind, without which an idle worker is not given what waits at a busy
    # one; the longest first, so that none is left for the end
    futures = {client.submit(run_together, group, key=("run", group[0]["out"].name, began), pure=False,
                             priority=cost(group[0])): group
               for group in sorted(together.values(), key=lambda group: -cost(group[0]))}
    print(f"{len(runs)} runs to do, a line here when one ends; how far each is: {folder / '*.txt'}", flush=True)
    for future in as_completed(futures):
        try:
            ended_rows = future.result()
        except Exception as error:  # Dask gave up on it: every worker that took it died
            ended_rows = [row_of(flags, f"{type(error).__name__}: {error}".splitlines()[0]) for flags in futures[future]]
        spent += sum(map(cost, futures[future]))
        at_work = [group for future, group in futures.items() if not future.done()][:sum(client.nthreads().values())]
        so_far = spent + sum(cost(flags) for group in at_work for flags in group) / 2  # as if half done
        minutes = (time.time() - began) / so_far * (total - so_far) / 60
        for row in ended_rows:
            rows.append(row)
            ended, failed = ended + 1, failed + bool(row["error"])
            train.write_file(folder / "results.csv", lambda path: write_table(path, rows))
            print(f"{ended}/{len(runs)} runs, {failed} failed, about {minutes:.0f} min left: {row['run']} "
                  f"{row['error'] or 'val %.4f' % row['val']}", flush=True)
    return failed


# ---- figures, from the table alone

def numbers(rows, *columns):
    """[(value of each column), ...] of the rows that have them all, as floats."""
    return [tuple(float(row[column]) for column in columns) for row in rows
            if all(row.get(column) not in (None, "") for column in columns)]


def dots_and_mean(axes, points, color, label):
    """Every run as a dot, and a line through the means at each x."""
    xs = sorted({x for x, _ in points})
    means = [sum(y for at, y in points if at == x) / sum(at == x for at, _ in points) for x in xs]
    axes.plot(*zip(*points), "o", color=color, ms=4, alpha=0.4)
    axes.plot(xs, means, "-", color=color, label=label)


def figure_4(rows, path):
    """Left: final validation loss by layers, with and without the implicit curriculum. Right: each symbol's partial loss
    by layers, with an arrow where the causal law first allows it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained", sharey=True)
    for ic, color, name in ("True", "tab:blue", "with"), ("False", "tab:red", "without"):
        group = [row for row in rows if row["ic"] == ic]
        if points := numbers(group, "layers", "val"):
            D = " and ".join(sorted({row["D"] for row in group}))
            dots_and_mean(left, points, color, f"{name} implicit curriculum (D={D}, {len(points)} runs)")
    curriculum = [row for row in rows if row["ic"] == "True"]
    symbols = [k for k in range(1, 100) if numbers(curriculum, f"x_{k}")]
    colors, allowed = plt.get_cmap("viridis"), {}
    for i, k in enumerate(symbols):
        dots_and_mean(right, numbers(curriculum, "layers", f"x_{k}"), colors(0.9 * i / max(1, len(symbols) - 1)), f"$x_{k}$")
        allowed.setdefault(causal_depth(k), []).append(f"$x_{k}$")
    for depth, names in allowed.items():
        right.annotate(", ".join(names) + "\npossible", (depth, 0.93), (0, 22), textcoords="offset points", ha="center",
                       fontsize="small", arrowprops=dict(arrowstyle="->"))
    for axes in left, right:
        if rows:
            axes.axhline(1 - 1 / int(rows[0]["N"]), color="gray", ls=":", lw=1, label="average of the candidates")
        axes.set(xlabel="layers", ylim=(0, 1.15))
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set(ylabel="validation MSE, mean over the last 100 steps", title="Final loss: every run and the mean")
    right.set(title="Each symbol alone, with implicit curriculum")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", fontsize="small")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", fontsize="small", ncols=4)
    train.save_figure(figure, path)


def learned(row, k):
    return float(row.get(f"x_{k}") or math.inf) < 0.5


LAWS = {"True": causal_depth, "False": unmasked_depth}  # by the table's column "causal"


def least_depths(rows, k):
    """The least number of layers in which each seed learned x_k (final loss below 0.5), a list; infinite where in none of
    those tried."""
    depths = {row["seed"]: math.inf for row in rows if row.get(f"x_{k}")}
    for row in rows:
        if learned(row, k):
            depths[row["seed"]] = min(int(row["layers"]), depths[row["seed"]])
    return [depths[seed] for seed in sorted(depths, key=int)]


def figure_law(rows, path):
    """For each x_k the least depth in which it was learned, with attention held at a minimal circuit (what a depth can do)
    and with attention learned (what training finds), beside the law; left with a causal mask, right without."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    deepest = max(int(row["layers"]) for row in rows)
    for axes, (causal, law), title in zip(panels, LAWS.items(), (
            "causal mask: floor(log$_2$ k) + 2", "no mask: ceil(log$_3$(4k+1))")):
        group = [row for row in rows if row["ic"] == "True" and row["causal"] == causal]
        most = max([int(row["D"]) for row in group], default=1)
        axes.step([k + 0.5 for k in range(most + 1)], [law(k) for k in range(1, most + 2)], where="post", color="black",
                  label="the law")
        for held, marker, color, shift, name in (("True", "s", "tab:green", -0.2, "minimal circuit held"),
                                                 ("False", "o", "tab:blue", 0.1, "attention learned")):
            if some := [row for row in group if row["circuit"] == held]:
                seeds, tried = len({row["seed"] for row in some}), sorted({int(row["layers"]) for row in some})
                dots = [(k + shift + 0.3 * i / seeds, min(depth, deepest + 1)) for k in range(1, most + 1)
                        for i, depth in enumerate(least_depths(some, k))]
                axes.plot(*zip(*dots), marker, color=color, ms=5, label=f"{name}: D={some[0]['D']}, "
                          f"{tried[0]} to {tried[-1]} layers, {some[0]['steps']} steps, {seeds} seeds")
        axes.set(xlabel="k", title=title, xlim=(0.4, most + 0.6), xticks=range(1, most + 1))
        axes.axhspan(deepest + 0.5, deepest + 1.5, color="0.92")
        axes.set_yticks(range(1, deepest + 2), [*range(1, deepest + 1), "in none"])
        axes.grid(axis="y", lw=0.3)
        figure.legend(*axes.get_legend_handles_labels(), loc=f"outside lower {'left' if causal == 'True' else 'right'}",
                      fontsize="small")
    panels[0].set(ylabel="fewest layers that learn $x_k$", ylim=(0.5, deepest + 1.5))
    train.save_figure(figure, path)


def crossings(row):
    """The steps at which x_1, x_2, ... passed below 0.5 in a run, infinite where one never did."""
    return [float(row[f"x_{k}_below_half"] or math.inf) for k in range(1, int(row["D"]) + 1)]


def in_order(runs):
    """"n of m": how many of the runs that learned any symbol learned x_1 first, then x_2, ...; runs: lists of crossings."""
    some = [steps for steps in runs if min(steps) < math.inf]
    return f"{sum(steps == sorted(steps) for steps in some)} of {len(some)}"


def claims(rows):
    """The claims of Section 7.2, counted, as lines of text: a table of the crossings by depth, and what it comes to."""
    without = [value for (value,) in numbers([row for row in rows if row["ic"] == "False"], "val")]
    curriculum = [row for row in rows if row["ic"] == "True"]
    symbols = range(1, 1 + max([int(row["D"]) for row in curriculum], default=0))
    lines = ["| layers | runs |" + "".join(f" x_{k} below 0.5: runs, median step |" for k in symbols) + " in this order |",
             "|---" * (len(symbols) + 3) + "|"]
    for layers in sorted({int(row["layers"]) for row in curriculum}):
        steps = [crossings(row) for row in curriculum if int(row["layers"]) == layers]
        cells = []
        for k in symbols:
            crossed = sorted(run[k - 1] for run in steps if k <= len(run) and run[k - 1] < math.inf)
            cells.append(f"{len(crossed)}" + (f", {statistics.median(crossed):.0f}" if crossed else ""))
        lines.append(f"| {layers} | {len(steps)} | " + " | ".join(cells) + f" | {in_order(steps)} |")
    return lines + [
        "",
        f"without the implicit curriculum above 0.7: {sum(value > 0.7 for value in without)} of {len(without)} runs",
        f"x_1, x_2, ... pass below 0.5 in this order: {in_order(map(crossings, curriculum))} runs that learned any"]


def law_table(rows):
    """The fewest layers in which each seed learned x_k beside the law, as a table; then the runs that beat the law."""
    symbols = range(1, 1 + max([int(row["D"]) for row in rows], default=0))
    lines = ["| fewest layers, a number per seed |" + "".join(f" x_{k} |" for k in symbols), "|---" * (len(symbols) + 1) + "|"]
    for (causal, law), mask in zip(LAWS.items(), ("causal mask", "no mask")):
        lines.append(f"| {mask}: the law |" + "".join(f" {law(k)} |" for k in symbols))
        for held, name in ("True", "attention held at a minimal circuit"), ("False", "attention learned"):
            some = [row for row in rows if (row["causal"], row["circuit"], row["ic"]) == (causal, held, "True")]
            if some:
                lines.append(f"| {mask}: {name} |" + "".join(
                    f" {' '.join('-' if depth == math.inf else str(depth) for depth in least_depths(some, k))} |"
                    for k in symbols))
    beaten = [f"{row['run']} (x_{k})" for row in rows for k in symbols
              if learned(row, k) and int(row["layers"]) < LAWS[row["causal"]](k)]
    return lines + ["", f"learned in fewer layers than the law allows: {', '.join(beaten) or 'nothing'}"]


# ---- the command line

def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"sweep.py: {message}\n")
    p.add_argument("--preset", choices=list(PRESETS), help="a grid made for you; or give your own:")
    p.add_argument("--layers", type=int, nargs="+", help="depths of the grid")
    p.add_argument("--seeds", type=int, help="runs per point, with seeds 0, 1, ... (default: 3)")
    p.add_argument("--flags", action="append", help="flags of train.py for all runs; twice for two sets of runs")
    p.add_argument("--out", type=Path, help="folder of the runs and the table (default: out/sweep, or out/PRESET)")
    p.add_argument("--workers", type=int, default=torch.get_num_threads(), help="processes here (default: one per core)")
    p.add_argument("--scheduler", help="address of a Dask cluster, tcp://host:8786, instead of processes here")
    p.add_argument("--plot-only", action="store_true", help="draw the figures from the table, run nothing")
    flags = p.parse_args()
    if bool(flags.preset) == bool(flags.layers):
        p.error("give a --preset, or your own grid with --layers")
    if flags.preset and (flags.seeds or flags.flags):
        p.error("--seeds and --flags are for a grid of your own: give --layers instead of --preset")
    if min(flags.workers, 1 if flags.seeds is None else flags.seeds) < 1:
        p.error("--workers and --seeds must be at least 1")
    folder, failed = flags.out or Path("out", flags.preset or "sweep"), 0
    groups = PRESETS[flags.preset] if flags.preset else [(text, flags.layers, flags.seeds or 3) for text in flags.flags or [""]]
    runs = [] if flags.plot_only else grid(groups, folder.absolute())
    done = {row["run"] for row in read_table(folder / "results.csv")}
    if runs := [run for run in runs if run["out"].name not in done]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            client = connect(flags.scheduler, flags.workers)
        except (OSError, ValueError) as error:
            p.error(f"no cluster or folder to use ({error}): check --scheduler and --out")
        try:
            failed = sweep(runs, folder, client)
        except KeyboardInterrupt:
            print(f"stopped; to go on: python sweep.py {shlex.join(sys.argv[1:])}")
            sys.exit(130)
        finally:
            if not flags.scheduler:
                client.cluster.close()
            client.close()
    rows = read_table(folder / "results.csv")
    if not rows:
        p.error(f"{folder / 'results.csv'} has no finished run")
    section_7 = [row for row in rows if row["causal"] == "True" and row["circuit"] == "False"]
    figure_4(section_7, folder / "figure4.png")
    figure_law(rows, folder / "law.png")
    print("\n".join(["---", *claims(section_7), "", *law_table(rows), "", f"table: {folder / 'results.csv'}",
                     f"figures: {folder / 'figure4.png'} {folder / 'law.png'}"]))
    if failed:
        print(f"sweep.py: {failed} runs failed, see {folder / 'results.csv'}; the same command tries them again",
              file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
