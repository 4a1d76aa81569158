"""Compare one method with another over several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean

from scipy import stats

from parsifl_reproduction.recipe import Claim, Verdict, spread

FEWEST, ENOUGH, MOST = 3, 5, 20
"""Seeds that can show a tie, seeds whose mean decides where they disagree, and seeds after which
a difference that has not shown is called a tie."""
LEVEL, POWER, MARGIN = 0.95, 0.8, 0.01
"""The level of the interval, the power at which the resolution is stated, and what counts as a
tie: a part of the larger mean."""


def agreed(held: Sequence[bool]) -> Verdict:
    """Return what the seeds say together; "not run" if there are none.

    Where they disagree, a two-sided sign test decides, which takes at least nine seeds.

    >>> agreed([True, False])
    'undecided'
    >>> agreed([True] * 8 + [False])
    'held'
    """
    if not held:
        return "not run"
    if any(held) and not all(held):
        if stats.binomtest(sum(held), len(held)).pvalue > 1 - LEVEL:
            return "undecided"
        return "held" if sum(held) > len(held) / 2 else "did not hold"
    return "held" if all(held) else "did not hold"


def compare(
    statement: str,
    paper: str,
    left: Sequence[float] | None,
    right: Sequence[float] | float | None,
    *,
    least: float = 0.0,
    above: bool = True,
    tie: bool = True,
    untrained: Mapping[str, Sequence[bool]] | None = None,
    runs: tuple[str, ...] | None = None,
) -> Claim:
    """Decide, seed by seed, whether `left` leads `right` by `least` (or, not `above`, lies below).

    Where every seed agrees, that decides; sides that are equal on every seed are a tie. Where seeds
    disagree, the t-interval of the mean difference decides: with five seeds or more if it excludes
    `least`; with three or more it shows a tie if it lies within one percent of the larger mean
    around 0; with twenty or more every interval that includes 0 is a tie. Without `tie`, with
    `least`, or if `right` is a number, a fixed bound, no tie is possible. Anything else is
    undecided. (ADR 15)

    `untrained` says for each side by name on which seeds it ended at or below chance. Such runs do
    not count as evidence: twenty seeds or more without one decide alone; with fewer, the verdict
    must be the same with and without the seeds at chance. A run that diverged has the worst value,
    inf or -inf; a seed on which both sides diverged, or with a value of nan, does not count.
    `runs` names the jobs on both sides (`Claim.runs`).

    >>> compare("a leads b", "", [3.0, 5.0], [1.0, 2.0]).verdict
    'held'
    >>> compare("a leads b", "", [3.0, 1.0], [1.0, 2.0]).verdict
    'undecided'
    >>> compare("a leads b", "", [80.1, 79.9, 80.0], [80.0, 80.0, 80.1]).verdict
    'tie'
    """
    if isinstance(right, int | float):
        right, tie = [right] * len(left or ()), False
    if not left or not right:
        return Claim(statement, paper, "", "not run", "a run is missing: no data, or not asked for")
    every = list(zip(left, right, strict=False))
    known = [not math.isnan(a - b) for a, b in every]
    pairs = list(compress(every, known))
    if not pairs:
        return Claim(statement, paper, "", "not run", "every run diverged")
    verdict, note = _decide(pairs, least, above, tie)
    if len(pairs) < len(every):
        note += f"; {len(every) - len(pairs)} of {len(every)} seeds diverged and do not count"
    low = {name: list(compress(flags, known)) for name, flags in (untrained or {}).items()}
    at_chance = [any(seed) for seed in zip(*low.values(), strict=False)]
    if any(at_chance):
        rest = [pair for pair, flag in zip(pairs, at_chance, strict=False) if not flag]
        verdict, note = _trained(rest, (verdict, note), least, above, tie)
        names = [f"{name} on {sum(flags)}" for name, flags in low.items() if any(flags)]
        note = f"{note}; at or below chance: {', '.join(names)} of {len(pairs)} seeds"
    ours, theirs = (_rounded(side) for side in zip(*pairs, strict=True))
    return Claim(statement, paper, _shown(pairs), verdict, note, "", ours, theirs, runs)


def at_grid_end(claim: Claim, first: str = "", second: str = "") -> Claim:
    """Return the claim, undecided if a setting beyond the end of a grid could change it.

    `first` and `second` name the best setting of a side if it is the last one of its grid. A still
    better one could only confirm a claim that held if the first side has it, and only refute it if
    the second side does.

    >>> held = Claim("a leads b", "", "", "held")
    >>> at_grid_end(held, first="lr=10").verdict, at_grid_end(held, second="lr=10").verdict
    ('held', 'undecided')
    """
    ends = [each for each in (first, second) if each]
    if not ends or claim.verdict == "not run":
        return claim
    sure = {"held": not second, "did not hold": not first}.get(claim.verdict, False)
    parts = (claim.note, f"at the end of the grid: {', '.join(ends)}")
    note = "; ".join(part for part in parts if part)
    if sure or claim.verdict == "undecided":
        return replace(claim, note=note)
    return replace(claim, verdict="undecided", note=note, runs=())  # further seeds cannot decide it


def _decide(
    pairs: Sequence[tuple[float, float]], least: float, above: bool, tie: bool
) -> tuple[Verdict, str]:
    """Return the verdict of the seeds and the reason for it."""
    sign = 1 if above else -1
    gaps = [a - b for a, b in pairs]
    leads = [sign * gap >= least if least else sign * gap > 0 for gap in gaps]
    if len(gaps) < 2:
        return agreed(leads), "one seed only: the spread is not known"
    if tie and not least and not any(gaps):
        return "tie", f"equal on all {len(gaps)} seeds"
    if len(set(leads)) == 1:
        return agreed(leads), f"all {len(gaps)} seeds agree"
    if not all(map(math.isfinite, gaps)):
        return agreed(leads), f"on {sum(leads)} of {len(leads)} seeds; some runs diverged"
    if len(gaps) < FEWEST:
        return "undecided", "the seeds disagree"
    largest = max(abs(fmean(side)) for side in zip(*pairs, strict=True))
    low, high = _interval(gaps)
    ends = sorted((sign * low, sign * high))
    note = (
        f"on {sum(leads)} of {len(leads)} seeds; mean difference {fmean(gaps):.3g}, 95 % interval "
        f"{low:.3g} to {high:.3g}"
    )
    if len(gaps) >= ENOUGH and ends[0] > least:
        return "held", note
    if len(gaps) >= ENOUGH and ends[1] < least:
        return "did not hold", note
    note += f", resolution {_resolution(gaps):.2g}"
    close = max(map(abs, ends)) <= MARGIN * largest
    if tie and not least and (close or len(gaps) >= MOST):
        return "tie", note
    return "undecided", note


def _interval(gaps: Sequence[float]) -> tuple[float, float]:
    """Return the t-interval of the mean."""
    half = _quantile(gaps, (1 + LEVEL) / 2)
    return fmean(gaps) - half, fmean(gaps) + half


def _resolution(gaps: Sequence[float]) -> float:
    """Return the mean difference that this many seeds would show with probability `POWER`."""
    return _quantile(gaps, (1 + LEVEL) / 2) + _quantile(gaps, POWER)


def _quantile(gaps: Sequence[float], level: float) -> float:
    return float(stats.t.ppf(level, len(gaps) - 1) * stats.sem(gaps))


def _trained(
    rest: Sequence[tuple[float, float]],
    everyone: tuple[Verdict, str],
    least: float,
    above: bool,
    tie: bool,
) -> tuple[Verdict, str]:
    """Return the verdict and the reason where some seeds ended at chance and the rest did not."""
    verdict, note = everyone
    without, reason = (
        _decide(rest, least, above, tie) if len(rest) >= FEWEST else ("undecided", "too few seeds")
    )
    if len(rest) >= MOST:
        return without, f"{reason}, where both trained; with all seeds '{verdict}'"
    if verdict == without:
        return verdict, f"{note}; the same without the seeds at chance"
    return "undecided", f"{note}; '{without}' without the seeds at chance"


def _shown(pairs: Sequence[tuple[float, float]]) -> str:
    """Return both sides and their difference, over the seeds on which both sides converged."""
    finite = [pair for pair in pairs if math.isfinite(pair[0] - pair[1])]
    if not finite:
        return "one side diverged on every seed"
    left, right = zip(*finite, strict=True)
    gap = spread([a - b for a, b in finite])
    return f"{spread(left)} against {spread(right)}, difference {gap}"


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)
