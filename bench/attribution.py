"""ablate.py beside edge attribution (EAP: Syed et al., 2023; EAP-IG, with integrated gradients:
Hanna et al., 2024), on circuits whose truth is known.

    python bench/attribution.py --steps 250    # prints the table; a few minutes on one core

The circuits were planted: a transformer is trained while its attention follows a known circuit,
each path only while its two roles share a piece of information, all else uniform. Then each method
looks for the paths without which the query would lose a symbol.

Attribution scores a path by the gradient of the loss times its attention, less what uniform
attention gives it: at the model itself (EAP), or averaged on the way there from uniform attention
(EAP-IG). It then takes the fewest best paths that suffice when all heads are replaced by them,
uniform elsewhere. As all patterns are held, both the gradient and the loss see what a path carries,
and not what it lets later heads find: b -> a in layer 1, by which each b can be found at all, can
then be spared. ablate.py, which takes paths from the model as it is, can see that it is needed.
"""

import contextlib
import sys
import time

from parts import circuit, runs
from parts.flags import command_line
from parts.flow import may_attend

import torch

import ablate
from data import batch_index, held_out, partial_losses
from tests.planted import CIRCUITS, Planted, needed, paths_from
from train import learning_rate, optimizers, parse_flags


LAYERS, THRESHOLD, POINTS = 4, 0.05, 10


# ---- planting


class PlantedTransformer(Planted):
    """A transformer that attends as the planted circuit does, and computes all else itself."""

    def __init__(self, model, task, paths):
        super().__init__(task, paths, LAYERS)
        self.model = model

    def __call__(self, x, patterns=None, return_patterns=False):
        _, attended = super().__call__(x, patterns, return_patterns=True)
        used = {(layer, 0): heads[:, 0] for layer, heads in enumerate(attended)}
        return self.model(x, used, return_patterns)


def plant(D, texts, steps):
    """(PlantedTransformer, its flags), trained to solve what its circuit lets it solve."""
    machine = "--device cpu --dtype float32"
    schedule = f"--steps {steps} --batch 64 --lr 3e-3 --warmup 0 --decay 1"
    flags = parse_flags(f"--D {D} --layers {LAYERS} --width 64 {schedule} {machine}".split())
    torch.manual_seed(flags["seed"])
    model, task = runs.build(flags), runs.task_of(flags)
    planted = PlantedTransformer(model, task, paths_from(task, *texts))
    trained_by = optimizers(model, flags)

    for step in range(steps):
        for group in (group for optimizer in trained_by for group in optimizer.param_groups):
            group["lr"] = learning_rate(step, flags)
        index = batch_index(flags["seed"], step, flags["batch"], flags["examples"])
        batch = runs.sequences(flags, index)
        partial_losses(planted(batch.inputs), batch.targets, flags["K"]).mean().backward()
        for optimizer in trained_by:
            optimizer.step()
            optimizer.zero_grad()
    return planted, flags


# ---- the methods, each (planted, flags, batch) -> (grade or None, paths or None)


def certified(planted, flags, batch):
    """What ablate.py finds, whatever the grade; it has sequences of its own."""
    with contextlib.redirect_stdout(sys.stderr):
        report = ablate.find_circuit(planted, flags, threshold=THRESHOLD, sequences=256)
    found = circuit.paths_in(report, planted.task)
    return report["grade"], found and list(found)


def eap(planted, flags, batch):
    return None, first_sufficient(planted, flags, batch, scores(planted, flags, batch, [1.0]))


def eap_ig(planted, flags, batch):
    shares = [point / POINTS for point in range(1, POINTS + 1)]
    return None, first_sufficient(planted, flags, batch, scores(planted, flags, batch, shares))


METHODS = {"ablate.py": certified, "EAP": eap, "EAP-IG": eap_ig}


