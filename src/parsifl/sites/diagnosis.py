"""Check the assumptions of FedGradMP's convergence theorem on given data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse.linalg import svds

from parsifl.algorithms.fedgradmp import FedGradMP
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Selection
from parsifl.data.clients import ClientData
from parsifl.engine.simulate import simulate
from parsifl.linear.design import as_design
from parsifl.linear.glm import GLM
from parsifl.solvers.restricted import hessian

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Diagnosis:
    """Restricted constants on the visited supports, and the resulting rate.

    Attributes
    ----------
    convexity, smoothness
        For every client the smallest and largest curvature over visited supports of 4 tau
        coefficients. The theorem's constants are extremes over all supports: these bound them
        from one side only, rho- from above and rho+ from below.
    kappa
        The rate of Theorem 5 for full batches and exact projections (eta = 1, theta = infinity),
        4 sum_i p_i [4 beta_1(i) beta_2(i)]^K; None if the theorem does not apply. The true rate is
        at least this.
    silent
        Clients with 2 rho- <= rho+, to which the theorem does not apply.
    stable_rank, needed_rank
        |A|_F^2 / |A|_2^2 of each client, and tau log(n / tau), which it should exceed up to a
        constant.
    words
        A description in words.
    """

    convexity: Array
    smoothness: Array
    kappa: float | None
    silent: tuple[int, ...]
    stable_rank: Array
    needed_rank: float
    words: str


def diagnose(
    problem: GLM,
    data: ClientData | Sequence[tuple[Any, Any]],
    tau: int,
    *,
    steps: int = 3,
    rounds: int = 4,
    seed: int = 0,
) -> Diagnosis:
    """Run FedGradMP for some rounds and measure the restricted constants on its supports.

    Parameters
    ----------
    tau, steps
        The sparsity level and the number K of local iterations.
    rounds
        How many server supports are visited; each is filled up to 4 tau at random.
    """
    if not problem.datafit.quadratic or problem.dictionary is not None:
        raise CapabilityError("diagnose() needs a squared loss in plain coordinates")
    if not 1 <= tau <= problem.features:
        raise ConfigError(f"tau must be between 1 and {problem.features} features, got {tau}")
    data = data if isinstance(data, ClientData) else ClientData.of(data, test=0.0)
    visited = _visited(problem, data, tau, steps, rounds, seed)
    low, high, rank = [], [], []
    for rows in data.train:
        curves = np.concatenate([_curvatures(problem, data, rows, index) for index in visited])
        low.append(max(float(curves.min()), 0.0))
        high.append(float(curves.max()))
        rank.append(_stable_rank(data.x, rows))
    sizes = np.array([len(rows) for rows in data.train], dtype=np.float64)
    convexity, smoothness = np.array(low), np.array(high)
    silent = tuple(np.flatnonzero(2 * convexity <= smoothness).tolist())
    kappa = None if silent else _kappa(convexity, smoothness, sizes / sizes.sum(), steps)
    needed = tau * math.log(problem.features / tau)
    words = _words(kappa, silent, len(sizes), np.array(rank), needed)
    return Diagnosis(convexity, smoothness, kappa, silent, np.array(rank), needed, words)


def _visited(
    problem: GLM, data: ClientData, tau: int, steps: int, rounds: int, seed: int
) -> list[torch.Tensor]:
    size = min(4 * tau, problem.width)
    supports = []
    for round in range(1, rounds + 1):
        run = simulate(
            FedGradMP(tau=tau, local_steps=steps, batch_size=None),
            problem,
            data,
            round,
            seed=seed,
            evaluate_every=0,
        )
        support = run.model.params["coef"].nonzero()[:, 0].numpy()
        others = np.setdiff1d(np.arange(problem.width), support)
        more = Key(seed, round, purpose="diagnosis").numpy_generator().permutation(others)
        chosen = np.sort(np.concatenate([support, more[: size - len(support)]]))
        supports.append(torch.from_numpy(chosen))
    return supports


def _curvatures(problem: GLM, data: ClientData, rows: Any, index: torch.Tensor) -> Array:
    numbers = torch.from_numpy(np.ascontiguousarray(rows))[None]
    weight = torch.ones(numbers.shape, dtype=problem.dtype)
    selection = Selection(as_design(data.x), data.y, numbers, weight)
    valid = torch.ones(1, len(index), dtype=torch.bool)
    zero = torch.zeros(1, problem.width, dtype=problem.dtype)
    part = problem.restrict(zero, selection, index[None], valid)
    values: Array = torch.linalg.eigvalsh(hessian(part, part.start))[0].numpy()
    return values


def _stable_rank(x: Any, rows: Any) -> float:
    """Return |A|_F^2 / |A|_2^2; the largest singular value is found without a Gram matrix."""
    if isinstance(x, torch.Tensor):
        part: Any = x[torch.from_numpy(np.ascontiguousarray(rows))].numpy()
        size = float(np.square(part).sum())
    else:
        part = x[rows]
        size = float(np.square(part.data).sum())
    if not size:
        return 0.0
    if min(part.shape) == 1:
        return 1.0
    start = np.ones(min(part.shape)) / min(part.shape) ** 0.5
    start += Key(0, purpose="diagnosis").numpy_generator().standard_normal(len(start)) * 1e-2
    largest = svds(part, k=1, v0=start, tol=1e-10, return_singular_vectors=False)[0]
    return size / float(largest) ** 2


def _kappa(convexity: Array, smoothness: Array, share: Array, steps: int) -> float:
    first = smoothness / (2 * convexity - smoothness)
    second = 2 * (smoothness - convexity) / convexity
    return float(4 * (share * (4 * first * second) ** steps).sum())


def _words(
    kappa: float | None, silent: tuple[int, ...], clients: int, rank: Array, needed: float
) -> str:
    if kappa is None:
        rate = (
            f"Theorem 5 does not apply: 2 rho- <= rho+ on {len(silent)} of {clients} clients. The "
            "algorithm may still converge."
        )
    elif kappa < 1:
        rate = f"On the visited supports kappa = {kappa:.3g} < 1: linear convergence is plausible."
    else:
        rate = f"kappa = {kappa:.3g} >= 1 on the visited supports: the theorem gives no rate."
    return (
        f"{rate} The smallest stable rank of a client is {rank.min():.1f}; tau log(n / tau) is "
        f"{needed:.1f}."
    )
