"""A mixed-integer program whose optimum bounds the mask problem from below.

The coverages 1..N are cut into buckets. A device whose least covered layer lies in a bucket may
train only layers with at least the bucket's first coverage, and pays 1 / (the bucket's last).
Every design satisfies this at no higher cost, so the optimum is a lower bound; with buckets of
one coverage each it is exact. The valid inequality "the devices that train layer j have gammas
that add up to at least one" makes even a single bucket useful: Gamma >= 1 + (N - c_j) / N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from parsifl.masks.feasible_sets import Catalogue, DeviceGroup
from parsifl.masks.instance import Floats, Instance, Masks, Objective

_NEVER_EMPTY_ROWS = 3000  # above this, the (optional) rows that forbid empty masks are combined


@dataclass(frozen=True, eq=False)
class MilpColumns:
    """How often each group uses each set of layers: the decisions within one bucket."""

    sets: Masks | None  # [C, L]; None: fractional knapsacks instead of sets
    count: sparse.csr_array  # [G, C] devices per column and group
    cover: sparse.csr_array  # [L, C] coverage per column
    own: sparse.csr_array  # [R, C] rows that must not be positive
    sizes: NDArray[np.int64]  # [G] devices per group


@dataclass(frozen=True, eq=False)
class Answer:
    """The bound, and the designs' sets by group where the program found them."""

    bound: float
    masks: list[Masks] | None  # per group, one row per device


def set_columns(groups: Sequence[DeviceGroup], catalogue: Catalogue) -> MilpColumns:
    """Use one integer column per maximal set: exact if the catalogue is."""
    lists = [catalogue.maximal(group.limit) for group in groups]
    sets = np.concatenate(lists)
    owner = np.repeat(np.arange(len(groups)), [len(listed) for listed in lists])
    count = sparse.csr_array((np.ones(len(sets)), (owner, np.arange(len(sets)))))
    cover = sparse.csr_array(sets.T.astype(float))
    limits = sparse.csr_array((0, len(sets)))
    return MilpColumns(
        sets, count, cover, limits, np.array([len(group.members) for group in groups])
    )


def knapsack_columns(instance: Instance, groups: Sequence[DeviceGroup]) -> MilpColumns:
    """Use one aggregated fractional knapsack per group: a relaxation for many layers."""
    layers = len(instance.sizes)
    width = 1 + layers
    identity = sparse.eye_array(layers)
    fitted, owns, covers = [], [], []
    for group in groups:
        able = instance.add + instance.tail <= group.limit * (1 + 1e-9)
        at_most: Any = sparse.hstack([sparse.csr_array(-able[:, None].astype(float)), identity])
        scale = max(group.limit, 1.0)
        budget = np.concatenate([[-group.limit], instance.add])[None] / scale
        owns.append(sparse.vstack([at_most, sparse.csr_array(budget)]))
        covers.append(sparse.hstack([sparse.csr_array((layers, 1)), identity]))
        fitted.append(len(group.members))
    starts = np.arange(len(groups)) * width
    count = sparse.csr_array(
        (np.ones(len(groups)), (np.arange(len(groups)), starts)),
        shape=(len(groups), width * len(groups)),
    )
    cover = sparse.csr_array(sparse.hstack(covers))
    return MilpColumns(
        None, count, cover, sparse.csr_array(sparse.block_diag(owns)), np.array(fitted)
    )


