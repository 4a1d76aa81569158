"""What travels between the loop and a client pool, and what is recorded of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from parsifl.core.algorithm import ClientInfo
from parsifl.core.keys import Key
from parsifl.engine.flops import Cost
from parsifl.engine.network_model import NetworkModel
from parsifl.wire import MessageStats

MODELS = ("global", "personal")
SPLITS = ("validation", "test")


@dataclass(frozen=True)
class ClientRequest:
    """What the loop asks of one client. State, data and device are the pool's business.

    Attributes
    ----------
    key
        Seed and round.
    message
        The downlink, as `broadcast` returned it.
    upload
        Whether the client uploads; the others only train.
    """

    client: ClientInfo
    key: Key
    message: Any
    upload: bool = True


@dataclass(frozen=True)
class ClientResult:
    """A client's result as the server sees it: values are those after transmission.

    Attributes
    ----------
    largest
        The largest absolute value of the upload if it is out of the ordinary, else 0.
    aggregated
        Whether the upload is part of a `PartialTotal`.
    """

    client: ClientInfo
    received: Any
    upload: Any
    metrics: Mapping[str, Any]
    down: MessageStats
    up: MessageStats
    flops: int | None = None
    notes: tuple[str, ...] = ()
    largest: float = 0.0
    aggregated: bool = False


@dataclass(frozen=True)
class ClientFailure:
    """A client that is left out of the round; its state stays as it was."""

    client: ClientInfo
    reason: str
    down: MessageStats = field(default_factory=MessageStats)


@dataclass(frozen=True)
class PartialTotal:
    """A sum over several clients, made where they run: on a worker, or by secure aggregation."""

    clients: int
    total: Any


@dataclass(frozen=True)
class ClientScores:
    """One client's metrics by model and split, and its number of rows by split.

    `reason` is why there are none, if the client could not be evaluated.
    """

    client: ClientInfo
    samples: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""


Answer = ClientResult | ClientFailure | PartialTotal | ClientScores


@dataclass(frozen=True)
class RoundRecord:
    """One round: a line of metrics.jsonl.

    Attributes
    ----------
    flops
        Both passes of all clients; None if some client could not be counted.
    parameters_up, parameters_down
        The number of values in the messages.
    dense_up, dense_down, entropy_up, entropy_down
        Bytes of the same messages sent dense, and their information content.
    devices
        How many `clients` spent how many operations `forward` and `backward`, with how many
        `trainable` parameters and values `sent` (None if unknown).
    dropped
        Clients that were left out, with the reason.
    metrics
        Scalars of clients, averaged by weight, and of callbacks.
    scores
        By model ("global", "personal"), split and metric: mean, spread and worst decile.
    unevaluated
        Clients without scores, with the reason.
    notes
        What happened on the way, such as batches that ran client by client.
    stopped
        Why this round is the last, if a callback stopped the run.
    """

    round: int
    cohort: int
    trained: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    dense_up: int = 0
    dense_down: int = 0
    entropy_up: int = 0
    entropy_down: int = 0
    parameters_up: int = 0
    parameters_down: int = 0
    flops: int | None = 0
    devices: Sequence[Mapping[str, int | None]] = ()
    simulated_seconds: float = 0.0
    dropped: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = field(
        default_factory=dict
    )
    unevaluated: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    executor: str = ""
    stopped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; scores are at the top level, by model."""
        found = {name: value for name, value in vars(self).items() if name != "scores"}
        found |= {
            "devices": [dict(device) for device in self.devices],
            "dropped": dict(self.dropped),
            "metrics": dict(self.metrics),
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
        }
        for rare in ("unevaluated", "stopped"):
            if not found[rare]:
                del found[rare]
        return {**found, **self.scores}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> RoundRecord:
        """Read a record leniently: unknown fields are ignored, missing ones take their default."""
        known = {f.name: line[f.name] for f in fields(cls) if f.name in line}
        for numbered in ("dropped", "unevaluated"):  # JSON has text keys only
            known[numbered] = {int(i): str(why) for i, why in line.get(numbered, {}).items()}
        known["notes"] = tuple(line.get("notes", ()))
        known["devices"] = tuple(line.get("devices", ()))
        known["scores"] = {model: line[model] for model in MODELS if model in line}
        return cls(**known)


