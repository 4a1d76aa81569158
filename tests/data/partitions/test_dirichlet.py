from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsifl.core.errors import ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.data.partitions import dirichlet, inner_dirichlet
from parsifl.data.splits import label_shares

LABELS = np.repeat(np.arange(10), 6000)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("alpha", [0.1, 0.001, 1e-300])
def test_five_hundred_clients_end_in_under_a_second(alpha: float, balance: bool) -> None:
    start = time.thread_time()
    parts = dirichlet(LABELS, 500, Key(0), alpha=alpha, balance=balance)
    assert time.thread_time() - start < 1.0
    assert len(parts) == 500
    assert parts.sizes.min() >= 10
    assert np.array_equal(np.sort(parts.values), np.arange(60_000))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=12, max_size=60),
    st.integers(1, 12),
    st.floats(1e-6, 1e6),
    st.booleans(),
    st.integers(0, 1000),
)
def test_it_always_ends_with_every_row_in_one_client(
    labels: list[int], clients: int, alpha: float, balance: bool, seed: int
) -> None:
    parts = dirichlet(
        np.array(labels), clients, Key(seed), alpha=alpha, balance=balance, min_size=1
    )
    assert sorted(parts.values.tolist()) == list(range(len(labels)))
    assert parts.sizes.min() >= 1


def test_a_tight_minimum_is_repaired_and_not_refused() -> None:
    parts = dirichlet(LABELS, 100, Key(1), alpha=0.01, min_size=600)
    assert parts.sizes.tolist() == [600] * 100


def test_a_large_alpha_is_nearly_even_and_a_small_one_is_not() -> None:
    even = label_shares(LABELS, dirichlet(LABELS, 20, Key(0), alpha=1000.0), 10)
    skew = label_shares(LABELS, dirichlet(LABELS, 20, Key(0), alpha=0.05), 10)
    assert even.max() < 0.15
    assert np.median(skew.max(axis=1)) > 0.5


def test_without_balancing_a_class_follows_the_dirichlet_moments() -> None:
    labels = np.zeros(20_000, dtype=np.int64)
    draws = [dirichlet(labels, 4, Key(s), alpha=2.0, min_size=1, balance=False) for s in range(300)]
    shares = np.array([parts.sizes for parts in draws]) / 20_000
    # Dir(a, ..., a) of n parts: mean 1/n, variance (n - 1) / (n^2 (n a + 1))
    assert np.allclose(shares.mean(axis=0), 0.25, atol=0.03)
    assert np.allclose(shares.var(axis=0), 3 / (16 * 9), atol=0.006)


def test_impossible_demands_are_refused() -> None:
    with pytest.raises(ConfigError, match="alpha must be"):
        dirichlet(LABELS, 10, Key(0), alpha=0.0)
    with pytest.raises(DataError, match="need 70000 rows"):
        dirichlet(LABELS, 7000, Key(0))
    with pytest.raises(DataError, match="at least 1 rows"):
        dirichlet(np.array([0, 1]), 3, Key(0), min_size=0)
    with pytest.raises(DataError, match="do not fit"):
        inner_dirichlet(LABELS, 10, Key(0), size=6001)
    with pytest.raises(ConfigError, match="alpha must be"):
        inner_dirichlet(LABELS, 10, Key(0), alpha=-1.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.floats(1e-4, 100), st.integers(0, 99))
def test_a_client_prior_without_refill_uses_no_row_twice(
    clients: int, alpha: float, seed: int
) -> None:
    labels = np.repeat(np.arange(3), [5, 20, 65])
    parts = inner_dirichlet(labels, clients, Key(seed), alpha=alpha)
    assert parts.sizes.tolist() == [90 // clients] * clients
    assert len(np.unique(parts.values)) == len(parts.values)


def test_refill_keeps_the_priors_of_late_clients() -> None:
    labels = np.repeat(np.arange(10), 100)
    refilled = inner_dirichlet(labels, 40, Key(2), alpha=0.01, size=90, refill=True)
    assert refilled.sizes.tolist() == [90] * 40
    assert len(np.unique(refilled.values)) < len(refilled.values)
    shares = label_shares(labels, refilled, 10)
    assert np.median(shares[20:].max(axis=1)) > 0.95
    assert all(len(np.unique(part)) == 90 for part in refilled)
