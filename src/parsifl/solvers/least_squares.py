"""Least squares on a support, for a block of clients at once, nearest to the current iterate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parsifl.core.problem import Restricted

_SINE = 1e-4  # columns closer to the span of the others than this need the slower method
_RELATIVE = 1e-12  # smallest reliable eigenvalue of a system, in float64
_LOST = 1e-13  # the error eps / sine^2 above which normal equations are solved twice


def least_squares(part: Restricted) -> Tensor:
    """Return the minimizers [clients, k] of quadratic losses on supports.

    If it is not unique (fewer rows than coefficients, equal columns), the minimizer nearest to
    `part.start` is returned: the correction has minimum norm. Coefficients of minimum norm would
    stall.
    """
    matrix = part.columns
    u = (matrix @ part.start[..., None])[..., 0] if part.u is None else part.u
    residual = part.targets - u
    ridged = bool(part.ridge.any())
    first = part.weight[:, :1]
    if ridged or bool(((part.weight != first) | (first == 0)).any()):  # else a common factor
        root = (part.weight * (part.scale or 1.0)).sqrt()
        matrix, residual = matrix * root[..., None], residual * root
    if ridged:
        penalty = part.ridge.sqrt()
        matrix = torch.cat([matrix, torch.diag_embed(penalty)], dim=1)
        residual = torch.cat([residual, -penalty * part.start], dim=1)
    return part.start + _correction(matrix, residual)


def _correction(matrix: Tensor, residual: Tensor) -> Tensor:
    """Minimize |matrix z - residual|^2, both with a leading client axis."""
    if matrix.shape[1] < matrix.shape[2]:
        return _shortest(matrix, residual)
    solutions, trusted = _by_normal_equations(matrix, residual)
    if not bool(trusted.all()):
        doubtful = ~trusted
        solutions[doubtful] = _shortest(matrix[doubtful], residual[doubtful])
    return solutions


def _by_normal_equations(matrix: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Solve by Cholesky, refined if needed; also return where that is nearly as good as QR."""
    factor, sine = _cholesky(matrix.mT @ matrix)
    solutions = _solved(factor, matrix, residual)
    near = ~(sine**2 * _LOST > torch.finfo(sine.dtype).eps)
    if bool(near.any()):
        some, first = matrix[near], solutions[near]
        left = residual[near] - (some @ first[..., None])[..., 0]
        solutions[near] = first + _solved(factor[near], some, left)
    return solutions, _trusted(sine)


def _trusted(sine: Tensor) -> Tensor:
    """Return where a factor is reliable: rounding turns a sine of 0 into one of sqrt(eps)."""
    return sine > max(_SINE, 10 * math.sqrt(torch.finfo(sine.dtype).eps))


def _solved(factor: Tensor, matrix: Tensor, residual: Tensor) -> Tensor:
    return torch.cholesky_solve((residual[:, None] @ matrix).mT, factor)[..., 0]


def _cholesky(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Factor Gram matrices (it may change their diagonals).

    Also return the smallest sine between a column and the span of those before it, or NaN.
    """
    squares = gram.diagonal(dim1=1, dim2=2)
    # an unused position (a zero row and column) gets the equation z = 0
    squares += squares == 0
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not gram.shape[-1]:
        return factor, torch.ones(len(gram), dtype=gram.dtype)
    sines = factor.diagonal(dim1=1, dim2=2) / squares.sqrt()
    return factor, sines.amin(1).masked_fill_(failed != 0, 0.0)


def _shortest(matrix: Tensor, residual: Tensor) -> Tensor:
    """Return the solution of minimum norm by SVD.

    QR with pivoting (driver "gelsy") would be faster, but with torch 2.13 its results differed
    between calls with the same input.
    """
    limit = matrix.shape[1] * torch.finfo(matrix.dtype).eps
    fit = torch.linalg.lstsq(matrix, residual[..., None], rcond=limit, driver="gelsd")
    solution: Tensor = fit.solution[..., 0]
    return solution


def solve_symmetric(system: Tensor, right: Tensor) -> Tensor:
    """Solve positive semidefinite systems [clients, k, k]; singular ones by minimum norm."""
    factor, sine = _cholesky(system.clone())
    trusted = _trusted(sine)
    solution = torch.cholesky_solve(right[..., None], factor)[..., 0]
    if not bool(trusted.all()):
        doubtful = ~trusted
        limit = max(_RELATIVE, 10 * len(system[0]) * torch.finfo(system.dtype).eps)
        inverse = torch.linalg.pinv(system[doubtful], rtol=limit, hermitian=True)
        solution[doubtful] = (inverse @ right[doubtful][..., None])[..., 0]
    return solution