class RoundTally:
    """Adds up the answers of a round; nothing else writes a record."""

    def __init__(self, round: int, cohort: int, network: NetworkModel) -> None:
        self._round, self._cohort, self._network = round, cohort, network
        self._trained = 0
        self._down, self._up = _Bytes(), _Bytes()
        self._flops: int | None = 0
        self._devices: dict[tuple[int | None, ...], int] = {}
        self._seconds = 0.0
        self._dropped: dict[int, str] = {}
        self._metrics: dict[str, float] = {}
        self._weight = 0.0
        self._notes: list[str] = []
        self.largest = (0.0, -1)
        """The largest value of any upload, and the client that sent it."""

    @property
    def dropped(self) -> Mapping[int, str]:
        """The clients that were left out."""
        return self._dropped

    @property
    def trained(self) -> int:
        """How many clients trained."""
        return self._trained

    def add(self, answer: ClientResult | ClientFailure, weight: float, *, uploads: bool) -> None:
        """Take in one answer."""
        if isinstance(answer, ClientFailure):
            self._down.bytes += answer.down.bytes
            self._dropped[answer.client.id] = answer.reason
            return
        self._trained += 1
        self._down.add(answer.down)
        self._notes += answer.notes
        sent = None
        if uploads:
            self._up.add(answer.up)
            sent = answer.up.values
            self._average(answer.metrics, weight)
            if answer.largest > self.largest[0]:
                self.largest = (answer.largest, answer.client.id)
        self._count(answer, sent, uploads=uploads)

    def note(self, *notes: str) -> None:
        """Note what happened on the way."""
        self._notes += notes

    def _average(self, metrics: Mapping[str, Any], weight: float) -> None:
        self._weight += weight
        for name, value in metrics.items():
            mean = self._metrics.get(name, 0.0)
            self._metrics[name] = mean + (float(value) - mean) * weight / self._weight

    def _count(self, answer: ClientResult, sent: int | None, *, uploads: bool) -> None:
        flops = answer.flops
        if self._flops is not None:
            # int(): a sum of costs is a plain number again
            self._flops = None if flops is None else self._flops + int(flops)
        if isinstance(flops, Cost):
            device = (flops.forward, flops.backward, flops.trainable, sent)
            self._devices[device] = self._devices.get(device, 0) + 1
        up = answer.up.bytes if uploads else 0
        spent = self._network.seconds(up, answer.down.bytes, flops, answer.client.profile)
        self._seconds = max(self._seconds, spent)

    def record(self, seconds: Mapping[str, float], executor: str) -> RoundRecord:
        """Return the record, without scores."""
        names = ("forward", "backward", "trainable", "sent")
        return RoundRecord(
            round=self._round,
            cohort=self._cohort,
            trained=self._trained,
            bytes_up=self._up.bytes,
            bytes_down=self._down.bytes,
            dense_up=self._up.dense,
            dense_down=self._down.dense,
            entropy_up=self._up.entropy,
            entropy_down=self._down.entropy,
            parameters_up=self._up.values,
            parameters_down=self._down.values,
            flops=self._flops,
            devices=tuple(
                {"clients": count, **dict(zip(names, device, strict=True))}
                for device, count in self._devices.items()
            ),
            simulated_seconds=self._seconds,
            dropped=self._dropped,
            metrics=self._metrics,
            notes=tuple(self._notes),
            seconds=dict(seconds),
            executor=executor,
        )


@dataclass
class _Bytes:
    """Running totals of one direction."""

    bytes: int = 0
    dense: int = 0
    entropy: int = 0
    values: int = 0

    def add(self, message: MessageStats) -> None:
        """Add one message."""
        self.bytes += message.bytes
        self.dense += message.dense
        self.entropy += math.ceil(message.entropy)
        self.values += message.values


def as_json(scores: ClientScores) -> dict[str, Any]:
    """Return scores as JSON values."""
    return {**asdict(scores), "client": scores.client.id}
