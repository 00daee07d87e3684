"""The paper's own test of circuits (steps 5 and 6 of Appendix E), in which heads attend hard.

    python -m extras.studies.appendix_e results/A results/B    # prints a table of these runs

It also adds "paper", what papers_test returns, to the circuit.json of each run.
"""

import train
from ablate import PatchedModel, mark_edges, paths_in, read_report
from data import command_line
from extras.studies import markdown, share, span
from extras.studies.circuits import by_head

import torch


REMOVAL = 0.17  # the lowest loss after the removal of a path in the paper


def papers_test(few, fresh, paths):
    """Return steps 5 and 6 of Appendix E, as mean losses.

    others: {head: "uniform" or "identity"} of every head without paths, whichever hurts less on
        `few`
    held: heads with paths attend hard along them, the others like that
    uniform: as held, but in the first layer that has paths heads with paths are uniform too
    removed: as held without one path, for each path of a later layer, sorted
    passed: whether held < 0.05 and all of removed >= 0.17"""
    T, first, own = fresh.task.T, min(paths).layer, by_head(paths)
    allowed = fresh.model.mask.exp()  # (T, T) of 0 and 1
    patterns = dict(uniform=allowed / allowed.sum(-1, keepdim=True), identity=torch.eye(T))

    # the f of a head of which no path is kept: nothing if it has any in the circuit
    default, others = dict.fromkeys(own, lambda _, values: 0 * values), {}
    for head in sorted(few.corrupted_reads.keys() - own.keys()):
        losses = {}
        for name, pattern in patterns.items():
            losses[name] = few.losses({head: attend(pattern)}).mean()
        name = min(losses, key=losses.get)
        others["L{}H{}".format(*head)], default[head] = name, attend(patterns[name])

    def loss(kept, instead=()):
        """The loss if these paths are kept, with the functions `instead` in some heads."""
        heads = dict(default)
        for head, reads in by_head(kept).items():  # a reader attends equally to all that it reads
            mask = mark_edges(reads, fresh.task, fresh.clean.places).float()
            heads[head] = attend(mask / mask.sum(-1, keepdim=True).clamp(min=1))
        return round(fresh.losses(heads | dict(instead)).mean().item(), 5)

    earliest = [head for head in own if head[0] == first]
    uniform = loss(paths, dict.fromkeys(earliest, attend(patterns["uniform"])))
    held = loss(paths)
    removed = [loss(paths - {path}) for path in sorted(paths) if path.layer > first]
    passed = held < fresh.task.faithful_below and min(removed, default=0) >= REMOVAL
    return dict(others=others, held=held, uniform=uniform, removed=removed, passed=passed)


def attend(pattern):
    """Return the function of a head that attends like this pattern (B or none, T, T)."""
    return lambda _, values: pattern.to(values) @ values


def table(tested):
    """Return a row per run; tested: {its name: (what papers_test returns, the paths)}."""
    head = "run", "heads along paths, uniform, identity", "mean loss", "first layer uniform too"
    lines = [("the paper's A to D", "", "below 0.05", "0.05-0.1", "0.17-0.89", "none")]
    for name, (paper, paths) in tested.items():
        others = [*paper["others"].values()]
        heads = len(by_head(paths)), others.count("uniform"), others.count("identity")
        losses = f"{paper['held']:.3f}", f"{paper['uniform']:.3f}", span(paper["removed"], "{:.3f}")
        below = share(loss < REMOVAL for loss in paper["removed"])
        lines.append([name, ", ".join(map(str, heads)), *losses, below])
    return markdown((*head, "without one later read", f"below {REMOVAL}"), *lines)


@torch.no_grad()
def main():
    p = command_line("python -m extras.studies.appendix_e", __doc__)
    p.add_argument("run", type=train.run_directory, nargs="+", help="after ablate.py")
    reports = {run: read_report(run) for run in p.parse_args().run}
    for run, report in reports.items():
        if not report.get("paths") or any("*" in path.read for path in paths_in(report)):
            p.error(f"{run} has no circuit without stars: run python ablate.py {run} first")

    tested = {}
    for run, report in reports.items():
        model, task, _ = train.load(run)
        few = PatchedModel(model, task, task.draw("search", 256))
        fresh = PatchedModel(model, task, task.draw("circuits", report["sequences"]))
        paths = frozenset(paths_in(report))
        report["paper"] = papers_test(few, fresh, paths)
        train.write_file(run / "circuit.json", report)
        tested[run.resolve().name] = report["paper"], paths
    print(table(tested))


if __name__ == "__main__":
    main()
