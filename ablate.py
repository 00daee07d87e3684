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
import sys
from typing import NamedTuple

import train
from data import command_line, progress

import torch


# ---- paths, and the edges that they have in a sequence


class Path(NamedTuple):
    """L6H0: q reads 1b says that in layer 6, head 0, both counted from 0, the query of each chain
    reads the token 1b of its own chain. The tokens are

        q, 1b    roles
        1b+1     the token right after 1b, whichever chain's: some models keep there what 1b held
        1b*      a star: the tokens 1b of all chains, all read by one reader"""

    layer: int
    head: int
    reader: str
    read: str

    def __str__(self):
        return f"L{self.layer}H{self.head}: {self.reader} reads {self.read}"


def places_of(token, task, places):
    """Where this token of each chain stands, (B, N, 1), or T if that is beyond the end; of a star
    (B, 1, N), those of all chains. places (B, N, roles) as in a Batch."""
    role, _, after = token.rstrip("*").partition("+")
    place = (places[:, :, [*task.roles].index(role), None] + int(after or 0)).clamp(max=task.T)
    return place.mT if "*" in token else place


def mark_edges(paths, task, places):
    """(B, T, T) True at [b, i, j] if in sequence b token i reads token j along one of these paths,
    whatever their layer and head."""
    edges = torch.zeros(len(places), task.T + 1, task.T + 1, dtype=torch.bool)
    sequence = torch.arange(len(places))[:, None, None]
    for path in paths:
        reader, read = (places_of(token, task, places) for token in path[2:])
        edges[sequence, reader, read] = True
    return edges[:, :-1, :-1]  # without T


def mean_attention(pattern, path, task, places):
    """The attention in a pattern (..., B, T, T) along a path to other tokens: the sum over what is
    read, mean over readers; NaN if the path has no edges."""
    edges = mark_edges([path], task, places) & ~torch.eye(task.T, dtype=torch.bool)
    return pattern[..., edges].sum(-1) / edges.any(-1).sum()


# ---- ablation

