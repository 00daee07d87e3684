"""The paper's own test of a circuit (steps 5 and 6 of Appendix E), in which heads attend hard.

    python -m extras.studies.appendix_e results/A    # adds "paper" to circuit.json, and prints it

Circuits with stars are not tested: hard attention would average what a star reads.
"""

import train
from ablate import SEARCHED, PatchedModel, by_head, mask_of, paths_in, read_report
from data import command_line, held_out

import torch


REMOVAL = 0.17  # the lowest loss after the removal of a path in the paper


def papers_test(few, fresh, paths):
    """Return steps 5 and 6 of Appendix E, as mean losses. held: heads with paths attend hard along
    them, every other head is uniform or the identity, whichever hurts less on `few`. removed: as
    held, without a path of a later layer than the first, one by one. passed: held < 0.05, and
    all of removed >= 0.17."""
    T, first = fresh.task.T, min(paths)
    allowed = fresh.model.mask.exp()  # (T, T) of 0 and 1
    uniform, identity = attend(allowed / allowed.sum(-1, keepdim=True)), attend(torch.eye(T))

    # the f of a head of which no path is kept: nothing if it has any in the circuit
    default = dict.fromkeys(by_head(paths), lambda _, values: 0 * values)
    for head in few.corrupted_reads.keys() - default.keys():
        default[head] = min((uniform, identity), key=lambda f: few.losses({head: f}).mean())

    def loss(kept):
        heads = dict(default)
        for head, group in by_head(kept).items():  # a reader attends equally to all that it reads
            mask = mask_of(group, fresh.task, fresh.clean.positions).float()
            heads[head] = attend(mask / mask.sum(-1, keepdim=True).clamp(min=1))
        return round(fresh.losses(heads).mean().item(), 5)

    held = loss(paths)
    removed = sorted(loss(paths - {path}) for path in paths if path.layer > first.layer)
    passed = held < fresh.task.faithful_below and min(removed, default=0) >= REMOVAL
    return dict(held=held, removed=removed, passed=passed)


def attend(pattern):
    """Return the function of a head that attends like this pattern (B or none, T, T)."""
    return lambda _, values: pattern.to(values) @ values


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
    parts = held_out("search", SEARCHED), held_out("circuits", report["sequences"])
    few, fresh = (PatchedModel(model, task, task.batch(part)) for part in parts)
    report["paper"] = papers_test(few, fresh, paths)
    train.write_file(run / "circuit.json", report)
    print(report["paper"])


if __name__ == "__main__":
    main()
