"""Clients on other machines: the pool behind a Flower deployment.

Clients keep their own states, one file per version. A request names two versions: the one to start
from, which the server has accepted, and the oldest one that a checkpoint on disk still needs.
The client deletes older ones. `save` stores what a checkpoint needs; the next `train` sends it,
because the loop continues only if that checkpoint was written.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parsifl import wire
from parsifl.core.algorithm import AnyAlgorithm, ClientInfo
from parsifl.core.batching import Rows
from parsifl.core.errors import CheckpointError
from parsifl.core.keys import Key
from parsifl.core.metrics import extra_metrics
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
from parsifl.engine.record import SPLITS
from parsifl.flower.exchange import NOT_CONNECTED, Exchange, Request, UploadTemplates
from parsifl.flower.hello import DataSchema, agree
from parsifl.flower.membership import Log, Membership
from parsifl.flower.message import Link
from parsifl.flower.network_schema import (
    EvaluateReply,
    EvaluateRequest,
    HelloRequest,
    TrainRequest,
    describe,
)
from parsifl.flower.settings import DeploymentSettings
from parsifl.wire import MessageStats

EXECUTOR = "flower"


class FlowerPool:
    """Clients behind a transport.

    Parameters
    ----------
    make
        Builds the problem from data of the agreed schema.
    left_out
        Clients that are excluded, with the reason.
    """

    executor = EXECUTOR
    deferred_evaluation = True

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        settings: DeploymentSettings,
        link: Link,
        log: Log,
        make: Callable[[ClientData], Problem],
        left_out: Mapping[int, str] | None = None,
    ) -> None:
        self._algorithm, self._settings = algorithm, settings
        self._link, self._log, self._make = link, log, make
        self.left_out: dict[int, str] = dict(left_out or {})
        deployment, clients = settings.deployment, settings.clients
        self.members = Membership(link, clients, log, deployment, self.left_out)
        self.agreement: dict[str, Any] | None = None
        self.seconds: Mapping[str, float] = {}
        self.experiment = uuid.uuid4().hex
        self._accepted = [0] * clients
        self._written: list[list[int]] = []  # the versions that the last two checkpoints need
        self._oldest = [0] * clients
        self._flagged: set[tuple[int, str]] = set()
        self._before: dict[int, tuple[int, int]] = {}
        self._precision = settings.experiment.precision
        self._unresponsive: set[int] = set()

    def use(self, algorithm: AnyAlgorithm) -> None:
        """Set the algorithm, whose settings depend on what the clients agreed on; before `open`."""
        self._algorithm = algorithm

    def book(self, client: int, up: int, down: int) -> None:
        """Add the bytes of messages before the first round to the record of that round."""
        before = self._before.get(client, (0, 0))
        self._before[client] = before[0] + up, before[1] + down

    @property
    def booked(self) -> tuple[int, int]:
        """The bytes up and down that are not in a record yet."""
        up, down = zip(*self._before.values(), strict=True) if self._before else ((), ())
        return sum(up), sum(down)

    @property
    def present(self) -> list[int]:
        """The clients that take part."""
        return [i for i in range(self._settings.clients) if i not in self.left_out]

    def open(self, *, resumed: bool) -> Problem:
        """Wait for all clients, or for a quorum on resume, and build the problem."""
        deployment, clients = self._settings.deployment, self._settings.clients
        present = self.present
        needed = max(1, round(deployment.quorum * len(present))) if resumed else len(present)
        self.members.greeting = HelloRequest(agreement=self.agreement)
        self.members.gather(needed, deployment.wait)
        self.clients: Sequence[ClientInfo] = [
            ClientInfo(i, 0) if i in self.left_out else self.members.infos[i]
            for i in range(clients)
        ]
        self.schema = schema = agree({i: self.members.schemas[i] for i in present})
        example = schema.example()
        problem = self._make(example)
        self._algorithm.check_capabilities(problem)
        if flatten_inputs(problem):
            schema = type(schema).of(example.flattened())
        self._problem = problem
        self._metric_names = _metric_names(problem, schema)
        self._templates = UploadTemplates(self._algorithm, problem, schema)
        self._log(f"{len(self.members.online())} of {len(present)} clients are connected")
        return problem

    # ------------------------------------------------------------------ training
    def train(
        self, requests: Iterable[ClientRequest], evaluation: PendingEvaluation | None = None
    ) -> Generator[Answer, None, None]:
        """Send requests, collect replies until a quorum has uploaded, and yield by client.

        A pending evaluation is part of the same exchange, and its scores come first.
        """
        started = time.perf_counter()
        if self._written:
            self._oldest = [min(versions) for versions in zip(*self._written, strict=True)]
        asked: dict[int, Request] = {}
        failed: dict[int, str] = {}
        encoder, cohort, round = _Encoder(self._precision), [], 0
        for request in requests:
            client, round = request.client, request.key.round
            cohort += [client] if request.upload else []
            try:
                asked[client.id] = self._request(request, encoder)
            except Exception as error:  # its profile or its message cannot be used
                failed[client.id] = describe(error)
        evaluated, unasked = self._evaluation(evaluation)
        exchange = self._exchange()
        answers, scores = exchange.collect(asked, failed, len(cohort), round + 1, evaluated)
        notes = (*exchange.notes, *self._dominant(cohort))
        if round == 0:
            notes += tuple(f"left out: {reason}" for reason in self.left_out.values())
        self.seconds = {"local": time.perf_counter() - started}
        yield from self._all_scores({**unasked, **scores})
        for number in sorted(answers):
            answer = answers[number]
            if isinstance(answer, str):
                sent = number in asked and answer != NOT_CONNECTED
                down = asked[number].down if sent else MessageStats()
                yield ClientFailure(self.clients[number], answer, down)
            else:
                self._accepted[number] = round + 1
                yield self._booked(_noted(answer, notes))
                notes = ()

    def _booked(self, answer: ClientResult) -> ClientResult:
        up, down = self._before.pop(answer.client.id, (0, 0))
        sent = answer.up._replace(bytes=answer.up.bytes + up)
        received = answer.down._replace(bytes=answer.down.bytes + down)
        return replace(answer, up=sent, down=received)

    def _dominant(self, cohort: Sequence[ClientInfo]) -> list[str]:
        """Note clients whose declared rows dominate the mean."""
        weights = {client.id: self._algorithm.weight(client) for client in cohort}
        return list(self._flag(weights, "weight of this round").values())

    def _flag(self, weights: Mapping[int, float], what: str) -> dict[int, str]:
        """Return a note for every client with most of the weight, once per client."""
        total, most = sum(weights.values()), self._settings.deployment.largest_share
        numbers = [
            number
            for number, weight in weights.items()
            if len(weights) > 2 and weight > most * total and (number, what) not in self._flagged
        ]
        self._flagged.update((number, what) for number in numbers)
        return {
            number: f"client {number} has {weights[number] / total:.1%} of the {what} "
            f"(deployment.largest_share is {most:g}); its number of rows is not verified"
            for number in numbers
        }

    def _request(self, request: ClientRequest, encoder: _Encoder) -> Request:
        client = request.client
        data, received, down = encoder(request.message)
        parts = {} if data is None else {"down": data}
        message = TrainRequest(**self._head(request), uploads=request.upload)
        template = self._templates.of(received, client, request.key)
        return Request(client, message, parts, received, down, template, request.upload)

    def _head(self, request: ClientRequest) -> Json:
        """Return the fields that every request for work has."""
        number = request.client.id
        return {
            "client": number,
            "round": request.key.round,
            "experiment": self.experiment,
            "accepted": self._accepted[number],
            "oldest": self._oldest[number],
            "data_schema": self.schema,
            "lost_state": self._settings.deployment.lost_state,
            "agreement": self.agreement,
        }

    def _exchange(self) -> Exchange:
        return Exchange(
            self._templates,
            self.members,
            self._link,
            self._settings.deployment,
            self._precision,
            self._unresponsive,
        )

    # ------------------------------------------------------------------ evaluation
    def evaluate(self, requests: Iterable[ClientRequest], server: Any) -> Iterator[ClientScores]:
        """Let the clients evaluate their models on their own rows; they return only metrics."""
        asked, failed = self._evaluation(PendingEvaluation(requests, server))
        scores = self._exchange().evaluate(asked) if asked else {}
        yield from self._all_scores({**failed, **scores})

    def _evaluation(
        self, evaluation: PendingEvaluation | None
    ) -> tuple[dict[int, Request], dict[int, str]]:
        """Return the requests to evaluate, and why some clients cannot be evaluated."""
        asked: dict[int, Request] = {}
        failed: dict[int, str] = {}
        if evaluation is None:
            return asked, failed
        encoder = _Encoder(self._precision)
        shared: dict[str, bytes] | None = None
        for request in evaluation.requests:
            client = request.client
            try:
                shared = self._model_part(evaluation.server) if shared is None else shared
                data, _, _ = encoder(request.message)
                down = {} if data is None else {"down": data}
                message = EvaluateRequest(**self._head(request))
                asked[client.id] = Request(client, message, {**shared, **down})
            except Exception as error:
                failed[client.id] = describe(error)
        return asked, failed

    def _all_scores(self, answers: Mapping[int, EvaluateReply | str]) -> Iterator[ClientScores]:
        scores = [self._scores(self.clients[number], answers[number]) for number in sorted(answers)]
        for split in SPLITS:
            rows = {each.client.id: each.samples[split] for each in scores if split in each.samples}
            flagged = self._flag(rows, f"{split} rows")
            scores = [
                replace(each, notes=(*each.notes, flagged[each.client.id]))
                if each.client.id in flagged
                else each
                for each in scores
            ]
        yield from scores

    def _scores(self, client: ClientInfo, reply: EvaluateReply | str) -> ClientScores:
        if isinstance(reply, str):
            return ClientScores(client, reason=reply)
        if reply.samples.get("train", 0) > client.samples:
            return ClientScores(client, reason="samples.train: more rows than it has declared")
        known = self._metric_names
        values: dict[str, dict[str, dict[str, float]]] = {}
        for model, splits in reply.scores.items():
            for split, metrics in splits.items():
                if known and not known <= metrics.keys():
                    missing = ", ".join(sorted(known - metrics.keys()))
                    return ClientScores(client, reason=f"scores.{model}.{split}: no {missing}")
                # other names would remove the metrics of every client from the record
                accepted = {name: v for name, v in metrics.items() if not known or name in known}
                values.setdefault(model, {})[split] = accepted
        notes: tuple[str, ...] = ()
        if reply.reinitialized:
            notes = (f"client {client.id} was evaluated without its state, which is lost",)
        return ClientScores(client, {str(k): n for k, n in reply.samples.items()}, values, notes)

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
        """Return the clients and the versions of their states."""
        del directory  # clients keep their states themselves
        self._written = [*self._written[-1:], list(self._accepted)]
        return {
            "experiment": self.experiment,
            "accepted": self._accepted,
            "members": self.members.to_json(),
            "left_out": {str(client): reason for client, reason in self.left_out.items()},
            "agreement": self.agreement,
        }

    def restore(self, directory: Path, saved: Json) -> None:
        """Restore the versions that a checkpoint names."""
        if "accepted" not in saved:
            raise CheckpointError(
                f"{directory.parent} holds a run of another engine; choose another directory"
            )
        self.experiment = str(saved["experiment"])
        self._accepted = [int(version) for version in saved["accepted"]]
        self._written = [list(self._accepted)]
        stored = saved["left_out"]
        self.left_out.update({int(client): str(reason) for client, reason in stored.items()})
        self.members.restore(saved["members"])
        self.agreement = saved["agreement"]


class _Encoder:
    """Encodes messages; an object that is sent to many clients is encoded once."""

    def __init__(self, precision: wire.Precision) -> None:
        self._outbox, self._precision = Outbox(precision), precision
        self._last: tuple[Any, bytes | None] = (None, None)

    def __call__(self, message: Any) -> tuple[bytes | None, Any, MessageStats]:
        """Return the bytes, the message as received, and the size; None is not sent."""
        received, stats = self._outbox.send(message)
        if message is None:
            return None, None, stats
        if self._last[0] is not message:
            self._last = (message, wire.encode(message, self._precision))
        return self._last[1], received, stats


def _noted(result: ClientResult, notes: tuple[str, ...]) -> ClientResult:
    return replace(result, notes=notes) if notes else result


def _metric_names(problem: Problem, schema: DataSchema) -> frozenset[str]:
    """Return the metrics of this problem; empty if they cannot be determined."""
    example = schema.example()
    rows = Rows(schema.zeros(), example.y, torch.ones(1, dtype=torch.float64))
    try:
        names = problem.metrics(problem.init(Key(0)), rows)
    except Exception:  # a problem with its own kind of rows
        return frozenset()
    return frozenset([*names, *(metric.name for metric in extra_metrics(problem))])
