"""The circuits that ablate.py found in many runs, and what else is asked of their weights.

    python -m extras.studies.circuits results/runs/default.jsonl            # prints the tables
    python -m extras.studies.circuits results/[ABCD] --out results/figures  # asks the weights

A run whose weights are asked is a row of circuits.jsonl:

    error: of each head, how far what it reads of other tokens is from the same attention on the
        token itself, relative to how far it is from its mean over sequences
    losses, found: of the heads in which this is below 1, if there are any: the highest loss of a
        symbol of the full model if what they read of other tokens is replaced, and the circuit that
        the search finds if they read the token itself outside of their paths
    again, own: of other runs with a circuit, the number of paths that a search on other sequences
        finds, and of ours among them; the heads in which the circuit needs what a token reads of
        itself
"""

import itertools

import ablate
import train
from ablate import ANOTHER, BOTH, MEAN, PatchedModel, Reference, by_head, mask_of, paths_in
from data import held_out, progress
from extras.studies import command, markdown, rows_by, span
from extras.studies.rows import RESULTS, committed, name_of

import torch


EARLIER = "7025635"  # the commit of an earlier search, in the reports that are by it
GROUPS = {
    "main command": "default/s*",
    "AdamW with RoPE": "rope/s[0-9]*",
    "one layer, 16 heads": "one_layer/L1_H16_*",
    "one layer, 5 and 8 heads": "one_layer/L1_H[58]_*",
    "A to D": "[ABCD]",
    "conditional retrieval": "conditional/*",
    "three layers, shuffled blocks": "shuffled/*",
    "main command in float32": "onset/*",
}


# ---- heads that read of other tokens what the token itself shows


def errors(reference):
    """Return {head: error} of what each head reads of other tokens in a Reference. The error is the
    squared distance to the same attention on the token itself, relative to that to the mean over
    sequences: below 1 in a head that copies a symbol from tokens that show the same one. A head
    that reads nothing has none."""
    found = {}
    for head, (pattern, values) in reference.reads.items():
        others = pattern - torch.diag_embed(pattern.diagonal(dim1=1, dim2=2))
        read, given = others @ values, others.sum(-1, keepdim=True)  # (n, T, size), (n, T, 1)
        from_itself = (read - given * values).square().sum()
        from_mean = (read - read.mean(0)).square().sum()
        if from_mean > 0:
            found[head] = (from_itself / from_mean).item()
    return found


class Copying(PatchedModel):
    """A patched model in which some heads read nothing of a reference: what a token attends to
    outside of their paths, it reads of itself."""

    def __init__(self, model, flags, numbers, heads, reference=None):
        super().__init__(model, flags, train.sequences(flags, numbers), reference)
        self.copying = heads

    def ablate(self, head, paths, keep=True, by=MEAN):
        if not keep or head not in self.copying:
            return super().ablate(head, paths, keep, by)
        along = mask_of(paths, self.problem, self.batch.positions)

        def write(pattern, values):
            outside = (pattern * ~along).sum(-1, keepdim=True)
            return (pattern * along) @ values + outside * values

        return write


def search_copying(model, flags, heads, threshold, count=1024):
    """Return (paths, part of the report) as find_circuit does, with these heads copying. Stars are
    no candidates: in rope_s4, on which this was developed, they cost over 1% of the answers."""
    reference = Reference(model, flags)
    donors = Reference(model, flags, train.sequences(flags, held_out("means", 512)[256:]))
    numbers = held_out("search", ablate.FEW + ablate.MANY)
    few = Copying(model, flags, numbers[: ablate.FEW], heads, reference)
    many = Copying(model, flags, numbers[ablate.FEW :], heads, reference)
    fresh = Copying(model, flags, held_out("circuits", count), heads, donors)
    for ablations, floor in itertools.product((BOTH, (MEAN,)), ablate.SHARES):
        ranked = ablate.candidates(reference, flags.problem, floor / flags.N)
        ranked = [path for path in ranked if not path.star]
        paths = ablate.search(few, many, ranked, ablations, ablate.MARGIN * threshold)
        if paths is not None:
            return paths, ablate.verdict(fresh, paths, ablations, threshold)
    return frozenset(), dict(verdict="not validated")


