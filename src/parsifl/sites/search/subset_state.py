"""The state of a best-subset search between two rounds, and its rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
ALWAYS, NEVER = -1, -2


class Phase(IntEnum):
    """The purpose of the requested coefficients."""

    LOOK = 0
    """The accepted ones, with other candidates."""
    EXCHANGE = 1
    """On another support, the minimiser of the model."""
    POLISH = 2
    """On another support, a Newton step further."""
    NEWTON = 3
    """On the accepted support, or one that contains it, a Newton step."""
    CONVERGED = 4
    STALLED = 5
    """Rounding, or a flat loss, prevents a further decrease."""
    SEPARATED = 6
    """The loss decreases without bound: classes, or events, are separated."""


@dataclass(frozen=True, eq=False)
class Rules:
    """The constraints and settings of a search.

    Attributes
    ----------
    width
        The number of coefficients.
    count
        Maximum number of selected units.
    labels
        The unit of each coefficient; ALWAYS or NEVER for one that is always or never in the model.
    ridge
        The l2 strength of each coefficient, for a loss that is a mean over rows.
    candidates
        How many columns besides the support are candidates.
    quadratic
        Whether the curvature is constant.
    precision
        The rounding error of the sums.
    noise
        The width of the noise in the sums, relative to their largest terms.
    """

    width: int
    count: int
    labels: Indices
    ridge: Array
    candidates: int
    quadratic: bool
    precision: float = 2.0**-52
    noise: float = 0.0

    @property
    def tolerance(self) -> float:
        """The Newton decrement, relative to 1 + loss, below which a point counts as minimal."""
        return max(1e-13, 1e3 * self.precision**2, 0.1 * self.precision)

    @property
    def slack(self) -> float:
        """The relative rounding error of a comparison of losses."""
        return 50 * self.precision

    def places(self, positions: Indices) -> tuple[list[Indices], Indices, Indices]:
        """Return columns by unit, columns always included, and unit labels, within `positions`."""
        labels = self.labels[positions]
        names = np.unique(labels[labels >= 0])
        if len(names) == np.count_nonzero(labels >= 0):
            where = np.flatnonzero(labels >= 0)
            order = where[np.argsort(labels[where], kind="stable")]
            units = list(order.reshape(-1, 1))
        else:
            units = [np.flatnonzero(labels == name) for name in names]
        return units, np.flatnonzero(labels == ALWAYS), names


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over all sites, as `parsifl.core.problem.CurvatureSums` has them for one."""

    rows: float
    loss: float
    gradient: Array
    diagonal: Array
    curvature: Array


@dataclass(frozen=True, eq=False)
class Search:
    """The state between two rounds.

    Attributes
    ----------
    coefficients, support, loss
        The accepted model; the loss includes the l2 term.
    rows
        The sum of weights that the accepted loss is over.
    gradient, diagonal, known, curvature
        The sums at the accepted coefficients: the curvature is on the columns `known`.
    asked, asked_support, candidates
        The next request to the sites.
    phase
        The purpose of this request.
    pivot, direction, pivot_loss, decrement, step
        A line search: `asked` is pivot - step * direction.
    tries, failures
        Newton steps on the trial support, and consecutive failed trials.
    refused
        Supports that are not tried again, as rows of unit labels.
    scale
        The diagonal at the start.
    """

    coefficients: Array
    support: Mask
    loss: float
    rows: float
    gradient: Array
    diagonal: Array
    known: Indices
    curvature: Array
    asked: Array
    asked_support: Mask
    candidates: Indices
    phase: Phase
    pivot: Array
    direction: Array
    pivot_loss: float
    decrement: float
    step: float
    tries: int
    failures: int
    refused: Indices
    scale: Array

    @property
    def done(self) -> bool:
        """Whether there are no further requests."""
        return self.phase >= Phase.CONVERGED


def begin(rules: Rules, start: Array) -> Search:
    """Return the state before the first answer, which requests the model without units.

    Only the always-included coefficients of `start` are used.
    """
    always = rules.labels == ALWAYS
    everything = rules.width <= rules.candidates + np.count_nonzero(always)
    candidates = np.arange(rules.width) if everything else np.flatnonzero(always)
    zeros, first = np.zeros(rules.width), np.where(always, start, 0.0)
    return Search(
        coefficients=first,
        support=always,
        loss=math.inf,
        rows=0.0,
        gradient=zeros,
        diagonal=zeros,
        known=np.zeros(0, np.int64),
        curvature=np.zeros(0),
        asked=first,
        asked_support=always,
        candidates=candidates,
        phase=Phase.LOOK,
        pivot=zeros,
        direction=zeros,
        pivot_loss=0.0,
        decrement=0.0,
        step=1.0,
        tries=0,
        failures=0,
        refused=np.zeros((0, rules.count), np.int64),
        scale=zeros,
    )
