"""What the circuits read that ablate.py found in many runs, and when their heads emerge."""

import itertools
import math
from collections import defaultdict

import analyze
from ablate import paths_in
from extras.studies import markdown


READS = [  # of which kinds, which token, what it reads, what it gains
    ("1b reads 1a, 2b reads 2a, 3b reads 3a", "1b, 2b, 3b", "1a, 2a, 3a", "what it is found by"),
    ("q reads 1b", "query", "1b", "B"),
    ("2b reads 3b", "2b", "3b", "D, ahead"),
    ("q reads 2b", "query", "2b", "C, and D with it"),
    ("1b reads 2b", "1b", "2b", "C, ahead"),
    ("q reads 3b", "query", "3b", "D"),
]
SIX = {kind for kinds, *_ in READS[:4] for kind in kinds.split(", ")}  # of pointer doubling


def by_head(paths):
    """Return {(layer, head): [path, ...]}, the paths of each head."""
    heads = defaultdict(list)
    for path in sorted(paths):
        heads[path.layer, path.head].append(path)
    return heads


def place_of(token):
    """Return the place of a token along its chain, q 1a 1b 2a ...: 2 of 1b, 3 of 1b+1; inf of a
    star, which may stand anywhere."""
    role, _, after = token.partition("+")
    if token.endswith("*"):
        return math.inf
    return 2 * int(role[:-1] or 0) - role.endswith("a") + int(after or 0)


def heads_of(row):
    """Return {"q reads 1b": {(layer, head), ...}, ...}, which heads of a circuit read so."""
    heads = defaultdict(set)
    for path in paths_in(row["report"]):
        heads[f"{path.reader} reads {path.read}"].add((path.layer, path.head))
    return heads


def doubling_table(rows):
    """Return how many of these circuits have each read."""
    circuits, lines = [heads_of(row) for row in rows], []
    for kinds, *cells in READS:
        counts = [sum(kind in heads for heads in circuits) for kind in kinds.split(", ")]
        lines.append([*cells, ", ".join(map(str, counts))])
    return markdown(["token", "reads", "and gains", f"circuits of {len(rows)}"], *lines)


def new_heads(row):
    """Return how many heads emerge before x_2, x_3, ... are learned and after the symbol before: as
    the mean attention of their first path passes one half. Without a circuit, all measured paths
    count."""
    steps, first = analyze.emergence_steps(row["emergence"]), {}
    for path in paths_in(row["report"]) or steps:
        if steps.get(path) is not None:
            first[path[:2]] = min(steps[path], first.get(path[:2], math.inf))
    between = itertools.pairwise(row["learned"].values())
    return [sum(a < step <= b for step in first.values()) for a, b in between]
