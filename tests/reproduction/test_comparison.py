from __future__ import annotations

import pytest

from parsifl_reproduction.comparison import compare


@pytest.mark.parametrize(
    ("left", "right", "least", "verdict"),
    [
        ([3.0, 5.0], [1.0, 2.0], 2.0, "held"),  # one of them leads by just that much
        ([2.9, 5.0], [1.0, 2.0], 2.0, "undecided"),
        ([2.9, 3.9], [1.0, 2.0], 2.0, "did not hold"),
        ([1.0, 2.0], [1.0, 2.0], 0.0, "did not hold"),  # a tie is no lead
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
