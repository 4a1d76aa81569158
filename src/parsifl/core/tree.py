"""Trees of tensors: the only module that knows how states and messages are structured.

A tree is a tensor, a dict with string keys, a tuple, or a frozen dataclass of trees. Every other
value in it (int, float, str, bool, None) is *static*: part of the structure, compared by value,
never batched. An `Opaque` object (a sparse design matrix, say) is a leaf that cannot be batched.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Static = bool | int | float | str | None
Structure = tuple[Any, ...]
"""Hashable; equal if and only if two trees have the same nesting and the same statics."""

LEAF: Structure = ("leaf",)
STATIC_TYPES: dict[str, type] = {
    "bool": bool, "int": int, "float": float, "str": str, "NoneType": type(None),
}  # fmt: skip
_STATIC_NAMES = {kind: name for name, kind in STATIC_TYPES.items()}


class Opaque:
    """Base of leaves that are not strided tensors: their clients always run in the loop."""


def flatten(tree: Any, units: tuple[type, ...] = ()) -> tuple[list[Any], Structure]:
    """Split a tree into its leaves (dicts by sorted key) and its structure.

    Instances of `units` are leaves; the structure records their class.

    >>> leaves, structure = flatten({"b": torch.zeros(2), "a": (torch.ones(1), 3)})
    >>> [leaf.tolist() for leaf in leaves]
    [[1.0], [0.0, 0.0]]
    >>> unflatten(leaves, structure)["a"][1]
    3
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, units)


def _flatten(tree: Any, leaves: list[Any], units: tuple[type, ...]) -> Structure:
    kind: Any = type(tree)
    if kind is Tensor:  # first, since most are
        leaves.append(tree)
        return LEAF
    role = _role(kind, units)
    if role == "static":
        return ("static", _STATIC_NAMES[kind], tree)
    if role == "dict":
        return ("dict", tuple([(key, _flatten(tree[key], leaves, units)) for key in sorted(tree)]))
    if role == "class":
        parts = [
            (name, _flatten(getattr(tree, name), leaves, units)) for name in _field_names(kind)
        ]
        return ("class", kind, tuple(parts))
    if role == "tuple":
        return ("tuple", tuple([_flatten(item, leaves, units) for item in tree]))
    leaves.append(tree)
    return ("leaf", kind) if role == "unit" else LEAF


@functools.cache
def _role(kind: type, units: tuple[type, ...]) -> str:
    """Return the role of objects of a class in a tree."""
    if kind in _STATIC_NAMES and kind not in units:
        return "static"
    if issubclass(kind, (Tensor, Opaque)):
        return "leaf"
    if issubclass(kind, units):
        return "unit"
    if issubclass(kind, Mapping):
        return "dict"
    if issubclass(kind, tuple):
        return "tuple"
    if is_dataclass(kind):
        return "class"
    raise TypeError(
        f"{kind.__qualname__} cannot be part of a tree; expected tensors, dicts, tuples, "
        "frozen dataclasses, or int, float, str, bool, None"
    )


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    """Put leaves back into a structure: the inverse of `flatten`."""
    return _unflatten(iter(leaves), structure)


def _unflatten(leaves: Iterator[Any], structure: Structure) -> Any:
    kind = structure[0]
    if kind == "leaf":
        return next(leaves)
    if kind == "static":
        return structure[2]
    if kind == "dict":
        return {key: _unflatten(leaves, part) for key, part in structure[1]}
    if kind == "tuple":
        return tuple(_unflatten(leaves, part) for part in structure[1])
    return structure[1](**{name: _unflatten(leaves, part) for name, part in structure[2]})


def structure(tree: Any) -> Structure:
    """Return the structure of a tree."""
    return flatten(tree)[1]


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree in the order of `flatten`."""
    return flatten(tree)[0]


def names(structure: Structure, prefix: str = "") -> list[str]:
    """Return a dotted name for every leaf, in the order of `flatten`.

    >>> names(structure({"layer": {"weight": torch.zeros(1)}}))
    ['layer.weight']
    """
    return [name for name, _ in _walk(structure, prefix)]


def kinds(structure: Structure) -> list[type]:
    """Return the class of every leaf: `Tensor`, or the unit that `flatten` kept whole."""
    return [kind for _, kind in _walk(structure, "")]


def _walk(structure: Structure, prefix: str) -> Iterator[tuple[str, type]]:
    kind = structure[0]
    if kind == "leaf":
        yield prefix or "(root)", structure[1] if len(structure) > 1 else Tensor
    elif kind != "static":
        parts = enumerate(structure[1]) if kind == "tuple" else structure[-1]
        dot = f"{prefix}." if prefix else ""
        for key, part in parts:
            yield from _walk(part, f"{dot}{key}")


def map(function: Callable[..., Any], tree: T, *others: Any) -> T:
    """Apply a function to the leaves of trees of the same structure."""
    first, form = flatten(tree)
    columns = [first]
    for other in others:
        more, other_form = flatten(other)
        if other_form != form:
            raise TypeError(f"trees differ in structure: {form} against {other_form}")
        columns.append(more)
    result: T = unflatten([function(*column) for column in zip(*columns, strict=True)], form)
    return result


def copy(tree: T) -> T:
    """Return a tree of contiguous copies; equally aligned memory gives bit-identical results."""
    return map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def zeros_like(tree: T) -> T:
    """Return a tree of zeros."""
    return map(torch.zeros_like, tree)


def scale(factor: float | Tensor, tree: T) -> T:
    """Return factor * tree."""
    return map(lambda leaf: factor * leaf, tree)


def subtract(left: T, right: T) -> T:
    """Return left - right."""
    return map(torch.sub, left, right)


def axpy(factor: float | Tensor, x: T, y: T) -> T:
    """Return factor * x + y."""
    return map(lambda a, b: factor * a + b, x, y)


def where(condition: Tensor, tree: T, other: T) -> T:
    """Select leaf by leaf with a boolean scalar tensor."""
    return map(lambda a, b: torch.where(condition, a, b), tree, other)


def dot(left: Any, right: Any) -> Tensor:
    """Return the inner product over all leaves."""
    products = leaves(map(lambda a, b: (a * b).sum(), left, right))
    return torch.stack(products).sum()


def norm(tree: Any) -> Tensor:
    """Return the Euclidean norm over all leaves."""
    return dot(tree, tree).sqrt()


def add(left: T | None, right: T) -> T:
    """Add two trees over the union of their dict keys; a missing key counts as zero.

    >>> add({"a": torch.ones(1)}, {"b": torch.ones(1)})
    {'a': tensor([1.]), 'b': tensor([1.])}
    """
    total: T = accumulate(None if left is None else _copied(None, left), right)
    return total


@dataclass(frozen=True)
class Scaled:
    """A part of a contribution with a factor that is applied when it is added.

    >>> accumulate({"a": torch.ones(1)}, Scaled(2.0, {"a": torch.ones(1)}))
    {'a': tensor([3.])}
    """

    factor: float
    tree: Any


class Addend(ABC):
    """A leaf of a contribution that is added to a tensor without a dense copy."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the dense tensor in newly allocated memory."""

    @abstractmethod
    def add_into(self, total: Tensor, factor: float) -> None:
        """Add factor * this to the total, in place."""


