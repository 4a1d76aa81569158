from __future__ import annotations

import numpy as np
import pytest
import torch

from parsifl.core.errors import ConfigError, DataError
from parsifl.linear import datafits

CASES = [
    ("squared", torch.tensor([0.3, -1.0]), torch.tensor([1.0, 2.0])),
    ("squared-half", torch.tensor([0.3, -1.0]), torch.tensor([1.0, 2.0])),
    ("logistic", torch.tensor([0.3, -1.0, 2.0]), torch.tensor([1, 0, 1])),
    ("softmax", torch.tensor([[0.3, -1.0, 2.0], [0.0, 1.0, -1.0]]), torch.tensor([2, 0])),
]


@pytest.mark.parametrize(("name", "u", "y"), CASES)
def test_slopes_and_curvatures_are_derivatives(name: str, u: torch.Tensor, y: torch.Tensor) -> None:
    fit, u = datafits.DATAFITS.find(name), u.double()
    slope = torch.func.grad(lambda v: fit.loss(v, y).sum())(u)
    torch.testing.assert_close(fit.slope(u, y), slope)
    full = fit.curvature(u)
    for way in torch.eye(u[0].numel()).double().reshape(-1, *u.shape[1:]):
        change = (fit.slope(u + 1e-5 * way, y) - fit.slope(u - 1e-5 * way, y)) / 2e-5
        expected = full * way if u.ndim == 1 else full @ way
        torch.testing.assert_close(change, expected, atol=1e-8, rtol=0)
    size = full.abs() if full.ndim == 1 else torch.linalg.matrix_norm(full, 2)
    assert float(size.max()) <= fit.smoothness + 1e-12


@pytest.mark.parametrize("name", ["squared", "squared-half", "logistic", "softmax"])
def test_majorizers_touch_the_loss_and_are_nowhere_below_it(name: str) -> None:
    fit, draw = datafits.DATAFITS.find(name), np.random.default_rng(0)
    assert fit.majorizer is not None
    for size in (0.0, 1e-3, 0.1, 1.0, 5.0, 40.0):
        shape = (400, 4) if name == "softmax" else (400,)
        u = torch.from_numpy(size * draw.standard_normal(shape))
        way = torch.from_numpy(draw.standard_normal(shape))
        way = way * 10 ** torch.from_numpy(draw.uniform(-2, 2, (400,) + (1,) * (u.ndim - 1)))
        y = torch.from_numpy(draw.integers(0, 4 if name == "softmax" else 2, 400))
        inner = fit.majorizer(u)
        along = fit.slope(u, y) * way + way * (inner * way if u.ndim == 1 else 0) / 2
        if u.ndim == 2:
            along = (along + way * (inner @ way[..., None])[..., 0] / 2).sum(-1)
        above = fit.loss(u, y) + along - fit.loss(u + way, y)
        assert float((above / (1 + fit.loss(u + way, y).abs())).min()) > -1e-12
        full = fit.curvature(u)
        least = (inner - full).min() if u.ndim == 1 else torch.linalg.eigvalsh(inner - full).min()
        assert float(least) > -1e-12


def test_losses_have_their_closed_forms() -> None:
    u, y = torch.tensor([2.0]).double(), torch.tensor([0.5]).double()
    assert float(datafits.SQUARED.loss(u, y)) == 2.25
    assert float(datafits.SQUARED_HALF.loss(u, y)) == 1.125
    expected = np.log1p(np.exp(-2.0))
    assert float(datafits.LOGISTIC.loss(u, torch.tensor([1]))) == pytest.approx(expected, rel=1e-15)


def test_the_logistic_sign_is_the_right_one() -> None:
    sure = torch.tensor([8.0, -8.0])
    assert float(datafits.LOGISTIC.loss(sure, torch.tensor([1, 0])).max()) < 1e-3
    assert float(datafits.LOGISTIC.loss(sure, torch.tensor([0, 1])).min()) > 7


def test_labels_may_be_0_and_1_or_signs() -> None:
    u = torch.tensor([0.4, -0.2])
    plain = datafits.LOGISTIC.loss(u, torch.tensor([0, 1]))
    assert torch.equal(plain, datafits.LOGISTIC.loss(u, torch.tensor([-1, 1])))


def test_large_predictors_do_not_overflow() -> None:
    far = torch.tensor([800.0, -800.0]).double()
    assert torch.isfinite(datafits.LOGISTIC.loss(far, torch.tensor([0, 1]))).all()
    assert torch.isfinite(datafits.LOGISTIC.slope(far, torch.tensor([0, 1]))).all()


def test_an_unknown_datafit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'logistic'"):
        datafits.DATAFITS.find("logistics")


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("logistic", [0.3, 1.7, -2.0], "labels 0 and 1, or -1 and"),
        ("logistic", [-1.0, 0.0, 1.0], "3 distinct targets"),
        ("logistic", [1, 2, 1], "labels 0 and 1"),
        ("softmax", [0, 1, 3], r"labels 0 \.\. 2"),
        ("softmax", [0.5, 1.0, 2.0], r"labels 0 \.\. 2"),
        ("softmax", [-1, 0, 1], r"labels 0 \.\. 2"),
        ("squared", [0.0, float("nan"), 1.0], "NaN or infinite"),
        ("squared-half", [[0.0], [1.0], [2.0]], "one target per row"),
    ],
)
def test_targets_that_a_loss_cannot_read_are_refused(
    name: str, targets: list[float], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        datafits.check_targets(datafits.DATAFITS.find(name), torch.tensor(targets), 3)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("logistic", [0, 1, 1]),
        ("logistic", [-1.0, 1.0]),
        ("logistic", [1.0, 1.0]),  # one class only in a client is fine
        ("logistic", [True, False]),
        ("softmax", [0.0, 2.0]),
        ("squared", [0.3, -7.0]),
    ],
)
def test_targets_that_a_loss_can_read_pass(name: str, targets: list[float]) -> None:
    datafits.check_targets(datafits.DATAFITS.find(name), torch.tensor(targets), 3)
