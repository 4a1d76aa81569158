"""The loop: cohort, requests, accumulation, record, evaluation, callbacks, checkpoint, resume."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # not declared

from parsifl.core.algorithm import AnyAlgorithm, ClientUpload, canonical
from parsifl.core.batching import BatchSpec
from parsifl.core.errors import ClientError, ConfigError, ParsiflError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.engine import checkpoint, sampling
from parsifl.engine.evaluation import Scores
from parsifl.engine.finite import divergence, is_finite, lower_rate
from parsifl.engine.pool import (
    ClientPool,
    ClientProgram,
    ClientRequest,
    ClientResult,
    ClientScores,
    PartialTotal,
    PendingEvaluation,
)
from parsifl.engine.profiling import PhaseTimer
from parsifl.engine.record import MODELS, SPLITS, RoundRecord
from parsifl.engine.run_dir import RunDir, read_records
from parsifl.engine.settings import Evaluation, RunSettings
from parsifl.engine.tally import RoundTally

CHECKPOINT_SECONDS = 5.0


class StopTraining(Exception):
    """Raised by a callback to make this round the last; the message is the reason."""


@dataclass(frozen=True)
class RoundEnd:
    """The event that a callback receives at the end of a round.

    `history` holds the records of all earlier rounds, also in a resumed run: a callback that
    depends only on it stops a resumed run in the same round as an uninterrupted one.
    """

    algorithm: AnyAlgorithm
    problem: Problem
    server: Any
    record: RoundRecord
    history: Sequence[RoundRecord]


class Callback(Protocol):
    """Called once per round before its record is written; it returns additional `metrics`.

    A callback that reads scores declares `reads_scores = True`: evaluation is then not deferred.
    """

    def __call__(self, event: RoundEnd, /) -> Mapping[str, float] | None:
        """Process a round; raise `StopTraining` to end the run."""
        ...


@dataclass
class TrainingState:
    """The state of the loop between rounds; the pool has the rest.

    `pending` means that the last record still lacks its scores. `note` belongs to the next record.
    """

    server: Any
    records: list[RoundRecord] = field(default_factory=list)
    pending: bool = False
    note: str = ""

    @property
    def stopped(self) -> bool:
        """Whether a callback ended the run."""
        return bool(self.records and self.records[-1].stopped)


@dataclass(frozen=True)
class Training:
    """A run: an algorithm on a problem with the clients of a pool.

    `settings.rounds` is not read: `run` takes the number of rounds. Clients in `left_out` neither
    train nor evaluate.
    """

    algorithm: AnyAlgorithm
    problem: Problem
    pool: ClientPool
    settings: RunSettings = field(default_factory=RunSettings)
    callbacks: Sequence[Callback] = ()
    run_dir: RunDir | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()

    # ------------------------------------------------------------------ the run
    def run(self, rounds: int, *, resume: bool = False) -> TrainingState:
        """Train until the run has this many rounds in total, or until a callback stops it."""
        if self.run_dir is None:
            return self._run(rounds, resume=resume)
        with self.run_dir.locked():
            return self._run(rounds, resume=resume)

    def _run(self, rounds: int, *, resume: bool) -> TrainingState:
        state = self._start(rounds, resume=resume)
        if state.pending and len(state.records) == rounds:  # it was not to be the last round
            self._complete(state, self._evaluated(state.server, rounds - 1))
            self._checkpoint(state)
        saved_at, saving = time.monotonic(), None
        while len(state.records) < rounds and not state.stopped:
            round = len(state.records)
            pending = self._pending(state)
            server, record, scores = self._train(state.server, round, pending)
            if round == 0:
                started = self.algorithm.start_metrics(state.server)
                record = replace(record, metrics={**started, **record.metrics})
            if state.note:
                record, state.note = replace(record, notes=(*record.notes, state.note)), ""
            self._check_patience(state.records, record)
            if pending is not None:
                self._complete(state, scores)
            if saving is not None:
                record = replace(record, seconds={**record.seconds, "checkpoint": saving})
            last = round + 1 == rounds
            record, deferred = self._finish(state, server, record, last=last)
            state.server, state.pending = server, deferred
            state.records.append(record)
            if self.run_dir is not None:
                if not deferred:
                    self.run_dir.append(record)
                last = last or bool(record.stopped)
                if last or time.monotonic() - saved_at >= self._checkpoint_seconds:
                    saving = self._checkpoint(state)
                    saved_at = time.monotonic()
        return state

    def round(self, server: Any, round: int) -> tuple[Any, RoundRecord]:
        """Train one round (from 0); return the next server state and the record without scores.

        Pure except for the states of the pool's clients.
        """
        following, record, _ = self._train(server, round, None)
        self._check_patience((), record)
        return following, record

    def _start(self, rounds: int, *, resume: bool) -> TrainingState:
        self.algorithm.check_capabilities(self.problem)
        state = TrainingState(self.initial_server())
        self._check_requests()
        if self.run_dir is None:
            return state
        self.run_dir.open(self.configuration, resume=resume)
        directory = self.run_dir.checkpoints
        loaded = checkpoint.load(directory, self.algorithm.tree_types(), self.pool.restore)
        if loaded is not None and loaded.round > rounds:
            raise ConfigError(
                f"{self.run_dir.path} already has {loaded.round} rounds, more than the {rounds} "
                f"requested; request {loaded.round} or more, or choose another directory"
            )
        if loaded is None and (lost := len(read_records(self.run_dir.path))):
            which = "round 1 is" if lost == 1 else f"rounds 1 to {lost} are"
            warnings.warn(
                f"the run in {self.run_dir.path} was stopped before its first checkpoint: {which} "
                "repeated",
                stacklevel=2,
            )
        complete = 0 if loaded is None else loaded.round - (loaded.pending is not None)
        state.records = self.run_dir.truncate(complete, None if loaded is None else loaded.metrics)
        self.run_dir.set_target(rounds)
        resumed = loaded is not None and complete < rounds
        if resumed and (note := self.run_dir.note_environment(complete)):
            warnings.warn(f"{self.run_dir.path}: {note}", stacklevel=2)
            state.note = note
        if loaded is not None:
            state.server = loaded.server
            if loaded.pending is not None:
                state.records.append(loaded.pending)
                state.pending = True
        return state

    def _check_requests(self) -> None:
        """Raise the errors of the first cohort's mini-batches before anything is written."""
        statistics = self.problem.uses_batch_statistics
        cohort = sampling.cohort(
            self._eligible, self.settings.participation, self._key.replace(round=0)
        )
        checked: set[tuple[BatchSpec, int]] = set()
        for number in self._training(cohort):
            client = self.pool.clients[number]
            batches = self.algorithm.batches(client, 0).batches.values()
            for draw, samples in {(draw, client.samples) for draw in batches} - checked:
                draw.check(samples, client=f"client {number}", batch_statistics=statistics)
                checked.add((draw, samples))

    def initial_server(self) -> Any:
        """Return the server's state before the first round."""
        key = self._key.replace(purpose="server")
        clients = self.pool.clients
        if len(self._eligible) < len(clients):
            eligible = set(self._eligible)
            clients = [replace(client, takes_part=client.id in eligible) for client in clients]
        return self.algorithm.init_server(self.problem, clients, key)

    def _checkpoint(self, state: TrainingState) -> float:
        assert self.run_dir is not None
        started = time.perf_counter()
        checkpoint.save(
            self.run_dir.checkpoints,
            checkpoint.Checkpoint(
                round=len(state.records),
                server=state.server,
                pending=state.records[-1] if state.pending else None,
                metrics=self.run_dir.sync_metrics(),
            ),
            self.pool.save,
        )
        self.run_dir.note_checkpoint()
        return time.perf_counter() - started

    def _finish(
        self, state: TrainingState, server: Any, record: RoundRecord, *, last: bool
    ) -> tuple[RoundRecord, bool]:
        """Evaluate if due and call the callbacks; return whether the scores are still pending."""
        every = self.settings.evaluate_every
        due = bool(every) and (last or record.round % every == 0)
        deferred = due and not last and self._defers
        if due and not deferred:
            record = self._evaluate(server, record, state.records)
        try:
            for callback in self.callbacks:
                event = RoundEnd(self.algorithm, self.problem, server, record, state.records)
                added = callback(event)
                if added:
                    record = replace(record, metrics={**record.metrics, **added})
        except StopTraining as stop:
            if every and (deferred or not due):
                record, deferred = self._evaluate(server, record, state.records), False
            record = replace(record, stopped=str(stop) or type(stop).__name__)
        return record, deferred

    @cached_property
    def _defers(self) -> bool:
        reading = any(getattr(callback, "reads_scores", False) for callback in self.callbacks)
        return self.pool.deferred_evaluation and not reading

    # ------------------------------------------------------------------ one round
    def _train(
        self, server: Any, round: int, pending: PendingEvaluation | None
    ) -> tuple[Any, RoundRecord, list[ClientScores]]:
        algorithm, problem, key = self.algorithm, self.problem, self._key.replace(round=round)
        cohort = sampling.cohort(self._eligible, self._participation, key)
        uploading = set(cohort)
        tally = RoundTally(round + 1, len(cohort), self.settings.network)
        accumulator = algorithm.accumulator(problem)
        scores: list[ClientScores] = []
        arrived = 0
        timer = PhaseTimer()
        requests = self._requests(server, self._training(cohort), key, uploading)
        with closing(self.pool.train(requests, pending)) as answers:
            for answer in answers:
                timer.lap("pool")
                if isinstance(answer, ClientScores):
                    scores.append(answer)
                elif isinstance(answer, PartialTotal):
                    accumulator.merge(answer.total)
                    arrived += answer.clients
                else:
                    client = answer.client
                    uploads, weight = client.id in uploading, algorithm.weight(client)
                    tally.add(answer, weight, uploads=uploads)
                    if isinstance(answer, ClientResult) and uploads and not answer.aggregated:
                        upload = ClientUpload(client, weight, answer.upload, answer.received)
                        accumulator.add(upload)
                        arrived += 1
                        del upload
                del answer  # the pool reuses its memory
                timer.lap("aggregate")
        timer.lap("pool")
        if arrived:  # without uploads the server state does not change
            previous, server = server, self._aggregate(server, accumulator.total(), key, tally)
            diverged = divergence(algorithm, problem, server, round)
            if diverged and not divergence(algorithm, problem, previous, round):
                tally.note(diverged)
        timer.lap("aggregate")
        seconds = {**self.pool.seconds, "aggregate": timer.seconds.get("aggregate", 0.0)}
        if not self.pool.seconds:
            seconds["local"] = timer.seconds.get("pool", 0.0)
        return server, tally.record(seconds, self.pool.executor), scores

    def _requests(
        self, server: Any, clients: Sequence[int], key: Key, uploading: set[int]
    ) -> Iterator[ClientRequest]:
        for number in clients:
            client = self.pool.clients[number]
            here = key.replace(client=number, purpose="broadcast")
            message = self.algorithm.broadcast(self.problem, server, client, here)
            yield ClientRequest(client, key, message, number in uploading)

    def _aggregate(self, server: Any, total: Any, key: Key, tally: RoundTally) -> Any:
        try:
            with self._program.scope():
                here = key.replace(purpose="aggregate")
                following = self.algorithm.aggregate(self.problem, server, total, here)
        except LinAlgError as error:  # decompositions fail on values that are not finite
            raise _overflow(tally, key) from error
        if not is_finite(following) and is_finite(server):
            raise _overflow(tally, key)
        return canonical(following)

    def _check_patience(self, history: Sequence[RoundRecord], record: RoundRecord) -> None:
        """Stop if every client failed in the first round, or in too many consecutive ones."""
        if record.trained or not record.dropped:
            return
        recent = [*history, record][-self.settings.patience :]
        empty = len(recent) == self.settings.patience and not any(past.trained for past in recent)
        if record.round == 1 or empty:
            client, reason = next(iter(record.dropped.items()))
            others = "and so did every other client"
            if record.round > 1:
                others += f", in {len(recent)} consecutive rounds"
            hint = lower_rate(self.algorithm, record.round, reason)
            raise ClientError("training", client, record.round, f"{reason} ({others}).{hint}")

    @cached_property
    def _program(self) -> ClientProgram:
        return ClientProgram(self.algorithm, self.problem)

    @property
    def _participation(self) -> float:
        return self.settings.participation

    @property
    def _evaluation(self) -> Evaluation:
        return self.settings.evaluation

    @property
    def _checkpoint_seconds(self) -> float:
        seconds = self.settings.checkpoint_seconds
        return CHECKPOINT_SECONDS if seconds is None else seconds

    @cached_property
    def _key(self) -> Key:
        return Key(self.settings.seed)

    @cached_property
    def _eligible(self) -> Sequence[int]:
        eligible = sampling.eligible_clients(len(self.pool.clients), self._evaluation, self._key)
        return self._present(eligible)

    def _present(self, clients: Sequence[int]) -> Sequence[int]:
        if not self.left_out:  # there may be a million clients
            return clients
        return [client for client in clients if client not in self.left_out]

    def _training(self, cohort: Sequence[int]) -> Sequence[int]:
        return self._eligible if self.algorithm.everyone_trains() else cohort

    # ------------------------------------------------------------------ evaluation
    def _evaluated_clients(self, rounds: int) -> Sequence[int]:
        sampled = self._sampled(rounds) if self._evaluation.clients == "sampled" else set()
        clients = len(self.pool.clients)
        return self._present(sampling.evaluated(self._evaluation, clients, self._eligible, sampled))

    def _sampled(self, rounds: int) -> set[int]:
        """Return the clients that trained in the first rounds; earlier results are reused."""
        known, clients = self._sampled_until
        if rounds < known:
            known, clients = 0, set()
        for round in range(known, rounds):
            key = self._key.replace(round=round)
            cohort = sampling.cohort(self._eligible, self._participation, key)
            clients.update(self._training(cohort))
        self._sampled_until[:] = [rounds, clients]
        return set(clients)

    @cached_property
    def _sampled_until(self) -> list[Any]:
        """A number of rounds, and the clients that trained in them."""
        return [0, set()]

    def _evaluation_requests(self, server: Any, round: int) -> Iterator[ClientRequest]:
        key = self._key.replace(round=round)
        return self._requests(server, self._evaluated_clients(round + 1), key, set())

    def _pending(self, state: TrainingState) -> PendingEvaluation | None:
        if not state.pending:
            return None
        round = len(state.records) - 1
        return PendingEvaluation(self._evaluation_requests(state.server, round), state.server)

    def _complete(self, state: TrainingState, scores: Sequence[ClientScores]) -> None:
        """Add scores that arrived one round late to the last record."""
        state.records[-1] = self._scored(state.records[-1], scores)
        state.pending = False
        if self.run_dir is not None:
            self.run_dir.append(state.records[-1])

    def _evaluate(
        self, server: Any, record: RoundRecord, history: Sequence[RoundRecord]
    ) -> RoundRecord:
        started = time.perf_counter()
        record = self._scored(record, self._evaluated(server, len(history)))
        spent = time.perf_counter() - started
        return replace(record, seconds={**record.seconds, "evaluate": spent})

    def _evaluated(self, server: Any, round: int) -> list[ClientScores]:
        return list(self.pool.evaluate(self._evaluation_requests(server, round), server))

    def _scored(self, record: RoundRecord, client_scores: Sequence[ClientScores]) -> RoundRecord:
        summaries: dict[str, Any] = {}
        detail: dict[str, Any] = {"round": record.round}
        for model in MODELS:
            for split in SPLITS:
                scores = _columns(client_scores, model, split)
                if scores is not None:
                    summary = scores.summary(self._evaluation, self.problem)
                    summaries.setdefault(model, {})[split] = summary
                    detail.setdefault(model, {})[split] = scores.to_json()
        if self.run_dir is not None:
            self.run_dir.write_clients(detail)
        notes = tuple(dict.fromkeys(note for scores in client_scores for note in scores.notes))
        return replace(
            record,
            scores=summaries,
            notes=(*record.notes, *notes),
            unevaluated={s.client.id: s.reason for s in client_scores if s.reason},
        )


def _columns(client_scores: Sequence[ClientScores], model: str, split: str) -> Scores | None:
    """Return one column per metric over the clients that have rows in this split."""
    rows = [
        (scores.client.id, scores.samples[split], scores.values[model][split])
        for scores in client_scores
        if split in scores.values.get(model, {})
    ]
    if not rows:
        return None
    names = [name for name in rows[0][2] if all(name in values for _, _, values in rows)]
    return Scores(
        np.array([client for client, _, _ in rows]),
        np.array([samples for _, samples, _ in rows]),
        {name: np.array([values[name] for _, _, values in rows]) for name in names},
    )


def _overflow(tally: RoundTally, key: Key) -> ParsiflError:
    largest, client = tally.largest
    intact = "checkpoints of earlier rounds are intact"
    if largest and math.isfinite(largest):
        return ClientError(
            "aggregation",
            client,
            key.round + 1,
            "the aggregated state is not finite, and the upload of this client has the largest "
            f"value, {largest:.3g}; {intact}: correct or exclude the client and resume",
        )
    return ParsiflError(
        f"round {key.round + 1}: the aggregated state is not finite, and no upload stands out; "
        f"{intact}: use smaller step sizes at the server"
    )
