"""95% intervals: Wilson's for a share of successes, and the bootstrap for a mean; precision."""

import math
import statistics

import torch


def wilson(successes, n, z=1.959964):
    """Return (low, high) of the share behind `successes` out of n. It stays inside [0, 1]."""
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def bootstrap(values, generator, resamples=1000):
    """Return [low, high] of the mean of a few values, a tensor (n,), by the plain bootstrap."""
    drawn = torch.randint(len(values), (resamples, len(values)), generator=generator)
    return values[drawn].mean(1).quantile(values.new_tensor([0.025, 0.975])).tolist()


def average_precision(scores, right):
    """Return the mean, over right items, of the share of right ones among all that score as high;
    right: True, False, or None for those that do not count."""
    pairs = [pair for pair in zip(scores, right, strict=True) if pair[1] is not None]
    shares = []
    for lowest in [score for score, is_right in pairs if is_right]:
        shares.append(statistics.mean(is_right for score, is_right in pairs if score >= lowest))
    return statistics.mean(shares)


def knock_out_rises(emergence, row):
    """Return {symbol: [rise of its loss at each checkpoint without the path of this row, ...]}."""
    rises = {}
    for symbol, losses in emergence["losses"].items():
        pairs = zip(row["without"][symbol], losses, strict=True)
        rises[symbol] = [without - loss for without, loss in pairs]
    return rises
