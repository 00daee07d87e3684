"""What each read of a circuit matches: a symbol, or none, if it reads by place (analyze.py).

    python -m extras.studies.matches results/[ABCD] results/main --out results/figures
    python -m extras.studies.matches out/L12_H1_D3_s* --emergence    # of runs with checkpoints

matches.png shows the reads of the first run; matches.jsonl has a row for each read between roles:

    letters: the k of the x_k that it matches; none if it reads by place
    pair, c: the tokens (u, v) whose M has the largest |c|, M as analyze.py has it
    rest, share: the root mean square of a row of M - c I; of |M|^2, what c I has
    score, same: the mean score; what c |x|^2 of all pairs that show one symbol add to it, in nats
    other: the largest c |x|^2 of two tokens of a chain that show different symbols
    untrained, chains: that of one symbol: with untrained weights; with v two chains further
    common: whether reader and read can hold a common symbol by then (Assumption 1 of the paper)

emergence.jsonl has a row for each read that matches a symbol: c of its pair at each checkpoint;
rises: the step at which c |x|^2 passes 1 nat; learned: that of the symbol that the read shows.
"""

import itertools
from pathlib import Path

import ablate
import analyze
import train
from data import command_line
from extras.studies import markdown, rows_by, span
from extras.studies.rows import rounded

import torch
from matplotlib.patches import Rectangle


def c_of(M):
    """(roles, roles), trace(M) / K."""
    return M.diagonal(dim1=2, dim2=3).mean(-1)


def start(run, n):
    """(task, matches, the mean |x|^2, a row for each match) of a run."""
    model, task, _ = train.load(run)
    square = task.draw("circuits", n).inputs.square().sum(-1).mean().item()
    paths, roles, rows = ablate.paths_in(ablate.read_report(run)), [*task.roles], []
    matches = analyze.measure_matches(model, task, paths, n)
    for path in paths.keys() - matches:
        print(f"{run.name}, {path}: not measured")
    for path, (M, _, letters) in matches.items():
        u, v = divmod(c_of(M).abs().argmax().item(), len(roles))
        c = c_of(M)[u, v].item()
        rest = (M[u, v] - c * torch.eye(task.inputs)).square().sum().item() / task.inputs
        row = dict(run=run.name, **path._asdict(), letters=[*letters], pair=(roles[u], roles[v]))
        rows.append(row | dict(c=c, rest=rest**0.5, share=c**2 / max(c**2 + rest, 1e-30)))
    return task, matches, square, rows


def measure(run, n=32):
    """The rows of a run in matches.jsonl, and {path: M}."""
    (model, _, flags), (task, matches, square, rows) = train.load(run), start(run, n)
    if not rows:
        return [], {}
    torch.manual_seed(0)
    untrained = analyze.measure_matches(train.build(flags).eval(), task, matches, n)
    batch = task.draw("circuits", n)
    _, (q, _) = analyze.slopes_of(model, task, [*matches], batch)
    _, (_, k) = analyze.slopes_of(model, task, [*matches], batch, further=2)
    chains = torch.einsum("puins,pvjns->puvij", q, k) / n
    arrived = itertools.pairwise(ablate.arrivals(ablate.paths_in(ablate.read_report(run)), task))
    before = {layer: holds for (_, holds), (layer, _) in arrived}
    shown = torch.tensor([*task.roles.values()])

    def of_symbols(M):  # the c |x|^2 of all pairs that show x_0, that of x_1, ...
        return torch.stack([c.sum() * square for c in analyze.same_symbol(M, task).values()])

    for row, (path, (M, score, _)), two in zip(rows, matches.items(), chains, strict=True):
        row |= dict(score=score, same=of_symbols(M).sum().item())
        row["other"] = c_of(M)[shown[:, None] != shown].abs().max().item() * square
        row["untrained"] = of_symbols(untrained[path][0]).abs().max().item()
        row["chains"] = of_symbols(two).abs().max().item()
        row["common"] = bool(before[path.layer][path.reader] & before[path.layer][path.read])
    return rounded(rows), {path: M for path, (M, *_) in matches.items()}


