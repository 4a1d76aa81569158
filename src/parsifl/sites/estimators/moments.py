"""Means and scales of the features from sums that clients send in one counted round."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse

from parsifl import wire

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
FAR = 3


@dataclass(frozen=True)
class Moments:
    """Global means and standard deviations, and the bytes sent to compute them."""

    mean: Array
    scale: Array
    deviation: Array
    target: float
    bytes_up: int
    bytes_down: int


def gather(x: Any, y: Array, weight: Array, parts: list[Indices], *, standardize: bool) -> Moments:
    """Combine n, sum x, squares and sum y of all clients; constant columns keep the scale 1.

    The squares are around the client's own mean: they do not cancel if a column is far from zero
    (a date, a serial number).
    """
    target, up = 0.0, 0
    largest = float(abs(x).max()) if x.shape[0] else 0.0
    if not np.isfinite(largest * largest * len(y)):
        raise ValueError(f"features as large as {largest:.1e} cannot be squared; rescale them")
    counts, sums, squares = [], [], []
    for rows in parts:
        w = weight[rows]
        site_sum, around = _sums(x[rows], w)
        message = {
            "n": torch.tensor([w.sum(), w @ y[rows]]),
            "x": torch.from_numpy(site_sum),
            "xx": torch.from_numpy(around),
        }
        up += wire.size(message)
        target += float(w @ y[rows])
        counts.append(float(w.sum()))
        sums.append(site_sum)
        squares.append(around)
    total = sum(counts)
    mean = np.asarray(sum(sums) / total)
    between = [
        n * (site_sum / (n or 1.0) - mean) ** 2 for n, site_sum in zip(counts, sums, strict=True)
    ]
    variance = np.asarray(sum(squares) + sum(between)) / total
    # rounding errors of a constant column (larger for a sparse one) count as no variance
    constant = variance <= (1e-12 if sparse.issparse(x) else 1e-26) * (variance + mean**2)
    deviation = np.where(constant, 0.0, np.sqrt(variance.clip(0.0)))
    scale = np.where(constant, 1.0, deviation) if standardize else np.ones_like(mean)
    answer = {"mean": torch.from_numpy(mean), "scale": torch.from_numpy(scale)}
    down = len(parts) * wire.size(answer)
    return Moments(mean, scale, deviation, float(target / total), up, down)


def _sums(part: Any, weight: Array) -> tuple[Array, Array]:
    """Return a client's weighted sums of the columns, and of the squares around their means."""
    total = float(weight.sum()) or 1.0
    totals = np.asarray(part.T @ weight).ravel()
    if isinstance(part, np.ndarray):
        return totals, np.asarray(((part - totals / total) ** 2).T @ weight)
    squares = part.multiply(part)  # centred, a CSR matrix would not be sparse
    return totals, np.asarray(squares.T @ weight).ravel() - totals * totals / total


def scaled(x: Any, moments: Moments, *, intercept: bool) -> Any:
    """Divide the columns of a CSR matrix by their scales, without centring, to keep zeros.

    Warns if there is an intercept and columns are far from zero, which those of counts and text
    are not. With an intercept a constant column becomes zero, as in `centred`.
    """
    constant = moments.deviation == 0
    far = np.flatnonzero((np.abs(moments.mean) > FAR * moments.deviation) & ~constant)
    if intercept and len(far):
        warnings.warn(
            f"a CSR matrix is not centred, and {len(far)} of its columns (the first: {far[0]}) are "
            f"more than {FAR} standard deviations from zero: they resemble the intercept and each "
            "other, which degrades the selection; subtract such offsets, or make X dense",
            UserWarning,
            stacklevel=3,
        )
    factor = np.where(constant & intercept, 0.0, 1 / moments.scale)
    product = x.multiply(factor[None, :]).tocsr()
    product.eliminate_zeros()
    return product


def centred(x: Array, moments: Moments) -> Array:
    """Subtract the means; a constant column becomes exactly zero."""
    return np.asarray(np.where(moments.deviation > 0, x - moments.mean, 0.0))


def centred_by_client(
    x: Array, y: Array, weight: Array, parts: list[Indices]
) -> tuple[Array, Array]:
    """Subtract every client's own means, which removes site effects."""
    x, y = x.copy(), y.copy()
    for rows in parts:
        if weight[rows].sum() > 0:
            part = x[rows] - np.average(x[rows], axis=0, weights=weight[rows])
            # rounding errors of a column that is constant here
            dust = np.abs(part).max(axis=0) <= 1e-12 * np.abs(x[rows]).max(axis=0)
            x[rows] = np.where(dust, 0.0, part)
            y[rows] -= np.average(y[rows], weights=weight[rows])
    return x, y


def refit(x: Any, y: Array, weight: Array, parts: list[Indices], ridge: Array) -> tuple[Array, int]:
    """Return pooled least squares from sums of products that sites send, and the bytes sent.

    `x` has only the columns of the support; every site sends x'Wx and x'Wy.
    """
    system, right, up = np.diag(ridge * weight.sum()), np.zeros(x.shape[1]), 0
    for rows in parts:
        part, w = x[rows], weight[rows]
        products, targets = part.T @ (part * w[:, None]), part.T @ (w * y[rows])
        up += wire.size({"xx": torch.from_numpy(products), "xy": torch.from_numpy(targets)})
        system, right = system + products, right + targets
    return np.asarray(np.linalg.lstsq(system, right, rcond=1e-14)[0]), up


def smoothness(x: Any, weight: Array, parts: list[Indices], intercept: bool) -> float:
    """Return the largest squared singular value of a client's weighted rows, over their number.

    Each client reports one number, computed by power iteration and rounded up. An intercept is a
    column of ones.
    """
    bound = 0.0
    for rows in parts:
        part, w = x[rows], weight[rows]
        v = np.random.default_rng(0).standard_normal(part.shape[1])
        value = 0.0
        for _ in range(50):
            v = np.asarray(part.T @ (w * np.asarray(part @ (v / np.linalg.norm(v))))).ravel()
            value = float(np.linalg.norm(v))
            if value == 0.0:
                break
        bound = max(bound, 1.1 * value / len(rows) + intercept * float(w.mean()))
    return bound
