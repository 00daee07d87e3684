"""What each read of a circuit matches: a symbol, or none, if it reads by place (analyze.py).

    python -m extras.studies.matches results/[ABCD] results/main --out results/figures
    python -m extras.studies.matches out/L12_H1_D3_s* --emergence    # of runs with checkpoints

matches.png shows the reads of the first run; matches.jsonl has a row for each read between roles:

    letters: the k of the x_k that it matches; none if it reads by place
    pair, c: the tokens (u, v) whose M has the largest |c|, M as analyze.py has it
    share: of |M|^2 of this pair, what c I has
    score: the mean score, in nats
    common: whether reader and read can hold a common symbol by then (Assumption 1 of the paper)

The committed rows have also what commit dfca674 measured: same, what c |x|^2 of all pairs that show
one symbol adds to the score; and the same with untrained weights, and of symbols of two chains.

emergence.jsonl, drawn in emergence.png, has a row for each read that matches a symbol:

    steps, c: c of its pair at each checkpoint
    rises: when c |x|^2 first passes 1 nat; learned: when the symbol was that the read shows
"""

from pathlib import Path

import ablate
import analyze
import train
from data import command_line
from extras.studies import grouped, markdown, share, span, spread
from extras.studies.rows import rounded

from matplotlib.patches import Rectangle


def measure(run, n=32):
    """({path: its row} of a run, {path: M})."""
    (model, task, _), paths = train.load(run), ablate.paths_in(ablate.read_report(run))
    rows, maps, roles = {}, {}, [*task.roles]
    before = analyze.held_before(paths, task)
    for path, (M, score, letters) in analyze.measure_matches(model, task, paths, n).items():
        all_c, holds = analyze.c_of(M), before[path.layer]
        u, v = divmod(all_c.abs().argmax().item(), len(roles))
        c = all_c[u, v].item()
        row = dict(run=run.name, **path._asdict(), letters=[*letters], pair=[roles[u], roles[v]])
        row |= dict(c=c, score=score, common=bool(holds[path.reader] & holds[path.read]))
        row["share"] = c**2 * task.inputs / M[u, v].square().sum().clamp(min=1e-30).item()
        rows[path], maps[path] = row, M
    return rows, maps


def emerge(run, n=32):
    """The rows of a run in emergence.jsonl."""
    task, log = train.task_of(train.read_flags(run)), train.read_log(run)
    rows = {path: row for path, row in measure(run, n)[0].items() if row["letters"]}
    files, learned = analyze.checkpoints_of(run), analyze.crossings(log, task)
    steps, roles = [int(file.stem) for file in files], [*task.roles]
    least = analyze.LEAST / task.draw("circuits", n).inputs.square().sum(-1).mean().item()
    for row in rows.values():
        row |= dict(steps=steps, c=[], learned=learned.get(f"x_{task.roles[row['read']]}"))
    for file in files:
        model, _, _ = train.load(run, f"ckpt/{file.name}")
        for path, (M, *_) in analyze.measure_matches(model, task, rows, n).items():
            u, v = map(roles.index, rows[path]["pair"])
            rows[path]["c"].append(analyze.c_of(M)[u, v].item())
    for row in rows.values():
        row["rises"] = analyze.first_below(steps, [-c for c in row["c"]], -least)
    return rows


def first_reads(rows):
    """[{read: row}, ...] for each run: of the reads of 1b, 2b, ..., those that match first."""
    found = {}
    matching = [row for row in rows if None not in (row["rises"], row["learned"])]
    for row in sorted(matching, key=lambda row: row["rises"]):
        found.setdefault(row["run"], {}).setdefault(row["read"], row)
    return [*found.values()]


def table(rows):
    """How many reads of each run match a symbol, and how much of M is then c I."""
    lines = []
    for (run,), own in grouped(rows, "run").items():
        by_symbol = [row for row in own if row["letters"]]
        both_hold = sum(row["common"] for row in by_symbol)
        by_place = [row["reader"][:-1] == row["read"][:-1] for row in own if not row["letters"]]
        counts = len(own), len(by_symbol), both_hold, sum(by_place), by_place.count(False)
        c, shares = ([row[name] for row in by_symbol] for name in ("c", "share"))
        lines.append([run, *counts, span(c, "{:.1f}"), span(shares)])
    head = "run", "reads between roles", "match a symbol", "which both can hold"
    return markdown([*head, "by place in its own pair", "elsewhere", "c", "share of c I"], *lines)


def emergence_table(rows):
    """When the first read of each pair begins to match, and when its symbol is learned."""
    lines, before = [], None
    for name, read in zip("BCD", ("1b", "2b", "3b"), strict=True):
        runs = [reads for reads in first_reads(rows) if read in reads]
        rises, learned = ([reads[read][key] for reads in runs] for key in ("rises", "learned"))
        leads = [after - step for step, after in zip(rises, learned, strict=True)]
        both = [reads for reads in runs if before in reads]
        earlier = [reads[read]["rises"] < reads[before]["learned"] for reads in both]
        cells = [f"{read}, which shows {name}", len(runs), *map(spread, (rises, learned, leads))]
        lines.append([*cells, share(earlier) if before else ""])
        before = read
    head = "read of", "runs", "begins to match", "symbol learned", "steps between"
    return markdown([*head, "begins before the symbol before is learned"], *lines)


