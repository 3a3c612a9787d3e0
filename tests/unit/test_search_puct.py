"""The formulas of the search, apart from any tree."""

from __future__ import annotations

import numpy as np
import pytest

from optiml.search.puct import children_allowed, mixed_value, normalised, priors, puct


def test_an_unvisited_edit_is_ranked_by_its_prior() -> None:
    scores = puct(np.zeros(3), np.zeros(3), np.array([0.2, 0.7, 0.1]), parent_visits=0, c=1.5)
    assert list(np.argsort(-scores)) == [1, 0, 2]


def test_visits_lower_the_exploration_bonus() -> None:
    scores = puct(np.array([0.5, 0.5]), np.array([9.0, 0.0]), np.array([0.5, 0.5]), parent_visits=9)
    assert scores[1] > scores[0]


def test_a_better_value_wins_once_both_are_well_visited() -> None:
    scores = puct(np.array([0.9, 0.2]), np.array([50.0, 50.0]), np.array([0.1, 0.9]), parent_visits=100)
    assert scores[0] > scores[1]


def test_arrays_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        puct(np.zeros(2), np.zeros(3), np.zeros(2), parent_visits=1)


def test_priors_are_probabilities_that_follow_the_scores_and_starve_nobody() -> None:
    weights = priors(np.array([0.9, 0.3, 0.0]))
    assert weights.sum() == pytest.approx(1.0)
    assert weights[0] > weights[1] > weights[2] >= 0.15 / 3


def test_priors_of_nothing_are_nothing() -> None:
    assert priors(np.array([])).size == 0


def test_the_value_of_a_node_mixes_mean_and_best() -> None:
    assert mixed_value(0.2, 0.8, beta=0.7) == pytest.approx(0.3 * 0.2 + 0.7 * 0.8)
    assert mixed_value(0.2, 0.8, beta=0.0) == pytest.approx(0.2)


def test_values_are_compared_on_the_scale_of_the_tree() -> None:
    assert normalised(0.5, 0.0, 1.0) == 0.5
    assert normalised(2.0, 0.0, 1.0) == 1.0
    assert normalised(0.3, 0.3, 0.3) == 0.5


@pytest.mark.parametrize(("visits", "at_root", "deeper"), [(0, 1, 1), (1, 2, 1), (4, 3, 2), (16, 6, 4), (30, 9, 4)])
def test_children_widen_with_the_visits_and_more_at_the_root(visits: int, at_root: int, deeper: int) -> None:
    assert children_allowed(visits, is_root=True) == at_root
    assert children_allowed(visits, is_root=False) == deeper
