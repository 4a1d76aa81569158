"""What sites agree on from counts and sums."""

from __future__ import annotations

import numpy as np
import pytest

from parsifl.core.errors import DataError, ParsiflWarning
from parsifl.data.table_encoding import Preprocessing, Summary, summarise, unit_notes
from parsifl.data.tables import as_columns

ONE = {"age": ["30", "", "50"], "ward": ["b", "a", "NA"]}
TWO = {"age": ["40", "60"], "ward": ["c", "c"]}


def summary(table: dict[str, list[str]]) -> Summary:
    return summarise(as_columns(table, words=("ward",)))


def agreed(*tables: dict[str, list[str]]) -> Preprocessing:
    return Preprocessing.of([summary(table) for table in tables or (ONE, TWO)])


def test_columns_levels_and_missing_values_are_agreed() -> None:
    found = agreed()
    assert found.names == ["age", "ward=a", "ward=b", "ward=(missing)"]  # c is the most frequent
    assert found.units == [0, 1, 1, 1]
    assert found.rows == 5
    assert found.columns[0].mean[0] == pytest.approx(45)


def test_all_sites_together_are_centred_and_scaled() -> None:
    found = agreed()
    x = np.concatenate([found.standardised(as_columns(t, words=("ward",))) for t in (ONE, TWO)])
    pooled = np.array([30, 45, 50, 40, 60.0])  # the missing age is the mean of the others
    assert np.allclose(x[:, 0], (pooled - pooled.mean()) / pooled.std())
    assert np.allclose(x.mean(axis=0), 0)
    assert np.allclose(x.std(axis=0), 1)


def test_the_order_of_columns_does_not_matter() -> None:
    turned = dict(reversed(TWO.items()))
    assert agreed(ONE, turned) == agreed()
    columns = as_columns(turned, words=("ward",))
    assert np.array_equal(agreed().design(columns), agreed().design(as_columns(TWO)))


def test_numbers_far_from_zero_do_not_cancel() -> None:
    draw = np.random.default_rng(0)
    sites = [1e9 + 100 * draw.standard_normal(50) for _ in range(3)]
    found = Preprocessing.of([summarise({"x": site}) for site in sites])
    assert found.scale[0] == pytest.approx(np.concatenate(sites).std(), rel=1e-8)


def test_a_summary_holds_no_row() -> None:
    told = summary({"x": [str(i / 7) for i in range(1000)]})
    assert told.size < 130


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"age": ["1"]}, "client 1 and client 0 differ in 1 columns, such as ward"),
        ({"age": ["x"], "ward": ["7"]}, "words at some sites"),
    ],
)
def test_tables_that_do_not_fit_are_refused(other: dict[str, list[str]], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Preprocessing.of([summary(ONE), summarise(as_columns(other, words=("ward",)))])


def test_rare_levels_come_last_and_stand_for_unknown_ones() -> None:
    found = agreed({**ONE, "ward": ["(rare)", "a", "b"]}, TWO)
    assert found.names == ["age", "ward=a", "ward=b", "ward=(rare)"]
    new, known = ({"age": ["30"], "ward": [ward]} for ward in ("x", "(rare)"))
    assert np.array_equal(found.design(as_columns(new)), found.design(as_columns(known)))


@pytest.mark.parametrize("ward", ["x", "NA"])
def test_a_value_that_no_site_had_counts_as_the_most_frequent_one(ward: str) -> None:
    found = agreed({"age": ["1", "2", "3"], "ward": ["b", "a", "b"]})
    new = as_columns({"age": [""], "ward": [ward]}, words=("ward",))
    with pytest.warns(ParsiflWarning, match="column 'ward': 1 level that no site had.*as 'b'"):
        assert found.design(new).tolist() == [[2.0, 0.0]]


def test_other_columns_are_not_read_and_missing_ones_are_named() -> None:
    extra = as_columns({**TWO, "note": ["p", "q"]})
    assert agreed().design(extra).shape == (2, 4)
    with pytest.raises(DataError, match="lacks 1 column: ward"):
        agreed().design(as_columns({"age": ["1"]}))
    with pytest.raises(DataError, match="'age' must hold numbers"):
        agreed().design(as_columns({"age": ["old"], "ward": ["a"]}))
    with pytest.raises(DataError, match="'ward' must hold words, such as c"):
        agreed().design(as_columns({"age": ["1"], "ward": ["2"]}))


def test_a_column_of_one_level_has_no_indicator() -> None:
    assert agreed({"ward": ["a", "a"], "age": ["1", "2"]}).names == ["age"]


@pytest.mark.parametrize("factor", [1 / 18, 18.0])
def test_a_site_with_another_unit_is_named(factor: float) -> None:
    draw = np.random.default_rng(0)
    sites = [draw.normal(100, 20, 200) for _ in range(3)]
    assert unit_notes([summarise({"glucose": site}) for site in sites], "ABC") == []
    sites[1] = sites[1] * factor
    (note,) = unit_notes([summarise({"glucose": site}) for site in sites], "ABC")
    assert note.startswith("column 'glucose': B has mean")
