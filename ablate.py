"""Find the circuit of a trained transformer, and validate it (Section 8).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A circuit is a set of paths, along which tokens read other tokens. To test it, all that they read
of other tokens along any other path is replaced: if the model still answers, these paths carry the
answers.
"""

import collections
import functools
import math
import pathlib
from bisect import bisect_left
from typing import NamedTuple

import train
from data import command_line, progress, show

import torch


# ---- paths, and the edges that they have in a sequence


class Path(NamedTuple):
    """One kind of attention edge. L6H0: q -> 1b says that in layer 6, head 0, both counted from 0,
    the query of each chain reads the token 1b of its own chain. The tokens of a path are

        q, 1b    roles
        1b+1     an intermediate token: the one right after 1b, of any chain. Some models pass on
                 through it what 1b holds
        1b*      a star: the tokens 1b of all chains, all read by one reader; never a reader"""

    layer: int
    head: int
    reader: str
    read: str

    def __str__(self):
        return f"L{self.layer}H{self.head}: {self.reader} -> {self.read}"

    @property
    def star(self):
        return self.read.endswith("*")

    @property
    def token(self):
        """What is read, without the star."""
        return self.read.rstrip("*")


def by_head(paths):
    """{(layer, head): [path, ...]}, the paths of each head, sorted; [] for any other head."""
    heads = collections.defaultdict(list)
    for path in sorted(paths):
        heads[path.layer, path.head].append(path)
    return heads


def split_token(token):
    """("1b", 1) of 1b+1, ("1b", 0) of 1b and of 1b*."""
    role, _, offset = token.rstrip("*").partition("+")
    return role, int(offset or 0)


def mark_tokens(token, task, places):
    """(B, N, T): 1 at [b, n, t] if the token t of sequence b is this one of the chain of query n,
    and else 0; places (B, N, roles) as in a Batch. In the sequence A2 B2  A1 B1  A2 A1:

        token   query A2       query A1
        1b      0 1 0 0 0 0    0 0 0 1 0 0
        1b+1    0 0 1 0 0 0    0 0 0 0 1 0    all 0 if it is beyond the end
        1b*     0 1 0 1 0 0    0 1 0 1 0 0    the same for every query"""
    role, offset = split_token(token)
    place = places[:, :, [*task.roles].index(role)] + offset  # (B, N)
    marks = (place[:, :, None] == torch.arange(task.T, device=place.device)).float()
    if token.endswith("*"):
        marks = marks.sum(1, keepdim=True).expand_as(marks)
    return marks


def mark_edges(paths, task, places):
    """(B, T, T) True at [b, i, j] if in sequence b token i reads token j along one of these paths,
    whatever their layer and head."""
    edges = torch.zeros(len(places), task.T, task.T, dtype=torch.bool, device=places.device)
    if paths:
        readers = torch.cat([mark_tokens(path.reader, task, places) for path in paths], 1)
        read = torch.cat([mark_tokens(path.read, task, places) for path in paths], 1)
        edges |= readers.mT @ read > 0  # (B, T, paths * N) @ (B, paths * N, T)
    return edges


def mean_attention(pattern, path, task, places):
    """The attention in a pattern (B, T, T) along a path to other tokens, averaged over readers."""
    itself = torch.eye(task.T, dtype=torch.bool, device=pattern.device)
    edges = mark_edges([path], task, places) & ~itself
    readers = mark_tokens(path.reader, task, places).sum()  # a 1b+1 may be beyond the end
    return (pattern * edges).sum() / readers.clamp(min=1)


# ---- ablation

MEAN, RESAMPLE = "mean", "resample"
BOTH = RESAMPLE, MEAN  # the one that fewer circuits pass comes first


@torch.no_grad()
def record_reads(model, inputs):
    """{(layer, head): (pattern (B, T, T), values (B, T, size))}, what each head reads in inputs.
    ValueError if the model does not call each f once with such arguments."""
    B, T = inputs.shape[:2]
    reads = {}

    def record(head, pattern, values):
        if head in reads or pattern.shape != (B, T, T) or values.shape[:2] != (B, T):
            raise ValueError(f"the model must call f of {head} once, with (B, T, T), (B, T, size)")
        reads[head] = pattern.float().clone(), values.float().clone()  # a model may reuse memory
        return pattern @ values

    model(inputs, heads={head: functools.partial(record, head) for head in model.heads})
    if missing := {*model.heads} - reads.keys():
        raise ValueError(f"the model never calls f of {missing}")
    return reads


