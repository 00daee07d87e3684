"""Coverage of the intervals on distributions whose mean is known."""

import math

import pytest
import torch

from extras.studies.stats import bootstrap, studentised, wilson


def test_wilson_agrees_with_published_values():
    """Newcombe (1998), Table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for counts, interval in published.items():
        assert wilson(*counts) == pytest.approx(interval, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sigma, least", [(1.5, 0.90), (2.0, 0.85)])
def test_the_studentised_interval_covers_more_of_heavy_tails(sigma, least):
    """Of the mean of 512 lognormal numbers. Measured: 0.933 and 0.923 of the bootstrap of the mean;
    with sigma 2 0.887 and 0.857."""

    def coverage(interval, trials=300):
        covered, draws = 0, torch.Generator().manual_seed(1)
        for seed in range(trials):
            values = (sigma * torch.randn(512, generator=draws)).exp()
            generator = torch.Generator().manual_seed(seed)
            low, high = interval(values, generator, resamples=400)
            covered += low < math.exp(sigma**2 / 2) < high
        return covered / trials

    covers = coverage(studentised)
    assert covers >= least and covers > coverage(bootstrap)
