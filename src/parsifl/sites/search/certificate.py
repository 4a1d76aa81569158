"""Bounds on the distance of a support from the optimum, by branch and bound.

The loss on all units that a support may use bounds the loss of the support from below. For a
squared loss all bounds follow from the sums of the fit. For another loss each bound is a separate
fit by Newton steps, for which sites send sums; the steps of many fits share a round.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parsifl.sites.search.best_subset import penalised, symmetric
from parsifl.sites.search.subset_model import DEPENDENT, SubsetModel, Units
from parsifl.sites.search.subset_state import ALWAYS, Array, Indices, Rules, Sums

_STEPS = 30
_MINIMAL = 1e-10
"""The Newton decrement, relative to 1 + loss, below which a bound counts as converged."""
_TIE = 1e-8
_SHORTEST = 2.0**-12
_LOST, _IMPRECISE, _ROUNDED, _PRECISE = 1e-14, 1e-11, 1e-13, 1e-9
_MOST_PAIRS = 50

Ask = Callable[[Sequence[tuple[Array, Indices]]], list[Sums]]
"""Returns the sums over all sites, without a ridge, at some coefficients with their columns."""


@dataclass(frozen=True)
class Certificate:
    """A bound on the distance of a support from the optimum.

    Attributes
    ----------
    proven
        Whether no support of this size has a smaller loss.
    gap
        The possible relative decrease of the loss; NaN if unknown.
    nodes
        The number of nodes that branch and bound visited.
    reason
        A description in words.
    rounds
        The number of rounds of messages, in addition to those of the fit.
    """

    proven: bool
    gap: float
    nodes: int
    reason: str
    rounds: int = 0

    @classmethod
    def of(
        cls, loss: float, lowest: float, nodes: int, rounds: int = 0, *, reached: bool = False
    ) -> Certificate:
        """Return the certificate of a lower bound; `reached` if some support attains it."""
        fall, size = max(loss - lowest, 0.0), abs(loss)
        gap = fall / size if size > 0 else 0.0
        extra = f" ({rounds} further rounds)" if rounds else ""
        if gap <= (_TIE if rounds else 1e-9):
            reason = f"no support of this size has a smaller loss{extra}"
            return cls(True, 0.0, nodes, reason, rounds)
        if not np.isfinite(gap):
            reason = f"no lower bound of the loss was found{extra}"
            return cls(False, float("nan"), nodes, reason, rounds)
        verb = "has" if reached else "may have"
        reason = f"a support of this size {verb} a loss that is smaller by {gap:.2%}, not more"
        return cls(False, float(gap), nodes, reason + extra, rounds)


@dataclass(eq=False)
class _Node:
    """Units that may be used, those that must be, and the fit to all that may be."""

    below: float
    allowed: Units
    forced: frozenset[int]
    start: Array
    fitted: _Fitted | None = None


@dataclass(frozen=True, eq=False)
class _Fitted:
    """The quadratic model at the minimum of a node, on `columns`; unit i of it is `names[i]`."""

    model: SubsetModel
    columns: Indices
    names: list[int]
    costs: Array
    """The cost of removing each unit according to the model."""

    def start(self, units: Sequence[int], width: int) -> Array:
        """Return the model's coefficients of some units."""
        fit = self.model.fit(self.names.index(unit) for unit in units)
        coefficients = np.zeros(width)
        coefficients[self.columns[fit.columns]] = fit.coefficients
        return coefficients


