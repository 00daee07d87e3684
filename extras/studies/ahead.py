"""How far circuits read ahead: whether the pair tokens of a chain read one another before the query
reads them, and in how many rounds (Section 5 of the paper, pointer doubling).

    python -m extras.studies.ahead out/L4_H4_D7_s*

At first kb holds its own pair, x_{k-1} and x_k. A circuit has as many rounds as the flow needs at
least for the symbol that a token kb holds furthest ahead, by its paths: a linear circuit has none,
one round brings x_{k+1}, two bring x_{k+2} or x_{k+3}, r bring up to x_{k + 2^r - 1}.
"""

from ablate import held, parts_of, paths_in
from extras.studies import command, markdown
from extras.studies.rows import name_of


ROUNDS = "linear", "one round", "two rounds", "three rounds"


def steps_ahead(paths, task):
    """Return {token: steps} of the tokens of pairs that hold a symbol ahead of their pair in the
    end: 2 for 1b if it holds x_3. An intermediate token counts from its pair: 2b+1 from x_2."""
    _, holds = held(paths, task)[-1]
    ahead = {}
    for token, symbols in holds.items():
        role, _ = parts_of(token)
        steps = max(symbols, default=0) - int(role[:-1] or 0)
        if role != "q" and steps > 0:
            ahead[token] = steps
    return ahead


def rounds_of(paths, task):
    """Return the number of rounds of a circuit: 0, 1, 2 or 3 for 0, 1, up to 3, up to 7 steps."""
    return max(steps_ahead(paths, task).values(), default=0).bit_length()


def table(rows):
    """Return a row per run, and how many of the validated circuits have so many rounds."""
    lines, counts = [], dict.fromkeys(ROUNDS, 0)
    for row in rows:
        paths, report = paths_in(row["report"]), row["report"]
        if not paths:
            said = report.get("verdict", "no report: run ablate.py")
            lines.append([name_of(row), said, 0, "", "", ""])
            continue
        rounds = ROUNDS[rounds_of(paths, row["task"])]
        ahead = steps_ahead(paths, row["task"])
        furthest = [f"{token} {steps}" for token, steps in sorted(ahead.items())]
        layers = len({path.layer for path in paths})
        lines.append(
            [name_of(row), report["verdict"], len(paths), layers, ", ".join(furthest), rounds]
        )
        counts[rounds] += report["validated"]
    head = ["run", "verdict", "paths", "layers with paths", "steps ahead", "rounds"]
    counted = ", ".join(f"{rounds} {count}" for rounds, count in counts.items())
    return f"{markdown(head, *lines)}\n\nValidated circuits: {counted}."


if __name__ == "__main__":
    command(__file__, __doc__, table)
