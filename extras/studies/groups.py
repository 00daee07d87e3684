"""Tables of groups of runs, which stand on the pages beside the claims."""

import itertools

from extras.studies import grouped, markdown, share, span, spread
from extras.studies.claims import heads_of, holds_six_reads, passes_on, swaps
from extras.studies.rows import all_runs, committed, knows, name_of, same_run
from extras.studies.theory import causal_depth


READS = [  # of which kinds, which token, what it reads, what it gains; the first four are the six
    ("1b reads 1a, 2b reads 2a, 3b reads 3a", "1b, 2b, 3b", "1a, 2a, 3a", "its key"),
    ("q reads 1b", "query", "1b", "B"),
    ("2b reads 3b", "2b", "3b", "D, ahead"),
    ("q reads 2b", "query", "2b", "C, and D with it"),
    ("1b reads 2b", "1b", "2b", "C, ahead"),
    ("q reads 3b", "query", "3b", "D"),
]
WANTED = dict(task="chain", targets="all", causal=True, init="", N=4, width=128)
FEWEST = 3  # a group of fewer runs stands in no table, unless it is in Figure 4
ENOUGH = 30  # of fewer queries nothing is said


def doubling():
    """Return how many of the circuits of the first claim have each read."""
    circuits, lines = {}, []
    for row in all_runs():
        if holds_six_reads(row, row["flags"]) is not None:
            found = {*heads_of(row)}  # a repeat must agree
            circuits[same_run(row)] = circuits.get(same_run(row), found) & found
    for kinds, *cells in READS:
        counts = [sum(kind in heads for heads in circuits.values()) for kind in kinds.split(", ")]
        lines.append([*cells, ", ".join(map(str, counts))])
    return markdown(["token", "reads", "and gains", f"circuits of {len(circuits)}"], *lines)


def targets():
    """Return a row per set of targets, of fresh weights and D = 3: how many know each symbol at
    their end, and when they learned it."""
    rows, lines = committed("curriculum/*"), []
    rows = [row for row in rows if row["D"] == 3 and not row["init"]]
    for group in grouped(rows, "targets").values():
        asked, cells = group[0]["task"].targets, []
        for k in (1, 2, 3):
            known = [row["learned"][f"x_{k}"] for row in group if knows(row, k)]
            text = f"{len(known)}: {spread(known)}" if known else "0"
            cells.append(text if k in asked else "")
        lines.append([", ".join(f"x_{k}" for k in asked), len(group), *cells])
    return markdown(["asked for", "runs", "x_1", "x_2", "x_3"], *lines)


def layers():
    """Return how many runs of long chains know each symbol at their end, by layers; bold where the
    flow of information has just become deep enough."""
    rows, lines = [row for row in all_runs() if row["D"] >= 5], []
    rows = [row for row in rows if WANTED.items() <= vars(row["flags"]).items()]
    rows = {same_run(row): row for row in rows}.values()  # no repeats; of Figure 4 its own runs
    groups = grouped(rows, "D", "optimizer", "batch", "layers", "heads", "steps")
    for (D, optimizer, batch, layers, heads, steps), group in sorted(groups.items()):
        cells = []
        for k in range(1, D + 1):
            known = sum(knows(row, k) for row in group)
            cells.append(f"**{known}**" if causal_depth(k) == layers else f"{known}")
        if len(group) >= FEWEST or group[0]["group"] == "sweep":
            shape = f"{layers} x {heads}", f"{steps:,}", len(group)
            lines.append([D, optimizer, batch, *shape, ", ".join(cells)])
    head = "D", "optimizer", "batch", "layers x heads", "steps", "runs", "know x_1, x_2, ..."
    return markdown(head, *lines)


def longer():
    """Return the last losses of few layers that were trained for longer, and of runs of Figure 4
    with AdamW, of those in batches of 128 the deepest."""
    lines = []
    for row in committed("ahead/long_*") + committed("adamw/batch*"):
        begun = f", begun from {row['init'].rpartition('/')[2]}" if row["init"] else ""
        shape = f"{row['layers']} x {row['heads']} x {row['head_dimension']}"
        losses = [f"{loss:.3f}" for loss in row["losses"].values()]
        settings = shape, f"{row['steps']:,}{begun}", row["batch"], row["optimizer"], row["dtype"]
        lines.append([row["name"], *settings, *losses])
    names = [f"x_{k}" for k in range(1, 6)]
    settings = "layers x heads x size", "steps", "batch", "optimizer", "precision"
    return markdown(["run", *settings, *names], *lines)


def with_adamw():
    """Return when models of the size of A to C learned the symbols with the paper's optimizer, from
    when on and how often evaluations are below 0.01, how low they came, and where they ended."""
    lines = []
    patterns = "[ABC]", "adamw/s[01]", "adamw/*float*", "adamw/clip1_*", "others/literal_no_aid_*"
    for pattern in patterns:
        for row in committed(pattern):
            log, last = row["log"], row["log"][-1]
            since = [*itertools.dropwhile(lambda entry: entry["val"] >= 0.01, log)]
            low = share(entry["val"] < 0.01 for entry in since)
            below = f"{low} from {since[0]['step']:,} on" if since else ""
            learned = ["never" if s is None else f"{s:,.0f}" for s in row["learned"].values()]
            lines.append([
                name_of(row), row["clip"], row["decay"], row["dtype"], f"{last['step']:,}",
                ", ".join(learned), below,
                f"{min(entry['val'] for entry in log):.3f}", f"{last['val']:.3f}",
            ])  # fmt: skip
    aids, course = ("run", "clip", "decay"), ("x_1, x_2, x_3 at step", "below 0.01", "lowest")
    return markdown([*aids, "precision", "steps", *course, "last"], *lines)


def places():
    """Return how many measured runs of two steps and two chains know x_2, and what their finders
    pass on, by layers and by the places where a pair may stand."""
    rows, lines = [row for row in all_runs() if name_of(row) in swaps()], []
    rows = [row for row in rows if row["N"] == row["D"] == 2]
    for (places, layers), group in sorted(grouped(rows, "places", "layers").items()):
        losses, cells = span([row["losses"]["x_2"] for row in group]), []
        for role in "1b", "q":
            passed = []
            for row in group:
                swap = swaps()[name_of(row)].get(role) if knows(row, 2) else None
                last = f"L{layers - 1}H"
                if swap and swap["n"] >= ENOUGH and not swap["heads"][0].startswith(last):
                    passed.append(passes_on(swap, row["task"]))
            cells.append(", ".join(f"{passed.count(what)}: {what}" for what in sorted({*passed})))
        lines.append([places, layers, share(knows(row, 2) for row in group), losses, *cells])
    finders = "finder at 1b passes on", "at q"
    return markdown(["places", "layers", "know x_2", "loss of x_2", *finders], *lines)
