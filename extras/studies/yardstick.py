"""The search of ablate.py beside the field's methods, on models whose circuit is known.

    python -m extras.studies.yardstick results/[AD] results/default_s0 results/rope_s4

scores.py says what the methods are. They score the candidates of the search on 64 sequences, and
one threshold, chosen on half of the models, is tested on the other half. With "+ search",
ablate.search takes them in this order, stars last, as find_circuit does in that of attention.

yardstick.jsonl has a row per model: family, right [of each candidate True, False, or None if it
shares half of its pairs of tokens with a path of the circuit], scores {method: [of each]}, exact
{method: True, False, None if it refuses}; and a row per run: run, circuit [paths, losses under both
ablations], losses {method: {ablation: [of the worst symbol with the first 0, 1, ... paths]}}.
"""

import itertools
import statistics

import ablate
import analyze
import train
from ablate import ANOTHER, BOTH, FEW, MANY, MARGIN, MEAN, SHARES, PatchedModel, Reference
from data import held_out, progress
from extras import studies
from extras.studies.rows import RESULTS, name_of, rounded
from extras.studies.scores import rankings, worst
from extras.studies.stats import average_precision

import torch


FILE, MOST, THRESHOLD = RESULTS / "figures/yardstick.jsonl", 20, 0.05  # paths drawn; solved below


def patched(model, flags, *parts):
    """Return a PatchedModel for each part, examples, all with one reference."""
    reference = Reference(model, flags)
    return [PatchedModel(model, flags, train.sequences(flags, i), reference) for i in parts]


def compare(family, model, flags, circuit):
    """Return the row of a model whose circuit this is."""
    exact, scores = {}, {}
    report = ablate.find_circuit(model, flags)
    exact["find_circuit"] = {*ablate.paths_in(report)} == circuit if report["validated"] else None

    index, validated = held_out("search", FEW + MANY), held_out("circuits", 1024)
    few, many, fresh = patched(model, flags, index[:FEW], index[FEW:], validated)
    attention = ablate.candidates(few.reference, few.problem, SHARES[1] / flags.N)
    for method, found in rankings(few, attention):
        scores[method] = [*found.values()]
        if method in ("EAP-IG", "knock-out"):
            ranked = sorted(attention, key=lambda path: (path.star, -found[path]))  # noqa: B023
            paths = search(few, many, fresh, ranked)
            exact[f"{method} + search"] = paths and paths == circuit
    right = judge(attention, circuit, few)
    return dict(family=family, right=right, scores=scores, exact=exact)


def search(few, many, fresh, ranked):
    """Return the set that ablate.search finds, if it is validated, else None."""
    for ablations in BOTH, (MEAN,):
        paths = ablate.search(few, many, ranked, ablations, MARGIN * THRESHOLD)
        if paths and ablate.verdict(fresh, paths, ablations, THRESHOLD)["validated"]:
            return paths


def judge(paths, circuit, few):
    """Return `right`."""
    masks, right = {}, []
    for path in {*paths, *circuit}:
        masks[path] = ablate.mask_of([path], few.problem, few.batch.positions)
    for path in paths:
        shared = [0]
        for other in [other for other in circuit if other[:2] == path[:2]]:
            least = min(masks[path].sum(), masks[other].sum())
            shared.append((masks[path] & masks[other]).sum() / least)
        right.append(path in circuit or (None if max(shared) >= 0.5 else False))
    return right


def curves(row):
    """Return the row of a run."""
    model, flags = train.load(row["folder"])
    few, fresh = patched(model, flags, held_out("search", FEW), held_out("circuits", FEW))
    attention, losses = ablate.candidates(few.reference, few.problem, SHARES[0] / flags.N), {}
    attention = {path: given for path, given in attention.items() if not path.star}
    for method, scores in itertools.islice(rankings(few, attention), 4):  # ACDC has no order
        ranked, losses[method] = sorted(scores, key=scores.get, reverse=True), {}
        sets = [ranked[:count] for count in range(MOST + 1)]
        for by in BOTH:
            losses[method][by] = [worst(fresh.circuit(paths, by)) for paths in sets]
    circuit = [*ablate.paths_in(row["report"])]
    ends = [worst(fresh.circuit(circuit, by)) for by in BOTH]
    return dict(run=name_of(row), circuit=[len(circuit), *ends], losses=losses)


