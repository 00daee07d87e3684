"""One layer fails on the bigram task, two solve it (Bietti's slides): generic transformers.

    python -m mechanisms.layers                            # about 4 minutes of one core

Fixed triggers can be known, so the loss is that of all tokens. With random ones whoever foretells
all tokens well must doubt what followed a token once: there only the scored tokens count.
"""

from parts.config import ROWS, Flags

import torch
from torch.nn.functional import cross_entropy

from mechanisms import command, markdown, mean
from mechanisms.bigrams import N, accuracies, read_bigrams, sample
from train import Muon, adamw, schedule


FLAGS = Flags(**{name: flag.default for name, flag in ROWS.items()})  # of Muon and AdamW
FLAGS = FLAGS.but(lr=0.02, warmup=20, beta2=0.95, weight_decay=0.1)


class Generic(torch.nn.Module):
    """A pre-norm transformer with MLPs of width 2d and learnt positions; all of it learns."""

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
        future = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.U(self.blocks(self.E(tokens) + self.P.weight, future, is_causal=True))


def train(seed, layers, triggers, steps, d=64, T=64, B=64):
    """Rows of step and accuracies, of all sequences and of those without cycles."""
    generator = torch.Generator().manual_seed(seed)
    _, chances, frequency = read_bigrams()
    held_out = sample(512, T, triggers, chances, frequency, generator)[:3]
    torch.manual_seed(seed)
    model, flags, rows = Generic(layers, d, 2, T), FLAGS.but(steps=steps), []
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim > 1]
    rest = [one for one in model.parameters() if all(one is not other for other in matrices)]
    muon = Muon(matrices, flags.lr, flags.weight_decay, torch.float32)
    parts = [adamw(rest, {one for one in rest if one.ndim > 1}, flags), muon]
    for step in range(steps + 1):
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                logits = model(held_out[0][:, :-1])
            rows.append([step, *accuracies(logits, *held_out)])
        tokens, scored, _, _ = sample(B, T, triggers, chances, frequency, generator)
        learnt = scored if triggers == "random" else torch.ones_like(scored)
        model.zero_grad()
        cross_entropy(model(tokens[:, :-1])[learnt], tokens[:, 1:][learnt]).backward()
        for optimizer in parts:
            for group in optimizer.param_groups:
                group["lr"] = flags.lr * schedule(step, flags)
            optimizer.step()
    return rows


def tasks(seeds, steps):
    both = [dict(layers=n, triggers=some) for some in ("fixed", "random") for n in (1, 2)]
    return [(row["layers"], train, row | dict(steps=steps), seeds) for row in both]


def table(results):
    rows = [("layers", "triggers", "accuracy", "without cycles")]
    for row in results["train"]:
        last = torch.tensor([rows[-1][1:] for rows in row["values"]])  # (seeds, 2)
        rows.append((row["layers"], row["triggers"], *(mean(some, 3) for some in last.T)))
    return markdown(*rows)


if __name__ == "__main__":
    command(__file__, __doc__, tasks, table, steps=300, seeds=3)
