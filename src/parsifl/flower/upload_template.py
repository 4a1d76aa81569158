"""What a client's upload must look like: `client_update` run on tensors without data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, final

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.batching import Batches, BatchSpec, ClientRoundData, DataRequest, Rows
from parsifl.core.errors import WireError
from parsifl.core.keys import Key
from parsifl.core.leaves import UNITS
from parsifl.core.problem import Problem
from parsifl.engine.costs import FlopCounter
from parsifl.engine.pool import ClientProgram
from parsifl.flower.data_schema import DataSchema

_SLACK = 1 << 20
"""Bytes that a message may have beyond its dense form: names, shapes, small leaves."""
_GROWTH = 16
"""How many times the downlink an upload of unknown form may take."""


@final
@dataclass(frozen=True)
class UploadTemplate:
    """The form of one client's upload, and the operations of its work.

    `known` is False where `client_update` cannot run without data: then the type alone is checked,
    and `limit` bounds the memory that it may take.
    """

    template: Any
    known: bool
    flops: int | None
    limit: int
    note: str = ""


class UploadTemplates:
    """Expected uploads, worked out once for every structure."""

    def __init__(self, method: AnyAlgorithm, problem: Problem, schema: DataSchema) -> None:
        self._method, self._problem, self._schema = method, problem, schema
        self._upload = method.tree_types().uplink
        self._flops = FlopCounter(method, problem)
        self._known: dict[Any, UploadTemplate] = {}

    def of(self, down: Any, info: ClientInfo, key: Key) -> UploadTemplate:
        """Return what this client must send for this downlink."""
        work = self._method.batches(info, key.round)
        leaves, structure = tree.flatten(down)
        forms = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        profile = json.dumps(dict(info.profile), sort_keys=True)
        mark = (structure, forms, info.samples, profile, repr(work))
        if mark not in self._known:
            self._known[mark] = self._expected(down, info, work, key)
        return self._known[mark]

    def _expected(self, down: Any, info: ClientInfo, work: DataRequest, key: Key) -> UploadTemplate:
        method, problem = self._method, self._problem
        try:
            state = ClientProgram(method, problem).initial_state(info, down, key.seed)
            # uploads of clients with unequal numbers of steps share a batch: one step suffices
            arguments = tree.to_meta((down, state, self._shard(info, work, key, most=1)))
            template = method.client_update(problem, *arguments).upload
        except Exception as error:  # work that needs values has no template
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            note = f"uploads are checked by type alone ({reason})"
            return UploadTemplate(None, False, None, _GROWTH * (_memory(down) + _SLACK), note)
        counted = None
        if not self._schema.sparse:
            counted = self._flops.count(down, state, self._shard(info, work, key))
        return UploadTemplate(template, True, counted, _memory(template) + _SLACK)

    def _shard(
        self, info: ClientInfo, work: DataRequest, key: Key, most: int | None = None
    ) -> ClientRoundData:
        x, y = self._schema.features(info.samples), self._schema.targets(info.samples)
        draws = {
            name: self._batches(x, y, draw, info.samples, most)
            for name, draw in work.batches.items()
        }
        weight = torch.ones(info.samples, dtype=self._weights(), device="meta")
        rows = Rows(x, y, weight) if work.rows else None
        return ClientRoundData(draws, rows, key.tensor().to("meta"), key.round)

    def _batches(self, x: Any, y: Any, draw: BatchSpec, samples: int, most: int | None) -> Batches:
        count = draw.count(samples)
        steps, rows = count if most is None else min(most, count), draw.rows(samples)
        return Batches(
            x=x,
            y=y,
            index=torch.zeros((steps, rows), dtype=torch.int64, device="meta"),
            weight=torch.zeros((steps, rows), dtype=self._weights(), device="meta"),
            active=torch.ones(steps, dtype=torch.bool, device="meta"),
            key=torch.zeros((), dtype=torch.int64, device="meta"),
            augment=self._schema.augment,
        )

    def _weights(self) -> torch.dtype:
        dtype = self._schema.features(0).dtype
        return dtype if dtype.is_floating_point else torch.float32

    def read(self, data: bytes, expected: UploadTemplate) -> Any:
        """Decode an upload and hold it against what was expected; raise WireError."""
        if not expected.known:
            return wire.decode(data, self._upload, limit=expected.limit)
        dense = wire.dense_size(expected.template)
        if len(data) > dense + _SLACK:
            raise WireError(f"length: {len(data)} bytes, but dense it would have {dense}")
        message = wire.decode(data, self._upload, limit=expected.limit)
        wire.check(message, expected.template)
        return message


def _memory(template: Any) -> int:
    """Return the bytes that a message of this form takes at most: positions count for sparse."""
    total = 0
    for leaf in tree.flatten(template, units=UNITS)[0]:
        compact = isinstance(leaf, UNITS)
        item = torch.float64.itemsize + torch.int64.itemsize if compact else leaf.dtype.itemsize
        total += torch.Size(leaf.shape).numel() * item
    return total
