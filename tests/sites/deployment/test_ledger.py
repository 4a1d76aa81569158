"""The ledger of a table against dense linear algebra, and against what a server could compute."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.sites.deployment.ledger import Ledger, exposure, root, site_secret

SECRET = b"0" * 32


def table(rows: int, first: int = 0) -> dict[str, list[str]]:
    return {
        "id": [str(i) for i in range(first, first + rows)],
        "sex": ["f", "m"] * (rows // 2) + ["f"] * (rows % 2),
    }


def opened(rows: int) -> tuple[Ledger, Any]:
    return Ledger().with_rows(table(rows), SECRET)


def projection(vectors: Any) -> Any:
    left, values, _ = np.linalg.svd(vectors, full_matrices=False)
    left = left[:, values > 1e-13 * values[0]]
    return left @ left.T


def test_leverages_of_exact_sums_are_those_of_the_projection() -> None:
    draw = np.random.default_rng(0)
    ledger, at = opened(30)
    blocks = [draw.normal(size=(30, 4)) for _ in range(3)]
    blocks.append(blocks[0] @ draw.normal(size=(4, 2)))  # dependent: adds nothing
    for number, block in enumerate(blocks):
        ledger = ledger.with_block(str(number), block, at, 0.0)
    expected = np.diag(projection(np.column_stack([np.ones(30), *blocks])))
    basis = root(ledger.vectors, ledger.noise)
    assert np.allclose((basis**2).sum(1), expected, atol=1e-12)
    assert ledger.exposure(1.0).dimensions == pytest.approx(13.0)


def test_leverages_of_noisy_sums_are_posterior_variances() -> None:
    """Of a column z with independent entries, from exact sums V'z and noisy sums U'z + e."""
    draw, noise = np.random.default_rng(1), 0.2
    ledger, at = opened(25)
    exact, noisy = draw.normal(size=(25, 2)), draw.normal(size=(25, 5))
    ledger = ledger.with_block("a", exact, at, 0.0).with_block("b", noisy, at, noise)
    known = np.column_stack([np.ones(25), exact / np.abs(exact).max(0)])
    sums = np.column_stack([known, noisy / np.abs(noisy).max(0)])
    covariance = sums.T @ sums + np.diag([0.0] * 3 + [noise**2] * 5)
    explained = np.diag(sums @ np.linalg.inv(covariance) @ sums.T)
    basis = root(ledger.vectors, ledger.noise)
    assert np.allclose((basis**2).sum(1), explained, atol=1e-10)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_largest_pair_is_that_of_all_pairs(noise: float) -> None:
    draw = np.random.default_rng(2)
    for _ in range(20):
        vectors = draw.standard_t(2, size=(20, 5))
        basis = root(vectors / np.abs(vectors).max(0), np.full(5, noise))
        full = basis @ basis.T
        pairs = {
            pair: float(np.linalg.eigvalsh(full[np.ix_(pair, pair)])[-1])
            for pair in itertools.combinations(range(20), 2)
        }
        worst = exposure(basis, 0.0)
        assert worst.single == pytest.approx(np.diag(full).max())
        assert worst.pair == pytest.approx(max(pairs.values()))
        assert pairs[min(worst.rows), max(worst.rows)] == pytest.approx(worst.pair)


def test_a_difference_of_two_requests_isolates_a_row() -> None:
    ledger, at = opened(40)
    ledger = ledger.with_block("a", np.eye(40)[:, :1] * 0.0, at, 0.0)
    assert ledger.exposure(1.0).single == pytest.approx(1 / 40)
    first = np.arange(40.0)[:, None] > 20
    ledger = ledger.with_block("b", first.astype(float), at, 0.0)
    assert ledger.exposure(1.0).single < 0.06
    ledger = ledger.with_block("c", (np.arange(40.0)[:, None] > 21).astype(float), at, 0.0)
    assert ledger.exposure(1.0).single == pytest.approx(1.0)
    assert ledger.exposure(1.0).rows == (21,)


def test_a_tiny_difference_counts_in_exact_sums_and_not_below_the_noise() -> None:
    ledger, at = opened(40)
    almost = np.ones((40, 1))
    almost[7] -= 1e-9
    assert ledger.with_block("a", almost, at, 0.0).exposure(1.0).single > 0.99
    assert ledger.with_block("a", almost, at, 0.01).exposure(1.0).single < 0.03


def test_repeated_questions_average_the_noise() -> None:
    draw = np.random.default_rng(3)
    vector = np.where(np.arange(40) == 5, 1.0, 0.02 * draw.random(40))[:, None]
    ledger, at = opened(40)
    seen = []
    for number in range(30):
        ledger = ledger.with_block(str(number), vector, at, 2.0)
        seen.append(ledger.exposure(1.0).single)
    assert all(a < b for a, b in itertools.pairwise(seen))
    assert seen[0] < 0.25 < 0.85 < seen[-1]


@pytest.mark.parametrize("rows", [1, 3])
def test_added_changed_and_removed_rows_stand_out(rows: int) -> None:
    """Two versions of a table differ by few rows: so do their sums."""
    draw = np.random.default_rng(4)
    old = draw.normal(size=(60, 3))
    ledger, at = opened(60)
    ledger = ledger.with_block("a", old, at, 0.0)
    assert ledger.exposure(1.0).single < 0.3
    more, at = ledger.with_rows(table(60 + rows), SECRET)
    assert len(more.rows) == 60 + rows
    new = np.concatenate([old, draw.normal(size=(rows, 3))])
    assert more.with_block("b", new, at, 0.0).exposure(1.0).pair > 0.99
    fewer, at = ledger.with_rows(table(60 - rows), SECRET)
    assert len(fewer.rows) == 60
    assert fewer.with_block("b", old[: 60 - rows], at, 0.0).exposure(1.0).pair > 0.99
    changed = table(60)
    for i in range(rows):
        changed["id"][i] = f"corrected {i}"
    again, at = ledger.with_rows(changed, SECRET)
    assert again.with_block("b", old, at, 0.0).exposure(1.0).pair > 0.99


def test_the_order_of_rows_and_columns_does_not_matter() -> None:
    ledger, at = opened(10)
    values = table(10)
    mixed = {name: values[name][::-1] for name in reversed(values)}
    same, reverse = ledger.with_rows(mixed, SECRET)
    assert len(same.rows) == 10
    assert reverse.tolist() == at.tolist()[::-1]


def test_equal_rows_are_counted() -> None:
    twice = {"id": ["7", "7", "7"], "sex": ["f", "f", "m"]}
    ledger, at = Ledger().with_rows(twice, SECRET)
    assert sorted(at.tolist()) == [0, 1, 2]
    again, at = ledger.with_rows({"id": ["7"] * 4, "sex": ["f", "f", "f", "m"]}, SECRET)
    assert len(again.rows) == 4
    assert at.tolist() == [0, 1, 3, 2]


def test_other_columns_are_another_table() -> None:
    ledger, _ = opened(10)
    with pytest.raises(DataError, match="other columns"):
        ledger.with_rows({**table(10), "age": ["1"] * 10}, SECRET)


def test_a_ledger_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.npz"
    assert Ledger.read(path).requests == ()
    ledger, at = opened(10)
    ledger = ledger.with_block("a", np.arange(10.0)[:, None], at, 0.01)
    ledger.write(path)
    assert path.stat().st_mode & 0o077 == 0
    again = Ledger.read(path)
    assert again.requests == ("a",)
    assert again.columns == ("id", "sex")
    assert again.noise.tolist() == [0.0, 0.01]
    assert again.exposure(0.5) == ledger.exposure(0.5)
    same, positions = again.with_rows(table(10), SECRET)
    assert len(same.rows) == 10
    assert positions.tolist() == at.tolist()
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="restore it from a backup"):
        Ledger.read(path)


def test_the_secret_is_drawn_once_and_private(tmp_path: Path) -> None:
    secret = site_secret(tmp_path)
    assert len(secret) == 32
    assert site_secret(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_sums_that_are_not_finite_are_no_block() -> None:
    ledger, at = opened(4)
    with pytest.raises(DataError, match="not finite"):
        ledger.with_block("a", np.array([[np.inf], [0], [0], [0]]), at, 0.0)
