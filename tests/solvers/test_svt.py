from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parsifl.core.leaves import LowRank, dematricize, densify, matricize, matrix_shape
from parsifl.solvers.svt import (
    TRUSTED,
    factor_layers,
    next_value,
    svt,
    svt_layers,
    svt_stack,
    threshold_within,
)


def reference(matrix: torch.Tensor, threshold: float) -> np.ndarray:
    u, s, v = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    result: np.ndarray = (u * np.maximum(s - threshold, 0)) @ v
    return result


def with_spectrum(rows: int, columns: int, values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=draw, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=draw, dtype=torch.float64))[
        0
    ]
    product: torch.Tensor = (left * values) @ right.T
    return product


@given(
    st.integers(1, 12), st.integers(1, 12), st.floats(0.01, 4.0), st.integers(0, 99), st.booleans()
)
def test_any_matrix_is_thresholded_as_its_definition_says(
    rows: int, columns: int, threshold: float, seed: int, double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    left, right = svt(matrix, threshold)
    assert left.dtype == right.dtype == dtype
    tolerance = 1e-12 if double else 2e-5
    np.testing.assert_allclose((left @ right).numpy(), reference(matrix, threshold), atol=tolerance)


SIZE = 240
HARD = {
    "fallen over six decades": torch.logspace(1, -5, SIZE),
    "fallen as 1/n": 10 / torch.arange(1, SIZE + 1),
    "few outliers": torch.cat([torch.tensor([10.0, 5.0]), torch.linspace(0, 0.05, SIZE - 2)]),
    "as if random": torch.linspace(0, 10, SIZE),
    "all equal": torch.full((SIZE,), 10.0),
    "mostly zero": torch.cat([torch.tensor([10.0, 0.5]), torch.zeros(SIZE - 2)]),
}
CLUSTERED = "clustered at tau"


def spectrum_of(name: str, tau: float) -> torch.Tensor:
    if name != CLUSTERED:
        return HARD[name].double()
    near = tau * (1 + 1e-3 * torch.linspace(-1, 1, SIZE - 40, dtype=torch.float64))
    return torch.cat([torch.full((40,), 10.0, dtype=torch.float64), near])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("shape", [(320, 240), (240, 320), (240, 240)])
@pytest.mark.parametrize("tau", [1e-3, 2e-2, 0.3])
@pytest.mark.parametrize("spectrum", [*HARD, CLUSTERED])
def test_hard_spectra_are_thresholded_exactly_enough(
    spectrum: str, tau: float, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    values = spectrum_of(spectrum, tau)
    matrix = with_spectrum(*shape, values).to(dtype)
    left, right = svt(matrix, tau)
    error = np.linalg.norm((left @ right).double().numpy() - reference(matrix, tau), 2)
    assert error < 10 * (2e-5 if dtype == torch.float32 else 1e-13 / TRUSTED)
    if spectrum != CLUSTERED:
        assert abs(left.shape[1] - int((values > tau).sum())) <= 1


def test_a_matrix_of_zeros_has_no_rank() -> None:
    left, right = svt(torch.zeros(150, 130), 1e-3)
    assert left.shape == (150, 0)
    assert right.shape == (0, 130)


def test_nothing_survives_a_threshold_above_the_norm() -> None:
    left, right = svt(torch.ones(3, 5), 100.0)
    assert left.shape == (3, 0)
    assert right.shape == (0, 5)
    assert (left @ right).shape == (3, 5)


@pytest.mark.bits
def test_a_threshold_of_zero_changes_no_bit() -> None:
    params = {"w": torch.randn(4, 3), "b": torch.randn(4)}
    kept = svt_layers(params, 0.0)
    assert all(kept[name] is params[name] for name in params)


def test_only_layers_with_a_rank_are_touched_and_factors_come_where_shorter() -> None:
    low = with_spectrum(48, 24, torch.tensor([5.0, 3.0], dtype=torch.float64)).float()
    params = {
        "conv": low.reshape(16, 3, 8, 3).swapaxes(1, 2).contiguous(),
        "full": torch.eye(6) * 4,
        "bias": torch.ones(6),
        "conv1d": torch.ones(2, 2, 3),
    }
    thin = svt_layers(params, 1.0)
    assert isinstance(thin["conv"], LowRank)
    assert thin["conv"].left.shape == (48, 2)
    assert thin["bias"] is params["bias"]
    assert thin["conv1d"] is params["conv1d"]
    torch.testing.assert_close(thin["full"], torch.eye(6) * 3)
    dense = densify(thin)["conv"]
    np.testing.assert_allclose(matricize(dense).numpy(), reference(low, 1.0), atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 4), (4, 3, 2, 3), (7,)])
