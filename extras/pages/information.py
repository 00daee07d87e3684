"""How well each symbol can be read, by least squares, from the residual stream at each role after
each layer: an empirical Lemma 2, which the explorer shows.
"""

import torch


@torch.no_grad()
def residual_streams(model, inputs):
    """Return [(B, T, width), ...], the residual stream before the first and after each layer."""
    streams, hooks = [], []

    def append(module, arguments, output):
        streams.append(output[0] if isinstance(output, tuple) else output)

    try:
        for module in dict.fromkeys((model.embed, *model.blocks)):  # layers may share weights
            hooks.append(module.register_forward_hook(append))
        model(inputs, return_patterns=True)  # with it, the last layer computes all tokens too
    finally:
        for hook in hooks:
            hook.remove()
    return streams


def information(model, task, batch, K):
    """Return R^2 of reading x_k from the residual stream at a role, (layers+1, roles, symbols),
    before the first and after each layer: least squares, fitted on the first half of the sequences
    and tested on the second."""

    def at_role(values, role):  # (B, T, size) -> (B*N, size)
        tokens = batch.positions[:, :, role, None].expand(-1, -1, values.shape[-1])
        return values.gather(1, tokens).flatten(0, 1)

    # the labels: every symbol of each chain, read at a role that shows it
    shown = [*task.roles.values()]
    labels = [at_role(batch.inputs[..., :K], shown.index(k)) for k in range(task.symbols)]
    fit_labels, test_labels = torch.cat(labels, -1).double().chunk(2)

    scores = []
    for stream in residual_streams(model, batch.inputs):
        for role in range(len(task.roles)):
            features = at_role(stream, role).double()
            ones = torch.ones(len(features), 1)
            fit, test = torch.cat([features, ones], -1).chunk(2)
            weights = torch.linalg.lstsq(fit, fit_labels, driver="gelsy").solution
            errors = (test @ weights - test_labels).square().mean(0)
            scores.append((1 - errors / test_labels.var(0)).view(-1, K).mean(1))
    return torch.stack(scores).view(-1, len(task.roles), task.symbols).float()
