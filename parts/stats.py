"""95% intervals: Wilson's for a share of successes, bootstraps for a mean."""

import math


def wilson(successes, n, z=1.959964):
    """(low, high) of the share behind `successes` out of n; inside [0, 1], at 0 and n too."""
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def bootstrap(values, generator, resamples=1000):
    """(low, high) of the mean of a few values, a tensor (n,), each resample n draws with
    replacement: of seeds, say."""
    means, _ = resampled(values, generator, resamples)
    low, high = means.quantile(means.new_tensor([0.025, 0.975])).tolist()
    return low, high


def studentised(values, generator, resamples=400):
    """(low, high) of the mean of many values of a heavy-tailed distribution, a tensor (n,): errors
    of sequences, of which 1% carry half. The bootstrap of (mean - true mean) / standard error,
    which covers more of such tails than that of the mean (tested)."""
    mean, error = values.mean(), values.std() / math.sqrt(len(values))
    means, errors = resampled(values, generator, resamples)
    t = ((means - mean) / errors.clamp(min=1e-12)).quantile(values.new_tensor([0.025, 0.975]))
    return (mean - t[1] * error).item(), (mean - t[0] * error).item()


def resampled(values, generator, resamples):
    """The means and standard errors, (resamples,) each, of draws with replacement."""
    import torch  # here, so that language models are asked without it

    draws = [
        torch.randint(len(values), values.shape, generator=generator) for _ in range(resamples)
    ]
    taken = [values[draw] for draw in draws]
    means = torch.stack([one.mean() for one in taken])
    return means, torch.stack([one.std() for one in taken]) / math.sqrt(len(values))
