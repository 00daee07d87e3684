"""The paper's own test of a circuit (steps 5 and 6 of Appendix E), in which heads attend hard.

    python -m extras.studies.appendix_e results/A    # adds "paper" to circuit.json, and prints it

Circuits with stars are not tested: hard attention would average what a star reads.
"""

import pathlib

import train
from ablate import SEARCHED, PatchedModel, by_head, mask_of, paths_in, read_report
from data import command_line, held_out

import torch


REMOVAL = 0.17  # the lowest loss after the removal of a path in the paper


def papers_test(few, fresh, paths, threshold=0.05):
    """Return steps 5 and 6 of Appendix E, as mean losses. held: heads with paths attend hard along
    them, every other head is uniform or the identity, whichever hurts less on `few`.
    first_uniform: as held, but the head of the first path is uniform. removed: as held, without a
    path of a later layer, one by one. passed: held < threshold, and all of removed >= 0.17."""
    problem, positions, first = fresh.problem, fresh.batch.positions, min(paths)
    allowed = torch.ones(problem.T, problem.T).tril(0 if fresh.flags.causal else problem.T)
    uniform = attend(allowed / allowed.sum(-1, keepdim=True))
    identity = attend(torch.eye(problem.T))

    # the f of a head of which no path is kept: nothing if it has any in the circuit
    default, circuit_heads = {}, by_head(paths)
    for head in few.reference.reads:
        if head in circuit_heads:
            default[head] = lambda _, values: 0 * values
        else:
            default[head] = min((uniform, identity), key=lambda f: few.losses({head: f}).mean())

    def loss(kept, others):
        heads = {**others, **frozen_heads(kept, problem, positions)}
        return round(fresh.losses(heads).mean().item(), 5)

    held = loss(paths, default)
    removed = sorted(loss(paths - {path}, default) for path in paths if path.layer > first.layer)
    first_head = first.layer, first.head
    kept = paths.difference(circuit_heads[first_head])
    first_uniform = loss(kept, {**default, first_head: uniform})
    passed = held < threshold and min(removed, default=0) >= REMOVAL
    return dict(held=held, first_uniform=first_uniform, removed=removed, passed=passed)


def attend(pattern):
    """Return the function of a head that attends like this pattern (B or none, T, T)."""
    return lambda _, values: pattern.to(values) @ values


def frozen_heads(paths, problem, positions):
    """Return {(layer, head): f} for heads with paths, which attend hard: a reader equally to the
    tokens that it reads, all other tokens to nothing."""
    heads = {}
    for head, group in by_head(paths).items():
        mask = mask_of(group, problem, positions).float()
        heads[head] = attend(mask / mask.sum(-1, keepdim=True).clamp(min=1))
    return heads


@torch.no_grad()
def measure(run):
    """Return what papers_test says of the circuit of a run; ValueError if it cannot be tested."""
    report = read_report(run)
    paths = frozenset(paths_in(report))
    if not paths or any(path.star for path in paths):
        raise ValueError(f"{run} has no circuit without stars: run python ablate.py {run} first")
    model, flags = train.load(run)
    parts = held_out("search", SEARCHED), held_out("circuits", report["sequences"])
    few, fresh = (PatchedModel(model, flags, train.sequences(flags, part)) for part in parts)
    return papers_test(few, fresh, paths, report["threshold"])


def main():
    p = command_line("python -m extras.studies.appendix_e", __doc__)
    p.add_argument("run", type=pathlib.Path, help="run directory, after ablate.py")
    run = p.parse_args().run
    paper = measure(run)
    train.write_file(run / "circuit.json", read_report(run) | dict(paper=paper))
    print(paper)


if __name__ == "__main__":
    main()