def is_exact(row, method, limit):
    """Return whether the paths that score at least this are those of the circuit."""
    pairs = zip(row["scores"][method], row["right"], strict=True)
    taken = [right for score, right in pairs if score >= limit]
    return False not in taken and taken.count(True) == row["right"].count(True)


def table():
    """Return a row per method: average precision and exact circuits by family, and the models
    without a circuit for which it returns one."""
    rows = [row for row in train.read_file(FILE) if "family" in row]
    known = [row for row in rows if True in row["right"]]
    none = [row for row in rows if True not in row["right"]]

    # the threshold that is right for most models of one half, tested on the other half
    methods = list(rows[0]["scores"])
    for method, half in itertools.product(methods, (0, 1)):
        others = known[1 - half :: 2]
        limits = sorted({score for row in others for score in row["scores"][method]})
        counts = [sum(is_exact(row, method, limit) for row in others) for limit in limits]
        best = [n for n, count in zip(limits, counts, strict=True) if count == max(counts)]
        limit = best[len(best) // 2]
        for row in known[half::2] + none[half::2]:
            refused = max(row["scores"][method]) < limit
            row["exact"][method] = None if refused else is_exact(row, method, limit)

    lines, families = [], dict.fromkeys(row["family"] for row in known)
    for method in [*methods, "EAP-IG + search", "knock-out + search", "find_circuit"]:
        line = [method]
        for family in families:
            members = [row for row in known if row["family"] == family]
            exact = [row["exact"][method] is True for row in members]
            line.append(f"{sum(exact)} of {len(exact)}")
            if method in methods:
                found = [average_precision(row["scores"][method], row["right"]) for row in members]
                line[-1] = f"{statistics.mean(found):.2f}; {line[-1]}"
        returned = sum(row["exact"][method] is not None for row in none)
        lines.append([*line, f"{returned} of {len(none)}"])
    return studies.markdown(["", *families, "no circuit, but a set"], *lines)


def draw_curves(file):
    """Draw the losses of the first paths of each ranking, a column per run."""
    rows = [row for row in train.read_file(file) if "run" in row]
    size = dict(sharex=True, sharey=True)
    figure, grid = analyze.panels(2 * len(rows), len(rows), 11 / len(rows), 2, **size)
    for panel, (by, row) in zip(grid, itertools.product(BOTH, rows), strict=True):
        count, *ends = row["circuit"]
        for width, (method, losses) in zip((5, 3.5, 2, 1), row["losses"].items(), strict=True):
            panel.plot(losses[by], ".-", lw=width, label=method)  # lines may lie on one another
        if count:
            panel.plot(count, ends[by == ANOTHER], "k*", ms=10, label="circuit of ablate.py")
        panel.axhline(THRESHOLD, color="gray", ls=":", label="solved")
        panel.set_yscale("log")
        panel.set_title(f"{row['run']}: {by}", fontsize="medium")
    figure.supxlabel("number of paths that are kept")
    figure.supylabel(f"MSE of the worst symbol (n = {FEW})")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    analyze.save_figure(figure, file.with_suffix(".png"))


@torch.no_grad()
def draw(rows, out):
    """Measure, draw, and return the path of the figure."""
    from tests import known  # here, so that the page can be printed where Tracr is not installed

    found = [compare(*model) for model in progress("model", known.models())]
    found += [curves(row) for row in progress("run", rows)]
    train.write_file(out / FILE.name, rounded(found))
    draw_curves(out / FILE.name)
    return out / "yardstick.png"


if __name__ == "__main__":
    studies.command(__file__, __doc__, lambda rows: f"{len(rows)} runs", draw)
