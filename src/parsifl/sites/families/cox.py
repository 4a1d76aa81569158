"""Cox regression, stratified by site: proportional hazards with a baseline for every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parsifl.core.batching import Batch, Rows
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import CurvatureSums, Params
from parsifl.linear import design
from parsifl.linear.sums import upper

NAME = "coef"
Array = npt.NDArray[np.float64]
Ties = Literal["breslow", "efron"]


@final
class Cox:
    """Proportional hazards; every client is a stratum.

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
    ties
        How events of the same time count: "breslow", or "efron", which is more accurate where
        many events share a time.

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
        ties: Ties = "breslow",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if ties not in ("breslow", "efron"):
            raise ConfigError(f"ties must be 'breslow' or 'efron', got {ties!r}")
        self.ties: Ties = ties
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
            f"ties={self.ties!r}, dtype={self.dtype})"
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
        losses = cox_losses(self.predict(params, batch.x), time, event, weight, self.ties)
        fit = (weight * losses).sum() / batch.weight.sum().clamp(min=1)
        return fit + (self.ridge * params[NAME].square()).sum() / 2

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return each row's part of the negative partial log-likelihood."""
        time, event, weight = self.targets(rows)
        u = self.predict(params, rows.x)
        return {"loss": cox_losses(u, time, event, weight, self.ties)}

    def curvature_sums(
        self, params: Params, rows: Rows, candidates: Tensor, *, own_intercept: bool = False
    ) -> CurvatureSums:
        """Return loss, gradient and curvature of the partial likelihood, without the l2 term.

        There is no intercept: `own_intercept` has no effect.
        """
        del own_intercept
        if not isinstance(rows.x, Tensor):
            raise DataError("Cox regression needs a dense design matrix")
        time, event, weight = self.targets(rows)
        return cox_sums(rows.x, time, event, weight, params[NAME], candidates, self.ties)

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

    def targets(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return times, whether events were observed, and weights."""
        return self._targets(rows.y, rows.weight)

    def _targets(self, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time, event = y[..., 0].to(self.dtype), y[..., 1].to(self.dtype)
        return time, event, (weight * y[..., 2] if self.weighted else weight).to(self.dtype)


def cox_sums(
    x: Tensor,
    time: Tensor,
    event: Tensor,
    weight: Tensor,
    coefficients: Tensor,
    candidates: Tensor,
    ties: Ties = "breslow",
) -> CurvatureSums:
    """Return the sums of Cox's partial likelihood; the site is a stratum.

    The baseline hazard belongs to the site; profiling it out gives the partial likelihood.
    """
    sets = _RiskSets.of(x @ coefficients, time, event, weight, ties)
    x = x[sets.order]
    mean = sets.means(x)
    share = sets.risk * sets.hazards()
    columns, means = x[:, candidates], mean[:, candidates]
    curvature = columns.mT @ (columns * share[:, None]) - means.mT @ (means * sets.dead[:, None])
    return CurvatureSums(
        weight.sum(),
        sets.loss(),
        sets.dead @ mean - sets.events @ x,
        (share @ x.square() - sets.dead @ mean.square()).clamp(min=0),
        upper(curvature),
    )


def cox_terms(
    x: Tensor, time: Tensor, event: Tensor, weight: Tensor, coefficients: Array, ties: Ties
) -> tuple[float, Array, Array, Array]:
    """Return loss, gradient, information, and the sum of the products of the rows' scores.

    The scores are those of Lin and Wei (1989), which account for a row's part in every risk set.
    """
    sets = _RiskSets.of(x @ torch.from_numpy(coefficients), time, event, weight, ties)
    x = x[sets.order]
    mean = sets.means(x)
    share = sets.risk * sets.hazards()
    scores = share[:, None] * x - sets.risk[:, None] * sets.hazards(mean)
    scores = scores - sets.events[:, None] * (x - sets.over_ties(mean))
    information = x.mT @ (x * share[:, None]) - mean.mT @ (mean * sets.dead[:, None])
    gradient = scores.sum(0).numpy()
    return float(sets.loss()), gradient, information.numpy(), (scores.mT @ scores).numpy()


def cox_losses(
    u: Tensor, time: Tensor, event: Tensor, weight: Tensor, ties: Ties = "breslow"
) -> Tensor:
    """Return each row's part of the negative partial log-likelihood, given the predictor u."""
    sets = _RiskSets.of(u, time, event, weight, ties)
    logs = sets.over_ties(torch.log(sets.total.clamp(min=1e-300))[:, None])[:, 0]
    losses = event[sets.order] * (logs - sets.u)
    return torch.empty_like(losses).index_copy(0, sets.order, losses)


@dataclass(frozen=True, eq=False)
class _RiskSets:
    """Rows by falling time, with the risk set of each event.

    With Efron's ties the j-th of D events of one time (from 0) has a risk set in which these
    events count as 1 - j / D rows each; with Breslow's every event counts fully (`fraction` 0).

    Attributes
    ----------
    order
        The rows by falling time; all other attributes are in this order.
    last
        The last row of every tie.
    u, risk
        The predictor, shifted, and the weighted hazard ratio.
    events, dead
        The weight of each event, and that of its risk set (with Efron's ties their mean).
    fraction
        How much of the events of the same time is not in the risk set of an event.
    total
        The sum of `risk` over the risk set.
    """

    order: Tensor
    last: Tensor
    u: Tensor
    risk: Tensor
    observed: Tensor
    events: Tensor
    dead: Tensor
    fraction: Tensor
    total: Tensor
    efron: bool

    @classmethod
    def of(cls, u: Tensor, time: Tensor, event: Tensor, weight: Tensor, ties: Ties) -> _RiskSets:
        order = torch.argsort(time, descending=True, stable=True)
        time, event, weight = time[order], event[order], weight[order]
        shifted = u[order] - u.max()
        index = torch.arange(len(time), device=time.device)
        ends = torch.ones_like(index, dtype=torch.bool)
        ends[:-1] = time[:-1] != time[1:]
        last = torch.where(ends, index, len(time)).flip(0).cummin(0).values.flip(0)
        risk = weight * torch.exp(shifted)
        events = weight * event
        dead, fraction, total = events, torch.zeros_like(risk), risk.cumsum(0)[last]
        if ties == "efron":
            observed = (events > 0).to(risk.dtype)
            count = _over(last, observed).clamp(min=1)
            before = observed.cumsum(0)[last] - count  # events of later times
            dead = observed * _over(last, events) / count
            fraction = observed * (observed.cumsum(0) - 1 - before) / count
            total = total - fraction * _over(last, observed * risk)
        observed = (events > 0).to(risk.dtype)
        return cls(
            order, last, shifted, risk, observed, events, dead, fraction, total, ties == "efron"
        )

    def loss(self) -> Tensor:
        """Return the negative partial log-likelihood."""
        return self.dead @ torch.log(self.total) - self.events @ self.u

    def means(self, x: Tensor) -> Tensor:
        """Return the mean of the rows in each event's risk set, weighted by their risks."""
        at_risk = self.risk[:, None] * x
        sums = at_risk.cumsum(0)[self.last]
        if self.efron:
            tied = _over(self.last, self.observed[:, None] * at_risk)
            sums = sums - self.fraction[:, None] * tied
        return sums / self.total[:, None]

    def hazards(self, values: Tensor | None = None) -> Tensor:
        """Return the cumulative hazard of each row, over the events whose sets contain it.

        With `values` [events, columns] each event's part is multiplied by its value.
        """
        jumps = self.dead / self.total
        wide = jumps if values is None else jumps[:, None] * values
        at_ends = torch.zeros_like(wide).index_add(0, self.last, wide)
        cumulated = at_ends.flip(0).cumsum(0).flip(0)
        if self.efron:  # events leave some of the sets of their own time
            shape = (slice(None),) + (None,) * (wide.ndim - 1)
            cumulated = cumulated - self.observed[shape] * _over(
                self.last, self.fraction[shape] * wide
            )
        return cumulated

    def over_ties(self, values: Tensor) -> Tensor:
        """Return the mean over the events of each row's time, where risk sets differ."""
        if not self.efron:
            return values
        count = _over(self.last, self.observed).clamp(min=1)[:, None]
        return _over(self.last, self.observed[:, None] * values) / count


def _over(last: Tensor, values: Tensor) -> Tensor:
    """Return the sum over the rows of each row's time."""
    return torch.zeros_like(values).index_add(0, last, values)[last]
