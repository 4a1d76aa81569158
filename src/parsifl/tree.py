"""Trees of tensors: the only module that knows how states and messages are put together.

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
"""Hashable; equal if and only if two trees have the same shape of nesting and the same statics."""

LEAF: Structure = ("leaf",)
STATIC_TYPES: dict[str, type] = {
    "bool": bool, "int": int, "float": float, "str": str, "NoneType": type(None),
}  # fmt: skip
_STATIC_NAMES = {kind: name for name, kind in STATIC_TYPES.items()}


class Opaque:
    """Base of leaves that are no strided tensors: their client always runs in the loop."""


def flatten(tree: Any, units: tuple[type, ...] = ()) -> tuple[list[Any], Structure]:
    """Split a tree into its leaves (dicts by sorted key) and its structure.

    Instances of `units` are kept whole, as leaves; the structure remembers their class.

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
    if kind in _STATIC_NAMES and kind not in units:
        return ("static", _STATIC_NAMES[kind], tree)
    if isinstance(tree, (Tensor, Opaque)):
        leaves.append(tree)
        return LEAF
    if units and isinstance(tree, units):
        leaves.append(tree)
        return ("leaf", kind)
    if kind is dict or isinstance(tree, Mapping):
        return ("dict", tuple([(key, _flatten(tree[key], leaves, units)) for key in sorted(tree)]))
    if isinstance(tree, tuple):
        return ("tuple", tuple([_flatten(item, leaves, units) for item in tree]))
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = [
            (name, _flatten(getattr(tree, name), leaves, units)) for name in _field_names(kind)
        ]
        return ("class", kind, tuple(parts))
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
    """Choose leaf by leaf by a boolean scalar tensor."""
    return map(lambda a, b: torch.where(condition, a, b), tree, other)


def dot(left: Any, right: Any) -> Tensor:
    """Return the inner product over all leaves."""
    products = leaves(map(lambda a, b: (a * b).sum(), left, right))
    return torch.stack(products).sum()


def norm(tree: Any) -> Tensor:
    """Return the Euclidean norm over all leaves."""
    return dot(tree, tree).sqrt()


def add(left: T | None, right: T) -> T:
    """Add two trees; dict keys are united, a missing key counts as zero.

    >>> add({"a": torch.ones(1)}, {"b": torch.ones(1)})
    {'a': tensor([1.]), 'b': tensor([1.])}
    """
    total: T = _settled(right) if left is None else _combine(_settled(left), right, torch.add)
    return total


def _settled(tree: Any) -> Any:
    """Return a tree of tensors; a contribution with parts that are not is copied."""
    parts, _ = flatten(tree, units=(Scaled, Addend))
    return _copied(tree) if any(isinstance(part, (Scaled, Addend)) for part in parts) else tree


@dataclass(frozen=True)
class Scaled:
    """A part of a contribution that counts `factor` times, without a product in memory.

    >>> accumulate({"a": torch.ones(1)}, Scaled(2.0, {"a": torch.ones(1)}))
    {'a': tensor([3.])}
    """

    factor: float
    tree: Any


class Addend(ABC):
    """A leaf of a contribution that is added to a tensor without becoming one."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the tensor that it stands for, in memory of its own."""

    @abstractmethod
    def add_into(self, total: Tensor, factor: float) -> Tensor:
        """Return total + factor * this, in the memory of `total`."""


def accumulate(total: T | None, contribution: Any) -> T:
    """Add into `total` in place; `total` owns its memory, so contributions may alias messages.

    A contribution is like the total, but parts of it may be `Scaled`, and leaves an `Addend`.
    """
    alone = total is None
    grown: T = _copied(contribution) if alone else _combine(total, contribution, Tensor.add_)
    return grown


def _copied(tree: Any, factor: float | None = None) -> Any:
    """Return factor * tree (None: as it is) in memory of its own, its entries in order."""
    found, form = flatten(tree, units=(Scaled, Addend))
    own = [
        _copied(leaf.tree, leaf.factor if factor is None else factor * leaf.factor)
        if isinstance(leaf, Scaled)
        else _product(factor, leaf.dense() if isinstance(leaf, Addend) else leaf)
        for leaf in found
    ]
    return unflatten(own, form)


def _product(factor: float | None, leaf: Tensor) -> Tensor:
    if factor is None or (factor == 1 and leaf.is_floating_point()):
        return leaf.clone(memory_format=torch.contiguous_format)
    return (factor * leaf).contiguous()


def _combine(
    left: Any, right: Any, plus: Callable[..., Tensor], factor: float | None = None
) -> Any:
    """Return left + factor * right (None: as it is)."""
    if isinstance(right, Scaled):
        part = right.factor if factor is None else factor * right.factor
        return _combine(left, right.tree, plus, part)
    if isinstance(right, Addend):
        own = left if plus is Tensor.add_ else left.clone(memory_format=torch.contiguous_format)
        return right.add_into(own, 1 if factor is None else factor)
    if isinstance(left, Tensor):
        if factor is None or not right.is_floating_point():
            return plus(left, right if factor is None else factor * right)
        return plus(left, right, alpha=factor)
    if isinstance(left, dict):
        if left.keys() == right.keys():
            return {key: _combine(left[key], right[key], plus, factor) for key in sorted(left)}
        both = {key: _combine(left[key], right[key], plus, factor) for key in left if key in right}
        # a later sum may be in place: what only `right` has must not alias it
        added = {key: _copied(right[key], factor) for key in right if key not in left}
        united = {**left, **added, **both}
        return {key: united[key] for key in sorted(united)}
    if isinstance(left, tuple):
        return tuple(_combine(a, b, plus, factor) for a, b in zip(left, right, strict=True))
    if is_dataclass(left) and not isinstance(left, type):
        parts = {
            name: _combine(getattr(left, name), getattr(right, name), plus, factor)
            for name in _field_names(type(left))
        }
        return type(left)(**parts)
    if left != right:
        raise TypeError(f"static values differ in a sum: {left!r} against {right!r}")
    return left


def is_finite(tree: Any) -> bool:
    """Tell whether every floating-point leaf holds finite numbers only."""
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in leaves(tree)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def same(left: Any, right: Any) -> bool:
    """Tell whether two trees agree in structure, dtypes, shapes and every bit."""
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
    """Replace tensors by `meta` tensors of the same shape and dtype: a template without data."""
    return map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, tree)
