"""Find the circuit of a trained transformer, and validate it (Section 8).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A circuit is a set of paths, along which tokens read other tokens. It is tested by replacing all
that they read of others elsewhere: if the model still answers, these paths carry the answers.
"""

import collections
import functools
import pathlib
from bisect import bisect_left
from typing import NamedTuple

import train
from data import command_line, progress, show

import torch


# ---- paths, and the edges that they have in a sequence


class Path(NamedTuple):
    """One kind of attention edge. L6H0: q -> 1b says that in layer 6, head 0, both counted from 0,
    the query of each chain reads the token 1b of its own chain. An end of a path is

        q, 1b    a role
        1b+1     an intermediate token: the one right after 1b, of whichever chain
        1b*      a star: the tokens 1b of all chains, which a path can lead to, not start from"""

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


def split_end(end):
    """("1b", 1) of 1b+1, ("1b", 0) of 1b and of 1b*."""
    role, _, offset = end.rstrip("*").partition("+")
    return role, int(offset or 0)


def mark_tokens(end, task, places):
    """(B, N, T) in row n 1 at the token that is this end in the chain of query n, and 0 elsewhere;
    places (B, N, roles) as in a Batch. In the sequence A2 B2  A1 B1  A2 A1:

        end     query A2       query A1
        1b      0 1 0 0 0 0    0 0 0 1 0 0
        1b+1    0 0 1 0 0 0    0 0 0 0 1 0    all 0 if it is beyond the end
        1b*     0 1 0 1 0 0    0 1 0 1 0 0    the same for every query"""
    role, offset = split_end(end)
    tokens = places[:, :, [*task.roles].index(role)] + offset  # (B, N)
    marks = (tokens[:, :, None] == torch.arange(task.T, device=tokens.device)).float()
    if end.endswith("*"):
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
    """A model on clean sequences in which some edges are ablated: attention times value along them
    is that of corrupted sequences, others of the same task. In mean ablation a token gets the mean
    of what the token at its place reads in all of them, in resample ablation what it reads in one;
    a place has the same role in every sequence. All ablations happen in one forward, so that later
    heads attend in the stream that results.

    clean: a Batch of B sequences. corrupted: a Batch of n others, by default 256 held-out ones
    aligned: in resample ablation clean sequence b gets corrupted sequence b, not one at random
    measure: f(predictions, batch) -> (B, N, targets), by default task.losses

    Never ablated are a token's own value, the MLPs, the residual stream and the denominators of
    softmax. In resample ablation all heads get the same corrupted sequence, so a check whether two
    heads read the same still passes, and seems unneeded. And unusual activations can do harm by
    themselves: a path that carries nothing may look needed."""

    def __init__(self, model, task, clean, corrupted=None, aligned=False, measure=None):
        self.model, self.task, self.clean = model, task, clean
        self.measure = measure or task.losses
        self.corrupted = corrupted or task.draw("corrupted", 256).to(clean.inputs.device)
        self.corrupted_reads = record_reads(model, self.corrupted.inputs)
        B, n = len(clean.inputs), len(self.corrupted.inputs)
        at_random = torch.randint(n, (B,), generator=torch.Generator().manual_seed(0))
        self.drawn = torch.arange(B) if aligned else at_random  # from corrupted, for each clean one
        self.itself = torch.eye(task.T, dtype=torch.bool, device=clean.inputs.device)

    def losses(self, heads):
        """The losses (B, N, targets), or scores, with these functions {(layer, head): f}."""
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
        """The losses of these paths alone, with all else ablated in all heads at once."""
        groups, heads = by_head(paths), self.model.heads
        return self.losses({head: self.patch(head, groups[head], ablation) for head in heads})

    def knock_out(self, paths, ablation=MEAN):
        """The losses of the full model without these paths."""
        groups = by_head(paths)
        return self.losses(
            {head: self.patch(head, groups[head], ablation, True) for head in groups}
        )

    def patch(self, head, paths, ablation, ablate_them=False):
        """The f that replaces a head and keeps the edges of these paths alone, or, to ablate them,
        all others. A token writes
        1. what it reads along the edges that are kept, of values v in this forward,
        2. what it reads of other tokens along all other edges in corrupted sequences, of values u,
        3. its own v, which is never ablated: by its attention in this forward if it keeps an edge,
           even to itself, since 1 and 3 share one softmax, and by that of 2 if it keeps none.

        Token 3 of four, whose attention is .1 .6 .1 .2, and corrupted .2 .1 .4 .3, writes

            if it keeps the edge to 1, and there to 2:   .6 v1 + .2 u0 + .1 u1 + .2 v3
            if it keeps none in either:                  .2 u0 + .1 u1 + .4 u2 + .3 v3"""
        if ablation not in BOTH:
            raise ValueError(f"ablation must be {MEAN!r} or {RESAMPLE!r}, not {ablation!r}")
        own = self.itself
        keep = mark_edges(paths, self.task, self.clean.places)  # (B, T, T)
        keep_corrupted = mark_edges(paths, self.task, self.corrupted.places)  # (n, T, T)
        if ablate_them:
            keep, keep_corrupted = ~keep, ~keep_corrupted
        alone = ~keep.any(-1, keepdim=True)  # (B, T, 1) the tokens that keep no edge

        def instead(x):  # of the corrupted (n, ...): their mean (...), or those drawn (B, ...)
            return x.mean(0) if ablation == MEAN else x[self.drawn]

        pattern, values = self.corrupted_reads[head]  # (n, T, T), (n, T, size)
        elsewhere = instead((pattern * ~(keep_corrupted | own)) @ values)
        corrupted_pattern = instead(pattern)

        def write(pattern, values):
            weights = torch.where(own & alone, corrupted_pattern, pattern * (keep | own))
            return weights.to(values) @ values + elsewhere.to(values)

        return write


