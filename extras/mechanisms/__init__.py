"""Related systems from the slides on mechanisms in transformers (Alberto Bietti), one file each.

A system is a module with TASKS, [(function, number of seeds, [arguments], text), ...], and with
draw(results), a figure. function(seed, **arguments) is called for every seed. results: {name of the
function: its rows}, a row being {"function": its name, **arguments, "values": one for each seed};
text(rows) stands on the page, None prints nothing.
"""

from extras.studies import grouped, markdown
from train import read_file


NAMES = ("memories", "recall", "bigrams", "attention", "joint", "noise", "hops")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "black")  # safe for colour-blind readers


def read_results(path):
    """{name of the function: its rows} of a file; nothing if it does not exist."""
    return {name: rows for (name,), rows in grouped(read_file(path, []), "function").items()}


def seeds_table(rows, head, lines):
    """A table of these rows; its first cell has the number of seeds."""
    first, *others = head
    return markdown([f"{first} ({len(rows[0]['values'])} seeds)", *others], *lines)


def pivot(rows, names, column_of, cell_of):
    """A table with a line for each value of the fields `names`, {field: its name in the head}, and
    a column for each column_of(row); a cell is cell_of(the values of all seeds)."""
    columns, lines = [*dict.fromkeys(map(column_of, rows))], {}
    for row in rows:
        line = lines.setdefault(tuple(row[name] for name in names), dict.fromkeys(columns, ""))
        line[column_of(row)] = cell_of(row["values"])
    lines = [(*key, *line.values()) for key, line in sorted(lines.items())]
    return seeds_table(rows, [*names.values(), *columns], lines)


def descend(optimizer, loss):
    """One training step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def draw_seeds(axes, x, values, label, **style):
    """Plot the mean of values (seeds, x) in a band from the lowest to the highest seed."""
    axes.fill_between(x, values.amin(0), values.amax(0), color=style["color"], alpha=0.15, lw=0)
    axes.plot(x, values.mean(0), label=label, **style)
