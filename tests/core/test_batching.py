from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fixtures import classifier

from parsifl.core import augment, keys
from parsifl.core.batching import Batch, Batches, BatchSpec, Partial, schedule
from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key

SAMPLES = st.integers(1, 40)
BATCH = st.none() | st.integers(1, 12)


def draw(samples: int, given: BatchSpec, seed: int = 0) -> tuple[Any, Any]:
    (index,), valid = schedule(samples, given, [np.random.default_rng(seed)])
    return index, valid


@given(SAMPLES, BATCH, st.integers(0, 4))
def test_an_epoch_of_padded_batches_visits_every_row_once(
    samples: int, batch: int | None, epochs: int
) -> None:
    index, valid = draw(samples, BatchSpec(batch, epochs=epochs))
    rows = samples if batch is None else batch
    per_epoch = math.ceil(samples / rows)
    assert index.shape == valid.shape == (epochs * per_epoch, rows)
    for epoch in range(epochs):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(index[part][valid[part]].tolist()) == list(range(samples))
    assert (valid.any(axis=1)).all()  # no batch is all padding


@given(SAMPLES, st.integers(1, 12), st.integers(0, 9))
def test_padding_repeats_a_row_of_its_own_batch(samples: int, batch: int, steps: int) -> None:
    index, valid = draw(samples, BatchSpec(batch, steps=steps))
    assert len(index) == steps
    for row, good in zip(index, valid, strict=True):
        assert set(row[~good].tolist()) <= {row[good][0]}
        assert len(set(row[good].tolist())) == good.sum()


@given(SAMPLES, st.integers(1, 12), st.integers(0, 9))
def test_redrawn_batches_are_subsets_of_full_size(samples: int, batch: int, steps: int) -> None:
    index, valid = draw(samples, BatchSpec(batch, steps=steps, last_batch="redraw"))
    assert index.shape == valid.shape == (steps, batch)
    for row, good in zip(index, valid, strict=True):
        assert good.sum() == len(set(row[good].tolist())) == min(batch, samples)
        assert set(row.tolist()) <= set(range(samples))


def test_redrawn_batches_are_independent_of_each_other() -> None:
    """Of 2 x 40 rows out of 100, 16 are shared on average; shuffled epochs share none."""
    index, _ = draw(100, BatchSpec(40, steps=400, last_batch="redraw"))
    shared = [len(set(a) & set(b)) for a, b in zip(index[::2], index[1::2], strict=True)]
    assert abs(np.mean(shared) - 16) < 1


@given(SAMPLES, st.integers(1, 12), st.integers(0, 9))
def test_wrapped_batches_are_full_and_go_through_the_rows_in_turn(
    samples: int, batch: int, steps: int
) -> None:
    index, valid = draw(samples, BatchSpec(batch, steps=steps, last_batch="wrap"))
    assert valid.all()
    stream = index.reshape(-1)
    assert len(stream) == steps * batch
    for start in range(0, len(stream) - samples + 1, samples):
        assert sorted(stream[start : start + samples].tolist()) == list(range(samples))


@given(SAMPLES, st.integers(1, 12), st.integers(0, 4))
def test_dropping_leaves_full_batches_only(samples: int, batch: int, epochs: int) -> None:
    given = BatchSpec(batch, epochs=epochs, last_batch="drop")
    if samples < batch and epochs:
        with pytest.raises(ConfigError, match='last_batch="drop" leaves it no batch'):
            draw(samples, given)
        return
    index, valid = draw(samples, given)
    assert valid.all()
    assert index.shape == (epochs * (samples // batch), batch)
    per_epoch = samples // batch
    for epoch in range(epochs):
        rows = index[epoch * per_epoch : (epoch + 1) * per_epoch].reshape(-1)
        assert len(set(rows.tolist())) == len(rows)


def test_a_round_that_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="1000000000 steps of 4 rows are too many"):
        schedule(3, BatchSpec(4, steps=10**9), [np.random.default_rng(0)])


def test_dropping_by_steps_refuses_too_small_clients_too() -> None:
    with pytest.raises(ConfigError, match="3 rows, batch_size is 4"):
        draw(3, BatchSpec(4, steps=1, last_batch="drop"))
    assert draw(3, BatchSpec(4, steps=0, last_batch="drop"))[0].shape == (0, 4)


def test_epochs_are_reshuffled() -> None:
    index, _ = draw(12, BatchSpec(12, epochs=2))
    assert index[0].tolist() != index[1].tolist()


@pytest.mark.parametrize("partial", ["pad", "wrap", "drop"])
def test_steps_that_read_all_rows_read_them_in_their_order(partial: Partial) -> None:
    (index,), valid = schedule(5, BatchSpec(None, steps=2, last_batch=partial), [])
    assert index.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert valid.all()


@given(SAMPLES, st.integers(1, 12), st.integers(0, 9), st.sampled_from(["pad", "wrap"]))
def test_clients_are_drawn_together_as_they_are_alone(
    samples: int, batch: int, steps: int, partial: Partial
) -> None:
    given = BatchSpec(batch, steps=steps, last_batch=partial)
    together, valid = schedule(samples, given, map(np.random.default_rng, range(3)))
    for seed, index in enumerate(together):
        assert np.array_equal(index, draw(samples, given, seed)[0])
        assert np.array_equal(valid, draw(samples, given, seed)[1])


def test_epochs_may_be_fractions() -> None:
    assert BatchSpec(4, epochs=0.5).count(16) == 2
    assert BatchSpec(4, epochs=1.5).count(16) == 6


@pytest.mark.parametrize("partial", ["pad", "wrap"])
def test_a_client_without_rows_is_refused(partial: Partial) -> None:
    with pytest.raises(DataError, match="has no training rows"):
        draw(0, BatchSpec(4, steps=1, last_batch=partial))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either steps= or epochs="),
        ({"steps": 1, "epochs": 1}, "either steps= or epochs="),
        ({"batch_size": 0, "steps": 1}, "batch_size must be at least 1"),
        ({"steps": -1}, "must not be negative: got steps=-1"),
        ({"epochs": -0.5}, "must not be negative: got epochs=-0.5"),
    ],
)
def test_impossible_draws_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSpec(**settings)


