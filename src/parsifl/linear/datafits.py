r"""Losses of a linear predictor, with gradients and curvatures.

With the linear predictor :math:`u = z^\top x`:

=============  ============================================  ==================
squared        :math:`(u - y)^2`, as in Fed-HT               regression
squared-half   :math:`\frac12 (u - y)^2`, as in FedGradMP    regression
logistic       :math:`\log(1 + e^{-s u})`, s = +1 or -1      two classes
softmax        :math:`\log \sum_c e^{u_c} - u_y`             many classes
poisson        :math:`e^u - y u`                             counts
=============  ============================================  ==================

The Fed-HT paper prints the logistic loss with the wrong sign. Beyond u = 50 the Poisson loss is
extended by its tangent, so that it stays finite after too large a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.core.errors import DataError
from parsifl.core.registry import Registry


@dataclass(frozen=True)
class Datafit:
    """A loss of the linear predictor, row by row.

    Attributes
    ----------
    loss, slope, curvature
        The loss, its gradient and its Hessian in the predictor u: of shape [n] for [n]; for
        [n, c] the Hessian is [n, c, c].
    smoothness
        An upper bound of the curvature.
    majorizer
        The curvature, of the form of `curvature`, of a quadratic that touches the loss at u and is
        nowhere below it. None if there is none.
    classes
        Whether targets are labels.
    quadratic
        Whether least squares solves it.
    mean
        The mean of the target in the predictor u; None: u itself.
    deviance
        Twice the loss minus its least value at this target; None: not recorded.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    smoothness: float
    majorizer: Callable[[Tensor], Tensor] | None = None
    classes: bool = False
    quadratic: bool = False
    mean: Callable[[Tensor], Tensor] | None = None
    deviance: Callable[[Tensor, Tensor], Tensor] | None = None


def signs(y: Tensor, like: Tensor) -> Tensor:
    """Return labels 0/1 (or -1/+1) as -1 and +1.

    >>> signs(torch.tensor([0, 1]), torch.zeros(1)).tolist()
    [-1.0, 1.0]
    """
    return 2 * (y > 0).to(like.dtype) - 1


def _logistic_loss(u: Tensor, y: Tensor) -> Tensor:
    # torch's default threshold of 20 would be wrong by 2e-9, which matters in float64
    return functional.softplus(-signs(y, u) * u, threshold=50.0)


def _logistic_slope(u: Tensor, y: Tensor) -> Tensor:
    s = signs(y, u)
    return -s * torch.sigmoid(-s * u)


def _logistic_curvature(u: Tensor) -> Tensor:
    return torch.sigmoid(u) * torch.sigmoid(-u)


def _logistic_majorizer(u: Tensor) -> Tensor:
    """Return tanh(u / 2) / (2 u) (Jaakkola and Jordan): 1/4 at zero, 1 / |2 u| far from it."""
    near = u.abs() < _NEAR
    return torch.where(near, 0.25 - u.square() / 48, torch.tanh(u / 2) / (2 * u))


def _softmax_loss(u: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(u, -1) - u.gather(-1, y[..., None].long())[..., 0]


def _softmax_slope(u: Tensor, y: Tensor) -> Tensor:
    hot = functional.one_hot(y.long(), u.shape[-1])
    return torch.softmax(u, -1) - hot.to(u.dtype)


def _softmax_curvature(u: Tensor) -> Tensor:
    p = torch.softmax(u, -1)
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def _softmax_majorizer(u: Tensor) -> Tensor:
    r"""Return the logistic bounds of one class against all smaller ones, added up.

    For the increment d and the random class k with probabilities softmax(u), the change of the loss
    minus its tangent is the cumulant generating function of d_k. Reveal k in steps: whether it is
    the largest class, else whether it is the next one, and so on. Each step has two outcomes, and
    therefore the logistic bound :math:`\kappa(\ell) (v^\top d)^2 / 2` with the log-odds l of the
    class, and v = e - q for the probabilities q of the smaller classes.
    """
    order = u.argsort(dim=-1, descending=True)
    ordered = u.gather(-1, order)
    rest = ordered.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:]
    smaller = torch.exp(ordered[..., None, :] - rest[..., None]).triu(1)
    steps = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)[:-1] - smaller
    steps = steps.gather(-1, order.argsort(-1)[..., None, :].expand(steps.shape))
    return steps.mT @ (_logistic_majorizer(ordered[..., :-1] - rest)[..., None] * steps)


