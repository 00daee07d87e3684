"""The circuits that ablate.py found in many runs: which are validated, and what else is asked.

    python -m extras.studies.circuits results/runs/default.jsonl          # prints the tables
    python -m extras.studies.circuits results/*/ --out results/figures    # asks weights

What is asked of each run goes into circuits.jsonl, a row each, the first four of runs with a
circuit, the last of those without a complete one:

    complete: how alike circuit and full model remain without the same two paths, the mean and the
        largest difference of their losses over all pairs (Wang et al., 2023)
    null: how many other sets of as many paths, drawn from the paths that matter, are faithful
        under the mean
    stability: how many of the paths are found again by each whole search on other sequences
    itself: the heads in which the circuit needs what a token reads of itself
    freed: for each ablation the losses of the paths (of all along which the model attends, if there
        is no circuit), the head that helps most if nothing in it is ablated, and the losses then;
        losses are [symbol by symbol, share of lost sequences]
"""

import itertools
import random

import train
from ablate import ANOTHER, MEAN, PatchedModel, attended, by_head, find_circuit, passes, paths_in
from data import held_out, progress
from extras.studies import command, markdown, span
from extras.studies.rows import RESULTS, committed, name_of
from extras.studies.theory import least_layers

import torch


# ---- what is asked of a run with weights


def without_itself(patched, paths, head):
    """Return the losses of a circuit, (sequences, symbols), in which one head reads the mean over
    sequences where a token reads itself."""
    pattern, values = patched.reference.reads[head]
    own = (pattern.diagonal(dim1=1, dim2=2)[..., None] * values).mean(0)  # (T, size)
    others = 1 - torch.eye(pattern.shape[-1])
    kept = patched.ablate(head, by_head(paths).get(head, ()))

    def write(pattern, values):
        return kept(pattern * others, values) + own.to(values)

    return patched.circuit(paths, changed={head: write})


def searches(model, flags, threshold, count):
    """Return [{path, ...}, ...] of whole searches, each on the sequences of another seed."""
    found = []
    for seed in progress("search", range(10**6, 10**6 + count)):
        report = find_circuit(model, flags.replace(seed=seed), threshold)
        found.append({*paths_in(report)})
    return found


def freed(patched, paths):
    """Return {ablation: [losses, "L1H0", losses with nothing in this head ablated]}."""
    found = {}
    for by in MEAN, ANOTHER:
        without = {}
        for head in progress("freed head", [*patched.reference.reads]):
            without[head] = patched.circuit(paths, by, {head: torch.matmul})
        best = min(without, key=lambda head: without[head].mean(0).max().item())
        rows = []
        for losses in patched.circuit(paths, by), without[best]:
            means = [float(f"{loss:.4g}") for loss in losses.mean(0).tolist()]
            rows.append([means, patched.lost(losses)])
        found[by] = [rows[0], "L{}H{}".format(*best), rows[1]]
    return found


@torch.no_grad()
def ask(row, count=3, n=64):
    """Return the row of circuits.jsonl of a run directory with weights; count: the searches; n: the
    sequences of all other questions."""
    model, flags = train.load(row["folder"])
    report, threshold = row["report"], row["report"]["threshold"]
    paths = frozenset(paths_in(report))
    patched = PatchedModel(model, flags, train.sequences(flags, held_out("circuits", n)))
    answers = dict(run=name_of(row))
    if "complete" not in report["verdict"]:
        found = paths or attended(patched.reference, flags.problem)[0]
        answers["freed"] = freed(patched, found)
    if not paths:
        return answers

    # complete: all pairs of paths
    differences = []
    for pair in progress("pair of paths", [*itertools.combinations(sorted(paths), 2)]):
        circuit, full = patched.circuit(paths - {*pair}), patched.knock_out(pair)
        differences.append((circuit.mean() - full.mean()).abs().item())

    # null: random sets of the candidates
    candidates, draws = sorted(paths_in(report, "candidates")), random.Random(0)
    sets = {frozenset(draws.sample(candidates, len(paths))) for _ in range(100)} - {paths}
    faithful = [passes(patched, s, [MEAN], threshold) for s in progress("random set", [*sets])]

    # itself: a head at a time
    needed = []
    for head in progress("head", [*patched.reference.reads]):
        if without_itself(patched, paths, head).mean(0).max() >= threshold:
            needed.append("L{}H{}".format(*head))
    again = searches(model, flags, threshold, count)
    return answers | dict(
        paths=[*map(str, sorted(paths))],
        complete=dict(mean=sum(differences) / len(differences), largest=max(differences)),
        null=dict(sets=len(sets), faithful=sum(faithful)),
        stability=dict(same=[len(paths & other) for other in again], of=[*map(len, again)]),
        itself=needed,
    )


# ---- tables


def searched(row):
    """Return whether the model was solved, so that a circuit was looked for, found or not."""
    return not row["report"].get("verdict", "not searched").startswith("not searched")


