"""In which order runs learn their symbols, and what x_1 needs when it is learned (Sections 7.2, 9).

    python -m extras.studies.order results/runs/default.jsonl          # prints the tables
    python -m extras.studies.order out/L12_H1_D3_s* --out results/figures    # measures

A symbol is learned when its loss passes below two thirds of its lowest plateau (0.5 for N=4). Runs
with checkpoints are measured into induction.jsonl, a row for the first checkpoint of each that
knows x_1: run, step, loss of x_1, and kinds, {"q -> 1b": [by how much the loss of x_1 rises if all
heads lose what they read so, the attention of the head that reads so most], ...}, of all pairs of
roles.
"""

import itertools
import math

import analyze
import train
from ablate import PatchedModel, Path, attention_on
from data import held_out, progress
from extras import studies
from extras.studies.rows import RESULTS, committed, group_by_settings, name_of, settings_of
from extras.studies.theory import may_attend
from train import Flags

import torch


HEADS = "q -> 1b", "1b -> 1a"  # what an induction head and its previous-token head read
EMERGED = {  # the chain runs that have emergence
    "the main command": ["default/*"],
    "other runs with the encoding appended": ["adamw/*", "last/*", "decay/*", "cleaning/muon_e*"],
    "RoPE": ["rope/s?"],
    "transformer D": ["D"],
}
LEVELS = 0.3, 0.5, 0.7  # of attention, from which on a path counts as emerged
SEQUENCES = 64  # held out, for induction.jsonl


# ---- the order of symbols


def all_chains():
    """Return [(flags, {symbol: step or None}, last loss), ...] of all chain runs, those of sweeps
    too."""
    runs = [(row["flags"], row["learned"], row["log"][-1]["val"]) for row in committed("*")]
    for row in studies.load_rows(studies.committed("*")):
        flags = Flags(**row)
        learned = {name: row[f"{name}_learned"] for name in flags.target_names}
        runs.append((flags, learned, row["val"]))
    return [run for run in runs if run[0].task == "chain"]


def in_order(steps):
    """Return whether symbols were learned in order, the last ones perhaps never."""
    reached = [step for step in steps if step is not None]
    return reached == sorted(reached) and reached == steps[: len(reached)]


def count_orders():
    """Return {kind: [in order, ...]} of the runs that learned several symbols, one answer per
    settings and seed: resolved runs have an evaluation between any two symbols, unresolved ones do
    not; in the others it was not training alone that could choose."""
    kinds = {}
    for flags, learned, _ in all_chains():
        steps = [*learned.values()]
        between = [math.ceil(step / flags.eval_every) for step in steps if step is not None]
        kind = "resolved" if len({*between}) == len(between) else "unresolved"
        kind = "with a subset of targets" if flags.targets or not flags.ic else kind
        kind = "from trained weights" if flags.init else kind
        kind = "with frozen attention" if getattr(flags, "circuit", "") else kind
        if len(between) > 1:
            runs = kinds.setdefault(kind, {})
            key = settings_of(flags), flags.seed
            runs[key] = runs.get(key, True) and in_order(steps)
    return {kind: [*runs.values()] for kind, runs in kinds.items()}


def order_claim():
    """Return the sentence on all runs."""
    kinds = count_orders()
    could, same = kinds.pop("resolved"), kinds.pop("unresolved")
    others = ", ".join(f"{sum(runs)} of {len(runs)} {kind}" for kind, runs in sorted(kinds.items()))
    return f"""\
**Symbols are learned in order in {sum(could)} of {len(could)} runs** that learned two or more and
were evaluated between any two of them. In {len(same)} more, two symbols fall between the same two
evaluations. Not counted, because training alone did not choose, are the runs that had them in order
in {others}."""


def ended(row):
    """Return whether a run ended by itself, and was not stopped by hand before."""
    return row["steps"] == row["flags"].steps or row["log"][-1]["val"] < row["flags"].stop_below


