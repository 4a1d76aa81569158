r"""Dictionaries: the model is a combination of few atoms, :math:`x = \Psi a`.

Coefficients refer to atoms. Candidates are selected by :math:`|a_j| \|\psi_j\|` (or by the
correlations :math:`|\psi_j^\top w| / \|\psi_j\|`, that is a gradient in `a` divided by the norms).
After pruning, the model is projected onto the remaining atoms by least squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.linear.sparsity.coordinates import places

_PIVOT = 1e-3
"""Smallest pivot (a sine between atoms) for which the Gram matrix is factored."""
_RELATIVE = 1e-12
"""Smallest reliable eigenvalue of a Gram matrix of unit atoms, in float64."""


@dataclass(frozen=True)
class RandomDictionary:
    """A dictionary that is sent as a seed: server and clients draw the same atoms.

    >>> RandomDictionary("orthonormal", 4, 4, seed=1).draw().shape
    torch.Size([4, 4])
    """

    kind: Literal["orthonormal", "gaussian"]
    features: int
    atoms: int
    seed: int = 0

    def draw(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the atoms as unit columns [features, atoms]."""
        if self.kind == "orthonormal":
            return orthonormal(self.features, self.atoms, self.seed).to(dtype)
        return gaussian(self.features, self.atoms, self.seed).to(dtype)


def gaussian(features: int, atoms: int, seed: int = 0) -> Tensor:
    """Draw atoms uniformly from the unit sphere."""
    draw = Key(seed, purpose="dictionary/gaussian").numpy_generator()
    return unit_columns(torch.from_numpy(draw.standard_normal((features, atoms))))


def orthonormal(features: int, atoms: int, seed: int = 0) -> Tensor:
    """Draw orthonormal atoms, at most as many as features."""
    if atoms > features:
        raise ConfigError(f"{atoms} atoms in {features} dimensions cannot be orthonormal")
    draw = Key(seed, purpose="dictionary/orthonormal").numpy_generator()
    basis: Tensor = torch.linalg.qr(torch.from_numpy(draw.standard_normal((features, atoms))))[0]
    return basis


def unit_columns(matrix: Tensor) -> Tensor:
    """Scale each atom to length 1; a zero atom raises an error."""
    sizes = torch.linalg.vector_norm(matrix, dim=0)
    if not bool((sizes > 0).all()):
        raise ConfigError("a dictionary has an atom that is zero; remove it")
    scaled: Tensor = matrix / sizes
    return scaled


def project(gram: Tensor, coefficients: Tensor, chosen: Tensor) -> Tensor:
    r"""Return the coefficients of :math:`P_\Lambda(\Psi a)` for the selected atoms Lambda.

    Least squares on the selected atoms through the Gram matrix :math:`\Psi^\top \Psi`, which is
    small if there are many features. Coefficients are along the last axis. Not for
    `torch.func.vmap`.
    """
    index, used = places(chosen, least=1)
    mask = used.to(gram.dtype)
    unit = mask / lengths(gram).clamp(min=torch.finfo(gram.dtype).tiny)[index]
    system = (
        gram[index[..., :, None], index[..., None, :]] * unit[..., :, None] * unit[..., None, :]
    )
    system = system + torch.diag_embed(1 - mask)  # an unused position has its own equation
    right = (coefficients @ gram).gather(-1, index) * unit
    factor, failed = torch.linalg.cholesky_ex(system)
    projected = torch.cholesky_solve(right[..., None], factor)[..., 0]
    alike = (failed != 0) | ~(factor.diagonal(dim1=-2, dim2=-1).amin(-1) > _PIVOT)
    if bool(alike.any()):  # nearly identical atoms: the solution of least norm
        limit = max(_RELATIVE, 10 * len(gram) * torch.finfo(gram.dtype).eps)
        inverse = torch.linalg.pinv(system, rtol=limit, hermitian=True)
        projected = torch.where(alike[..., None], (inverse @ right[..., None])[..., 0], projected)
    return torch.zeros_like(coefficients).scatter_add(-1, index, projected * unit)


