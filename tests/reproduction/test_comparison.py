from __future__ import annotations

import math

import pytest
from scipy import stats

from parsifl_reproduction.comparison import agreed, at_grid_end, compare
from parsifl_reproduction.recipe import Claim, Verdict


@pytest.mark.parametrize(
    ("left", "right", "least", "verdict"),
    [
        ([3.0, 5.0], [1.0, 2.0], 2.0, "held"),  # one of them leads by just that much
        ([2.9, 5.0], [1.0, 2.0], 2.0, "undecided"),
        ([2.9, 3.9], [1.0, 2.0], 2.0, "did not hold"),
        ([1.0, 1.9], [1.0, 2.0], 0.0, "did not hold"),  # it leads on no seed
        ([9.0, 1.0], [1.0, 2.0], 0.0, "undecided"),  # however large the mean lead is
    ],
)
def test_a_lead_must_be_there_in_every_seed(
    left: list[float], right: list[float], least: float, verdict: str
) -> None:
    claim = compare("a leads b", "", left, right, least=least)
    assert claim.verdict == verdict
    assert claim.note == ("the seeds disagree" if verdict == "undecided" else "all 2 seeds agree")


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


def test_sides_that_are_equal_on_every_seed_are_a_tie() -> None:
    equal = compare("a leads b", "", [0.0, 2.0], [0.0, 2.0])
    assert (equal.verdict, equal.note) == ("tie", "equal on all 2 seeds")
    assert compare("a leads b by 1", "", [2.0, 2.0], [2.0, 2.0], least=1.0).verdict != "tie"
    assert compare("a is above 2", "", [2.0, 2.0], 2.0).verdict == "did not hold"


def test_a_lead_by_a_margin_or_over_a_bound_is_never_a_tie() -> None:
    left, right = [80.1, 79.9, 80.0], [80.0, 80.0, 80.1]
    assert compare("", "", left, right, least=0.05).verdict == "undecided"
    assert compare("", "", left, right, tie=False).verdict == "undecided"
    assert compare("", "", left, [80.0] * 3).verdict == "tie"
    assert compare("", "", left, 80.0).verdict == "undecided"


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


def test_twenty_seeds_without_a_difference_are_a_tie_that_states_its_resolution() -> None:
    gaps = [1.0, -1.0] * 10
    left, right = [10.0 + gap for gap in gaps], [10.0] * 20
    assert compare("", "", left[:18], right[:18]).verdict == "undecided"
    claim = compare("", "", left, right)
    assert claim.verdict == "tie"
    error = stats.sem(gaps)
    shown = (stats.t.ppf(0.975, 19) + stats.t.ppf(0.8, 19)) * error
    assert claim.note.endswith(f"resolution {shown:.2g}")
    assert compare("", "", left, right, tie=False).verdict == "undecided"


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        ([70.0, 71.0, 72.0, 73.0], [60.0, 61.0, 62.0, 30.0], "held"),  # three seeds are left
        ([70.0, 71.0, 72.0], [60.0, 61.0, 30.0], "undecided"),  # two are too few
        ([60.0, 61.0, 62.0, 30.0], [70.0, 71.0, 72.0, 73.0], "did not hold"),
        ([70.0, 71.0, 72.0, 30.0], [60.0, 61.0, 62.0, 63.0], "undecided"),  # failing is no win
        ([30.0, 30.1, 29.9], [30.0, 30.0, 30.0], "undecided"),  # a tie of two that learned nothing
    ],
)
def test_a_verdict_must_be_the_same_without_the_seeds_at_chance(
    left: list[float], right: list[float], verdict: str
) -> None:
    low = {name: [value < 100 / 3 for value in side] for name, side in (("a", left), ("b", right))}
    claim = compare("a leads b", "", left, right, untrained=low)
    assert claim.verdict == verdict
    assert "at or below chance" in claim.note


def test_twenty_seeds_that_trained_decide_alone() -> None:
    left, right = [50.0, 52.0] * 10, [51.0] * 20
    failed = [30.0] * 15
    low = {"b": [value < 100 / 3 for value in right + failed]}
    claim = compare("a leads b", "", left + [51.0] * 15, right + failed, untrained=low)
    assert claim.verdict == "tie"
    assert "where both trained; with all seeds 'held'" in claim.note
    fewer = {"b": low["b"][1:]}
    shorter = compare("", "", (left + [51.0] * 15)[1:], (right + failed)[1:], untrained=fewer)
    assert shorter.verdict == "undecided"


@pytest.mark.parametrize(
    ("held", "seeds", "verdict"),
    [(8, 9, "held"), (7, 8, "undecided"), (1, 9, "did not hold"), (2, 3, "undecided")],
)
def test_a_sign_test_decides_where_many_seeds_nearly_agree(
    held: int, seeds: int, verdict: str
) -> None:
    assert agreed([True] * held + [False] * (seeds - held)) == verdict


def test_a_seed_on_which_a_side_diverged_does_not_count() -> None:
    claim = compare("", "", [3.0, math.nan, 5.0, 4.0], [1.0, 9.0, 2.0, 2.0])
    assert claim.verdict == "held"
    assert claim.note == "all 3 seeds agree; 1 of 4 seeds diverged and do not count"
    assert compare("", "", [math.nan], [1.0]).verdict == "not run"
    assert compare("", "", [math.inf] * 3, [math.inf] * 3, above=False).verdict == "not run"


def test_a_seed_at_chance_that_diverged_is_counted_once() -> None:
    low = {"a": [True, False, False, False], "b": [False, True, False, False]}
    claim = compare("", "", [math.nan, 5.0, 5.0, 5.0], [1.0, 1.0, 2.0, 3.0], untrained=low)
    assert claim.note.endswith("at or below chance: b on 1 of 3 seeds")


def test_an_infinite_value_decides_by_the_sign_test() -> None:
    right = [math.inf, math.inf, 1.0]
    assert compare("", "", [1.0, 1.0, 2.0], right, above=False).verdict == "undecided"
    claim = compare("", "", [1.0] * 9, [math.inf] * 8 + [0.5], above=False)
    assert (claim.verdict, claim.ours) == ("held", "1.00 against 0.50, difference 0.50")
    claim = compare("", "", [1.0, 2.0], [math.inf] * 2, above=False)
    assert (claim.verdict, claim.ours) == ("held", "one side diverged on every seed")


def test_a_claim_keeps_both_sides_by_seed() -> None:
    claim = compare("", "", [1.23456789, 2.0], [1.0, 3.0])
    assert claim.left == (1.23457, 2.0)
    assert claim.right == (1.0, 3.0)


@pytest.mark.parametrize(
    ("verdict", "first", "second", "found"),
    [
        ("held", "lr=1", "", "held"),
        ("held", "", "lr=1", "undecided"),
        ("held", "lr=1", "lr=1", "undecided"),
        ("did not hold", "", "lr=1", "did not hold"),
        ("did not hold", "lr=1", "", "undecided"),
        ("tie", "lr=1", "", "undecided"),
        ("held", "", "", "held"),
    ],
)
def test_a_better_setting_beyond_the_grid_must_not_change_the_verdict(
    verdict: Verdict, first: str, second: str, found: Verdict
) -> None:
    claim = at_grid_end(Claim("a leads b", "", "", verdict, "reason"), first, second)
    assert claim.verdict == found
    assert claim.note == ("reason; at the end of the grid: " if first or second else "reason") + (
        ", ".join(filter(None, (first, second)))
    )