def undecided(model: SubsetModel, here: Units, nodes: int) -> str:
    """Return why a proof does not hold for columns that are nearly equal; empty if it does.

    A column that differs from another by less than about 1e-5 of its size adds nothing in the
    search, because the sums lose the difference. Subsets with both columns are bounded here, with
    the difference, scaled to size 1, in place of the second column.
    """
    pairs, count = _near_pairs(model), len(here)
    if count < 2 or not pairs:
        return ""
    value, support = model.fit(here).value, model.columns(here)
    slack = _PRECISE * abs(value)
    for number, (i, j) in enumerate(pairs):
        text = (
            f"columns {i} and {j} are nearly equal, and whether a support with both has a smaller "
            "loss is not decidable at this precision: remove one, or center and scale their "
            "difference"
        )
        left, product, other = _difference(model, i, j)
        if left <= _LOST and product <= _ROUNDED * np.sqrt(abs(2 * value)):
            continue  # equal up to rounding
        both = left <= _IMPRECISE and {i, j} <= set(support.tolist())
        if left <= _LOST or both or number >= _MOST_PAIRS:
            return text
        lowest, _, _ = other.bound(tuple(range(count - 2)), count - 2, nodes)
        if lowest < value - slack:
            return text
    return ""


def _near_pairs(model: SubsetModel) -> list[tuple[int, int]]:
    """Return pairs of units of one column whose difference the search does not see."""
    columns = np.array([unit[0] for unit in model.units if len(unit) == 1], np.int64)
    size = np.sqrt(np.maximum(np.diag(model.curvature)[columns], 0.0))
    size = np.where(size > 0, size, np.inf)
    inner = model.curvature[np.ix_(columns, columns)] / np.outer(size, size)
    near = np.argwhere(
        np.triu(1 - inner**2 <= 2 * DEPENDENT, 1) & np.isfinite(np.outer(size, size))
    )
    return [(int(columns[i]), int(columns[j])) for i, j in near]


def _difference(model: SubsetModel, i: int, j: int) -> tuple[float, float, SubsetModel]:
    """Return what column j has beside column i, and a model with both, where j is this part.

    That is its fraction of the curvature, its product with the target for a column j of size 1,
    and the model.
    """
    change = np.eye(len(model.target))
    change[j, i] = -model.curvature[i, j] / model.curvature[i, i]
    curvature = change @ model.curvature @ change.T
    left = float(curvature[j, j] / model.curvature[j, j])
    product = float(abs(change[j] @ model.target) / np.sqrt(model.curvature[j, j]))
    scale = 1 / np.sqrt(max(curvature[j, j], _LOST * model.curvature[j, j]))
    change[j] *= scale
    curvature = change @ model.curvature @ change.T
    curvature[j, i] = curvature[i, j] = 0.0
    units = [unit for unit in model.units if unit[0] not in (i, j)]
    always = np.sort(np.append(model.always, [i, j])).astype(np.int64)
    return left, product, SubsetModel(curvature, change @ model.target, units, always)


def prove(
    ask: Ask,
    rules: Rules,
    coefficients: Array,
    loss: float,
    *,
    rounds: int,
    batch: int,
    floor: float,
) -> Certificate:
    """Bound the loss of all supports of `rules.count` units in at most `rounds` rounds.

    Parameters
    ----------
    coefficients, loss
        The fit; the loss includes the ridge.
    batch
        How many fits share a round.
    floor
        A lower bound of any loss.
    """
    proof, tickets, visited = _Proof(ask, rules, rounds), itertools.count(), 0
    everything = tuple(range(int(rules.labels.max(initial=-1)) + 1))
    heap = [(floor, next(tickets), _Node(floor, everything, frozenset(), coefficients))]
    value, unknown = loss, [np.inf]
    while heap and proof.rounds < rounds and heap[0][0] < value - _TIE * abs(value):
        nodes = [heapq.heappop(heap)[2] for _ in range(min(batch, len(heap)))]
        visited += len(nodes)
        proof.bound(nodes)
        for node in nodes:
            if node.below >= value - _TIE * abs(value):
                continue
            if len(node.allowed) > rules.count:
                for child in _children(node, rules):
                    heapq.heappush(heap, (child.below, next(tickets), child))
            elif node.fitted is None:  # its fit did not end
                unknown.append(node.below)
            else:
                value = node.below
    lowest = min([value, *unknown, *(entry[0] for entry in heap)])
    return Certificate.of(loss, lowest, visited, proof.rounds, reached=lowest == value)