MEAN, RESAMPLE = "mean", "resample"
BOTH = RESAMPLE, MEAN  # the stricter first: if it fails, the other need not be tried


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
    replaced by what is read in corrupted sequences, which are others of the task, at least as many.
    In mean ablation that is the mean over all of them, in resample ablation what is read in one of
    them, another for each clean sequence. Later heads attend anew, in the stream that results.

    Never ablated are a token's own value, the MLPs and the residual stream. The attention of an
    edge that is kept depends on all other tokens through the softmax. A path that carries nothing
    may seem needed, since unusual activations do harm."""

    def __init__(self, model, task, clean, corrupted=None):
        self.model, self.task, self.clean = model, task, clean
        self.corrupted = corrupted or task.draw("corrupted", len(clean.inputs))
        self.corrupted_reads = record_reads(model, self.corrupted.inputs)
        self.full = self.losses({})  # of the full model

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
        """The f that replaces a head, and keeps the edges of these paths alone, or all but these
        with keep_them=False. For example, let token 3 of four read

            attention times value        token 0   token 1   token 2   itself
            clean                        .1 v0     .6 v1     .1 v2     .2 v3
            corrupted                    .2 u0     .1 u1     .4 u2     .3 u3

        and write the sum of a row. Let a path lead to token 1 in the clean sequence, and to token 2
        in the corrupted one, in which chains stand elsewhere. The row becomes

            if it keeps that path        .2 u0     .6 v1 + .1 u1       .2 v3
            if it keeps none             .2 u0     .1 u1     .4 u2     .3 v3

        1. Along kept paths, and of itself, a token reads as in the clean sequence
        2. but without a kept edge it attends to itself as in the corrupted one (.3, not .2): how
           much it does so in the clean one tells how much it attends to others
        3. Of others it also reads as in the corrupted sequence, but along kept paths. So the
           weights of a row need not sum to 1"""
        if ablation not in BOTH:
            raise ValueError(f"ablation must be one of {BOTH}, not {ablation!r}")
        paths = [path for path in paths if path[:2] == head]
        itself = torch.eye(self.task.T, dtype=torch.bool)

        def kept(batch):  # (B, T, T)
            return mark_edges(paths, self.task, batch.places) == keep_them

        corrupted, values = self.corrupted_reads[head]  # (B or more, T, T), (B or more, T, size)
        added = (corrupted * ~(kept(self.corrupted) | itself)) @ values  # 3
        if ablation == MEAN:
            corrupted, added = corrupted.mean(0), added.mean(0)
        else:
            corrupted, added = (x[: len(self.clean.inputs)] for x in (corrupted, added))
        keep = kept(self.clean)
        alone = itself & ~keep.any(-1, keepdim=True)  # 2

        def write(pattern, values):
            return torch.where(alone, corrupted, pattern * (keep | itself)) @ values + added

        return write


def symbol_means(losses, task):
    """{symbol: mean} of losses (B, N, targets), as the report has them."""
    means = [round(mean, 5) for mean in losses.mean((0, 1)).tolist()]
    return dict(zip(task.target_names, means, strict=True))


# ---- the circuit

LOST = 0.01  # the largest share of lost answers
FLOOR = 0.1  # times 1/N: the lowest attention of a candidate
REACH = 4  # candidates have 1b+1 to 1b+4
EACH = 128  # fresh sequences on which each path is measured


def measure(patched, losses):
    """({symbol: mean}, {symbol: share of lost answers}, score) of losses (B, N, targets). An answer
    is lost if the loss is above half of chance, but not in the full model. The score, the lower the
    better, is worst mean / task.faithful_below or worst share / LOST, whichever is larger."""
    task, limit = patched.task, patched.task.chance / 2
    lost = (losses > limit) & (patched.full <= limit)
    worst = [x.mean((0, 1)).max() for x in (losses, lost.float())]  # NaN, if one is NaN
    score = torch.stack(worst) / torch.tensor([task.faithful_below, LOST])
    return symbol_means(losses, task), symbol_means(lost.float(), task), score.max().item()


def attention_by_chain(patterns, reader, token, task, places):
    """(surplus, total), (heads,) each: the mean attention of a reader in patterns (heads, B, T, T)
    to this token of its own chain, less the mean to that of other chains; and to that of all."""
    paths = [Path(0, 0, reader, read) for read in (token, f"{token}*")]
    own, to_all = (mean_attention(patterns, path, task, places) for path in paths)
    return own - (to_all - own) / max(task.N - 1, 1), to_all


def candidates(patched):
    """The paths with enough attention in the corrupted sequences, by rank: those between roles
    first, then those with a 1b+1, then stars between roles; of each kind the most attended first.
    What must be enough is

        q reads 1b     the attention to 1b of its own chain, less the mean to that of other chains
        q reads 1b*    that to the 1b of all chains

    so that a head that reads all chains alike has only the star."""
    task, reads, attention = patched.task, patched.corrupted_reads, {}
    patterns = torch.stack([pattern for pattern, _ in reads.values()])  # (heads, B, T, T)
    places = patched.corrupted.places
    for reader, token in itertools.product(tokens_of(task), repeat=2):
        own, to_all = attention_by_chain(patterns, reader, token, task, places)
        for head, of_own, of_all in zip(reads, own.tolist(), to_all.tolist(), strict=True):
            attention[Path(*head, reader, token)] = of_own
            if "+" not in reader + token:
                attention[Path(*head, reader, f"{token}*")] = of_all
    # a read of itself, or beyond the end, has no edges: its mean is NaN, which is not enough
    enough = connected([path for path in attention if attention[path] >= FLOOR / task.N])
    kind = {path: ("*" in path.read, "+" in str(path)) for path in enough}
    return sorted(enough, key=lambda path: (*kind[path], -attention[path], path))


def tokens_of(task):
    """All tokens that a path may name, in the order of a sequence: 1a, 1b, 1b+1 to 1b+4, q, ..."""
    tokens = []
    for slot in task.chain_slots:
        tokens += [*slot, *(f"{slot[-1]}+{i}" for i in range(1, REACH + 1))]
    return tokens


def connected(paths):
    """Those of these paths that can carry something of their chain. A role holds its own symbol.
    But 1b+1 must have read something in an earlier layer, and be read in a later one."""

    def carries(path):
        has_read = any(other.reader == path.read and other.layer < path.layer for other in paths)
        is_read = any(other.read == path.reader and other.layer > path.layer for other in paths)
        return (has_read or "+" not in path.read) and (is_read or "+" not in path.reader)

    kept = [path for path in paths if carries(path)]
    return kept if kept == paths else connected(kept)


def search(ranked, answer):
    """The paths that are left when all that can go are dropped, the last ranked first: of them
    together answer(paths) is true, and not without any of them. Of two that can stand for each
    other, the one that is ranked first stays. None if not even all together answer.

    It drops 1, 2, 4, ... from the end, as long as they can go, and else tries half as many. A path
    that alone cannot go is needed. It starts again from those that were needed, since beside fewer
    others one may go."""
    if not answer(ranked):
        return None
    left, needed, size = ranked, [], 1
    while left:
        if sys.stderr.isatty():
            print(f"search: {len(left):4d} to try", end="\r", file=sys.stderr, flush=True)
        fewer = left[:-size]
        if answer(fewer + needed):
            left, size = fewer, min(2 * size, len(fewer))
        elif size > 1:
            size = size // 2
        else:
            left, needed = fewer, [left[-1], *needed]
    return needed if needed == ranked else search(needed, answer)


def arrivals(paths, task):
    """[(layer, {token: the k of the x_k that can have arrived there}), ...], an upper bound of the
    information flow (Section 5): first at the input, -1, then after each layer that has paths, in
    which a reader gets what the tokens that it reads held before. If 1b reads 1a, and q then 1b:

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
                holds[path.reader] = holds[path.reader] | before[path.read.rstrip("*")]
        after.append((layer, holds))
    return after


