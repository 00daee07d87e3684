"""One layer or two on the bigram task (Bietti's slides): generic transformers.

    python -m mechanisms.layers                            # about 4 minutes on one core

With fixed triggers the loss is that of all tokens. With random triggers it is that of the scored
tokens alone: a model that predicts all tokens well must doubt what followed a token only once.
"""

from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from mechanisms import command, mean
from mechanisms.bigrams import N, accuracies, read_bigrams, sample
from train import Muon, adamw, schedule


OPTIMIZER = dict(lr=0.02, warmup=20, decay=0.5, beta2=0.95, weight_decay=0.1)  # flags of train.py


class Generic(torch.nn.Module):
    """A pre-norm transformer with MLPs of width 2d and learned positions; all of it is trained."""

    def __init__(self, layers, d, heads, T):
        super().__init__()
        block = torch.nn.TransformerEncoderLayer(
            d, heads, 2 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(block, layers, torch.nn.LayerNorm(d), False)
        self.E, self.P = torch.nn.Embedding(N, d), torch.nn.Embedding(T, d)  # of variance 1
        self.U = torch.nn.Linear(d, N)

    def forward(self, tokens):
        """Logits (B, T, N) of tokens (B, T)."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.U(self.blocks(self.E(tokens) + self.P.weight, mask, is_causal=True))


def train(seed, layers, triggers, steps, d=64, T=64, B=64):
    """Train with Muon and AdamW; rows of the step and the two accuracies of bigrams.py."""
    generator, bigrams = torch.Generator().manual_seed(seed), read_bigrams()
    held_out = sample(512, T, triggers, bigrams, generator)[:3]
    torch.manual_seed(seed)
    model, rows = Generic(layers, d, 2, T), []
    flags = SimpleNamespace(steps=steps, **OPTIMIZER)

    # dicts, because `in` compares tensors of a list by value
    matrices = dict.fromkeys(weight for weight in model.blocks.parameters() if weight.ndim > 1)
    others = dict.fromkeys(weight for weight in model.parameters() if weight not in matrices)
    muon = Muon(matrices, flags.lr, flags.weight_decay, torch.float32)
    optimizers = [adamw(others, {weight for weight in others if weight.ndim > 1}, flags), muon]
    for step in range(steps + 1):
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                logits = model(held_out[0][:, :-1])
            rows.append([step, *accuracies(logits, *held_out)])
        tokens, scored, _, _ = sample(B, T, triggers, bigrams, generator)
        trained = scored if triggers == "random" else torch.ones_like(scored)
        model.zero_grad()
        cross_entropy(model(tokens[:, :-1])[trained], tokens[:, 1:][trained]).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = flags.lr * schedule(step, flags)
            optimizer.step()
    return rows


KINDS = [dict(layers=n, triggers=triggers) for triggers in ("fixed", "random") for n in (1, 2)]
TASKS = [(train, kind | dict(steps=300)) for kind in KINDS]


def table(results):
    """The accuracies after the last step."""
    rows = [("layers", "triggers", "accuracy", "without cycles")]
    for row in results["train"]:
        last = torch.tensor([run[-1][1:] for run in row["values"]])  # (seeds, 2)
        rows.append((row["layers"], row["triggers"], *(mean(seeds, 3) for seeds in last.T)))
    return rows


if __name__ == "__main__":
    command(__file__, __doc__, TASKS, table, seeds=3)
