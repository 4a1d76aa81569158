"""Exchange messages with clients, and check each upload against its template.

A reply that cannot be used is dropped and named.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, final

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.batching import Batches, BatchSpec, ClientRoundData, DataRequest, Rows
from parsifl.core.errors import ParsiflError, WireError
from parsifl.core.keys import Key
from parsifl.core.leaves import UNITS, LowRank
from parsifl.core.problem import Problem
from parsifl.engine.costs import FlopCounter
from parsifl.engine.finite import inspect_upload
from parsifl.engine.pool import ClientProgram, ClientResult
from parsifl.flower.hello import DataSchema
from parsifl.flower.membership import Membership
from parsifl.flower.message import Envelope, Kind, Link, Replies, printable
from parsifl.flower.network_schema import (
    EvaluateReply,
    RemoteFailure,
    SitesRefused,
    TrainReply,
    WorkRequest,
    describe,
    read_reply,
)
from parsifl.flower.settings import Deployment
from parsifl.wire import MessageStats, Precision

_SLACK = 1 << 20
"""Bytes of a message in addition to its dense form: names, shapes, small leaves."""
_GROWTH = 16
"""Maximum size of an upload of unknown form, as a multiple of the downlink."""
_PATIENCE = 3
"""Unresponsive clients have this many times the median time of the others."""
_SILENT = "no answer in time"
NOT_CONNECTED = "not connected"
LOST_STATE = "LostState"
RELEASE_SECONDS = 5.0
"""Seconds between two requests for a reply that a person must release."""


@final
@dataclass(frozen=True)
class UploadTemplate:
    """The form of one client's upload, and the operations of its work.

    `known` is False if `client_update` cannot run without data: then only the type is checked, and
    `limit` bounds its memory.
    """

    template: Any
    known: bool
    flops: int | None
    limit: int
    note: str = ""


class UploadTemplates:
    """Expected uploads, computed once per structure."""

    def __init__(self, method: AnyAlgorithm, problem: Problem, schema: DataSchema) -> None:
        self._method, self._problem, self._schema = method, problem, schema
        self._upload = method.tree_types().uplink
        self._flops = FlopCounter(method, problem)
        self._known: dict[Any, UploadTemplate] = {}

    def of(self, down: Any, info: ClientInfo, key: Key) -> UploadTemplate:
        """Return the expected upload of this client for this downlink."""
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
        """Decode an upload and check it against the template; raise WireError if it differs."""
        if not expected.known:
            return wire.decode(data, self._upload, limit=expected.limit)
        dense = wire.dense_size(expected.template)
        if len(data) > dense + _SLACK:
            raise WireError(f"length: {len(data)} bytes, but dense it would have {dense}")
        message = wire.decode(data, self._upload, limit=expected.limit)
        wire.check(_form(message), _form(expected.template))
        return message


def _form(message: Any) -> Any:
    """Return a message with factors replaced by a tensor without values."""
    leaves, structure = tree.flatten(message, units=UNITS)
    forms = [
        leaf.left.new_empty(leaf.shape, device="meta") if isinstance(leaf, LowRank) else leaf
        for leaf in leaves
    ]
    return tree.unflatten(forms, structure)


def _memory(template: Any) -> int:
    """Return the maximum bytes of a message of this form, with positions of sparse leaves."""
    total = 0
    for leaf in tree.flatten(template, units=UNITS)[0]:
        compact = isinstance(leaf, UNITS)
        item = torch.float64.itemsize + torch.int64.itemsize if compact else leaf.dtype.itemsize
        total += torch.Size(leaf.shape).numel() * item
    return total


@final
@dataclass(frozen=True)
class Request:
    """A request to a client, and what is needed to read the reply."""

    client: ClientInfo
    message: WorkRequest
    parts: Mapping[str, bytes]
    received: Any = None
    down: MessageStats = field(default_factory=MessageStats)
    expected: UploadTemplate | None = None
    upload: bool = False

    def envelope(self) -> Envelope:
        """Return the message as an envelope."""
        return self.message.envelope(self.parts)


class Exchange:
    """One exchange with several clients.

    Parameters
    ----------
    unresponsive
        Clients that were connected, but did not answer until the last timeout; updated. They are
        asked, but the exchange waits for them only three times the median time of the others.
    """

    def __init__(
        self,
        templates: UploadTemplates,
        members: Membership,
        link: Link,
        deployment: Deployment,
        precision: Precision,
        unresponsive: set[int],
    ) -> None:
        self._templates, self._members = templates, members
        self._unresponsive = unresponsive
        self._link, self._deployment = link, deployment
        self._precision: Precision = precision
        self.notes: list[str] = []
        self._refused: dict[int, str] = {}
        self._unreleased: set[int] = set()

    def collect(
        self,
        requests: Mapping[int, Request],
        failed: Mapping[int, str],
        cohort: int,
        round: int,
        evaluations: Mapping[int, Request],
    ) -> tuple[dict[int, ClientResult | str], dict[int, EvaluateReply | str]]:
        """Return each client's result, or the reason why it is dropped from this round; and scores.

        `failed` has the clients for which no request can be built.
        Clients that did not reply are asked again while fewer than the quorum have uploaded. That
        is harmless, because every message names the state to start from.
        A request to evaluate is part of the request to train; clients that do not train get it
        separately, once, in the same exchange.
        A client whose reply a person must release is asked until `deployment.timeout` has passed.
        """
        self._note_untyped(requests)
        needed = max(1, math.ceil(self._deployment.quorum * cohort))
        answers: dict[int, ClientResult | str] = {**failed}
        silent, arrived = dict(requests), 0
        scores: dict[int, EvaluateReply | str] = {}
        waiting = dict(evaluations)  # to be sent: each one until its client has replied
        end, attempts = time.monotonic() + self._deployment.timeout, 0
        while silent and attempts <= self._deployment.retries:
            self._unreleased.clear()
            for client, reply in self._ask(silent, waiting).items():
                if client in waiting:
                    carried = reply.carried if isinstance(reply, Envelope) else None
                    scores[client] = self._scores(waiting[client], carried or reply)
                if client not in silent:
                    continue
                if isinstance(reply, Envelope):
                    del silent[client]
                    answers[client] = self._accepted(requests[client], reply)
                else:
                    answers[client] = printable(reply)
            waiting = {client: waiting[client] for client in waiting if client in silent}
            arrived = sum(
                isinstance(answer, ClientResult) and requests[answer.client.id].upload
                for answer in answers.values()
            )
            if arrived >= needed:
                return answers, scores
            if self._unreleased and time.monotonic() < end:
                silent |= {client: requests[client] for client in self._unreleased}
                self._link.pause(RELEASE_SECONDS)
            else:
                attempts += 1
        text = _shortage(answers, arrived, needed, round)
        if not self._refused:
            raise ParsiflError(text)
        up = sum(r.up.bytes for r in answers.values() if isinstance(r, ClientResult))
        down = sum(request.down.bytes for request in requests.values())
        raise SitesRefused(text, self._refused, (up, down))

    def evaluate(self, requests: Mapping[int, Request]) -> dict[int, EvaluateReply | str]:
        """Return each client's scores, or the reason why there are none."""
        replies = self._ask({}, requests)
        return {client: self._scores(requests[client], reply) for client, reply in replies.items()}

    def _scores(self, request: Request, reply: Envelope | str) -> EvaluateReply | str:
        try:
            return read_reply(EvaluateReply, reply, request.message)
        except Exception as error:
            return self._reason(request.client.id, error)

    def _ask(
        self, training: Mapping[int, Request], evaluation: Mapping[int, Request]
    ) -> dict[int, Envelope | str]:
        timeout = self._deployment.timeout
        self._members.refresh(timeout)
        online = self._members.online()
        asked = sorted({**training, **evaluation})
        messages: dict[int, tuple[Kind, Envelope]] = {}
        for client in asked:
            if client not in online:
                continue
            rider = evaluation[client].envelope() if client in evaluation else None
            if client in training:
                envelope = replace(training[client].envelope(), carried=rider)
                messages[online[client]] = ("train", envelope)
            elif rider is not None:
                messages[online[client]] = ("evaluate", rider)
        slow = {online[client] for client in self._unresponsive & online.keys()}
        enough = _without(slow, messages.keys() - slow) if slow else None
        replies = self._link.ask(messages, timeout, enough) if messages else {}
        if not messages:
            self._link.pause(min(timeout, 5.0))
        for client in asked:
            if online.get(client) in replies:
                self._unresponsive.discard(client)
            elif client in online:
                self._unresponsive.add(client)
        return {
            client: replies.get(online[client], _SILENT) if client in online else NOT_CONNECTED
            for client in asked
        }

    def _accepted(self, request: Request, envelope: Envelope) -> ClientResult | str:
        try:
            return self._result(request, envelope)
        except Exception as error:  # an invalid reply of one client must not stop the round
            return self._reason(request.client.id, error)

    def _reason(self, client: int, error: Exception) -> str:
        remote = error if isinstance(error, RemoteFailure) else None
        if remote is not None and remote.guard:
            self._refused[client] = describe(error)
        if remote is not None and remote.unreleased:
            self._unreleased.add(client)
        lost = remote is not None and remote.code == LOST_STATE
        if lost and self._deployment.lost_state == "stop":
            raise ParsiflError(
                f"client {client} has lost its state, and deployment.lost_state is 'stop': restore "
                "the state directory of its node and resume, or set 'reinitialize' or 'drop'"
            )
        return describe(error)

    def _result(self, request: Request, envelope: Envelope) -> ClientResult:
        reply = read_reply(TrainReply, envelope, request.message)
        upload, size = self._upload(request, envelope.parts)
        inspected = inspect_upload(upload)
        if inspected.fault:
            raise WireError(inspected.fault)
        if reply.reinitialized:
            version = request.message.accepted
            self.notes.append(
                f"client {request.client.id} had lost its state of round {version} and was "
                "reinitialized"
            )
        return ClientResult(
            client=request.client,
            received=request.received,
            upload=upload,
            metrics=reply.metrics,
            down=request.down,
            up=self._measured(upload, size),
            flops=None if request.expected is None else request.expected.flops,
            largest=inspected.largest,
        )

    def _measured(self, upload: Any, size: int) -> MessageStats:
        if upload is None:
            return MessageStats()
        return wire.measure(upload, self._precision)._replace(bytes=size)

    def _upload(self, request: Request, parts: Mapping[str, bytes]) -> tuple[Any, int]:
        expected = request.expected
        nothing = expected is not None and expected.known and expected.template is None
        if not request.upload or nothing:
            if parts:
                raise WireError("upload: none was requested")
            return None, 0
        if parts.keys() != {"upload"} or expected is None:
            raise WireError(f"upload: expected one part, got {len(parts)}")
        data = parts["upload"]
        # a copy: memory that is aligned as in a run in one process gives the same bits
        return tree.copy(self._templates.read(data, expected)), len(data)

    def _note_untyped(self, requests: Mapping[int, Request]) -> None:
        notes = {q.expected.note for q in requests.values() if q.expected and q.expected.note}
        self.notes += sorted(notes)


def _without(slow: Collection[int], others: set[int]) -> Callable[[Replies], bool]:
    """Return when to stop waiting for slow nodes: some time after all others have replied."""
    started, seconds = time.monotonic(), dict[int, float]()

    def enough(replies: Replies) -> bool:
        elapsed = time.monotonic() - started
        for node in replies:
            seconds.setdefault(node, elapsed)
        if not others or others - replies.keys():
            return False
        return elapsed >= _PATIENCE * median(seconds.values()) or replies.keys() >= {*slow}

    return enough


def _shortage(
    answers: Mapping[int, ClientResult | str], arrived: int, needed: int, round: int
) -> str:
    reasons = [f"client {c}: {a}" for c, a in sorted(answers.items()) if isinstance(a, str)]
    return (
        f"round {round}: {arrived} uploads arrived, but {needed} are needed; nothing is lost: "
        "resume the run (deployment.resume=true)\n  " + "\n  ".join(reasons[:20])
    )