# ---- whether a circuit still answers, by its losses (B, N, targets)

LOST = 0.01  # the largest share of lost answers on a symbol


def lost_answers(patched, losses):
    """(B, N, targets) True where the loss is above half of task.chance (0.375 for N = 4), and that
    of the full model is not."""
    limit = patched.task.chance / 2
    return (losses > limit) & (patched.baseline <= limit)


def failures(patched, losses, margin=1.0):
    """Texts that say why a circuit with these losses is not faithful. It is, and there are none, if
    for every symbol the mean is below task.faithful_below (0.05), and at most 1% of the answers are
    lost. A margin below 1 makes both limits stricter."""
    task, texts = patched.task, []
    means = losses.mean((0, 1)).tolist()
    shares = lost_answers(patched, losses).float().mean((0, 1)).tolist()
    for name, loss, share in zip(task.target_names, means, shares, strict=True):
        if loss >= margin * task.faithful_below:
            texts.append(f"{name} has a loss of {loss:.3f}")
        if share > margin * LOST:
            texts.append(f"{share:.1%} of the answers on {name} are lost")
    return texts


def symbol_means(values, task):
    """{symbol: mean} of values (B, N, targets), as the report has them."""
    means = [round(mean, 5) for mean in values.float().mean((0, 1)).tolist()]
    return dict(zip(task.target_names, means, strict=True))


# ---- search: all paths with enough attention are candidates, and those that can go are dropped

SEARCHED = 256  # sequences to search on
FLOOR = 0.1  # times 1/N: the lowest score of a candidate
REACH = 4  # intermediate tokens are at most so many tokens after a slot
MARGIN = 0.9  # of the limits in the search, so that fresh sequences pass too


