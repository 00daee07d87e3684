"""Does any metric show that a symbol is learned in fewer layers than Theorem 1 asks for (Section
10.1)? Its loss is nonlinear in what the model knows, and its nearest candidate a yes or no.

    python -m extras.studies.metrics out/metrics/* --out results/figures

metrics.jsonl has a row for each run and symbol, on 4096 held-out sequences: mse, cosine (of
prediction and target), nearest (the share of predictions nearest to the right one of N candidates);
above: by how many standard errors each is better than for the x_k of other chains, or than 1/N.
"""

import functools

import train
from data import progress
from extras import studies
from extras.studies.rows import RESULTS, flags_of
from extras.studies.theory import paper_bound

import torch
import torch.nn.functional as F


SHOWN = 3  # standard errors from which on a metric shows that a symbol is learned


def own_above_others(values):
    """Return by how much those on the diagonal of values (..., N, N) are above the others."""
    N = values.shape[-1]
    own = values.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (own - (values.sum((-2, -1)) - own) / (N - 1)) / N


def measures(predictions, targets):
    """Return {metric: ((B,) its mean, (B,) by how much it is better than by chance)} of one symbol;
    predictions, targets (B, N, K)."""
    errors = (predictions[:, :, None] - targets[:, None]).square().mean(-1)  # (B, N, N)
    cosines = F.cosine_similarity(predictions[:, :, None], targets[:, None], dim=-1)
    N = targets.shape[1]
    right = (errors.argmin(2) == torch.arange(N)).float().mean(1)
    return dict(
        mse=(errors.diagonal(dim1=1, dim2=2).mean(1), -own_above_others(errors)),
        cosine=(cosines.diagonal(dim1=1, dim2=2).mean(1), own_above_others(cosines)),
        nearest=(right, right - 1 / N),
    )


@torch.no_grad()
def measure(row, n=4096):
    """Return the rows of metrics.jsonl of a run directory with weights."""
    model, task, _ = train.load(row["folder"])
    batch = task.draw("confirmation", n)
    predictions = torch.cat([model(part) for part in batch.inputs.split(256)])
    names, found = ("layers", "N", "D", "seed", "hardware", "dtype", "git"), []
    run = dict(run=row["name"]) | {name: row["config"][name] for name in names}
    parts = (each.unflatten(-1, (-1, task.K)).unbind(2) for each in (predictions, batch.answers))
    for name, answers, targets in zip(task.target_names, *parts, strict=True):
        measured = dict(run, symbol=name, above={})
        for metric, (mean, better) in measures(answers, targets).items():
            measured[metric] = round(mean.mean().item(), 4)
            error = better.std() / n**0.5
            measured["above"][metric] = round((better.mean() / error).item(), 1)
        found.append(measured)
    return found


@functools.cache
def measured_runs():
    """Return a row for each run of metrics.jsonl; above: {symbol: by how many standard errors its
    best metric is better}."""
    found = {}
    for row in train.read_file(RESULTS / "figures/metrics.jsonl"):
        named = {name: row[name] for name in ("layers", "N", "D", "seed")}
        run = dict(name=row["run"], flags=flags_of(named), settings=row["run"], above={})
        above = found.setdefault(row["run"], run)["above"]
        above[row["symbol"]] = max(row["above"].values())
    return [*found.values()]


def none_shows(row):
    """Return whether no metric shows a symbol for which Theorem 1 asks for more layers; None of a
    model that shows no symbol at all."""
    excluded = []
    for symbol, above in row["above"].items():
        if row["flags"].layers < paper_bound(int(symbol[2:])):
            excluded.append(above)
    return max(excluded) <= SHOWN if max(row["above"].values()) > SHOWN else None


def write(rows, out):
    """Measure run directories into metrics.jsonl, among the rows of others."""
    file = out / "metrics.jsonl"
    measured = studies.rows_by(file, "run", "symbol")
    for row in progress("run", [row for row in rows if row["folder"]]):
        measured |= {(found["run"], found["symbol"]): found for found in measure(row)}
    train.write_file(file, [*measured.values()])
    return file


if __name__ == "__main__":
    studies.command(__file__, __doc__, write)
