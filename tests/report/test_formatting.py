from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsifl.report import formatting


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1.00 kB"), (1e15, "1.00 PB"), (None, formatting.MISSING)],
)
def test_sizes(count: float | None, text: str) -> None:
    assert formatting.size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0 ms"), (59.99, "60.0 s"), (math.nan, formatting.MISSING)]
)
def test_seconds(value: float, text: str) -> None:
    assert formatting.seconds(value) == text


def test_scores_that_are_missing_or_not_finite() -> None:
    assert (
        formatting.score(None, "mse")
        == formatting.score(math.inf, "accuracy")
        == formatting.MISSING
    )


@given(st.floats(1e-12, 1e12))
def test_significant_digits_keep_the_value(value: float) -> None:
    assert float(formatting.significant(value, 4)) == pytest.approx(value, rel=6e-4)
