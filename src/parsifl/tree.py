"""Trees of tensors: the only module that knows how states and messages are put together.

A tree is a tensor, a dict with string keys, a tuple, or a frozen dataclass of trees. Every other
value in it (int, float, str, bool, None) is *static*: part of the structure, compared by value,
never batched. An `Opaque` object (a sparse design matrix, say) is a leaf that cannot be batched.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, Union

import torch
from torch import Tensor

T = TypeVar("T")
Static = bool | int | float | str | None
Structure = tuple[Any, ...]
"""Hashable; equal if and only if two trees have the same shape of nesting and the same statics."""

LONGEST_NAME = 1000
"""Most characters in the name of a leaf that `from_json` reads."""

_LEAF: Structure = ("leaf",)
_STATIC_TYPES: dict[str, type] = {
    "bool": bool, "int": int, "float": float, "str": str, "NoneType": type(None),
}  # fmt: skip


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
    if isinstance(tree, (Tensor, Opaque)):
        leaves.append(tree)
        return _LEAF
    if isinstance(tree, units):
        leaves.append(tree)
        return ("leaf", type(tree))
    if isinstance(tree, Mapping):
        return ("dict", tuple((key, _flatten(tree[key], leaves, units)) for key in sorted(tree)))
    if isinstance(tree, tuple):
        return ("tuple", tuple(_flatten(item, leaves, units) for item in tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = ((f.name, _flatten(getattr(tree, f.name), leaves, units)) for f in fields(tree))
        return ("class", type(tree), tuple(parts))
    name = type(tree).__name__
    if name in _STATIC_TYPES:
        return ("static", name, tree)
    raise TypeError(
        f"{type(tree).__qualname__} cannot be part of a tree; expected tensors, dicts, tuples, "
        "frozen dataclasses, or int, float, str, bool, None"
    )


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
    total: T = right if left is None else _combine(left, right, torch.add)
    return total


def accumulate(total: T | None, contribution: T) -> T:
    """Add into `total` in place; `total` owns its memory, so contributions may alias messages."""
    if total is None:
        return map(torch.clone, contribution)
    grown: T = _combine(total, contribution, Tensor.add_)
    return grown


def _combine(left: Any, right: Any, plus: Callable[[Tensor, Tensor], Tensor]) -> Any:
    if isinstance(left, Tensor):
        return plus(left, right)
    if isinstance(left, dict):
        both = {key: _combine(left[key], right[key], plus) for key in left if key in right}
        # a later sum may be in place: what only `right` has must not alias it
        added = {key: map(torch.clone, right[key]) for key in right if key not in left}
        united = {**left, **added, **both}
        return {key: united[key] for key in sorted(united)}
    if isinstance(left, tuple):
        return tuple(_combine(a, b, plus) for a, b in zip(left, right, strict=True))
    if is_dataclass(left) and not isinstance(left, type):
        changes = {
            f.name: _combine(getattr(left, f.name), getattr(right, f.name), plus)
            for f in fields(left)
        }
        return replace(left, **changes)
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


def to_json(structure: Structure) -> Any:
    """Describe a structure in JSON; `from_json` needs the type hint to read it back."""
    kind = structure[0]
    if kind == "leaf":
        return "*" + "".join(unit.__name__ for unit in structure[1:])
    if kind == "static":
        value = structure[2]
        # 0.0 and -0.0 are equal as statics, so they share one description
        return {"s": value + 0.0 if isinstance(value, float) else value}
    if kind == "dict":
        return {"d": {key: to_json(part) for key, part in structure[1]}}
    if kind == "tuple":
        return {"u": [to_json(part) for part in structure[1]]}
    return {"c": structure[1].__name__, "f": {name: to_json(p) for name, p in structure[2]}}


def from_json(
    node: Any, hint: Any, path: str = "(root)", units: tuple[type, ...] = ()
) -> Structure:
    """Read a structure that must fit a type hint; classes come from the hint, never from data.

    The hint `Any` takes leaves, statics, dicts and tuples, but no dataclass.

    Raises
    ------
    ValueError
        If the description does not fit the hint; the text names the field.
    """
    return _Reader(units, path).read(node, hint, "")


class _Misfit(ValueError):
    """A description that does not fit its hint; `depth` tells how far the reading came."""

    def __init__(self, text: str, depth: int) -> None:
        super().__init__(text)
        self.depth = depth


class _Reader:
    """Matches a JSON description against a type hint."""

    def __init__(self, units: tuple[type, ...], root: str) -> None:
        self.units = units
        self.root = root

    def read(self, node: Any, hint: Any, path: str) -> Structure:
        if len(path) > LONGEST_NAME + 1:
            raise self._misfit(hint, path)
        misfits: list[_Misfit] = []
        for option in _options(hint):
            try:
                return self._read_one(node, option, path)
            except _Misfit as misfit:
                misfits.append(misfit)
        raise max(misfits, key=lambda misfit: misfit.depth)

    def _misfit(self, hint: Any, path: str) -> _Misfit:
        name = path.removeprefix(".")[:LONGEST_NAME] or self.root
        return _Misfit(f"{name}: description does not fit the type {hint}", path.count("."))

    def _read_one(self, node: Any, hint: Any, path: str) -> Structure:
        found: Structure | None = None
        if isinstance(node, str):
            found = self._read_leaf(node, hint)
        elif not isinstance(node, dict):
            pass
        elif node.keys() == {"s"}:
            found = _read_static(node["s"], hint)
        elif node.keys() == {"d"} and isinstance(node["d"], dict):
            found = self._read_dict(node["d"], hint, path)
        elif node.keys() == {"u"} and isinstance(node["u"], list):
            found = self._read_tuple(node["u"], hint, path)
        elif node.keys() == {"c", "f"} and isinstance(node["f"], dict):
            found = self._read_class(node, hint, path)
        if found is None:
            raise self._misfit(hint, path)
        return found

    def _read_leaf(self, node: str, hint: Any) -> Structure | None:
        if node == "*":
            tensor = isinstance(hint, type) and issubclass(hint, Tensor)
            return _LEAF if hint is Any or tensor else None
        for unit in self.units:
            if node == f"*{unit.__name__}" and hint in (unit, Any):
                return ("leaf", unit)
        return None

    def _read_dict(self, node: dict[str, Any], hint: Any, path: str) -> Structure | None:
        if hint is not Any and typing.get_origin(hint) not in (dict, Mapping):
            return None
        value = Any if hint is Any else typing.get_args(hint)[1]
        parts = ((key, self.read(node[key], value, f"{path}.{key}")) for key in sorted(node))
        return ("dict", tuple(parts))

    def _read_tuple(self, node: list[Any], hint: Any, path: str) -> Structure | None:
        if hint is not Any and typing.get_origin(hint) is not tuple:
            return None
        hints = (Any, Ellipsis) if hint is Any else typing.get_args(hint)
        if len(hints) == 2 and hints[1] is Ellipsis:
            hints = (hints[0],) * len(node)
        if len(hints) != len(node):
            return None
        pairs = enumerate(zip(node, hints, strict=True))
        return ("tuple", tuple(self.read(item, h, f"{path}.{i}") for i, (item, h) in pairs))

    def _read_class(self, node: dict[str, Any], hint: Any, path: str) -> Structure | None:
        kind = typing.get_origin(hint) or hint
        if not is_dataclass(kind) or not isinstance(kind, type) or kind.__name__ != node["c"]:
            return None
        hints = _field_hints(hint)
        if node["f"].keys() != hints.keys():
            return None
        parts = ((n, self.read(node["f"][n], h, f"{path}.{n}")) for n, h in hints.items())
        return ("class", kind, tuple(parts))


@functools.lru_cache(maxsize=256)
def _field_hints(hint: Any) -> dict[str, Any]:
    """Return the type of every field; in `Pair[Tensor]` type variables are filled in."""
    kind = typing.get_origin(hint) or hint
    known = typing.get_type_hints(kind)
    bound = dict(zip(getattr(kind, "__parameters__", ()), typing.get_args(hint), strict=False))
    return {f.name: _substitute(known[f.name], bound) for f in fields(kind)}


def _substitute(hint: Any, bound: dict[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return bound.get(hint, hint)
    free = getattr(hint, "__parameters__", ())
    return hint[tuple(bound.get(variable, variable) for variable in free)] if free else hint


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (type(None),) if hint is None else (hint,)


def _read_static(value: Any, hint: Any) -> Structure | None:
    name = type(value).__name__
    if name not in _STATIC_TYPES:
        return None
    if typing.get_origin(hint) is typing.Literal:
        # True == 1 == 1.0: the type must agree too
        fits = any(type(v) is type(value) and v == value for v in typing.get_args(hint))
    else:
        # a float field may hold an int; it comes back as it was sent
        fits = hint in (_STATIC_TYPES[name], Any) or (hint is float and name == "int")
    return ("static", name, value) if fits else None