def worst_symbol(losses):
    """Return "x_2 0.034 [0.032, 0.036]" from {symbol: [mean, low, high]}."""
    name = max(losses, key=lambda name: losses[name][0])
    return "{} {:.3f} [{:.3f}, {:.3f}]".format(name, *losses[name])


def size(row):
    """Return "9/6 in 5/3, 4 stars": the paths and layers of a circuit, each with the fewest
    possible, and how many paths lead to a role of all chains."""
    task, paths = row["flags"].problem, row["report"]["paths"]
    roles = sum(k >= 0 for k in task.roles.values()) - 1  # each must be reached by a path
    layers = max(least_layers(task, row["flags"].causal))
    stars = sum(path["read"].endswith("*") for path in paths)
    text = f"{len(paths)}/{roles} in {len({path['layer'] for path in paths})}/{layers}"
    return text + f", {stars} stars" * bool(stars)


def least_necessary(row):
    """Return the least that the full model loses of a symbol if a path is ablated."""
    paths = row["report"]["paths"]
    return f"{min(max(path['necessary'].values())[0] for path in paths):.3f}"


def lost(row):
    """Return the share of sequences that lose a symbol, under both ablations."""
    return "{faithful:.1%}, {resampled:.1%}".format(**row["report"]["lost"])


COLUMNS = {
    "paths/least in layers/least": size,
    "full model, worst symbol": lambda row: worst_symbol(row["report"]["full_model"]),
    "all else at its mean": lambda row: worst_symbol(row["report"]["faithful"]),
    "of another sequence": lambda row: worst_symbol(row["report"]["resampled"]),
    "sequences lost": lost,
    "least necessary": least_necessary,
}
SEARCHED = "[ABCD]", "default/*", "onset/*", "rope/s?", "conditional/*", "one_layer/*", "shuffled/*"


def circuits_table(rows):
    """Return a row per run that has a report: the verdict, and COLUMNS."""
    lines = []
    for row in (row for row in rows if row["report"]):
        cells = [cell(row) if row["report"].get("paths") else "" for cell in COLUMNS.values()]
        lines.append([name_of(row), row["report"]["verdict"], *cells])
    return markdown(["run", "verdict", *COLUMNS], *lines)


def groups():
    """Return {"A": [row], "default": [row, ...], ...}, the committed runs that were searched."""
    found = {}
    for row in committed(*SEARCHED):
        if searched(row):
            found.setdefault(name_of(row).partition("/")[0], []).append(row)
    return found


def groups_table():
    """Return a row per group of committed runs: how many have a circuit that is validated, and
    ranges over all circuits."""
    lines = []
    for name, rows in groups().items():
        found = [row["report"] for row in rows if row["report"]["paths"]]
        verdicts = [row["report"]["verdict"] for row in rows]
        line = [name, len(rows)]
        line += [sum(kind in text for text in verdicts) for kind in ("complete", "mean alone")]
        reads = [[path["read"] for path in report["paths"]] for report in found]
        line.append(span([*map(len, reads)], "{}"))
        line.append(span([sum("*" in read for read in group) for group in reads], "{}"))
        for key in "full_model", "faithful", "resampled":
            worst = [max(mean for mean, *_ in report[key].values()) for report in found]
            line.append(span(worst, "{:.3f}"))
            shares = [report["lost"][key] for report in found if key in report["lost"]]
            line[-1] += ", " * bool(shares) + span(shares, "{:.1%}")
        lines.append(line)
    head = "runs", "n", "complete", "at the mean alone", "paths", "stars"
    ends = "worst symbol: full model", "all else at its mean, lost", "of another sequence, lost"
    return markdown([*head, *ends], *lines)


def refused():
    """Return the count of complete circuits, and what all paths along which the model attends leave
    in the runs without a validated one."""
    rows = sum(groups().values(), [])
    complete = sum("complete" in row["report"]["verdict"] for row in rows)
    without = [row for row in rows if not row["report"]["validated"]]
    left = [(name_of(row), row["report"]["verdict"].partition("leave ")[2]) for row in without]
    texts = [f"{name} {text.removesuffix(' of sequences lost')}" for name, text in left]
    return f"""\
**{complete} of {len(rows)} runs have a circuit that is validated and complete.**
{len(without)} have none: all paths along which they attend leave a loss, or lose sequences.
{"; ".join(texts)}."""


def one_layer():
    """Return the paths of the circuit of the run that the page shows, and what they cost."""
    [row] = committed("one_layer/L1_H5_N4_D1_s1")
    lines = []
    for path in row["report"]["paths"]:
        name = "L{layer}H{head}: {reader} -> {read}".format(**path)
        costs = (max(path[key].values())[0] for key in ("necessary", "minimal"))
        lines.append([f"`{name}`", f"{path['attention']:.2f}", *(f"{cost:.2f}" for cost in costs)])
    return markdown(["path", "attention", "full model loses", "circuit without it"], *lines)


