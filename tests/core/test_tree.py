from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, Literal, Optional, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parsifl.core import tree, tree_schema
from parsifl.core.leaves import UNITS, LowRank, Sparse

V = TypeVar("V")


@dataclass(frozen=True)
class Point:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Message:
    params: dict[str, Tensor]
    point: Point | None
    parts: tuple[Tensor, ...]
    width: float = 1.0
    mode: Literal["train", 1] = "train"
    trained: tuple[str, int] = ("head", 3)


@dataclass(frozen=True)
class Box(Generic[V]):
    content: V
    more: dict[str, V]


@dataclass(frozen=True)
class Matrix(tree.Opaque):
    rows: int


def _vector(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


vectors = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3).map(_vector)
statics = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
trees = st.recursive(
    st.one_of(vectors, statics),
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, vectors, vectors),
    ),
    max_leaves=8,
)
vector_dicts = st.dictionaries(
    st.sampled_from("abcd"),
    # + 0.0 because -0.0 plus a missing zero would be 0.0
    st.floats(-9, 9).map(lambda number: torch.tensor([number, 1.0]) + 0.0),
)


def _message() -> Message:
    return Message({"w": torch.ones(2)}, Point(torch.ones(1), torch.zeros(1)), (torch.ones(3),))


@given(trees)
def test_flatten_and_unflatten_are_inverse(value: Any) -> None:
    leaves, structure = tree.flatten(value)
    assert tree.same(tree.unflatten(leaves, structure), value)
    assert len(leaves) == len(tree.names(structure)) == len(tree.kinds(structure))
    assert hash(structure) == hash(tree.structure(value))


def _holds_dataclass(value: Any) -> bool:
    if isinstance(value, dict | tuple):
        return any(map(_holds_dataclass, value.values() if isinstance(value, dict) else value))
    return is_dataclass(value)


@given(trees)
def test_any_reads_back_whatever_holds_no_dataclass(value: Any) -> None:
    structure = tree.structure(value)
    text = tree_schema.to_json(structure)
    if _holds_dataclass(value):
        with pytest.raises(ValueError, match="does not fit"):
            tree_schema.from_json(text, Any)
    else:
        assert tree_schema.from_json(text, Any) == structure


def test_leaves_are_named_by_path_and_sorted_by_key() -> None:
    value = {"b": (torch.ones(1), 3, torch.ones(2)), "a": Point(torch.ones(3), torch.ones(4))}
    names = tree.names(tree.structure(value))
    assert names == ["a.x", "a.y", "b.0", "b.2"]
    assert [len(leaf) for leaf in tree.leaves(value)] == [3, 4, 1, 2]
    assert tree.names(tree.structure(torch.ones(1))) == ["(root)"]


def test_units_are_leaves_of_their_own_kind() -> None:
    sparse = Sparse(torch.tensor([1]), torch.ones(1), (3,))
    value = {"s": sparse, "t": torch.ones(1)}
    leaves, structure = tree.flatten(value, units=UNITS)
    assert leaves[0] is sparse
    assert tree.kinds(structure) == [Sparse, Tensor]
    assert structure != tree.structure({"s": torch.ones(1), "t": torch.ones(1)})
    assert tree.unflatten(leaves, structure)["s"] is sparse
    assert len(tree.leaves(value)) == 3


def test_opaque_objects_are_leaves() -> None:
    matrix = Matrix(3)
    leaves, structure = tree.flatten((matrix, torch.ones(1)))
    assert leaves[0] is matrix
    assert tree.is_finite((matrix, torch.ones(1)))
    assert tree.unflatten(leaves, structure)[0] is matrix
    assert tree.to_meta(matrix) is matrix


