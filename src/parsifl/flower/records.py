"""Messages as Flower records: wire bytes in an `Array` with a type of our own, no pickle."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from parsifl.core.errors import WireError
from parsifl.flower.message import Envelope, printable
from parsifl.flower.transport import Kind

STYPE = "parsifl.wire.v2"
MESSAGE_TYPES: dict[Kind, str] = {
    "hello": "query",
    "train": "train",
    "evaluate": "evaluate",
    "agree": "query.agree",
    "products": "query.products",
}
"""Flower's type for each kind of message."""

_META, _PARTS, _TEXT = "parsifl", "parsifl.parts", "meta"
_MOST_PARTS = 8


def pack(envelope: Envelope) -> RecordDict:
    """Turn a message into records; large parts are sent in chunks by Flower."""
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
        for name, data in envelope.parts.items()
    }
    records = RecordDict({_META: ConfigRecord({_TEXT: envelope.text})})
    if arrays:
        records[_PARTS] = ArrayRecord(arrays)
    return records


def unpack(records: RecordDict) -> Envelope:
    """Return a message, unread; raise WireError if the records are not one."""
    config = records.get(_META)
    text = config.get(_TEXT) if isinstance(config, ConfigRecord) else None
    if not isinstance(text, str):
        raise WireError("meta: not a Parsifl message")
    arrays = records.get(_PARTS, ArrayRecord())
    if not isinstance(arrays, ArrayRecord):
        raise WireError(f"parts: expected arrays, got {type(arrays).__name__}")
    parts: dict[str, bytes] = {}
    if len(arrays) > _MOST_PARTS:
        raise WireError(f"parts: {len(arrays)}, at most {_MOST_PARTS} are read")
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise WireError(printable(f"{name:.40}: {array.stype!r:.40} instead of {STYPE!r}"))
        parts[name] = array.data
    return Envelope(text, parts)
