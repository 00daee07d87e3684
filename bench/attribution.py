"""ablate.py beside edge attribution (EAP: Syed et al., 2023; with integrated gradients, EAP-IG: Hanna et al., 2024).

    python bench/attribution.py    # about three minutes on one core

The truth is known because it was planted: a transformer is trained while its attention patterns are held at a chosen
circuit (every other head uniform), so that its weights use these paths and no others. Then each method looks for the
circuit with the patterns as the model's own. Attribution scores a path by gradient times attention, once at the model
itself (EAP) or averaged on the way from uniform attention to it (EAP-IG), and takes the best paths until the loss with
all heads replaced by them is below the threshold: the same rule of sufficiency as ours. Precision and recall count
the paths without which the query would lose a symbol. Since the patterns are held, a path matters for what it carries,
not for what it would let later heads find.
"""
import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import ablate
from data import batch_index, roles, validation_index
from train import build, optimizers, parse_flags, partial_losses, sequences

CIRCUITS = {  # layer, from role, to role; no path b -> a, which would open second ways for the same symbol
    "D=1": (1, ["2 q 1b"]),
    "D=2, one step after another": (2, ["2 q 1b", "3 q 2b"]),
    "D=2, doubling": (2, ["3 1b 2b", "4 q 1b"]),
    "D=3, doubling": (3, ["2 q 1b", "2 2b 3b", "4 q 2b"]),
    "D=3, one step after another": (3, ["2 q 1b", "3 q 2b", "4 q 3b"]),
    "D=3, with a path to spare": (3, ["2 q 1b", "2 1b 2b", "3 q 2b", "4 q 3b"]),
}
LAYERS, THRESHOLD = 4, 0.05


def named(text):
    layer, source, target = text.split()
    return (int(layer) - 1, 0), (roles(9).index(source), roles(9).index(target))


def carries_all(paths, D):
    """Whether x_1..x_D reach the query along these paths."""
    holds = [{0}] + [{k - (role == "a")} for k in range(1, D + 1) for role in "ab"]
    for layer in range(LAYERS):
        before = [set(symbols) for symbols in holds]
        for (at, _), (source, target) in paths:
            if at == layer:
                holds[source] |= before[target]
    return holds[0] >= set(range(1, D + 1))


def find_positions(x, flags):
    """(B, T, inputs) -> (B, N, 2D+1), by the equality of symbols alone."""
    symbols = x[..., :flags["K"]]
    same = (symbols[:, :, None] == symbols[:, None]).all(-1) & ~torch.eye(x.shape[1], dtype=torch.bool)
    place = torch.arange(x.shape[1] - flags["N"], x.shape[1]).expand(len(x), -1)
    found = [place]
    for _ in range(flags["D"]):
        a = same.int().argmax(-1).gather(1, place)  # the one other token with this symbol
        place = a + 1
        found += [a, place]
    return torch.stack(found, -1)


class Planted(torch.nn.Module):
    """A transformer whose heads attend as the circuit says, whatever they would compute."""

    def __init__(self, model, flags, paths):
        super().__init__()
        self.model, self.flags = model, flags
        self.circuit = {(layer, 0): [path for head, path in paths if head == (layer, 0)] or "uniform"
                        for layer in range(flags["layers"])}

    def own_patterns(self, x):
        positions = find_positions(x, self.flags)
        return {head: ablate.write_pattern(mechanism, positions, True, "uniform").expand(len(x), x.shape[1], x.shape[1])
                for head, mechanism in self.circuit.items()}

    def forward(self, x, patterns=None, return_patterns=False):
        return self.model(x, self.own_patterns(x) | (patterns or {}), return_patterns)


def plant(D, paths, steps):
    """A Planted transformer, trained to solve what its circuit lets it solve."""
    flags = parse_flags(["--D", str(D), "--layers", str(LAYERS), "--width", "64", "--lr", "3e-3", "--steps", str(steps),
                         "--dtype", "float32", "--device", "cpu"])
    torch.manual_seed(0)
    planted = Planted(build(flags), flags, paths)
    trained_by = optimizers(planted.model, flags)
    for step in range(steps):
        batch = sequences(flags, batch_index(0, step, 64, 0))
        partial_losses(planted(batch.inputs), batch.targets, flags["K"]).mean().backward()
        for optimizer in trained_by:
            for group in optimizer.param_groups:
                group["lr"] = flags["lr"] * (1 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
    return planted.eval(), flags


def attribution(planted, flags, batch, points):
    """The paths of every layer, the most important first, by gradient times attention."""
    own, x = planted.own_patterns(batch.inputs), batch.inputs
    uniform = ablate.write_pattern("uniform", batch.positions, True)
    scores = {}
    for point in range(points):
        share = (point + 1) / points  # how far on the way from uniform attention to the model itself
        patterns = {head: (uniform + share * (pattern - uniform)).requires_grad_() for head, pattern in own.items()}
        partial_losses(planted(x, patterns), batch.targets, flags["K"]).mean().backward()
        for head, pattern in patterns.items():
            effect = (pattern.grad * (own[head] - uniform)).detach()
            scores[head] = scores.get(head, 0) + ablate.read_paths(effect, batch.positions).sum((0, 1))
    return sorted(((head, (source, target)) for head in scores for source in range(2 * flags["D"] + 1)
                   for target in range(2 * flags["D"] + 1) if source != target),
                  key=lambda path: -scores[path[0]][path[1]].abs().item())


def first_sufficient(loss, ranked):
    """The fewest of the ranked paths that suffice when every head is replaced by them, or None."""
    for n in range(1, len(ranked) + 1):
        circuit = {head: [p for at, p in ranked[:n] if at == head] or "uniform" for head, _ in ranked}
        if loss(circuit) < THRESHOLD:
            return ranked[:n]
    return None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=600, help="training steps of each planted transformer (default: 600)")
    steps = p.parse_args().steps
    print("| planted circuit | loss | method | paths found | precision | recall | seconds |\n|---|---|---|---|---|---|---|")
    for name, (D, texts) in CIRCUITS.items():
        paths = [named(text) for text in texts]
        planted, flags = plant(D, paths, steps)
        batch = sequences(flags, validation_index(128))
        truth = {path for path in paths
                 if not carries_all([other for other in paths if other != path], D)}

        def loss(circuit):
            return ablate.measure(planted, flags, batch, circuit).mean().item()

        def ours():
            means = ablate.mean_attention(planted, flags, batch)
            circuit, _ = ablate.find_circuit(loss, means, THRESHOLD, sorted(means))
            return ablate.paths_of(circuit) if circuit else None

        for method, find in {
                "ablate.py": ours,
                "EAP": lambda: first_sufficient(loss, attribution(planted, flags, batch, 1)),
                "EAP-IG": lambda: first_sufficient(loss, attribution(planted, flags, batch, 10))}.items():
            began = time.perf_counter()
            found = find()
            seconds = time.perf_counter() - began
            right = len(truth & set(found or []))
            count = f"{len(truth)} path{'' if len(truth) == 1 else 's'}"
            cells = [f"{name} ({count})", f"{loss({}):.4f}", method, str(len(found)) if found else "none suffices",
                     f"{right / len(found):.2f}" if found else "", f"{right / len(truth):.2f}" if found else "",
                     f"{seconds:.1f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
