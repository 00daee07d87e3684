"""The table of a sweep: results.csv, and what it shows: Figure 4 and the claims of Section 7.2, and
the fewest layers that learned each symbol beside the law (Section 5). sweep.py calls it.

A table is {run: row}; a row is a dict of the run's flags, how it ended, its final losses (the mean
over the last 100 steps) and the step at which each symbol passed below 0.5; None where it did not.
"""

import collections
import csv
import io
import json
import math
import statistics

import runs
from data import plateaus
from depth import DEPTH_LAWS, causal_depth
from flags import DEFAULTS, MACHINE_FLAGS, asked
from order import in_order


# ---- results.csv

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
    ordered = [in_order([learned_at(row, k) for k in symbols_in([row])]) for row in rows]
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
