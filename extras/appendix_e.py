"""The paper's own test (Appendix E): the simplest mechanism under one-hot attention, found by
machine instead of by eye.

    python -m extras.appendix_e results/A results/B    # a minute each; draws Figure 5
    python -m extras.appendix_e results/A --others nothing

Every head attends as it is told: tokens that read along a path to what they read, one-hot, and all
others uniformly, to themselves, or to nothing, which --others may restrict. The paper's maps are
zero but for the positions that the author expects. One-hot attention hands over where to look, so
reads by which a head found the place can go: what is left need not answer in ablate.py.
"""

import itertools
import pathlib

import ablate
import analyze
import train
from ablate import BOTH, PatchedModel, Path, attention_by_chain, mark_edges, symbol_means
from data import command_line
from extras.studies import markdown, rows_by, span

import torch
from matplotlib.figure import Figure


ENOUGH = 0.2  # the least attention of a read that a head may be for
MARGIN = 0.9  # of the loss allowed, in the search, so that it holds on fresh sequences too
OTHERS = "uniform", "identity", "nothing"  # how tokens without a read attend


class OneHotModel(PatchedModel):
    """A model on sequences, whose heads attend as a mechanism says: (paths, others), where others
    has for each head how its tokens without a read attend."""

    def __init__(self, model, task, clean):
        super().__init__(model, task, clean)
        self.trained = torch.stack([pattern for pattern, _ in self.corrupted_reads.values()])
        causal = not self.trained.triu(1).any()
        uniform = torch.ones(task.T, task.T).tril(0 if causal else task.T)
        fixed = uniform / uniform.sum(-1, keepdim=True), torch.eye(task.T), 0 * uniform
        self.fixed = dict(zip(OTHERS, fixed, strict=True))  # (T, T) each

    def loss(self, paths, others):
        """The mean loss, a number."""
        heads = {}
        for head, other in others.items():
            own = [path for path in paths if path[:2] == head]
            edges = mark_edges(own, self.task, self.clean.places).float()
            total = edges.sum(-1, keepdim=True)  # 1 where a token reads, unless chains share it
            pattern = torch.where(total > 0, edges / total.clamp(min=1), self.fixed[other])
            heads[head] = lambda _, values, pattern=pattern: pattern @ values
        return round(self.losses(heads).mean().item(), 5)


def possible_reads(hard):
    """{Path: mean attention} of what heads may be for (steps 1 and 2): of each head and reader the
    read of its own chain that gets most, if that is enough above the mean of the other chains."""
    task, places, best = hard.task, hard.corrupted.places, {}
    for reader, read in itertools.permutations(task.roles, 2):
        own, _ = attention_by_chain(hard.trained, reader, read, task, places)
        for head, attention in zip(hard.corrupted_reads, own.tolist(), strict=True):
            found = attention, Path(*head, reader, read)
            best[head, reader] = max(found, best.get((head, reader), found))
    return {path: attention for attention, path in best.values() if attention >= ENOUGH}


def choose(hard, paths, others, head, allowed_others):
    """(loss, others) with the best choice for this head; one without paths is uniform or the
    identity, as in the paper."""
    has_paths = any(path[:2] == head for path in paths)
    ways = [others | {head: other} for other in (allowed_others if has_paths else OTHERS[:2])]
    losses = [hard.loss(paths, way) for way in ways]
    return min(losses), ways[losses.index(min(losses))]


def simplest(hard, possible, allowed_others=OTHERS):
    """The simplest mechanism that keeps the loss low (steps 3 and 4). Until nothing changes, it

    1. chooses for one head after another how the other tokens attend, by the loss
    2. drops one path after another, from the highest layer down and that with the least attention
       first, with that choice made anew for its head, if the loss stays below the one allowed, or
       does not rise"""
    allowed, paths, before = MARGIN * hard.task.faithful_below, {*possible}, None
    others = dict.fromkeys(hard.model.heads, "uniform") | {p[:2]: "nothing" for p in paths}

    while (paths, others) != before:
        before = paths, others
        for head in others:
            loss, others = choose(hard, paths, others, head, allowed_others)
        for path in sorted(paths, key=lambda p: (-p.layer, -p.head, possible[p])):
            left = paths - {path}
            lower, changed = choose(hard, left, others, path[:2], allowed_others)
            if lower < allowed or lower <= loss:
                loss, paths, others = lower, left, changed
    return paths, others


