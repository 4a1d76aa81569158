from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.engine import sampling
from parsifl.engine.settings import RunSettings


@given(st.integers(1, 200), st.floats(0.001, 1.0), st.integers(0, 99))
def test_a_cohort_is_ascending_without_repetition_and_of_the_right_size(
    count: int, participation: float, seed: int
) -> None:
    cohort = sampling.choose(count, participation, Key(seed))
    assert cohort == sorted(set(cohort))
    assert len(cohort) == max(1, round(count * participation))
    assert cohort[0] >= 0
    assert cohort[-1] < count
    assert cohort == sampling.choose(count, participation, Key(seed))


def test_every_client_is_drawn_about_equally_often() -> None:
    counts = np.zeros(10)
    for number in range(2000):
        counts[sampling.choose(10, 0.3, Key(0).replace(round=number))] += 1
    assert np.abs(counts / 2000 - 0.3).max() < 0.05


@pytest.mark.parametrize("participation", [0.0, -0.1, 1.01, float("nan")])
def test_an_impossible_participation_is_refused(participation: float) -> None:
    with pytest.raises(ConfigError, match="participation = "):
        RunSettings(participation=participation)


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 5))
def test_the_cohort_does_not_depend_on_the_order_of_calls(order: list[int], seed: int) -> None:
    straight = [sampling.choose(9, 0.5, Key(seed, number)) for number in range(4)]
    shuffled = {number: sampling.choose(9, 0.5, Key(seed, number)) for number in order}
    assert straight == [shuffled[number] for number in range(4)]
