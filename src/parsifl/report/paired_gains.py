"""Differences between algorithms: paired by seed, and paired by client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median, stdev

from parsifl.engine.run_dir import RunData
from parsifl.report.groups import RunGroup, Section

BASELINES = ("local", "fedavg")


@dataclass(frozen=True)
class Gain:
    """How much better one algorithm is than another; positive is better for every score.

    Attributes
    ----------
    by_seed
        The difference of the headline scores, for every seed that both have.
    by_client
        The difference on each client that both evaluated on the same rows, all seeds together.
    """

    group: RunGroup
    baseline: RunGroup
    by_seed: tuple[float, ...]
    by_client: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.by_seed)

    @property
    def margin(self) -> float | None:
        """Half the 95 % t-interval of the mean over seeds; None for a single seed."""
        count = len(self.by_seed)
        if count < 2:
            return None
        # importing SciPy takes time, and only this line needs it
        from scipy.special import stdtrit

        return float(stdtrit(count - 1, 0.975)) * stdev(self.by_seed) / math.sqrt(count)

    @property
    def median_client(self) -> float | None:
        """The median over clients."""
        return median(self.by_client) if self.by_client else None

    def share(self, sign: int) -> float | None:
        """Return the fraction of clients that gain (sign 1) or lose (sign -1)."""
        if not self.by_client:
            return None
        return sum(sign * value > 0 for value in self.by_client) / len(self.by_client)


def baselines(section: Section) -> list[RunGroup]:
    """Return the baselines: of Local and of FedAvg, the configuration that scores best."""
    sign = 1.0 if section.maximize else -1.0
    found: list[RunGroup] = []
    for name in BASELINES:
        groups = [g for g in section.groups if g.algorithm == name and _mean(g) is not None]
        if groups:
            found.append(max(groups, key=lambda group: sign * (_mean(group) or 0.0)))
    return found


def gains(section: Section, baseline: RunGroup) -> list[Gain]:
    """Return the gain of every other algorithm over a baseline, where they share a seed."""
    found: list[Gain] = []
    for group in section.groups:
        if group is baseline:
            continue
        pairs = list(_pairs(group, baseline))
        by_seed = [_difference(run, other) for run, other in pairs]
        kept = tuple(value for value in by_seed if value is not None)
        by_client = tuple(value for pair in pairs for value in _client_gains(*pair))
        if kept:
            found.append(Gain(group, baseline, kept, by_client))
    return found


def _pairs(group: RunGroup, baseline: RunGroup) -> Iterator[tuple[RunData, RunData]]:
    others = {run.seed: run for run in baseline.runs}
    yield from ((run, others[run.seed]) for run in group.runs if run.seed in others)


def _difference(run: RunData, other: RunData) -> float | None:
    mine, theirs = _score(run), _score(other)
    if mine is None or theirs is None:
        return None
    return mine - theirs if run.maximize else theirs - mine


def _score(run: RunData) -> float | None:
    found = run.selected("personal")
    return None if found is None else found.scores["personal"]["test"][run.score]["mean"]


def _mean(group: RunGroup) -> float | None:
    scores = [score for run in group.runs if (score := _score(run)) is not None]
    return fmean(scores) if scores else None


def _client_gains(run: RunData, other: RunData) -> Iterator[float]:
    mine, theirs = (r.clients.get(("personal", "test")) for r in (run, other))
    if mine is None or theirs is None or run.data_checksum != other.data_checksum:
        return
    known = dict(zip(theirs.clients, theirs.values.get(run.score, ()), strict=False))
    sign = 1.0 if run.maximize else -1.0
    for client, value in zip(mine.clients, mine.values.get(run.score, ()), strict=False):
        if client in known:
            yield sign * (value - known[client])
