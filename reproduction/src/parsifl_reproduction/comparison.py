"""Compare one method with another over several seeds."""

from __future__ import annotations

from collections.abc import Sequence

from parsifl_reproduction.recipe import Claim, Verdict, spread


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
) -> Claim:
    """Decide, seed by seed, whether `left` leads `right` by `least` (or, not `above`, lies below).

    Where the seeds disagree nothing is decided, whatever their mean.

    >>> compare("a leads b", "", [3.0, 5.0], [1.0, 2.0]).verdict
    'held'
    >>> compare("a leads b", "", [3.0, 1.0], [1.0, 2.0]).verdict
    'undecided'
    """
    if not left or not right:
        return Claim(statement, paper, "", "not run", "a run is missing: no data, or not asked for")
    gaps = [a - b for a, b in zip(left, right, strict=False)]
    ours = f"{spread(left)} against {spread(right)}, difference {spread(gaps)}"
    leads = [gap >= least if least else gap > 0 for gap in (gaps if above else [-g for g in gaps])]
    verdict = agreed(leads)
    if len(gaps) < 2:
        return Claim(statement, paper, ours, verdict, "one seed only: the spread is not known")
    agree = "the seeds disagree" if verdict == "undecided" else "every seed agrees"
    return Claim(statement, paper, ours, verdict, agree)