def replaced(model, flags, heads, n=256):
    """Return {what replaces what these heads read of other tokens: the full model's worst loss}."""
    patched = Copying(model, flags, held_out("circuits", n), ())
    copying = Copying(model, flags, held_out("circuits", n), heads, patched.reference)
    found = dict(nothing=patched.baseline)
    for by in BOTH:
        found[by] = patched.losses({head: patched.ablate(head, (), by=by) for head in heads})
    found["itself"] = copying.losses({head: copying.ablate(head, ()) for head in heads})
    return {by: round(losses.mean((0, 1)).max().item(), 4) for by, losses in found.items()}


# ---- what else is asked of a circuit


def without_own_tokens(patched, paths, head):
    """Return the losses of a circuit in which a head reads along its paths alone, and all else at
    its mean over sequences, what a token reads of itself too."""
    group, (pattern, values) = by_head(paths).get(head, ()), patched.reference.reads[head]
    along = mask_of(group, patched.problem, patched.batch.positions)
    there = mask_of(group, patched.problem, patched.reference.batch.positions)
    mean = ((pattern * ~there) @ values).mean(0)  # (T, size)

    def write(pattern, values):
        return (pattern * along) @ values + mean.to(values)

    return patched.circuit(paths, changed={head: write})


@torch.no_grad()
def ask(row, n=64):
    """Return the row of circuits.jsonl of a run directory with weights; n: sequences for own."""
    model, flags = train.load(row["folder"])
    paths, threshold = frozenset(paths_in(row["report"])), row["report"]["threshold"]
    patched = PatchedModel(model, flags, train.sequences(flags, held_out("circuits", n)))
    error = errors(patched.reference)
    answers = dict(run=name_of(row), verdict=row["report"]["verdict"], paths=len(paths))
    answers["error"] = {"L{}H{}".format(*head): float(f"{error[head]:.3g}") for head in error}
    if heads := [head for head in error if error[head] < 1]:
        found, part = search_copying(model, flags, heads, threshold)
        answers["losses"] = replaced(model, flags, heads)
        answers["found"] = dict(paths=[*map(str, sorted(found))], **part)
    elif paths:
        answers.update(own=[])
        for head in progress("head", [*patched.reference.reads]):
            if without_own_tokens(patched, paths, head).mean((0, 1)).max() >= threshold:
                answers["own"].append("L{}H{}".format(*head))
        other = paths_in(ablate.find_circuit(model, flags.replace(seed=10**6), threshold))
        answers["again"] = [len(other), len(paths & other.keys())]
    return answers


# ---- tables of the reports


def worst(report, key):
    """Return "0.011, 0.1%", the highest loss of a symbol under an ablation and, where answers were
    counted, the highest share that is lost; "" of a report without a circuit."""
    if key not in report:
        return ""
    text = f"{max(mean for mean, *_ in report[key].values()):.3f}"
    if key in report["lost"]:
        text += f", {max(mean for mean, *_ in report['lost'][key].values()):.1%}"
    return text


def circuits_table(rows):
    """Return a row per run that has a report."""
    lines = []
    for row in (row for row in rows if row["report"]):
        report, paths = row["report"], paths_in(row["report"])
        stars, layers = sum(path.star for path in paths), {path.layer for path in paths}
        cells = [worst(report, key) for key in ("full_model", *BOTH)]
        cells += [f"{len(paths)}, {stars} in {len(layers)}" if paths else ""]
        verdict = report["verdict"] + f" (by the search of {EARLIER})" * by_earlier([row])
        lines.append([name_of(row), verdict, *cells])
    ends = "full model, worst symbol", "all else at its mean, lost", "of another sequence, lost"
    return markdown(["run", "verdict", *ends, "paths, stars in layers"], *lines)


def by_earlier(rows):
    """Return how many of these reports are by an earlier search."""
    return sum(row["report"].get("search") == EARLIER for row in rows)


def seeds(name, after=False):
    """Return the committed runs of a group that have a report: on seeds on which the search was
    fitted, or on those that were searched once, after it was frozen."""
    rows = [row for row in committed(GROUPS[name]) if row["report"]]
    return [row for row in rows if (row["report"].get("search", EARLIER) != EARLIER) == after]


def counted(rows):
    """Return "9 / 0 / 1 / 0 of 10": validated under both ablations, under the mean alone, not
    validated, not searched because the model has not learned every symbol."""
    kinds = "validated under both", "validated under mean", "not validated", "not searched"
    verdicts = [row["report"]["verdict"] for row in rows]
    counts = [sum(verdict.startswith(kind) for verdict in verdicts) for kind in kinds]
    return f"{' / '.join(map(str, counts))} of {len(rows)}" if rows else "none"


