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
    """Return the baselines: of Local and of FedAvg, the configuration best on validation rows.

    Test scores never choose: among several configurations without validation rows there is none.
    """
    sign = 1.0 if section.maximize else -1.0
    chosen: list[RunGroup] = []
    for name in BASELINES:
        groups = _candidates(section, name)
        if len(groups) == 1:
            chosen += groups
            continue
        scores = [_mean(group, "validation") for group in groups]
        known = [
            (sign * score, -position) for position, score in enumerate(scores) if score is not None
        ]
        if known and len(known) == len(groups):
            chosen.append(groups[-max(known)[1]])
    return chosen


def undecided(section: Section) -> list[str]:
    """Return a note for each baseline with several configurations that cannot be chosen from."""
    named = {group.algorithm for group in baselines(section)}
    return [
        f"Gains over {name} are left out: there are {len(groups)} configurations of it, not all "
        "with validation rows, and test scores must not choose. Hold out rows (--validation 0.1), "
        "or report one configuration."
        for name in BASELINES
        if len(groups := _candidates(section, name)) > 1 and name not in named
    ]


def _candidates(section: Section, name: str) -> list[RunGroup]:
    """Return the configurations of an algorithm that have test scores."""
    return [
        group
        for group in section.groups
        if group.algorithm == name and _mean(group, "test") is not None
    ]


def gains(section: Section, baseline: RunGroup) -> list[Gain]:
    """Return the gain of every other algorithm over a baseline, where they share a seed."""
    all_gains: list[Gain] = []
    for group in section.groups:
        if group is baseline:
            continue
        pairs = list(_pairs(group, baseline))
        by_seed = [_difference(run, other) for run, other in pairs]
        by_known_seed = tuple(value for value in by_seed if value is not None)
        by_client = tuple(value for pair in pairs for value in _client_gains(*pair))
        if by_known_seed:
            all_gains.append(Gain(group, baseline, by_known_seed, by_client))
    return all_gains


def _pairs(group: RunGroup, baseline: RunGroup) -> Iterator[tuple[RunData, RunData]]:
    others = {run.seed: run for run in baseline.runs}
    yield from ((run, others[run.seed]) for run in group.runs if run.seed in others)


def _difference(run: RunData, other: RunData) -> float | None:
    mine, theirs = _score(run), _score(other)
    if mine is None or theirs is None:
        return None
    return mine - theirs if run.maximize else theirs - mine


def _score(run: RunData, split: str = "test") -> float | None:
    record = run.selected("personal")
    scores = {} if record is None else record.scores["personal"].get(split, {})
    return scores[run.score]["mean"] if run.score in scores else None


def _mean(group: RunGroup, split: str) -> float | None:
    """Return the mean over seeds; None unless all seeds have a score on this split."""
    scores = [_score(run, split) for run in group.runs]
    known = [score for score in scores if score is not None]
    return fmean(known) if known and (split == "test" or len(known) == len(scores)) else None


def _client_gains(run: RunData, other: RunData) -> Iterator[float]:
    mine, theirs = (r.clients.get(("personal", "test")) for r in (run, other))
    if mine is None or theirs is None or run.data_checksum != other.data_checksum:
        return
    known = dict(zip(theirs.clients, theirs.values.get(run.score, ()), strict=False))
    sign = 1.0 if run.maximize else -1.0
    for client, value in zip(mine.clients, mine.values.get(run.score, ()), strict=False):
        if client in known:
            yield sign * (value - known[client])
