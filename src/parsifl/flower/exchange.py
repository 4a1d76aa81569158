"""Exchanges messages with clients, and accepts only replies that can be true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ParsiflError, WireError
from parsifl.engine.finite import inspect_upload
from parsifl.engine.pool import ClientResult
from parsifl.flower.membership import Membership
from parsifl.flower.message import Letter
from parsifl.flower.settings import Deployment
from parsifl.flower.transport import Kind, Link
from parsifl.flower.upload_template import UploadTemplate, UploadTemplates
from parsifl.wire import MessageStats, Precision

_SILENT = "no answer in time"
NOT_CONNECTED = "not connected"
_LONGEST_REASON = 500
_MOST_INFO = 1000


@final
@dataclass(frozen=True)
class Request:
    """A message to a client, and what is needed to understand the reply."""

    client: ClientInfo
    letter: Letter
    round: int
    received: Any
    down: MessageStats
    expected: UploadTemplate | None
    upload: bool


class Exchange:
    """One exchange with several clients."""

    def __init__(
        self,
        templates: UploadTemplates,
        members: Membership,
        link: Link,
        deployment: Deployment,
        precision: Precision,
    ) -> None:
        self._templates, self._members = templates, members
        self._link, self._deployment = link, deployment
        self._precision: Precision = precision
        self.notes: list[str] = []

    def collect(
        self, requests: Mapping[int, Request], cohort: int
    ) -> dict[int, ClientResult | str]:
        """Return each client's result, or the reason why it is left out of this round.

        Clients that did not reply are asked again while fewer than the quorum have uploaded: asking
        twice is harmless, since every message names the state to start from.
        """
        self._note_untyped(requests)
        needed = max(1, math.ceil(self._deployment.quorum * cohort))
        answers: dict[int, ClientResult | str] = {}
        silent = dict(requests)
        for _ in range(1 + self._deployment.retries):
            for client, reply in self._ask("train", silent).items():
                if isinstance(reply, Letter):
                    del silent[client]
                    answers[client] = self._believed(requests[client], reply)
                else:
                    answers[client] = reply
            found = answers.values()
            arrived = sum(
                isinstance(answer, ClientResult) and requests[answer.client.id].upload
                for answer in found
            )
            if arrived >= needed:
                return answers
            if not silent:
                break
        raise self._shortage(answers, arrived, needed, requests)

    def evaluate(self, requests: Mapping[int, Request]) -> dict[int, Letter | str]:
        """Return each client's scores as it sent them, or why there are none."""
        answers: dict[int, Letter | str] = {}
        for client, reply in self._ask("evaluate", requests).items():
            try:
                answers[client] = _addressed(requests[client].letter, reply)
            except (WireError, _Failed) as error:
                answers[client] = str(error)[:_LONGEST_REASON]
        return answers

    def _ask(self, kind: Kind, requests: Mapping[int, Request]) -> dict[int, Letter | str]:
        timeout = self._deployment.timeout
        self._members.refresh(timeout)
        online = self._members.online()
        letters = {
            online[client]: request.letter
            for client, request in requests.items()
            if client in online
        }
        replies = self._link.ask(kind, letters, timeout) if letters else {}
        if not letters:
            self._link.pause(min(timeout, 5.0))
        return {
            client: replies.get(online[client], _SILENT) if client in online else NOT_CONNECTED
            for client in requests
        }

    def _believed(self, request: Request, reply: Letter) -> ClientResult | str:
        try:
            letter = _addressed(request.letter, reply)
            upload, size = self._upload(request, letter)
            info = _info(letter.meta.get("info"))
        except WireError as error:
            return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        except _Failed as failure:
            return str(failure)
        found = inspect_upload(upload)
        if found.fault:
            return found.fault
        return ClientResult(
            client=request.client,
            received=request.received,
            upload=upload,
            metrics=info,
            down=request.down,
            up=self._measured(upload, size),
            flops=None if request.expected is None else request.expected.flops,
            largest=found.largest,
        )

    def _measured(self, upload: Any, size: int) -> MessageStats:
        if upload is None:
            return MessageStats()
        return wire.measure(upload, self._precision)._replace(bytes=size)

    def _upload(self, request: Request, letter: Letter) -> tuple[Any, int]:
        expected = request.expected
        nothing = expected is not None and expected.known and expected.template is None
        if not request.upload or nothing:
            if letter.parts:
                raise WireError("upload: none was requested")
            return None, 0
        if letter.parts.keys() != {"upload"} or expected is None:
            raise WireError(f"upload: expected one part, got {len(letter.parts)}")
        data = letter.parts["upload"]
        # a copy: memory that is aligned as in a run in one process gives the same bits
        return tree.map(_copy, self._templates.read(data, expected)), len(data)

    def _note_untyped(self, requests: Mapping[int, Request]) -> None:
        notes = {q.expected.note for q in requests.values() if q.expected and q.expected.note}
        self.notes += sorted(notes)

    def _shortage(
        self,
        answers: Mapping[int, ClientResult | str],
        arrived: int,
        needed: int,
        requests: Mapping[int, Request],
    ) -> ParsiflError:
        round = next(iter(requests.values())).round + 1
        reasons = [f"client {c}: {a}" for c, a in sorted(answers.items()) if isinstance(a, str)]
        return ParsiflError(
            f"round {round}: {arrived} uploads arrived and {needed} are needed; nothing is lost, "
            "the run can be resumed (deployment.resume=true)\n  " + "\n  ".join(reasons[:20])
        )


class _Failed(Exception):
    """A client says itself that its work failed."""


def _addressed(sent: Letter, reply: Letter | str) -> Letter:
    """Return a reply that answers this very letter."""
    if isinstance(reply, str):
        raise WireError(reply)
    if "error" in reply.meta:
        raise _Failed(str(reply.meta["error"])[:_LONGEST_REASON])
    for name, kind in (("client", int), ("round", int), ("experiment", str)):
        found, wanted = reply.get(name, kind), sent.meta[name]
        if found != wanted:
            raise WireError(f"{name}: an answer for {found!r:.40}, not {wanted!r}")
    return reply


def _info(value: Any) -> dict[str, float]:
    good = isinstance(value, dict) and len(value) <= _MOST_INFO
    if not good or not all(type(v) is float and math.isfinite(v) for v in value.values()):
        raise WireError("info: expected finite numbers by name")
    return dict(value)


def _copy(leaf: Any) -> Any:
    return leaf.clone(memory_format=torch.contiguous_format)
