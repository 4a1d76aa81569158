"""Compare one method with another over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from scipy import stats

from parsifl_reproduction.recipe import Claim, Verdict, spread

FEWEST, ENOUGH = 3, 5
"""Seeds that can show a tie, and seeds whose mean decides where they disagree."""
LEVEL, MARGIN = 0.95, 0.01
"""The level of the interval, and what counts as a tie: a part of the larger mean."""


def agreed(held: Sequence[bool]) -> Verdict:
    """Return what the seeds say together; "not run" if there are none.

    >>> agreed([True, False])
    'undecided'
    """
    if not held:
        return "not run"
    return "held" if all(held) else "undecided" if any(held) else "did not hold"


def compare(
    statement: str,
    paper: str,
    left: Sequence[float] | None,
    right: Sequence[float] | None,
    *,
    least: float = 0.0,
    above: bool = True,
    tie: bool = True,
) -> Claim:
    """Decide, seed by seed, whether `left` leads `right` by `least` (or, not `above`, lies below).

    Where every seed agrees, that decides. Where they disagree, the t-interval of the mean
    difference does: with five seeds or more it decides if it excludes `least`; with three or more
    it shows a tie if it lies within one percent of the larger mean around 0. Without `tie`, or
    with `least`, no tie is possible. Anything else is undecided. (ADR 14)

    >>> compare("a leads b", "", [3.0, 5.0], [1.0, 2.0]).verdict
    'held'
    >>> compare("a leads b", "", [3.0, 1.0], [1.0, 2.0]).verdict
    'undecided'
    >>> compare("a leads b", "", [80.1, 79.9, 80.0], [80.0, 80.0, 80.1]).verdict
    'tie'
    """
    if not left or not right:
        return Claim(statement, paper, "", "not run", "a run is missing: no data, or not asked for")
    gaps = [a - b for a, b in zip(left, right, strict=False)]
    ours = f"{spread(left)} against {spread(right)}, difference {spread(gaps)}"
    sign = 1 if above else -1
    leads = [sign * gap >= least if least else sign * gap > 0 for gap in gaps]
    verdict = agreed(leads)
    if len(gaps) < 2:
        note = "one seed only: the spread is not known"
    elif verdict != "undecided":
        note = "every seed agrees"
    elif len(gaps) < FEWEST:
        note = "the seeds disagree"
    else:
        margin = MARGIN * max(abs(fmean(left)), abs(fmean(right))) if tie and not least else 0.0
        low, high = _interval(gaps)
        verdict = _by_interval(sign * low, sign * high, len(gaps), least, margin)
        seeds = f"on {sum(leads)} of {len(leads)} seeds"
        found = f"mean difference {fmean(gaps):.3g}, 95 % interval {low:.3g} to {high:.3g}"
        note = f"{seeds}; {found}"
    return Claim(statement, paper, ours, verdict, note)


def _interval(gaps: Sequence[float]) -> tuple[float, float]:
    """Return the t-interval of the mean."""
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(gaps) - 1) * stats.sem(gaps))
    return fmean(gaps) - half, fmean(gaps) + half


def _by_interval(one: float, other: float, seeds: int, least: float, margin: float) -> Verdict:
    low, high = sorted((one, other))
    if seeds >= ENOUGH and low > least:
        return "held"
    if seeds >= ENOUGH and high < least:
        return "did not hold"
    return "tie" if margin and -margin <= low and high <= margin else "undecided"
