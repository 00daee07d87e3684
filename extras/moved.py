"""What the seven scripts once held, and only extras/ still needs."""

import collections

import train
from ablate import PatchedModel, record_reads

import torch


def by_head(paths):
    """{(layer, head): [path, ...]}, the paths of each head, sorted; [] for any other head."""
    heads = collections.defaultdict(list)
    for path in sorted(paths):
        heads[path.layer, path.head].append(path)
    return heads


def split_token(token):
    """("1b", 1) of 1b+1, ("1b", 0) of 1b and of 1b*, a star: the tokens 1b of all chains."""
    role, _, offset = token.rstrip("*").partition("+")
    return role, int(offset or 0)


def mark_tokens(token, task, places):
    """(B, N, T): 1 at [b, n, t] if the token t of sequence b is this one of the chain of query n,
    and else 0; places (B, N, roles) as in a Batch."""
    role, offset = split_token(token)
    place = places[:, :, [*task.roles].index(role)] + offset  # (B, N)
    marks = (place[:, :, None] == torch.arange(task.T, device=place.device)).float()
    if token.endswith("*"):
        marks = marks.sum(1, keepdim=True).expand_as(marks)
    return marks


def patterns_of(model, inputs):
    """The attention patterns of each layer, a list of (B, heads, T, T)."""
    layers = {}
    for (layer, _), (pattern, _) in record_reads(model, inputs).items():
        layers.setdefault(layer, []).append(pattern)
    return [torch.stack(patterns, 1) for patterns in layers.values()]


class MeasuredModel(PatchedModel):
    """A PatchedModel with another measure(predictions, batch) than the losses."""

    def __init__(self, model, task, clean, measure):
        self.measure = measure
        super().__init__(model, task, clean)

    def losses(self, heads):
        return self.measure(self.model(self.clean.inputs, heads=heads), self.clean)


def command_of(flags):
    """Return "python train.py --layers 12 --heads 1 --D 3", with all other flags that differ
    from their defaults after these."""
    values, command = train.values_of(flags), "python train.py"
    names = ["layers", "heads", "D"]
    names += [name for name in values if values[name] != train.DEFAULTS[name] and name not in names]
    for name in names:
        flag, value = name.replace("_", "-"), values[name]
        command += f" --no-{flag}" if value is False else f" --{flag} {value}"
    return command