def order_table(rows=None):
    """Return a row per setting: how many runs learned all, how many of these in order, the steps
    from each symbol to the next, and where they end; and how many runs are left out."""
    names = "default/*", "qk_std0.02/*", "last/*", "again/s*", "float32/*", "decay/*", "adamw/*"
    lines, rows = [], rows or committed(*names, "[ABC]", "rope/s?")
    finished = [*filter(ended, rows)]
    for name, group in group_by_settings(finished).items():
        steps = [[*row["learned"].values()] for row in group]
        learned = [row for row in steps if None not in row]
        gaps = [[b - a for a, b in itertools.pairwise(row)] for row in learned]
        gaps = ", ".join(map(studies.spread, zip(*gaps, strict=True)))
        first = studies.spread([row[0] for row in learned]) if learned else ""
        ends = studies.spread([row["steps"] for row in group])
        ordered = f"{sum(map(in_order, learned))} of {len(learned)}"
        lines.append([name, f"{len(learned)} of {len(group)}", first, gaps, ends, ordered])
    head = "settings", "learn all", "x_1 at step", "steps to the next", "end at", "in order"
    stopped = f"Runs that were stopped by hand, and are left out: {len(rows) - len(finished)}."
    return f"{studies.markdown(head, *lines)}\n\n{stopped}"


# ---- the order of paths


def path_steps(row, level):
    """Return [(step, (layer, head), "q -> 1b"), ...], when the mean attention of each path that
    matters at the end first passes a level, of those that do, the first one first."""
    emergence, found = row["emergence"], []
    for path in emergence["paths"]:
        negative = [-mean for mean in path["mean"]]
        step = analyze.first_below(emergence["steps"], negative, -level)
        if step is not None:
            head = path["layer"], path["head"]
            found.append((step, head, "{reader} -> {read}".format(**path)))
    return sorted(found)


def first_steps(row, level):
    """Return {"q -> 1b": step, ...}, when the first path of each kind passes a level, in order."""
    steps = {}
    for step, _, kind in path_steps(row, level):
        steps.setdefault(kind, step)
    return steps


def is_first(steps):
    return next(iter(steps), None) in HEADS


def reads_in_order(steps):
    slots = [kind for kind in steps if kind[:5] == "q -> " and kind[6:] == "b"]
    return slots == sorted(slots)


# ---- what x_1 needs when it is learned, whichever paths the circuit has at the end


def kinds_of_read(flags):
    """Return ["q -> 1b", ...], all pairs of roles of which one sees the other."""
    names, readable = flags.problem.names, may_attend(flags.problem, flags.causal)
    pairs = readable.fill_diagonal_(False).nonzero().tolist()
    return [f"{names[reader]} -> {names[read]}" for reader, read in pairs]


def kinds_of(patched):
    """Return what a row of induction.jsonl says of each kind of read in one model."""
    kinds, task, batch = {}, patched.task, patched.batch
    with torch.no_grad(), train.precision(patched.flags):
        _, patterns = patched.model(batch.inputs, return_patterns=True)
    for name in kinds_of_read(patched.flags):
        paths = [Path(*head, *name.split(" -> ")) for head in patched.reference.reads]
        rise = (patched.knock_out(paths) - patched.baseline)[:, 0].mean().item()
        means = []
        for path in paths:
            pattern = patterns[path.layer][:, path.head].float()
            means.append(attention_on(pattern, path, task, batch.positions).mean())
        kinds[name] = [round(rise, 4), round(max(means).item(), 4)]
    return kinds


def measure_run(row, n=SEQUENCES):
    """Return the row of induction.jsonl of a run with checkpoints, that of the first one that knows
    x_1; n: the held-out sequences."""
    for file in progress(f"{name_of(row)}: checkpoint", train.checkpoints_of(row["folder"])):
        model, flags = train.load(row["folder"], f"ckpt/{file.name}")
        patched = PatchedModel(model, flags, train.sequences(flags, held_out("emergence", n)))
        loss = patched.baseline[:, 0].mean().item()
        if loss < flags.problem.learned_below:
            measured = dict(run=row["name"], step=int(file.stem), loss=round(loss, 4))
            return measured | dict(kinds=kinds_of(patched))


