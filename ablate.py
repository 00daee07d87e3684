"""Find the circuit of a trained transformer, and validate it (Section 8).

    python ablate.py out/L12_H1_D3_s0    # prints the report and writes it into circuit.json

A circuit is a set of paths, along which tokens read other tokens. It is tested by replacing all
that they read of others elsewhere: if the model still answers, these paths carry the answers.
Figures that show the circuit of an earlier search are deleted, for analyze.py to draw again.
"""

import collections
import functools
import pathlib
import re
from typing import NamedTuple

import train
from data import command_line, held_out, progress, show

import torch


# ---- paths, and the edges that they have in a sequence


class Path(NamedTuple):
    """One kind of attention edge (the paper's word is path). L6H0: q -> 1b says that in layer 6,
    head 0, both counted from 0, the query of each chain reads the token 1b of its own chain;
    L6H0: q -> 1b*, a star, that it reads the tokens 1b of all chains. Its ends are q and 1b, or
    1b*."""

    layer: int
    head: int
    # a role, 3b, or an intermediate token, which passes on what it has read: 3b+1 is the one right
    # after 3b, of whichever chain
    reader: str
    read: str  # the same, or a star: 3b* in all chains

    def __str__(self):
        return f"L{self.layer}H{self.head}: {self.reader} -> {self.read}"

    @property
    def star(self):
        return self.read.endswith("*")

    @property
    def token(self):
        """What is read, without the star."""
        return self.read.rstrip("*")


def parts_of(end):
    """Return (role, offset) of an end of a path: ("3b", 1) of 3b+1, ("3b", 0) of 3b and 3b*."""
    role, offset = re.fullmatch(r"(\w+)(\+\d+)?\*?", end).groups()
    return role, int(offset or 0)


def marks_of(end, task, positions):
    """Return (B, N, T): in row n, 1 at the token that is this end of a path in the chain of query
    n, and 0 elsewhere. positions (B, N, roles) as in a Batch. In the sequence A2 B2  A1 B1  A2 A1:

        end     query A2       query A1
        1b      0 1 0 0 0 0    0 0 0 1 0 0
        1b+1    0 0 1 0 0 0    0 0 0 0 1 0    all 0 if it is after the last token
        1b*     0 1 0 1 0 0    0 1 0 1 0 0    the same for every query"""
    role, offset = parts_of(end)
    tokens = positions[:, :, [*task.roles].index(role)] + offset  # (B, N)
    marks = (tokens[:, :, None] == torch.arange(task.T, device=tokens.device)).float()
    if end.endswith("*"):
        marks = marks.sum(1, keepdim=True).expand_as(marks)
    return marks


def mask_of(paths, task, positions):
    """Return the edges of these paths, whatever their layer and head, (B, T, T) bool: True at
    [b, i, j] if in sequence b token i reads token j along one of them. In the sequence above the
    queries are tokens 4 and 5, and q -> 1b has the edges [4, 1] and [5, 3]. A path may lead a token
    to itself: after A2 B2  A1 B1 the query A1, if it is first, is its own 1b+1."""
    edges = torch.zeros(len(positions), task.T, task.T, dtype=torch.bool, device=positions.device)
    if paths:
        readers = torch.cat([marks_of(path.reader, task, positions) for path in paths], 1)
        read = torch.cat([marks_of(path.read, task, positions) for path in paths], 1)
        edges |= readers.mT @ read > 0  # (B, T, paths * N) @ (B, paths * N, T)
    return edges


def mean_attention(pattern, path, task, positions):
    """Return the attention along this path to other tokens in a pattern (B, T, T), a number: the
    mean over all readers that are there, for 3b+1 may be beyond the end."""
    itself = torch.eye(task.T, dtype=torch.bool, device=pattern.device)
    edges = mask_of([path], task, positions) & ~itself
    readers = marks_of(path.reader, task, positions).sum()
    return (pattern * edges).sum() / readers.clamp(min=1)


def by_head(paths):
    """Return {(layer, head): [path, ...]}, the paths of each head, sorted."""
    heads = {}
    for path in sorted(paths):
        heads.setdefault((path.layer, path.head), []).append(path)
    return heads


# ---- ablation