_NEAR = 1e-2
"""Where the next term of a series in u is below rounding."""
_STEEP = 50.0


def _poisson_mean(u: Tensor) -> Tensor:
    return torch.exp(u.clamp(max=_STEEP))


def _poisson_loss(u: Tensor, y: Tensor) -> Tensor:
    return _poisson_mean(u) * (1 + (u - _STEEP).clamp(min=0)) - y * u


def _poisson_deviance(u: Tensor, y: Tensor) -> Tensor:
    return 2 * (_poisson_loss(u, y) + torch.xlogy(y, y) - y)


SQUARED = Datafit(
    "squared",
    lambda u, y: (u - y).square(),
    lambda u, y: 2 * (u - y),
    lambda u: torch.full_like(u, 2.0),
    2.0,
    lambda u: torch.full_like(u, 2.0),
    quadratic=True,
)
SQUARED_HALF = Datafit(
    "squared-half",
    lambda u, y: (u - y).square() / 2,
    lambda u, y: u - y,
    torch.ones_like,
    1.0,
    torch.ones_like,
    quadratic=True,
)
LOGISTIC = Datafit(
    "logistic",
    _logistic_loss,
    _logistic_slope,
    _logistic_curvature,
    0.25,
    _logistic_majorizer,
    classes=True,
)
SOFTMAX = Datafit(
    "softmax",
    _softmax_loss,
    _softmax_slope,
    _softmax_curvature,
    0.5,
    _softmax_majorizer,
    classes=True,
)
POISSON = Datafit(
    "poisson",
    _poisson_loss,
    lambda u, y: _poisson_mean(u) - y,
    _poisson_mean,
    math.exp(_STEEP),
    mean=_poisson_mean,
    deviance=_poisson_deviance,
)
DATAFITS = Registry(
    "datafit",
    {fit.name: fit for fit in (SQUARED, SQUARED_HALF, LOGISTIC, SOFTMAX, POISSON)},
)


def check_targets(fit: Datafit, y: Tensor, classes: int | None) -> None:
    """Reject targets that the loss cannot read: numbers that are not finite, unknown labels.

    >>> check_targets(LOGISTIC, torch.tensor([0, 1, 1]), None)
    """
    if y.ndim != 1:
        one_hot = fit.classes and y.ndim == 2 and y.shape[1] > 1
        raise DataError(
            f"{fit.name} needs one target per row, got targets of shape {list(y.shape)}"
            + ("; turn one-hot targets into labels: y.argmax(1)" if one_hot else "")
        )
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise DataError("a target is NaN or infinite; remove such rows")
    if fit.name == "poisson" and bool((y < 0).any()):
        raise DataError("poisson needs counts, which must not be negative")
    if not fit.classes:
        return
    labels = torch.unique(y).tolist()
    if fit.name == "logistic":
        allowed = set(labels) <= {0, 1} or set(labels) <= {-1, 1}
        wanted = "labels 0 and 1, or -1 and +1"
    else:
        allowed = all(label == int(label) and 0 <= label < (classes or 0) for label in labels)
        wanted = f"labels 0 .. {(classes or 0) - 1}"
    if not allowed:
        few = ", ".join(f"{label:g}" for label in labels[:5])
        raise DataError(
            f"{fit.name} needs {wanted}, got {len(labels)} distinct targets ({few}"
            f"{' ...' if len(labels) > 5 else ''}); recode them, or use a squared loss for numbers"
        )
