"""How many layers each symbol takes, in runs that ask for all of a long chain at once, with a mask
and without one (Sections 5 and 7); and what was predicted of these runs before them.

    python -m extras.studies.layers    # prints the predictions beside the medians
"""

import functools
import statistics

from extras.studies import RESULTS, markdown, share, span
from extras.studies.ahead import reads_twice
from extras.studies.order import Ended, all_chains, asks_all
from extras.studies.rows import committed, settings_text
from extras.studies.theory import causal_depth, unmasked_depth
from train import parse_flags, read_file


PREDICTED = RESULTS / "runs/ahead_predicted.jsonl"
BASELINE = 0.66  # the naive guess of a row that has none: the median of what was known before it
FEWEST = 3  # a group of fewer runs stands in no table
LONG = 5  # symbols, from which on a chain is long


@functools.cache
def long_chains():
    """Return the runs of four long chains with a mask that ask for all symbols, one for each
    settings and seed."""
    found = {}
    for run in all_chains():
        flags = run.flags
        ours = flags.N == 4 and flags.D >= LONG and flags.causal and flags.width == 128
        if ours and asks_all(flags):
            found[settings_text(flags), flags.seed] = run
    return [*found.values()]


def shape_of(flags):
    """Return (D, (fewest layers, most), heads) of the row of the table to which a run belongs."""
    deep = flags.layers, flags.layers
    if flags.heads == 8 and flags.layers >= 5:
        deep = 5, 8  # of Figure 4, where all symbols may be learned
    return flags.D, deep, flags.heads


def known_cell(runs, depth_of):
    """Return "5, **4**, 0", how many of these runs know x_1, x_2, ...; bold where the flow of
    information, in which x_k takes depth_of(k) layers, has just become deep enough."""
    cells = []
    for k in range(1, runs[0].flags.D + 1):
        known = sum(f"x_{k}" in run.known for run in runs)
        cells.append(f"**{known}**" if depth_of(k) == runs[0].flags.layers else f"{known}")
    return ", ".join(cells)


def layers_table():
    """Return how many runs of long chains know each symbol at their end, by layers."""
    groups, lines = {}, []
    for run in long_chains():
        groups.setdefault(shape_of(run.flags), []).append(run)
    for (D, deep, heads), runs in sorted(groups.items()):
        if len(runs) >= FEWEST:
            cell = known_cell(runs, causal_depth if deep[0] == deep[1] else lambda k: None)
            lines.append([D, f"{span(deep, '{}')} x {heads}", len(runs), cell])
    return markdown(["D", "layers x heads", "runs", "know x_1, x_2, ..."], *lines)


def exceeds_the_flow(known, layers, D):
    """Return whether a model that knows the x_k of these k, of D that it is asked for, knows one
    that takes more layers by content than it has; None if it could not show that, since it has one
    layer, or does not know all the others, or is asked for no such one."""
    allowed = {k for k in range(1, D + 1) if causal_depth(k) <= layers}
    if layers > 1 and allowed <= known and len(allowed) < D:
        return known > allowed
    return None


def obey_the_flow():
    """Return [(flags, whether it does not exceed the flow), ...] of the runs of long chains that
    could show it."""
    answers = []
    for run in long_chains():
        known = {int(name[2:]) for name in run.known}
        exceeds = exceeds_the_flow(known, run.flags.layers, run.flags.D)
        if exceeds is not None:
            answers.append((run.flags, not exceeds))
    return answers


def of_shape(layers, heads, D):
    runs = [run for run in long_chains() if shape_of(run.flags) == (D, (layers, layers), heads)]
    if not runs:
        raise LookupError(f"no committed run has {layers} layers of {heads} heads and D = {D}")
    return runs


def know(runs, *names):
    """Return "2 of 5", how many of these runs know all of these symbols."""
    return share({*names} <= {*run.known} for run in runs)


