"""Best subsets of a quadratic model: exchange, splicing and a proof of optimality. No messages.

The model is q(z) = z'Hz / 2 - r'z. A *unit* is added or removed as a whole: one column, or
the columns of a group. Some columns are always included. With P = [H_AA]^-1 and the minimiser z on
the columns A, removing column i costs z_i^2 / (2 P_ii), and adding j gains
res_j^2 / (2 S_jj), where res = r - H z and S is the Schur complement of A: the table of all
exchanges follows from one product. A large |z_i| is no evidence: two nearly equal columns both
have one, and removing either costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Units = tuple[int, ...]
"""Unit numbers, ascending."""

DEPENDENT = 1e-10
"""A column whose Schur complement is smaller, relative to its curvature, adds nothing."""
_SINGULAR = 1e-12
_BARRED = 20
"""How many selected units are excluded in turn, to search without them."""
_EQUAL = 1e-10
_PERFECT = 1e-22


@dataclass(frozen=True)
class Fit:
    """The minimiser on some columns: value, coefficients, and W with W'W = [H_AA]^-1."""

    columns: Indices
    value: float
    coefficients: Array
    root: Array
    full_rank: bool


@dataclass(frozen=True, eq=False)
class SubsetModel:
    """A quadratic model of the loss, over columns that form units.

    Attributes
    ----------
    curvature, target
        H and r.
    units
        The columns of each unit.
    always
        Columns that belong to every subset and are not part of a unit.
    """

    curvature: Array
    target: Array
    units: Sequence[Indices]
    always: Indices

    @cached_property
    def _diagonal(self) -> Array:
        return np.maximum(np.diag(self.curvature), 0.0)

    @cached_property
    def _single(self) -> bool:
        return all(len(unit) == 1 for unit in self.units)

    @cached_property
    def _unit_columns(self) -> Indices:
        """The column of every unit, if each has one."""
        return np.array([unit[0] for unit in self.units], np.int64)

    def columns(self, chosen: Iterable[int]) -> Indices:
        """Return the columns of some units and those that are always included, ascending."""
        parts = [self.always, *(self.units[unit] for unit in chosen)]
        return np.sort(np.concatenate(parts).astype(np.int64))

    def fit(self, chosen: Iterable[int]) -> Fit:
        """Minimise over some units; for dependent columns, return the solution of least norm."""
        columns = self.columns(chosen)
        inner = self.curvature[np.ix_(columns, columns)]
        right = self.target[columns]
        root, full_rank = _inverse_root(inner)
        z = root.T @ (root @ right)
        z = z + root.T @ (root @ (right - inner @ z))  # one refinement
        return Fit(columns, float(z @ (inner @ z) / 2 - right @ z), z, root, full_rank)

    def gains(self, fit: Fit) -> Array:
        """Return by how much adding each unit to the columns of a fit would lower the value."""
        rows = self.curvature[fit.columns]
        residual = self.target - fit.coefficients @ rows
        through = fit.root @ rows
        schur = self._diagonal - (through * through).sum(0)
        gains = _gain(residual, schur, self._diagonal)
        gains[fit.columns] = 0.0
        if self._single:
            return np.asarray(gains[self._unit_columns])
        return np.array([self._block_gain(unit, gains, residual, through) for unit in self.units])

    def _block_gain(self, unit: Indices, single: Array, residual: Array, through: Array) -> float:
        if len(unit) == 1 or not single[unit].any():
            return float(single[unit].sum())
        part = through[:, unit]
        root, _ = _inverse_root(self.curvature[np.ix_(unit, unit)] - part.T @ part)
        return float(np.square(root @ residual[unit]).sum() / 2)

    def costs(self, fit: Fit, chosen: Units) -> Array:
        """Return by how much removing each of the selected units would raise the value."""
        if not fit.full_rank:
            return np.array([self.fit(_without(chosen, u)).value - fit.value for u in chosen])
        if self._single:
            positions = np.searchsorted(fit.columns, self._unit_columns[list(chosen)])
            spread = np.square(fit.root).sum(0)[positions]
            return np.asarray(fit.coefficients[positions] ** 2 / spread / 2)
        inverse = fit.root.T @ fit.root
        costs = []
        for unit in chosen:
            block = np.searchsorted(fit.columns, self.units[unit])
            z = fit.coefficients[block]
            costs.append(float(z @ np.linalg.solve(inverse[np.ix_(block, block)], z)) / 2)
        return np.array(costs)

    # ------------------------------------------------------------------ the search
    def search(
        self,
        count: int,
        start: Units = (),
        *,
        forbidden: frozenset[Units] = frozenset(),
        thorough: bool = False,
        least: float = 0.0,
    ) -> Units:
        """Return the best subset of `count` units that was found.

        Parameters
        ----------
        start
            Units to begin with.
        forbidden
            Subsets that are excluded.
        thorough
            Also starts from forward selection with exchanges at every size, and searches with each
            selected unit excluded.
        least
            An exchange must lower the value by more than this.
        """
        count = min(count, len(self.units))
        best = self.improve(self.forward(start, count), forbidden=forbidden, least=least)
        if not thorough:
            return best
        fit = self.fit(best)
        value = fit.value
        if self._minimal(fit):
            return best
        grown: Units = ()
        for size in range(1, count + 1):
            grown = self.improve(self.forward(grown, size), splice=size == count)
        best, value = self._better(best, value, grown)
        best, value = self._better(best, value, self.improve(self.backward(count)))
        moved = True
        while moved:
            moved = False
            costs = self.costs(self.fit(best), best)
            for rank in np.argsort(costs, kind="stable")[:_BARRED]:
                unit = best[rank]
                less = self.forward(_without(best, unit), count, frozenset([unit]))
                other = self.improve(less, splice=False)
                before = value
                best, value = self._better(best, value, other)
                if value < before:
                    moved = True
                    break
        return best

    def _better(self, best: Units, value: float, other: Units) -> tuple[Units, float]:
        other_value = self.fit(other).value
        return (other, other_value) if other_value < value - _EQUAL * abs(value) else (best, value)

    def forward(self, start: Units, count: int, barred: frozenset[int] = frozenset()) -> Units:
        """Add the unit that gains most until there are `count`."""
        chosen = list(start)
        while len(chosen) < count:
            gains = self.gains(self.fit(chosen))
            gains[chosen + [unit for unit in barred if unit < len(gains)]] = -1.0
            chosen.append(int(gains.argmax()))
        return tuple(sorted(chosen))

    def backward(self, count: int) -> Units:
        """Remove the unit that costs least, starting from the best few of all units."""
        size = min(len(self.units), 3 * count + 20)
        alone = self.gains(self.fit(()))
        chosen = tuple(np.sort(np.argsort(-alone, kind="stable")[:size]).tolist())
        while len(chosen) > count:
            fit = self.fit(chosen)
            costs = self.costs(fit, chosen)
            free = costs <= _EQUAL * abs(fit.value)
            if free.any():  # with more columns than rows, rounding would decide between these
                costs = np.where(free, alone[list(chosen)], np.inf)
            chosen = _without(chosen, chosen[int(costs.argmin())])
        return chosen

    def improve(
        self,
        chosen: Units,
        *,
        forbidden: frozenset[Units] = frozenset(),
        least: float = 0.0,
        splice: bool = True,
    ) -> Units:
        """Exchange (and splice) until the value no longer decreases."""
        fit = self.fit(chosen)
        while not self._minimal(fit):
            enough = fit.value - max(least, _EQUAL * abs(fit.value))
            more = self._splices(chosen) if splice else ()
            for other in itertools.chain(self._swaps(fit, chosen), more):
                if other in forbidden:
                    continue
                other_fit = self.fit(other)
                if other_fit.value < enough:
                    chosen, fit = other, other_fit
                    break
            else:
                break
        return chosen

    def _minimal(self, fit: Fit) -> bool:
        """Return whether the fit is the minimum over all columns: nothing can lower its value."""
        used = self._diagonal > 0
        residual = (self.target - fit.coefficients @ self.curvature[fit.columns])[used]
        gains = residual**2 / self._diagonal[used]
        return bool(gains.max(initial=0.0) <= _PERFECT * abs(fit.value))

    def _swaps(self, fit: Fit, chosen: Units, most: int = 12) -> Iterable[Units]:
        """Return exchanges of one unit that should lower the value, the best ones first."""
        if not chosen or len(chosen) == len(self.units):
            return
        change = self._exchange_table(fit, chosen)
        order = np.argsort(change, axis=None, kind="stable")[:most]
        for out, new in zip(*np.unravel_index(order, change.shape), strict=True):
            if change[out, new] < 0:
                yield tuple(sorted((*_without(chosen, chosen[out]), int(new))))

    def _exchange_table(self, fit: Fit, chosen: Units) -> Array:
        """Return the change of the value for every unit out and every unit in."""
        if not (self._single and fit.full_rank):
            rows = []
            for unit in chosen:
                less = self.fit(_without(chosen, unit))
                rows.append(less.value - fit.value - self.gains(less))
            table = np.stack(rows)
        else:
            columns, positions = (
                self._unit_columns,
                np.searchsorted(fit.columns, self._unit_columns[list(chosen)]),
            )
            rows_of = self.curvature[fit.columns][:, columns]
            inverse = fit.root.T @ fit.root
            through = fit.root @ rows_of
            schur = self._diagonal[columns] - (through * through).sum(0)
            residual = self.target[columns] - fit.coefficients @ rows_of
            pivot = inverse[positions, positions][:, None]
            back = inverse[positions] @ rows_of
            z = fit.coefficients[positions][:, None]
            gain = _gain(
                residual + back * (z / pivot), schur + back**2 / pivot, self._diagonal[columns]
            )
            table = z**2 / pivot / 2 - gain
        table[:, list(chosen)] = np.inf
        return np.asarray(table)

    def _splices(self, chosen: Units, most: int = 4) -> Iterable[Units]:
        """Return exchanges of several units: out by cost and in by gain, in either order."""
        for size in range(2, min(most, len(chosen), len(self.units) - len(chosen)) + 1):
            less = chosen
            for _ in range(size):
                less = _without(less, less[int(self.costs(self.fit(less), less).argmin())])
            yield self.forward(less, len(chosen))
            more = self.forward(chosen, len(chosen) + size)
            while len(more) > len(chosen):
                more = _without(more, more[int(self.costs(self.fit(more), more).argmin())])
            yield more

    # ------------------------------------------------------------------ the proof
    def bound(self, incumbent: Units, count: int, nodes: int = 20_000) -> tuple[float, Units, int]:
        """Return a lower bound over all subsets of `count` units, by branch and bound.

        Also return the best subset found, and the number of nodes; the search stops at `nodes`. A
        node is a set of units that may be used and those among them that must be used; the model
        on all units that may be used bounds every subset of it.
        """
        best, value = incumbent, self.fit(incumbent).value
        everything = tuple(range(len(self.units)))
        heap: list[tuple[float, int, Units, frozenset[int]]] = []
        heapq.heappush(heap, (self.fit(everything).value, 0, everything, frozenset()))
        visited, ticket = 0, itertools.count(1)
        slack = _EQUAL * abs(value)
        while heap and visited < nodes:
            lowest, _, allowed, forced = heapq.heappop(heap)
            if lowest >= value - slack:
                return value, best, visited
            visited += 1
            if len(allowed) == count:
                best, value = allowed, lowest
                continue
            fit = self.fit(allowed)
            # for dependent columns it is only known that a removal cannot lower the value
            costs = self.costs(fit, allowed) if fit.full_rank else np.zeros(len(allowed))
            free = [(c, u) for c, u in zip(costs.tolist(), allowed, strict=True) if u not in forced]
            free.sort(reverse=True)
            must = set(forced)
            for cost, unit in free:  # the most expensive removal first: it is pruned at once
                if len(must) == count:  # nothing else may be selected
                    only = tuple(sorted(must))
                    leaf_value = self.fit(only).value
                    if leaf_value < value - slack:
                        best, value = only, leaf_value
                    break
                below = fit.value + max(cost, 0.0)
                if below < value - slack:
                    entry = (below, next(ticket), _without(allowed, unit), frozenset(must))
                    heapq.heappush(heap, entry)
                must.add(unit)
        lowest = min(heap[0][0], value) if heap else value
        return lowest, best, visited


def _gain(residual: Array, schur: Array, diagonal: Array) -> Array:
    usable = schur > DEPENDENT * diagonal
    return np.where(usable, residual**2 / np.where(usable, schur, 1.0) / 2, 0.0)


def _inverse_root(matrix: Any) -> tuple[Array, bool]:
    """Return W with W'W the inverse of a positive matrix (or its pseudo-inverse), and which."""
    scale = np.sqrt(np.maximum(np.diag(matrix), 0.0))
    dead = scale == 0.0
    inner = matrix / np.outer(scale + dead, scale + dead)
    if not dead.any():
        try:
            lower = np.linalg.cholesky(inner)
        except np.linalg.LinAlgError:
            pass
        else:
            if len(lower) == 0 or np.diag(lower).min() > np.sqrt(_SINGULAR):
                return np.linalg.inv(lower) / scale, True
    values, vectors = np.linalg.eigh(inner)
    large = values > _SINGULAR * max(float(values[-1]), 0.0)
    root = vectors[:, large].T / np.sqrt(values[large])[:, None]
    return np.asarray(np.where(dead, 0.0, root / (scale + dead))), False


def _without(chosen: Units, unit: int) -> Units:
    return tuple(other for other in chosen if other != unit)
