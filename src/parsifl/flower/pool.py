"""Clients on other machines: the pool behind a Flower deployment.

Clients keep their states themselves, one file per version. A request names two versions: the one to
start from, which the server has accepted, and the oldest one that a checkpoint on disk still names.
The client deletes older ones. `save` remembers what a checkpoint names; the next `train` announces
it, because the loop goes on only if that checkpoint was written.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parsifl import wire
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.errors import CheckpointError, WireError
from parsifl.core.problem import Problem, flatten_inputs
from parsifl.data.clients import ClientData
from parsifl.engine.local_pool import Outbox
from parsifl.engine.pool import (
    Answer,
    ClientFailure,
    ClientRequest,
    ClientResult,
    ClientScores,
    Json,
    PendingEvaluation,
)
from parsifl.flower.data_schema import agree
from parsifl.flower.exchange import NOT_CONNECTED, Exchange, Request
from parsifl.flower.membership import Log, Membership
from parsifl.flower.message import Letter
from parsifl.flower.scores import read_scores
from parsifl.flower.settings import Settings
from parsifl.flower.transport import Link
from parsifl.flower.upload_template import UploadTemplates
from parsifl.wire import MessageStats

EXECUTOR = "flower"


class FlowerPool:
    """Clients behind a transport.

    Parameters
    ----------
    make
        Builds the problem from data of the agreed form.
    common
        What every message says, besides client, round and versions.
    """

    executor = EXECUTOR
    deferred_evaluation = False

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        settings: Settings,
        link: Link,
        log: Log,
        make: Callable[[ClientData], Problem],
    ) -> None:
        self._algorithm, self._settings = algorithm, settings
        self._link, self._log, self._make = link, log, make
        self.members = Membership(link, settings.clients, log)
        self.common: Json = {}
        self.schema: Json = {}
        self.seconds: Mapping[str, float] = {}
        self._experiment = uuid.uuid4().hex
        self._accepted = [0] * settings.clients
        self._written: list[list[int]] = []  # what the last two checkpoints name
        self._oldest = [0] * settings.clients
        self._precision = settings.experiment.precision

    def open(self, *, resumed: bool) -> Problem:
        """Wait for the clients, all of them at first and a quorum on resume; make the problem."""
        deployment, clients = self._settings.deployment, self._settings.clients
        needed = max(1, round(deployment.quorum * clients)) if resumed else clients
        self.members.greeting = Letter(self.common)
        self.members.gather(lambda: len(self.members.online()) >= needed, deployment.wait)
        self.clients: Sequence[ClientInfo] = [self.members.infos[i] for i in range(clients)]
        schema = agree([self.members.facts[i] for i in range(clients)])
        example = schema.example()
        problem = self._make(example)
        self._algorithm.check_capabilities(problem)
        self.schema = schema.to_json()
        if flatten_inputs(problem):
            schema = type(schema).of(example.flattened())
        self._problem = problem
        self._templates = UploadTemplates(self._algorithm, problem, schema)
        self._log(f"{len(self.members.online())} of {clients} clients are connected")
        return problem

    # ------------------------------------------------------------------ training
    def train(
        self, requests: Iterable[ClientRequest], evaluation: PendingEvaluation | None = None
    ) -> Generator[Answer, None, None]:
        """Send requests, collect replies until a quorum has uploaded, and yield by client."""
        del evaluation  # this pool does not defer
        started = time.perf_counter()
        if self._written:
            self._oldest = [min(versions) for versions in zip(*self._written, strict=True)]
        asked, outbox = {}, _Encoder(self._precision)
        for request in requests:
            asked[request.client.id] = self._request(request, outbox)
        exchange = self._exchange()
        cohort = sum(request.upload for request in asked.values())
        answers = exchange.collect(asked, cohort)
        notes = tuple(exchange.notes)
        self.seconds = {"local": time.perf_counter() - started}
        for client in sorted(asked):
            answer = answers[client]
            if isinstance(answer, str):
                down = MessageStats() if answer == NOT_CONNECTED else asked[client].down
                yield ClientFailure(self.clients[client], answer, down)
            else:
                self._accepted[client] = asked[client].round + 1
                yield _noted(answer, notes)
                notes = ()

    def _request(self, request: ClientRequest, encoder: _Encoder) -> Request:
        client = request.client
        data, received, down = encoder(request.message)
        parts = {} if data is None else {"down": data}
        letter = self.message(request, parts, uploads=request.upload)
        template = self._templates.of(received, client, request.key)
        return Request(client, letter, request.key.round, received, down, template, request.upload)

    def message(self, request: ClientRequest, parts: Mapping[str, bytes], **more: Any) -> Letter:
        """Return a message to a client."""
        number = request.client.id
        meta = {
            "client": number,
            "round": request.key.round,
            "experiment": self._experiment,
            "ack": self._accepted[number],
            "oldest": self._oldest[number],
            "facts": self.schema,
        }
        return Letter({**meta, **self.common, **more}, parts)

    def _exchange(self) -> Exchange:
        return Exchange(
            self._templates,
            self.members,
            self._link,
            self._settings.deployment,
            self._precision,
        )

    # ------------------------------------------------------------------ evaluation
    def evaluate(self, requests: Iterable[ClientRequest], server: Any) -> Iterator[ClientScores]:
        """Let the clients evaluate their models on their own rows; only metrics come back."""
        shared = self._model_part(server)
        asked, encoder = {}, _Encoder(self._precision)
        for request in requests:
            data, _, _ = encoder(request.message)
            down = {} if data is None else {"down": data}
            letter = self.message(request, {**shared, **down})
            asked[request.client.id] = Request(
                request.client, letter, request.key.round, None, MessageStats(), None, upload=False
            )
        for client, reply in sorted(self._exchange().evaluate(asked).items()):
            info = self.clients[client]
            try:
                yield read_scores(info, reply)
            except WireError as error:
                yield ClientScores(info, reason=str(error))

    def _model_part(self, server: Any) -> dict[str, bytes]:
        model = self._algorithm.model(self._problem, server)
        if model is None:
            return {}
        if model.problem is not self._problem:
            # an ensemble, for example: its parameters alone do not determine the model
            return {"server": wire.encode(server)}
        return {"model": wire.encode(model.params)}

    # ------------------------------------------------------------------ checkpoints
    def save(self, directory: Path) -> Json:
        """Return what names the clients and the versions of their states."""
        del directory  # clients keep their states themselves
        self._written = [*self._written[-1:], list(self._accepted)]
        return {
            "experiment": self._experiment,
            "accepted": self._accepted,
            "members": self.members.to_json(),
            "common": self.common,
        }

    def restore(self, directory: Path, saved: Json) -> None:
        """Go back to the versions that a checkpoint names."""
        if "accepted" not in saved:
            raise CheckpointError(
                f"{directory.parent} holds a run of another engine; choose another directory"
            )
        self._experiment = str(saved["experiment"])
        self._accepted = [int(version) for version in saved["accepted"]]
        self._written = [list(self._accepted)]
        self.members.restore(saved["members"])
        self.common = dict(saved["common"])


class _Encoder:
    """Encodes messages; one object that goes to many is encoded once."""

    def __init__(self, precision: wire.Precision) -> None:
        self._outbox, self._precision = Outbox(precision), precision
        self._last: tuple[Any, bytes | None] = (None, None)

    def __call__(self, message: Any) -> tuple[bytes | None, Any, MessageStats]:
        """Return the bytes, what the receiver sees, and the size; None is not sent at all."""
        received, stats = self._outbox.send(message)
        if message is None:
            return None, None, stats
        if self._last[0] is not message:
            self._last = (message, wire.encode(message, self._precision))
        return self._last[1], received, stats


def _noted(result: ClientResult, notes: tuple[str, ...]) -> ClientResult:
    return replace(result, notes=notes) if notes else result
