"""Schemas of all messages between server and clients: the only reader of network input.

`read` and `read_reply` return a typed message or raise `WireError` with a short printable reason.
Fields are strict and unknown ones are rejected, because server and clients run the same version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, final

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from parsifl.core.errors import ParsiflError, WireError
from parsifl.flower.hello import DataSchema, Machine
from parsifl.flower.logs import node_log
from parsifl.flower.message import LONGEST_REASON, Envelope, printable

MOST_ROWS = 1 << 40
MOST_METRICS = 100
_SHORT, LONG = 1 << 18, 1 << 24

LostStatePolicy = Literal["reinitialize", "drop", "stop"]
ClientId = Annotated[int, Ge(0), Lt(1 << 31)]
Round = Annotated[int, Ge(0), Lt(10**8)]  # versions of states have eight digits
ExperimentId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Split = Literal["train", "validation", "test"]
Rows = Annotated[int, Ge(0), Lt(MOST_ROWS)]
Name = Annotated[str, StringConstraints(pattern=r"^[^\p{C}]{1,100}$")]
LARGEST_METRIC = 1e100
"""Means and squares over all clients stay finite."""
Metrics = Annotated[
    dict[Name, Annotated[float, Ge(-LARGEST_METRIC), Le(LARGEST_METRIC)]], MaxLen(MOST_METRICS)
]
Scalar = (
    bool
    | Annotated[int, Ge(-(1 << 53)), Le(1 << 53)]
    | float
    | Annotated[str, StringConstraints(pattern=r"^[^\p{C}]{0,200}$")]
)

Agreed = dict[str, JsonValue] | None
"""What the clients agreed on before the first round; only the deployment that made it reads it."""

_PROFILE_LIMITS = {
    "epochs": (0.0, 1e4),
    "flops_per_second": (1.0, 1e24),
    "importance": (0.0, 1e6),
    "local_steps": (0.0, 1e6),
    "width": (0.0, 1.0),
}


def _check_profile(profile: dict[str, Any]) -> dict[str, Any]:
    for name, (least, most) in _PROFILE_LIMITS.items():
        if name not in profile:
            continue
        value = profile[name]
        if isinstance(value, bool | str | list) or not least <= value <= most:
            raise ValueError(f"{name} must be a number from {least:g} to {most:g}")
    return profile


Profile = Annotated[
    dict[Name, Scalar | Annotated[list[Scalar], MaxLen(1000)]],
    MaxLen(100),
    AfterValidator(_check_profile),
]


class Message(BaseModel):
    """A request or a reply.

    `allowed` names its optional parts, `longest` bounds its text.
    """

    # built on first use: a client reads two kinds of messages
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )
    allowed: ClassVar[frozenset[str]] = frozenset()
    longest: ClassVar[int] = _SHORT

    def envelope(self, parts: Mapping[str, bytes] | None = None) -> Envelope:
        """Return the message as an envelope."""
        return Envelope(self.model_dump_json(), parts or {})


class Addressed(Message):
    """A message to or from one client in one round of one run."""

    client: ClientId
    round: Round
    experiment: ExperimentId


# ---------------------------------------------------------------------- requests
@final
class HelloRequest(Message):
    """Asks a node which client it is."""

    longest: ClassVar[int] = LONG
    agreement: Agreed = None


class WorkRequest(Addressed):
    """Asks a client to work.

    Attributes
    ----------
    accepted, oldest
        The version of its state to start from, and the oldest one that is still needed.
    data_schema
        The agreed schema of the rows.
    lost_state
        How to handle a missing or damaged version.
    """

    longest: ClassVar[int] = LONG
    accepted: Round
    oldest: Round
    data_schema: DataSchema
    lost_state: LostStatePolicy = "reinitialize"
    agreement: Agreed = None


@final
class TrainRequest(WorkRequest):
    """Asks a client to train one round; `uploads` is whether it sends its upload."""

    allowed: ClassVar[frozenset[str]] = frozenset({"down"})
    uploads: bool


@final
class EvaluateRequest(WorkRequest):
    """Asks a client for the scores of the global and of its personal model."""

    allowed: ClassVar[frozenset[str]] = frozenset({"down", "model", "server"})


# ---------------------------------------------------------------------- replies
@final
class HelloReply(Message):
    """A node's client number, number of training rows, device profile and data schema."""

    client: ClientId
    samples: Rows
    profile: Profile
    data_schema: DataSchema
    machine: Machine | None = None


class WorkReply(Addressed):
    """The reply to a `WorkRequest`; `reinitialized` means that the client had lost its state."""

    reinitialized: bool = False


@final
class TrainReply(WorkReply):
    """An upload, and scalars of the client's training."""

    allowed: ClassVar[frozenset[str]] = frozenset({"upload"})
    metrics: Metrics