_Part = tuple[float | None, Any]
"""A factor (None: no scaling), and the tree that it multiplies."""


def accumulate(total: T | None, *contributions: Any) -> T:
    """Add into `total` in place; `total` owns its memory, so contributions may alias messages.

    Contributions have the structure of the total, but parts may be `Scaled` and leaves `Addend`.
    They are added in order. Passing several at once saves time and does not change the result.

    >>> accumulate(None, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    {'a': tensor([2.])}
    """
    parts: list[_Part] = [(None, contribution) for contribution in contributions]
    started: Any = total
    if total is None:
        started, parts = _copied(*parts[0]), parts[1:]
    _add_into(started, parts)
    result: T = started
    return result


def _copied(factor: float | None, tree: Any) -> Any:
    """Return factor * tree in newly allocated memory."""
    leaves, form = flatten(tree, units=(Scaled, Addend))
    copies = [
        _copied(*_unscaled(factor, leaf))
        if isinstance(leaf, Scaled)
        else _product(factor, leaf.dense() if isinstance(leaf, Addend) else leaf)
        for leaf in leaves
    ]
    return unflatten(copies, form)


def _unscaled(factor: float | None, tree: Any) -> _Part:
    while type(tree) is Scaled:
        factor, tree = tree.factor if factor is None else factor * tree.factor, tree.tree
    return factor, tree


def _product(factor: float | None, leaf: Tensor) -> Tensor:
    """Return it in the layout of the leaf, which later summands are likely to share."""
    if factor is None or (factor == 1 and leaf.is_floating_point()):
        return leaf.clone()
    return factor * leaf


def _add_into(total: Any, parts: Sequence[_Part]) -> None:
    """Add the parts in place, leaf by leaf, in the order given."""
    parts = [_unscaled(*part) for part in parts]
    if isinstance(total, Tensor):
        _add_into_leaf(total, parts)
    elif isinstance(total, dict):
        _add_into_dict(total, parts)
    elif isinstance(total, tuple):
        for leaf_total, *column in zip(total, *(part for _, part in parts), strict=True):
            _add_into(
                leaf_total,
                [(factor, leaf) for (factor, _), leaf in zip(parts, column, strict=True)],
            )
    elif is_dataclass(total) and not isinstance(total, type):
        for name in _field_names(type(total)):
            _add_into(getattr(total, name), [(f, getattr(part, name)) for f, part in parts])
    else:
        for _, part in parts:
            if total != part:
                raise TypeError(f"static values differ in a sum: {total!r} against {part!r}")


def _add_into_dict(total: dict[str, Any], parts: Sequence[_Part]) -> None:
    columns: dict[str, list[_Part]] = {}
    for factor, part in parts:
        for key, entry in part.items():
            columns.setdefault(key, []).append((factor, entry))
    for key, column in columns.items():
        if key in total:
            _add_into(total[key], column)
        else:
            total[key] = _copied(*column[0])
            _add_into(total[key], column[1:])


def _add_into_leaf(total: Tensor, parts: Sequence[_Part]) -> None:
    for factor, part in parts:
        if isinstance(part, Addend):
            part.add_into(total, 1 if factor is None else factor)
        elif factor is None:
            total.add_(part)
        elif part.is_floating_point():
            total.add_(part, alpha=factor)
        else:
            total.add_(factor * part)


def is_finite(tree: Any) -> bool:
    """Return whether all floating-point leaves are finite."""
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in leaves(tree)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def same(left: Any, right: Any) -> bool:
    """Return whether two trees agree in structure, dtypes, shapes and every bit."""
    ours, form = flatten(left)
    theirs, other_form = flatten(right)
    return form == other_form and all(
        a.dtype == b.dtype and a.shape == b.shape and _bits_equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _bits_equal(left: Tensor, right: Tensor) -> bool:
    if left.numel() == 0:
        return True  # an empty tensor may have strides that forbid the view
    a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(a, b)


def to_meta(tree: T) -> T:
    """Replace tensors by `meta` tensors of the same shape and dtype."""
    return map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)
