"""Whether models without a mask use what tokens read of later ones, and what they lose without it
(Section 5).

    python -m extras.studies.later out/L2_H4_D2_no-causal_s* --out results/figures

later.jsonl has a row for each run that knows a symbol at its end, all losses on fresh sequences:

    full, without: {symbol: loss} of those that it knows; without: in all heads a token gets the
        mean of what tokens at its place read of later ones
    by_place: of the last of these symbols, the losses without by the place of 1b, the first first
"""

from functools import partial

import train
from ablate import PatchedModel, symbol_means
from extras.studies import command, rows_by
from extras.studies.rows import name_of, rounded

import torch


SEQUENCES = 512  # fresh ones


def draw(rows, out):
    """Measure the runs that have weights and know a symbol, into later.jsonl, in which all others
    stay."""
    file = out / "later.jsonl"
    kept = rows_by(file, "run")
    for row in (row for row in rows if row["folder"] and row["known"]):
        model, task, _ = train.load(row["folder"])
        kept[name_of(row)] = dict(run=name_of(row)) | rounded(measure(model, task, row["known"]))
    train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


@torch.no_grad()
def measure(model, task, known):
    """Return what a row has of a model that knows these symbols."""
    batch = task.draw("circuits", SEQUENCES)
    patched = PatchedModel(model, task, batch)
    losses = patched.losses(without_later(patched))  # (B, N, targets)
    last = losses[..., task.target_names.index(known[-1])]
    places = batch.places[..., [*task.roles].index("1b")]  # (B, N)
    by_place = [last[places == place].mean().item() for place in places.unique()]
    full, without = symbol_means(patched.baseline, task), symbol_means(losses, task)
    full, without = ({name: means[name] for name in known} for means in (full, without))
    return dict(full=full, without=without, by_place=by_place)


def without_later(patched):
    """Return the f of each head in which what tokens read of later ones is replaced."""
    later = torch.ones(patched.task.T, patched.task.T).triu(1)
    heads = {}
    for head, (pattern, values) in patched.corrupted_reads.items():
        heads[head] = partial(write_earlier, later=later, mean=((pattern * later) @ values).mean(0))
    return heads


def write_earlier(pattern, values, later, mean):
    return (pattern * (1 - later)) @ values + mean.to(values)


if __name__ == "__main__":
    command(__file__, __doc__, draw)