def candidates(patched):
    """{Path: score} of the candidates, in the order in which the search takes them: paths between
    roles, then those with intermediate tokens (which may be roles of other chains), then stars
    between roles; of each kind the highest score first. The score of a path is the attention to its
    own chain less that to an average other one, since what reads all chains alike is a star; that
    of a star is the attention to all. Both are means over corrupted sequences and chains."""
    task, places = patched.task, patched.corrupted.places
    roles, floor, scores = [*task.roles], FLOOR / task.N, {}
    ends = roles + [f"{slot[-1]}+{i}" for slot in task.chain_slots for i in range(1, REACH + 1)]
    marks = torch.stack([mark_tokens(end, task, places) for end in ends], 2)  # (B, N, ends, T)
    for head, (pattern, _) in patched.corrupted_reads.items():
        # [i, j]: the attention of end i to end j, of its own chain, of all, of an average other
        given = marks @ (pattern * ~patched.itself)[:, None]  # (B, N, ends, T) to each token
        own = (given @ marks.mT).mean((0, 1))  # (ends, ends)
        every = (given @ marks.sum(1, keepdim=True).mT).mean((0, 1))
        other = (every - own) / max(task.N - 1, 1)

        for i, j in (own - other >= floor).nonzero().tolist():
            scores[Path(*head, ends[i], ends[j])] = (own - other)[i, j].item()
        of_roles = every[: len(roles), : len(roles)]
        for i, j in (of_roles >= floor).nonzero().tolist():
            scores[Path(*head, roles[i], f"{roles[j]}*")] = of_roles[i, j].item()

    drop_loose(scores)
    ranked = sorted(scores, key=lambda path: (path.star, "+" in str(path), -scores[path]))
    return {path: scores[path] for path in ranked}


def drop_loose(paths):
    """Drop from {Path: score} the paths that can carry nothing. An intermediate token shows nothing
    of the chain, it passes on what it has read: q -> 1b+1 helps only if 1b+1 reads something in an
    earlier layer, and 1b+1 -> 1b only if 1b+1 is read in a later one."""

    def is_loose(path):
        fed = any(other.reader == path.read and other.layer < path.layer for other in paths)
        used = any(other.read == path.reader and other.layer > path.layer for other in paths)
        return ("+" in path.read and not fed) or ("+" in path.reader and not used)

    while loose := [*filter(is_loose, paths)]:  # others may hang on those that go
        for path in loose:
            del paths[path]


def search(patched, paths, ablations):
    """A set of these paths that is a circuit under each of these ablations, and from which no
    single one can be dropped; None if not even all of them together are one."""

    @functools.cache
    def is_circuit(paths):
        show(f"search: {len(paths)} paths")
        return not any(
            failures(patched, patched.keep_only(paths, ablation), MARGIN) for ablation in ablations
        )

    return prune([*paths], is_circuit)


def prune(paths, test):
    """A set of these paths that passes a test, from which no single one can be dropped; None if all
    of them together fail. Of two that can stand for each other, the first is kept: the preferred
    explanation of Junker (2004), here by bisection."""
    if not test(frozenset(paths)):
        return None

    # if fewer paths pass, more mostly do too. Bisection finds the smallest n for which the first n
    # pass: the last of these is needed. Then the smallest n for which they pass with it, and so on
    needed = frozenset()
    while not test(needed):
        n = bisect_left(range(len(paths)), True, key=lambda n: test(needed.union(paths[:n])))
        needed |= {paths[n - 1]}
        paths = paths[: n - 1]

    # mostly, not always: one that was needed may go once others went
    while idle := [path for path in needed if test(needed - {path})]:
        needed -= {max(idle)}
    return needed


# ---- the report, on fresh clean sequences


def arrivals(paths, task):
    """[(layer, {token: {k of each x_k that may have arrived}}), ...], an upper bound of the
    information flow (Section 5): first at the input, -1, then after each layer that has paths, in
    which a reader gets what the tokens that it reads held before. With 1b -> 1a, then q -> 1b:

        [(-1, {q: {0}, 1a: {0}, 1b: {1}}), (0, {... 1b: {0, 1}}), (1, {... q: {0, 1}})]"""
    holds = collections.defaultdict(set)  # an intermediate token holds nothing at first
    holds.update({role: {k} for role, k in task.roles.items()})
    stages = [(-1, holds)]
    for layer in sorted({path.layer for path in paths}):
        before, holds = holds, holds.copy()
        for path in paths:
            if path.layer == layer:
                holds[path.reader] = holds[path.reader] | before[path.token]
        stages.append((layer, holds))
    return stages


