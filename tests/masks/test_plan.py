from __future__ import annotations

import itertools

import numpy as np
import pytest

from parsifl.core.errors import ConfigError
from parsifl.engine.sampling import cohort_size
from parsifl.masks import expected_bias, optimal
from parsifl.masks.instance import bias


def by_enumeration(
    sizes: list[int], masks: np.ndarray, cohort: int, weights: np.ndarray | None = None
) -> float:
    total = np.array(sizes, dtype=float)
    found = [
        bias(total, masks[list(some)], None if weights is None else weights[list(some)])
        for some in itertools.combinations(range(len(masks)), cohort)
    ]
    return float(np.mean(found))


@pytest.mark.parametrize("cohort", [1, 2, 3, 5])
def test_equals_the_mean_over_all_cohorts(cohort: int) -> None:
    sizes = [5, 3, 2]
    plan = optimal(sizes, [10, 7, 5, 3, 2])
    found = expected_bias(plan, cohort / 5)
    assert found.cohort == cohort
    assert found.error == 0.0
    assert found.mean == pytest.approx(by_enumeration(sizes, plan.masks, cohort))


def test_everyone_gives_the_bias_of_the_plan() -> None:
    plan = optimal([5, 3, 2], [10, 7, 5, 3])
    assert expected_bias(plan, 1.0).mean == pytest.approx(plan.bias)


@pytest.mark.parametrize("cohort", [1, 2, 4, 5])
def test_devices_count_by_their_weights(cohort: int) -> None:
    sizes, weights = [5, 3, 2], [30, 10, 10, 2, 2]
    plan = optimal(sizes, [10, 7, 7, 3, 3], weights=weights)
    mean = by_enumeration(sizes, plan.masks, cohort, np.array(weights, dtype=float))
    assert expected_bias(plan, cohort / 5).mean == pytest.approx(mean)


def test_draws_agree_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = optimal([5, 3, 2], [10, 7, 5, 3, 2])
    exact = expected_bias(plan, 0.6)
    monkeypatch.setattr("parsifl.masks.plan._EXACT", 0)
    drawn = expected_bias(plan, 0.6)
    assert drawn.error > 0.0
    assert abs(drawn.mean - exact.mean) < 5 * drawn.error


def test_bad_participation_is_refused() -> None:
    plan = optimal([1], [1])
    with pytest.raises(ConfigError, match=r"participation must be .* got 0"):
        expected_bias(plan, 0.0)
    with pytest.raises(ConfigError, match="draws must be at least 2, got 1"):
        expected_bias(plan, 0.5, draws=1)


@pytest.mark.parametrize(
    ("devices", "share"), [(5, 0.3), (5, 0.7), (5, 0.5), (5, 0.01), (9, 0.256)]
)
def test_the_cohort_is_the_one_that_a_round_draws(devices: int, share: float) -> None:
    plan = optimal([1, 1], [1, 2] + [2] * (devices - 2))
    assert expected_bias(plan, share).cohort == cohort_size(devices, share)