def pursue(gram: Tensor, coefficients: Tensor, count: int, always: tuple[int, ...] = ()) -> Tensor:
    r"""Approximate :math:`\Psi a` by `count` atoms: orthogonal matching pursuit through the Gram.

    Similar atoms (frames of a film) may have large coefficients that cancel, so the largest ones
    need not be the best to keep. This selects the atom that explains most of the residual.

    >>> gram = torch.tensor([[1.0, 0.99, 0.0], [0.99, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> pursue(gram, torch.tensor([5.0, -4.9, 1.0]), 1).round(decimals=2).tolist()
    [0.0, 0.0, 1.0]
    """
    chosen = torch.zeros_like(coefficients, dtype=torch.bool)
    chosen[..., list(always)] = True
    codes = project(gram, coefficients, chosen) if always else torch.zeros_like(coefficients)
    for _ in range(min(count, gram.shape[0] - len(always))):
        left = ((coefficients - codes) @ gram / divisors(gram)).abs().masked_fill(chosen, -1.0)
        chosen = chosen.scatter(-1, left.argmax(-1, keepdim=True), True)
        codes = project(gram, coefficients, chosen)
    return codes


def lengths(gram: Tensor) -> Tensor:
    """Return the lengths of the atoms."""
    return gram.diagonal(dim1=-2, dim2=-1).sqrt()


def divisors(gram: Tensor) -> Tensor:
    """Return the lengths of the atoms, 1 for an atom that is zero."""
    sizes = lengths(gram)
    return torch.where(sizes > 0, sizes, 1.0)


def omp(dictionary: Tensor, signals: Tensor, sparsity: int) -> Tensor:
    """Code each signal [features, n] by at most `sparsity` atoms: orthogonal matching pursuit.

    >>> omp(torch.eye(3), torch.tensor([[0.0], [2.0], [1.0]]), 1)[:, 0].tolist()
    [0.0, 2.0, 0.0]
    """
    count = signals.shape[1]
    codes = signals.new_zeros(dictionary.shape[1], count)
    residual, scale = signals, signals.norm(dim=0)
    chosen = torch.zeros(count, 0, dtype=torch.long)
    for _ in range(sparsity):
        scores = (dictionary.mT @ residual).abs().mT.scatter(1, chosen, -1.0)
        chosen = torch.cat([chosen, scores.argmax(1, keepdim=True)], dim=1)
        parts = dictionary.mT[chosen].mT
        weights = torch.linalg.lstsq(parts, signals.mT[..., None], driver="gelsd").solution[..., 0]
        next_codes = torch.zeros_like(codes).scatter(0, chosen.mT, weights.mT)
        # a signal that is already represented needs no more atoms
        going = residual.norm(dim=0) > 1e-12 * scale
        codes = torch.where(going, next_codes, codes)
        residual = signals - dictionary @ codes
    return codes


def ksvd(signals: Tensor, atoms: int, sparsity: int, *, rounds: int = 10, seed: int = 0) -> Tensor:
    """Learn unit atoms [features, atoms] so that few of them represent each signal [features, n].

    It starts from random signals. Each round codes all signals by OMP, then sets every atom and
    its coefficients to the best rank-one fit of the residual without it. An unused atom is replaced
    by the signal with the largest residual. The error never increases from one atom update to the
    next.
    """
    if not 1 <= sparsity <= atoms:
        raise ConfigError(f"sparsity must be between 1 and {atoms} atoms, got {sparsity}")
    draw = Key(seed, purpose="dictionary/k-svd").numpy_generator()
    alive = torch.linalg.vector_norm(signals, dim=0).nonzero()[:, 0].numpy()
    if len(alive) < atoms:
        raise ConfigError(f"{atoms} atoms need as many non-zero signals, got {len(alive)}")
    # Work in the span of the signals, which is small: 80 signals may have 76,800 features.
    basis, core = torch.linalg.qr(signals) if len(signals) > signals.shape[1] else (None, signals)
    dictionary = unit_columns(core[:, torch.from_numpy(draw.permutation(alive)[:atoms].copy())])
    for _ in range(rounds):
        codes = omp(dictionary, core, sparsity)
        _update_atoms(dictionary, codes, core)
    return dictionary if basis is None else basis @ dictionary


def _update_atoms(dictionary: Tensor, codes: Tensor, signals: Tensor) -> None:
    residual = signals - dictionary @ codes
    for atom in range(dictionary.shape[1]):
        users = codes[atom].nonzero()[:, 0]
        if not len(users):
            worst = residual.norm(dim=0).argmax()
            if float(residual[:, worst].norm()) > 0:
                dictionary[:, atom] = signals[:, worst] / signals[:, worst].norm()
            continue
        left = residual[:, users] + dictionary[:, atom, None] * codes[atom, users]
        u, s, vh = torch.linalg.svd(left, full_matrices=False)
        dictionary[:, atom], codes[atom, users] = u[:, 0], s[0] * vh[0]
        residual[:, users] = left - dictionary[:, atom, None] * codes[atom, users]
