"""What each read of a circuit matches: a symbol, or none, if it reads by place (analyze.py).

    python -m extras.studies.matches results/[ABCD] results/main --out results/figures

matches.jsonl has a row for each read between roles:

    letters: the k of the x_k that it matches; none if it reads by place
    c: the largest |c| of a pair of tokens (u, v) with its sign, M as analyze.py has it
    share: of |M|^2 of this pair, what c I has
    score, same: the mean score; what c |x|^2 of all pairs that show one symbol add to it, in nats
    untrained, chains: the same of one symbol, with untrained weights; with v two chains further
    common: whether reader and read can hold a common symbol by then (Assumption 1 of the paper)
"""

import itertools
from pathlib import Path

import ablate
import analyze
import train
from data import command_line
from extras.studies import markdown, span
from extras.studies.rows import rounded

import torch


def c_of(M):
    """(roles, roles), trace(M) / K."""
    return M.diagonal(dim1=2, dim2=3).mean(-1)


def measure(run, n=32):
    """The rows of a run."""
    (model, task, flags), paths = train.load(run), ablate.paths_in(ablate.read_report(run))
    matches, batch = analyze.measure_matches(model, task, paths, n), task.draw("circuits", n)
    torch.manual_seed(0)
    untrained = analyze.measure_matches(train.build(flags).eval(), task, matches, n)
    _, (q, _) = analyze.slopes_of(model, task, [*matches], batch)
    _, (_, k) = analyze.slopes_of(model, task, [*matches], batch, further=2)
    chains = torch.einsum("puins,pvjns->puvij", q, k) / n
    arrived = itertools.pairwise(ablate.arrivals(paths, task))
    before = {layer: holds for (_, holds), (layer, _) in arrived}
    square = batch.inputs.square().sum(-1).mean().item()

    def of_symbols(M):  # the c |x|^2 of all pairs that show x_0, that of x_1, ...
        return torch.stack([c.sum() * square for c in analyze.same_symbol(M, task).values()])

    rows = []
    for (path, (M, score, letters)), further in zip(matches.items(), chains, strict=True):
        u, v = divmod(c_of(M).abs().argmax().item(), len(task.roles))
        c = c_of(M)[u, v].item()
        row = dict(run=run.name, **path._asdict(), letters=[*letters], c=c)
        row["share"] = c**2 * task.inputs / M[u, v].square().sum().clamp(min=1e-30).item()
        row |= dict(score=score, same=of_symbols(M).sum().item())
        row["untrained"] = of_symbols(untrained[path][0]).abs().max().item()
        row["chains"] = of_symbols(further).abs().max().item()
        row["common"] = bool(before[path.layer][path.reader] & before[path.layer][path.read])
        rows.append(row)
    return rounded(rows)


def table(rows):
    """How many reads of each run match a symbol, and how much of M is then c I."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        own = [row for row in rows if row["run"] == run]
        by_symbol = [row for row in own if row["letters"]]
        paired = [row for row in by_symbol if row["common"]]
        shares, c = ([row[name] for row in by_symbol] for name in ("share", "c"))
        counts = [len(own), len(by_symbol), len(paired), len(own) - len(by_symbol)]
        lines.append([run, *counts, span(c, "{:.1f}"), span(shares, "{:.2f}")])
    head = "run", "reads", "match a symbol", "which both can hold", "by place", "c", "share of c I"
    return markdown(head, *lines)


def main():
    p = command_line("python -m extras.studies.matches", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories")
    p.add_argument("--out", type=Path, default="out", help="the folder of the file")
    args = p.parse_args()
    file, names = args.out / "matches.jsonl", [run.name for run in args.run]
    rows = [row for row in train.read_file(file, []) if row["run"] not in names]
    for run in args.run:
        rows += measure(run)
    train.write_file(file, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