def draw(run, rows, maps):
    """Each read: M of all pairs of tokens, and beside it that of the pair with the largest c."""
    flags, (figure, grid) = train.read_flags(run), analyze.panels(2 * len(rows), 8, 1.7, 2)
    task, limit = train.task_of(flags), max(abs(row["c"]) for row in rows.values())
    roles, colors = [*task.roles], dict(cmap="RdBu", vmin=-limit, vmax=limit)
    for (path, row), left, right in zip(rows.items(), grid[::2], grid[1::2], strict=True):
        M, K, (u, v) = maps[path], task.inputs, map(roles.index, row["pair"])
        left.imshow(M.transpose(1, 2).flatten(2).flatten(0, 1), **colors)
        right.imshow(M[u, v], **colors)
        for axis in left.xaxis, left.yaxis:
            axis.set_ticks([K * (i + 0.5) - 0.5 for i in range(len(roles))], roles, size=6.5)
            axis.set_ticks([K * i - 0.5 for i in range(len(roles))], minor=True)
        left.grid(which="minor", color=analyze.FAINT, lw=0.5)
        left.add_patch(Rectangle((K * v - 0.5, K * u - 0.5), K, K, fill=False, ec=analyze.RED))
        left.set_title(path, size=8, weight="bold")
        letters = [task.labels[k][0] for k in row["letters"]]
        matched = " ".join(f"{letter}={letter}" for letter in letters) or "place"
        fill = analyze.symbol_color(row["letters"][0]) if letters else analyze.INK
        right.set_title(matched, size=9, weight="bold", color="white", backgroundcolor=fill)
        right.set(xticks=[], yticks=[], xlabel=f"{' with '.join(row['pair'])}: {row['c']:.2f}")
    caption = f"""One pair of tokens has a diagonal of one color, c I: the head compares a symbol \
with itself. By place: none has.
Left: the symbol of each token as the reader knows it (rows), and as the read does (columns); \
blue: up to {limit:.1f}. Right: the red frame, and c."""
    analyze.add_title(figure, flags, "what its reads match", caption)
    return figure


def draw_emergence(rows):
    """c of the first read of each pair over training, a line a run."""
    (figure, [axes]), runs = analyze.panels(1, 1, 9, 3.6), first_reads(rows)
    for number, name in enumerate("BCD", 1):
        read, color = f"{number}b", analyze.symbol_color(number)
        axes.plot([], [], "^-", color=color, label=f"read of {read}, which shows {name}")
        for row in (reads[read] for reads in runs if read in reads):
            axes.plot(row["steps"], [max(c, 1e-3) for c in row["c"]], color=color, lw=1)
            axes.plot(row["learned"], 0.012, "^", color=color, alpha=0.6)
    axes.set(yscale="log", xlim=(0, None), ylim=(0.01, 20), xlabel="training step", ylabel="c")
    figure.legend(loc="outside right upper", frameon=False)
    caption = f"A line is a run (n = {len(runs)}). Triangles: the symbol is learned."
    figure.supxlabel(caption, x=0.01, ha="left", size=9, color="dimgray")
    return figure


def main():
    p = command_line("python -m extras.studies.matches", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories")
    p.add_argument("--emergence", action="store_true", help="over the checkpoints, instead")
    p.add_argument("--out", type=Path, default="out", help="the folder of the files")
    args = p.parse_args()
    if len({run.name for run in args.run}) < len(args.run):
        p.error("two runs have the same name")
    if args.emergence and (bare := [run for run in args.run if not analyze.checkpoints_of(run)]):
        p.error(f"{bare[0]} has no checkpoints: train with --save-every")
    if bare := [run for run in args.run if not ablate.paths_in(ablate.read_report(run))]:
        p.error(f"{bare[0]} has no circuit: python ablate.py finds it")
    name = "emergence" if args.emergence else "matches"
    file, names = args.out / f"{name}.jsonl", {run.name for run in args.run}
    rows = [row for row in train.read_file(file, []) if row["run"] not in names]
    for run in args.run:
        found, maps = (emerge(run), None) if args.emergence else measure(run)
        if maps and run == args.run[0]:
            analyze.save_figure(draw(run, found, maps), args.out / "matches.png")
        rows += rounded([*found.values()])
    train.write_file(file, rows)
    if args.emergence:
        analyze.save_figure(draw_emergence(rows), args.out / "emergence.png")
    print(emergence_table(rows) if args.emergence else table(rows))


if __name__ == "__main__":
    main()
