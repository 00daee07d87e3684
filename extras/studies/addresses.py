"""Why some models need fewer layers than finding by content takes (Section 5): does the head that
finds the next pair pass on its place, or a symbol?

    python -m extras.studies.addresses out/addresses/* --out results/figures

A unit is a head and the role of its readers. addresses.jsonl has a row for each run, measured on
512 fresh sequences:

    units: how many; own: those that need their own attention pattern; all others may have the mean
        of theirs over the sequences, by which no loss rises by SOLVED
    swaps: {role: of its finder}, of q and kb: the units of this role in own, of the first layer
        that has any. pattern, written: it attends, or writes, as in the next sequence: {each known
        x_j after x_k: error from that of the chain whose next pair stands where the next sequence
        has it}, of the n queries for which this is another place
"""

import statistics
from functools import cache, partial
from pathlib import Path

import train
from data import command_line, progress
from extras.studies import RESULTS, rows_by
from extras.studies.rows import SOLVED, load, name_of, rounded

import torch


FILE = "addresses.jsonl"
SWAPS = "pattern", "written"


def write_otherwise(pattern, values, how, masks):
    """The f of a head of which units write otherwise at their readers, where the masks (n, T, 1)
    are True: as their pattern, or what is written, of the next sequence says; or their mean
    pattern, over the sequences with such a reader at that place."""
    usual = result = pattern @ values
    for mask in masks:
        if how == "pattern":
            other = pattern.roll(-1, 0) @ values
        elif how == "written":
            other = usual.roll(-1, 0)
        else:
            other = ((pattern * mask).sum(0) / mask.sum(0).clamp(min=1)) @ values
        result = torch.where(mask, other, result)
    return result


def answers_there(task, batch, role):
    """Return the answers (n, N, targets * K) to expect from x_{k+1} on if kb, or q (k = 0), looks
    for its next pair where the next sequence has it: those of the chain whose pair is there; and
    the queries (n, N) for which this is another chain."""
    reader, pair = [*task.roles].index(role), [*task.roles].index(f"{task.roles[role] + 1}b")
    here, there = batch.places, batch.places.roll(-1, 0)  # (n, N, roles)

    # the chain there whose reader stands at this place; where it has its pair; whose pair is here
    same = here[:, :, None, reader] == there[:, None, :, reader]  # (n, N, N)
    place = (same * there[:, None, :, pair]).sum(-1)  # (n, N)
    chain = here[:, None, :, pair] == place[:, :, None]  # (n, N, N)
    moved = same.any(-1) & chain.any(-1) & (place != here[:, :, pair])
    other = batch.answers[torch.arange(len(here))[:, None], chain.int().argmax(-1)]
    return other, moved


@torch.no_grad()
def measure(model, task, n=512):
    """Return what the row of a model of chains of pairs says of it."""
    batch, readers = task.draw("circuits", n), {}
    for role, places in zip(task.roles, batch.places.unbind(2), strict=True):
        readers[role] = torch.zeros(n, task.T).scatter(1, places, 1)[:, :, None] > 0
    last = max(layer for layer, _ in model.heads)
    units = [(*head, role) for head in model.heads for role in task.roles]
    units = sorted(unit for unit in units if unit[0] < last or unit[2] == "q")

    def losses(some=(), how=None, answers=batch.answers):
        """Return the losses (n, N, targets) if some units write otherwise."""
        masks = {}
        for layer, head, role in some:
            masks.setdefault((layer, head), []).append(readers[role])
        heads = {head: partial(write_otherwise, how=how, masks=masks[head]) for head in masks}
        return task.losses(model(batch.inputs, heads=heads), batch._replace(answers=answers))

    # which units need their own pattern: first come those whose mean pattern costs most
    full = losses().mean((0, 1))  # (targets,)

    def rise(some):
        return (losses(some, "mean").mean((0, 1)) - full).max().item()

    own = units.copy()
    for unit in sorted(units, key=lambda unit: rise([unit]), reverse=True)[::-1]:
        if rise({*units} - {*own} | {unit}) < SOLVED:
            own.remove(unit)

    # the swaps
    swaps = {}
    for role in ["q", *(f"{k}b" for k in range(1, task.D))]:
        of_role = [unit for unit in own if unit[2] == role]  # sorted by layers
        finder = [unit for unit in of_role if unit[0] == of_role[0][0]]
        known = (full < task.learned_below).nonzero().flatten().tolist()
        after = [i for i in known if task.targets[i] > task.roles[role]]
        if finder and after:
            answers, moved = answers_there(task, batch, role)
            swap = dict(heads=["L{}H{}".format(*unit) for unit in finder], n=moved.sum().item())
            for how in SWAPS:
                errors = losses(finder, how, answers)[moved].mean(0)
                swap[how] = {task.target_names[i]: errors[i].item() for i in after}
            swaps[role] = swap
    return dict(units=len(units), own=["L{}H{} {}".format(*unit) for unit in own], swaps=swaps)


def passes_on(swap, task):
    """Return what a finder passes on: a place if the answer follows what it writes in another
    sequence, a symbol if it follows its pattern alone."""
    if statistics.fmean(swap["written"].values()) < task.learned_below:
        return "a place"
    follows = statistics.fmean(swap["pattern"].values()) < task.learned_below
    return "a symbol" if follows else "neither"


@cache
def measured():
    """Return {run: its committed row}."""
    return rows_by(RESULTS / "figures" / FILE, "run")


def main():
    p = command_line("python -m extras.studies.addresses", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="run directories")
    p.add_argument("--out", type=Path, default="out", help="the folder of the file")
    args = p.parse_args()
    rows = rows_by(args.out / FILE, "run")
    for run in progress("runs measured", load(args.run)):
        model, task, _ = train.load(run["folder"])
        rows[name_of(run)] = dict(run=name_of(run)) | rounded(measure(model, task))
        train.write_file(args.out / FILE, [rows[name] for name in sorted(rows)])


if __name__ == "__main__":
    main()
