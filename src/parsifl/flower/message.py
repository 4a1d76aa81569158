"""Messages: envelopes, links, their encoding as Flower records, and answers of clients.

This module imports neither torch nor pydantic, so a ClientApp that forwards a message starts fast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, final

from parsifl.core.errors import WireError
from parsifl.core.text import visible
from parsifl.flower.logs import node_log

if TYPE_CHECKING:
    from flwr.app import ConfigRecord, RecordDict

Kind = str
"""A kind of message: "hello", "train" or "evaluate"; another package may add its own."""
LONGEST_REASON = 500
STYPE = "parsifl.wire.v2"
WORK: tuple[Kind, ...] = ("hello", "train", "evaluate")
"""The kinds that every client answers."""
_META, _PARTS = "parsifl", "parsifl.parts"
_TEXT, _PART, _CARRIED = "meta", "part/", "carried/"
_MOST_PARTS = 8
SMALL = 1 << 18
"""Parts of up to this many bytes in total are sent in the `ConfigRecord`."""


@final
@dataclass(frozen=True)
class Envelope:
    """A request or a reply in serialized form.

    Only `flower.network_schema` parses it into a typed message.

    Attributes
    ----------
    text
        A JSON object.
    parts
        Trees encoded by `parsifl.wire`, by name. A tree that is None is not sent.
    carried
        In a request to train, a request to evaluate first; in the reply, the reply to it.
    """

    text: str = "{}"
    parts: Mapping[str, bytes] = field(default_factory=dict)
    carried: Envelope | None = None


def printable(text: object) -> str:
    r"""Return text as one printable line of at most 500 characters.

    Text from other machines is shown on terminals and written to logs, so control characters,
    surrogates and directional marks are replaced.

    >>> printable("lost\n\x1b[2Jround 2 is done")
    'lost ?[2Jround 2 is done'
    """
    words = " ".join(str(text)[: 4 * LONGEST_REASON].split())
    line = visible(words)
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."


def message_type(kind: Kind) -> str:
    """Return Flower's type for a kind of message; other kinds than its own are queries.

    >>> [message_type(kind) for kind in ("hello", "train", "agree")]
    ['query', 'train', 'query.agree']
    """
    if kind == "hello":
        return "query"
    return kind if kind in ("train", "evaluate") else f"query.{kind}"


Requests = Mapping[int, tuple[Kind, Envelope]]
"""By node."""
Replies = dict[int, Envelope | str]
"""By node; a text is the reason why there is no reply."""


class Link(Protocol):
    """A network of nodes, each of which answers requests for one client."""

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        ...

    def ask(
        self,
        requests: Requests,
        timeout: float,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        """Send requests and wait for replies of all nodes, or until there are `enough`.

        After `timeout` seconds a node that did not reply is missing.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait."""
        ...


def pack(envelope: Envelope) -> RecordDict:
    """Convert a message to records: bytes without pickle.

    Flower stores and fetches every object of a message separately. A small message is therefore one
    `ConfigRecord`. The parts of a large one are `Array`s with our own type, which Flower sends
    in chunks.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

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
    """Return the envelope of a message; raise WireError if the records are not a message."""
    from flwr.app import ArrayRecord, ConfigRecord

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
    from flwr.app import ArrayRecord

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


class Answering(Protocol):
    """A client that answers requests."""

    def answer(self, kind: Kind, envelope: Envelope, /) -> Envelope:
        """Reply to a request of this kind, ignoring a request that it carries."""
        ...


def respond(client: Answering, kind: Kind, envelope: Envelope) -> Envelope:
    """Answer the carried request first, because training changes the state, then the request."""
    asked = envelope.carried
    carried = None if asked is None else answered(lambda: client.answer("evaluate", asked))
    reply = answered(lambda: client.answer(kind, envelope))
    return replace(reply, carried=carried)


def answered(answer: Callable[[], Envelope]) -> Envelope:
    """Return the reply; a failure becomes a reply with the type of the exception.

    The message of an exception may contain values, paths or names. It stays in the node's log.
    """
    try:
        return answer()
    except Exception as error:
        node_log().exception("a request could not be answered")
        code = type(error).__name__
        known = re.fullmatch(r"[A-Za-z_]\w{0,99}", code, re.A)
        return Envelope(json.dumps({"error": code if known else "Error"}))
