"""Which circuits read ahead twice: the pair tokens of a chain read one another before the query
reads them (Section 5 of the paper, pointer doubling).

At first kb holds its own pair, x_{k-1} and x_k, and after one round of reading ahead x_{k+1} at
most; further symbols take a second one. A token finds another pair by a symbol that both hold.
"""

from ablate import arrivals, paths_in
from extras.moved import split_token


def reads_twice(row):
    """Return whether a circuit reads ahead in two rounds or more."""
    paths, task = paths_in(row["report"]), row["task"]
    return reached_within(paths, task, 1) != reached_within(paths, task, task.D)


def reached_within(paths, task, steps):
    """Return the k of all x_k that reach the query if no token of a pair keeps a symbol more than
    so many steps ahead of its pair."""
    [(_, holds)] = arrivals([], task)
    for layer in sorted({path.layer for path in paths}):
        before = {token: {*symbols} for token, symbols in holds.items()}
        for path in (path for path in paths if path.layer == layer):
            own, symbols = before.get(path.reader, set()), before.get(path.read, set())
            pair = pair_of(path.reader)
            if pair == pair_of(path.read) or own & symbols:
                most = task.D if path.reader == "q" else pair + steps
                holds[path.reader] |= {k for k in symbols if k <= most}
    return holds["q"]


def pair_of(token):
    """Return the step of a token's pair: 2 for 2a, 2b and 2b+1, 0 for the query."""
    role, _ = split_token(token)
    return int(role[:-1] or 0)
