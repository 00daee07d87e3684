"""95% intervals: Wilson's for a share of successes, the bootstrap for a mean."""

import math


def wilson(successes, n, z=1.959964):
    """(low, high) of the share behind `successes` out of n; inside [0, 1], at 0 and n too."""
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * (n - successes) / n + z * z / 4)
    return max(0.0, (middle - half) / (n + z * z)), min(1.0, (middle + half) / (n + z * z))


def bootstrap(values, generator, resamples=1000):
    """(low, high) of the mean of values, a tensor (n,), each resample n draws with replacement."""
    import torch  # here, so that llm.py starts without it

    means = [
        values[torch.randint(len(values), values.shape, generator=generator)].mean()
        for _ in range(resamples)
    ]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
