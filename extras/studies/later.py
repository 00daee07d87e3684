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
from ablate import PatchedModel, paths_in, symbol_means
from extras.studies import RESULTS, command, markdown, rows_by, share
from extras.studies.rows import committed, name_of, rounded

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


# ---- what stands on the page


def load_later():
    """Return [(row of the run, row of later.jsonl), ...]."""
    rows = train.read_file(RESULTS / "figures/later.jsonl")
    return [(*committed(row["run"]), row) for row in rows]


def table():
    """Return a row per run, with the last symbol that it knows."""
    lines = []
    for run, row in load_later():
        flags, last = run["flags"], run["known"][-1]
        shape = f"{flags.layers} x {flags.heads}"
        by_place = ", ".join(f"{loss:.2f}" for loss in row["by_place"])
        lines.append([flags.D, shape, flags.seed, last, f"{row['full'][last]:.2f}", by_place])
    return markdown(["D", "layers x heads", "seed", "last", "its loss", "without"], *lines)


def page():
    """Return how many of these runs lose their last symbol at some places of 1b and keep it at
    others; and in how many circuits 2a and 1b read each other."""
    answers, circuits = [], []
    for run, row in load_later():
        level = run["task"].learned_below
        answers.append(min(row["by_place"]) < level <= max(row["by_place"]))
        circuits += [run] if run["report"].get("validated") else []
    both = [{"2a -> 1b", "1b -> 2a"} <= tokens_read(run) for run in circuits]
    seeds = " and ".join(str(run["flags"].seed) for run in circuits)
    return [
        f"and keep it at others ({share(answers)})",
        f"(two layers of four heads, seeds {seeds}) 1b reads 2a, and 2a reads 1b, which comes "
        f"later ({share(both)})",
    ]


def tokens_read(run):
    """Return {"q -> 1b", ...}, what the circuit of a run reads, in the own chain or in all."""
    return {f"{path.reader} -> {path.token}" for path in paths_in(run["report"])}


if __name__ == "__main__":
    command(__file__, __doc__, draw)