class PatchedModel:
    """A model on clean sequences, in which reads are ablated: what is read along some edges is
    replaced by what is read in corrupted sequences. In mean ablation that is the mean over all of
    them. In resample ablation it is that of one, drawn for each clean sequence, and the same for
    all heads. Later heads attend in the stream that results.

    clean, corrupted: Batches of B and n sequences; corrupted are by default 256 held-out ones
    measure: f(predictions, batch) -> (B, N, targets), by default task.losses

    Never ablated are a token's own value, the MLPs and the residual stream. The attention of an
    edge that is kept depends on all other tokens through the softmax. A path that carries nothing
    may seem needed, since unusual activations do harm."""

    def __init__(self, model, task, clean, corrupted=None, measure=None):
        self.model, self.task, self.clean = model, task, clean
        self.measure = measure or task.losses
        self.corrupted = corrupted or task.draw("corrupted", 256).to(clean.inputs.device)
        self.corrupted_reads = record_reads(model, self.corrupted.inputs)
        self.itself = torch.eye(task.T, dtype=torch.bool, device=clean.inputs.device)

        # draw a corrupted sequence for each clean one. A task of your own may move its roles: then
        # one with the same roles at the same places, or any if there is none
        here, there = (batch.places.sort(1)[0].flatten(1) for batch in (clean, self.corrupted))
        same = (here[:, None] == there).all(-1)  # (B, n)
        self.unmatched = ~same.any(1, keepdim=True)  # (B, 1)
        choices, generator = (same | self.unmatched).float(), torch.Generator().manual_seed(0)
        self.resampled = choices.cpu().multinomial(1, generator=generator)[:, 0]  # (B,)

    def losses(self, heads):
        """The losses (B, N, targets), or what else is measured, with these {(layer, head): f}."""
        predictions = self.model(self.clean.inputs, heads=heads)
        shape = len(self.clean.inputs), self.task.N, self.task.outputs
        if predictions.shape != shape or not predictions.isfinite().all():
            raise ValueError(f"the model must return finite predictions {shape}")
        return self.measure(predictions, self.clean)

    @functools.cached_property
    def baseline(self):
        """The losses of the full model."""
        return self.losses({})

    def keep_only(self, paths, ablation=MEAN):
        """The losses with all edges ablated but those of these paths."""
        paths_of = by_head(paths)
        return self.losses({h: self.patch(h, paths_of[h], ablation) for h in self.model.heads})

    def knock_out(self, paths, ablation=MEAN):
        """The losses with the edges of these paths ablated."""
        paths_of = by_head(paths)
        return self.losses({h: self.patch(h, paths_of[h], ablation, False) for h in paths_of})

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
        if ablation not in BOTH:
            raise ValueError(f"ablation must be {MEAN!r} or {RESAMPLE!r}, not {ablation!r}")

        def ablated(x):  # of the corrupted (n, ...): their mean (...), or the resampled (B, ...)
            return x.mean(0) if ablation == MEAN else x[self.resampled]

        keep = mark_edges(paths, self.task, self.clean.places)  # (B, T, T)
        keep_corrupted = mark_edges(paths, self.task, self.corrupted.places)  # (n, T, T)
        if not keep_them:
            keep, keep_corrupted = ~keep, ~keep_corrupted
        itself, keeps_none = self.itself, ~keep.any(-1, keepdim=True)  # (T, T), (B, T, 1)
        pattern, values = self.corrupted_reads[head]  # (n, T, T), (n, T, size)
        corrupted_pattern = ablated(pattern)
        others = ablated((pattern * ~(keep_corrupted | itself)) @ values)  # 3

        def write(pattern, values):
            weights = pattern * (keep | itself)  # 1
            weights = torch.where(itself & keeps_none, corrupted_pattern, weights)  # 2
            return weights.to(values) @ values + others.to(values)

        return write


# ---- whether a circuit still answers, by its losses (B, N, targets)

LOST = 0.01  # the largest share of lost answers on a symbol


def lost_answers(patched, losses):
    """(B, N, targets) True where the loss is above task.lost_above (0.375 for N = 4), and that of
    the full model is not."""
    limit = patched.task.lost_above
    return (losses > limit) & (patched.baseline <= limit)


