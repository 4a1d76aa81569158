"""Totals over the answers of a round, for its record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsifl.engine.costs import Cost
from parsifl.engine.pool import ClientFailure, ClientResult
from parsifl.engine.record import RoundRecord
from parsifl.engine.settings import NetworkModel
from parsifl.wire import MessageStats


class RoundTally:
    """Totals over the answers of a round; nothing else writes a record."""

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
        """The clients that were dropped."""
        return self._dropped

    @property
    def trained(self) -> int:
        """How many clients trained."""
        return self._trained

    def add(self, answer: ClientResult | ClientFailure, weight: float, *, uploads: bool) -> None:
        """Add one answer."""
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
        """Add a note to the record."""
        self._notes += notes

    def _average(self, metrics: Mapping[str, Any], weight: float) -> None:
        self._weight += weight
        for name, value in metrics.items():
            mean = self._metrics.get(name, 0.0)
            share = weight / self._weight if self._weight else 1.0
            self._metrics[name] = mean + (float(value) - mean) * share

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
