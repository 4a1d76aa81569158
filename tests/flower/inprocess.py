"""A federation in one process: messages are handed over; faults can be planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from dataclasses import field as entry
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.flower.client import MakeProblem, RemoteClient, alone
from parsifl.flower.message import Envelope, Kind, Replies, Requests, answered, respond
from parsifl.flower.server import Federation
from parsifl.flower.settings import Deployment, DeploymentSettings
from parsifl.linear.glm import GLM

Answer = Envelope | str | None
Fault = Callable[[Kind, int, Envelope, Callable[[], Envelope]], Answer]


def honest(_kind: Kind, _client: int, _request: Envelope, answer: Callable[[], Envelope]) -> Answer:
    """Answer as a client does."""
    return answer()


@dataclass
class InProcess:
    """A `Link` to sites in this process; node 100 + i is client i."""

    experiment: Experiment
    root: Path
    fault: Fault = honest
    clients: dict[int, int] = entry(default_factory=dict)
    asked: list[tuple[Kind, int]] = entry(default_factory=list)
    exchanges: list[dict[int, Kind]] = entry(default_factory=list)
    log: list[str] = entry(default_factory=list)
    waited: float = 0.0
    make: MakeProblem | None = None

    def __post_init__(self) -> None:
        self._data = self.experiment.load()
        if not self.clients:
            self.clients = {100 + i: i for i in range(len(self._data))}

    def nodes(self) -> list[int]:
        return sorted(self.clients)

    def ask(
        self,
        requests: Requests,
        timeout: float,  # noqa: ARG002 - a Link
        enough: Callable[[Replies], bool] | None = None,  # noqa: ARG002 - all answer at once
    ) -> Replies:
        found: Replies = {}
        self.exchanges.append({self.clients[node]: kind for node, (kind, _) in requests.items()})
        # the reverse of the order of clients: replies come as they like
        for node, (kind, request) in sorted(requests.items(), key=itemgetter(0), reverse=True):
            client = self.clients[node]
            self.asked.append((kind, client))
            answer = self.fault(kind, client, request, partial(self.site(client), kind, request))
            if answer is not None:
                found[node] = answer
        return found

    def pause(self, seconds: float) -> None:
        self.waited += seconds

    def site(self, client: int) -> Callable[[Kind, Envelope], Envelope]:
        # a new one for every request, as Flower starts a new process
        def answer(kind: Kind, request: Envelope) -> Envelope:
            site = RemoteClient(
                self.experiment, client, alone(self._data, client), self.root, self.make
            )
            return respond(site, kind, request)

        return lambda kind, request: answered(lambda: answer(kind, request))

    def run(self, out: Path, **deployment: Any) -> list[dict[str, Any]]:
        """Run a federation; return its records as JSON values."""
        return [record.to_json() for record in self.federation(out, **deployment).run()]

    def federation(self, out: Path, **deployment: Any) -> Federation:
        count = self.experiment.clients or len(self.clients)
        settings = DeploymentSettings(
            self.experiment, count, Deployment(out=str(out), **{"wait": 1.0, **deployment})
        )
        return Federation(settings, self, self.log.append, self.make)


def fields(envelope: Envelope) -> dict[str, Any]:
    """Return what a message says."""
    found: dict[str, Any] = json.loads(envelope.text)
    return found


def changed(envelope: Envelope, **changes: object) -> Envelope:
    """Return a forged copy of a message."""
    return replace(envelope, text=json.dumps({**fields(envelope), **changes}))


def simulated(experiment: Experiment, folder: Path | None = None) -> Run:
    """Run the same experiment in the engine that clients are compared with."""
    data = experiment.load()
    problem = problem_for(experiment.model, data)
    return simulate(
        experiment.build_algorithm(),
        problem,
        data.flattened() if isinstance(problem, GLM) else data,
        experiment.rounds,
        seed=experiment.seed,
        participation=experiment.participation,
        executor="loop",
        run_dir=folder,
        evaluate_every=experiment.evaluate_every,
        evaluation=experiment.evaluation,
        precision=experiment.precision,
    )
