"""The bias that remains when only a part of the devices takes part in a round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.masks.instance import Floats, Ints, Masks, is_number, is_whole
from parsifl.masks.plan import MaskPlan

_EXACT = 20_000  # cohorts (counted by masks) that are summed one by one


@dataclass(frozen=True)
class ExpectedBias:
    """The mean over cohorts; `error` is its standard error, zero where all were summed."""

    mean: float
    error: float
    cohort: int


def expected_bias(plan: MaskPlan, participation: float, *, draws: int = 4000) -> ExpectedBias:
    """Return E[bias] when max(c N, 1) devices, drawn without replacement, form a round.

    Devices of equal mask are interchangeable, so a cohort is how many of each mask came. These
    are summed exactly if they are few, else drawn `draws` times with a fixed key.

    >>> from parsifl.masks import optimal
    >>> round(expected_bias(optimal([1, 1], [1, 2]), 0.5).mean, 6)
    0.5
    """
    if not is_number(participation) or not 0.0 < participation <= 1.0:
        raise ConfigError(f"participation must be above 0 and at most 1, got {participation!r}")
    if not is_whole(draws, 2):
        raise ConfigError(f"draws must be at least 2, got {draws!r}")
    kinds, counts = np.unique(plan.masks, axis=0, return_counts=True)
    cohort = max(1, round(participation * len(plan.masks)))  # as a round draws it
    if math.prod(int(count) + 1 for count in counts) <= _EXACT:
        return _summed(plan, kinds, counts, cohort)
    generator = Key(0, purpose="participation").numpy_generator()
    came = generator.multivariate_hypergeometric(counts, cohort, size=draws)
    found = _biases(plan.instance.sizes, kinds, came)
    return ExpectedBias(float(found.mean()), float(found.std(ddof=1) / math.sqrt(draws)), cohort)


def _summed(plan: MaskPlan, kinds: Masks, counts: Ints, cohort: int) -> ExpectedBias:
    listed = np.array(list(_cohorts([int(count) for count in counts], cohort)))
    ways = [
        sum(math.log(math.comb(int(n), int(k))) for n, k in zip(counts, came, strict=True))
        for came in listed
    ]
    chance = np.exp(np.array(ways) - math.log(math.comb(int(counts.sum()), cohort)))
    found = _biases(plan.instance.sizes, kinds, listed)
    return ExpectedBias(float(chance @ found), 0.0, cohort)


def _cohorts(counts: list[int], cohort: int) -> Iterator[tuple[int, ...]]:
    if len(counts) == 1:
        if cohort <= counts[0]:
            yield (cohort,)
        return
    for came in range(min(counts[0], cohort) + 1):
        for rest in _cohorts(counts[1:], cohort - came):
            yield (came, *rest)


def _biases(sizes: Floats, kinds: Masks, came: Ints) -> Floats:
    """Return the bias of each cohort, given how many of each mask came: [cohorts, kinds]."""
    coverage = came @ kinds.astype(np.int64)
    gamma = np.zeros(len(came))
    for kind, mask in enumerate(kinds):
        if mask.any():
            least = coverage[:, mask].min(axis=1)
            gamma += np.where(came[:, kind] > 0, came[:, kind] / np.maximum(least, 1), 0.0)
    biases: Floats = sizes.sum() * gamma - (coverage > 0) @ sizes
    return biases
