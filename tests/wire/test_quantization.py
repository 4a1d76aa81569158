from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsifl.core.errors import ConfigError
from parsifl.wire import quantization

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _trip(tensor: Tensor, narrow: torch.dtype) -> Tensor:
    short, scale = quantization.narrowed(tensor, narrow)
    assert short.dtype == narrow
    assert len(scale) == quantization.scale_size(tensor.dtype, narrow)
    return quantization.widened(short, tensor.dtype, scale)


@pytest.mark.parametrize("dtype", list(quantization.CODES))
def test_bits_come_back_as_the_same_tensor(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype).T
    bits = quantization.to_bits(tensor)
    assert bits.dtype.itemsize == dtype.itemsize
    assert torch.equal(quantization.from_bits(bits, dtype, (3, 2)), tensor)
    assert quantization.count_nonzero(tensor) == np.count_nonzero(bits) == 4


def test_negative_zero_is_not_a_zero_bit_pattern() -> None:
    assert quantization.to_bits(torch.tensor([0.0, -0.0])).astype(bool).tolist() == [False, True]
    assert quantization.count_nonzero(torch.tensor([0.0, -0.0])) == 1


@pytest.mark.parametrize("precision", quantization.PRECISIONS)
@pytest.mark.parametrize("dtype", list(quantization.CODES))
def test_precision_only_ever_makes_floats_shorter(dtype: torch.dtype, precision: str) -> None:
    for entries in (0, 1, 2, 1000):
        narrow = quantization.stored(dtype, entries, precision)
        cost = entries * narrow.itemsize + quantization.scale_size(dtype, narrow)
        assert cost <= entries * dtype.itemsize or narrow == dtype
        assert narrow == dtype or (dtype.is_floating_point and precision != "exact")


def test_large_tensors_take_the_precision_asked_for() -> None:
    assert quantization.stored(torch.float32, 1000, "int8") == torch.int8
    assert quantization.stored(torch.float64, 1000, "float16") == torch.float16
    assert quantization.stored(torch.float32, 1000, "bfloat16") == torch.bfloat16
    assert quantization.stored(torch.float16, 1000, "bfloat16") == torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_half_precisions_round_to_nearest_and_refuse_what_is_beyond_them(
    dtype: torch.dtype, narrow: torch.dtype
) -> None:
    largest, step = torch.finfo(narrow).max, torch.finfo(narrow).eps
    tensor = torch.tensor([largest, -largest, 1 + 0.6 * step, 0.0], dtype=dtype)
    assert _trip(tensor, narrow).double().tolist() == [largest, -largest, 1 + step, 0.0]
    tensor[1] *= 1 + step / 2
    with pytest.raises(ValueError, match=r"a value is beyond .*, the largest of b?float16"):
        _trip(tensor, narrow)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=50))
def test_int8_error_is_at_most_half_a_step(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64)
    step = float(tensor.abs().max()) / 127
    error = (_trip(tensor, torch.int8) - tensor).abs().max()
    assert error <= 0.5 * step * (1 + 1e-12) + 1e-321


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_keeps_extreme_values_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for number in (info.max, info.tiny, 5e-324, 0.0):
        found = _trip(torch.full((9,), number, dtype=torch.float64).to(dtype), torch.int8)
        assert found.isfinite().all()
        expected = torch.tensor(number, dtype=torch.float64).to(dtype).item()
        assert found.max().item() == pytest.approx(expected, rel=0.01, abs=1e-44)


def test_int8_of_nothing_is_nothing() -> None:
    assert _trip(torch.zeros(0), torch.int8).numel() == 0


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_forged_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale is"):
        quantization.widened(
            torch.ones(3, dtype=torch.int8), torch.float32, np.float32(scale).tobytes()
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_single_bad_value_is_found(dtype: torch.dtype, number: float) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert quantization.all_finite(tensor)  # though its sum is infinite
    tensor[500] = number
    assert not quantization.all_finite(tensor)


def test_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        quantization.precision_index("bfloat")