def emerge(run, n=32):
    """The rows of a run in emergence.jsonl."""
    task, matches, square, rows = start(run, n)
    both = [(path, row) for path, row in zip(matches, rows, strict=True) if row["letters"]]
    steps, learned = [], analyze.crossings(train.read_log(run), task)
    for _, row in both:
        row |= dict(steps=steps, c=[], learned=learned.get(f"x_{task.roles[row['read']]}"))
    for file in analyze.checkpoints_of(run):
        steps.append(int(file.stem))
        now = analyze.measure_matches(train.load(run, f"ckpt/{file.name}")[0], task, matches, n)
        for path, row in both:
            u, v = map([*task.roles].index, row["pair"])
            row["c"].append(c_of(now[path][0])[u, v].item())
    for _, row in both:
        row["rises"] = analyze.first_below(steps, [-c for c in row["c"]], -analyze.LEAST / square)
    return rounded([row for _, row in both])


def names_of(row):
    """The read of a row, and what it matches, as on its arrow in circuit.png."""
    matched = " ".join(f"{letter}={letter}" for letter in ("ABCDEFGH"[k] for k in row["letters"]))
    return f"L{row['layer']}H{row['head']}: {row['reader']} -> {row['read']}", matched or "place"


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


def draw(run, rows, maps):
    """Each read: M of all pairs of tokens, and beside it that of the pair with the largest c."""
    flags, (figure, grid) = train.read_flags(run), analyze.panels(2 * len(rows), 8, 1.7, 2)
    roles, limit = [*train.task_of(flags).roles], max(abs(row["c"]) for row in rows)
    for row, M, left, right in zip(rows, maps.values(), grid[::2], grid[1::2], strict=True):
        K, (u, v), (read, matched) = M.shape[-1], map(roles.index, row["pair"]), names_of(row)
        left.imshow(M.transpose(1, 2).flatten(2).flatten(0, 1), "RdBu", vmin=-limit, vmax=limit)
        right.imshow(M[u, v], "RdBu", vmin=-limit, vmax=limit)
        for axis in left.xaxis, left.yaxis:
            axis.set_ticks([K * (i + 0.5) - 0.5 for i in range(len(roles))], roles, size=6.5)
            axis.set_ticks([K * i - 0.5 for i in range(len(roles))], minor=True)
        left.grid(which="minor", color=analyze.FAINT, lw=0.5)
        left.add_patch(Rectangle((K * v - 0.5, K * u - 0.5), K, K, fill=False, ec=analyze.RED))
        left.set_title(read, size=9, weight="bold")
        fill = analyze.symbol_color(row["letters"][0]) if row["letters"] else analyze.INK
        right.set_title(matched, size=9, weight="bold", color="white", backgroundcolor=fill)
        right.set(xticks=[], yticks=[], xlabel=f"{' with '.join(row['pair'])}: {row['c']:.2f}")
    caption = f"""One pair of tokens has a diagonal of one color, c I: the head compares a symbol \
with itself. By place: none has.
Left: the symbol of each token as the reader knows it (rows), and as the read does (columns); \
blue: up to {limit:.1f}. Right: the red frame, and c."""
    analyze.add_title(figure, flags, "what its reads match", caption)
    return figure


def main():
    p = command_line("python -m extras.studies.matches", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories")
    p.add_argument("--emergence", action="store_true", help="c at each checkpoint, instead")
    p.add_argument("--out", type=Path, default="out", help="the folder of the files")
    args, rows = p.parse_args(), []
    file = args.out / ("emergence.jsonl" if args.emergence else "matches.jsonl")
    kept = rows_by(file, "run", "layer", "head", "reader", "read")
    for run in args.run:
        found, maps = (emerge(run), None) if args.emergence else measure(run)
        if maps and not rows and not kept:
            analyze.save_figure(draw(run, found, maps), args.out / "matches.png")
        rows += found
        kept = {key: row for key, row in kept.items() if row["run"] != run.name}
        train.write_file(file, [*kept.values(), *rows])
    columns, lines = "c rest share score same other untrained chains common".split(), []
    columns = ["rises", "learned"] if args.emergence else columns
    for row in rows:
        cells = [f"{row[x]:.2f}" if isinstance(row[x], float) else row[x] for x in columns]
        lines.append([row["run"], *names_of(row), " * ".join(row["pair"]), *cells])
    print(markdown(["run", "read", "matches", "pair", *columns], *lines))


if __name__ == "__main__":
    main()