def failures(patched, losses, margin=1.0):
    """Texts that say why a circuit with these losses is not faithful; none if for every symbol the
    mean is below task.faithful_below (0.05), and at most 1% of the answers are lost. A margin below
    1 makes both limits stricter."""
    task, texts = patched.task, []
    means = losses.mean((0, 1)).tolist()
    shares = lost_answers(patched, losses).float().mean((0, 1)).tolist()
    limit, largest = margin * task.faithful_below, margin * LOST
    for name, loss, share in zip(task.target_names, means, shares, strict=True):
        if loss >= limit:
            texts.append(f"{name} has a loss of {loss:.3f} (limit {limit:.3f})")
        if share > largest:
            texts.append(f"{share:.2%} of the answers on {name} are lost (limit {largest:.1%})")
    return texts


def symbol_means(values, task):
    """{symbol: mean} of values (B, N, targets), as the report has them."""
    means = [round(mean, 5) for mean in values.float().mean((0, 1)).tolist()]
    return dict(zip(task.target_names, means, strict=True))


# ---- search: all paths with enough attention are candidates, and those that can go are dropped

SEARCHED = 256  # sequences to search on
FLOOR = 0.1  # times 1/N: the lowest attention of a candidate
REACH = 4  # intermediate tokens are at most so many tokens after a slot
MARGIN = 0.9  # of the limits in the search, so that a circuit passes on fresh sequences too
MORE = 4  # paths that resample ablation may need beyond a circuit under mean ablation


def candidates(patched):
    """{Path: attention} of the candidates, those that the search prefers first: paths between
    roles, then those with intermediate tokens (which may be roles of other chains), then stars
    between roles; of each kind the most attended first. The attention of

        q -> 1b     is here that of q to 1b of its own chain, less the mean to the other chains'
        q -> 1b*    is that of q to the 1b of all chains

    averaged over chains and corrupted sequences. A head that reads all chains alike has only the
    star."""
    task, places = patched.task, patched.corrupted.places
    roles, floor, attention = [*task.roles], FLOOR / task.N, {}
    tokens = roles + [f"{slot[-1]}+{i}" for slot in task.chain_slots for i in range(1, REACH + 1)]
    marks = torch.stack([mark_tokens(token, task, places) for token in tokens], 2)
    for head, (pattern, _) in patched.corrupted_reads.items():
        # (B, N, tokens, T) from each of these tokens of a chain to each token of the sequence
        given = marks @ (pattern * ~patched.itself)[:, None]
        # (tokens, tokens) from tokens[i] to tokens[j] of its own chain
        own = (given @ marks.mT).mean((0, 1))
        # to those of all chains
        to_all = (given @ marks.sum(1, keepdim=True).mT).mean((0, 1))
        # to that of its own chain, less the mean of that to the other chains'
        surplus = own - (to_all - own) / max(task.N - 1, 1)

        for i, j in (surplus >= floor).nonzero().tolist():
            attention[Path(*head, tokens[i], tokens[j])] = surplus[i, j].item()
        of_roles = to_all[: len(roles), : len(roles)]
        for i, j in (of_roles >= floor).nonzero().tolist():
            attention[Path(*head, roles[i], f"{roles[j]}*")] = of_roles[i, j].item()

    drop_unconnected(attention)
    ranked = sorted(attention, key=lambda path: (path.star, "+" in str(path), -attention[path]))
    return {path: attention[path] for path in ranked}


def drop_unconnected(paths):
    """Drop from {Path: attention} the paths that carry nothing. An intermediate token mostly is of
    another chain, and passes on what it has read: q -> 1b+1 helps only if 1b+1 reads something in
    an earlier layer, and 1b+1 -> 1b only if 1b+1 is read in a later one."""

    def is_connected(path):
        has_read = any(other.reader == path.read and other.layer < path.layer for other in paths)
        is_read = any(other.read == path.reader and other.layer > path.layer for other in paths)
        return (has_read or "+" not in path.read) and (is_read or "+" not in path.reader)

    while unconnected := [path for path in paths if not is_connected(path)]:
        for path in unconnected:  # others may lose their connection with it
            del paths[path]


def search(patched, ranked, ablations, known=frozenset(), most=math.inf):
    """The circuit among these paths that prune finds, faithful under each of these ablations."""

    @functools.cache
    def is_faithful(paths):
        show(f"search: {len(paths)} paths")
        return not any(failures(patched, patched.keep_only(paths, by), MARGIN) for by in ablations)

    return prune(ranked, is_faithful, known, most)