def load_induction():
    """Return the rows of the committed induction.jsonl."""
    return train.read_file(RESULTS / "figures/induction.jsonl")


def induction_table():
    """Return a row per kind of read, the four that matter most and the others together: by how
    much the loss of x_1 rises without it, and in how many runs x_1 is lost again."""
    rows, lines = load_induction(), []
    rises = {kind: [row["kinds"][kind][0] for row in rows] for kind in rows[0]["kinds"]}
    kinds = sorted(rises, key=lambda kind: -max(rises[kind]))
    for title, group in [*((kind, [kind]) for kind in kinds[:3]), ("any other", kinds[3:])]:
        of_run = [max(rises[kind][n] for kind in group) for n in range(len(rows))]
        lost = sum(row["loss"] + rise >= 0.5 for row, rise in zip(rows, of_run, strict=True))
        cells = f"{min(of_run):.3f} to {max(of_run):.3f}", f"{lost} of {len(rows)}"
        lines.append([title if len(group) == 1 else f"{title} of {len(group)}", *cells])
    return studies.markdown(["without, in all heads", "x_1 rises by", "x_1 above 0.5"], *lines)


def induction_claim():
    """Return the sentence on the loss and the attention of the full model there."""
    rows = load_induction()
    losses = [row["loss"] for row in rows]
    sharp = sum(min(row["kinds"][kind][1] for kind in HEADS) > 0.5 for row in rows)
    return f"""\
The full model has a loss of {min(losses):.2f} to {max(losses):.2f} on x_1 there, so that a small
rise can lift it above 0.5: the rises decide, not the counts. In {sharp} of {len(rows)} runs some
head of each kind attends by more than 0.5 by then."""


# ---- transformer D


def d_table():
    """Return a row for each run of transformer D, its losses all on the same sequences."""
    lines = []
    for row in committed("D", "rope/D_s0", "literal/D_s0"):
        last = row["log"][-1]
        losses = ", ".join(f"{last[name]:.2g}" for name in row["learned"])
        learned = studies.steps_text(row["learned"].values())
        lines.append([name_of(row), learned, row["steps"], losses, f"{last['val']:.2g}"])
    head = "run", "x_1, x_2, x_3, x_4 learned at", "ends at", "losses there", "mean"
    return studies.markdown(head, *lines)


def last_paths(row):
    """Return {level: ("q -> 1b", gap, longest)}: the last path to pass a level of attention, how
    many steps after the one before it, and the longest such gap between any two before."""
    found = {}
    for level in (0.2, *LEVELS):
        paths = path_steps(row, level)
        *before, last = [b[0] - a[0] for a, b in itertools.pairwise(paths)]
        found[level] = paths[-1][2], last, max(before)
    return found


def d_claim():
    """Return how late the last path of D emerges, by the threshold, beside the last symbol."""
    rows = committed("D")
    lasts = [
        f"{level}: {kind}, {gap:.0f} ({longest:.0f})"
        for level, (kind, gap, longest) in last_paths(rows[0]).items()
    ]
    lasts = ";\n".join(lasts)
    return f"""\
It depends on the threshold (n = {len(rows)}). By threshold, the last path to emerge, the steps from
the one before it, and the longest such gap among the others: {lasts}.
x_4 is learned at step {rows[0]["learned"]["x_4"]:.0f}."""


def write_induction(rows, out):
    """Measure the runs that have checkpoints into induction.jsonl."""
    runs = [row for row in rows if row["folder"] and train.checkpoints_of(row["folder"])]
    if measured := [*filter(None, map(measure_run, runs))]:
        train.write_file(out / "induction.jsonl", measured)
    return out / "induction.jsonl"


if __name__ == "__main__":
    studies.command(__file__, __doc__, order_table, write_induction)
