"""Find the circuit of a trained transformer, and validate it (Section 8).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A circuit is a set of paths, along which tokens read other tokens. To test it, all that they read
of other tokens along any other path is replaced: if the model still answers, these paths carry the
answers.
"""

import collections
import functools
import itertools
import pathlib
from typing import NamedTuple

import train
from data import command_line, progress

import torch


# ---- paths, and the edges that they have in a sequence


class Path(NamedTuple):
    """L6H0: q -> 1b says that in layer 6, head 0, both counted from 0, the query of each chain
    reads the token 1b of its own chain. Tokens are roles, and 1b+1: the token right after 1b, of
    any chain, through which some models pass on what 1b holds."""

    layer: int
    head: int
    reader: str
    read: str

    def __str__(self):
        return f"L{self.layer}H{self.head}: {self.reader} -> {self.read}"


def mark_edges(paths, task, places):
    """(B, T, T) True at [b, i, j] if in sequence b token i reads token j along one of these paths,
    whatever their layer and head; places (B, N, roles) as in a Batch."""
    edges = torch.zeros(len(places), task.T + 1, task.T + 1, dtype=torch.bool)
    sequence = torch.arange(len(places))[:, None]

    def place_of(token):  # (B, N), of each chain
        role, _, after = token.partition("+")
        return places[:, :, [*task.roles].index(role)] + int(after or 0)

    for path in paths:
        edges[sequence, place_of(path.reader), place_of(path.read)] = True
    return edges[:, :-1, :-1]  # 1b+1 may be beyond the end


def mean_attention(pattern, path, task, places):
    """The mean attention in a pattern (B, T, T) along a path."""
    return pattern[mark_edges([path], task, places)].mean().item()


# ---- ablation

MEAN, RESAMPLE = "mean", "resample"


@torch.no_grad()
def record_reads(model, inputs):
    """{(layer, head): (pattern (B, T, T), values (B, T, size))}, what each head reads in inputs."""
    reads = {}

    def record(head, pattern, values):
        reads[head] = pattern.clone(), values.clone()  # a model may reuse memory
        return pattern @ values

    model(inputs, heads={head: functools.partial(record, head) for head in model.heads})
    return reads


class PatchedModel:
    """A model on clean sequences, in which reads are ablated: what is read along some edges is
    replaced by what is read in as many corrupted sequences. In mean ablation that is the mean over
    all of them, in resample ablation that of one for each clean sequence. Later heads attend in
    the stream that results.

    Never ablated are a token's own value, the MLPs and the residual stream. The attention of an
    edge that is kept depends on all other tokens through the softmax. A path that carries nothing
    may seem needed, since unusual activations do harm."""

    def __init__(self, model, task, clean):
        self.model, self.task, self.clean = model, task, clean
        self.corrupted = task.draw("corrupted", len(clean.inputs))
        self.corrupted_reads = record_reads(model, self.corrupted.inputs)

    def losses(self, heads):
        """The losses (B, N, targets) with these {(layer, head): f}."""
        return self.task.losses(self.model(self.clean.inputs, heads=heads), self.clean)

    def keep_only(self, paths, ablation=MEAN):
        """The losses with all edges ablated but those of these paths."""
        return self.losses({head: self.patch(head, paths, ablation) for head in self.model.heads})

    def knock_out(self, paths, ablation=MEAN):
        """The losses with the edges of these paths ablated."""
        heads = {path[:2] for path in paths}
        return self.losses({head: self.patch(head, paths, ablation, False) for head in heads})

    def patch(self, head, paths, ablation, keep_them=True):
        """The f that replaces a head, and keeps the edges of these paths alone, or all but these.
        Each token writes the sum of

        1. along the edges that it keeps, and of itself: attention times value, as always
        2. but of itself, if it keeps no edge: corrupted attention times value, since its attention
           tells what it attends to
        3. along the edges not kept in the corrupted sequence: attention times value of that one

        Example: token 3 of four

            reads                        token 0   token 1   token 2   itself
            clean                        .1 v0     .6 v1     .1 v2     .2 v3
            corrupted                    .2 u0     .1 u1     .4 u2     .3 u3
            clean keeps 1, corrupted 2   .2 u0     .6 v1 + .1 u1       .2 v3
            neither keeps any            .2 u0     .1 u1     .4 u2     .3 v3"""
        paths = [path for path in paths if path[:2] == head]
        itself = torch.eye(self.task.T, dtype=torch.bool)

        def kept(batch):  # (B, T, T)
            return (mark_edges(paths, self.task, batch.places) == keep_them) | itself

        corrupted, values = self.corrupted_reads[head]  # (B, T, T), (B, T, size)
        others = (corrupted * ~kept(self.corrupted)) @ values  # 3
        if ablation == MEAN:
            corrupted, others = corrupted.mean(0), others.mean(0)
        keep = kept(self.clean)
        alone = itself & (keep.sum(-1, keepdim=True) == 1)  # 2

        def write(pattern, values):
            return torch.where(alone, corrupted, pattern * keep) @ values + others

        return write