def knows_x_4(run):
    """Return whether a run knows x_4 or a later symbol."""
    return any(int(name[2:]) >= 4 for name in run.known)


# ---- the runs that were predicted: those of D = 7, with and without a mask, and with RoPE


def predicted_runs(words):
    """Return the rows of the runs with these flags of train.py, of all seeds."""
    settings = settings_text(parse_flags(words.split()))
    return [row for row in committed("*") if row["settings"] == settings]


def mask_table():
    """Return how many runs know each symbol, with a mask and without one, in the same steps."""
    lines = []
    for words in dict.fromkeys(row["flags"] for row in read_file(PREDICTED)):
        masked, free = predicted_runs(words), predicted_runs(f"{words} --no-causal")
        if "--no-causal" not in words and min(len(masked), len(free)) >= FEWEST:
            flags, cells = masked[0]["flags"], []
            for rows, depth_of in (masked, causal_depth), (free, unmasked_depth):
                runs = [Ended(row["flags"], row["learned"], {}, row["known"]) for row in rows]
                cells.append(f"{known_cell(runs, depth_of)} of {len(runs)}")
            lines.append([flags.D, f"{flags.layers} x {flags.heads}", *cells])
    return markdown(["D", "layers x heads", "with a mask", "without"], *lines)


def know_x_1():
    """Return [whether it knows x_1, ...] of the runs with a mask, and of those without."""
    known = [[], []]
    for row in committed("mask/*"):
        known[not row["flags"].causal].append("x_1" in row["known"])
    return known


def median_of(row):
    """Return the median of the runs of a prediction; None if there are too few."""
    runs = predicted_runs(row["flags"])[: row["n"]]  # those of the first seeds
    if len(runs) < FEWEST:
        return None
    if row["of"] == "count":  # of circuits that read ahead twice
        return sum(reads_twice(runs))
    if row["loss"].startswith("x_"):
        return statistics.median(run["log"][-1][row["loss"]] for run in runs)
    return statistics.median(run["steps"] for run in runs)


def page():
    """Return what stands in the text of the page on long chains and on the predictions."""
    above = [not answer for _, answer in obey_the_flow()]
    five, four, three = of_shape(5, 4, 8), of_shape(4, 4, 8), of_shape(3, 4, 7)
    _, inside, near = compared(read_file(PREDICTED), median_of)
    masked, free = know_x_1()
    return [
        f"that learned all that this allows learned more ({share(above)})",
        f"chain for seven steps** ({know(of_shape(4, 4, 7) + four, 'x_6', 'x_7')} runs)",
        f"and five for eight ({know(five, 'x_8')})",
        f"asked for eight steps none learned the eighth ({know(four, 'x_8')})",
        f"asked for seven none the fourth ({share(map(knows_x_4, three))})",
        f"learn less** ({share(free)} know x_1, with it {share(masked)})",
        f"long chains, masks and RoPE {share(inside)}, though naive guesses would get {sum(near)}",
    ]


def compared(rows, median_of):
    """Return (table, inside, near): the medians beside what was predicted of them; whether each
    lies inside, and whether it lies as near to the naive guess. Rows without runs count in
    neither."""
    lines, inside, near = [], [], []
    for row in rows:
        low, high, median = row["low"], row["high"], median_of(row)
        said = "not run"
        if median is not None:
            inside.append(low <= median <= high)
            near.append(abs(median - row.get("naive", BASELINE)) <= (high - low) / 2)
            said = f"{median:.3f}, {'inside' if inside[-1] else 'outside'}"
        lines.append([row["group"], row.get("flags", ""), row["loss"], f"{low}-{high}", said])
    return markdown(["runs", "flags", "loss", "predicted", "median"], *lines), inside, near


if __name__ == "__main__":
    table, inside, near = compared(read_file(PREDICTED), median_of)
    print(table, f"inside: {share(inside)}; as near to the naive guess: {share(near)}", sep="\n\n")