class Program:
    """The program for one choice of buckets (`starts[k]` .. `starts[k + 1] - 1`)."""

    def __init__(
        self, instance: Instance, columns: MilpColumns, starts: Sequence[int], objective: Objective
    ) -> None:
        self.instance, self.columns, self.objective = instance, columns, objective
        able = instance.affordable().sum(axis=0).astype(float)
        self.layers = np.flatnonzero(able > 0)
        self.able = able[self.layers]
        self.starts = np.array(starts, dtype=float)
        self.pays = 1.0 / np.append(self.starts[1:] - 1, self.able.max())
        self.level_columns = columns.count.shape[1]
        self.rows: list[tuple[Any, Floats, Floats]] = []
        self._coverage_rows()
        self._bucket_rows()
        self._gamma_rows()

    def solve(self, seconds: float, nodes: int | None = None, *, integral: bool) -> Answer:
        """Run HiGHS and return its certified bound and, if integral, the design."""
        options: Any = {"mip_rel_gap": 1e-9}
        if nodes is None:
            options["time_limit"] = max(seconds, 0.05)
        else:
            options["node_limit"] = nodes
        levels, layers = len(self.starts), len(self.layers)
        columns, labels = levels * self.level_columns, levels * layers
        cost = np.zeros(columns + 2 * labels + 1)
        cost[-1] = 1.0
        if self.objective == "J":
            share = self.instance.sizes[self.layers] / self.instance.total
            cost[columns : columns + labels] = -np.tile(share, levels)
        lower, upper = np.zeros_like(cost), np.full_like(cost, np.inf)
        reached = np.repeat(self.starts, layers) <= np.tile(self.able, levels)
        upper[columns + labels : -1] = reached
        lower[columns + labels : columns + labels + layers] = (
            1.0  # every affordable layer is covered
        )
        kinds = np.zeros(len(cost), dtype=np.int64)
        kinds[columns + labels : -1] = 1
        kinds[:columns] = int(integral)
        optimum = milp(
            cost,
            integrality=kinds,
            bounds=Bounds(lower, upper),
            constraints=[LinearConstraint(*row) for row in self.rows],
            options=options,
        )
        return Answer(self._bound(optimum), self._masks(optimum) if integral else None)

    def _bound(self, optimum: Any) -> float:
        constant = -float(self.instance.sizes[self.layers].sum())
        if self.objective == "J":
            constant += float(self.instance.reach.sum())
        dual = getattr(optimum, "mip_dual_bound", None)
        if dual is None or not np.isfinite(dual):
            return -np.inf
        return float(dual) * self.instance.total + constant

    def _masks(self, optimum: Any) -> list[Masks] | None:
        sets = self.columns.sets
        if optimum.x is None or sets is None:
            return None
        levels, layers = len(self.starts), len(self.layers)
        used = np.rint(optimum.x[: levels * self.level_columns]).astype(int)
        used = used.reshape(levels, self.level_columns)
        flags = optimum.x[levels * (self.level_columns + layers) : -1].reshape(levels, layers) > 0.5
        allowed = np.zeros((levels, sets.shape[1]), dtype=bool)
        allowed[:, self.layers] = flags
        owner = self.columns.count.toarray().argmax(axis=0)
        rows: list[list[NDArray[np.bool_]]] = [[] for _ in self.columns.sizes]
        for level, column in zip(*np.nonzero(used), strict=True):
            mask = sets[column] & allowed[level]
            rows[owner[column]] += [mask] * int(used[level, column])
        if any(len(row) != size for row, size in zip(rows, self.columns.sizes, strict=True)):
            return None
        return [np.array(row) for row in rows]

    def _add(self, blocks: Sequence[Any], lower: Any, upper: Any) -> None:
        """Add rows given the four blocks: columns, coverages, flags, Gamma (None: zero)."""
        levels, layers = len(self.starts), len(self.layers)
        height = next(block.shape[0] for block in blocks if block is not None)
        widths = [levels * self.level_columns, levels * layers, levels * layers, 1]
        full = [
            sparse.csr_array((height, width)) if block is None else block
            for block, width in zip(blocks, widths, strict=True)
        ]
        bounds = [np.broadcast_to(np.asarray(b, dtype=float), height) for b in (lower, upper)]
        self.rows.append((sparse.csr_array(sparse.hstack(full)), bounds[0], bounds[1]))

    def _coverage_rows(self) -> None:
        levels, layers = len(self.starts), len(self.layers)
        each = sparse.eye_array(levels)
        cover = sparse.csr_array(self.columns.cover)[self.layers]
        group = sparse.hstack([self.columns.count] * levels)
        self._add([group, None, None, None], self.columns.sizes, self.columns.sizes)
        if self.columns.own.shape[0]:
            self._add([sparse.kron(each, self.columns.own), None, None, None], -np.inf, 0.0)
        all_labels = sparse.eye_array(levels * layers)
        self._add([-sparse.kron(each, cover), all_labels, None, None], -np.inf, 0.0)
        roof = sparse.kron(each, sparse.diags_array(self.able))
        self._add([None, all_labels, -roof, None], -np.inf, 0.0)

    def _bucket_rows(self) -> None:
        levels, layers = len(self.starts), len(self.layers)
        identity = sparse.eye_array(layers)
        total = sparse.kron(np.ones((levels, levels)), identity)
        floor = sparse.kron(sparse.diags_array(self.starts), identity)
        self._add([None, total, -floor, None], 0.0, np.inf)
        if levels == 1:
            return
        step = sparse.diags_array([-1.0, 1.0], offsets=[0, 1], shape=(levels - 1, levels))
        falls = sparse.kron(step, identity)
        self._add([None, None, falls, None], -np.inf, 0.0)
        self._never_empty_rows(sparse.eye_array(levels))
        self._equal_layer_rows(sparse.eye_array(levels))

    def _never_empty_rows(self, each: Any) -> None:
        sets = self.columns.sets
        if sets is not None and len(sets) * len(self.starts) <= _NEVER_EMPTY_ROWS:
            most = self.columns.sizes[self.columns.count.toarray().argmax(axis=0)].astype(float)
            flags = sparse.csr_array(sets[:, self.layers] * most[:, None])
            one = sparse.eye_array(len(sets))
            self._add([sparse.kron(each, one), None, -sparse.kron(each, flags), None], -np.inf, 0.0)
            return
        devices = float(self.columns.sizes.sum())
        some = sparse.csr_array(self.columns.count.sum(axis=0)[None])
        flags = sparse.csr_array(np.full((1, len(self.layers)), devices))
        self._add([sparse.kron(each, some), None, -sparse.kron(each, flags), None], -np.inf, 0.0)

    def _equal_layer_rows(self, each: Any) -> None:
        """Break the symmetry of layers that are alike: the first is covered at least as often."""
        if self.instance.tail.any():
            return
        add = self.instance.add[self.layers]
        size = self.instance.sizes[self.layers]
        rows = []
        for value in np.unique(np.stack([add, size], axis=1), axis=0):
            alike = np.flatnonzero((add == value[0]) & (size == value[1]))
            rows += list(zip(alike[1:], alike[:-1], strict=True))
        if rows:
            order = np.zeros((len(rows), len(add)))
            for row, (later, earlier) in enumerate(rows):
                order[row, later], order[row, earlier] = 1.0, -1.0
            self._add([None, None, sparse.kron(each, sparse.csr_array(order)), None], -np.inf, 0.0)

    def _gamma_rows(self) -> None:
        layers = len(self.layers)
        devices = self.columns.count.sum(axis=0)[None]
        paid = sparse.kron(self.pays[None], devices)
        gamma = sparse.csr_array([[-1.0]])
        self._add([sparse.csr_array(paid), None, None, gamma], -np.inf, 0.0)
        ones = np.ones((layers, 1))
        others = sparse.kron(ones, paid)
        trained = -sparse.kron(self.pays[None], sparse.eye_array(layers))
        self._add([others, trained, None, -sparse.csr_array(ones)], -np.inf, -1.0)