def batches(**changes: Any) -> Batches:
    given: dict[str, Any] = {
        "x": torch.arange(40.0).reshape(10, 4),
        "y": torch.arange(10),
        "index": torch.tensor([[1, 3], [7, 7]]),
        "weight": torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        "active": torch.tensor([True, True]),
        "key": Key(5).tensor(),
    }
    return Batches(**{**given, **changes})


def test_batches_gather_their_rows_step_by_step() -> None:
    first, second = batches()
    assert first.y.tolist() == [1, 3]
    assert torch.equal(second.x, torch.arange(40.0).reshape(10, 4)[[7, 7]])
    assert second.weight.tolist() == [1, 0]
    assert len(batches()) == 2


def test_every_step_has_a_key_of_its_own() -> None:
    first, second = batches()
    assert int(first.key) != int(second.key)
    assert int(first.key) == int(keys.fold(Key(5).tensor(), 0))


def test_augmentation_happens_in_the_gather_by_key() -> None:
    images = torch.rand(10, 3, 8, 8, generator=Key(1).torch_generator())
    drawn = batches(x=images, augment="flip-crop")
    batch = drawn.batch(0)
    wanted = augment.apply("flip-crop", images[[1, 3]], keys.fold(Key(5).tensor(), 0))
    assert torch.equal(batch.x, wanted)
    assert not torch.equal(batch.x, images[[1, 3]])


@settings(deadline=None)  # the first gradient of a process takes a second
@given(st.integers(1, 7), st.integers(0, 5), st.integers(0, 99))
def test_a_padded_batch_has_the_loss_and_gradient_of_the_short_one(
    size: int, padding: int, seed: int
) -> None:
    problem = classifier()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (size,), generator=generator)
    params = problem.init(Key(seed))

    def batch(more: int) -> Batch:
        rows = [*range(size), *[0] * more]
        weight = torch.tensor([1.0] * size + [0.0] * more, dtype=torch.float64)
        return Batch(x[rows], y[rows], weight, torch.tensor(True), Key(0).tensor())

    losses = [problem.loss(params, batch(more)) for more in (0, padding)]
    assert torch.allclose(losses[0], losses[1], rtol=1e-14, atol=0)
    slopes = [torch.func.grad(problem.loss)(params, batch(more)) for more in (0, padding)]
    for name in params:
        assert torch.allclose(slopes[0][name], slopes[1][name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 3)])
def test_a_batch_has_the_rows_of_its_index_whatever_their_form(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    wide = torch.arange(24 * math.prod(shape)).reshape(12, 2, *shape).to(dtype)
    index = torch.tensor([[3, 3, 0], [11, 5, 1]])
    ones = torch.ones(2, 3), torch.ones(2, dtype=torch.bool), Key(0).tensor()
    for x in (wide[:, 0], wide[:, 0].contiguous()):  # every other row of a larger one, and a copy
        batches = Batches(x, torch.arange(12), index, *ones)
        for step, batch in enumerate(batches):
            assert torch.equal(batch.x, x[index[step]])
            assert torch.equal(batch.key, keys.fold(batches.key, step))
