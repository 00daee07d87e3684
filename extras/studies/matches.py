"""What each read of a circuit matches: a symbol, or none, if it reads by place (analyze.py).

    python -m extras.studies.matches results/[ABCD] results/main --out results/figures

matches.jsonl has a row for each read between roles:

    letters: the k of the x_k that it matches; none if it reads by place
    pair, c: the tokens (u, v) whose M has the largest |c|, M as analyze.py has it
    share: of |M|^2 of this pair, what c I has
    score: the mean score, in nats
    common: whether reader and read can hold a common symbol by then (Assumption 1 of the paper)

This file of commit dfca674 drew matches.png and emergence.png, and measured what else the committed
rows have: `same`, what c |x|^2 of all pairs that show one symbol adds to the score; and the same
with untrained weights, and of symbols of two chains. It made emergence.jsonl, a row for each read
that matches a symbol, in nine runs:

    steps, c: c of its pair at each checkpoint
    rises: when c |x|^2 first passes 1 nat; learned: when the symbol was that the read shows
"""

import itertools
from pathlib import Path

import ablate
import analyze
import train
from data import command_line
from extras.studies import grouped, markdown, share, span, spread
from extras.studies.rows import rounded


def measure(run, n=32):
    """The rows of a run."""
    (model, task, _), paths = train.load(run), ablate.paths_in(ablate.read_report(run))
    rows, roles, arrived = [], [*task.roles], itertools.pairwise(ablate.arrivals(paths, task))
    before = {layer: holds for (_, holds), (layer, _) in arrived}
    for path, (M, score, letters) in analyze.measure_matches(model, task, paths, n).items():
        all_c, holds = M.diagonal(dim1=2, dim2=3).mean(-1), before[path.layer]  # trace(M) / K
        u, v = divmod(all_c.abs().argmax().item(), len(roles))
        c = all_c[u, v].item()
        row = dict(run=run.name, **path._asdict(), letters=[*letters], pair=[roles[u], roles[v]])
        row |= dict(c=c, score=score, common=bool(holds[path.reader] & holds[path.read]))
        row["share"] = c**2 * task.inputs / M[u, v].square().sum().clamp(min=1e-30).item()
        rows.append(row)
    return rounded(rows)


def first_reads(rows):
    """[{read: row}, ...] for each run: of the reads of 1b, 2b, ..., those that match first."""
    found = {}
    for row in sorted(rows, key=lambda row: row["rises"]):
        found.setdefault(row["run"], {}).setdefault(row["read"], row)
    return [*found.values()]


def table(rows):
    """How many reads of each run match a symbol, and how much of M is then c I."""
    lines = []
    for (run,), own in grouped(rows, "run").items():
        by_symbol = [row for row in own if row["letters"]]
        both_hold = sum(row["common"] for row in by_symbol)
        counts = len(own), len(by_symbol), both_hold, len(own) - len(by_symbol)
        c, shares = ([row[name] for row in by_symbol] for name in ("c", "share"))
        lines.append([run, *counts, span(c, "{:.1f}"), span(shares)])
    head = "run", "reads", "match a symbol", "which both can hold", "by place", "c", "share of c I"
    return markdown(head, *lines)


def emergence_table(rows):
    """When the first read of each pair begins to match, and when its symbol is learned."""
    lines, before = [], None
    for name, read in zip("BCD", ("1b", "2b", "3b"), strict=True):
        runs = [reads for reads in first_reads(rows) if read in reads]
        rises, learned = ([reads[read][key] for reads in runs] for key in ("rises", "learned"))
        leads = [after - step for step, after in zip(rises, learned, strict=True)]
        earlier = [reads[read]["rises"] < reads[before]["learned"] for reads in runs if before]
        cells = [f"{read}, which shows {name}", len(runs), *map(spread, (rises, learned, leads))]
        lines.append([*cells, share(earlier) if before else ""])
        before = read
    head = "read of", "runs", "begins to match", "symbol learned", "steps between"
    return markdown([*head, "begins before the symbol before is learned"], *lines)


def main():
    p = command_line("python -m extras.studies.matches", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories")
    p.add_argument("--out", type=Path, default="out", help="the folder of the file")
    args = p.parse_args()
    file, names = args.out / "matches.jsonl", {run.name for run in args.run}
    rows = [row for row in train.read_file(file, []) if row["run"] not in names]
    rows += itertools.chain(*map(measure, args.run))
    train.write_file(file, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
