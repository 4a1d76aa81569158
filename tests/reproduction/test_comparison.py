from __future__ import annotations

import pytest
from scipy import stats

from parsifl_reproduction.comparison import compare


@pytest.mark.parametrize(
    ("left", "right", "least", "verdict"),
    [
        ([3.0, 5.0], [1.0, 2.0], 2.0, "held"),  # one of them leads by just that much
        ([2.9, 5.0], [1.0, 2.0], 2.0, "undecided"),
        ([2.9, 3.9], [1.0, 2.0], 2.0, "did not hold"),
        ([1.0, 2.0], [1.0, 2.0], 0.0, "did not hold"),  # nobody leads on any seed
        ([9.0, 1.0], [1.0, 2.0], 0.0, "undecided"),  # however large the mean lead is
    ],
)
def test_a_lead_must_be_there_in_every_seed(
    left: list[float], right: list[float], least: float, verdict: str
) -> None:
    claim = compare("a leads b", "", left, right, least=least)
    assert claim.verdict == verdict
    assert claim.note == ("the seeds disagree" if verdict == "undecided" else "every seed agrees")


def test_a_claim_may_be_that_the_first_lies_below() -> None:
    assert compare("a lies below b", "", [1.0, 2.0], [3.0, 4.0], above=False).verdict == "held"
    assert compare("a lies below b", "", [3.0], [1.0], above=False).verdict == "did not hold"


def test_one_seed_is_said_to_be_one_and_none_is_not_run() -> None:
    assert compare("a leads b", "", [3.0], [1.0]).note.startswith("one seed only")
    assert compare("a leads b", "", [], [1.0]).verdict == "not run"


def test_seeds_that_disagree_within_one_percent_are_a_tie() -> None:
    claim = compare("a leads b", "", [80.1, 79.9, 80.0], [80.0, 80.0, 80.1])
    assert claim.verdict == "tie"
    half = stats.t.ppf(0.975, 2) * stats.sem([0.1, -0.1, -0.1])
    assert f"{-1 / 30 - half:.3g} to {-1 / 30 + half:.3g}" in claim.note


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([1.0, -1.0, 0.5], "undecided"),  # the interval is wider than one percent of 80
        ([0.1, -0.1], "undecided"),  # two seeds have no interval to speak of
    ],
)
def test_a_tie_must_be_shown(gaps: list[float], verdict: str) -> None:
    left = [80.0 + gap for gap in gaps]
    assert compare("a leads b", "", left, [80.0] * len(gaps)).verdict == verdict


def test_a_lead_by_a_margin_or_over_a_bound_is_never_a_tie() -> None:
    left, right = [80.1, 79.9, 80.0], [80.0, 80.0, 80.1]
    assert compare("", "", left, right, least=0.05).verdict == "undecided"
    assert compare("", "", left, right, tie=False).verdict == "undecided"


@pytest.mark.parametrize("above", [True, False])
def test_five_seeds_decide_by_their_mean_where_they_disagree(above: bool) -> None:
    gaps = [5.0, 4.0, 6.0, 5.0, -0.1]
    left = [10.0 + (gap if above else -gap) for gap in gaps]
    claim = compare("", "", left, [10.0] * 5, above=above)
    assert claim.verdict == "held"
    assert claim.note.startswith("on 4 of 5 seeds")
    assert compare("", "", left, [10.0] * 5, above=not above).verdict == "did not hold"
    assert compare("", "", left[-3:], [10.0] * 3, above=above).verdict == "undecided"
    assert compare("", "", left, [10.0] * 5, above=above, least=4.0).verdict == "undecided"
