"""Generalised linear models: a datafit times a design matrix, dense or CSR."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from parsifl.core.batching import Batch, Batches, Rows
from parsifl.core.errors import CapabilityError, ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.problem import (
    FEW,
    CurvatureSums,
    ExecutionHints,
    Params,
    Restricted,
    Selection,
    check_metrics,
    try_predict,
    unreadable,
)
from parsifl.linear import datafits, design
from parsifl.linear.design import Compacted, CsrDesign, compacted
from parsifl.linear.predictor import Predictor
from parsifl.linear.sparsity import coordinates
from parsifl.linear.sums import best_intercept, glm_sums

NAME = "coef"
_FEW_POSITIONS = 10
_HINTS = ExecutionHints(block_size=64, single_threaded=True)


@final
class GLM:
    r"""A linear predictor with a convex loss; coefficients start at zero, or at `start`.

    .. math:: f_i(x) = \frac{1}{n_i} \sum_j \ell(z_j^\top x, y_j) + \frac{\lambda}{2} \|x\|_2^2

    The only parameter is "coef", of shape [d], or [classes, d] for softmax. It is float64 by
    default.

    Parameters
    ----------
    features
        The number of columns of the design matrix.
    datafit
        "squared" (Fed-HT's scaling, no 1/2), "squared-half" (FedGradMP's), "logistic" (labels 0
        and 1, or -1 and +1), "softmax" (labels 0 .. classes - 1) or "poisson" (counts).
    classes
        The number of classes of softmax.
    l2
        The strength lambda; an intercept is not penalised.
    intercept
        Adds a last coefficient that multiplies 1.
    keep
        Coefficients that no algorithm may set to zero (an intercept is always one of them).
    dictionary
        Atoms as columns [features, d]: the coefficients then belong to the atoms, x = Psi a. `l2`
        penalizes a, and therefore depends on the lengths of the atoms. Matching pursuit solves in
        atoms of unit length, so that without l2 the lengths do not matter.
    weighted
        The target has a second column, the weight of the row (1 on average over all clients).
    offset
        The target has one more column, which is added to the predictor (the log of an exposure).
        Only lossless fits use it.
    start
        The starting point x_0, of the shape of "coef"; None: zeros. Sparse algorithms threshold it.

    Examples
    --------
    >>> GLM(3, "softmax", classes=2).init(Key(0))["coef"].shape
    torch.Size([2, 3])
    """

    def __init__(  # noqa: PLR0913 - every argument but one has a default
        self,
        features: int,
        datafit: str = "squared",
        *,
        classes: int | None = None,
        l2: float = 0.0,
        intercept: bool = False,
        keep: Sequence[int] = (),
        dictionary: Tensor | NDArray[Any] | None = None,
        weighted: bool = False,
        offset: bool = False,
        start: Tensor | NDArray[Any] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.offset = offset
        self.datafit = datafits.DATAFITS.find(datafit)
        atoms = None if dictionary is None else torch.as_tensor(dictionary)
        self._check(features, classes, l2, atoms)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be torch.float64 or torch.float32, got {dtype!r:.80}")
        self.features, self.classes, self.l2 = features, classes, float(l2)
        self.intercept, self.weighted, self.dtype = intercept, weighted, dtype
        self._psi = None if atoms is None else atoms.to(dtype)
        self._predictor = Predictor(features, intercept, self._psi)
        self._keep = _checked_keep(keep, self.width - intercept)
        self._start = None if start is None else self._checked_start(torch.as_tensor(start))

    def _checked_start(self, start: Tensor) -> Tensor:
        if tuple(start.shape) != self._shape or not bool(torch.isfinite(start).all()):
            shown = f"shape {list(start.shape)}"
            if tuple(start.shape) == self._shape:
                shown = "NaN or infinite entries"
            raise ConfigError(
                f"start must hold finite numbers of shape {list(self._shape)}, got {shown}"
            )
        return start.detach().to(self.dtype, copy=True)

    def _check(self, features: Any, classes: Any, l2: Any, dictionary: Tensor | None) -> None:
        if not _is_count(features):
            raise ConfigError(f"features must be a number of at least 1, got {features!r:.80}")
        number = isinstance(l2, Real) and not isinstance(l2, bool)
        if not number or not 0 <= l2 < float("inf"):
            raise ConfigError(f"l2 must be finite and at least 0, got {l2!r:.80}")
        if self.datafit.name == "softmax" and not (_is_count(classes) and classes > 1):
            raise ConfigError(f"softmax needs classes= of at least 2, got {classes!r:.80}")
        if self.datafit.name != "softmax" and classes not in (None, 2):
            raise ConfigError(f"{self.datafit.name} has two classes, got {classes}; use softmax")
        if dictionary is None:
            return
        if dictionary.ndim != 2 or len(dictionary) != features or not dictionary.shape[1]:
            raise ConfigError(
                f"the dictionary has shape {list(dictionary.shape)}, but there are {features} "
                "features: it needs as many rows, and a column per atom"
            )
        if dictionary.is_complex() or not bool(torch.isfinite(dictionary).all()):
            raise ConfigError("the dictionary must hold real, finite numbers")

    def __repr__(self) -> str:
        """Return every setting; long ones by a checksum, because run directories compare this."""
        atoms = None if self._psi is None else (tuple(self._psi.shape), float(self._psi.sum()))
        start = "" if self._start is None else f"start={float(self._start.norm())!r}, "
        return (
            f"GLM({self.features}, {self.datafit.name!r}, classes={self.classes}, l2={self.l2}, "
            f"intercept={self.intercept}, keep={_brief(self._keep)}, dictionary={atoms}, "
            f"weighted={self.weighted}, offset={self.offset}, {start}dtype={self.dtype})"
        )

    def with_l2(self, l2: float) -> GLM:
        """Return the same problem with another l2 strength."""
        return GLM(
            self.features,
            self.datafit.name,
            classes=self.classes,
            l2=l2,
            intercept=self.intercept,
            keep=self._keep,
            dictionary=self._psi,
            weighted=self.weighted,
            offset=self.offset,
            start=self._start,
            dtype=self.dtype,
        )

    @property
    def name(self) -> str:
        """The name of the coefficient tensor."""
        return NAME

    @property
    def width(self) -> int:
        """The number of coefficients (of each class)."""
        return self._predictor.width

    @property
    def dictionary(self) -> Tensor | None:
        """The atoms as columns; None for plain coordinates."""
        return self._psi

    @cached_property
    def gram(self) -> Tensor | None:
        """The inner products of the atoms; an intercept counts as an atom."""
        if self._psi is None:
            return None
        inner = torch.eye(self.width, dtype=self.dtype)
        atoms = self._psi.shape[1]
        inner[:atoms, :atoms] = self._psi.mT @ self._psi
        return inner

    @cached_property
    def _lengths(self) -> Tensor | None:
        """The lengths of the atoms, 1 for an intercept or a zero atom; None for coordinates."""
        if self._psi is None:
            return None
        sizes = torch.linalg.vector_norm(self._psi, dim=0)
        return functional.pad(torch.where(sizes > 0, sizes, 1.0), (0, self.intercept), value=1.0)

    @cached_property
    def _unit(self) -> Predictor:
        """The predictor of atoms of unit length."""
        if self._psi is None or self._lengths is None:
            return self._predictor
        atoms = self._psi / self._lengths[: self._psi.shape[1]]
        return replace(self._predictor, dictionary=atoms)

    @cached_property
    def _stretch(self) -> float:
        atoms = self._unit.dictionary
        if atoms is None:
            return 1.0
        return max(1.0, float(torch.linalg.matrix_norm(atoms, 2)))

    @property
    def primary_metric(self) -> str:
        """The metric that is reported first."""
        if self.datafit.deviance is not None:
            return "deviance"
        return "accuracy" if self.datafit.classes else "mse"

    @property
    def higher_is_better(self) -> bool:
        """True for accuracy, False for the squared error and the deviance."""
        return self.datafit.classes

    @property
    def supports_vmap(self) -> bool:
        """True: dense designs run many clients at once. CSR designs run in the loop."""
        return True

    @property
    def uses_batch_statistics(self) -> bool:
        """False: a prediction depends only on its own row."""
        return False

    @property
    def execution(self) -> ExecutionHints:
        """Large blocks on one thread: a linear model is limited by calls, not by the cache."""
        # A second thread gains a few percent, and costs a factor of ten where it has to wait for a
        # busy core (docs/adr/0004).
        return _HINTS

    @property
    def flatten_inputs(self) -> bool:
        """A row is a vector of features."""
        return True

    def check_data(self, params: Params, x: Any, y: Tensor) -> None:
        """Raise DataError for rows or targets that the model cannot read."""
        output = try_predict(self, params, x[:FEW])
        if isinstance(output, Exception):
            raise unreadable(x, output, f"it has {self.features} features") from output
        check_metrics(self, params, x, y, output)

    @cached_property
    def unpenalized(self) -> Mapping[str, tuple[int, ...]]:
        """The coefficients that are exempt from sparsity."""
        last = (self.width - 1,) if self.intercept else ()
        return {NAME: (*self._keep, *last)}

    @cached_property
    def _ridge(self) -> Tensor:
        strength = torch.full((self.width,), self.l2, dtype=self.dtype)
        if self.intercept:
            strength[-1] = 0.0
        return strength

    @property
    def ridge(self) -> Tensor:
        """The l2 strength of each coefficient; an intercept has none."""
        return self._ridge

    @property
    def quadratic(self) -> bool:
        """Whether the curvature is the same at all coefficients."""
        return self.datafit.quadratic

    @property
    def has_majorizer(self) -> bool:
        """Whether quadratics bound the loss from above: not for "poisson"."""
        return self.datafit.majorizer is not None

    def init(self, key: Key) -> Params:  # noqa: ARG002 - the same for every seed
        """Return the starting point."""
        if self._start is not None:
            return {NAME: self._start.clone()}
        return {NAME: torch.zeros(self._shape, dtype=self.dtype)}

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.width,) if self._single else (self.classes or 0, self.width)

    @property
    def _single(self) -> bool:
        return self.datafit.name != "softmax"

    def predict(self, params: Params, x: Any) -> Tensor:
        """Return the linear predictor of each row: the value, the log-odds, or the logits."""
        return self._predictor.apply(x, params[NAME])

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Return the weighted mean loss of a batch plus the l2 term."""
        y, importance = self._targets(batch.y)
        losses = self.datafit.loss(self.predict(params, batch.x), y)
        fit = (losses * importance * batch.weight).sum() / batch.weight.sum().clamp(min=1)
        return fit + (self._ridge * params[NAME].square()).sum() / 2 if self.l2 else fit

    def _targets(self, y: Tensor) -> tuple[Tensor, Tensor | float]:
        return (y[..., 0], y[..., 1]) if self.weighted else (y, 1.0)

    def check_targets(self, y: Tensor) -> None:
        """Reject targets of the wrong form before training."""
        if not self.weighted:
            return datafits.check_targets(self.datafit, y, self.classes)
        if y.ndim != 2 or y.shape[1] != 2 + self.offset:
            more = ", and an offset" if self.offset else ""
            raise DataError(
                f"each row needs a target and a weight{more}, got shape {list(y.shape)}"
            )
        if not bool((torch.isfinite(y[:, 1]) & (y[:, 1] >= 0)).all()):
            raise DataError("a row has a weight that is negative or not finite")
        return datafits.check_targets(self.datafit, y[:, 0], self.classes)

    def scored(self, params: Params, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the linear predictor with its offset, and the target without the weight."""
        u = self.predict(params, rows.x)
        u = u + rows.y[..., -1].to(u.dtype) if self.offset else u
        return u, self._targets(rows.y)[0]

    def metrics(self, params: Params, rows: Rows) -> dict[str, Tensor]:
        """Return the scores of each row, without its weight.

        These are squared errors; accuracy and loss of classes; or loss, deviance and squared
        errors of the mean for counts. With l2 the `objective` is recorded too: the loss times the
        weight of the row, plus the l2 term. Its mean over the training rows is minimized
        (`Evaluation(train=True)`).
        """
        u, y = self.scored(params, rows)
        _, importance = self._targets(rows.y)
        fit, metrics = self.datafit, dict[str, Tensor]()
        if fit.classes:
            right = (u > 0) == (y > 0) if self._single else u.argmax(-1) == y
            metrics |= {"accuracy": right.to(u.dtype), "loss": fit.loss(u, y)}
        elif fit.deviance is not None:
            y = y.to(u.dtype)
            metrics |= {"loss": fit.loss(u, y), "deviance": fit.deviance(u, y)}
        if not fit.classes:
            metrics["mse"] = ((u if fit.mean is None else fit.mean(u)) - y).square()
        if self.l2:
            penalty = (self._ridge * params[NAME].square()).sum() / 2
            metrics["objective"] = fit.loss(u, y) * importance + penalty
        return metrics

    def curvature_sums(
        self, params: Params, rows: Rows, candidates: Tensor, *, own_intercept: bool = False
    ) -> CurvatureSums:
        """Return loss, gradient and curvature as sums over rows, without the l2 term."""
        if not self._single:
            raise CapabilityError("softmax has a vector for each class, so no such sums exist")
        y, importance = self._targets(rows.y)
        return glm_sums(
            self.datafit,
            rows.x if self._psi is None else design.matvec(rows.x, self._psi.mT),
            y.to(self.dtype),
            (rows.weight * importance).to(self.dtype),
            params[NAME],
            candidates,
            intercept=self.intercept,
            own_intercept=own_intercept and self.intercept,
            offset=rows.y[..., -1].to(self.dtype) if self.offset else None,
        )

    def with_own_intercept(self, params: Params, rows: Rows) -> Params:
        """Return the parameters with the intercept that fits these rows best."""
        if not self.intercept:
            return params
        coefficients = params[NAME]
        y, importance = self._targets(rows.y)
        u = self.predict(params, rows.x) - coefficients[-1]
        u = u + rows.y[..., -1] if self.offset else u
        intercept = best_intercept(self.datafit, u, y.to(u.dtype), rows.weight * importance)
        return {NAME: torch.cat([coefficients[:-1], intercept[None].to(coefficients.dtype)])}

    def compact(self, batches: Batches, coefficients: Tensor) -> GLMSteps | None:
        """Return SGD steps on the columns that CSR batches or the coefficients touch.

        None if there is nothing to gain (a dense design, or a dictionary).
        """
        if not isinstance(batches.x, CsrDesign) or self._psi is not None:
            return None
        used = coefficients[..., : self.features].numpy() != 0
        small = compacted(batches, used if self._single else used.any(0))
        positions = small.columns
        if self.intercept:
            positions = torch.cat([positions, torch.tensor([self.features])])
        ridge = self._ridge[positions] if self.l2 else self._ridge[:0]
        selection = Selection(batches.x, batches.y, batches.index, batches.weight)
        return GLMSteps(self, small, positions, ridge, *self._shares(selection))

    def predictions(self, coefficients: Tensor, data: Selection) -> Tensor:
        """Return the linear predictor u of the selected rows."""
        return self._predictor.chosen(data.x, data.rows, coefficients)

    def gradients(self, coefficients: Tensor, data: Selection, u: Tensor) -> Tensor:
        """Return the gradients of the mean losses over the selected rows, including the l2 term."""
        targets, share = self._shares(data)
        derivative = self.datafit.slope(u, targets)
        derivative = derivative * (share if self._single else share[..., None])
        pulled = self._predictor.pull(data.x, data.rows, derivative.to(self.dtype))
        return pulled + self._ridge * coefficients if self.l2 else pulled

    def _shares(self, data: Selection) -> tuple[Tensor, Tensor]:
        y, importance = self._targets(data.targets)
        return y, (data.share * importance if self.weighted else data.share).to(self.dtype)

    def restrict(
        self,
        coefficients: Tensor,
        data: Selection,
        index: Tensor,
        valid: Tensor,
        u: Tensor | None = None,
    ) -> Restricted:
        """Return the mean losses over the selected rows in the unit atoms at `index`."""
        targets, weight = self._shares(data)
        start, lengths = coefficients.gather(-1, index), None
        ridge = self._ridge[index] if self.l2 else torch.zeros_like(start)
        if self._lengths is not None:
            lengths = self._lengths[index]
            start, ridge = start * lengths, ridge / lengths.square()
        if not bool(valid.all()):
            start *= valid
        columns, positions = self._columns(data, index, valid)
        return Restricted(
            columns=columns,
            targets=targets,
            weight=weight,
            rows=data.count,
            ridge=ridge,
            start=start,
            loss=self.datafit.loss,
            slope=self.datafit.slope,
            curvature=self.datafit.curvature,
            scale=self.datafit.smoothness if self.datafit.quadratic else None,
            u=u,
            places=positions,
            majorizer=self.datafit.majorizer,
            lengths=lengths,
            stretch=self._stretch,
        )

    def _columns(
        self, data: Selection, index: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return `Restricted.columns` and `Restricted.places` of supports."""
        if self._single:
            columns = self._some_columns(data, index)
            if not bool(valid.all()):
                columns.mT.numpy()[~valid.numpy()] = 0.0
            return columns, None
        if index[0].numel() >= self.width:  # together, the classes may use all columns
            return self._all_columns(data), torch.where(valid, index, self.width)
        size, unused = index[0].numel(), torch.where(valid, index, self.width)
        used = torch.zeros(len(index), self.width + 1, dtype=torch.bool)
        used.scatter_(1, unused.flatten(1), value=True)
        shared, _ = coordinates.places(used[:, :-1], size)  # unused positions repeat column 0
        number = (used.cumsum(1) - 1).gather(1, unused.flatten(1)).reshape(index.shape)
        return self._some_columns(data, shared), torch.where(valid, number, size)

    def _some_columns(self, data: Selection, index: Tensor) -> Tensor:
        if self._psi is None:
            return self._predictor.columns(data.x, data.rows, index)
        atoms = self._all_columns(data)
        return atoms.gather(-1, index[:, None].expand(-1, atoms.shape[1], -1))

    def _all_columns(self, data: Selection) -> Tensor:
        return data.once("columns", lambda: self._unit.all_columns(data.x, data.rows))


@dataclass(frozen=True)
class GLMSteps:
    """Gradients of CSR mini-batches in the coefficients at `positions` (see `GLM.compact`)."""

    problem: GLM
    data: Compacted
    positions: Tensor
    ridge: Tensor
    targets: Tensor
    shares: Tensor

    def gradient(self, coefficients: Tensor, step: int) -> Tensor:
        """Return the gradient of the loss of one mini-batch."""
        rows, intercept = self.data.step(step), self.problem.intercept
        u = rows.product(coefficients[..., :-1] if intercept else coefficients)
        u = u + coefficients[..., -1] if intercept else u
        share = self.shares[step]
        derivative = self.problem.datafit.slope(u, self.targets[step])
        derivative = derivative * (share if u.ndim == 1 else share[:, None])
        back = rows.adjoint(derivative)
        if intercept:
            back = torch.cat([back, derivative.sum(0)[..., None]], dim=-1)
        return back + self.ridge * coefficients if self.problem.l2 else back


def _checked_keep(keep: Sequence[int], width: int) -> tuple[int, ...]:
    try:
        positions = sorted({operator.index(position) for position in keep})
    except TypeError:
        raise ConfigError(f"keep must list positions of coefficients, got {keep!r:.80}") from None
    outside = [position for position in positions if not 0 <= position < width]
    if outside:
        raise ConfigError(f"keep names coefficient {outside[0]}, but there are 0 .. {width - 1}")
    return tuple(positions)


def _brief(keep: tuple[int, ...]) -> str:
    if len(keep) <= _FEW_POSITIONS:
        return str(keep)
    return f"<{len(keep)} positions, crc32 {zlib.crc32(str(keep).encode()):08x}>"


def _is_count(value: Any) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(is_integer and value >= 1)