def symbol_means(losses, task):
    """{symbol: mean} of losses (B, N, targets), as the report has them."""
    means = [round(mean, 5) for mean in losses.mean((0, 1)).tolist()]
    return dict(zip(task.target_names, means, strict=True))


# ---- the circuit


def candidates(patched):
    """The paths with a mean attention of at least a quarter in the corrupted sequences, by rank:
    those between roles first, and of these the most attended."""
    task, attention = patched.task, {}
    tokens = [*task.roles] + [f"{slot[-1]}+1" for slot in task.chain_slots]
    for head, (pattern, _) in patched.corrupted_reads.items():
        for reader, read in itertools.permutations(tokens, 2):
            path = Path(*head, reader, read)
            attention[path] = mean_attention(pattern, path, task, patched.corrupted.places)
    ranked = sorted(attention, key=lambda path: ("+" in str(path), -attention[path]))
    return [path for path in ranked if attention[path] >= 0.25]


def search(patched, ranked, ablation):
    """The paths that are left when all that can go are dropped, the last ranked first: each symbol
    is still answered under this ablation. Of two that can stand for each other, the one that is
    ranked first stays. None if even all together do not answer."""
    limit = 0.9 * patched.task.faithful_below  # so that the circuit passes on fresh sequences too

    def answer(paths):
        return patched.keep_only(paths, ablation).mean((0, 1)).max() < limit

    if not answer(ranked):
        return None
    kept = ranked
    for path in progress("paths tried", ranked[::-1]):
        fewer = [other for other in kept if other != path]
        if answer(fewer):
            kept = fewer
    return kept


def arrivals(paths, task):
    """[(layer, {token: the k of the x_k that can have arrived there}), ...], an upper bound of the
    information flow (Section 5): first at the input, -1, then after each layer that has paths, in
    which a reader gets what the tokens that it reads held before. With 1b -> 1a, then q -> 1b:

        -1    q: {0}       1a: {0}    1b: {1}
         0    q: {0}       1a: {0}    1b: {0, 1}
         1    q: {0, 1}    1a: {0}    1b: {0, 1}"""
    holds = collections.defaultdict(set)  # 1b+1 holds nothing at first
    holds.update({role: {k} for role, k in task.roles.items()})
    after = [(-1, holds)]
    for layer in sorted({path.layer for path in paths}):
        before, holds = holds, holds.copy()
        for path in paths:
            if path.layer == layer:
                holds[path.reader] = holds[path.reader] | before[path.read]
        after.append((layer, holds))
    return after