def test_a_stack_is_thresholded_layer_by_layer_and_under_vmap(shape: tuple[int, ...]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = svt_stack(stack, 0.5)
    for layer, result in zip(stack, found, strict=True):
        if len(shape) == 1:
            assert torch.equal(layer, result)
        else:
            expected = reference(matricize(layer), 0.5)
            np.testing.assert_allclose(matricize(result).numpy(), expected, atol=1e-12)
    batched = torch.func.vmap(lambda layer: svt_stack(layer[None], 0.5)[0])(stack)
    torch.testing.assert_close(batched, found)


@pytest.mark.parametrize("entry", [float("inf"), float("nan")])
def test_a_layer_of_a_stack_that_is_not_finite_becomes_nan_and_leaves_the_others(
    entry: float,
) -> None:
    stack = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    whole = svt_stack(stack, 0.5)
    stack[1, 2, 3] = entry
    for found in (
        svt_stack(stack, 0.5),
        torch.func.vmap(lambda layer: svt_stack(layer[None], 0.5)[0])(stack),
    ):
        assert bool(found[1].isnan().all())
        torch.testing.assert_close(found[::2], whole[::2])
    assert torch.equal(svt_stack(stack, 0.5)[::2], whole[::2])


def _low_rank_and_noise(seed: int = 0) -> torch.Tensor:
    low = with_spectrum(400, 300, torch.logspace(1, -1, 30, dtype=torch.float64), seed)
    draw = torch.Generator().manual_seed(seed)
    return (low + 1e-4 * torch.randn(400, 300, generator=draw, dtype=torch.float64)).float()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_guess_saves_work_and_changes_nothing(transposed: bool) -> None:
    matrix = _low_rank_and_noise().T if transposed else _low_rank_and_noise()
    guess = svt(matrix + 1e-3, 0.05)
    left, right = svt(matrix, 0.05, guess)
    expected = reference(matrix, 0.05)
    assert np.linalg.norm((left @ right).numpy() - expected, 2) < 3e-5
    assert left.shape[1] == np.linalg.matrix_rank(expected, tol=1e-6)


@pytest.mark.parametrize("kept", [1, 5])
def test_a_guess_that_misses_survivors_is_not_believed(kept: int) -> None:
    matrix = with_spectrum(300, 300, torch.logspace(1, -2, 290, dtype=torch.float64)).float()
    left, right = svt(matrix, 0.05)
    found = svt(matrix, 0.05, (left[:, :kept], right[:kept]))
    np.testing.assert_allclose((found[0] @ found[1]).numpy(), reference(matrix, 0.05), atol=2e-5)


def test_a_guess_of_rank_zero_finds_what_came_back() -> None:
    matrix = _low_rank_and_noise()
    nothing = matrix.new_zeros(400, 0), matrix.new_zeros(0, 300)
    left, right = svt(matrix, 0.05, nothing)
    np.testing.assert_allclose((left @ right).numpy(), reference(matrix, 0.05), atol=2e-5)


@pytest.mark.parametrize("side", [90, 150])
def test_entries_whose_squares_overflow_keep_their_rank(side: int) -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = 1e20 * torch.randn(side, side, generator=draw)
    left, right = svt(matrix, 1e-3)
    assert left.shape[1] == side
    error = (left.double() @ right.double() - matrix.double()).abs().max()
    assert float(error) < 1e-4 * 1e20


@pytest.mark.parametrize("side", [90, 150])
@pytest.mark.parametrize("entry", [float("inf"), float("nan")])
def test_a_matrix_that_is_not_finite_does_not_become_zero(side: int, entry: float) -> None:
    matrix = torch.ones(side, side)
    matrix[0, 0] = entry
    left, right = svt(matrix, 1e-3)
    assert bool((left @ right).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("known", [0, 30])
def test_a_newcomer_just_above_the_threshold_is_found_as_without_a_guess(
    known: int, dtype: torch.dtype
) -> None:
    tau = 0.05
    tail = torch.linspace(0.49, 0.3, 150, dtype=torch.float64) * tau
    values = torch.cat([torch.linspace(10, 1, 30), torch.tensor([1.01 * tau, 1.2 * tau]), tail])
    matrix = with_spectrum(300, 260, values.double()).to(dtype)
    left, right = svt(matrix, 0.5)
    guess = left[:, :known].contiguous(), right[:known].contiguous()
    found = svt(matrix, tau, guess)
    error = np.linalg.norm((found[0] @ found[1]).double().numpy() - reference(matrix, tau), 2)
    assert error < 10 * (2e-5 if dtype == torch.float32 else 1e-13 / TRUSTED)
    assert found[0].shape[1] == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (8, 4, 3, 5)])
@pytest.mark.parametrize("rank", [0, 1, 4, 12])
def test_factors_of_layers_are_exact_and_used_where_they_are_shorter(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows, columns = matrix_shape(shape)
    matrix = with_spectrum(rows, columns, torch.logspace(2, -1, 12)[:rank]).to(dtype)
    layer = dematricize(matrix, shape)
    found = factor_layers({"w": layer, "b": torch.ones(3)})
    shorter = rank * (rows + columns) < rows * columns
    assert isinstance(found["w"], LowRank) == shorter
    if isinstance(found["w"], LowRank):
        assert found["w"].left.shape == (rows, rank)
    error = float((densify(found)["w"] - layer).abs().max())
    assert error <= 100 * 10 * torch.finfo(dtype).eps
    assert found["b"].shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(10, 20), (60, 40), (130, 130)])
def test_the_threshold_of_a_rank_is_not_exceeded_by_rounding(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        matrix = torch.randn(shape, generator=draw, dtype=dtype)
        for rank in (1, 3, 7):
            assert svt(matrix, next_value(matrix, rank))[0].shape[1] == rank


def test_thresholded_layers_take_no_more_numbers_than_asked_for() -> None:
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        sizes = {"a": (128, 200), "b": (64, 128), "c": (64,)}
        params = {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
        found = svt_layers(params, threshold_within(params, 15000)).values()
        factors = [(v.left, v.right) if isinstance(v, LowRank) else (v,) for v in found]
        assert sum(leaf.numel() for pair in factors for leaf in pair) <= 15000
