"""A whole run in one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from scipy.sparse import issparse

from parsifl import startup
from parsifl.algorithms._bases.local_buffers import with_buffer_policy
from parsifl.core import config
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ClientError, ConfigError
from parsifl.core.keys import Key
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine import checkpoint, data_checks, sampling, validation
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.choice import BLOCK, choose_executor
from parsifl.engine.evaluation import Evaluation, Split
from parsifl.engine.evaluator import Evaluator
from parsifl.engine.fingerprint import identity
from parsifl.engine.flops import FlopCounter
from parsifl.engine.gather import Ledger
from parsifl.engine.network_model import NetworkModel
from parsifl.engine.round import Setting, run_round
from parsifl.engine.run import Run
from parsifl.engine.run_dir import Record, RunDir
from parsifl.engine.state_store import LIMIT, StateStore
from parsifl.wire import Precision

Clients = ClientData | Sequence[tuple[Any, Any]]
CHECKPOINT_SECONDS = 5.0
WINDOW = 200
WINDOW_BYTES = 1 << 30


def simulate(  # noqa: PLR0913 - every argument but four has a default
    algorithm: AnyAlgorithm,
    problem: Problem,
    clients: Clients,
    rounds: int,
    *,
    seed: int = 0,
    participation: float = 1.0,
    engine: Literal["auto", "sequential", "batched"] = "auto",
    folder: str | Path | None = None,
    evaluate_every: int = 1,
    evaluation: Evaluation | None = None,
    network: NetworkModel | None = None,
    precision: Precision = "exact",
    resume: bool = False,
    progress: Callable[[Record], None] | None = None,
    state_limit: int = LIMIT,
) -> Run:
    """Train a federation in this process and judge its models.

    Parameters
    ----------
    algorithm
        A configured method, for example ``parsifl.get("fedavg", lr=0.1)``.
    problem
        What is learned: ``parsifl.NeuralProblem(module)`` or ``parsifl.GLM(...)``.
    clients
        A list with one ``(X, y)`` a client (a quarter of the rows is held out for testing), or a
        `ClientData`.
    rounds
        How many rounds in all; a resumed run goes on until it has this many, and may not have
        more already.
    participation
        The fraction of clients in a cohort.
    engine
        "sequential" runs clients one by one, "batched" many at once; "auto" takes the faster.
    folder
        Where the run is recorded and checkpointed; None: nowhere.
    evaluate_every
        Judge the models every so many rounds, and after the last; 0: never.
    evaluation, network, precision
        How models are judged; what messages would take on a network; how values travel.
    resume
        Go on with the run that is in `folder`.
    progress
        Called with the record of every finished round; `seconds` in it tells the time by phase
        ("checkpoint" is the one after the round before).
    state_limit
        Most bytes of client state that are kept in memory; the rest is in the run folder, or in a
        temporary one.
    """
    startup.reproducible()  # raises if it was requested too late
    validation.check_parts(algorithm, problem, clients)
    if resume and folder is None:
        raise ConfigError("resume=True needs the folder of the run that is to go on")
    options: dict[str, Any] = {
        "seed": seed,
        "participation": participation,
        "engine": engine,
        "precision": precision,
        "evaluate_every": evaluate_every,
    }
    beside = {"rounds": rounds, "state_limit": state_limit, "progress": progress}
    validation.check_options({**options, **beside}, evaluation, network, folder)
    size = validation.check_learnable(problem)
    # numbers of NumPy become plain ones, as a run folder keeps them
    rounds, options["participation"] = int(rounds), float(participation)
    options |= {"seed": int(seed), "evaluate_every": int(evaluate_every)}
    data = clients if isinstance(clients, ClientData) else data_checks.pool(problem, clients)
    simulation = _Simulation(
        with_buffer_policy(algorithm, problem),
        problem,
        data,
        options,
        evaluation or Evaluation(),
        network or NetworkModel(),
        StateStore(state_limit),
        # what the clients of a window send and keep is to fit in memory
        max(BLOCK, min(WINDOW, WINDOW_BYTES // max(1, 4 * size))),
    )
    if folder is not None:
        simulation.attach(RunDir(Path(folder)), rounds, resume=resume)
    with warnings.catch_warnings():
        # torch asks for a report about layers that vmap runs one by one: nobody can act on that
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not")
        simulation.run(rounds, progress)
    return simulation.result()


class _Simulation:
    """The moving parts of a run: server state, client states and records."""

    def __init__(
        self,
        method: AnyAlgorithm,
        problem: Problem,
        data: ClientData,
        options: dict[str, Any],
        evaluation: Evaluation,
        network: NetworkModel,
        store: StateStore,
        window: int,
    ) -> None:
        method.check_capabilities(problem)
        if evaluation.select == "best-validation" and not any(map(len, data.validation)):
            raise ConfigError(
                "select='best-validation' needs validation rows; hold some out (validation=0.1)"
            )
        self._data, self._options = data, options
        self._evaluation, self._network = evaluation, network
        self._key = Key(options["seed"])
        self._executor, block = choose_executor(options["engine"], problem, sparse=issparse(data.x))
        self._pool = sampling.eligible_clients(len(data), evaluation, self._key)
        infos, shards, self._store = Infos(data), BatchSampler(data, problem), store
        self._setting = Setting(
            method=method,
            problem=problem,
            infos=infos,
            pool=self._pool,
            shards=shards,
            store=self._store,
            executor=self._executor,
            block=block,
            window=window,
            precision=options["precision"],
            network=network,
            flops=FlopCounter(method, problem),
        )
        self._judge = Evaluator(
            method, problem, data, infos, shards, evaluation, options["precision"]
        )
        self._server = method.init_server(problem, infos, self._key.replace(purpose="server"))
        self._records: list[Record] = []
        self._sampled: set[int] = set()
        self._folder: RunDir | None = None
        self._saved_at = time.monotonic()
        self._saving: float | None = None

    def attach(self, folder: RunDir, rounds: int, *, resume: bool) -> None:
        """Record into a folder, and go on from its checkpoint if there is one."""
        described = identity(self._setting.method, self._setting.problem, self._data, self._run())
        folder.open(described, resume=resume)
        self._folder = folder
        found = checkpoint.load(folder.checkpoints, self._setting.method.tree_types())
        if found is not None and found.round > rounds:
            raise ConfigError(
                f"{folder.path} already has {found.round} rounds, more than the {rounds} asked "
                f"for; ask for {found.round} or more, or choose another folder"
            )
        self._records = folder.rewind(0 if found is None else found.round)
        folder.aim(rounds)
        if found is None:
            self._store.settle(checkpoint.clients_folder(folder.checkpoints))
        else:
            self._server = found.server
            self._store.restore(found.clients)
            for round in range(found.round):
                self._sampled.update(self._training(self._cohort(round)))

    def _run(self) -> dict[str, Any]:
        return {
            **self._options,
            "executor": self._executor,
            "block": self._setting.block,
            "evaluation": config.to_json(self._evaluation),
            "network": config.to_json(self._network),
        }

    def run(self, rounds: int, progress: Callable[[Record], None] | None) -> None:
        """Go on until `rounds` rounds are done."""
        for round in range(len(self._records), rounds):
            record = self._round(round, last=round + 1 == rounds)
            self._records.append(record)
            if self._folder is not None:
                self._folder.append(record)
                self._checkpoint(last=round + 1 == rounds)
            if progress is not None:
                progress(record)

    def _round(self, round: int, *, last: bool) -> Record:
        cohort = self._cohort(round)
        self._sampled.update(self._training(cohort))
        key = self._key.replace(round=round)
        self._server, ledger = run_round(self._setting, self._server, cohort, key)
        _refuse_hopeless(ledger, round)
        record: Record = {"round": round + 1, "cohort": len(cohort), **vars(ledger)}
        record["executor"] = self._executor
        if self._saving is not None:
            record["seconds"]["checkpoint"], self._saving = self._saving, None
        every = self._options["evaluate_every"]
        if every and (last or (round + 1) % every == 0):
            started = time.perf_counter()
            self._evaluate(key, record)
            record["seconds"]["evaluate"] = time.perf_counter() - started
        return record

    def _cohort(self, round: int) -> list[int]:
        return sampling.cohort(
            self._pool, self._options["participation"], self._key.replace(round=round)
        )

    def _training(self, cohort: list[int]) -> Sequence[int]:
        return self._pool if self._setting.method.everyone_trains() else cohort

    def _evaluate(self, key: Key, record: Record) -> None:
        ids = sampling.judged(self._evaluation, len(self._data), self._pool, self._sampled)
        detail: Record = {"round": key.round + 1}
        setting = self._setting
        splits: tuple[Split, ...] = ("validation", "test")
        for split in splits:
            found = {
                "global": self._judge.global_scores(self._server, ids, split),
                "personal": self._judge.personal_scores(
                    self._server, self._store, ids, split, key, self._executor, setting.block
                ),
            }
            for model, score in found.items():
                if score is not None:
                    summary = score.summary(self._evaluation, setting.problem)
                    record.setdefault(model, {})[split] = summary
                    record["fallbacks"] += score.fallbacks
                    detail.setdefault(model, {})[split] = score.to_json()
        if self._folder is not None:
            self._folder.write_clients(detail)

    def _checkpoint(self, *, last: bool) -> None:
        if self._folder is None or not (
            last or time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS
        ):
            return
        started = time.perf_counter()
        checkpoint.save(self._folder.checkpoints, len(self._records), self._server, self._store, {})
        self._saving = time.perf_counter() - started
        self._saved_at = time.monotonic()

    def result(self) -> Run:
        """Return what came of it."""
        return Run(
            method=self._setting.method,
            problem=self._setting.problem,
            metrics=self._records,
            server=self._server,
            evaluation=self._evaluation,
            folder=None if self._folder is None else self._folder.path,
            _judge=self._judge,
            _store=self._store,
            _key=self._key.replace(round=max(0, len(self._records) - 1)),
        )


def _refuse_hopeless(ledger: Ledger, round: int) -> None:
    """Stop if nobody at all could train in the first round: that is a mistake, not bad luck."""
    if round == 0 and ledger.dropped and not ledger.trained:
        client, reason = next(iter(ledger.dropped.items()))
        raise ClientError("local work", client, 1, f"{reason} (and so did every other client)")
