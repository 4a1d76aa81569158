"""Letters as Flower records: wire bytes in an `Array` with a type of our own, nothing pickled."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from parsifl.core.errors import WireError
from parsifl.flower.message import Letter, from_text, to_text
from parsifl.flower.transport import Kind

STYPE = "parsifl.wire.v2"
MESSAGE_TYPES: dict[Kind, str] = {
    "hello": "query",
    "train": "train",
    "evaluate": "evaluate",
    "agree": "query.agree",
    "products": "query.products",
}
"""Flower's type of message for each kind of letter."""

_META, _PARTS, _TEXT = "parsifl", "parsifl.parts", "meta"


def pack(letter: Letter) -> RecordDict:
    """Turn a letter into records; large parts are sent in chunks by Flower."""
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
        for name, data in letter.parts.items()
    }
    records = RecordDict({_META: ConfigRecord({_TEXT: to_text(letter.meta)})})
    if arrays:
        records[_PARTS] = ArrayRecord(arrays)
    return records


def unpack(records: RecordDict) -> Letter:
    """Read a letter, trusting nothing."""
    config = records.get(_META)
    text = config.get(_TEXT) if isinstance(config, ConfigRecord) else None
    if not isinstance(text, str):
        raise WireError("meta: this is no message of parsifl")
    arrays = records.get(_PARTS, ArrayRecord())
    if not isinstance(arrays, ArrayRecord):
        raise WireError(f"parts: expected arrays, got {type(arrays).__name__}")
    parts: dict[str, bytes] = {}
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise WireError(f"{name}: serialised as {array.stype!r:.40} instead of {STYPE!r}")
        parts[name] = array.data
    return Letter(from_text(text), parts)