def validate(fresh, paths, ablations):
    """What the report says of a circuit as a whole. It is validated if on fresh sequences
    1. it is faithful under these ablations,
    2. the full model is no longer faithful when its paths are ablated by their mean, and
    3. its paths lead from each target to the query."""
    task, reasons = fresh.task, []
    report = dict(paths=paths, ablation=ablations[0], lost={})
    for ablation in MEAN, RESAMPLE:
        losses = fresh.keep_only(paths, ablation)
        report[ablation] = symbol_means(losses, task)
        report["lost"][ablation] = symbol_means(lost_answers(fresh, losses), task)
        if ablation in ablations:
            reasons += [f"under {ablation} ablation {text}" for text in failures(fresh, losses)]
    without = fresh.knock_out(paths)
    report["knocked_out"] = symbol_means(without, task)
    if not failures(fresh, without):
        reasons.append("the full model does as well without it")
    _, holds = arrivals(paths, task)[-1]
    for k in sorted({*task.targets} - holds["q"]):
        reasons.append(f"no paths lead from x_{k} to the query")

    kind = "both ablations" if ablations == BOTH else "mean ablation alone"
    said = f"not validated: {'; '.join(reasons)}" if reasons else f"validated under {kind}"
    return dict(report, validated=not reasons, verdict=said)


def best_circuit(searched, fresh, scores):
    """What validate says of the first validated circuit that up to four searches find among
    candidates {Path: score}; of the first one found if none is validated; {} if none is found."""
    plain = [path for path in scores if not path.star]
    by_score = sorted(plain, key=scores.get, reverse=True)

    def attempt(paths, ablations):
        circuit = search(searched, paths, ablations)
        return {} if circuit is None else validate(fresh, circuit, ablations)

    def attempts():
        yield attempt(plain, BOTH)
        with_stars = attempt(scores, [MEAN])
        # resampling may also need a star because what is read along it in another sequence does
        # harm. We suppose that a star which carries something is needed under the mean too
        if any(path.star for path in with_stars.get("paths", [])):
            yield attempt(scores, BOTH)
        yield with_stars
        yield attempt(by_score, BOTH)  # before, all intermediate tokens came after all roles

    first = {}
    for found in attempts():
        if found.get("validated"):
            return found
        first = first or found
    return first


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
    that main writes into circuit.json, with the dtype and a hash of the weights:

    full_model, mean, resample, knocked_out: {symbol: loss} of the full model, of the circuit under
        each ablation, of the full model with its paths ablated
    lost: {ablation: {symbol: share of lost answers}}
    paths: as measure_paths says; ablation: that of their `without`; validated, verdict, sequences

    model: anything on the CPU that has `heads`, the list of its (layer, head), and can be called
    like model.Transformer: model(inputs, heads={(layer, head): f}) -> (B, N, task.outputs)."""
    report = dict(validated=False, sequences=count, lost={}, paths=[])
    if not task.roles:
        return dict(report, verdict="not searched: the task has no roles")

    searched = PatchedModel(model, task, task.draw("search", SEARCHED))
    fresh = PatchedModel(model, task, task.draw("circuits", count))
    report["full_model"] = symbol_means(fresh.baseline, task)
    if reasons := failures(fresh, fresh.baseline, MARGIN):
        return dict(report, verdict=f"not searched: in the full model {'; '.join(reasons)}")

    scores = candidates(searched)
    found = best_circuit(searched, fresh, scores)
    show()
    if not found:
        reasons = failures(searched, searched.keep_only(scores), MARGIN)
        said = f"not validated: with all {len(scores)} candidates {'; '.join(reasons)}"
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
    for key in "full_model", MEAN, RESAMPLE, "knocked_out":
        cells = [f"{name} {loss:.4f}" for name, loss in report.get(key, {}).items()]
        print(f"  {key:12s}", *cells, sep="  ")

    if rows := paths_in(report):
        print(f"\nthe worst symbol without a path (circuit under {report['ablation']} ablation)")
        print("path                 attention   full model rises by   circuit has")
        for path, row in rows.items():
            cost, without = max(row["cost"].values()), max(row["without"].values())
            print(f"{path!s:21s}{row['attention']:9.2f}{cost:22.3f}{without:14.3f}")
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
