"""Cox regression, stratified by site: proportional hazards with a baseline for every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import CurvatureSums, Params
from parsifl.linear import design
from parsifl.linear.sums import upper

NAME = "coef"


@final
class Cox:
    """Proportional hazards with Breslow's ties; every client is a stratum.

    Targets have two columns, the time and whether the event was observed (1) or the row was
    censored (0), and a third, the weight of the row, if `weighted`.

    Parameters
    ----------
    features
        The number of columns of the design matrix, which must be dense.
    l2
        The strength of the ridge term.
    keep
        Coefficients that no algorithm may set to zero.
    weighted
        Whether the target has a third column, the weight of the row.

    Examples
    --------
    >>> Cox(3).init(Key(0))["coef"].shape
    torch.Size([3])
    """

    intercept = False
    quadratic = False
    primary_metric = "loss"
    higher_is_better = False
    supports_vmap = False
    uses_batch_statistics = True
    weight_column = 2
    """The column of the targets that holds weights, if there are any."""

    def __init__(
        self,
        features: int,
        *,
        l2: float = 0.0,
        keep: Sequence[int] = (),
        weighted: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if features < 1:
            raise ConfigError(f"features must be a number of at least 1, got {features!r}")
        if not 0 <= l2 < float("inf"):
            raise ConfigError(f"l2 must be finite and at least 0, got {l2!r}")
        self.features, self.l2, self.weighted, self.dtype = features, float(l2), weighted, dtype
        self._keep = tuple(sorted({int(position) for position in keep}))

    def __repr__(self) -> str:
        """Identify the problem."""
        return (
            f"Cox({self.features}, l2={self.l2}, keep={self._keep}, weighted={self.weighted}, "
            f"dtype={self.dtype})"
        )

    @property
    def name(self) -> str:
        """The name of the coefficient vector."""
        return NAME

    @property
    def width(self) -> int:
        """The number of coefficients."""
        return self.features

    @cached_property
    def unpenalized(self) -> Mapping[str, tuple[int, ...]]:
        """The coefficients that are exempt from sparsity."""
        return {NAME: self._keep}

    @cached_property
    def ridge(self) -> Tensor:
        """The l2 strength of each coefficient."""
        return torch.full((self.features,), self.l2, dtype=self.dtype)

    def init(self, key: Key) -> Params:  # noqa: ARG002 - the same for every seed
        """Return zeros."""
        return {NAME: torch.zeros(self.features, dtype=self.dtype)}

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the log of each row's hazard ratio."""
        return design.matvec(x, params[NAME])

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the mean negative partial log-likelihood of a batch plus the l2 term."""
        time, event, weight = self._targets(batch.y, batch.weight)
        losses = cox_losses(self.predict(params, batch.x), time, event, weight)
        fit = (weight * losses).sum() / batch.weight.sum().clamp(min=1)
        return fit + (self.ridge * params[NAME].square()).sum() / 2

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return each row's part of the negative partial log-likelihood."""
        time, event, weight = self._targets(rows.y, rows.weight)
        return {"loss": cox_losses(self.predict(params, rows.x), time, event, weight)}

    def curvature_sums(
        self, params: Params, rows: Rows, candidates: Tensor, *, own_intercept: bool = False
    ) -> CurvatureSums:
        """Return loss, gradient and curvature of the partial likelihood, without the l2 term.

        There is no intercept: `own_intercept` has no effect.
        """
        del own_intercept
        if not isinstance(rows.x, Tensor):
            raise DataError("Cox regression needs a dense design matrix")
        time, event, weight = self._targets(rows.y, rows.weight)
        return cox_sums(rows.x, time, event, weight, params[NAME], candidates)

    def with_own_intercept(self, params: Params, rows: Rows) -> Params:  # noqa: ARG002 - no intercept
        """Return the parameters unchanged."""
        return params

    def check_targets(self, y: Tensor) -> None:
        """Reject targets of the wrong form."""
        columns = 2 + self.weighted
        if y.ndim != 2 or y.shape[1] != columns or not bool(torch.isfinite(y).all()):
            raise DataError(
                f"Cox regression needs {columns} finite columns of targets (time, event"
                f"{', weight' if self.weighted else ''}), got shape {list(y.shape)}"
            )
        if not bool(((y[:, 1] == 0) | (y[:, 1] == 1)).all()):
            raise DataError("the second column must be 1 where the event was observed, else 0")

    def _targets(self, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time, event = y[..., 0].to(self.dtype), y[..., 1].to(self.dtype)
        return time, event, (weight * y[..., 2] if self.weighted else weight).to(self.dtype)


def cox_sums(
    x: Tensor, time: Tensor, event: Tensor, weight: Tensor, coefficients: Tensor, candidates: Tensor
) -> CurvatureSums:
    """Return the sums of Cox's partial likelihood with Breslow's ties; the site is a stratum.

    The baseline hazard belongs to the site; profiling it out gives the partial likelihood.
    """
    order = torch.argsort(time, descending=True, stable=True)
    x, time, dead = x[order], time[order], (weight * event)[order]
    risk, last, u = _risk(x @ coefficients, time, weight[order])
    total = risk.cumsum(0)[last]
    mean = (risk[:, None] * x).cumsum(0)[last] / total[:, None]
    # the cumulative hazard of each row: over all events whose risk set contains it
    hazard = torch.zeros_like(risk).index_add(0, last, dead / total)
    share = risk * hazard.flip(0).cumsum(0).flip(0)
    columns, means = x[:, candidates], mean[:, candidates]
    curvature = columns.mT @ (columns * share[:, None]) - means.mT @ (means * dead[:, None])
    return CurvatureSums(
        weight.sum(),
        -(dead * (u - torch.log(total))).sum(),
        -(dead @ (x - mean)),
        (share @ x.square() - dead @ mean.square()).clamp(min=0),
        upper(curvature),
    )


def cox_losses(u: Tensor, time: Tensor, event: Tensor, weight: Tensor) -> Tensor:
    """Return each row's part of the negative partial log-likelihood, given the predictor u."""
    order = torch.argsort(time, descending=True, stable=True)
    risk, last, shifted = _risk(u[order], time[order], weight[order])
    losses = event[order] * (torch.log(risk.cumsum(0)[last].clamp(min=1e-300)) - shifted)
    return torch.empty_like(losses).index_copy(0, order, losses)


def _risk(u: Tensor, time: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return risks by falling time, the last row of every tie, and the predictor that was used."""
    shifted = u - u.max()
    place = torch.arange(len(time), device=time.device)
    ends = torch.ones_like(place, dtype=torch.bool)
    ends[:-1] = time[:-1] != time[1:]
    last = torch.where(ends, place, len(time)).flip(0).cummin(0).values.flip(0)
    return weight * torch.exp(shifted), last, shifted
