"""Settings of algorithms whose model is sparse."""

from __future__ import annotations

from dataclasses import dataclass

from parsifl.core.config import Count, Fraction
from parsifl.linear.sparsity.constraint import Groups, Scope, Sparsity


@dataclass(frozen=True)
class SparsitySettings:
    """Settings of a sparsity constraint (see `Sparsity`).

    Parameters
    ----------
    tau
        The number of nonzero coefficients. Coefficients that the problem does not penalize, such
        as an intercept, are kept in addition.
    density
        The fraction of nonzero coefficients; replaces `tau` if given.
    scope
        Where the largest coefficients are selected: over "all" parameters, per "layer" (parameter
        tensor), or per "row" of it (for softmax: per class).
    spare_vectors
        Keep parameters with fewer than two axes (biases, norms) dense.
    groups
        Group sparsity: the length of contiguous groups, or the group number of each coefficient
        of a row. `tau` then counts groups, which are compared by their Euclidean norms.
    """

    tau: Count = 10
    density: Fraction | None = None
    scope: Scope = "all"
    spare_vectors: bool = False
    groups: Groups | None = None

    @property
    def sparsity(self) -> Sparsity:
        """The constraint that these settings describe."""
        return Sparsity(self.tau, self.density, self.scope, self.spare_vectors, self.groups)
