from __future__ import annotations

import numpy as np
import pytest
import torch

from parsifl.core.errors import ConfigError
from parsifl.linear.sparsity import dictionary
from parsifl.linear.sparsity.dictionary import RandomDictionary, ksvd, omp


def test_a_seed_stands_for_the_atoms() -> None:
    first, again = (RandomDictionary("gaussian", 6, 10, seed=4).draw() for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, RandomDictionary("gaussian", 6, 10, seed=5).draw())
    torch.testing.assert_close(first.norm(dim=0), torch.ones(10).double())


def test_orthonormal_atoms() -> None:
    atoms = dictionary.orthonormal(6, 4, seed=1)
    torch.testing.assert_close(atoms.mT @ atoms, torch.eye(4).double())
    with pytest.raises(ConfigError, match="cannot be orthonormal"):
        dictionary.orthonormal(3, 4)


def test_projection_onto_chosen_atoms_is_least_squares() -> None:
    atoms = dictionary.gaussian(8, 5, seed=0)
    a = torch.from_numpy(np.random.default_rng(0).standard_normal(5))
    chosen = torch.tensor([True, False, True, True, False])
    found = dictionary.project(atoms.mT @ atoms, a, chosen)
    matrix = atoms[:, chosen].numpy()
    expected = np.linalg.lstsq(matrix, (atoms @ a).numpy(), rcond=None)[0]
    np.testing.assert_allclose(found[chosen], expected, atol=1e-12)
    assert not found[~chosen].any()
    batch = dictionary.project(atoms.mT @ atoms, torch.stack([a, 2 * a]), chosen.expand(2, 5))
    torch.testing.assert_close(batch, torch.stack([found, 2 * found]))


def test_a_zero_atom_is_refused() -> None:
    with pytest.raises(ConfigError, match="atom that is zero"):
        dictionary.unit_columns(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))


def test_omp_finds_a_sparse_code() -> None:
    atoms = dictionary.gaussian(20, 30, seed=3)
    code = torch.zeros(30, 1).double()
    code[[4, 17]] = torch.tensor([[2.0], [-1.0]]).double()
    torch.testing.assert_close(omp(atoms, atoms @ code, 2), code)


def test_ksvd_recovers_the_atoms_that_made_the_signals() -> None:
    atoms = dictionary.gaussian(20, 8, seed=2)
    draw = np.random.default_rng(1)
    codes = np.zeros((8, 300))
    for column in range(300):
        chosen = draw.choice(8, 2, replace=False)
        codes[chosen, column] = draw.choice([-1, 1], 2) * (1 + draw.random(2))
    signals = atoms @ torch.from_numpy(codes)
    starts = [ksvd(signals, 8, 2, rounds=20, seed=seed) for seed in range(3)]
    learned = min(starts, key=lambda d: float((signals - d @ omp(d, signals, 2)).norm()))
    overlap = (atoms.mT @ learned).abs().amax(1)
    assert float(overlap.min()) > 0.999  # up to order and sign


def test_ksvd_error_falls_with_rounds_in_many_dimensions() -> None:
    signals = torch.from_numpy(np.random.default_rng(1).standard_normal((300, 25)))
    errors = []
    for rounds in (0, 3, 8):
        atoms = ksvd(signals, 10, 3, rounds=rounds)
        torch.testing.assert_close(atoms.norm(dim=0), torch.ones(10).double())
        errors.append(float((signals - atoms @ omp(atoms, signals, 3)).norm()))
    assert errors[0] > errors[1] > errors[2]


def test_ksvd_refuses_too_few_signals() -> None:
    with pytest.raises(ConfigError, match="as many non-zero signals"):
        ksvd(torch.zeros(4, 5), 3, 1)


def test_pursuit_through_the_gram_is_omp_on_the_signal() -> None:
    atoms = dictionary.gaussian(8, 12, seed=3)
    a = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 12)))
    found = dictionary.pursue(atoms.mT @ atoms, a, 3)
    expected = omp(atoms, atoms @ a.mT, 3).mT
    torch.testing.assert_close(found, expected)


def test_pursuit_keeps_the_largest_of_orthonormal_atoms_and_what_is_always_kept() -> None:
    a = torch.tensor([0.5, -3.0, 2.0, 1.0]).double()
    assert dictionary.pursue(torch.eye(4).double(), a, 2).tolist() == [0.0, -3.0, 2.0, 0.0]
    kept = dictionary.pursue(torch.eye(4).double(), a, 1, always=(0,))
    assert kept.tolist() == [0.5, -3.0, 0.0, 0.0]


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-8, 1e-7])
@pytest.mark.parametrize("length", [1.0, 1e-6])
def test_atoms_that_are_nearly_equal_are_projected_stably(gap: float, length: float) -> None:
    atoms = dictionary.gaussian(8, 5, seed=0)
    atoms[:, 1] = dictionary.unit_columns(atoms[:, :1] + gap * atoms[:, 2:3])[:, 0]
    atoms = atoms * length
    a = torch.from_numpy(np.random.default_rng(2).standard_normal(5))
    chosen = torch.tensor([True, True, False, True, False])
    found = dictionary.project(atoms.mT @ atoms, a, chosen)
    # what is not chosen is orthogonal to the rest up to the gap: project on one of the twins
    basis = torch.linalg.qr(atoms[:, [0, 3]])[0]
    expected = basis @ (basis.mT @ (atoms @ a))
    assert float(found.abs().max()) < 100
    assert (
        float((atoms @ found - expected).norm())
        < 1e-6 * float((atoms @ a).norm()) + 3 * length * gap
    )


def test_pursuit_ignores_an_atom_of_zeros() -> None:
    gram, coefficients = torch.diag(torch.tensor([0.0, 1.0, 1.0])), torch.tensor([0.0, 3.0, 1.0])
    assert torch.equal(dictionary.pursue(gram, coefficients, 2), coefficients)
