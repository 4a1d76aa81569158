"""What a server does with what clients return: every engine books, adds up and aggregates here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo, ClientUpload, GatherAlgorithm
from parsifl.core.errors import ClientError, ParsiflError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.engine.finite import is_finite
from parsifl.engine.flops import Cost
from parsifl.engine.network_model import NetworkModel
from parsifl.engine.threads import Scope
from parsifl.wire import MessageStats, Precision


@dataclass
class Ledger:
    """What a round cost and what happened in it.

    `flops` is the sum of both passes of all clients, `parameters_up` and `parameters_down` the
    numbers of values in their messages. `dense_*` are the bytes of the same messages sent dense,
    `entropy_*` what information theory asks for at least. `devices` tells it device by device:
    how many `clients` spent so many operations `forward` and `backward`, had so many `trainable`
    parameters, and `sent` so many (the last two None where they are not known, or nothing was
    asked for).
    """

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
    devices: list[dict[str, int | None]] = field(default_factory=list)
    simulated_seconds: float = 0.0
    dropped: dict[int, str] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Arrival(NamedTuple):
    """A client's result as the server sees it.

    Attributes
    ----------
    down, upload
        What the client was sent, and what it sent: the values after transmission.
    bytes_down, bytes_up
        Their lengths on the wire.
    uploads
        Whether the client was asked for an upload; the others only train.
    content, content_down
        What is in the upload and in the downlink, where that is known already.
    largest
        The largest absolute value of the upload where that is out of the ordinary, else 0.
    """

    client: int
    down: Any
    upload: Any
    info: Mapping[str, Any]
    bytes_down: int
    bytes_up: int
    flops: int | None
    uploads: bool = True
    content: MessageStats | None = None
    content_down: MessageStats | None = None
    largest: float = 0.0


class Gathered:
    """Collects what clients return; sums depend on the order in which they come."""

    def __init__(
        self,
        method: AnyAlgorithm,
        problem: Problem,
        infos: Sequence[ClientInfo],
        network: NetworkModel,
        precision: Precision,
        scope: Scope,
    ) -> None:
        self.ledger = Ledger()
        self._precision: Precision = precision
        self._scope = scope
        self._known: dict[int, tuple[Any, MessageStats]] = {}  # of messages sent to many
        self._method, self._problem = method, problem
        self._infos, self._network = infos, network
        self._total: Any = None
        self._uploads: list[ClientUpload[Any]] = []
        self._devices: dict[tuple[int | None, ...], dict[str, int | None]] = {}
        self._arrived = 0
        self._largest = (0.0, 0)  # of all uploads, and whose it is
        self._info_weight = 0.0

    def drop(self, client: int, bytes_down: int, reason: str) -> None:
        """Leave a client out; its state stays old."""
        self.ledger.bytes_down += bytes_down
        self.ledger.dropped[client] = reason

    def receive(self, *arrivals: Arrival) -> None:
        """Book results of clients, and add them up in the order given."""
        received: list[ClientUpload[Any]] = []
        for arrival in arrivals:
            info, sent = self._infos[arrival.client], None
            self._book_down(arrival)
            if arrival.uploads:
                weight = self._method.weight(info)
                received.append(ClientUpload(info, weight, arrival.upload))
                sent = self._book_up(arrival, weight)
                self._largest = max(self._largest, (arrival.largest, arrival.client))
            self._count(arrival, info, sent)
        self._add(received)

    def _book_down(self, arrival: Arrival) -> None:
        self.ledger.trained += 1
        self.ledger.bytes_down += arrival.bytes_down
        if arrival.down is not None:
            down = arrival.content_down or self._content_down(arrival.down)
            self.ledger.dense_down += down.dense
            self.ledger.entropy_down += math.ceil(down.entropy)
            self.ledger.parameters_down += down.values

    def _book_up(self, arrival: Arrival, weight: float) -> int:
        """Return how many values were sent."""
        content = arrival.content or wire.measure(arrival.upload, self._precision)[1]
        self.ledger.bytes_up += arrival.bytes_up
        self.ledger.dense_up += content.dense
        self.ledger.entropy_up += math.ceil(content.entropy)
        self.ledger.parameters_up += content.values
        self._info_weight += weight
        for name, value in arrival.info.items():
            mean = self.ledger.info.get(name, 0.0)
            self.ledger.info[name] = mean + (float(value) - mean) * weight / self._info_weight
        return content.values

    def _add(self, received: Sequence[ClientUpload[Any]]) -> None:
        method: Any = self._method
        if isinstance(method, GatherAlgorithm):
            # as they come from the wire: the layout of memory may decide the last bit
            self._uploads += [replace(r, value=_contiguous(r.value)) for r in received]
        elif received:
            parts = [method.contribute(self._problem, r.value, r.weight) for r in received]
            self._total = tree.accumulate(self._total, *parts)
        self._arrived += len(received)

    def _content_down(self, down: Any) -> MessageStats:
        if id(down) not in self._known:
            self._known[id(down)] = (down, wire.measure(down, self._precision)[1])
        return self._known[id(down)][1]

    def _count(self, arrival: Arrival, info: ClientInfo, sent: int | None) -> None:
        ledger = self.ledger
        if ledger.flops is not None:
            # int(): a sum of costs is a plain number again
            ledger.flops = None if arrival.flops is None else ledger.flops + int(arrival.flops)
        if isinstance(arrival.flops, Cost):
            self._note_device(arrival.flops, sent)
        up = arrival.bytes_up if arrival.uploads else 0
        spent = self._network.seconds(up, arrival.bytes_down, arrival.flops, info.profile)
        ledger.simulated_seconds = max(ledger.simulated_seconds, spent)

    def _note_device(self, cost: Cost, sent: int | None) -> None:
        found = (cost.forward, cost.backward, cost.trainable, sent)
        if found not in self._devices:
            names = ("clients", "forward", "backward", "trainable", "sent")
            self._devices[found] = dict(zip(names, (0, *found), strict=True))
            self.ledger.devices.append(self._devices[found])
        known = self._devices[found]
        known["clients"] = (known["clients"] or 0) + 1

    def aggregate(self, server: Any, key: Key) -> Any:
        """Return the next server state; it stays as it is if nobody is left.

        Raises
        ------
        ClientError
            If the next state is not finite; names the client with the largest values.
        """
        if not self._arrived:
            return server
        method: Any = self._method
        gathers = isinstance(method, GatherAlgorithm)
        ordered = sorted(self._uploads, key=lambda received: received.client.id)
        combined = ordered if gathers else _contiguous(self._total)
        try:
            with self._scope():
                following = method.aggregate(self._problem, server, combined, key)
        except LinAlgError as error:  # decompositions of what is not finite fail
            raise self._overflow(key) from error
        if not is_finite(following) and is_finite(server):
            raise self._overflow(key)
        # as a checkpoint would give it back: the layout of memory may decide the last bit
        return _contiguous(following)

    def _overflow(self, key: Key) -> ParsiflError:
        largest, client = self._largest
        kept = "checkpoints of earlier rounds are intact"
        if largest:
            return ClientError(
                "aggregation",
                client,
                key.round + 1,
                f"the aggregated state is not finite, and the upload of this client has the "
                f"largest value, {largest:.3g}; {kept}: correct or exclude the client and resume",
            )
        return ParsiflError(
            f"round {key.round + 1}: the aggregated state is not finite, and no upload stands out; "
            f"{kept}: use smaller step sizes at the server"
        )


def _contiguous(value: Any) -> Any:
    return tree.map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, value)
