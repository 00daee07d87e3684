"""Scores of paths: how the field's methods rank the candidates of ablate.py, under mean ablation.

attention: to what is read in the own chain above that in others; of a star, to all chains
EAP: the gradient of the loss by what a head writes, times what ablating the path changes there
    (Syed et al., 2023); EAP-IG: its mean over 8 points at which a share of all that heads read is
    kept (Hanna et al., 2024, who mix the inputs instead)
knock-out: the rise of the loss of the full model if the path is ablated
ACDC: the highest threshold at which the path stays, if each path that costs the circuit less is
    dropped, from the last layer down (Conmy et al., 2023)
"""

import functools

import torch


POINTS = [(2 * number + 1) / 16 for number in range(8)]  # of EAP-IG: the shares that are kept
TAUS = 0.001, 0.003, 0.01, 0.03, 0.1, 0.3  # thresholds of ACDC


def worst(losses):
    """Return the mean loss of the worst symbol of losses (B, N, symbols)."""
    return losses.mean((0, 1)).max().item()


def rankings(few, attention):
    """Yield (method, scores) of the candidates {path: attention}, one after the other."""
    paths = list(attention)
    yield "attention", attention
    yield "EAP", attributions(few, paths, [1.0])
    yield "EAP-IG", attributions(few, paths, POINTS)
    yield "knock-out", {path: worst(few.knock_out([path]) - few.baseline) for path in paths}
    yield "ACDC", acdc(few, paths)


def attributions(few, paths, shares):
    """Return to first order by how much the loss changes if a path is ablated, the mean over points
    at which these shares of what each head reads are kept."""
    totals = dict.fromkeys(paths, 0.0)
    for share in shares:
        seen, written = {}, {}

        def write(pattern, values, head, share=share, seen=seen, written=written):
            mixed = share * (pattern @ values)
            mixed = mixed + (1 - share) * few.ablate(head, ())(pattern, values)
            seen[head], written[head] = (pattern.detach(), values.detach()), mixed.requires_grad_()
            return mixed

        heads = {head: functools.partial(write, head=head) for head in few.reference.reads}
        with torch.enable_grad():
            loss = few.losses(heads).mean()
        gradients = torch.autograd.grad(loss, [*written.values()], materialize_grads=True)
        gradients = dict(zip(written, gradients, strict=True))
        for path in paths:
            head, (pattern, values) = path[:2], seen[path[:2]]
            change = few.ablate(head, (path,), keep=False)(pattern, values) - pattern @ values
            totals[path] += (gradients[head] * change).sum().item() / len(shares)
    return {path: abs(total) for path, total in totals.items()}


def acdc(few, paths):
    """Return the highest threshold at which each path stays; paths: the likeliest first."""
    scores = dict.fromkeys(paths, 0.0)
    for tau in TAUS:
        kept, loss = frozenset(paths), worst(few.circuit(paths))
        for path in sorted(reversed(paths), key=lambda path: -path.layer):
            without = worst(few.circuit(kept - {path}))
            if without - loss < tau:
                kept, loss = kept - {path}, without
        scores.update(dict.fromkeys(kept, tau))
    return scores
