from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parsifl.core import keys
from parsifl.core.keys import Key

SAMPLES = 200_000


def _reference(word: int, count: int, salt: int = 0) -> NDArray[np.float32]:
    """SplitMix64 as published, in unsigned arithmetic."""
    with np.errstate(over="ignore"):
        counter = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(salt << 32)
        z = np.uint64(word) + counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)).astype(np.float64) / 2**24).astype(np.float32)


def test_words_do_not_collide() -> None:
    purposes = ["", "batches", "batch", "0"]
    grid = itertools.product(range(-3, 20), range(20), range(-1, 20), purposes)
    words = [Key(*fields).word() for fields in grid]
    assert len(set(words)) == len(words) == 23 * 20 * 21 * 4


@pytest.mark.parametrize("change", [{"seed": 1}, {"round": 1}, {"client": 0}, {"purpose": "x"}])
def test_every_field_changes_the_numbers(change: dict[str, Any]) -> None:
    key, other = Key(0), Key(0).replace(**change)
    assert key.numpy_generator().random() != other.numpy_generator().random()
    assert torch.rand(1, generator=key.torch_generator()) != torch.rand(
        1, generator=other.torch_generator()
    )
    assert key.tensor() != other.tensor()


@given(st.integers(-(2**70), 2**70))
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= Key(seed).word() < 2**64
    assert Key(seed).word() == Key(seed).word()


def test_generators_are_fresh_and_leave_the_global_ones_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002  # the global state is what is tested
    key = Key(3, round=1)
    assert key.numpy_generator().random() == key.numpy_generator().random()
    draws = [torch.rand(2, generator=key.torch_generator()) for _ in range(2)]
    assert torch.equal(*draws)
    keys.uniform(key.tensor(), (5,))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]  # noqa: NPY002


def test_many_clients_get_what_each_would_get_alone() -> None:
    key, clients = Key(-4, round=1, purpose="batches"), [5, 0, 7]
    alone = [key.replace(client=client) for client in clients]
    assert key.words(clients) == [each.word() for each in alone]
    assert key.tensors(clients) == tuple(each.tensor() for each in alone)
    found = [g.integers(0, 2**32, 3, np.uint32).tolist() for g in key.generators(clients)]
    assert found == [
        each.numpy_generator().integers(0, 2**32, 3, np.uint32).tolist() for each in alone
    ]


@pytest.mark.parametrize("salt", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_uniform_is_splitmix64_over_a_counter(seed: int, salt: int) -> None:
    key = Key(seed)
    found = keys.uniform(key.tensor(), (10, 7), salt)
    np.testing.assert_array_equal(found.numpy().ravel(), _reference(key.word(), 70, salt))


def test_uniform_is_the_same_under_vmap_and_in_a_loop() -> None:
    stack = torch.stack([Key(0, client=client).tensor() for client in range(20)])
    batched = torch.func.vmap(lambda key: keys.uniform(key, (3, 4), salt=5))(stack)
    looped = torch.stack([keys.uniform(key, (3, 4), salt=5) for key in stack])
    assert torch.equal(batched, looped)
    folded = torch.func.vmap(lambda key: keys.fold(key, 9))(stack)
    assert torch.equal(folded, torch.stack([keys.fold(key, 9) for key in stack]))


def test_uniform_has_the_moments_of_the_uniform_law() -> None:
    sample = keys.uniform(Key(1).tensor(), (SAMPLES,)).double()
    assert sample.min() >= 0.0
    assert sample.max() < 1.0
    for power in (1, 2, 3, 4):
        spread = math.sqrt(1 / (2 * power + 1) - 1 / (power + 1) ** 2)
        error = sample.pow(power).mean().item() - 1 / (power + 1)
        assert abs(error) < 5 * spread / math.sqrt(SAMPLES)
    cells = torch.histc(sample, 256, 0.0, 1.0)
    chi_square = ((cells - SAMPLES / 256) ** 2 / (SAMPLES / 256)).sum().item()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("other", ["purpose", "salt", "fold", "client", "neighbour"])
def test_streams_are_independent(other: str) -> None:
    key = Key(1, client=1, purpose="a")
    first = keys.uniform(key.tensor(), (SAMPLES,))
    second = {
        "purpose": lambda: keys.uniform(key.replace(purpose="b").tensor(), (SAMPLES,)),
        "salt": lambda: keys.uniform(key.tensor(), (SAMPLES,), salt=1),
        "fold": lambda: keys.uniform(keys.fold(key.tensor(), 1), (SAMPLES,)),
        "client": lambda: keys.uniform(key.replace(client=2).tensor(), (SAMPLES,)),
        "neighbour": lambda: first.roll(1),
    }[other]()
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(SAMPLES)
    assert not torch.equal(first, second)


def test_folding_numbers_gives_distinct_keys() -> None:
    key = Key(0).tensor()
    found = {keys.fold(key, number).item() for number in range(2_000)}
    assert len(found) == 2_000


def test_an_empty_shape_gives_a_scalar() -> None:
    assert keys.uniform(Key(0).tensor(), ()).shape == ()
    assert keys.uniform(Key(0).tensor(), (0, 3)).shape == (0, 3)
