"""The constants of the theory on matrices where they are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.data.clients import ClientData
from parsifl.linear.glm import GLM
from parsifl.sites import diagnose
from parsifl.sites.diagnosis import _stable_rank


def _data(matrices: list[np.ndarray], csr: bool = False) -> ClientData:
    made = [(sp.csr_matrix(z) if csr else z, z[:, 0]) for z in matrices]
    return ClientData.of(made, test=0.0)


@pytest.mark.parametrize("csr", [False, True])
def test_orthogonal_columns_are_ideal(csr: bool) -> None:
    z = np.eye(20) * np.sqrt(20)
    found = diagnose(GLM(20, "squared-half"), _data([z, z], csr), tau=2)
    np.testing.assert_allclose(found.convexity, 1.0)
    np.testing.assert_allclose(found.smoothness, 1.0)
    assert found.kappa == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(found.stable_rank, 20.0)
    assert found.needed_rank == pytest.approx(2 * np.log(10))
    assert "linear convergence is plausible" in found.words


def test_the_theorem_is_silent_where_columns_are_alike() -> None:
    draw = np.random.default_rng(0)
    alike = np.ones((30, 12)) + 0.1 * draw.standard_normal((30, 12))
    ideal = np.linalg.qr(draw.standard_normal((30, 12)))[0] * np.sqrt(30)
    found = diagnose(GLM(12, "squared"), _data([alike, ideal]), tau=2)
    assert found.silent == (0,)
    assert found.kappa is None
    assert "does not apply: 2 rho- <= rho+ on 1 of 2 clients" in found.words
    assert found.stable_rank[0] < 1.1


def test_only_squared_losses_are_diagnosed() -> None:
    with pytest.raises(CapabilityError, match="squared loss"):
        diagnose(GLM(4, "logistic"), _data([np.eye(4)]), tau=1)


def test_pairs_are_diagnosed_like_the_data_made_of_them() -> None:
    draw = np.random.default_rng(1)
    pairs = [(draw.standard_normal((30, 8)), draw.standard_normal(30)) for _ in range(2)]
    found = diagnose(GLM(8, "squared"), pairs, tau=2)
    wanted = diagnose(GLM(8, "squared"), ClientData.of(pairs, test=0.0), tau=2)
    np.testing.assert_array_equal(found.convexity, wanted.convexity)


def test_more_coefficients_than_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="between 1 and 4 features"):
        diagnose(GLM(4, "squared"), _data([np.eye(4)]), tau=5)


@pytest.mark.parametrize("form", [torch.from_numpy, sp.csr_matrix])
def test_no_rows_by_rows_matrix_is_formed(form: Any) -> None:
    x = np.random.default_rng(0).standard_normal((30_000, 5))
    rank = _stable_rank(form(x), np.arange(30_000))  # 7.2 GB, if it were
    values = np.linalg.svd(x, compute_uv=False)
    assert rank == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=1e-8)