def compiled_table():
    """Return a row per compiled program: at which noise on the weights the search finds the circuit
    that is known, and what it says at others."""
    programs, lines = {}, []
    for row in train.read_file(RESULTS / "figures/compiled.jsonl"):
        programs.setdefault(row["program"], []).append(row)
    for program, (first, *noisy) in programs.items():
        cells = {}
        for row in first, *noisy:
            exact = row["precision"] == row["recall"] == 1
            said = "exact" if exact else row["verdict"].partition(":")[0]
            cells.setdefault(said, []).append(f"{row['noise']:g}")
        found = "; ".join(f"{said} at {', '.join(noise)}" for said, noise in cells.items())
        lines.append([program, first["shape"], first["paths"], found, first["seconds"]])
    head = "program", "layers x heads", "paths", "at this noise on the weights", "seconds at 0"
    return markdown(head, *lines)


def asked_table():
    """Return a row per circuit of the committed circuits.jsonl."""
    lines = []
    for row in train.read_file(RESULTS / "figures/circuits.jsonl"):
        if "paths" not in row:
            continue
        same, of = (row["stability"][key] for key in ("same", "of"))
        again = ", ".join(f"{a} of {b}" for a, b in zip(same, of, strict=True))
        differ = "{mean:.2f} (at most {largest:.2f})".format(**row["complete"])
        other = "{faithful} of {sets}".format(**row["null"]) if row["null"]["sets"] else "no other"
        itself = " ".join(row["itself"]) or "none"
        lines.append([row["run"], len(row["paths"]), again, other, differ, itself])
    head = "run", "paths", "of those of other searches", "other sets faithful"
    return markdown([*head, "differs without two by", "own token needed in"], *lines)


def freed_table():
    """Return a row for each committed run without a complete circuit: under both ablations the head
    that helps most, and the worst symbol and the lost sequences before and after."""
    lines = []
    for row in train.read_file(RESULTS / "figures/circuits.jsonl"):
        cells = []
        for before, head, after in row.get("freed", {}).values():
            ends = [f"{max(losses):.3f}, {lost:.0%}" for losses, lost in (before, after)]
            cells += [head, " to ".join(ends)]
        if cells:
            lines.append([row["run"], *cells])
    return markdown(
        ("run", f"{MEAN}: freed", "worst, lost", f"{ANOTHER}: freed", "worst, lost"), *lines
    )


def found_again():
    """Return in how many circuits whole searches on other sequences find the same paths."""
    asked = [row for row in train.read_file(RESULTS / "figures/circuits.jsonl") if "paths" in row]
    same = []
    for row in asked:
        found = zip(row["stability"]["same"], row["stability"]["of"], strict=True)
        same.append(all(a == b == len(row["paths"]) for a, b in found))
    searches = f"each of {len(asked[0]['stability']['of'])} searches from scratch"
    return f"**In {sum(same)} of {len(same)} runs {searches} finds the same paths.**"


def papers_table(rows):
    """Return a row per run: steps 5 and 6 of Appendix E."""
    lines = []
    for row in (row for row in rows if "paper" in row["report"]):
        test = row["report"]["paper"]
        removed = [f"{loss:.2f}" for loss in test["removed"]]
        ends = " to ".join(dict.fromkeys([*removed[:1], *removed[-1:]]))
        high = f"{sum(loss >= 0.17 for loss in test['removed'])} of {len(removed)}"
        cells = f"{test['held']:.3f}", f"{test['first_uniform']:.3f}", ends, high, test["passed"]
        lines.append([name_of(row), *cells])
    first = "first useful head uniform (paper: 0.05 to 0.1)"
    head = "hard attention (paper: below 0.05)", first, "after a removal (paper: 0.17 to 0.89)"
    return markdown(["run", *head, "0.17 or more", "passed"], *lines)


def papers_tables():
    """Return the table of the paper's test for A to D, and the count for all runs."""
    tested = [row for row in committed(*SEARCHED) if "paper" in row["report"]]
    passed = sum(row["report"]["paper"]["passed"] for row in tested)
    held = sum(row["report"]["paper"]["held"] < 0.05 for row in tested)
    count = (
        f"**{passed} of {len(tested)} circuits pass it**; {held} pass step 5, a loss below 0.05."
    )
    return f"{papers_table(committed('[ABCD]'))}\n\n{count}"


def tables(rows):
    """Return the tables as text."""
    return f"{circuits_table(rows)}\n\n{papers_table(rows)}"


def draw(rows, out):
    """Put into circuits.jsonl what is asked of the runs that have weights and were searched; a row
    replaces the one of the same run."""
    file = out / "circuits.jsonl"
    kept = {row["run"]: row for row in train.read_file(file)} if file.exists() else {}
    for row in rows:
        if row["folder"] and (row["folder"] / "model.pt").exists() and searched(row):
            kept[name_of(row)] = ask(row)
            train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


if __name__ == "__main__":
    command(__file__, __doc__, tables, draw)