def prune(ranked, test, known=frozenset(), most=math.inf):
    """A set of paths that passes a test, and from which no single one can be dropped; None if all
    of them together fail. Of two paths that can stand for each other, the one that is ranked first
    stays: the preferred explanation of Junker (2004). Of a, b, c, d, let a test need b, and a or d:

        the first n of     a b c d    pass from n = 2 on, so b is needed
        with b, those of   a          pass from n = 1 on, so a is needed
        a and b alone pass

    It starts from known paths, and gives up, with None, when `most` others are needed too."""
    if not test(known.union(ranked)):
        return None

    # needed and left together pass. If fewer pass, more mostly do too: bisection finds how few
    needed, left = known, list(ranked)
    while not test(needed):
        if len(needed) == len(known) + most:
            return None
        n = bisect_left(range(len(left)), True, key=lambda n: test(needed.union(left[:n])))
        needed |= {left[n - 1]}
        left = left[: n - 1]

    # not always: one that was needed may be droppable once others went
    while droppable := [path for path in ranked if path in needed and test(needed - {path})]:
        needed -= {droppable[-1]}
    return needed


def best_circuit(searched, fresh, attention):
    """What validate says of the first circuit that is validated; if none is, of the first that is
    found; {} if none is found. They are searched for in this order:

        1. without stars, faithful under both ablations
        2. with stars, under both: those of 3, and at most MORE others
        3. with stars, under mean ablation alone
        4. without stars, under both, with all paths ranked by their attention"""
    ranked, reports = [*attention], []
    without_stars = [path for path in ranked if not path.star]

    def circuits():
        yield search(searched, without_stars, BOTH), BOTH  # 1
        under_mean = search(searched, ranked, [MEAN])
        if under_mean is not None:
            yield search(searched, ranked, BOTH, under_mean, MORE), BOTH  # 2
        yield under_mean, [MEAN]  # 3
        yield search(searched, sorted(without_stars, key=attention.get, reverse=True), BOTH), BOTH

    for paths, ablations in circuits():
        if paths is not None:
            reports.append(validate(fresh, paths, ablations))
            if reports[-1]["validated"]:
                return reports[-1]
    return reports[0] if reports else {}


# ---- the report, on fresh clean sequences


def validate(fresh, paths, ablations):
    """What the report says of a circuit as a whole. It is validated if on fresh sequences

    1. it is faithful under these ablations
    2. the full model is no longer faithful when its paths are ablated by their mean
    3. its paths lead from each target to the query
    4. it does not answer a decoy: a query that keeps the edges of another chain must not answer
       for that chain"""
    task, reasons, lost = fresh.task, [], {}
    report = dict(paths=paths, ablation=ablations[0], lost=lost)
    for ablation in MEAN, RESAMPLE:
        losses = fresh.keep_only(paths, ablation)
        report[ablation] = symbol_means(losses, task)
        lost[ablation] = symbol_means(lost_answers(fresh, losses), task)
        if ablation in ablations:
            reasons += [f"under {ablation} ablation {text}" for text in failures(fresh, losses)]

    knocked_out = fresh.knock_out(paths)
    report["knocked_out"] = symbol_means(knocked_out, task)
    if not failures(fresh, knocked_out):
        reasons.append("the full model does as well without it")

    _, holds = arrivals(paths, task)[-1]
    for k in sorted({*task.targets} - holds["q"]):
        reasons.append(f"no paths lead from x_{k} to the query")

    report["decoy"] = {}
    if decoy := task.decoy(fresh.clean):
        decoyed = PatchedModel(fresh.model, task, decoy, fresh.corrupted)
        means = [symbol_means(decoyed.keep_only(paths, by), task) for by in ablations]
        report["decoy"] = {name: min(under[name] for under in means) for name in means[0]}
    for name, loss in report["decoy"].items():
        if loss < task.lost_above:
            reasons.append(f"it answers {name} of a decoy, with a loss of {loss:.3f}")

    kind = "both ablations" if ablations == BOTH else "mean ablation alone"
    said = f"not validated: {'; '.join(reasons)}" if reasons else f"validated under {kind}"
    return dict(report, validated=not reasons, verdict=said)


def arrivals(paths, task):
    """[(layer, {token: the k of the x_k that can have arrived there}), ...], an upper bound of the
    information flow (Section 5): first at the input, -1, then after each layer that has paths, in
    which a reader gets what the tokens that it reads held before. With 1b -> 1a, then q -> 1b:

        -1    q: {0}       1a: {0}    1b: {1}
         0    q: {0}       1a: {0}    1b: {0, 1}
         1    q: {0, 1}    1a: {0}    1b: {0, 1}"""
    holds = collections.defaultdict(set)  # an intermediate token holds nothing at first
    holds.update({role: {k} for role, k in task.roles.items()})
    after = [(-1, holds)]
    for layer in sorted({path.layer for path in paths}):
        before, holds = holds, holds.copy()
        for path in paths:
            if path.layer == layer:
                holds[path.reader] = holds[path.reader] | before[path.token]
        after.append((layer, holds))
    return after


