"""Write structures of trees as JSON, and read them back against a type hint."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union

from torch import Tensor

from parsifl.core.tree import LEAF, STATIC_TYPES, Structure

LONGEST_NAME = 1000
"""Longest name of a leaf that `from_json` accepts."""


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
    """Read a structure that must match a type hint; classes come from the hint, never from data.

    The hint `Any` accepts leaves, statics, dicts and tuples, but no dataclasses.

    Raises
    ------
    ValueError
        If the description does not fit the hint; the text names the field.
    """
    return _Reader(units, path).read(node, hint, "")


class _Misfit(ValueError):
    """A description that does not match its hint; `depth` is the nesting level of the mismatch."""

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
        structure: Structure | None = None
        if isinstance(node, str):
            structure = self._read_leaf(node, hint)
        elif not isinstance(node, dict):
            pass
        elif node.keys() == {"s"}:
            structure = _read_static(node["s"], hint)
        elif node.keys() == {"d"} and isinstance(node["d"], dict):
            structure = self._read_dict(node["d"], hint, path)
        elif node.keys() == {"u"} and isinstance(node["u"], list):
            structure = self._read_tuple(node["u"], hint, path)
        elif node.keys() == {"c", "f"} and isinstance(node["f"], dict):
            structure = self._read_class(node, hint, path)
        if structure is None:
            raise self._misfit(hint, path)
        return structure

    def _read_leaf(self, node: str, hint: Any) -> Structure | None:
        if node == "*":
            tensor = isinstance(hint, type) and issubclass(hint, Tensor)
            return LEAF if hint is Any or tensor else None
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
    if name not in STATIC_TYPES:
        return None
    if typing.get_origin(hint) is typing.Literal:
        # True == 1 == 1.0: the type must agree too
        fits = any(type(v) is type(value) and v == value for v in typing.get_args(hint))
    else:
        # a float field may hold an int; it comes back as it was sent
        fits = hint in (STATIC_TYPES[name], Any) or (hint is float and name == "int")
    return ("static", name, value) if fits else None
