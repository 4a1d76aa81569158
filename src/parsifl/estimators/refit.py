"""Pooled maximum likelihood on a given support, from sums over sites, without shrinkage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import sparse

from parsifl import wire
from parsifl.algorithms.fedbestsubset import FedBestSubset
from parsifl.estimators.exact import Sites, exact_fit
from parsifl.estimators.moments import Array, Indices, refit
from parsifl.linear.glm import GLM
from parsifl.solvers.subset_state import Phase

_ROUNDS = 60
_FAR = 25.0


def pooled_refit(
    found: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], ridge: float
) -> tuple[Array, int, int, Phase]:
    """Refit the non-zero coefficients; return them, the bytes up and down, and how it ended."""
    if found.ndim == 2:
        return _softmax_refit(found, problem, x, y, parts, ridge)
    slopes = found[:-1] if problem.intercept else found
    chosen = np.flatnonzero(slopes)
    if not len(chosen):
        return found, 0, 0, Phase.CONVERGED
    if problem.quadratic:
        return _least_squares(found, problem, x, y, parts, ridge)
    small = GLM(
        len(chosen),
        problem.datafit.name,
        l2=ridge,
        intercept=problem.intercept,
        keep=range(len(chosen)),
        weighted=True,
    )
    start = found[[*chosen, len(slopes)] if problem.intercept else chosen].copy()
    columns = _columns(problem, x, chosen)
    fit = exact_fit(FedBestSubset(tau=0), small, Sites.of(columns, y, parts), start, rounds=_ROUNDS)
    values = np.zeros_like(found)
    values[chosen] = fit.search.coefficients[: len(chosen)]
    if problem.intercept:
        values[-1] = fit.search.coefficients[-1]
    return values, fit.bytes_up, fit.bytes_down, fit.search.phase


def _least_squares(
    found: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], ridge: float
) -> tuple[Array, int, int, Phase]:
    """Solve the normal equations, which sites send once; a deployment computes the same bits."""
    slopes = found[:-1] if problem.intercept else found
    chosen = np.flatnonzero(slopes)
    columns, pull = _columns(problem, x, chosen), np.full(len(chosen), ridge)
    if problem.intercept:
        columns = np.concatenate([columns, np.ones((len(columns), 1))], axis=1)
        chosen, pull = np.append(chosen, len(slopes)), np.append(pull, 0.0)
    target, weight = y[:, 0].numpy(), y[:, 1].numpy()
    solved, sent = refit(columns, target, weight, parts, pull)
    values = np.zeros_like(found)
    values[chosen] = solved
    return values, sent, 0, Phase.CONVERGED


def _columns(problem: GLM, x: Any, chosen: Indices) -> Array:
    if problem.dictionary is not None:
        return np.asarray(x @ problem.dictionary.numpy()[:, chosen])
    part: Any = x[:, chosen]
    return np.asarray(part.toarray() if sparse.issparse(x) else part)


def _softmax_refit(
    found: Array, problem: GLM, x: Any, y: torch.Tensor, parts: list[Indices], ridge: float
) -> tuple[Array, int, int, Phase]:
    """Take damped Newton steps in all classes at once; each class has a support of its own."""
    used = found != 0
    if problem.intercept:
        used[:, -1] = True
    inner = used[:, :-1] if problem.intercept else used
    chosen = np.flatnonzero(inner.any(axis=0))
    columns = _columns(problem, x, chosen)
    if problem.intercept:
        columns = np.concatenate([columns, np.ones((len(columns), 1))], axis=1)
        chosen = np.append(chosen, found.shape[1] - 1)
    label, weight = y[:, 0].numpy().astype(np.int64), y[:, 1].numpy()
    sites = [(columns[rows], label[rows], weight[rows]) for rows in parts]
    mask = used[:, chosen]
    total = float(sum(part[2].sum() for part in sites))
    strength = np.broadcast_to(np.where(chosen == found.shape[1] - 1, 0.0, ridge), mask.shape)
    pull = total * (strength if problem.intercept else np.full(mask.shape, ridge))[mask]
    b, up, down, phase = found[:, chosen].copy(), 0, 0, Phase.STALLED

    def asked(at: Array) -> tuple[float, Array, Array]:
        nonlocal up, down
        loss, slope, bend = float(pull @ at[mask] ** 2) / 2, pull * at[mask], np.diag(pull)
        for own_x, own_y, own_weight in sites:
            sums = _softmax_sums(own_x, own_y, own_weight, at, mask)
            size = {"sums": torch.from_numpy(np.concatenate([s.ravel() for s in sums[1:]]))}
            up, down = up + 8 + wire.size(size), down + wire.size({"b": torch.from_numpy(at)})
            loss, slope, bend = loss + float(sums[0]), slope + sums[1], bend + sums[2]
        return loss, slope, bend

    loss, slope, bend = asked(b)
    null = loss
    for _ in range(_ROUNDS):
        step = np.linalg.lstsq(bend, slope, rcond=1e-10)[0]
        fall = float(slope @ step)
        if loss < 1e-6 * null or np.abs(b).max() > _FAR:
            phase = Phase.SEPARATED
            break
        if fall < 1e-13 * (1 + abs(loss)):
            b[mask] -= step
            phase = Phase.CONVERGED
            break
        length, trial = 1.0, b.copy()
        while length > 1e-5:
            trial[mask] = b[mask] - length * step
            after = asked(trial)
            if after[0] <= loss - 1e-4 * length * fall + 1e-13 * abs(loss):
                break
            length /= 2
        else:
            break
        b, (loss, slope, bend) = trial.copy(), after
    values = np.zeros_like(found)
    values[:, chosen] = b
    return values, up, down, phase


def _softmax_sums(
    x: Array, label: Indices, weight: Array, b: Array, mask: Any
) -> tuple[Array, Array, Array]:
    """Return a site's loss, gradient and Hessian in the coefficients that the mask marks."""
    u = x @ b.T
    u = u - u.max(axis=1, keepdims=True)
    share = np.exp(u)
    norm = share.sum(axis=1, keepdims=True)
    share = share / norm
    loss = float(weight @ (np.log(norm[:, 0]) - u[np.arange(len(u)), label]))
    residual = share.copy()
    residual[np.arange(len(u)), label] -= 1
    slope = ((residual * weight[:, None]).T @ x)[mask]
    wide = [np.einsum("n,nk->nk", share[:, c], x)[:, mask[c]] for c in range(len(b))]
    scaled = np.concatenate(wide, axis=1)
    bend = -scaled.T @ (scaled * weight[:, None])
    place = 0
    for c, part in enumerate(wide):
        inside, width = slice(place, place + part.shape[1]), part.shape[1]
        bend[inside, inside] += (part * weight[:, None]).T @ x[:, mask[c]]
        place += width
    return np.array(loss), slope, bend