def validate(fresh, paths, ablation):
    """What the report says of a circuit that was found under an ablation. It is validated if on
    fresh sequences

    1. each symbol's loss is below task.faithful_below under this ablation, and under the mean
    2. the full model's no longer is when these paths are ablated by their mean
    3. the paths lead from each target to the query"""
    task, limit, full = fresh.task, fresh.task.faithful_below, fresh.losses({})
    report = {by: symbol_means(fresh.keep_only(paths, by), task) for by in (MEAN, RESAMPLE)}
    worst = max(max(report[by].values()) for by in {MEAN, ablation})
    report["knocked_out"] = symbol_means(fresh.knock_out(paths), task)
    _, holds = arrivals(paths, task)[-1]
    if not worst < limit:
        said = f"not validated: on fresh sequences it has a loss of {worst:.3f}"
    elif max(report["knocked_out"].values()) < limit:
        said = "not validated: the full model does as well without it"
    elif unread := {*task.targets} - holds["q"]:
        said = f"not validated: no paths lead from x_{min(unread)} to the query"
    else:
        kind = "both ablations" if ablation == RESAMPLE else "mean ablation alone"
        said = f"validated under {kind}"
    report.update(ablation=ablation, validated=said.startswith("validated"), verdict=said, paths=[])

    reads = record_reads(fresh.model, fresh.clean.inputs)
    for path in progress("paths measured", sorted(paths)):
        pattern, _ = reads[path[:2]]
        attention = mean_attention(pattern, path, task, fresh.clean.places)
        row = dict(path._asdict(), attention=round(attention, 4))
        row["cost"] = symbol_means(fresh.knock_out([path]) - full, task)
        rest = [other for other in paths if other != path]
        row["without"] = symbol_means(fresh.keep_only(rest, ablation), task)
        report["paths"].append(row)
    return report


@torch.no_grad()
def find_circuit(model, task, count=512):
    """Find the circuit of a model, validate it on `count` sequences, and return the report, a dict
    that main writes into circuit.json:

    full_model, mean, resample, knocked_out: {symbol: loss} of the full model, of the circuit under
        each ablation, and of the full model with its paths ablated
    paths: rows of the paths, each with its attention in the full model;
        cost, the rise of the full model's loss without it, by mean ablation;
        without, the loss of the circuit without it, under the `ablation` by which it was found
    validated, verdict, sequences

    model: anything on the CPU that has `heads`, the list of its (layer, head), and can be called
    like model.Transformer: model(inputs, heads={(layer, head): f}) -> (B, N, task.outputs)."""
    searched = PatchedModel(model, task, task.draw("search", 256))
    fresh = PatchedModel(model, task, task.draw("circuits", count))
    full, ranked = symbol_means(fresh.losses({}), task), candidates(searched)
    said = f"not validated: all {len(ranked)} candidates together do not answer"
    report = dict(full_model=full, sequences=count, paths=[], validated=False, verdict=said)
    for ablation in RESAMPLE, MEAN:  # the one that fewer circuits pass comes first
        paths = search(searched, ranked, ablation)
        if paths is not None:
            report |= validate(fresh, paths, ablation)
        if report["validated"]:
            break
    return report


# ---- reports in files


def read_report(run, name="circuit.json"):
    """The report of find_circuit in a run directory, or another that has its paths; {} if there is
    none."""
    return train.read_file(pathlib.Path(run, name), {})


def paths_in(report):
    """{Path: its row} of the circuit in a report."""
    rows = report.get("paths", [])
    return {Path(row["layer"], row["head"], row["reader"], row["read"]): row for row in rows}


def print_report(report):
    """Print the report in lines that explain themselves."""
    print(f"losses on {report['sequences']} fresh sequences")
    for key in "full_model", MEAN, RESAMPLE, "knocked_out":
        if key in report:
            print(f"  {key:12s}", *(f"{name} {loss:.4f}" for name, loss in report[key].items()))
    if rows := paths_in(report):
        print(f"\nthe worst symbol without a path (circuit under {report['ablation']} ablation)")
        print("path                 attention   full model rises by   circuit rises to")
        for path, row in rows.items():
            cost, without = max(row["cost"].values()), max(row["without"].values())
            print(f"{path!s:21s}{row['attention']:9.2f}{cost:22.3f}{without:19.3f}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory of train.py")
    run = p.parse_args().run
    if not (run / "model.pt").exists():
        p.error(f"there is no {run}/model.pt: finish the training with --resume")
    model, task, _ = train.load(run)
    report = find_circuit(model, task)
    print_report(report)
    train.write_file(run / "circuit.json", report)


if __name__ == "__main__":
    main()
