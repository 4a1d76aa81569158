"""List the values that leave a client, and reject privacy mods that cannot work."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import CapabilityError
from parsifl.core.leaves import LowRank, Sparse
from parsifl.flower.message import Envelope
from parsifl.flower.network_schema import REPLIES, FailureReply, Message

ANY = "*"
_SAFE_MODS = ("message_size_mod",)


def reply_paths(replies: Mapping[str, type[Message]] = REPLIES) -> dict[str, list[str]]:
    """Return the fields of every reply, by kind; `*` stands for any name or position."""
    kinds: Mapping[str, Any] = {**replies, "failure": FailureReply}
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
    """Walk a type: models and dataclasses by field, dicts and sequences by `*`."""
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


def check_mods(mods: Sequence[Any]) -> None:
    """Reject Flower mods that would have to read our payload.

    Flower's clipping, noise and secure-aggregation mods read dense NumPy arrays; our uploads are
    entropy-coded bytes, which they cannot read. Silently ignoring a mod would suggest protection
    that does not exist.
    """
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if name not in _SAFE_MODS:
            raise CapabilityError(
                f"the Flower mod {name} works on dense arrays and cannot read parsifl's messages; "
                f"it would protect nothing. Mods that may be used: {', '.join(_SAFE_MODS)}"
            )


def check_additive(method: AnyAlgorithm) -> None:
    """Raise CapabilityError unless the server needs only a sum over uploads.

    With secure aggregation, `contribute` runs on the client and only the sum is revealed.
    """
    if method.needs_every_upload():
        raise CapabilityError(
            f"{type(method).__name__} needs every single upload (it compares or decodes them); "
            "with secure aggregation the server sees only their sum"
        )
