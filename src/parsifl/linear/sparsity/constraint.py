"""A sparsity constraint, and the projection onto it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from parsifl.core.config import Count, Fraction
from parsifl.core.errors import ConfigError
from parsifl.core.problem import Params, Problem
from parsifl.linear.sparsity.coordinates import largest, marked

Scope = Literal["all", "layer", "row"]
Select = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Sparsity:
    """A limit on the number of non-zero coefficients.

    Parameters
    ----------
    tau, density
        The number of coefficients that are kept, or their fraction (used instead if given). A
        number beyond the dimension keeps all of them.
        Coefficients that the problem always keeps (an intercept) do not count.
    scope
        Where the largest are selected: over "all" parameters, per "layer" (parameter tensor), or
        per "row" of it (for softmax: per class).
    spare_vectors
        Keep parameters with fewer than two axes (biases, norms) dense.
    groups
        Group sparsity: the length of contiguous groups or the group number of each coefficient
        of a row; `tau` then counts groups, compared by their Euclidean norms.
    """

    tau: Count = 10
    density: Fraction | None = None
    scope: Scope = "all"
    spare_vectors: bool = False
    groups: Groups | None = None

    def on_columns(
        self, positions: Tensor, shape: tuple[int, ...], always: tuple[int, ...] = ()
    ) -> Sparsity:
        """Return the same limit for the columns at `places` of a parameter that is zero elsewhere.

        `shape` and `always` are those of the whole parameter.
        """
        if self.density is None and self.groups is None:
            return self
        lead = 1 if self.scope == "row" else math.prod(shape[:-1])
        width = lead * shape[-1]
        if self.groups is None:
            return replace(self, tau=self.count(width - lead * len(always)), density=None)
        number = labels(self.groups, width)
        here = number.reshape(lead, -1)[:, positions].flatten()
        tau = self.count(int(number.max()) + 1)
        return replace(self, tau=tau, density=None, groups=tuple(here.tolist()))

    def count(self, size: int, multiple: int = 1) -> int:
        """Return how many of `size` entries are kept, times `multiple`."""
        number = self.tau if self.density is None else math.ceil(self.density * size)
        return min(number * multiple, size)

    def project(self, problem: Problem, params: Params) -> Params:
        """Return the nearest parameters that are sparse in this sense."""
        names = [n for n, value in params.items() if not (self.spare_vectors and value.ndim < 2)]
        if self.scope == "all" and len(names) > 1:
            masks = self._joint_masks(problem, {name: params[name] for name in names})
        else:
            always = kept_places(problem)
            masks = {name: self.mask(params[name], always.get(name, ())) for name in names}
        return {
            name: torch.where(masks[name], value, 0.0) if name in masks else value
            for name, value in params.items()
        }

    def _joint_masks(self, problem: Problem, params: Params) -> Params:
        if kept_places(problem) or self.groups is not None:
            raise ConfigError("groups and always-kept coefficients need scope='layer' or 'row'")
        flat = torch.cat([value.flatten() for value in params.values()])
        chosen = largest(flat, self.count(flat.shape[0]))
        parts = torch.split(chosen, [value.numel() for value in params.values()])
        pairs = zip(params.items(), parts, strict=True)
        return {name: part.reshape(value.shape) for (name, value), part in pairs}

    def mask(
        self,
        value: Tensor,
        always: tuple[int, ...] = (),
        *,
        lead: int = 0,
        multiple: int = 1,
        select: Select = largest,
    ) -> Tensor:
        """Mark the entries of one parameter that are kept.

        Parameters
        ----------
        always
            Positions along the last axis that are always kept.
        lead
            The number of leading client axes; each client has its own selection.
        multiple
            Mark this multiple of the number of entries that may differ from zero.
        select
            `largest`, or the faster `largest_now` outside vmap.
        """
        rows = value if self.scope == "row" or value.ndim == lead + 1 else value.flatten(lead)
        if not always:
            return self._largest(rows, 0, multiple, select).reshape(value.shape)
        exempted_entries = marked(always, value.shape[-1]).expand(value.shape).reshape(rows.shape)
        exempted = len(always) * (rows.shape[-1] // value.shape[-1])
        chosen = self._largest(torch.where(exempted_entries, 0.0, rows), exempted, multiple, select)
        return (chosen | exempted_entries).reshape(value.shape)

    def _largest(self, rows: Tensor, exempted: int, multiple: int, select: Select) -> Tensor:
        width = rows.shape[-1]
        if self.groups is None:
            return select(rows, self.count(width - exempted, multiple))
        number = labels(self.groups, width).to(rows.device)
        return largest_groups(rows, self.count(int(number.max()) + 1, multiple), number)


def kept_places(problem: Problem) -> Mapping[str, tuple[int, ...]]:
    """Return the coefficients that the problem exempts from sparsity, by parameter."""
    # isinstance(problem, HasUnpenalized) is equivalent but a hundred times slower
    unpenalized: Mapping[str, tuple[int, ...]] = getattr(problem, "unpenalized", {})
    return {name: positions for name, positions in unpenalized.items() if positions}


Groups = int | tuple[int, ...]
"""A block length (the last block may be shorter), or the group number of every coordinate."""


def labels(groups: Groups, width: int) -> Tensor:
    """Return the group number of each coordinate.

    >>> labels(2, 5).tolist()
    [0, 0, 1, 1, 2]
    """
    if isinstance(groups, int):
        if groups < 1:
            raise ConfigError(f"groups must be a length of at least 1, got {groups}")
        return torch.arange(width) // groups
    if len(groups) != width or min(groups) < 0:
        raise ConfigError(
            f"groups must name a group (0, 1 ...) for each of {width} coefficients, "
            f"got {len(groups)} entries"
        )
    return torch.tensor(groups)


def largest_groups(values: Tensor, count: int, label: Tensor) -> Tensor:
    """Mark the coordinates in the `count` groups of largest Euclidean norm.

    >>> largest_groups(torch.tensor([3.0, 3.0, 4.0, 0.0]), 1, labels(2, 4)).tolist()
    [True, True, False, False]
    """
    spread = label.expand(values.shape)
    number = int(label.max()) + 1
    empty = torch.zeros_like(values[..., :1]).expand(*values.shape[:-1], number)
    energy = empty.scatter_add(-1, spread, values.square())
    return largest(energy, count).gather(-1, spread)