def groups_table():
    """Return a row per group of committed runs: the counts on seeds on which the search was fitted,
    and on seeds searched once after it was frozen; how large the circuits are."""
    lines, commits = [], set()
    for name in GROUPS:
        fitted, new = seeds(name), seeds(name, after=True)
        commits.update(row["report"]["search"] for row in new)
        circuits = [paths_in(row["report"]) for row in fitted + new if row["report"]["validated"]]
        stars = [sum(path.star for path in paths) for paths in circuits]
        sizes = span([*map(len, circuits)], "{}"), span(stars, "{}")
        lines.append([name, counted(fitted), by_earlier(fitted), counted(new), *sizes])
    head = "runs", "seeds on which the search was fitted", f"of these by that of {EARLIER}"
    frozen = ", ".join(sorted(commits)) or "not yet"
    head = *head, f"fresh seeds, searched once after its freeze ({frozen})", "paths", "stars"
    return markdown(head, *lines)


def compiled_table():
    """Return a row per compiled program: at which noise on the weights the search finds the circuit
    that is known, and what it says at others."""
    programs, lines = {}, []
    for row in train.read_file(RESULTS / "figures/compiled.jsonl"):
        programs.setdefault(row["program"], []).append(row)
    for program, rows in programs.items():
        cells = {}
        for row in rows:
            said = "exact" if row["exact"] else row["verdict"].partition(":")[0]
            cells.setdefault(said, []).append(f"{row['noise']:g}")
        found = "; ".join(f"{said} at {', '.join(noise)}" for said, noise in cells.items())
        lines.append([program, rows[0]["shape"], rows[0]["paths"], found, rows[0]["seconds"]])
    head = "program", "layers x heads", "paths", "at this noise (in deviations of the weights)"
    return markdown((*head, "seconds"), *lines)


def papers_test():
    """Return how many committed circuits without stars pass steps 5 and 6 of Appendix E."""
    rows = [row for name in GROUPS for row in seeds(name) + seeds(name, after=True)]
    rows = [row for row in rows if "paper" in row["report"]]
    tests = [row["report"]["paper"] for row in rows]
    held, passed = sum(test["held"] < 0.05 for test in tests), sum(test["passed"] for test in tests)
    return f"""\
**{passed} of {len(tests)} circuits without stars pass both steps, and {held} pass step 5**
({by_earlier(rows)} of the reports are by the search of {EARLIER})."""


# ---- tables of circuits.jsonl


def asked(key):
    """Return the rows of the committed circuits.jsonl that have an answer of this name."""
    return [row for row in train.read_file(RESULTS / "figures/circuits.jsonl") if key in row]


def asked_table():
    """Return a row per run that has a circuit, and no head that copies the token's own symbol."""
    lines = []
    for row in asked("again"):
        cells = f"{min(row['error'].values()):.2f}", " ".join(row["own"]) or "none"
        lines.append([row["run"], row["paths"], *cells, "{1} of {0}".format(*row["again"])])
    ends = "lowest error", "needed of the token itself in", "ours of those of a second search"
    return markdown(["run", "paths", *ends], *lines)


def copying_table():
    """Return a row per run with RoPE: its heads that copy the token's own symbol, if any."""
    lines = []
    for row in (row for row in asked("error") if row["run"].startswith("rope")):
        found = row.get("found", dict(verdict=""))
        heads = ", ".join(f"{head} {x:.2f}" for head, x in row["error"].items() if x < 1)
        rest = min(error for error in row["error"].values() if error >= 1)
        cells = [f"{loss:.3f}" for loss in row.get("losses", {}).values()] or [""] * 4
        for report in row, found:
            cells.append(report["verdict"].removeprefix("validated under ").partition(":")[0])
        lines.append([row["run"], f"{heads or 'none'} ({rest:.2f})", *cells])
    head = "run", "heads, error (lowest of others)", "full model", "by mean", f"by {ANOTHER}"
    return markdown([*head, "by itself", "validated under", "with itself"], *lines)


# ---- the command line


def draw(rows, out):
    """Put into circuits.jsonl what is asked of the runs that have weights and were searched; a row
    replaces the one of the same run."""
    file = out / "circuits.jsonl"
    kept = rows_by(file, "run")
    for row in rows:
        solved = not row["report"].get("verdict", "not searched").startswith("not searched")
        if row["folder"] and solved:
            kept[name_of(row)] = ask(row)
            train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


if __name__ == "__main__":
    command(__file__, __doc__, circuits_table, draw)
