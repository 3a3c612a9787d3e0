"""Estimates over prompts: pass@k without bias, and intervals by resampling the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, floor

import numpy as np

RESAMPLES = 2000


def at_k(samples: int, right: int, k: int) -> float | None:
    """The chance that one of k samples drawn without replacement is right, from `right` of `samples`.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1).

    Returns:
        None where fewer than k samples were drawn.
    """
    if not 0 <= right <= samples or k < 1:
        raise ValueError(f"{right} of {samples} at k = {k}")
    return None if samples < k else 1.0 - comb(samples - right, k) / comb(samples, k)


def at_budget(samples: int, right: int, texts: float) -> float | None:
    """`at_k` of a mean number of texts: the whole number below or the one above is drawn, so often that the mean holds.

    Returns:
        None where fewer samples were drawn than the larger of the two.
    """
    few = floor(texts)
    more = texts - few
    at_few = at_k(samples, right, few)
    if at_few is None or more == 0:
        return at_few
    at_more = at_k(samples, right, few + 1)
    return None if at_more is None else (1 - more) * at_few + more * at_more


def interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float] | None:
    """A 95 % percentile interval of the mean, resampling the values; None of none."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = array[rng.integers(0, len(array), (RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return round(float(low), 4), round(float(high), 4)


def paired(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> tuple[float, tuple[float, float]]:
    """Mean of first - second over the same prompts, and its interval, resampling prompts.

    Raises:
        ValueError: the two are of different lengths, or empty.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    found = interval(differences, seed=seed)
    if found is None:
        raise ValueError("there are no prompts to compare on")
    return round(float(np.mean(differences)), 4), found