MEAN, RESAMPLE = "mean", "another sequence"  # mean ablation, resample ablation
BOTH = RESAMPLE, MEAN  # the one that fewer circuits pass comes first
LOST = 0.01  # the largest share of lost answers on a symbol


@torch.no_grad()
def reads_of(model, inputs):
    """Return what each head reads in inputs (B, T, numbers), {(layer, head): (pattern (B, T, T),
    values (B, T, size))}. ValueError if the model does not call each f once with such arguments."""
    if not getattr(model, "heads", None):
        raise ValueError("the model must have `heads`, the list of its (layer, head)")
    B, T = inputs.shape[:2]
    reads = {}

    def record(pattern, values, head):
        if head in reads or pattern.shape != (B, T, T) or values.shape[:2] != (B, T):
            text = "once, with a pattern (B, T, T) and values (B, T, size)"
            raise ValueError(f"the model must call f of {head} {text}")
        reads[head] = pattern.float().clone(), values.float().clone()  # a model may reuse memory
        return pattern @ values

    model(inputs, heads={head: functools.partial(record, head=head) for head in model.heads})
    if unread := {*model.heads} - reads.keys():
        raise ValueError(f"the model never calls f of {unread}")
    return reads


class PatchedModel:
    """A model on clean sequences in which some edges are ablated: attention times value along them
    is replaced by attention times value in corrupted sequences, others of the same task. In mean
    ablation a token gets the mean of what the token at its place reads in the corrupted sequences,
    in resample ablation what it reads in one of them. As a place has the same role in every
    sequence, a 2b gets what a 2b reads, of some chain. All ablations happen in one forward, so that
    later heads attend in the stream that results.

    clean: a Batch of B sequences. corrupted: a Batch of n others, by default 256 held-out ones
    aligned: in resample ablation clean sequence b gets corrupted sequence b, not one at random
    score: f(predictions, batch) -> (B, N, targets), by default task.losses; `lost` and what
        follows from it take it for a loss. Gradients flow unless the caller forbids them

    Its limits: a token's own value, the MLPs, the residual stream and the denominators of softmax
    are never ablated, nor what bypasses the heads in a model of your own. In resample ablation all
    heads get the same corrupted sequence: if the model checks whether two heads read the same, they
    still do, and the check seems unneeded. And unusual activations can do harm by themselves, so
    that a path looks needed that carries nothing."""

    def __init__(self, model, task, clean, corrupted=None, aligned=False, score=None):
        self.model, self.task, self.clean = model, task, clean
        self.score = score or task.losses
        self.corrupted = corrupted or task.batch(held_out("means", 256, clean.inputs.device))
        self.corrupted_reads = reads_of(model, self.corrupted.inputs)
        B, n = len(clean.inputs), len(self.corrupted.inputs)
        self.drawn = torch.randint(n, (B,), generator=torch.Generator().manual_seed(0))
        if aligned:
            self.drawn = torch.arange(B)  # the corrupted sequence for each clean one
        self.itself = torch.eye(task.T, dtype=torch.bool, device=clean.inputs.device)

    def losses(self, heads):
        """Return the losses (B, N, targets), or scores, with these functions {(layer, head): f}."""
        predictions = self.model(self.clean.inputs, heads=heads)
        shape = len(self.clean.inputs), self.task.N, self.task.outputs
        if predictions.shape != shape or not predictions.isfinite().all():
            raise ValueError(f"the model must return finite predictions {shape}")
        return self.score(predictions, self.clean)

    @functools.cached_property
    def baseline(self):
        """The losses of the full model."""
        return self.losses({})

    def edges_of(self, paths):
        """Return the edges of these paths in the clean (B, T, T) and the corrupted (n, T, T)."""
        clean = mask_of(paths, self.task, self.clean.positions)
        return clean, mask_of(paths, self.task, self.corrupted.positions)

    def mean_or_drawn(self, x, by):
        """Return what clean sequences get of x (n, ...) of the corrupted ones: for mean ablation
        the mean (...), for resample ablation x of the one that was drawn for each, (B, ...)."""
        if by not in (MEAN, RESAMPLE):
            raise ValueError(f"by must be {MEAN!r} or {RESAMPLE!r}, not {by!r}")
        return x.mean(0) if by == MEAN else x[self.drawn]

    def ablate(self, paths, head, by):
        """Return the f that replaces a head, with these paths, all of this head, ablated."""
        clean_edges, corrupted_edges = self.edges_of(paths)
        pattern, values = self.corrupted_reads[head]
        replacement = (pattern * (corrupted_edges & ~self.itself)) @ values
        replacement = self.mean_or_drawn(replacement, by)

        def write(pattern, values):
            return (pattern * (~clean_edges | self.itself)) @ values + replacement.to(values)

        return write

    def ablate_all_but(self, paths, head, by):
        """Return the f that replaces a head, with all but these paths, all of this head, ablated.
        Tokens have values v and attention in this forward, where other heads are ablated too, and
        values u and corrupted attention in the corrupted sequence, where nothing is. A token writes
        the sum of what it reads
        1. along the paths, of v,
        2. of other tokens elsewhere, of u by corrupted attention,
        3. of itself, of v, since its own value is never ablated: by its attention if it has a path,
           even to itself, since 1 and 3 share one softmax; if not, by corrupted attention, like 2.

        Token 3 of four, whose attention is .1 .6 .1 .2, and corrupted .2 .1 .4 .3, writes

            with a path to 1, in the corrupted sequence to 2:   .6 v_1 + .2 u_0 + .1 u_1 + .2 v_3
            without a path in either:                  .2 u_0 + .1 u_1 + .4 u_2          + .3 v_3
        """
        clean_edges, corrupted_edges = self.edges_of(paths)
        has_path = clean_edges.any(-1)  # (B, T)

        pattern, values = self.corrupted_reads[head]
        elsewhere = (pattern * ~(corrupted_edges | self.itself)) @ values  # (n, T, size)
        elsewhere = self.mean_or_drawn(elsewhere, by)
        corrupted_to_itself = self.mean_or_drawn(pattern.diagonal(dim1=1, dim2=2), by)

        def write(pattern, values):
            along_paths = (pattern * (clean_edges & ~self.itself)) @ values
            to_itself = pattern.diagonal(dim1=1, dim2=2)  # (B, T)
            to_itself = torch.where(has_path, to_itself, corrupted_to_itself).to(values)
            return along_paths + elsewhere.to(values) + to_itself[:, :, None] * values

        return write

    def circuit(self, paths, by=MEAN):
        """Return the losses of these paths alone, with all else ablated in all heads at once."""
        groups = dict.fromkeys(self.model.heads, []) | by_head(paths)  # a head may have no path
        return self.losses({head: self.ablate_all_but(groups[head], head, by) for head in groups})

    def knock_out(self, paths, by=MEAN):
        """Return the losses of the full model without these paths."""
        groups = by_head(paths)
        return self.losses({head: self.ablate(groups[head], head, by) for head in groups})

    def lost(self, losses):
        """Return which answers are lost, (B, N, targets) bool: those whose loss is above half of
        the plateau (0.375 for N = 4), and that of the full model is not."""
        return (losses > self.task.lost_above) & (self.baseline <= self.task.lost_above)

    def is_faithful(self, losses, margin=1.0):
        """Return whether a circuit with these losses (B, N, targets) still answers: for every
        symbol the mean is below task.faithful_below (0.05), and at most 1% of the answers are lost.
        A margin below 1 makes both limits stricter."""
        answers = losses.mean((0, 1)).max() < margin * self.task.faithful_below
        return bool(answers and self.lost(losses).float().mean((0, 1)).max() <= margin * LOST)

    def is_circuit(self, paths, ablations, margin=1.0):
        """Return whether these paths alone are faithful under each of these ablations."""
        return all(self.is_faithful(self.circuit(paths, by), margin) for by in ablations)

    def means(self, values):
        """Return {symbol: mean} of values (B, N, targets)."""
        rounded = [round(mean, 5) for mean in values.float().mean((0, 1)).tolist()]
        return dict(zip(self.task.target_names, rounded, strict=True))

    def measure(self, losses):
        """Return {symbol: mean loss} and {symbol: share of lost answers} of losses."""
        return self.means(losses), self.means(self.lost(losses))