def measure_paths(fresh, paths, ablation):
    """The rows of the report on each path, its `attention` in the full model, and
    cost: the rise of the full model's loss without it, by mean ablation
    without: the loss of the circuit without it, under this ablation"""
    task, rows = fresh.task, []
    reads = record_reads(fresh.model, fresh.clean.inputs)
    for path in progress("paths measured", sorted(paths)):
        pattern, _ = reads[path.layer, path.head]
        attention = mean_attention(pattern, path, task, fresh.clean.places)
        row = dict(path._asdict(), attention=round(attention.item(), 4))
        row["cost"] = symbol_means(fresh.knock_out([path]) - fresh.baseline, task)
        row["without"] = symbol_means(fresh.keep_only(paths - {path}, ablation), task)
        rows.append(row)
    return rows


@torch.no_grad()
def find_circuit(model, task, count=512):
    """Find the circuit of a model, validate it on `count` sequences, and return the report, a dict
    that main writes into circuit.json:

    full_model, mean, resample, knocked_out, decoy: {symbol: loss} of the full model, of the circuit
        under each ablation, of the full model with its paths ablated, of the circuit on the decoy
    lost: {ablation: {symbol: share of lost answers}}; unmatched: share of the sequences that are
        resampled among others than those with the roles at the same places
    paths: as measure_paths says; ablation: that of their `without`; validated, verdict, sequences

    model: anything on the CPU that has `heads`, the list of its (layer, head), and can be called
    like model.Transformer: model(inputs, heads={(layer, head): f}) -> (B, N, task.outputs)."""
    report = dict(validated=False, sequences=count, lost={}, paths=[])
    if not task.roles:
        return dict(report, verdict="not searched: the task has no roles")

    searched = PatchedModel(model, task, task.draw("search", SEARCHED))
    fresh = PatchedModel(model, task, task.draw("circuits", count))
    report["full_model"] = symbol_means(fresh.baseline, task)
    report["unmatched"] = fresh.unmatched.float().mean().item()
    if reasons := failures(fresh, fresh.baseline, MARGIN):
        return dict(report, verdict=f"not searched: in the full model {'; '.join(reasons)}")

    attention = candidates(searched)
    found = best_circuit(searched, fresh, attention)
    show()
    if not found:
        reasons = failures(searched, searched.keep_only(attention), MARGIN)
        said = f"not validated: with all {len(attention)} candidates {'; '.join(reasons)}"
        return dict(report, verdict=said)
    rows = measure_paths(fresh, found["paths"], found["ablation"])
    return report | found | dict(paths=rows)


# ---- reports in files


def read_report(run, name="circuit.json"):
    """The report of find_circuit in a run directory, or another that has its paths; {} if there is
    none. ValueError if the run has been given other weights since."""
    report = train.read_file(pathlib.Path(run, name), {})
    if "weights" in report and report["weights"] != train.weights_hash(run):
        raise ValueError(f"{run}/{name} was made of other weights: make it again, or delete it")
    return report


def paths_in(report):
    """{Path: its row} of the circuit in a report."""
    rows = {}
    for row in report.get("paths", []):
        rows[Path(row["layer"], row["head"], row["reader"], row["read"])] = row
    return rows


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    print(f"losses on {report['sequences']} fresh sequences")
    for key in "full_model", MEAN, RESAMPLE, "knocked_out", "decoy":
        if key in report:
            cells = [f"{name} {loss:.4f}" for name, loss in report[key].items()]
            print(f"  {key:12s}", *(cells or ["the task has none"]), sep="  ")
    if report.get("unmatched"):
        print(f"{report['unmatched']:.0%} of them were resampled with the roles at other places")

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
    train.keep_freed_memory()
    model, task, flags = train.load(run)
    report = find_circuit(model, task)
    print_report(report)
    provenance = dict(dtype=flags.dtype, weights=train.weights_hash(run))
    train.write_file(run / "circuit.json", report | provenance)
    for name in "circuit", "attention_maps", "emergence", "paths":  # of an earlier circuit
        (run / f"{name}.png").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
