"""What server and clients send one another: a few JSON values, and bytes of `parsifl.wire`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from parsifl.core.errors import WireError


@final
@dataclass(frozen=True)
class Letter:
    """One message.

    Attributes
    ----------
    meta
        JSON values: client, round, experiment, ...
    parts
        Encoded trees by name; a tree that is None is not sent.
    """

    meta: Mapping[str, Any]
    parts: Mapping[str, bytes] = field(default_factory=dict)

    def get(self, name: str, kind: type[Any]) -> Any:
        """Return a meta value of a type; raise WireError if it is missing or of another type."""
        value = self.meta.get(name)
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind):
            raise WireError(f"{name}: expected {kind.__name__}, got {_short(value)}")
        return value


def to_text(meta: Mapping[str, Any]) -> str:
    """Write meta values as JSON."""
    return json.dumps(dict(meta))


def from_text(text: str) -> dict[str, Any]:
    """Read meta values; raise WireError for anything that is not a JSON object."""
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"meta: not valid JSON ({error})") from None
    if not isinstance(meta, dict):
        raise WireError(f"meta: expected an object, got {_short(meta)}")
    return meta


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