# ---- search: all paths with enough attention are candidates, and those that can go are dropped

SEARCHED = 256  # sequences to search on
FLOOR = 0.1  # times 1/N: the lowest score of a candidate
REACH = 4  # intermediate tokens are at most so many tokens after a slot
MARGIN = 0.9  # of the limits of is_faithful in the search, so that fresh sequences pass too


def candidates(patched, floor):
    """Return {Path: score} of the candidates, in the order in which the search takes them: paths
    between roles, then those with intermediate tokens (which may be roles of other chains), then
    stars between roles; of each kind the highest score first. The score of a path is the attention
    to its own chain less that to an average other one, since what reads all chains alike is a star;
    that of a star is the attention to all. Both are means over corrupted sequences and chains."""
    task, positions = patched.task, patched.corrupted.positions
    roles, plain, stars = [*task.roles], {}, {}
    ends = roles + [f"{slot[-1]}+{i}" for slot in task.slots for i in range(1, REACH + 1)]
    marks = torch.stack([marks_of(end, task, positions) for end in ends], 2)  # (B, N, ends, T)
    of_all_chains = marks.sum(1, keepdim=True)  # (B, 1, ends, T)
    for head, (pattern, _) in patched.corrupted_reads.items():
        # the attention of end i to end j, all (ends, ends): if q gives .7 to the 1b of its chain,
        # and .1 and .2 to those of two others, then to_own .7, to_all 1, to_other .15
        given = marks @ (pattern * ~patched.itself)[:, None]  # (B, N, ends, T) from i to each token
        to_own = (given @ marks.mT).mean((0, 1))
        to_all = (given @ of_all_chains.mT).mean((0, 1))
        to_other = (to_all - to_own) / max(task.N - 1, 1)

        surplus = to_own - to_other
        for i, j in (surplus >= floor).nonzero().tolist():
            plain[Path(*head, ends[i], ends[j])] = surplus[i, j].item()
        of_roles = to_all[: len(roles), : len(roles)]
        for i, j in (of_roles >= floor).nonzero().tolist():
            stars[Path(*head, roles[i], f"{roles[j]}*")] = of_roles[i, j].item()

    drop_loose(plain)
    scores = plain | stars
    ranked = sorted(scores, key=lambda path: (path.star, "+" in str(path), -scores[path]))
    return {path: scores[path] for path in ranked}