@torch.no_grad()
def papers_test(model, task, allowed_others=OTHERS, count=256):
    """The row of a model. 32 sequences are searched; losses are those of `count` others, means over
    symbols unless said otherwise.

    possible, paths: [[layer, head, reader, read], ...] before and after the search
    others: {head: how its tokens without a read attend}
    held: with all ablations together (step 5); holds: whether it is below task.faithful_below
    first_uniform: held, but the first layer that has paths is uniform
    removed: [loss, ...] without each path (step 6), with the best choice of its head's others
    mean, resample: {symbol: loss} in the tests of ablate.py, where these paths are kept"""
    hard = OneHotModel(model, task, task.draw("search", 32))
    possible = possible_reads(hard)
    paths, others = simplest(hard, possible, allowed_others)
    row = dict(possible=sorted(possible), paths=sorted(paths))
    row["others"] = {"L{}H{}".format(*head): other for head, other in others.items()}

    fresh = OneHotModel(model, task, task.draw("circuits", count))
    first = min((path.layer for path in paths), default=None)
    later = {path for path in paths if path.layer > first}
    uniform = others | {path[:2]: "uniform" for path in paths - later}
    row.update(held=fresh.loss(paths, others), first_uniform=fresh.loss(later, uniform))
    row["holds"] = row["held"] < task.faithful_below
    row["removed"] = []
    for path in row["paths"]:
        loss, _ = choose(fresh, paths - {path}, others, path[:2], allowed_others)
        row["removed"].append(loss)
    return row | {by: symbol_means(fresh.keep_only(paths, by), task) for by in BOTH}


# ---- the command

COLUMNS = {  # and what the paper says of A to D
    "run": "the paper's A to D",
    "reads left, of possible ones": "",
    "heads along paths": "4; D 5",
    "loss with all ablations together": "below 0.05",
    "first useful layer uniform too": "0.05-0.1",
    "without one later path": "0.17-0.89, observed",
    "the worst symbol in ablate.py, resampled, mean": "",
}


def head_count(row):
    """How many heads have paths."""
    return len({(layer, head) for layer, head, *_ in row["paths"]})


def later_losses(row):
    """The losses without each path above the first useful layer."""
    layers = [layer for layer, *_ in row["paths"]]
    pairs = zip(layers, row["removed"], strict=True)
    return [loss for layer, loss in pairs if layer > min(layers)]


def table(rows):
    """Rows in the paper's words, a line each."""
    lines = [COLUMNS.values()]
    for row in rows:
        reads = f"{len(row['paths'])} of {len(row['possible'])}", head_count(row)
        held = f"{row['held']:.3f}" + ", not held" * (not row["holds"])
        losses = held, f"{row['first_uniform']:.3f}", span(later_losses(row), "{:.3f}")
        answers = ", ".join(f"{max(row[by].values()):.2f}" for by in BOTH)
        lines.append([row["run"], *reads, *losses, answers])
    return markdown(COLUMNS, *lines)


def figure_5(runs, rows):
    """The mechanism of each run, side by side, with layers counted from 1, as in the paper."""
    figure = Figure(layout="constrained")
    [grid] = figure.subplots(1, len(runs), squeeze=False)
    for axes, run, row in zip(grid, runs, rows, strict=True):
        looks, paths = {}, [Path(*path) for path in row["paths"]]
        for path, loss in zip(paths, row["removed"], strict=True):
            looks[path] = [(f"{loss:.2f}", "white")], analyze.INK, 3
        analyze.draw_diagram(axes, train.read_flags(run), looks, first=1)
        title = f"{row['run']}: {head_count(row)} heads, loss {row['held']:.3f}"
        axes.set_title(title, weight="bold")
    figure.set_size_inches(6 * len(runs), 5.5)
    caption = """Numbers: the mean loss without the read. All other heads are uniform, or each token
attends to itself. Letters: what can have arrived at a token. Layers count from 1."""
    figure.supxlabel(caption, x=0.01, ha="left", color="dimgray")
    return figure


def main():
    p = command_line("python -m extras.appendix_e", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories of train.py")
    text = "how tokens without a read may attend, in heads that have reads"
    p.add_argument("--others", nargs="+", choices=OTHERS, default=OTHERS, help=text)
    p.add_argument("--out", type=pathlib.Path, default="out", help="the folder of the files")
    args = p.parse_args()
    if len({run.name for run in args.run}) < len(args.run):
        p.error("two runs have the same name")
    file = args.out / "appendix_e.jsonl"
    rows = rows_by(file, "run")
    suffix = f", others {' or '.join(args.others)}" if {*args.others} != {*OTHERS} else ""
    names = {run: run.name + suffix for run in args.run}
    for run, name in names.items():
        model, task, flags = train.load(run)
        print(f"{run}: trained in {flags.dtype}, measured in float32", flush=True)
        paths = ablate.paths_in(ablate.read_report(run))
        if lacking := [str(path) for path in paths if not {*path[2:]} <= task.roles.keys()]:
            print("not searched, but in its circuit:", ", ".join(lacking))
        rows[name] = dict(run=name, **papers_test(model, task, args.others))
        if not rows[name]["possible"]:
            p.error(f"{run}: no head attends from one role to another, above {ENOUGH}")
        train.write_file(file, [*rows.values()])
    drawn = [run for run in names if rows[names[run]]["paths"]]
    if drawn:
        figure = figure_5(drawn, [rows[names[run]] for run in drawn])
        analyze.save_figure(figure, args.out / "figure5.png")
    print(table(rows.values()))


if __name__ == "__main__":
    main()
