"""Tensors as bits, and the lossy precisions.

Zeros are recognized by their bits, so -0.0 is not a zero and is kept. A lossy precision affects
only floating-point tensors, and only if it makes them shorter. Values beyond the range of
bfloat16 or float16 are rejected; int8 is symmetric with one scale per tensor: x = q scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parsifl.core.config import Precision
from parsifl.core.errors import ConfigError, unknown

PRECISIONS: tuple[Precision, ...] = ("exact", "bfloat16", "float16", "int8")
CODES: dict[torch.dtype, str] = {
    torch.float64: "f8", torch.float32: "f4", torch.float16: "f2", torch.bfloat16: "b2",
    torch.int64: "i8", torch.int32: "i4", torch.int16: "i2", torch.int8: "i1",
    torch.uint8: "u1", torch.bool: "?",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}

_LEVELS = 127
_SCALES = {4: torch.float32, 8: torch.float64}
_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def precision_index(precision: str) -> int:
    """Return the number of a precision in the prefix of a message."""
    if precision not in PRECISIONS:
        raise ConfigError(unknown("precision", precision, PRECISIONS))
    return PRECISIONS.index(precision)


def stored(dtype: torch.dtype, entries: int, precision: str) -> torch.dtype:
    """Return the dtype in which a tensor is sent: a narrower one only if that is shorter."""
    if precision == "exact" or not dtype.is_floating_point:
        return dtype
    narrow: torch.dtype = getattr(torch, precision)
    cost = entries * narrow.itemsize + scale_size(dtype, narrow)
    return narrow if cost < entries * dtype.itemsize else dtype


def scale_size(dtype: torch.dtype, narrow: torch.dtype) -> int:
    """Return the bytes of the scale that precedes quantised values."""
    return max(dtype.itemsize, 4) if dtype.is_floating_point and narrow == torch.int8 else 0


def narrowed(values: Tensor, narrow: torch.dtype) -> tuple[Tensor, bytes]:
    """Return finite values in the dtype in which they are sent, and the bytes of their scale.

    Raises
    ------
    ValueError
        If a value is too large for this dtype.
    """
    if narrow == values.dtype:
        return values, b""
    if narrow != torch.int8:
        short = values.to(narrow)
        if not all_finite(short):
            name, largest = str(narrow).removeprefix("torch."), torch.finfo(narrow).max
            raise ValueError(f"a value is beyond {largest:g}, the largest of {name}")
        return short, b""
    wide = values.to(_SCALES[scale_size(values.dtype, narrow)])
    scale = wide.abs().amax() / _LEVELS if wide.numel() else wide.new_zeros(())
    # a scale that underflows to zero makes every value zero
    levels = (
        (wide / scale).round_().clamp_(-_LEVELS, _LEVELS) if scale else wide.new_zeros(wide.shape)
    )
    return levels.to(narrow), to_bits(scale).astype(bits_dtype(scale.dtype)).tobytes()


def widened(values: Tensor, dtype: torch.dtype, scale: bytes) -> Tensor:
    """Undo `narrowed`; the scale must be finite.

    Raises
    ------
    ValueError
        If the scale is negative or not finite.
    """
    if values.dtype == dtype:
        return values
    if not scale:
        return values.to(dtype)
    step = float(np.frombuffer(scale, f"<f{len(scale)}")[0])  # exact in float64
    if not 0.0 <= step < float("inf"):
        raise ValueError(f"scale is {step}, expected a finite non-negative number")
    largest = torch.finfo(dtype).max
    return values.to(_SCALES[len(scale)]).mul_(step).clamp_(-largest, largest).to(dtype)


def all_finite(values: Tensor) -> bool:
    """Return whether all values are finite, without a temporary in the usual case."""
    if not values.is_floating_point() or bool(values.sum().isfinite()):
        return True  # NaN and infinity survive in a sum
    return bool(values.isfinite().all())


def to_bits(tensor: Tensor) -> NDArray[Any]:
    """Return the entries as a flat array of integers of the same width."""
    return _integers(tensor).ravel()


def count_nonzero(tensor: Tensor) -> int:
    """Return how many entries have a set bit, in any memory layout."""
    return int(np.count_nonzero(_integers(tensor)))


def _integers(tensor: Tensor) -> NDArray[Any]:
    numbers = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    entries = numbers.numpy(force=True)
    return entries.view(_INTEGERS[entries.itemsize])


def from_bits(bits: NDArray[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Undo `to_bits`; the array is not copied."""
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def bits_dtype(dtype: torch.dtype) -> str:
    """Return the NumPy name of the little-endian integers that `to_bits` returns."""
    return f"<i{dtype.itemsize}"