@final
class EvaluateReply(WorkReply):
    """Scores by model, split and metric, and the number of rows by split."""

    scores: dict[
        Literal["global", "personal"], dict[Literal["train", "validation", "test"], Metrics]
    ]
    samples: dict[Literal["train", "validation", "test"], Annotated[int, Gt(0), Lt(MOST_ROWS)]]

    @model_validator(mode="after")
    def _rows_are_known(self) -> EvaluateReply:
        for model, splits in self.scores.items():
            for split, metrics in splits.items():
                if split not in self.samples or not metrics:
                    raise ValueError(f"scores.{model}.{split}: no rows or no metrics")
                if not 0 <= metrics.get("accuracy", 0) <= 1:
                    raise ValueError(f"scores.{model}.{split}.accuracy: must be from 0 to 1")
        return self


@final
class FailureReply(Message):
    """The reason why a client could not answer a request.

    Attributes
    ----------
    error
        The type of the exception. Its message may contain data and stays in the node's log.
    detail
        A message without data, for failures that the library itself detects.
    rule
        The guard that a request broke.
    client
        The site whose guard it is.
    """

    error: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
    detail: Annotated[str, MaxLen(LONGEST_REASON)] = ""
    rule: Annotated[str, StringConstraints(pattern=r"^[a-z-]{0,40}$")] = ""
    client: ClientId | None = None

    @property
    def reason(self) -> str:
        """The text for the record."""
        text = self.detail or f"{self.error} (details are in the log of the client's node)"
        return printable(text)


_NO_GUARD = ("", "failure", "release", "request")


class RemoteFailure(WireError):
    """A client reports a failure; `code` is the type of its exception.

    Attributes
    ----------
    guard
        The rule of a permanent refusal; empty for a failure.
    unreleased
        Whether the reply waits until a person at the site releases it.
    client
        The site that refuses.
    """

    def __init__(self, failure: FailureReply) -> None:
        super().__init__(failure.reason)
        self.code, self.client = failure.error, failure.client
        self.guard = "" if failure.rule in _NO_GUARD else failure.rule
        self.unreleased = failure.rule == "release"


class SitesRefused(ParsiflError):
    """The guards of sites refuse a request.

    Attributes
    ----------
    reasons
        The message of each site, including the rule.
    size
        The bytes up and down of messages that are not in a record.
    """

    def __init__(
        self, text: str, reasons: Mapping[int, str], size: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(text)
        self.reasons, self.size = dict(reasons), size


REQUESTS: Mapping[str, type[Message]] = {
    "hello": HelloRequest,
    "train": TrainRequest,
    "evaluate": EvaluateRequest,
}
REPLIES: Mapping[str, type[Message]] = {
    "hello": HelloReply,
    "train": TrainReply,
    "evaluate": EvaluateReply,
}

M = TypeVar("M", bound=Message)


def read(model: type[M], envelope: Envelope) -> M:
    """Read a message; raise WireError if it is not of this kind."""
    if len(envelope.text) > model.longest:
        raise WireError(f"text: {len(envelope.text)} characters, at most {model.longest} are read")
    surplus = envelope.parts.keys() - model.allowed
    if surplus:
        raise WireError(printable(f"parts: {sorted(surplus)[0]!r} is not expected"))
    try:
        return model.model_validate_json(envelope.text)
    except ValidationError as error:
        raise WireError(_reason(error)) from None


def read_reply(model: type[M], reply: Envelope | str | None, request: Message | None = None) -> M:
    """Read a reply; raise WireError if it is missing or does not answer this request.

    A text is the reason why there is no reply.
    """
    if reply is None or isinstance(reply, str):
        raise WireError(printable(reply or "no reply"))
    try:
        message = read(model, reply)
    except WireError:
        failure = failure_in(reply)
        if failure is None:
            raise
        wanted = getattr(request, "client", None)
        if failure.client is not None and wanted is not None and failure.client != wanted:
            text = f"client: a failure of {failure.client}, not {wanted}"
            raise WireError(text) from None
        raise RemoteFailure(failure) from None
    for name in ("client", "round", "experiment"):
        wanted, got = getattr(request, name, None), getattr(message, name, None)
        if wanted is not None and got != wanted:
            raise WireError(f"{name}: a reply for {got!r}, not {wanted!r}")
    return message


def failure_in(reply: Envelope) -> FailureReply | None:
    """Return the failure that a client reports, or None."""
    try:
        return read(FailureReply, reply)
    except WireError:
        return None


class _Claim(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    client: ClientId


def claimed_client(reply: Envelope | str) -> int | None:
    """Return the client that a reply claims to come from, without validating the reply."""
    try:
        if isinstance(reply, str) or len(reply.text) > LONG:
            return None
        return _Claim.model_validate_json(reply.text).client
    except ValidationError:
        return None


def describe(error: Exception) -> str:
    """Return why a reply is dropped, in one printable line."""
    if isinstance(error, ParsiflError):
        return printable(error)
    node_log().warning("a reply is dropped", exc_info=error)
    return f"the reply cannot be used ({type(error).__name__})"


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # members of unions are part of the location, but mean nothing to a reader
    location = ".".join(str(step) for step in first["loc"] if not str(step).endswith("]"))
    return printable(f"{location}: {first['msg']}" if location else first["msg"])
