"""Hypothesis strategies for trees, parameters, messages and client data.

They need hypothesis, which comes with ``pip install parsifl[dev]``. Sizes are small, which
suffices to find most errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from parsifl.core.leaves import LowRank, Sparse
from parsifl.core.problem import Params
from parsifl.data.clients import ClientData

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NAMES = st.text("abcdefgh.01", min_size=1, max_size=4)


@dataclass(frozen=True)
class Pair:
    """A frozen dataclass that may be part of a tree: one tree and one static."""

    value: Any
    label: str | int | float | bool | None


def shapes(max_axes: int = 3, max_side: int = 4, min_side: int = 0) -> st.SearchStrategy[Any]:
    """Draw shapes, including scalars and empty ones."""
    return st.lists(st.integers(min_side, max_side), max_size=max_axes).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    finite: bool = True,
    zeros: bool = True,
) -> Tensor:
    """Draw a strided tensor; one in two is sparse if `zeros`, one in four not contiguous."""
    kind = draw(st.sampled_from([*FLOATS, *INTEGERS, torch.bool])) if dtype is None else dtype
    form = draw(shapes()) if shape is None else shape
    count = math.prod(form)
    values = torch.from_numpy(_numbers(draw, count)).to(kind)
    if kind.is_floating_point and not finite and count and draw(st.booleans()):
        values[draw(st.integers(0, count - 1))] = draw(st.sampled_from([math.nan, math.inf]))
    if zeros and draw(st.booleans()):
        keep = np.random.default_rng(draw(st.integers(0, 2**32))).random(count) < 0.3
        values = torch.where(torch.from_numpy(keep), values, torch.zeros_like(values))
    tensor = values.reshape(form)
    if tensor.ndim == 2 and draw(st.integers(0, 3)) == 0:
        return tensor.t().contiguous().t()
    return tensor


def _numbers(draw: st.DrawFn, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    # one seed shrinks faster than many numbers; within the range of every dtype
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    return generator.integers(-99, 100, count) / draw(st.sampled_from([1.0, 8.0]))


def params(dtype: torch.dtype = torch.float64, max_leaves: int = 4) -> st.SearchStrategy[Params]:
    """Draw parameters: named tensors of one floating-point dtype."""
    return st.dictionaries(_NAMES, tensors(dtype), min_size=1, max_size=max_leaves)


def statics() -> st.SearchStrategy[Any]:
    """Draw static values of a tree: None, bool, int, float, str."""
    return (
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=4)
    )


def trees(
    leaves: st.SearchStrategy[Any] | None = None, max_leaves: int = 6
) -> st.SearchStrategy[Any]:
    """Draw trees: tensors and statics in dicts, tuples and a frozen dataclass."""
    base = (tensors() if leaves is None else leaves) | statics()

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return (
            st.dictionaries(_NAMES, inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.builds(Pair, inner, statics())
        )

    return st.recursive(base, grow, max_leaves=max_leaves)


@st.composite
def sparse(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Sparse:
    """Draw a `Sparse`: ascending positions with their values."""
    shape = draw(shapes(min_side=1))
    size = math.prod(shape)
    index = sorted(draw(st.sets(st.integers(0, size - 1), max_size=min(size, 8))))
    value = draw(tensors(dtype, (len(index),)))
    return Sparse(torch.tensor(index, dtype=torch.int64), value, shape)


@st.composite
def low_rank(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> LowRank:
    """Draw a `LowRank` matrix of rank at most 3."""
    rows, columns, rank = (draw(st.integers(1, 4)) for _ in range(3))
    left, right = draw(tensors(dtype, (rows, rank))), draw(tensors(dtype, (rank, columns)))
    return LowRank(left, right, (rows, columns))


def messages() -> st.SearchStrategy[dict[str, Any]]:
    """Draw messages of the type ``dict[str, Tensor | Sparse | LowRank]``; keys may be absent."""
    return st.dictionaries(_NAMES, tensors() | sparse() | low_rank(), max_size=4)


@st.composite
def client_data(
    draw: st.DrawFn,
    *,
    max_clients: int = 4,
    max_rows: int = 9,
    features: int = 3,
    classes: int = 2,
    dtype: torch.dtype = torch.float64,
) -> ClientData:
    """Draw clients of unequal sizes, each with at least one row to train and one to test on."""
    sizes = draw(st.lists(st.integers(2, max_rows), min_size=1, max_size=max_clients))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    total = sum(sizes)
    rows = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    cuts = [draw(st.integers(1, size - 1)) for size in sizes]
    return ClientData(
        x=torch.from_numpy(generator.normal(size=(total, features))).to(dtype),
        y=torch.from_numpy(generator.integers(0, classes, total)),
        train=[part[:cut] for part, cut in zip(rows, cuts, strict=True)],
        validation=[part[:0] for part in rows],
        test=[part[cut:] for part, cut in zip(rows, cuts, strict=True)],
        profiles=[{}] * len(sizes),
        classes=classes,
    )
