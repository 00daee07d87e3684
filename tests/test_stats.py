"""The intervals, against what others published and on distributions whose mean is known."""

import math

import pytest
import torch

from extras.studies.stats import bootstrap, wilson


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


def test_the_bootstrap_is_that_of_a_normal_mean():
    """Of 400 normal numbers: 1.96 standard errors on either side, to 10%."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    low, high = bootstrap(values, torch.Generator().manual_seed(1))
    half = 1.96 * values.std().item() / math.sqrt(400)
    assert (low, high) == pytest.approx(
        (values.mean().item() - half, values.mean().item() + half), abs=0.1 * half
    )
