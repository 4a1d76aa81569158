"""The linear predictor of a GLM, with an optional dictionary and an optional intercept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from parsifl.linear import design
from parsifl.linear.design import Design


@dataclass(frozen=True)
class Predictor:
    """u = z' Psi a + b, in the coefficients (a, b): the intercept b is the last one.

    Attributes
    ----------
    features
        The number of columns of the design.
    intercept
        Whether there is an intercept.
    dictionary
        Psi [features, atoms]; None is the identity.
    """

    features: int
    intercept: bool
    dictionary: Tensor | None

    @property
    def width(self) -> int:
        """The number of coefficients."""
        atoms = self.features if self.dictionary is None else self.dictionary.shape[1]
        return atoms + self.intercept

    def _slopes(self, coefficients: Tensor) -> Tensor:
        """Return the weights of the features."""
        a = coefficients[..., :-1] if self.intercept else coefficients
        return a if self.dictionary is None else a @ self.dictionary.mT

    def apply(self, x: Design, coefficients: Tensor) -> Tensor:
        """Return u for every row, [n] or [n, classes]; differentiable."""
        u = design.matvec(x, self._slopes(coefficients))
        return u + coefficients[..., -1] if self.intercept else u

    def chosen(self, x: Design, rows: Tensor, coefficients: Tensor) -> Tensor:
        """Return u [B, n] or [B, n, c] for rows [B, n] and coefficients [B, d] or [B, c, d]."""
        u = design.products(x, rows, self._slopes(coefficients))
        return u + coefficients[..., -1][:, None] if self.intercept else u

    def pull(self, x: Design, rows: Tensor, values: Tensor) -> Tensor:
        """Return the adjoint of `chosen`, from [B, n] or [B, n, c] to the coefficients."""
        back = design.combine(x, rows, values)
        if self.dictionary is not None:
            back = back @ self.dictionary
        if not self.intercept:
            return back
        return torch.cat([back, values.sum(1)[..., None]], dim=-1)

    def all_columns(self, x: Design, rows: Tensor) -> Tensor:
        """Return du/d(coefficient) for rows [B, n] and all coefficients: [B, n, width]."""
        if self.dictionary is None:
            columns = design.gathered(x, rows)
        else:
            columns = torch.stack([design.matvec(x[chosen], self.dictionary.mT) for chosen in rows])
        return functional.pad(columns, (0, 1), value=1.0) if self.intercept else columns

    def columns(self, x: Design, rows: Tensor, index: Tensor) -> Tensor:
        """Return du/d(coefficient) for rows [B, n]: [B, n, k] for index [B, k]; no dictionary."""
        last = self.width - 1
        if not self.intercept:
            return design.columns(x, rows, index)
        gathered = design.columns(x, rows, index.clamp(max=last - 1))
        return torch.where((index == last)[:, None], torch.ones_like(gathered), gathered)
