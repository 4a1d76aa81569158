"""Checks that values are finite, and small enough that their squares are finite too.

A client's upload is checked before it is added; the new server state is checked before it replaces
the previous one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientUpdate
from parsifl.core.leaves import LowRank, densify
from parsifl.core.problem import Problem

ORDINARY = 1e9
"""Tensors with a smaller norm need no further check; larger ones are traced to their client."""


def has_diverged(fault: str) -> bool:
    """Return whether a client was dropped for values that are not finite or too large."""
    return "not finite" in fault or "too large" in fault


def lower_rate(algorithm: AnyAlgorithm, round: int, fault: str) -> str:
    """Return the advice to lower the learning rate, if a client diverged; else nothing."""
    rate = algorithm.learning_rate(round - 1)
    return f" Lower `lr` (now {rate:g})." if has_diverged(fault) and rate is not None else ""


def divergence(algorithm: AnyAlgorithm, problem: Problem, server: Any, round: int) -> str:
    """Return a sentence if the global model after a round (from 0) holds huge values, else "".

    Without a global model, the server's state stands for it. With one, other parts of the state may
    be large: FedBestSubset keeps sums over rows.
    """
    state = tree.flatten(server, units=(LowRank,))[0]
    if all(map(_is_ordinary, state)):
        return ""
    model = algorithm.model(problem, server)
    what = "the server's state" if model is None else "the global model"
    parts = state if model is None else model.params.values()
    large = [leaf for leaf in map(densify, parts) if not _is_ordinary(leaf)]
    if not large:
        return ""
    size = max(float(leaf.abs().max()) for leaf in large)
    rate = algorithm.learning_rate(round)
    hint = "Check" if rate is None else f"Lower `lr` (now {rate:g}), or check"
    return (
        f"The run diverged: {what} holds values up to {size:.3g}. {hint} the other "
        f"settings of {algorithm.title()}."
    )


class Inspection(NamedTuple):
    """The result of checking a client's values.

    Attributes
    ----------
    fault
        Why the result cannot be used; empty if it can.
    largest
        The largest absolute value of the upload if it is unusually large, else 0.
    """

    fault: str = ""
    largest: float = 0.0


def is_ordinary(leaf: Tensor) -> bool:
    """Return whether a tensor is finite and of ordinary size, in one pass without writes."""
    return not leaf.is_floating_point() or float(torch.linalg.vector_norm(leaf)) < ORDINARY


def _is_ordinary(part: Any) -> bool:
    """Return whether a part of a state is of ordinary size; a product counts, not its factors."""
    if not isinstance(part, LowRank):
        return not isinstance(part, Tensor) or is_ordinary(part)
    norms = [float(torch.linalg.vector_norm(factor)) for factor in (part.left, part.right)]
    return norms[0] * norms[1] < ORDINARY


def is_finite(value: Any) -> bool:
    """Return whether all numbers of a tree are finite."""
    return all(_finite(leaf) for leaf in tree.leaves(value) if isinstance(leaf, Tensor))


def inspect(result: ClientUpdate[Any, Any]) -> Inspection:
    """Check for NaN, infinity, and uploads that are too large to be combined with others."""
    inspected = inspect_upload(result.upload)
    for what, part in (("state", result.state), ("info", result.metrics)):
        if inspected.fault:
            return inspected
        inspected = Inspection(_inspect(what, part, bounded=False).fault, inspected.largest)
    return inspected


def inspect_upload(upload: Any) -> Inspection:
    """Check an upload only."""
    return _inspect("upload", upload, bounded=True)


def limit(dtype: torch.dtype) -> float:
    """Return the largest absolute value that an upload may have.

    Its square is finite, and so is a sum of such values over any realistic number of rows. In
    float16 such a limit would exclude ordinary values, so all finite values are accepted.
    """
    largest = torch.finfo(dtype).max
    return max(math.sqrt(largest), torch.finfo(torch.float16).max)


def _inspect(what: str, part: Any, *, bounded: bool) -> Inspection:
    leaves, structure = tree.flatten(part, units=(LowRank,))
    largest = 0.0
    for position, stored in enumerate(leaves):
        leaf = stored.dense() if isinstance(stored, LowRank) else stored
        if not isinstance(leaf, Tensor) or is_ordinary(leaf):
            continue
        name = f"{what} {tree.names(structure)[position]}"
        if not _finite(leaf):
            return Inspection(f"{name} is not finite", math.inf)
        size = float(leaf.abs().max())
        if bounded and size > limit(leaf.dtype):
            reason = f"{name} is too large: it holds {size:.3g}, and values above "
            return Inspection(f"{reason}{limit(leaf.dtype):.3g} overflow in an aggregate", size)
        largest = max(largest, size)
    return Inspection("", largest)


def _finite(leaf: Tensor) -> bool:
    # a finite sum proves that all terms are finite; only an overflow needs the slow check
    if not leaf.is_floating_point() or math.isfinite(leaf.sum()):
        return True
    return bool(torch.isfinite(leaf).all())
