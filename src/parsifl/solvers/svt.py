r"""Singular value thresholding: the proximal operator of the nuclear norm.

.. math:: X = U \operatorname{diag}(\sigma) V^T \;\mapsto\;
          U \operatorname{diag}(\max(\sigma - \tau, 0)) V^T

A full decomposition computes both sets of singular vectors for every singular value. Cheaper ways
that are as exact, each where it applies: the factors of the last round show where the survivors
are; the Gram matrix on the thin side gives one set, from which the other follows by a product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parsifl.keys import Key
from parsifl.messages import LowRank, dematricize, factored, matricize
from parsifl.problem import Params

Compact = dict[str, Tensor | LowRank]
"""Parameters in which a layer may be a pair of factors."""

_TINY = torch.finfo(torch.float32).tiny
TRUSTED = 0.1
"""Share of the largest singular value down to which one Gram matrix gives full accuracy."""
FLAT = 0.15
"""Mean square of the singular values, as a share of the largest, from which few are small."""
DIRECT = 200
"""Up to this many rows a direct decomposition is as fast."""
SWEEPS = 3
"""Subspace iterations from a guess."""


def has_rank(shape: tuple[int, ...]) -> bool:
    """Tell whether a layer is a matrix or a 2-D convolution: only these have a rank.

    >>> has_rank((10, 4)), has_rank((8, 4, 3, 3)), has_rank((10,))
    (True, True, False)
    """
    return len(shape) in (2, 4)


def svt(
    matrix: Tensor, threshold: float, guess: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return factors `left @ right` of the thresholded matrix; their rank is what survived.

    Parameters
    ----------
    matrix
        X, of shape [d1, d2].
    threshold
        tau; singular values at or below it vanish.
    guess
        Factors of a matrix near X, say of the last round: they save work and change nothing else.

    Examples
    --------
    >>> left, right = svt(torch.diag(torch.tensor([3.0, 2.0, 0.5])), 1.0)
    >>> (left @ right).diagonal().round(decimals=4).tolist()
    [2.0, 1.0, 0.0]
    """
    rows, columns = matrix.shape
    if float(matrix.norm()) <= threshold:  # no singular value exceeds the Frobenius norm
        return matrix.new_zeros(rows, 0), matrix.new_zeros(0, columns)
    if rows > columns:
        start = None if guess is None else guess[1].T
        vectors, values, others = _thin(matrix.T, threshold, start)
        vectors, others = others.T, vectors.T
    else:
        start = None if guess is None else guess[0]
        vectors, values, others = _thin(matrix, threshold, start)
    alive = values > threshold
    return vectors[:, alive] * (values[alive] - threshold), others[alive]


Triples = tuple[Tensor, Tensor, Tensor]


def _thin(matrix: Tensor, threshold: float, start: Tensor | None) -> Triples:
    """Return the singular triples above the threshold (and some below) of a wide matrix."""
    if matrix.dtype == torch.float64 or len(matrix) <= DIRECT:
        return _direct(matrix)
    if start is not None and 3 * start.shape[1] <= len(matrix):
        found = _warm(matrix, threshold, start)
        if found is not None:
            return found
    gram = matrix @ matrix.T
    square = _largest(gram)
    if threshold**2 >= TRUSTED**2 * square or float(gram.trace()) >= FLAT * square * len(gram):
        return _leading(matrix, threshold)
    return _direct(matrix)


def _direct(matrix: Tensor) -> Triples:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, values, right


def _largest(gram: Tensor) -> float:
    """Return the largest eigenvalue of a positive matrix, roughly: it only chooses the way."""
    vector = gram.sum(1)
    for _ in range(8):
        vector = gram @ (vector / vector.norm().clamp(min=_TINY))
    return float(vector.norm())


def _warm(matrix: Tensor, threshold: float, start: Tensor) -> Triples | None:
    """Iterate the subspace of a guess, with room for newcomers; None if it was too small.

    The smallest value found must lie well below the threshold, and so must what is left of the
    matrix outside the subspace: then no survivor was missed, and those found have converged.
    """
    room = max(16, start.shape[1] // 4)
    draw = Key(0, purpose="svt").torch()
    fresh = torch.randn(len(matrix), room, generator=draw, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(torch.cat([start, fresh], 1))[0]
    for _ in range(SWEEPS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
    inside = basis.T @ matrix
    left, values, right = _direct(inside)
    probe = matrix.T @ fresh[:, :8]
    for _ in range(SWEEPS):  # the largest singular value of what is outside, from eight vectors
        seen = matrix @ torch.linalg.qr(probe)[0]
        outside = seen - basis @ (basis.T @ seen)
        probe = matrix.T @ outside
    missed = float(torch.linalg.matrix_norm(outside, 2))
    if max(float(values[-1]), missed) > threshold / 2:
        return None
    return basis @ left, values, right


def _leading(matrix: Tensor, threshold: float) -> Triples:
    """Return singular triples by Gram matrices of what is left.

    Squaring halves the digits: an error eps * s^2 in the squares, s being the largest singular
    value, is one of eps * s^2 / (2 sigma) in sigma. So each pass keeps what lies above
    `TRUSTED` * s and hands the rest, projected and thus with a smaller s, to the next pass. The
    error is that of a direct decomposition in the same precision, of the order of eps * s.
    """
    basis: Tensor | None = None
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    while True:
        squares, vectors = torch.linalg.eigh(matrix @ matrix.T)
        trusted = TRUSTED * math.sqrt(max(float(squares[-1]), 0.0))
        keep = squares > max(threshold, trusted) ** 2
        others = vectors[:, keep].T @ matrix
        # the norm of u^T X is a Rayleigh quotient: its error is of second order in that of u
        values = others.norm(dim=1)
        found.append(
            (_lift(basis, vectors[:, keep]), values, others / values.clamp(min=_TINY)[:, None])
        )
        if threshold >= trusted or bool(keep.all()) or not bool(keep.any()):
            break
        rest = vectors[:, ~keep]
        basis, matrix = _lift(basis, rest), rest.T @ matrix
    lefts, sizes, rights = zip(*found, strict=True)
    return torch.cat(lefts, 1), torch.cat(sizes), torch.cat(rights)


def _lift(basis: Tensor | None, vectors: Tensor) -> Tensor:
    return vectors if basis is None else basis @ vectors


def svt_layers(params: Params, threshold: float, near: Compact | None = None) -> Compact:
    """Threshold every layer that has a rank; a layer is sent as factors where they are shorter.

    `near` may hold the layers of the last round, whose factors then serve as guesses.
    Biases, norms and tensors with another number of axes are left as they are.
    """
    if threshold == 0.0:
        return dict(params)
    compact: Compact = {}
    for name, value in params.items():
        if has_rank(tuple(value.shape)):
            last = None if near is None else near.get(name)
            guess = (last.left, last.right) if isinstance(last, LowRank) else None
            left, right = svt(matricize(value), threshold, guess)
            compact[name] = factored(left.contiguous(), right.contiguous(), tuple(value.shape))
        else:
            compact[name] = value
    return compact


def svt_stack(stack: Tensor, threshold: float) -> Tensor:
    """Threshold a stack of layers, one a client; shapes stay fixed, so it runs under vmap."""
    shape = tuple(stack.shape[1:])
    if not has_rank(shape):
        return stack
    matrices = torch.stack([matricize(layer) for layer in stack.unbind(0)])
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    shrunk = (left * (values - threshold).clamp(min=0.0)[:, None, :]) @ right
    return torch.stack([dematricize(matrix, shape) for matrix in shrunk.unbind(0)])
