"""The circuits that ablate.py found in many runs, and whether a second search finds them again.

    python -m extras.studies.circuits results/runs/default.jsonl            # prints the tables
    python -m extras.studies.circuits results/[ABCD] --out results/figures  # searches again

circuits.jsonl has a row for each run with weights and a circuit: paths, their number; again, how
many paths a search on other sequences finds, and how many of ours are among them.
"""

import ablate
import train
from ablate import BOTH, paths_in
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


# ---- a second search


@torch.no_grad()
def search_again(row):
    """Return the row of circuits.jsonl of a run directory with weights."""
    model, flags = train.load(row["folder"])
    paths, threshold = paths_in(row["report"]).keys(), row["report"]["threshold"]
    other = paths_in(ablate.find_circuit(model, flags.replace(seed=10**6), threshold)).keys()
    return dict(run=name_of(row), paths=len(paths), again=[len(other), len(paths & other)])


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


def both(name, after=False):
    rows = seeds(name, after)
    return f"{sum('both' in row['report']['verdict'] for row in rows)} of {len(rows)}"


def answer():
    """Return in how many runs a circuit is validated."""
    return f"""\
**Answer.** A circuit is validated under both ablations in {both("main command")} seeds of the main
command on which the search was fitted, and in {both("main command", True)} fresh ones, searched
once after it was frozen. With RoPE it is in {both("AdamW with RoPE")} and
{both("AdamW with RoPE", True)}, in conditional retrieval in {both("conditional retrieval")} runs (5
seeds)."""


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


def again_table():
    """Return a row per run that was searched a second time."""
    rows = train.read_file(RESULTS / "figures/circuits.jsonl")
    lines = [(row["run"], row["paths"], "{1} of {0}".format(*row["again"])) for row in rows]
    return markdown(["run", "paths", "ours of those of a second search"], *lines)


# ---- the command line


def draw(rows, out):
    """Put into circuits.jsonl the runs that have weights and a circuit, the others stay."""
    file = out / "circuits.jsonl"
    kept = rows_by(file, "run")
    for row in rows:
        if row["folder"] and row["report"].get("paths"):
            kept[name_of(row)] = search_again(row)
            train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


if __name__ == "__main__":
    command(__file__, __doc__, circuits_table, draw)