def drop_loose(paths):
    """Drop from {Path: score} the paths that can carry nothing: an intermediate token shows nothing
    of the chain. q -> 3b+1 helps only if 3b+1 reads something in an earlier layer, and 3b+1 -> 3b
    only if 3b+1 is read in a later one."""

    def is_loose(path):
        fed = any(other.reader == path.read and other.layer < path.layer for other in paths)
        used = any(other.read == path.reader and other.layer > path.layer for other in paths)
        return ("+" in path.read and not fed) or ("+" in path.reader and not used)

    while loose := [*filter(is_loose, paths)]:  # others may hang on those that go
        for path in loose:
            del paths[path]


def search(patched, ranked, ablations):
    """Return a set of these paths that is a circuit under each of these ablations, and from which
    no single one can be dropped; None if not even all of them together are one."""

    @functools.cache
    def faithful(paths):
        show(f"search: {len(paths)} paths")
        return patched.is_circuit(paths, ablations, MARGIN)

    # the first 1, 2, 4, 8, ... paths, until they are faithful
    count = 1
    while not faithful(frozenset(ranked[:count])):
        if count >= len(ranked):
            return None
        count *= 2
    return prune(ranked[:count], faithful)


def prune(ranked, test):
    """Return a set of these paths that passes a test, as all of them do, and from which no single
    one can be dropped. It tries large groups of paths first: of abcdefgh, if none can go, all at
    once; efgh, abcd; gh, ef, cd, ab; h, g, and so on."""

    def drop_groups(paths, size):
        """Return the paths without the groups of this size that can go, the last one first."""
        for end in range(len(paths), 0, -size):
            without = paths[: max(end - size, 0)] + paths[end:]
            if test(frozenset(without)):
                paths = without  # only what is after the group moves: earlier ends still hold
        return paths

    paths, size = ranked, len(ranked)
    while size > 1:
        paths = drop_groups(paths, size)
        size //= 2
    while (fewer := drop_groups(paths, 1)) != paths:  # one that had to stay may go once others went
        paths = fewer
    return frozenset(paths)