def validate(fresh, paths):
    """What the report says of a circuit. It is validated if on fresh sequences

    1. it answers under mean ablation; better if it does under both
    2. the full model no longer does when these paths are ablated by their mean
    3. the paths lead from each target to the query
    4. it finds the right chain: its losses stay below half of chance if its paths lead to all"""
    task, report, scores = fresh.task, dict(lost={}, paths=[]), {}
    for by in BOTH:
        losses = fresh.keep_only(paths, by)
        report[by], report["lost"][by], scores[by] = measure(fresh, losses)
    ablation = RESAMPLE if max(scores.values()) < 1 else MEAN
    report["knocked_out"], _, score_without = measure(fresh, fresh.knock_out(paths))
    beside = fresh.keep_only([path._replace(read=path.read.rstrip("*") + "*") for path in paths])
    report["all_chains"], misled = symbol_means(beside, task), beside.mean((0, 1)).max().item()
    _, holds = arrivals(paths, task)[-1]
    if not scores[MEAN] < 1:
        said = f"not validated: on fresh sequences its score is {scores[MEAN]:.2f}, not below 1"
    elif score_without < 1:
        said = "not validated: the full model does as well without it"
    elif unread := {*task.targets} - holds["q"]:
        said = f"not validated: no paths lead from x_{min(unread)} to the query"
    elif not misled < task.chance / 2:
        said = f"not validated: with paths to all chains it has a loss of {misled:.3f}"
    else:
        kind = "both ablations" if ablation == RESAMPLE else "mean ablation alone"
        said = f"validated under {kind}"
    report.update(ablation=ablation, validated=said.startswith("validated"), verdict=said)

    # each path, on a smaller batch, which saves half of the time of ablate.py
    small = PatchedModel(fresh.model, task, task.draw("circuits", EACH, 1))
    reads = record_reads(small.model, small.clean.inputs)
    for path in progress("paths measured", sorted(paths)):
        attention = mean_attention(reads[path[:2]][0], path, task, small.clean.places).item()
        row = dict(path._asdict(), attention=round(attention, 4))
        row["cost"] = symbol_means(small.knock_out([path]) - small.full, task)
        rest = [other for other in paths if other != path]
        row["without"] = symbol_means(small.keep_only(rest, ablation), task)
        report["paths"].append(row)
    return report


