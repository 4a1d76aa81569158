"""The noise in sums: keyed, of a stated width, and never smaller than the ledger assumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.sites.deployment.test_red_team import Attacker

from parsifl.core.batching import ClientRoundData
from parsifl.sites.deployment.guards import Guards
from parsifl.sites.deployment.row_terms import RowTerms, all_rows, keyed_noise
from parsifl.sites.search.fedbestsubset import BestSubsetQuestion, FedBestSubset

WIDTH = 0.03


def test_noise_depends_on_the_secret_and_the_question_only() -> None:
    sizes = np.full(1000, 3.0)
    noise = keyed_noise(b"one", "a", sizes, WIDTH)
    assert noise.tolist() == keyed_noise(b"one", "a", sizes, WIDTH).tolist()
    for other in (keyed_noise(b"two", "a", sizes, WIDTH), keyed_noise(b"one", "b", sizes, WIDTH)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.1
    assert np.abs(noise).max() <= WIDTH * 4 / 2  # 3 is rounded up to a power of two
    assert noise.std() == pytest.approx(WIDTH * 4 / np.sqrt(12), rel=0.05)


@pytest.mark.parametrize("family", ["logistic", "poisson", "cox"])
@pytest.mark.parametrize("far", [False, True])
def test_the_noise_is_at_least_what_the_ledger_assumes(
    family: str, far: bool, tmp_path: Path
) -> None:
    """For a vector t and a column x: its width times the largest |t| times the largest |x|."""
    attacker = Attacker(family, tmp_path)
    at, columns = torch.zeros(attacker.width, dtype=torch.float64), [0, 2]
    at[0] = 2.0 if far else 0.0
    terms = RowTerms.of(attacker.problem, attacker.data, at)
    model = {"coef": at}
    question = BestSubsetQuestion(model, model, torch.tensor(columns))
    rows = ClientRoundData({}, all_rows(attacker.data), torch.tensor(0), 0)
    answer = FedBestSubset(2, gradients=True).client_update(attacker.problem, question, None, rows)
    sums = answer.upload
    assert np.allclose(sums.gradient, terms.design.T @ terms.residuals)
    assert np.allclose(sums.curvature, (terms.design.T @ terms.products[:, columns]).T.ravel())
    draws = [terms.noisy(sums, columns, WIDTH, b"s", str(i)) for i in range(400)]
    largest = np.abs(terms.design).max(0)
    spread = np.std([draw.gradient.numpy() for draw in draws], axis=0)
    floor = WIDTH / np.sqrt(12) * largest * np.abs(terms.residuals).max()
    assert (spread >= 0.9 * floor).all()
    assert (spread <= 2.2 * floor).all()
    spread = np.std([draw.curvature.numpy() for draw in draws], axis=0)
    reach = np.abs(terms.products[:, columns]).max(0)
    floor = WIDTH / np.sqrt(12) * np.outer(reach, largest).ravel()
    assert (spread >= 0.9 * floor).all()
    assert (spread <= 2.2 * floor).all()
    assert len({float(draw.loss) for draw in draws}) == 400
    exact = terms.noisy(sums, columns, 0.0, b"s", "a")
    assert exact.gradient.tolist() == sums.gradient.tolist()


def test_the_diagonal_of_a_flag_is_in_the_block(tmp_path: Path) -> None:
    """Squares of a 0/1 column are a line in it: with the sum of weights, they give X'w."""
    attacker = Attacker("poisson", tmp_path)  # exposures differ, so weights do at the start too
    names = [*attacker.agreement.preprocessing.names, "(intercept)"]
    terms = RowTerms.of(attacker.problem, attacker.data, torch.zeros(len(names)).double())
    flag = next(i for i, name in enumerate(names) if "=" in name)
    low, high = np.unique(terms.design[:, flag])
    weights = terms.products[:, -1]
    diagonal = terms.design[:, flag] @ terms.products[:, flag]
    read = (diagonal + low * high * weights.sum()) / (low + high)
    assert read == pytest.approx(terms.design[:, flag] @ weights)
    block = np.stack(list(terms.block([], names, diagonal=True).values()), axis=1)
    left = weights - block @ np.linalg.lstsq(block, weights, rcond=None)[0]
    assert np.abs(left).max() < 1e-12
    assert list(terms.block([], names, diagonal=False)) == ["residuals"]


def test_a_profile_sets_the_limits_that_the_owner_does_not() -> None:
    assert (Guards().row_limit, Guards().pair_limit) == (0.5, 0.7)
    standard = Guards.of({"guard-profile": "standard"})
    assert (standard.row_limit, standard.pair_limit) == (0.8, 0.9)
    assert Guards(leverage=0.95).pair_limit == 0.95  # a pair contains a row
    assert Guards(pair=0.8).row_limit == 0.5
    assert Guards(cell=2).pair_limit == 1.0  # pairs are not protected
