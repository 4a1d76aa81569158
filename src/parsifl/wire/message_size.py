"""Compare a message with a template, its dense size and its information content."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parsifl.core import tree, tree_schema
from parsifl.core.config import Precision
from parsifl.core.errors import WireError
from parsifl.core.leaves import UNITS, LowRank, Sparse
from parsifl.wire import quantization, range_coder


def check(message: Any, template: Any) -> None:
    """Raise `WireError`, naming the field, unless a message matches its template.

    Names, kinds of leaves, shapes, dtypes and statics must agree. Values, the number of
    non-zeros and the rank of a `LowRank` may differ. The template may consist of `meta` tensors.

    >>> check({"w": torch.ones(2)}, {"w": torch.ones(2, device="meta")})
    """
    leaves, structure = tree.flatten(message, units=UNITS)
    wanted, expected = tree.flatten(template, units=UNITS)
    if structure != expected:
        raise WireError(
            _difference(tree_schema.to_json(structure), tree_schema.to_json(expected), "")
        )
    for leaf, target, name in zip(leaves, wanted, tree.names(structure), strict=True):
        form, right = _form(leaf), _form(target)
        if form != right:
            raise WireError(f"{name}: {form} instead of {right}")


def _form(leaf: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if isinstance(leaf, LowRank):
        return leaf.left.dtype, tuple(leaf.shape)
    return (leaf.value if isinstance(leaf, Sparse) else leaf).dtype, tuple(leaf.shape)


def _difference(structure: Any, expected: Any, path: str) -> str:
    """Return the first difference between two descriptions, which must differ."""
    name = path.removeprefix(".") or "(root)"
    if (
        isinstance(structure, str)
        or isinstance(expected, str)
        or structure.keys() != expected.keys()
    ):
        return f"{name}: {_kind(structure)} instead of {_kind(expected)}"
    if "s" in structure:
        return f"{name}: {structure['s']!r} instead of {expected['s']!r}"
    if structure.get("c") != expected.get("c"):
        return f"{name}: class {structure['c']} instead of {expected['c']}"
    ours, theirs = _children(structure), _children(expected)
    for key in [*theirs, *ours]:
        if key not in ours:
            return f"{path}.{key}".removeprefix(".") + ": missing"
        if key not in theirs:
            return f"{path}.{key}".removeprefix(".") + ": not expected"
        if ours[key] != theirs[key] or repr(ours[key]) != repr(theirs[key]):
            return _difference(ours[key], theirs[key], f"{path}.{key}")
    return f"{name}: another class of the same name"


def _children(node: dict[str, Any]) -> dict[str, Any]:
    if "u" in node:
        return {str(position): part for position, part in enumerate(node["u"])}
    children: dict[str, Any] = node["d"] if "d" in node else node["f"]
    return children


def _kind(node: Any) -> str:
    if isinstance(node, str):
        return f"a {node[1:] or 'tensor'}"
    words = {"s": "the static", "d": "a dict", "u": "a tuple", "c": "a dataclass"}
    word = next(text for key, text in words.items() if key in node)
    return f"{word} {node['s']!r}" if "s" in node else word


class MessageStats(NamedTuple):
    """The size of a message.

    Attributes
    ----------
    bytes
        The encoded length.
    dense, entropy
        See `dense_size` and `entropy_size`.
    values
        The number of real values; positions of non-zeros do not count.
    """

    bytes: int = 0
    dense: int = 0
    entropy: float = 0.0
    values: int = 0


def dense_size(message: Any) -> int:
    """Return the bytes of all tensors when sent dense, at their own dtypes (bool: one bit).

    >>> dense_size({"w": torch.zeros(10, 10)})
    400
    """
    return dense_leaves(tree.flatten(message, units=UNITS)[0])


def dense_leaves(leaves: Iterable[Any]) -> int:
    """Return the `dense_size` of leaves."""
    forms = (_form(leaf) for leaf in leaves)
    return sum(_dense(dtype, math.prod(shape)) for dtype, shape in forms)


def _parts(leaves: Iterable[Any]) -> Iterator[Tensor | Sparse]:
    for leaf in leaves:
        yield from (leaf.left, leaf.right) if isinstance(leaf, LowRank) else (leaf,)


def entropy_size(message: Any, precision: Precision = "exact") -> float:
    """Return the information in a message: log2 C(d, k) / 8 for supports, plus the values.

    A tensor counts as dense if that is less, a `LowRank` as its factors; names and shapes are
    known to both sides. Values have the width that `precision` gives them.

    >>> entropy_size({"w": torch.zeros(10, 10)})
    0.0
    """
    leaves = tree.flatten(message, units=UNITS)[0]
    return sum(_entropy(part, precision) for part in _parts(leaves))


def _entropy(leaf: Tensor | Sparse, precision: Precision) -> float:
    entries = math.prod(leaf.shape)
    if isinstance(leaf, Sparse):
        dtype, count = leaf.value.dtype, leaf.index.numel()
    else:
        dtype, count = leaf.dtype, quantization.count_nonzero(leaf)
    narrow = quantization.stored(dtype, entries, precision)
    item = 0 if narrow == torch.bool else narrow.itemsize
    return min(range_coder.information(entries, count, item), _dense(narrow, entries))


def _dense(dtype: torch.dtype, entries: int) -> int:
    return -(-entries // 8) if dtype == torch.bool else entries * dtype.itemsize
