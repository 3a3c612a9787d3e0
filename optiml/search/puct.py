"""Selection rules of the search, as pure functions of arrays."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXPLORATION = 1.25  # c of the PUCT rule, in units of normalised reward
FIRST_PLAY_URGENCY = 0.1  # an unvisited edit is valued this much below its node's own reward
BETA = 0.7  # share of the best reward below a node in its value; the rest is the mean
FAILED_WEIGHT = 0.25  # weight of a failed kernel in the mean of its ancestors
UNIFORM_SHARE = 0.15  # of the prior, so that no legal edit is starved
TEMPERATURE = 0.5  # of the softmax over judge scores


def puct(value: Floats, visits: Floats, prior: Floats, *, parent_visits: float, c: float = EXPLORATION) -> Floats:
    """Score the edits of one node; the search descends into the largest.

        score[a] = value[a] + c * prior[a] * sqrt(max(1, parent_visits)) / (1 + visits[a])

    Args:
        value: `[A]` normalised value below each edit, 0..1; for an unvisited one an estimate (`Search._first_play`).
        visits: `[A]` finished evaluations below each edit.
        prior: `[A]` probability of each edit.
        parent_visits: finished evaluations at and below the node.
        c: exploration weight.

    Raises:
        ValueError: the arrays do not share one shape `[A]`.

    Source: Silver et al. 2017 (doi:10.1038/nature24270), Methods, "Select". The max(1, ·) is ours: at a node without
    visits the prior decides.
    """
    if not value.shape == visits.shape == prior.shape or value.ndim != 1:
        raise ValueError(f"value, visits and prior need one shape: {value.shape}, {visits.shape}, {prior.shape}")
    return value + c * prior * math.sqrt(max(1.0, parent_visits)) / (1.0 + visits)


def priors(scores: Floats, *, temperature: float = TEMPERATURE, uniform: float = UNIFORM_SHARE) -> Floats:
    """Proposal probabilities `[A]` from judge scores `[A]` in 0..1.

        P = (1 - uniform) * softmax(scores / temperature) + uniform / A

    Source: design note on search, §3.4 item 2.
    """
    if scores.size == 0:
        return scores.astype(np.float64)
    weights = np.exp((scores - scores.max()) / temperature)
    return np.asarray((1.0 - uniform) * weights / weights.sum() + uniform / scores.size, dtype=np.float64)


def mixed_value(mean: float, best: float, *, beta: float = BETA) -> float:
    """Value of a node: `(1 - beta) * mean + beta * best` of the rewards at and below it.

    Source: design note on search, §3.4 item 4.
    """
    return (1.0 - beta) * mean + beta * best


def normalised(value: float, low: float, high: float) -> float:
    """`value` on the scale low..high of the whole tree; 0.5 while the tree holds one value only."""
    if high - low < 1e-12:
        return 0.5
    return min(1.0, max(0.0, (value - low) / (high - low)))


def children_allowed(visits: int, *, is_root: bool) -> int:
    """Progressive widening: how many children a node may have after `visits` evaluations at and below it.

        ceil(1.5 * visits ** 0.5) at the root, ceil(visits ** 0.4) deeper

    Source: design note on search, §3.4 item 5.
    """
    if visits <= 0:
        return 1
    return math.ceil(1.5 * math.sqrt(visits)) if is_root else math.ceil(math.pow(visits, 0.4))
