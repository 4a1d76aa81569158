"""The sparsity settings of a method, and the projection that they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parsifl.atoms.coordinates import largest, marked
from parsifl.atoms.groups import Groups, labels, largest_groups
from parsifl.config import Count, Fraction
from parsifl.errors import ConfigError
from parsifl.problem import Params, Problem, Selective

Scope = Literal["all", "layer", "row"]


@dataclass(frozen=True)
class Sparsity:
    """How many coefficients may differ from zero.

    Parameters
    ----------
    tau, density
        The number of coefficients that are kept, or their fraction (used instead if given).
        Coefficients that the problem always keeps (an intercept) come on top.
    scope
        Over what the largest are taken: "all" parameters at once, each "layer" (parameter
        tensor), or each "row" of it (for softmax: each class).
    spare_vectors
        Leaves parameters with fewer than two axes (biases, norms) dense.
    groups
        Group sparsity: the length of contiguous groups or the group number of each coefficient
        of a row; `tau` then counts groups, each judged by its Euclidean norm.
    """

    tau: Count = 10
    density: Fraction | None = None
    scope: Scope = "all"
    spare_vectors: bool = False
    groups: Groups | None = None

    def count(self, size: int, multiple: int = 1) -> int:
        """Return how many of `size` entries are kept, or so many times as many."""
        number = self.tau if self.density is None else math.ceil(self.density * size)
        return min(number * multiple, size)

    def project(self, problem: Problem, params: Params) -> Params:
        """Return the nearest parameters that are sparse in this sense."""
        masks = self.masks(problem, params)
        return {
            name: torch.where(masks[name], value, 0.0) if name in masks else value
            for name, value in params.items()
        }

    def masks(self, problem: Problem, params: Params, multiple: int = 1) -> Params:
        """Return which entries are kept, for every parameter that is thresholded at all.

        `multiple` marks so many times the number of entries that may differ from zero.
        """
        thresholded = {
            name: value
            for name, value in params.items()
            if not (self.spare_vectors and value.ndim < 2)
        }
        kept = exempt(problem, thresholded)
        if self.scope != "all" or len(thresholded) == 1:
            return {
                name: self._mask(value, kept.get(name), multiple)
                for name, value in thresholded.items()
            }
        if kept or self.groups is not None:
            raise ConfigError("groups and always-kept coefficients need scope='layer' or 'row'")
        flat = torch.cat([value.flatten() for value in thresholded.values()])
        chosen = largest(flat, self.count(flat.shape[0], multiple))
        parts = torch.split(chosen, [value.numel() for value in thresholded.values()])
        pairs = zip(thresholded.items(), parts, strict=True)
        return {name: part.reshape(value.shape) for (name, value), part in pairs}

    def _mask(self, value: Tensor, kept: Tensor | None, multiple: int) -> Tensor:
        rows = value if self.scope == "row" else value.reshape(-1)
        width = rows.shape[-1]
        free = None if kept is None else kept.expand(value.shape).reshape(rows.shape)
        scored = rows if free is None else torch.where(free, 0.0, rows)
        exempted = 0 if kept is None else int(kept.sum()) * (width // kept.shape[-1])
        if self.groups is not None:
            number = labels(self.groups, width).to(value.device)
            groups = self.count(int(number.max()) + 1, multiple)
            mask = largest_groups(scored, groups, number)
        else:
            mask = largest(scored, self.count(width - exempted, multiple))
        return (mask if free is None else mask | free).reshape(value.shape)

    def places(self, problem: Problem, name: str, shape: tuple[int, ...], multiple: int) -> int:
        """Return the most entries along the last axis that `multiple` supports can mark."""
        width = shape[-1]
        kept = len(problem.kept.get(name, ())) if isinstance(problem, Selective) else 0
        rows = width if self.scope == "row" else math.prod(shape)
        if self.groups is None:
            return min(width, self.count(rows, multiple) + kept)
        sizes = torch.bincount(labels(self.groups, rows)).sort(descending=True).values
        return min(width, int(sizes[: self.count(len(sizes), multiple)].sum()) + kept)


def exempt(problem: Problem, params: Params) -> dict[str, Tensor]:
    """Return a mask over the last axis of each parameter with always-kept coefficients."""
    if not isinstance(problem, Selective):
        return {}
    return {
        name: marked(places, params[name].shape[-1])
        for name, places in problem.kept.items()
        if places and name in params
    }