@torch.no_grad()
def find_circuit(model, task, count=512):
    """Find the circuit of a model, validate it on `count` sequences, and return the report, a dict
    that main writes into circuit.json:

    full_model, mean, resample, knocked_out, all_chains: {symbol: loss} of the full model, of the
        circuit under each ablation, of the full model with its paths ablated, of the circuit with
        paths to all chains, under mean ablation
    lost: {ablation: {symbol: share of lost answers}}
    paths: rows of the paths, on EACH sequences, each with its attention in the full model;
        cost, the rise of the full model's loss without it, by mean ablation;
        without, the loss of the circuit without it, under `ablation`
    ablation: resample if the circuit answers under both, else mean
    validated, verdict, sequences; these and full_model are all there is if the search finds nothing

    model: anything on the CPU that has `heads`, the list of its (layer, head), and can be called
    like model.Transformer: model(inputs, heads={(layer, head): f}) -> (B, N, task.outputs)."""
    many = PatchedModel(model, task, task.draw("search", 256))
    few = PatchedModel(model, task, task.draw("search", 64), many.corrupted)
    fresh = PatchedModel(model, task, task.draw("circuits", count))

    def answer(paths, ablations):
        """Whether their score is below 0.9 on 256 sequences, a margin for fresh ones. First a score
        above 3 on 64 sequences refuses what is far from it, in less time."""
        tests = itertools.product(((few, 3), (many, 0.9)), ablations)
        return all(measure(p, p.keep_only(paths, by))[-1] < limit for (p, limit), by in tests)

    ranked = candidates(many)
    said = f"not validated: all {len(ranked)} candidates together do not answer"
    report = dict(sequences=count, validated=False, verdict=said)
    report["full_model"] = symbol_means(fresh.full, task)
    # first without stars, under both ablations; if that is not validated, with stars, under the
    # mean alone, which asks for less
    plain = [path for path in ranked if "*" not in path.read]
    for among, ablations in (plain, BOTH), (ranked, [MEAN]):
        paths = search(among, functools.partial(answer, ablations=ablations))
        if paths is not None:
            report |= validate(fresh, paths)
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
    for key in "full_model", MEAN, RESAMPLE, "knocked_out", "all_chains":
        if key in report:
            print(f"  {key:12s}", *(f"{name} {loss:.4f}" for name, loss in report[key].items()))
    if rows := paths_in(report):
        by = f"{EACH} sequences; circuit under {report['ablation']} ablation"
        print(f"\nthe worst symbol's loss without one path ({by})")
        print("path                     attention   full model: rise   circuit: loss")
        for path, row in rows.items():
            cost, without = max(row["cost"].values()), max(row["without"].values())
            print(f"{path!s:25s}{row['attention']:9.2f}{cost:19.3f}{without:16.3f}")
    print(f"---\nvalidated: {report['validated']}\nverdict: {report['verdict']}")


def main():
    p = command_line("ablate.py", __doc__)
    p.add_argument("run", type=train.run_directory, help="finished run directory of train.py")
    run = p.parse_args().run
    model, task, flags = train.load(run)
    print(f"trained in {flags.dtype}, measured in float32")
    report = find_circuit(model, task)
    print_report(report)
    train.write_file(run / "circuit.json", report)


if __name__ == "__main__":
    main()
