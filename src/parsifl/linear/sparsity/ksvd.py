"""K-SVD: a dictionary learned from signals by sparse coding and rank-one updates."""

from __future__ import annotations

import torch
from torch import Tensor

from parsifl.core.errors import ConfigError
from parsifl.core.keys import Key
from parsifl.linear.sparsity.dictionary import unit_columns


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
        found = torch.zeros_like(codes).scatter(0, chosen.mT, weights.mT)
        # a signal that is represented already takes no more atoms
        going = residual.norm(dim=0) > 1e-12 * scale
        codes = torch.where(going, found, codes)
        residual = signals - dictionary @ codes
    return codes


def ksvd(signals: Tensor, atoms: int, sparsity: int, *, rounds: int = 10, seed: int = 0) -> Tensor:
    """Learn unit atoms [features, atoms] so that few of them make up each signal [features, n].

    It starts from random signals. Each round codes all signals by OMP, then moves every atom,
    with the coefficients that use it, to the best rank-one fit of what the others leave over. An
    atom that is not used becomes the signal that is represented worst. The error never grows from
    one update of an atom to the next.
    """
    if not 1 <= sparsity <= atoms:
        raise ConfigError(f"sparsity must be between 1 and {atoms} atoms, got {sparsity}")
    draw = Key(seed, purpose="dictionary/k-svd").numpy_generator()
    alive = torch.linalg.vector_norm(signals, dim=0).nonzero()[:, 0].numpy()
    if len(alive) < atoms:
        raise ConfigError(f"{atoms} atoms need as many signals that are not zero, got {len(alive)}")
    # In the span of the signals everything is small: features may be 76,800, signals 80.
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