def _children(node: _Node, rules: Rules) -> list[_Node]:
    """Return the child nodes, each without one optional unit, the most expensive one first.

    Later children must contain the units of earlier ones, so that no support is visited twice.
    """
    fitted = node.fitted
    costs = np.zeros(len(node.allowed)) if fitted is None else fitted.costs
    order = sorted(zip((-costs).tolist(), node.allowed, strict=True))
    must, children = set(node.forced), []
    for unit in (unit for _, unit in order if unit not in node.forced):
        last = len(must) == rules.count  # the rest can only be left out: a single support remains
        left = sorted(must) if last else [other for other in node.allowed if other != unit]
        start = node.start if fitted is None else fitted.start(left, rules.width)
        children.append(_Node(node.below, tuple(left), frozenset(must), start))
        if last:
            break
        must.add(unit)
    return children


class _Proof:
    """The rounds of a proof."""

    def __init__(self, ask: Ask, rules: Rules, most: int) -> None:
        self._ask, self._rules, self._most = ask, rules, most
        self.rounds = 0

    def bound(self, nodes: Sequence[_Node]) -> None:
        """Set the lower bound of each node, and the removal costs by its quadratic model."""
        fits = [_Newton(node, self._rules) for node in nodes]
        for _ in range(_STEPS):
            going = [fit for fit in fits if not fit.done]
            if not going or self.rounds >= self._most:
                break
            self.rounds += 1
            answers = self._ask([(fit.asked, fit.columns) for fit in going])
            for fit, sums in zip(going, answers, strict=True):
                fit.take(sums)


class _Newton:
    """A damped Newton fit of one node, an answer at a time."""

    def __init__(self, node: _Node, rules: Rules) -> None:
        self._node, self._rules = node, rules
        inside = np.isin(rules.labels, node.allowed) | (rules.labels == ALWAYS)
        self.columns = np.flatnonzero(inside)
        self.asked = np.where(inside, node.start, 0.0)
        self._at, self._loss, self._decrement = self.asked, np.inf, 0.0
        self._direction, self._step = np.zeros(len(self.asked)), 1.0
        self.done = False

    def take(self, sums: Sums) -> None:
        """Accept a point that lowers the loss and request the next; else request a shorter step."""
        sums = penalised(sums, self.asked, self._rules)
        if np.isfinite(self._loss) and not (
            sums.loss <= self._loss - 1e-4 * self._step * self._decrement + 1e-12 * abs(self._loss)
        ):
            self._step /= 2
            self.asked = self._at - self._step * self._direction
            self.done = self._step < _SHORTEST
            return
        rules, columns = self._rules, self.columns
        curvature = symmetric(sums.curvature, rules.ridge[columns] * sums.rows)
        gradient, z = sums.gradient[columns], self.asked[columns]
        units, always, names = rules.places(columns)
        model = SubsetModel(curvature, curvature @ z - gradient, units, always)
        fit = model.fit(tuple(range(len(units))))
        self._at, self._loss, self._step = self.asked, sums.loss, 1.0
        self._direction = np.zeros(rules.width)
        self._direction[columns[fit.columns]] = z[fit.columns] - fit.coefficients
        self._decrement = max(float(sums.gradient @ self._direction), 0.0)
        self.asked = self._at - self._direction
        if self._decrement < _MINIMAL * (1 + abs(sums.loss)):
            self.done = True
            node = self._node
            node.below, node.start = max(node.below, sums.loss - self._decrement), self._at
            costs = model.costs(fit, tuple(range(len(units)))) if fit.full_rank else None
            costs = np.zeros(len(units)) if costs is None else costs
            node.fitted = _Fitted(model, columns, names.tolist(), costs)
