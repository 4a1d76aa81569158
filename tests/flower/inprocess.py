"""A federation in one process: letters are handed over, nothing is sent; faults can be planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.flower.client import RemoteClient, alone, answered
from parsifl.flower.message import Letter, from_text, to_text
from parsifl.flower.server import Federation
from parsifl.flower.settings import Deployment, Settings
from parsifl.flower.transport import Answers, Kind
from parsifl.linear.glm import GLM

Answer = Letter | str | None
Fault = Callable[[Kind, int, Letter, Callable[[], Letter]], Answer]


def honest(_kind: Kind, _client: int, _letter: Letter, answer: Callable[[], Letter]) -> Answer:
    """Answer as a client does."""
    return answer()


@dataclass
class InProcess:
    """A `Link` to sites in this process; node 100 + i is client i."""

    experiment: Experiment
    root: Path
    fault: Fault = honest
    clients: dict[int, int] = field(default_factory=dict)
    asked: list[tuple[Kind, int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    waited: float = 0.0

    def __post_init__(self) -> None:
        self._data = self.experiment.load()
        if not self.clients:
            self.clients = {100 + i: i for i in range(len(self._data))}

    def nodes(self) -> list[int]:
        return sorted(self.clients)

    def ask(
        self,
        kind: Kind,
        letters: Mapping[int, Letter],
        timeout: float,  # noqa: ARG002 - a Link
        enough: Callable[[Answers], bool] | None = None,  # noqa: ARG002 - all answer at once
    ) -> Answers:
        found: Answers = {}
        # the reverse of the order of clients: replies come as they like
        for node, letter in sorted(letters.items(), reverse=True):
            client = self.clients[node]
            self.asked.append((kind, client))
            arrived = Letter(from_text(to_text(letter.meta)), letter.parts)
            answer = self.fault(kind, client, arrived, partial(self.site(client), kind, arrived))
            if isinstance(answer, Letter):
                answer = Letter(from_text(to_text(answer.meta)), answer.parts)
            if answer is not None:
                found[node] = answer
        return found

    def pause(self, seconds: float) -> None:
        self.waited += seconds

    def site(self, client: int) -> Callable[[Kind, Letter], Letter]:
        # a new one for every letter, as Flower starts a new process
        def answer(kind: Kind, letter: Letter) -> Letter:
            site = RemoteClient(self.experiment, client, alone(self._data, client), self.root)
            return site.answer(kind, letter)

        return lambda kind, letter: answered(lambda: answer(kind, letter))

    def run(self, out: Path, **deployment: Any) -> list[dict[str, Any]]:
        """Run a federation; return its records as JSON values."""
        return [record.to_json() for record in self.federation(out, **deployment).run()]

    def federation(self, out: Path, **deployment: Any) -> Federation:
        count = len(self._data)
        settings = Settings(
            self.experiment, count, Deployment(out=str(out), **{"wait": 1.0, **deployment})
        )
        return Federation(settings, self, self.log.append)


def simulated(experiment: Experiment, folder: Path | None = None) -> Run:
    """Run the same experiment in the engine that clients are compared with."""
    data = experiment.load()
    problem = problem_for(experiment.model, data)
    return simulate(
        experiment.method(),
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
