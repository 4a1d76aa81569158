r"""Singular value thresholding: the proximal operator of the nuclear norm.

.. math:: X = U \operatorname{diag}(\sigma) V^T \;\mapsto\;
          U \operatorname{diag}(\max(\sigma - \tau, 0)) V^T

A full decomposition computes both sets of singular vectors for every singular value. There are
cheaper methods with sufficient accuracy: start from the factors of the last round; otherwise the
Gram matrix of the thin side gives one set, from which the other follows by a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank, dematricize, factored, matricize
from parsifl.core.problem import Params

Compact = dict[str, Tensor | LowRank]
"""Parameters, with layers as tensors or pairs of factors."""

Factors = tuple[Tensor, Tensor]
TRUSTED = 0.01
"""Fraction of the largest singular value down to which one Gram matrix is accurate, if the
threshold is far smaller; else twice as much, because errors matter most near the threshold."""
DIRECT = 100
"""Up to this many rows a direct decomposition is as fast."""
SWEEPS = 3
"""Subspace iterations from a guess before the residual is checked."""
TRIALS = 2
"""How often the residual is checked before the guess is abandoned."""
RESIDUAL = 100
"""Largest residual of a guess, in units of rounding errors of the largest singular value."""
STRIPS = 4
"""Parts in which half of a Gram matrix is computed."""


def has_rank(shape: tuple[int, ...]) -> bool:
    """Return whether a layer is a matrix or a 2-D convolution: only these have a rank.

    >>> has_rank((10, 4)), has_rank((8, 4, 3, 3)), has_rank((10,))
    (True, True, False)
    """
    return len(shape) in (2, 4)


def svt(matrix: Tensor, threshold: float, guess: Factors | None = None) -> Factors:
    """Return factors `left @ right` of the thresholded matrix, of its rank.

    In float32 the error (spectral norm, relative to the largest singular value) was at most 2e-5
    on difficult spectra: decaying over five decades, clustered at tau, few or none small. A
    direct decomposition in float32 reaches 2e-5 at clusters and 1e-6 to 3e-6 elsewhere.

    Parameters
    ----------
    matrix
        X, of shape [d1, d2].
    threshold
        tau; singular values at or below it become zero.
    guess
        Factors of a matrix near X, such as that of the last round. They save work, and add an
        error of at most 100 rounding errors of the largest singular value.

    Examples
    --------
    >>> left, right = svt(torch.diag(torch.tensor([3.0, 2.0, 0.5])), 1.0)
    >>> (left @ right).diagonal().round(decimals=4).tolist()
    [2.0, 1.0, 0.0]
    """
    rows, columns = matrix.shape
    size = float(matrix.norm())
    if size <= threshold:  # no singular value exceeds the Frobenius norm
        return matrix.new_zeros(rows, 0), matrix.new_zeros(0, columns)
    if not size <= math.sqrt(torch.finfo(matrix.dtype).max) / 100:  # its square would overflow
        scale = float(matrix.abs().max())
        if not math.isfinite(scale):  # as NaN, the caller's checks find it
            return matrix.new_full((rows, 1), math.nan), matrix.new_full((1, columns), math.nan)
        left, right = svt(matrix / scale, threshold / scale, guess)
        return left * scale, right
    if rows > columns:
        left, right = _wide(matrix.T, threshold, None if guess is None else guess[1].T)
        return right.T, left.T
    return _wide(matrix, threshold, None if guess is None else guess[0])


def _wide(matrix: Tensor, threshold: float, start: Tensor | None) -> Factors:
    """Threshold a matrix with as many columns as rows, or more."""
    if len(matrix) <= DIRECT:
        return _direct(matrix, threshold)
    if start is not None and 3 * start.shape[1] <= len(matrix):
        factors = _warm(matrix, threshold, start)
        if factors is not None:
            return factors
    return _peeled(matrix, threshold)


def _direct(matrix: Tensor, threshold: float) -> Factors:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    alive = values > threshold
    return left[:, alive] * (values[alive] - threshold), right[alive]


def _warm(matrix: Tensor, threshold: float, start: Tensor) -> Factors | None:
    """Iterate the subspace of a guess, with some extra dimensions; None if it was too small.

    With right singular vectors V of the part of X in the subspace B, for all values above tau / 2,
    the result is exact for X - R, R = (X V - B B^T X V) V^T, if the part of X outside B is at most
    tau / 2 too. Thresholding is non-expansive: the error is at most the Frobenius norm of R, which
    must be of the order of rounding errors.
    """
    room = max(16, start.shape[1] // 4)
    draw = Key(0, purpose="svt").torch_generator()
    fresh = torch.randn(len(matrix), room, generator=draw, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(torch.cat([start, fresh], 1))[0]
    for _ in range(TRIALS):
        for _ in range(SWEEPS):
            basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
        left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        if float(values[-1]) > threshold / 2:
            return None
        seen = matrix @ right[values > threshold / 2].T
        residual = float((seen - basis @ (basis.T @ seen)).norm())
        if residual <= RESIDUAL * torch.finfo(matrix.dtype).eps * float(values[0]):
            break
    else:
        return None
    probe = matrix.T @ fresh[:, :8]
    for _ in range(SWEEPS):  # the largest singular value of the part outside, from eight vectors
        seen = matrix @ torch.linalg.qr(probe)[0]
        outside = seen - basis @ (basis.T @ seen)
        probe = matrix.T @ outside
    if float(torch.linalg.matrix_norm(outside, 2)) > threshold / 2:
        return None
    alive = values > threshold
    return basis @ (left[:, alive] * (values[alive] - threshold)), right[alive]


def _peeled(matrix: Tensor, threshold: float) -> Factors:
    r"""Threshold by Gram matrices of the remainder, the largest singular values first.

    With the left singular vectors u of X, from its Gram matrix, the result is the sum of
    (1 - tau / sigma) u (u^T X). Squaring halves the digits: an error eps * s^2 in the squares,
    where s is the largest singular value, is one of eps * s^2 / (2 sigma) in sigma. Each pass
    therefore takes the values above `TRUSTED` * s and leaves the projected rest, with a smaller
    s, to the next pass: the error is at most of the order of eps * s / (2 `TRUSTED`).
    """
    basis: Tensor | None = None
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    while True:
        squares, vectors = torch.linalg.eigh(_gram(matrix))
        largest = math.sqrt(max(float(squares[-1]), 0.0))
        trusted = largest * (TRUSTED if threshold < 0.3 * TRUSTED * largest else 2 * TRUSTED)
        rest = int((squares <= max(threshold, trusted) ** 2).sum())  # squares ascend
        right = vectors[:, rest:].T @ matrix
        # the norm of u^T X is a Rayleigh quotient: its error is of second order in that of u
        values = right.norm(dim=1)
        left = vectors[:, rest:] * (1 - threshold / values)
        alive = values > threshold
        if not bool(alive.all()):
            left, right = left[:, alive], right[alive]
        lefts.append(_lift(basis, left))
        rights.append(right)
        if threshold >= trusted or rest == 0:
            break
        basis, matrix = _lift(basis, vectors[:, :rest]), vectors[:, :rest].T @ matrix
    if len(lefts) == 1:
        return lefts[0], rights[0]
    return torch.cat(lefts, 1), torch.cat(rights)


def _gram(matrix: Tensor) -> Tensor:
    """Return the Gram matrix of the rows, below the diagonal: all that `eigh` reads."""
    rows = len(matrix)
    gram = matrix.new_empty(rows, rows)
    ends = [rows * part // STRIPS for part in range(STRIPS + 1)]
    for start, end in pairwise(ends):
        torch.mm(matrix[start:end], matrix[:end].T, out=gram[start:end, :end])
    return gram


def _lift(basis: Tensor | None, vectors: Tensor) -> Tensor:
    return vectors if basis is None else basis @ vectors


def next_value(matrix: Tensor, rank: int) -> float:
    """Return the threshold that gives this rank: the next singular value, or 0 if there is none.

    >>> round(next_value(torch.diag(torch.tensor([3.0, 2.0, 1.0])), 2), 4)
    1.0
    """
    if rank >= min(matrix.shape):
        return 0.0
    return float(_spectrum(matrix)[rank])


def _spectrum(matrix: Tensor) -> Tensor:
    """Return the singular values plus rounding errors, so that none exceeds itself in `svt`."""
    values = torch.linalg.svdvals(matrix)
    raised: Tensor = values + _noise(matrix, values)
    return raised


def _noise(matrix: Tensor, values: Tensor) -> Tensor:
    """Return the size of the rounding errors of singular values, from the values."""
    return 2 * math.sqrt(max(matrix.shape)) * torch.finfo(values.dtype).eps * values[0]


def factor_layers(params: Params) -> Compact:
    """Return the same parameters, with layers as factors where these are shorter.

    Singular values at the level of rounding errors count as zero.

    >>> {name: type(v).__name__ for name, v in factor_layers({"w": torch.ones(4, 5)}).items()}
    {'w': 'LowRank'}
    """
    compact: Compact = {}
    for name, value in params.items():
        compact[name] = value
        if has_rank(tuple(value.shape)) and value.numel():
            matrix = matricize(value)
            left, values, right = torch.linalg.svd(matrix, full_matrices=False)
            rank = int((values > _noise(matrix, values)).sum())
            if rank * sum(matrix.shape) < matrix.numel():
                scaled = left[:, :rank] * values[:rank]
                compact[name] = LowRank(scaled, right[:rank].contiguous(), tuple(value.shape))
    return compact


def threshold_within(params: Params, numbers: int) -> float:
    """Return the smallest threshold at which the parameters take at most this many numbers.

    Layers count as factors if these are shorter. 0 if the dense parameters fit.

    >>> round(threshold_within({"w": torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))}, 8), 4)
    3.0
    """
    layers = {name: matricize(v) for name, v in params.items() if has_rank(tuple(v.shape))}
    vectors = sum(value.numel() for name, value in params.items() if name not in layers)
    if vectors + sum(layer.numel() for layer in layers.values()) <= numbers:
        return 0.0
    spectra = [(layer.shape, _spectrum(layer)) for layer in layers.values()]

    def taken(threshold: Tensor) -> int:
        ranks = [(shape, int((values > threshold).sum())) for shape, values in spectra]
        return vectors + sum(min(rank * sum(shape), shape.numel()) for shape, rank in ranks)

    candidates = torch.cat([values for _, values in spectra]).sort().values
    low, high = 0, len(candidates) - 1  # at the largest value no rank is left
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if taken(candidates[middle]) <= numbers else (middle + 1, high)
    return float(candidates[low])


def svt_layers(
    params: Params, threshold: float | Callable[[Tensor], float], near: Compact | None = None
) -> Compact:
    """Threshold every layer that has a rank; a layer is sent as factors if they are shorter.

    The threshold may be a function of the layer, as a matrix.
    `near` may hold the layers of the last round, whose factors then serve as guesses.
    Biases, norms and tensors with another number of axes are unchanged.
    """
    if threshold == 0.0:
        return dict(params)
    compact: Compact = {}
    for name, value in params.items():
        if has_rank(tuple(value.shape)):
            last = None if near is None else near.get(name)
            guess = (last.left, last.right) if isinstance(last, LowRank) else None
            matrix = matricize(value)
            tau = threshold(matrix) if callable(threshold) else threshold
            left, right = svt(matrix, tau, guess)
            compact[name] = factored(left.contiguous(), right.contiguous(), tuple(value.shape))
        else:
            compact[name] = value
    return compact


def svt_stack(stack: Tensor, threshold: float) -> Tensor:
    """Threshold a stack of layers, one per client; shapes stay fixed, so it runs under vmap.

    A layer that is not finite becomes NaN, which the caller's checks find; its decomposition would
    fail, and with it those of the other clients.
    """
    shape = tuple(stack.shape[1:])
    if not has_rank(shape):
        return stack
    matrices = torch.stack([matricize(layer) for layer in stack.unbind(0)])
    finite = matrices.isfinite().all(dim=(1, 2), keepdim=True)
    left, values, right = torch.linalg.svd(matrices.where(finite, 0.0), full_matrices=False)
    shrunk = (left * (values - threshold).clamp(min=0.0)[:, None, :]) @ right
    shrunk = shrunk.where(finite, math.nan)
    return torch.stack([dematricize(matrix, shape) for matrix in shrunk.unbind(0)])