# ---- the report, on fresh clean sequences


def arrivals(paths, task):
    """Return [(layer, {token: {k of each x_k that may have arrived}}), ...], an upper bound of the
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


def reached(paths, task):
    """Return the k of all x_k that reach the query along these paths."""
    _, holds = arrivals(paths, task)[-1]
    return holds["q"]


def worst_of(values):
    """Return the symbol with the highest loss, or share of lost answers, as text."""
    worst = max(values, key=values.get)
    return f"{worst} {values[worst]:.3f}"


def worst_of_both(losses, lost):
    return f"loss of {worst_of(losses)}, lost answers of {worst_of(lost)}"


def verdict(fresh, paths, ablations):
    """Return what the report says of a circuit as a whole. It is validated if on fresh sequences
    1. it is faithful under these ablations,
    2. the full model is no longer faithful when its paths are ablated by their mean, and
    3. its paths lead from each target to the query."""
    losses, lost, reasons = {}, {}, []
    for by in MEAN, RESAMPLE:
        alone = fresh.circuit(paths, by)
        losses[by], lost[by] = fresh.measure(alone)
        if by in ablations and not fresh.is_faithful(alone):
            reasons.append(f"with {by} for all else, {worst_of_both(losses[by], lost[by])}")
    without = fresh.knock_out(paths)
    if fresh.is_faithful(without):
        reasons.append("the full model does as well without it")
    for k in sorted({*fresh.task.targets} - reached(paths, fresh.task)):
        reasons.append(f"no paths lead from x_{k} to the query")

    ablation, kind = MEAN, "mean ablation alone"
    if RESAMPLE in ablations:
        ablation, kind = RESAMPLE, "both ablations"
    said = f"not validated: {'; '.join(reasons)}" if reasons else f"validated under {kind}"
    found = dict(ablation=ablation, **losses, lost=lost, knocked_out=fresh.means(without))
    return dict(found, paths=paths, validated=not reasons, verdict=said)


def rows_of(fresh, searched, paths, scores, by):
    """Return the rows of the report on each path, its `attention` in the full model, and
    cost: the rise of the full model's loss without it, by mean ablation
    without: the loss of the circuit without it, under this ablation
    indispensable: whether all candidates in `scores` together are a circuit under this ablation, on
        the sequences of the search, and all without this path and its star are not"""
    reads, rows = reads_of(fresh.model, fresh.clean.inputs), []
    together = searched.is_circuit(scores, [by])
    for path in progress("paths measured", sorted(paths)):
        pattern, _ = reads[path.layer, path.head]
        attention = mean_attention(pattern, path, fresh.task, fresh.clean.positions)
        row = dict(path._asdict(), attention=round(attention.item(), 4))
        row["cost"] = fresh.means(fresh.knock_out([path]) - fresh.baseline)
        row["without"] = fresh.means(fresh.circuit(paths - {path}, by))

        with_star = {path._replace(read=path.token), path._replace(read=f"{path.token}*")}
        others = scores.keys() - with_star
        row["indispensable"] = together and not searched.is_circuit(others, [by])
        rows.append(row)
    return rows


def best_circuit(searched, fresh, scores):
    """Return what verdict says of the circuit among candidates {Path: score}: of the first that is
    validated, of these attempts
    1. plain_both: without stars, under both ablations,
    2. star_both: with stars, under both; only if 3 keeps a star, so that 3 is made before it,
    3. star_mean: with stars, under the mean alone,
    4. by_score: as 1, by score alone, for in 1 all intermediate tokens come after all roles.
    If none is validated, of the first of 3, 1, 4 that found a circuit; {} if none did."""

    def attempt(paths, ablations):
        found = search(searched, paths, ablations)
        return {} if found is None else verdict(fresh, found, ablations)

    ranked = [*scores]
    plain = [path for path in ranked if not path.star]
    plain_both = attempt(plain, BOTH)
    if plain_both.get("validated"):
        return plain_both

    star_mean = attempt(ranked, [MEAN])
    # under both, a star may also be kept because what tokens read along it in another sequence does
    # harm. We suppose that one that carries something is kept under the mean too
    if any(path.star for path in star_mean.get("paths", [])):
        star_both = attempt(ranked, BOTH)
        if star_both.get("validated"):
            return star_both
    if star_mean.get("validated"):
        return star_mean

    by_score = attempt(sorted(plain, key=scores.get, reverse=True), BOTH)
    if by_score.get("validated"):
        return by_score
    return star_mean or plain_both or by_score


@torch.no_grad()
def find_circuit(model, task, count=512):
    """Find the circuit of a model, validate it on `count` sequences, and return the report, a dict
    that main writes into circuit.json, with the dtype and a hash of the weights:

    full_model, mean, another sequence, knocked_out: {symbol: loss} of the full model, of the
        circuit under each ablation, of the full model with its paths ablated
    lost: {ablation: {symbol: share of lost answers}}
    paths: as rows_of says; ablation: that of their `without`; validated, verdict, sequences

    model: anything on the CPU that has `heads`, the list of its (layer, head), and can be called
    like model.Transformer: model(inputs, heads={(layer, head): f}) -> (B, N, task.outputs)."""
    report = dict(validated=False, sequences=count, lost={}, paths=[])
    if not task.roles:
        return dict(report, verdict="not searched: the task has no roles")

    searched = PatchedModel(model, task, task.batch(held_out("search", SEARCHED)))
    fresh = PatchedModel(model, task, task.batch(held_out("circuits", count)))
    full, limit = fresh.means(fresh.baseline), MARGIN * task.faithful_below
    report["full_model"] = full
    if max(full.values()) >= limit:
        said = f"not searched: the full model has {worst_of(full)}, not below {limit:.3f}"
        return dict(report, verdict=said)

    scores = candidates(searched, FLOOR / task.N)
    found = best_circuit(searched, fresh, scores)
    show()
    if not found:
        worst = worst_of_both(*searched.measure(searched.circuit(scores)))
        return dict(report, verdict=f"not validated: all {len(scores)} candidates leave a {worst}")
    rows = rows_of(fresh, searched, found["paths"], scores, found["ablation"])
    return report | found | dict(paths=rows)


# ---- reports in files


def read_report(run, name="circuit.json"):
    """Return the report of find_circuit in a run directory, or another that has its paths; {} if
    there is none. ValueError if the run has been given other weights since."""
    report = train.read_file(pathlib.Path(run, name), {})
    if "weights" in report and report["weights"] != train.weights_hash(run):
        raise ValueError(f"{run}/{name} was made of other weights: make it again, or delete it")
    return report


def paths_in(report):
    """Return {Path: its row} of the circuit in a report."""
    rows = {}
    for row in report.get("paths", []):
        rows[Path(row["layer"], row["head"], row["reader"], row["read"])] = row
    return rows


# ---- the command line


def print_report(report):
    """Print the report in lines that explain themselves."""
    print(f"losses on {report['sequences']} fresh sequences (share of lost answers)")
    for key in "full_model", MEAN, RESAMPLE, "knocked_out":
        shares, cells = report["lost"].get(key, {}), []
        for name, loss in report.get(key, {}).items():
            share = f" ({shares[name]:.1%})" if name in shares else ""
            cells.append(f"{name} {loss:.4f}{share}")
        if cells:
            print(f"  {key:16s}", *cells, sep="  ")

    rows = paths_in(report)
    if rows:
        print(f"\nthe worst symbol without a path (all else in the circuit: {report['ablation']})")
        print("path                 attention   full model rises by   circuit has")
        for path, row in rows.items():
            cost, without = max(row["cost"].values()), max(row["without"].values())
            print(f"{path!s:21s}{row['attention']:9.2f}{cost:22.3f}{without:14.3f}")
        count = sum(row["indispensable"] for row in rows.values())
        print(f"indispensable: {count} of {len(rows)}; without one, all candidates together fail")
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
    for name in "circuit", "attention_maps", "emergence", "paths":
        (run / f"{name}.png").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