def scores(planted, flags, batch, shares):
    """{Path: score} of every path that the mask allows: the gradient of the loss times the
    difference between the model's attention and uniform attention. shares: at which points on the
    way from uniform attention (0) to the model's own (1) the gradients are taken and averaged."""
    task, x = planted.task, batch.inputs
    own = torch.stack(ablate.own_patterns(planted, flags, x))[:, :, 0]  # (layers, B, T, T)
    uniform, effect = circuit.uniform(task.T, causal=True), torch.zeros_like(own)
    for share in shares:
        between = (uniform + share * (own - uniform)).requires_grad_()
        patterns = {(layer, 0): pattern for layer, pattern in enumerate(between)}
        loss = partial_losses(planted(x, patterns), batch.targets, flags["K"]).mean()
        (gradient,) = torch.autograd.grad(loss, between)
        effect += gradient * (own - uniform) / len(shares)

    scored = {}
    allowed = may_attend(task).fill_diagonal_(False).nonzero().tolist()
    for layer, pattern in enumerate(effect):
        by_roles = circuit.read_paths(pattern, task, batch.positions).sum((0, 1)).abs()
        for source, target in allowed:
            path = circuit.Path(layer, 0, source, target)
            scored[path] = by_roles[source, target].item()
    return scored


def first_sufficient(planted, flags, batch, scored):
    """The fewest best paths that suffice when every head is replaced by them, uniform elsewhere;
    None if no number of them does."""
    bare = {(layer, 0): "uniform" for layer in range(LAYERS)}
    held = circuit.Held(planted, flags, dict.fromkeys(bare), batch)
    ranked = sorted(scored, key=scored.get, reverse=True)
    for count in range(1, len(ranked) + 1):
        errors = held.errors(circuit.with_paths(bare, ranked[:count]), "uniform")
        if errors.mean() < THRESHOLD:
            return ranked[:count]
    return None


# ---- the table


def describe(D, texts):
    """D=2: 3 1b 2b, 4 q 1b; in layer 1 every b attends to its a, in all circuits."""
    return f"D={D}: " + ", ".join(text for text in texts if not text.startswith("1 "))


def compared(found, truth, task):
    """The cells from "paths found" on: how many, precision, recall, which were missed."""
    if not found:
        return ["none", "", "0.00", "all"]
    right, missed = truth & set(found), []
    for path in sorted(truth - set(found)):
        missed.append(f"{path.layer + 1} {task.names[path.source]} {task.names[path.target]}")
    rates = f"{len(right) / len(found):.2f}", f"{len(right) / len(truth):.2f}"
    return [str(len(found)), *rates, ", ".join(missed)]


def compare(D, texts, steps):
    """Plant one circuit, look for it with every method, and print a row for each."""
    planted, flags = plant(D, texts, steps)
    batch = runs.sequences(flags, held_out("validation", 128))
    with torch.no_grad():
        errors = partial_losses(planted(batch.inputs), batch.targets, flags["K"])
    truth = set(needed(planted.task, planted.paths, LAYERS))

    for name, find in METHODS.items():
        began = time.perf_counter()
        grade, found = find(planted, flags, batch)
        seconds = f"{time.perf_counter() - began:.1f}"
        planted_here = [f"{describe(D, texts)} ({len(truth)} paths)", f"{errors.mean():.4f}"]
        cells = [*planted_here, name, grade or "", *compared(found, truth, planted.task), seconds]
        print("| " + " | ".join(cells) + " |", flush=True)


def main():
    p = command_line("attribution.py", __doc__)
    text = "training steps of each planted transformer (default: 250)"
    p.add_argument("--steps", type=int, default=250, help=text)
    steps = p.parse_args().steps
    if steps < 1:
        p.error(f"--steps must be at least 1, not {steps}")

    columns = ["planted: layer, from, to", "loss", "method", "grade", "paths found"]
    columns += ["precision", "recall", "missed", "seconds"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for D, texts in CIRCUITS:
        compare(D, texts, steps)


if __name__ == "__main__":
    main()
