"""How far circuits read ahead: whether the pair tokens of a chain read one another before the query
reads them, and in how many rounds (Section 5 of the paper, pointer doubling).

    python -m extras.studies.ahead out/L4_H4_D7_s*

At first kb holds its own pair, x_{k-1} and x_k. A circuit is linear if no token of a pair can hold
a symbol ahead of its pair. It has one round if all symbols would still reach the query with kb
holding x_{k+1} at most, two rounds with x_{k+3}, r rounds with x_{k + 2^r - 1}: as many as pointer
doubling needs to get so far. A token finds another pair by a symbol that both hold.
"""

from pathlib import Path

from ablate import arrivals, paths_in, split_token
from data import command_line
from extras.studies import markdown, share
from extras.studies.rows import committed, load, name_of


ROUNDS = "linear", "one round", "two rounds", "three rounds"


def pair_of(token):
    """Return the step of a token's pair: 2 for 2a, 2b and 2b+1, 0 for the query."""
    role, _ = split_token(token)
    return int(role[:-1] or 0)


def steps_ahead(token, symbols):
    """Return how far ahead of its pair a token holds symbols: 2 for 1b with x_3; 0 for the query,
    and if it holds none."""
    return 0 if token == "q" else max([0, *(k - pair_of(token) for k in symbols)])


def rounds_of(paths, task):
    """Return the number of rounds of a circuit, as above."""
    _, holds = arrivals(paths, task)[-1]
    if not any(steps_ahead(*item) for item in holds.items()):
        return 0
    rounds = 1
    while reached_within(paths, task, task.D) - reached_within(paths, task, 2**rounds - 1):
        rounds += 1
    return rounds


def reached_within(paths, task, steps):
    """Return the k of all x_k that reach the query if no token of a pair keeps a symbol more than
    so many steps ahead of its pair."""
    [(_, holds)] = arrivals([], task)
    for layer in sorted({path.layer for path in paths}):
        before = {token: {*symbols} for token, symbols in holds.items()}
        for path in (path for path in paths if path.layer == layer):
            own, symbols = before.get(path.reader, set()), before.get(path.token, set())
            if pair_of(path.reader) == pair_of(path.token) or own & symbols:
                kept = {k for k in symbols if steps_ahead(path.reader, {k}) <= steps}
                holds[path.reader] |= kept
    return holds["q"]


def table(rows):
    """Return a row per run, and below how many of the validated circuits have so many rounds."""
    lines, counts = [], dict.fromkeys(ROUNDS, 0)
    for row in rows:
        report, paths, text, rounds = row["report"], paths_in(row["report"]), "", ""
        if paths:
            _, holds = arrivals(paths, row["task"])[-1]
            ahead = {token: steps_ahead(token, holds[token]) for token in sorted(holds)}
            text = ", ".join(f"{token} {steps}" for token, steps in ahead.items() if steps)
            rounds = ROUNDS[rounds_of(paths, row["task"])]
            counts[rounds] += report["validated"]
        said = report.get("verdict", "no report")
        lines.append([name_of(row), said, len(paths), text, rounds])
    counted = ", ".join(f"{rounds} {count}" for rounds, count in counts.items())
    head = ["run", "verdict", "paths", "steps ahead of its pair", "rounds"]
    return f"{markdown(head, *lines)}\n\nOf the validated circuits: {counted}."


def page():
    """Return what the page on circuits says of models that follow seven steps, and eight."""
    four = reads_twice(committed("ahead/L4_H4_D7_*"))
    twelve = reads_twice(committed("ahead/L12_H1_D7_*"))
    five = [rounds == 3 for rounds in rounds_in(committed("ahead/L5_H4_D8_*"))]
    return [
        f"read ahead twice ({share(four)})",
        f"with other pairs ({share(twelve)})",
        f"follow eight in five layers, three times ({share(five)})",
    ]


def reads_twice(rows):
    """Return [whether it reads ahead in two rounds or more, ...] of the validated circuits."""
    return [rounds >= 2 for rounds in rounds_in(rows)]


def rounds_in(rows):
    """Return the number of rounds of each validated circuit."""
    validated = [row for row in rows if row["report"].get("validated")]
    return [rounds_of(paths_in(row["report"]), row["task"]) for row in validated]


def main():
    p = command_line("python -m extras.studies.ahead", __doc__)
    p.add_argument("run", type=Path, nargs="+", help="run directories, or files of rows")
    print(table(load(p.parse_args().run)))


if __name__ == "__main__":
    main()
