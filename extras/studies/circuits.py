"""The circuits that ablate.py found in many runs, and whether a second search finds them again.

    python -m extras.studies.circuits results/[ABCD] --out results/figures

circuits.jsonl has a row for each run with weights and a circuit: its number of paths; again, how
many a search on other sequences finds, and how many both have.
"""

import collections

import ablate
import train
from ablate import paths_in
from extras.studies import command, markdown, rows_by, share, span
from extras.studies.rows import RESULTS, committed, name_of, once


GROUPS = {
    "main command": ("default/*", "fresh/default_*"),
    "AdamW with RoPE": ("rope/s[0-9]*",),
    "one layer, 16 heads, N=8": ("one_layer/L1_H16_*",),
    "one layer, 16 heads, N=4": ("fresh/one_layer_*",),
}
BOTH = "validated under both"  # how the verdict begins
MAIN = GROUPS["main command"]

# the reads of pointer doubling, as the compiled program has them, and what each is for; without
# reading ahead, the linear program has q -> 3b in place of 2b -> 3b
SIX = {"1b -> 1a", "2b -> 2a", "3b -> 3a", "q -> 1b", "2b -> 3b", "q -> 2b"}
LINEAR = SIX - {"2b -> 3b"} | {"q -> 3b"}
GAINS = {
    ("1b -> 1a", "2b -> 2a", "3b -> 3a"): "the symbol by which it can be found",
    ("q -> 1b",): "B",
    ("2b -> 3b",): "D, ahead",
    ("q -> 2b",): "C, and D with it",
    ("1b -> 2b",): "C, ahead",
    ("q -> 3b",): "D",
}


# ---- a second search


def draw(rows, out):
    """Search the runs that have weights and a circuit again, on other sequences, and put them into
    circuits.jsonl, in which all others stay."""
    file = out / "circuits.jsonl"
    kept = rows_by(file, "run")
    for row in (row for row in rows if row["folder"] and row["report"].get("paths")):
        model, task, _ = train.load(row["folder"])
        task.seed = 10**6
        report = ablate.find_circuit(model, task)
        paths, other = paths_in(row["report"]).keys(), paths_in(report).keys()
        again = len(other), len(paths & other)
        kept[name_of(row)] = dict(run=name_of(row), paths=len(paths), again=again)
        train.write_file(file, [kept[run] for run in sorted(kept)])
    return file


# ---- the reports


def found(*names):
    """Return the rows of these names that have a validated circuit."""
    return [row for row in committed(*names) if row["report"].get("validated")]


def with_circuit():
    """Return the rows of chain models of more than one layer with a validated circuit, without
    which the model was seen to fail."""
    rows = [row for row in found("*") if row["flags"].layers > 1 and row["flags"].task == "chain"]
    return once([row for row in rows if "knocked_out" in row["report"]])


def kind_of(path):
    return f"{path['reader']} -> {path['read']}"


def kinds_of(row):
    """Return {"q -> 1b", ...}, the kinds of reads in the circuit of a run."""
    return {kind_of(path) for path in row["report"]["paths"]}


def heads_with(row, kind):
    """Return {(layer, head), ...} of the paths of one kind."""
    paths = [path for path in row["report"]["paths"] if kind_of(path) == kind]
    return {(path["layer"], path["head"]) for path in paths}


# ---- pointer doubling


def doubling_table():
    """Return how many circuits of the main command have each read."""
    rows, lines = found(*MAIN), []
    for kinds, gains in GAINS.items():
        ends = [kind.split(" -> ") for kind in kinds]
        counts = ", ".join(str(sum(kind in kinds_of(row) for row in rows)) for kind in kinds)
        readers = ", ".join(reader.replace("q", "query") for reader, _ in ends)
        read = ends[0][1] if len(ends) == 1 else "the other token of its pair"
        lines.append([readers, read, gains, counts])
    return markdown(["token", "reads", "and gains", f"circuits of {len(rows)}"], *lines)


def holds_six(rows):
    return [row for row in rows if kinds_of(row) >= SIX]


def loses_x_3_alone(row):
    """Return whether the circuit without its worst read 2b -> 3b loses x_3, and no other symbol."""
    ahead = [path for path in row["report"]["paths"] if kind_of(path) == "2b -> 3b"]
    worst = max((path["without"] for path in ahead), key=lambda losses: losses["x_3"])
    return worst["x_3"] > 0.5 > max(worst["x_1"], worst["x_2"])


