"""Every number that can leave a client, read off the types of the messages.

`docs/reference/disclosure.md` is written from this, and recorded traffic is tested against it.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.leaves import LowRank, Sparse
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import REPLIES, FailureReply

ANY = "*"


def reply_paths() -> dict[str, list[str]]:
    """Return the fields of every reply, by kind; `*` stands for any name or position."""
    kinds: Mapping[str, Any] = {**REPLIES, "failure": FailureReply}
    return {
        kind: sorted({*_paths(reply), *(f"part {name}" for name in reply.allowed)})
        for kind, reply in kinds.items()
    }


def upload_paths(algorithm: AnyAlgorithm) -> list[str]:
    """Return the tensors of an algorithm's upload, with their leaf types."""
    return sorted(set(_paths(algorithm.tree_types().uplink)))


def sent_paths(envelope: Envelope) -> set[str]:
    """Return the fields of a recorded reply, in the form of `reply_paths`."""
    return {*_values(json.loads(envelope.text)), *(f"part {name}" for name in envelope.parts)}


def covered(path: str, declared: list[str]) -> bool:
    """Return whether a recorded field is one of the declared ones.

    >>> covered("metrics.loss", ["metrics.*"])
    True
    """
    steps = path.split(".")
    return any(_matches(steps, known.split(".")) for known in declared)


def _matches(steps: list[str], known: list[str]) -> bool:
    same = len(steps) == len(known)
    return same and all(k in (ANY, s) for s, k in zip(steps, known, strict=True))


def _values(value: Any, before: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            step = str(name).replace(".", "_")
            yield from _values(inner, f"{before}.{step}" if before else step)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, f"{before}.{ANY}")
    else:
        yield before


def _paths(hint: Any, before: str = "") -> Iterator[str]:
    """Walk over a type: models and dataclasses by field, dicts and sequences by `*`."""
    inner = _inner(hint)
    if inner is None:
        yield before or "(the upload itself)"
        return
    for step, kind in inner:
        yield from _paths(kind, f"{before}.{step}" if before and step else before or step)


def _inner(hint: Any) -> list[tuple[str, Any]] | None:
    """Return the steps into a type with their types; None for a value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Tensor, Sparse, LowRank) or origin is typing.Literal:
        return None
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [(name, field.annotation) for name, field in hint.model_fields.items()]
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return [(field.name, hints[field.name]) for field in dataclasses.fields(hint)]
    if origin is typing.Annotated:
        return [("", arguments[0])]
    if origin in (dict, Mapping):
        return [(ANY, arguments[1])]
    if origin in (list, tuple):
        return [(ANY, kind) for kind in arguments if kind is not Ellipsis]
    if arguments:  # a union
        return [("", kind) for kind in arguments if kind is not type(None)]
    return [] if hint is type(None) else None
