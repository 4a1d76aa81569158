from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsifl.report import units


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.00 kB"), (1e15, "1.00 PB"), (None, units.MISSING)],
)
def test_sizes(count: float | None, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 ms"), (59.99, "60.0 s"), (math.nan, units.MISSING)]
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


def test_scores_that_are_missing_or_not_finite() -> None:
    assert units.score(None, "mse") == units.score(math.inf, "accuracy") == units.MISSING


@given(st.floats(1e-12, 1e12))
def test_significant_digits_keep_the_value(value: float) -> None:
    assert float(units.significant(value, 4)) == pytest.approx(value, rel=6e-4)