def doubling():
    """Return what the page says of the six reads."""
    rows = found(*MAIN)
    six = holds_six(rows)
    others = [row for row in rows if row not in six]
    linear = [row["name"] for row in others if kinds_of(row) >= LINEAR]
    fresh = [row for row in rows if row["group"] == "fresh"]
    rope, papers = found("rope/s*"), found("[ABC]")
    same_head = [heads_with(row, "2b -> 3b") & heads_with(row, "q -> 1b") for row in six]
    names = [row["name"] + " (linear)" * (row["name"] in linear) for row in others]
    return [
        f"in most circuits of the main command ({len(six)} of {len(rows)})",
        f"in the same layer ({share(map(bool, same_head))})",
        f"lose D, and D alone ({share(map(loses_x_3_alone, six))})",
        f"all six stand in {len(holds_six(fresh))} of the {len(fresh)} seeds 30-39",
        f"Without them are {', '.join(names)}",
        f"With AdamW and RoPE {len(holds_six(rope))} of {len(rope)} hold them; of A, B and C "
        f"{' and '.join(row['name'] for row in holds_six(papers))} alone",
    ]


# ---- the paper's own test


def reuses(row):
    """Return whether the full model of a run loses all its symbols without some path of either kind
    that an induction head needs."""
    full, kinds = row["report"]["full_model"], set()
    for path in row["report"]["paths"]:
        losses = [full[name] + path["cost"][name] for name in row["task"].target_names]
        if min(losses) >= row["task"].learned_below:
            kinds.add(kind_of(path))
    return kinds >= {"q -> 1b", "1b -> 1a"}


def one_hot():
    """Return ([row, ...] that were tested, [row, ...] of them that survive one-hot attention)."""
    tested = [row for row in with_circuit() if "paper" in row["report"]]
    return tested, [row for row in tested if row["report"]["paper"]["held"] < 0.05]


def repeats_a_read(row):
    """Return whether some kind of read stands in several layers or heads of the circuit."""
    return max(collections.Counter(map(kind_of, row["report"]["paths"])).values()) > 1


def papers_claims():
    """Return what did not hold of the paper's claims on single circuits."""
    tested, held = one_hot()
    spare = [min(row["report"]["paper"]["removed"]) < 0.05 for row in held]
    return [
        f"Most of ours survive the first ({len(held)} of {len(tested)})",
        f"can then spare some read ({share(spare)})",
        f"so that one may stand in for another ({share(map(repeats_a_read, held))})",
        f"one of 1a by 1b ({share(map(reuses, with_circuit()))})",
    ]


# ---- how far circuits can be trusted


def seeds(name):
    """Return the runs of a group that were searched once, after the search was frozen, in two
    lists: by the search of commit c79df16, and by that of commit 2b20334."""
    rows = committed(*GROUPS[name])
    earlier = [row for row in rows if row["report"].get("search") == "c79df16"]
    return earlier, [row for row in rows if row["group"] == "fresh"]


def trust_table():
    """Return a row per group and search: on seeds on which the search was not changed."""
    lines = []
    for name in GROUPS:
        for search, rows in zip(("first", "second"), seeds(name), strict=True):
            validated = [row for row in rows if row["report"]["verdict"].startswith(BOTH)]
            sizes = [len(row["report"]["paths"]) for row in rows if row["report"]["validated"]]
            cell = f"{len(validated)} of {len(rows)}"
            if more := len(sizes) - len(validated):
                cell += f" ({more} with the mean alone)"
            lines += [[name, search, cell, span(sizes, "{}")]] * bool(rows)
    return markdown(["runs", "search", "validated under both", "paths"], *lines)


def trust():
    """Return what a second search finds, and that on circuits which are known."""
    again = train.read_file(RESULTS / "figures/circuits.jsonl")
    same = [row["run"] for row in again if {row["paths"]} == {*row["again"]}]
    other = [row["run"] for row in again if row["run"] not in same]
    known = [row["exact"] for row in train.read_file(RESULTS / "figures/compiled.jsonl")]
    programs = [row["program"] for row in train.read_file(RESULTS / "figures/compiled.jsonl")]
    exact = dict(zip(programs[::-1], known[::-1], strict=True))  # the first row has no noise
    by_mean = [[], []]  # on seeds 0-3, on which the search was changed, and on all later ones
    for row in committed("rope_muon/*"):
        if row["report"].get("paths"):
            verdict = row["report"]["verdict"]
            by_mean[row["flags"].seed > 3].append(verdict.startswith("validated under mean"))
    changed, frozen = map(share, by_mean)
    return [
        f"under the mean alone ({frozen} solved runs searched once, {changed} of those on which "
        "the search was changed)",
        f"the same circuits for {', '.join(same[:-1])} and {same[-1]}, and another for "
        f"{' and '.join(other)}",
        f"returns that and nothing else ({share(exact.values())})",
    ]


if __name__ == "__main__":
    command(__file__, __doc__, draw)
