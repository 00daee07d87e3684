"""Does gradient-based attribution rank the reads of our circuits first? EAP-IG (Hanna et al., 2024)
estimates how far the loss rises if an edge, here what a head reads along a path, is that of a
corrupted sequence: the change times the gradient, averaged between clean and corrupted inputs.

    python -m extras.studies.edges results/A results/D results/default_s0 --out results/figures

It prints a table. edges.jsonl has a row for each run with weights and a circuit:

    of: how many are ranked, of reads (the candidates of ablate.py but for stars) and of outputs
        (what a head writes at a role)
    paths: {path of the circuit: (rank of its read, of its reader's output)}; None if not ranked
    best: the smallest n for which the first n reads are faithful under both ablations, or None
"""

from functools import partial

import ablate
import train
from ablate import MEAN, RESAMPLE, PatchedModel, mark_edges
from extras.moved import mark_tokens
from extras.studies import command, markdown, rows_by, spans
from extras.studies.rows import name_of

import torch


def gradients(patched, steps=5):
    """{(layer, head): (B, T, head_size)}, the gradient of the mean loss by what each head writes,
    averaged over inputs from the clean ones almost to those of resample ablation."""
    clean, corrupted = patched.clean.inputs, patched.corrupted.inputs
    means = dict.fromkeys(patched.model.heads, 0)
    for step in range(steps):
        zeros = {}  # added to what heads write, to take the gradient by them

        def write(head, pattern, values, zeros=zeros):
            zeros[head] = torch.zeros_like(values, requires_grad=True)
            return pattern @ values + zeros[head]

        inputs = torch.lerp(clean, corrupted, step / steps)
        predictions = patched.model(inputs, heads={head: partial(write, head) for head in means})
        loss = patched.task.losses(predictions, patched.clean).mean()
        for head, slope in zip(zeros, torch.autograd.grad(loss, [*zeros.values()]), strict=True):
            means[head] = means[head] + slope / steps
    return means


def effects(patched, paths):
    """({path: effect}, {(layer, head, role): effect}), how far the mean loss would rise, were the
    reads along a path, or all that a head writes at a role, those of resample ablation."""
    with torch.enable_grad():
        slopes = gradients(patched)
    clean, corrupted, task = patched.clean, patched.corrupted, patched.task
    before, after = ablate.record_reads(patched.model, clean.inputs), patched.corrupted_reads

    def read_along(path, batch, recorded):
        pattern, values = recorded[path[:2]]
        edges = mark_edges([path], task, batch.places) & ~torch.eye(task.T, dtype=torch.bool)
        return (pattern * edges) @ values  # (B, T, head_size)

    reads, outputs = {}, {}
    for path in paths:
        was, new = read_along(path, clean, before), read_along(path, corrupted, after)
        reads[path] = ((new - was) * slopes[path[:2]]).sum().item()
    for head, slope in slopes.items():
        was, new = (pattern @ values for pattern, values in (before[head], after[head]))
        rises = ((new - was) * slope).sum(-1)  # (B, T)
        for role in task.roles:
            marks = mark_tokens(role, task, clean.places).amax(1)  # (B, T)
            outputs[(*head, role)] = (rises * marks).sum().item()
    return reads, outputs


def ranks_of(effects):
    """{key: its rank}, 1 for the largest effect, be it a rise or a fall."""
    return {key: n for n, key in enumerate(sorted(effects, key=lambda k: -abs(effects[k])), 1)}


@torch.no_grad()
def measure(row):
    """The row of edges.jsonl of a run directory, on the sequences of ablate.py."""
    model, task, _ = train.load(row["folder"])
    model.dtype = torch.float32
    searched = PatchedModel(model, task, task.draw("search", 256))
    fresh = PatchedModel(model, task, task.draw("circuits", 512))
    paths = [path for path in ablate.candidates(searched) if "*" not in path.read]
    reads, outputs = map(ranks_of, effects(searched, paths))

    def is_faithful(n):
        losses = [fresh.keep_only([*reads][:n], by) for by in (RESAMPLE, MEAN)]
        return torch.stack(losses).mean((1, 2)).max() < task.faithful_below

    best = next(filter(is_faithful, range(1, len(reads) + 1)), None)
    ours = ablate.paths_in(row["report"])
    ours = {str(path): (reads.get(path), outputs.get(path[:3])) for path in ours}
    return dict(run=name_of(row), of=(len(reads), len(outputs)), best=best, paths=ours)


def table(rows):
    """A Markdown table of rows of edges.jsonl."""
    lines = []
    for row in rows:
        cells = [row["run"], len(row["paths"])]
        for ranks, total in zip(zip(*row["paths"].values(), strict=True), row["of"], strict=True):
            unranked = ", not ranked" * (None in ranks)
            cells.append(f"{spans({*ranks} - {None})}{unranked} of {total}")
        lines.append([*cells, row["best"] or "none"])
    head = "run", "reads in its circuit", "their ranks", "ranks of what their readers write"
    return markdown([*head, "first reads that answer alone"], *lines)


def write(rows, out):
    """Measure run directories into edges.jsonl, among the rows of others. Return their table."""
    file, measured = out / "edges.jsonl", {}
    for row in rows:
        if row["folder"] and row["report"].get("paths"):
            measured[name_of(row)] = measure(row)
            train.write_file(file, [*(rows_by(file, "run") | measured).values()])
    return table(measured.values())


if __name__ == "__main__":
    command(__file__, __doc__, write)
