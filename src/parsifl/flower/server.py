"""A run on a network: the loop of `parsifl.simulate` with clients that are elsewhere."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from parsifl import wire
from parsifl.core import config
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import CheckpointError
from parsifl.core.keys import Key
from parsifl.core.problem import flatten_inputs
from parsifl.engine import checkpoint, sampling
from parsifl.engine.experiment import problem_for
from parsifl.engine.fingerprint import identity_of, profiles_checksum
from parsifl.engine.gather import Gathered
from parsifl.engine.run_dir import Record, RunDir
from parsifl.engine.state_store import StateStore
from parsifl.engine.threads import thread_scope
from parsifl.flower.client import MakeProblem
from parsifl.flower.data_schema import agree
from parsifl.flower.exchange import NOT_CONNECTED, Collection, Question
from parsifl.flower.membership import Log, Membership
from parsifl.flower.message import Letter
from parsifl.flower.scores import add_scores
from parsifl.flower.settings import Settings
from parsifl.flower.transport import Link
from parsifl.flower.upload_template import Expectations
from parsifl.wire import Precision

EXECUTOR = "flower"


class Federation:
    """The server's side of a run.

    Everything that lasts is in the run folder: the server's state, the records, what is known of
    the clients, and for each client the last round that was accepted of it (its acknowledgement).
    A server that is killed goes on from there, and clients go on from the states that it names.
    """

    _files: tuple[str, ...] = ()
    """What is written into the run folder besides the files of every run."""

    def __init__(
        self, settings: Settings, link: Link, log: Log, make: MakeProblem | None = None
    ) -> None:
        self._settings, self._experiment = settings, settings.experiment
        self._link, self._log = link, log
        self._method = self._experiment.method()
        self._types = self._method.tree_types()
        self._make = make or partial(problem_for, self._experiment.model)
        self._key = Key(self._experiment.seed)
        self._roster = Membership(link, settings.clients, log)
        self._folder = RunDir(Path(settings.deployment.out))
        self._acks = [0] * settings.clients
        self._name = uuid.uuid4().hex
        self._records: list[Record] = []
        self._server: Any = None
        self._sampled: set[int] = set()
        self._common: dict[str, Any] = {}
        self._pool = sampling.eligible_clients(
            settings.clients, self._experiment.evaluation, self._key
        )

    def run(self) -> list[Record]:
        """Run until all rounds are done; return their records."""
        check_free(self._folder.path, *self._files, resume=self._settings.deployment.resume)
        found = checkpoint.load(self._folder.checkpoints, self._types)
        if found is not None:
            self._restore(found.totals)
        self._prepare(None if found is None else found.totals)
        self._meet(resumed=found is not None)
        self._open()
        if found is not None:
            self._server = found.server
        self._records = self._folder.rewind(0 if found is None else found.round)
        for round in range(len(self._records)):
            self._sampled.update(self._training(round))
        for round in range(len(self._records), self._experiment.rounds):
            record = self._round(round)
            self._records.append(record)
            self._folder.append(record)
            totals = {
                "experiment": self._name,
                "acks": self._acks,
                "roster": self._roster.to_json(),
                "common": self._common,
            }
            checkpoint.save(self._folder.checkpoints, round + 1, self._server, StateStore(), totals)
            self._log(f"round {round + 1} of {self._experiment.rounds} is done")
        self._finish()
        return self._records

    def _prepare(self, totals: Mapping[str, Any] | None) -> None:
        """Settle what every letter says (`self._common`) before the clients report."""

    def _finish(self) -> None:
        """Do what is left when all rounds are done; again after every resumption."""

    def _restore(self, totals: dict[str, Any]) -> None:
        if "acks" not in totals:
            raise CheckpointError(
                f"{self._folder.path} holds a run of another engine; choose another folder"
            )
        self._name, self._acks = str(totals["experiment"]), [int(a) for a in totals["acks"]]
        self._roster.restore(totals["roster"])

    def _meet(self, *, resumed: bool) -> None:
        """Wait for the clients: all of them at first, a quorum when a run goes on."""
        deployment, clients = self._settings.deployment, self._settings.clients
        needed = max(1, round(deployment.quorum * clients)) if resumed else clients
        self._roster.greeting = Letter(self._common)
        self._roster.gather(lambda: len(self._roster.online()) >= needed, deployment.wait)
        self._infos: list[ClientInfo] = [self._roster.infos[i] for i in range(clients)]
        facts = agree([self._roster.facts[i] for i in range(clients)])
        example = facts.example()
        self._problem = self._make(example)
        self._method.check_capabilities(self._problem)
        self._agreed = facts.to_json()
        if flatten_inputs(self._problem):
            facts = type(facts).of(example.flattened())
        self._expectations = Expectations(self._method, self._problem, facts)
        self._server = self._method.init_server(
            self._problem, self._infos, self._key.replace(purpose="server")
        )
        self._log(f"{len(self._roster.online())} of {clients} clients are there")

    def _open(self) -> None:
        """Create the run folder, or check that it belongs to this very configuration."""
        experiment = self._experiment
        data = {
            "name": experiment.data if self._agreed["name"] != "own" else "own",
            "clients": len(self._infos),
            "rows": sum(info.samples for info in self._infos),
            "augment": self._agreed["augment"],
            "profiles": profiles_checksum(info.profile for info in self._infos),
        }
        run = {
            "seed": experiment.seed,
            "participation": experiment.participation,
            "engine": EXECUTOR,
            "precision": experiment.precision,
            "evaluate_every": experiment.evaluate_every,
            "executor": EXECUTOR,
            "evaluation": config.to_json(experiment.evaluation),
            "network": config.to_json(experiment.network),
        }
        described = identity_of(self._method, self._problem, data, run)
        self._folder.open(described, resume=self._settings.deployment.resume)

    # ------------------------------------------------------------------ one round
    def _training(self, round: int) -> Sequence[int]:
        if self._method.everyone_trains():
            return self._pool
        return self._cohort(round)

    def _cohort(self, round: int) -> list[int]:
        key = self._key.replace(round=round)
        return sampling.cohort(self._pool, self._experiment.participation, key)

    def _round(self, round: int) -> Record:
        key = self._key.replace(round=round)
        cohort, training = self._cohort(round), self._training(round)
        self._sampled.update(training)
        started = time.perf_counter()
        questions = self._questions(training, set(cohort), key)
        collection = Collection(
            self._expectations, self._roster, self._link, self._settings.deployment
        )
        answers = collection.collect(questions, len(cohort))
        received = time.perf_counter()
        chosen = self._experiment
        gathered = Gathered(
            self._method,
            self._problem,
            self._infos,
            chosen.network,
            chosen.precision,
            thread_scope(self._problem),
        )
        for client in sorted(questions):
            answer = answers[client]
            if isinstance(answer, str):
                sent = 0 if answer == NOT_CONNECTED else questions[client].bytes_down
                gathered.drop(client, sent, answer)
            else:
                gathered.receive(answer)
                self._acks[client] = round + 1
        self._server = gathered.aggregate(self._server, key.replace(purpose="aggregate"))
        ledger = gathered.ledger
        ledger.fallbacks += collection.notes
        ledger.seconds = {
            "local": received - started,
            "aggregate": time.perf_counter() - received,
        }
        record: Record = {"round": round + 1, "cohort": len(cohort), **asdict(ledger)}
        record["executor"] = EXECUTOR
        every, last = self._experiment.evaluate_every, round + 1 == self._experiment.rounds
        if every and (last or (round + 1) % every == 0):
            self._evaluate(key, record)
        return record

    def _questions(
        self, clients: Sequence[int], uploading: set[int], key: Key
    ) -> dict[int, Question]:
        found: dict[int, Question] = {}
        send = _Encoder(self._experiment.precision)
        for client in clients:
            info = self._infos[client]
            data, down = send(self._broadcast(info, key))
            parts = {} if data is None else {"down": data}
            letter = self._letter(client, key, parts, uploads=client in uploading)
            expected = self._expectations.of(down, info, key)
            size = 0 if data is None else len(data)
            found[client] = Question(letter, down, size, expected, client in uploading)
        return found

    def _broadcast(self, info: ClientInfo, key: Key) -> Any:
        here = key.replace(client=info.id, purpose="broadcast")
        return self._method.broadcast(self._problem, self._server, info, here)

    def _letter(self, client: int, key: Key, parts: dict[str, bytes], **more: Any) -> Letter:
        meta = {
            "client": client,
            "round": key.round,
            "experiment": self._name,
            "ack": self._acks[client],
            "facts": self._agreed,
        }
        return Letter({**meta, **self._common, **more}, parts)

    # ------------------------------------------------------------------ judging
    def _evaluate(self, key: Key, record: Record) -> None:
        """Let the clients judge their models on their own rows; only metrics come back."""
        started = time.perf_counter()
        ids = sampling.judged(
            self._experiment.evaluation, len(self._infos), self._pool, self._sampled
        )
        parts = self._model_part()
        questions = {}
        send = _Encoder(self._experiment.precision)
        for client in ids:
            data, _ = send(self._broadcast(self._infos[client], key))
            down = {} if data is None else {"down": data}
            letter = self._letter(client, key, {**parts, **down})
            questions[client] = Question(letter, None, 0, None, uploads=False)
        collection = Collection(
            self._expectations, self._roster, self._link, self._settings.deployment
        )
        answers = collection.judge(questions)
        detail = add_scores(record, answers, self._experiment.evaluation, self._problem)
        self._folder.write_clients(detail)
        record["seconds"]["evaluate"] = time.perf_counter() - started

    def _model_part(self) -> dict[str, bytes]:
        model = self._method.model(self._problem, self._server)
        if model is None:
            return {}
        if model.problem is not self._problem:
            # an ensemble, say: its parameters alone do not tell how to read them
            return {"server": wire.encode(self._server)}
        return {"model": wire.encode(model.params)}


def check_free(folder: Path, *names: str, resume: bool) -> None:
    """Raise CheckpointError if a folder holds a run that is not to be resumed.

    Likewise if it holds files of others with the names of ours, and these further `names`.
    """
    RunDir(folder).check(*names)
    if (folder / "config.toml").exists() and not resume:
        raise CheckpointError(
            f"{folder} already holds a run; resume it (--resume, deployment.resume=true), "
            "or choose another folder"
        )


class _Encoder:
    """Encodes what is sent; one object that goes to many is encoded once."""

    def __init__(self, precision: Precision) -> None:
        self._precision: Precision = precision
        self._known: dict[int, tuple[Any, bytes, Any]] = {}

    def __call__(self, sent: Any) -> tuple[bytes | None, Any]:
        """Return the bytes, and what the receiver sees; None is not sent at all."""
        if sent is None:
            return None, None
        if id(sent) not in self._known:
            data = wire.encode(sent, self._precision)
            # kept with the object itself, so that its id stays its own
            self._known[id(sent)] = (sent, data, wire.as_received(sent, self._precision))
        _, data, seen = self._known[id(sent)]
        return data, seen
