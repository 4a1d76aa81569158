"""Messages as Flower records: bytes without pickle.

Flower stores and fetches every object of a message by itself. A small message is therefore one
`ConfigRecord`. The parts of a large one are `Array`s with a type of our own, which Flower sends in
chunks.
"""

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

_META, _PARTS = "parsifl", "parsifl.parts"
_TEXT, _PART, _CARRIED = "meta", "part/", "carried/"
_MOST_PARTS = 8
SMALL = 1 << 18
"""Parts of up to this many bytes in all travel in the `ConfigRecord`."""


def pack(envelope: Envelope) -> RecordDict:
    """Turn a message into records."""
    texts, parts = {_TEXT: envelope.text}, dict(envelope.parts)
    if envelope.carried is not None:
        texts[_CARRIED + _TEXT] = envelope.carried.text
        parts |= {_CARRIED + name: data for name, data in envelope.carried.parts.items()}
    if sum(len(data) for data in parts.values()) <= SMALL:
        small = {_PART + name: data for name, data in parts.items()}
        return RecordDict({_META: ConfigRecord({**texts, **small})})
    arrays = {
        name: Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
        for name, data in parts.items()
    }
    return RecordDict({_META: ConfigRecord({**texts}), _PARTS: ArrayRecord(arrays)})


def unpack(records: RecordDict) -> Envelope:
    """Return a message, unread; raise WireError if the records are not one."""
    config = records.get(_META)
    if not isinstance(config, ConfigRecord):
        raise WireError("meta: not a Parsifl message")
    parts = _parts(config, records.get(_PARTS, ArrayRecord()))
    carried = None
    if _CARRIED + _TEXT in config:
        riding = {name for name in parts if name.startswith(_CARRIED)}
        taken = {name.removeprefix(_CARRIED): parts.pop(name) for name in riding}
        carried = Envelope(_text(config, _CARRIED + _TEXT), taken)
    return Envelope(_text(config, _TEXT), parts, carried)


def _text(config: ConfigRecord, name: str) -> str:
    text = config.get(name)
    if not isinstance(text, str):
        raise WireError("meta: not a Parsifl message")
    return text


def _parts(config: ConfigRecord, arrays: object) -> dict[str, bytes]:
    if not isinstance(arrays, ArrayRecord):
        raise WireError(f"parts: expected arrays, got {type(arrays).__name__}")
    small = {name.removeprefix(_PART): config[name] for name in config if name.startswith(_PART)}
    if len(arrays) + len(small) > _MOST_PARTS:
        raise WireError(f"parts: {len(arrays) + len(small)}, at most {_MOST_PARTS} are read")
    parts: dict[str, bytes] = {}
    for name, value in small.items():
        if not isinstance(value, bytes):
            raise WireError(printable(f"{name:.40}: expected bytes, got {type(value).__name__}"))
        parts[name] = value
    for name, array in arrays.items():
        if array.stype != STYPE:
            raise WireError(printable(f"{name:.40}: {array.stype!r:.40} instead of {STYPE!r}"))
        parts[name] = array.data
    return parts