@pytest.mark.parametrize("value", [[torch.ones(1)], {"a": {1, 2}}, Point, object()])
def test_other_objects_cannot_be_part_of_a_tree(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be part of a tree"):
        tree.flatten(value)


def test_structures_tell_equal_numbers_of_different_types_apart() -> None:
    forms = {tree.structure(value) for value in (1, 1.0, True)}
    assert len(forms) == 3


def test_map_needs_equal_structures() -> None:
    with pytest.raises(TypeError, match="trees differ in structure"):
        tree.map(torch.add, {"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_arithmetic_agrees_with_plain_tensors() -> None:
    draw = torch.Generator().manual_seed(0)
    flat_x, flat_y = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    x, y = ({"a": f[:2], "b": (f[2:].reshape(2, 2), "static")} for f in (flat_x, flat_y))

    def joined(value: Any) -> Tensor:
        return torch.cat([leaf.reshape(-1) for leaf in tree.leaves(value)])

    torch.testing.assert_close(joined(tree.scale(2.5, x)), 2.5 * flat_x)
    torch.testing.assert_close(joined(tree.subtract(x, y)), flat_x - flat_y)
    torch.testing.assert_close(joined(tree.axpy(-3.0, x, y)), flat_y - 3.0 * flat_x)
    torch.testing.assert_close(joined(tree.zeros_like(x)), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(joined(tree.add(x, y)), flat_x + flat_y)
    torch.testing.assert_close(tree.dot(x, y), flat_x @ flat_y)
    torch.testing.assert_close(tree.norm(x), flat_x.norm())
    for flag, expected in ((True, flat_x), (False, flat_y)):
        torch.testing.assert_close(joined(tree.where(torch.tensor(flag), x, y)), expected)


@given(vector_dicts, vector_dicts)
def test_add_unites_keys_and_counts_missing_ones_as_zero(
    left: dict[str, Tensor], right: dict[str, Tensor]
) -> None:
    zero = torch.zeros(2)
    expected = {k: left.get(k, zero) + right.get(k, zero) for k in sorted({*left, *right})}
    assert tree.same(tree.add(left, right), expected)
    assert tree.same(tree.add(None, right), right)


@given(st.lists(vector_dicts, min_size=1, max_size=4))
def test_accumulate_is_a_sum_that_never_writes_into_contributions(
    contributions: list[dict[str, Tensor]],
) -> None:
    nested = [
        {"flat": c, "deep": {key: (value,) for key, value in c.items()}} for c in contributions
    ]
    before = [tree.map(torch.clone, n) for n in nested]
    total: Any = None
    expected: Any = None
    for contribution in nested:
        total = tree.accumulate(total, contribution)
        expected = tree.add(expected, contribution)
    assert tree.same(total, expected)
    assert tree.same(tree.accumulate(None, *nested), expected)
    assert tree.same(tree.accumulate(tree.accumulate(None, nested[0]), *nested[1:]), expected)
    tree.map(Tensor.zero_, total)
    assert all(tree.same(a, b) for a, b in zip(nested, before, strict=True))


def test_accumulate_adds_in_place() -> None:
    total: Any = tree.accumulate(None, _message())
    memory = total.params["w"].data_ptr()
    total = tree.accumulate(total, _message())
    assert total.params["w"].data_ptr() == memory
    assert total.params["w"].tolist() == [2.0, 2.0]


def test_a_scaled_part_counts_so_many_times_and_is_not_written_into() -> None:
    first: dict[str, Any] = {
        "sum": tree.Scaled(2.0, {"a": torch.ones(2)}),
        "count": torch.tensor(1),
    }
    second: dict[str, Any] = {
        "sum": tree.Scaled(3.0, {"a": torch.ones(2), "b": torch.ones(1)}),
        "count": first["count"],
    }
    total: Any = tree.accumulate(None, first)
    memory = total["sum"]["a"].data_ptr()
    total = tree.accumulate(tree.accumulate(total, second), first)
    assert total["sum"]["a"].tolist() == [7.0, 7.0]
    assert total["sum"]["b"].tolist() == [3.0]
    assert total["count"] == 3
    assert total["sum"]["a"].data_ptr() == memory
    assert second["sum"].tree["b"].tolist() == [1.0]
    assert first["count"] == 1


def test_scales_within_scales_multiply() -> None:
    part = tree.Scaled(2.0, (tree.Scaled(3.0, torch.ones(1)), torch.ones(1)))
    total: Any = tree.accumulate(tree.accumulate(None, part), part)
    assert [leaf.item() for leaf in total] == [12.0, 4.0]


def test_many_at_once_are_added_in_their_order() -> None:
    parts = [tree.Scaled(f, {"w": torch.full((2,), v)}) for f, v in ((1.0, 1e8), (3.0, 1.0))]
    parts.append(tree.Scaled(1.0, {"w": torch.full((2,), -1e8), "b": torch.ones(1)}))
    one_by_one: Any = None
    for part in parts:
        one_by_one = tree.accumulate(one_by_one, part)
    together: Any = tree.accumulate(None, *parts)
    assert tree.same(together, one_by_one)
    assert together["w"][0] != 3.0  # in another order it would be
    assert tree.accumulate({"a": None}, {"a": None}, {"a": None}) == {"a": None}
    with pytest.raises(TypeError, match="static values differ"):
        tree.accumulate(None, (1,), (1,), (2,))


def test_a_sum_has_the_layout_of_its_first_summand() -> None:
    part = {"w": torch.randn(3, 2).T}
    for factor in (1.0, 2.0):
        total: Any = tree.accumulate(None, tree.Scaled(factor, part), part)
        assert total["w"].stride() == part["w"].stride()
        assert total["w"].data_ptr() != part["w"].data_ptr()
        torch.testing.assert_close(total["w"], (factor + 1) * part["w"])


def test_a_static_none_is_not_an_absent_tree() -> None:
    with pytest.raises(TypeError, match="static values differ in a sum"):
        tree.add({"a": None}, {"a": torch.ones(1)})
    with pytest.raises(TypeError, match="static values differ"):
        tree.add(("x",), ("y",))
    assert tree.add((None, 1), (None, 1)) == (None, 1)


def test_same_compares_bits_dtypes_shapes_and_statics() -> None:
    assert tree.same({"a": torch.tensor(float("nan"))}, {"a": torch.tensor(float("nan"))})
    assert not tree.same(torch.tensor(0.0), torch.tensor(-0.0))
    assert not tree.same(torch.ones(1), torch.ones(1).double())
    assert not tree.same(torch.ones(1, 2), torch.ones(2))
    assert not tree.same((torch.ones(1), 1), (torch.ones(1), 2))
    assert tree.same(torch.ones(2, 3).T, torch.ones(3, 2))
    assert tree.same(torch.zeros(0, dtype=torch.int64), torch.zeros(3).nonzero().reshape(-1))


def test_is_finite_looks_at_floats_only() -> None:
    assert tree.is_finite({"a": torch.ones(2), "b": torch.tensor([1])})
    assert not tree.is_finite({"a": torch.tensor([1.0, float("inf")])})


def test_to_meta_keeps_the_form() -> None:
    found = tree.to_meta(_message())
    assert found.params["w"].is_meta
    assert tree.structure(found) == tree.structure(_message())


def test_dataclasses_are_read_by_their_hints() -> None:
    for message in (_message(), Message({}, None, (), 2.0, 1, ("body", 0))):
        structure = tree.structure(message)
        assert tree_schema.from_json(tree_schema.to_json(structure), Message) == structure


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (torch.ones(1), Tensor),
        (torch.ones(1), Tensor | None),
        (None, None),
        (None, Optional[Tensor]),  # noqa: UP045  # the old spelling must work too
        ({"a": torch.ones(1)}, Mapping[str, Tensor]),
        ({"a": {"b": torch.ones(1)}}, dict[str, dict[str, Tensor]]),
        ((torch.ones(1), 3), tuple[Tensor, int]),
        ((), tuple[int, ...]),
        (3, float),
        (3, int | str),
        ("x", Literal["x", "y"]),
        (Box(torch.ones(1), {"a": torch.ones(2)}), Box[Tensor]),
        (Box(3, {}), Box[int] | None),
        (Box((1, 2), {}), Box[tuple[int, int]]),
        ({"a": torch.ones(1), "b": 2}, dict[str, Tensor] | dict[str, Tensor | int]),
    ],
)
def test_hints_that_fit(value: Any, hint: Any) -> None:
    structure = tree.structure(value)
    assert tree_schema.from_json(tree_schema.to_json(structure), hint) == structure


@pytest.mark.parametrize(
    ("value", "hint", "field"),
    [
        (torch.ones(1), int, r"\(root\)"),
        (torch.ones(1), Point, r"\(root\)"),
        (3, Tensor, r"\(root\)"),
        (3.0, int, r"\(root\)"),
        (True, int, r"\(root\)"),
        (True, float, r"\(root\)"),
        (True, Literal[1], r"\(root\)"),
        (1.0, Literal[1], r"\(root\)"),
        ("z", Literal["x", "y"], r"\(root\)"),
        ({"a": torch.ones(1), "b": 3, "c": torch.ones(1)}, dict[str, Tensor], "b"),
        ({"a": torch.ones(1)}, dict, r"\(root\)"),
        ((torch.ones(1),), tuple[Tensor, Tensor], r"\(root\)"),
        ((1, "x", 2), tuple[int, ...], "1"),
        (({"a": {"b": 3}}, 1), tuple[dict[str, dict[str, Tensor]], int] | None, r"0\.a\.b"),
        (Point(torch.ones(1), torch.ones(1)), Box[int], r"\(root\)"),
        (Point(torch.ones(1), torch.ones(1)), "Point", r"\(root\)"),
        (Box(torch.ones(1), {}), Box[int], "content"),
        (Box(torch.ones(1), {}), Box, "content"),
    ],
)
def test_hints_that_do_not_fit_name_the_field(value: Any, hint: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: description does not fit"):
        tree_schema.from_json(tree_schema.to_json(tree.structure(value)), hint)


@pytest.mark.parametrize(
    "node",
    [
        None, 3, [], "", "x", "**", "*Sparse", {}, {"s": []}, {"s": {}}, {"d": []}, {"u": {}},
        {"c": "Point", "f": []}, {"c": "Point", "f": {"x": "*"}}, {"c": 3, "f": {}}, {"q": 1},
        {"c": "Point", "f": {"x": "*", "y": "*", "z": "*"}},
    ],
)  # fmt: skip
def test_malformed_descriptions_are_value_errors(node: Any) -> None:
    for hint in (Point, Any, Tensor, dict[str, Tensor], tuple[int, ...], int | None):
        with pytest.raises(ValueError, match="does not fit"):
            tree_schema.from_json(node, hint)


def test_units_are_read_only_where_the_hint_names_them() -> None:
    low_rank = LowRank(torch.ones(2, 1), torch.ones(1, 2), (2, 2))
    text = tree_schema.to_json(tree.flatten(low_rank, units=UNITS)[1])
    for hint in (LowRank, Tensor | LowRank, Any):
        assert tree.kinds(tree_schema.from_json(text, hint, units=UNITS)) == [LowRank]
    for other in (Tensor, Sparse, int):
        with pytest.raises(ValueError, match="does not fit"):
            tree_schema.from_json(text, other, units=UNITS)


def test_paths_beyond_the_longest_name_are_refused() -> None:
    node: Any = "*"
    for _ in range(6):
        node = {"d": {"k" * 300: node}}
    with pytest.raises(ValueError, match="does not fit") as caught:
        tree_schema.from_json(node, Any)
    assert len(str(caught.value)) < 2 * tree_schema.LONGEST_NAME


def test_scaled_integers_become_real_numbers_whatever_comes_first() -> None:
    whole = {"a": torch.tensor([2, 4])}
    for factors in ((1.0, 0.5), (0.5, 1.0)):
        total: Any = None
        for factor in factors:
            total = tree.accumulate(total, tree.Scaled(factor, whole))
        assert total["a"].tolist() == [3.0, 6.0]


def test_scaled_trees_can_be_added_from_nothing() -> None:
    one, two = (tree.Scaled(f, {"a": torch.ones(2)}) for f in (2.0, 3.0))
    total: Any = tree.add(tree.add(None, one), two)
    assert total["a"].tolist() == [5.0, 5.0]


def test_a_sparse_leaf_is_added_to_a_transposed_one() -> None:
    first: Any = tree.accumulate(None, {"w": torch.ones(3, 2).T})
    sparse = Sparse(torch.tensor([1]), torch.ones(1), (2, 3))
    assert tree.accumulate(first, {"w": sparse})["w"].tolist() == [[1, 2, 1], [1, 1, 1]]
