r"""Singular value thresholding: the proximal operator of the nuclear norm.

.. math:: X = U \operatorname{diag}(\sigma) V^T \;\mapsto\;
          U \operatorname{diag}(\max(\sigma - \tau, 0)) V^T

A full decomposition computes both sets of singular vectors for every singular value, most of which
are thrown away. Here the eigenvectors of the Gram matrix on the thin side are enough: one side
follows from the other by a product with X, for the surviving values only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parsifl.messages import LowRank, dematricize, factored, matricize
from parsifl.problem import Params

Compact = dict[str, Tensor | LowRank]
"""Parameters in which a layer may be a pair of factors."""

_TINY = torch.finfo(torch.float32).tiny
TRUSTED = 0.1
"""Share of the largest singular value down to which one Gram matrix gives full accuracy."""
DIRECT = 200
"""Up to this many rows a direct decomposition is as fast."""


def has_rank(shape: tuple[int, ...]) -> bool:
    """Tell whether a layer is a matrix or a 2-D convolution: only these have a rank.

    >>> has_rank((10, 4)), has_rank((8, 4, 3, 3)), has_rank((10,))
    (True, True, False)
    """
    return len(shape) in (2, 4)


def svt(matrix: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return factors `left @ right` of the thresholded matrix; their rank is what survived.

    Parameters
    ----------
    matrix
        X, of shape [d1, d2].
    threshold
        tau; singular values at or below it vanish.

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
        right, left = _thin(matrix.T, threshold)
        return left.T, right.T
    return _thin(matrix, threshold)


def _thin(matrix: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Threshold a matrix with no more rows than columns."""
    if matrix.dtype == torch.float64 or len(matrix) <= DIRECT:
        vectors, values, others = torch.linalg.svd(matrix, full_matrices=False)
    else:
        vectors, values, others = _leading(matrix, threshold)
    alive = values > threshold
    return vectors[:, alive] * (values[alive] - threshold), others[alive]


def _leading(matrix: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular triples above the threshold (and some below) by Gram matrices.

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


def svt_layers(params: Params, threshold: float) -> Compact:
    """Threshold every layer that has a rank; a layer is sent as factors where they are shorter.

    Biases, norms and tensors with another number of axes are left as they are.
    """
    if threshold == 0.0:
        return dict(params)
    compact: Compact = {}
    for name, value in params.items():
        if has_rank(tuple(value.shape)):
            left, right = svt(matricize(value), threshold)
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
