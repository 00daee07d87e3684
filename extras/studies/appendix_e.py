"""The paper's own test of a circuit (steps 5 and 6 of Appendix E), in which heads attend hard.

    python -m extras.studies.appendix_e results/A    # prints it, and adds "paper" to circuit.json

Circuits with stars are not tested: hard attention would average what a star reads.
"""

import train
from ablate import SEARCHED, PatchedModel, by_head, mark_edges, paths_in, read_report
from data import command_line

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
        others[text_of(head)], default[head] = name, attend(patterns[name])

    def loss(kept, instead=()):
        """The loss if these paths are kept, with the functions `instead` in some heads."""
        heads = dict(default)
        for head, group in by_head(kept).items():  # a reader attends equally to all that it reads
            mask = mark_edges(group, fresh.task, fresh.clean.places).float()
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


def text_of(head):
    return f"L{head[0]}H{head[1]}"


def table(paper, paths, task, batch):
    """Return Appendix E as text: the attention pattern of each head in the paper's words, and the
    losses of papers_test."""
    patterns = dict(paper["others"])
    for head, group in by_head(paths).items():
        _, reader, read = mark_edges(group, task, batch.places).nonzero().T
        name = "previous position" if (reader - read == 1).all() else "expected position"
        reads = ", ".join(f"{path.reader} reads {path.read}" for path in group)
        patterns[text_of(head)] = f"{name}: {reads}"
    lines = ["head   attention"]
    for head in sorted(patterns, key=lambda head: [*map(int, head[1:].split("H"))]):
        lines.append(f"{head:7s}{patterns[head]}")

    # the losses, beside what the paper says of its A, B, C and D
    first = min(paths).layer
    lines += ["", f"mean loss{'ours':>33s}   the paper's"]
    lines.append(f"{'with these patterns':37s}{paper['held']:.3f}   below 0.05")
    lines.append(f"{f'heads of layer {first} uniform too':37s}{paper['uniform']:.3f}   0.05 to 0.1")
    later = [path for path in sorted(paths) if path.layer > first]
    for path, loss in zip(later, paper["removed"], strict=True):
        name = f"without {text_of(path)}: {path.reader} reads {path.read}"
        lines.append(f"{name:37s}{loss:.3f}   0.17 to 0.89")
    return "\n".join([*lines, "", f"passed: {paper['passed']}"])


@torch.no_grad()
def main():
    p = command_line("python -m extras.studies.appendix_e", __doc__)
    p.add_argument("run", type=train.run_directory, help="run directory, after ablate.py")
    run = p.parse_args().run
    report = read_report(run)
    paths = frozenset(paths_in(report))
    if not paths or any(path.star for path in paths):
        p.error(f"{run} has no circuit without stars: run python ablate.py {run} first")

    model, task, _ = train.load(run)
    few = PatchedModel(model, task, task.draw("search", SEARCHED))
    fresh = PatchedModel(model, task, task.draw("circuits", report["sequences"]))
    report["paper"] = papers_test(few, fresh, paths)
    train.write_file(run / "circuit.json", report)
    print(table(report["paper"], paths, task, fresh.clean))


if __name__ == "__main__":
    main()
