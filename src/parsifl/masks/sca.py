"""The paper's own solver: successive convex approximation (Algorithm 3), for comparison.

Needs `pip install 'parsifl[sca]'` (CVXPY with an open conic solver). Two things differ from the
published code. The linearised binary constraint (35a) is
`sum m - sum (m0**2 + 2 m0 (m - m0)) <= t`; there it has `2 m0**2`, so that t grows with the number
of trained layers instead of with the distance to {0, 1}. And t is penalised with a growing weight:
with t = 0 a binary start cannot move at all.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.masks import heuristics
from parsifl.masks.feasible_sets import fill
from parsifl.masks.instance import Floats, Instance, Masks, value

_FIRST_PENALTY = 0.01  # fraction of d_w, per unit of distance to binary masks
_LAST_PENALTY = 10.0


@dataclass(frozen=True, eq=False)
class SCAResult:
    """Rounded masks within the budgets, and the course of the iteration."""

    masks: Masks
    iterations: int
    binary_distance: float  # sum m - sum m**2 before rounding
    seconds: float


def sca(
    instance: Instance, key: Key | None = None, *, iterations: int = 20, tolerance: float = 1e-3
) -> SCAResult:
    """Run Algorithm 3 from the best of a sequential and 999 random designs, and round.

    The relaxed masks are rounded at one half; if that exceeds a budget, the layers with the largest
    values are kept. The best masks of the start and all iterates are returned.
    """
    if instance.tail.any():
        raise ConfigError(
            "SCA supports additive budgets only; use masks.optimal for FLOPs and memory"
        )
    cvxpy = _cvxpy()
    begin = time.perf_counter()
    start = _start(instance, key or Key(0, purpose="sca"))
    mask = start.astype(float)
    share = mask / np.maximum(mask.sum(axis=0), 1.0)
    growth = (_LAST_PENALTY / _FIRST_PENALTY) ** (1.0 / max(1, iterations - 1))
    model = _Model(cvxpy, instance)
    done, best = 0, start
    for step in range(iterations):
        moved = model.solve(mask, share, _FIRST_PENALTY * growth**step)
        if moved is None:
            break
        change = float(np.linalg.norm(moved[0] - mask))
        mask, share = moved
        best = min(best, _rounded(instance, mask), key=lambda masks: value(instance, masks, "J"))
        done = step + 1
        if change <= tolerance:
            break
    distance = float((mask - mask**2).sum())
    return SCAResult(best, done, distance, time.perf_counter() - begin)


class _Model:
    """Problem P^mask-SCA, built once; the point of linearisation is a parameter."""

    def __init__(self, cvxpy: Any, instance: Instance) -> None:
        devices, layers = instance.devices, len(instance.sizes)
        shape = (devices, layers)
        self.cvxpy = cvxpy
        self.mask, self.share = cvxpy.Variable(shape), cvxpy.Variable(shape)
        excess = cvxpy.Variable(nonneg=True)
        self.mask0, self.share0 = cvxpy.Parameter(shape), cvxpy.Parameter(shape)
        self.cover0 = cvxpy.Parameter((1, layers))
        # products of parameters are not allowed in a parametrised program: passed in
        self.squares = cvxpy.Parameter(shape)
        self.norm = cvxpy.Parameter()
        self.penalty = cvxpy.Parameter(nonneg=True)
        weights = instance.sizes / instance.total
        limits = np.minimum(instance.limits, instance.total) / instance.total
        ones = np.ones((devices, 1))
        # shares up to 1 and coverages up to N are both scaled to sqrt(N), for the solver
        self.scale = float(np.sqrt(devices))
        # a separate variable keeps the cones sparse: 100 devices in seconds, not minutes
        cover = cvxpy.Variable((1, layers))
        summed = cvxpy.sum(self.mask, axis=0, keepdims=True) / self.scale
        covers = ones @ cover
        slack = limits - self.mask @ weights
        # (32): m**2 <= k * c as a second-order cone
        flat = [cvxpy.vec(one, order="C") for one in (self.mask, self.share, covers)]
        cone = cvxpy.SOC(flat[1] + flat[2], cvxpy.vstack([2 * flat[0], flat[1] - flat[2]]), axis=0)
        # (34) with the concave part linearised
        linear = 2 * cvxpy.multiply(self.share0, self.share)
        linear += 2 * cvxpy.multiply(ones @ self.cover0, covers) - self.squares
        product = 0.5 * (cvxpy.square(self.share + covers) - linear)
        # (35a), linearised: m0**2 + 2 m0 (m - m0) = 2 m0 m - m0**2
        binary = cvxpy.sum(self.mask) - 2 * cvxpy.sum(cvxpy.multiply(self.mask0, self.mask))
        constraints = [
            cone,
            cover == summed,
            product <= self.mask,
            binary + self.norm <= excess,
            self.mask >= 0,
            self.mask <= 1,
            slack >= 0,
        ]
        worst = cvxpy.sum(cvxpy.max(self.share, axis=1))
        bias = (worst - cvxpy.sum(self.share @ weights)) / self.scale
        goal = cvxpy.Minimize(bias + cvxpy.sum(slack) + self.penalty * excess)
        self.problem = cvxpy.Problem(goal, constraints)

    def solve(self, mask: Floats, share: Floats, penalty: float) -> tuple[Floats, Floats] | None:
        """Solve around this point; None if the solver fails (the old point is then kept)."""
        cover = mask.sum(axis=0, keepdims=True) / self.scale
        scaled = share * self.scale
        self.mask0.value, self.share0.value, self.cover0.value = mask, scaled, cover
        self.squares.value = scaled**2 + cover**2
        self.norm.value = float((mask**2).sum())
        self.penalty.value = penalty
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inaccurate steps suffice: masks are rounded later
            try:
                self.problem.solve(solver=self.cvxpy.CLARABEL)
            except self.cvxpy.error.SolverError:
                return None
        if self.mask.value is None:
            return None
        return np.clip(self.mask.value, 0.0, 1.0), np.asarray(self.share.value) / self.scale


def _start(instance: Instance, key: Key) -> Masks:
    designs = [heuristics.repaired(instance, heuristics.sequential(instance))]
    drawn = heuristics.best_of_random(instance, key, 999)
    if drawn is not None:
        designs.append(drawn)
    return min(designs, key=lambda masks: value(instance, masks, "J"))


def _rounded(instance: Instance, mask: Floats) -> Masks:
    rows = mask >= 0.5
    for device in np.flatnonzero(~instance.fits(rows, instance.limits)):
        order = np.argsort(-np.where(rows[device], mask[device], -1.0), kind="stable")
        keep = fill(instance, order, float(instance.limits[device]))
        rows[device] &= keep
    return heuristics.repaired(instance, rows)


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise ConfigError(
            "the paper's SCA masks need cvxpy, which is not installed; "
            "pip install 'parsifl[sca]', or use masks.optimal"
        ) from error
    return cvxpy
