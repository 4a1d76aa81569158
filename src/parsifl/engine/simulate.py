"""Simulation in one process: the loop over a local pool."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from parsifl import startup
from parsifl.algorithms._bases.local_buffers import with_buffer_policy
from parsifl.core import config
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ConfigError, DivergenceWarning, DroppedClientWarning
from parsifl.core.metrics import Metric, with_metrics
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.engine import checks
from parsifl.engine.executors import BLOCK, CPU, check_device, choose_executor
from parsifl.engine.fingerprint import identity
from parsifl.engine.finite import divergence, has_diverged, lower_rate
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram
from parsifl.engine.run import Run
from parsifl.engine.run_dir import RunDir
from parsifl.engine.settings import Evaluation, RunOptions, RunSettings, with_run_settings
from parsifl.engine.state_store import StateStore
from parsifl.engine.training import (
    Callback,
    RoundEnd,
    Training,
)

Clients = ClientData | Sequence[tuple[Any, Any]]
WINDOW_BYTES = 1 << 30


@with_run_settings
def simulate(  # noqa: PLR0913 - all arguments but four have a default
    algorithm: AnyAlgorithm,
    problem: Problem,
    clients: Clients,
    rounds: int,
    *,
    test: float | None = None,
    profiles: Sequence[Mapping[str, Any]] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    metrics: Sequence[Metric] = (),
    **settings: Unpack[RunOptions],
) -> Run:
    """Train a federation in this process and evaluate its models.

    Parameters
    ----------
    algorithm
        A configured algorithm, for example ``parsifl.algorithms.FedAvg(lr=0.1)`` or
        ``parsifl.get("fedavg", lr=0.1)``.
    problem
        The model and its loss: ``parsifl.NeuralProblem(module)`` or ``parsifl.GLM(...)``.
    clients
        A list with one ``(X, y)`` pair per client, or a `ClientData`. With their own test rows,
        clients are ``(X, y, X_test, y_test)`` or dictionaries; see `ClientData.of`.
    rounds
        The number of rounds in total. A resumed run continues until it has this many.
    test
        The share of each client's rows that is held out for testing if `clients` is a list.
        Default: 0.25. A `ClientData` has its own split.
    profiles
        The device profile of each client, such as ``{"budget": 0.5}``; entries that the algorithm
        reads are described in its documentation. Default: the profiles of a `ClientData`.
    run_dir
        The directory in which the run is recorded and checkpointed. Default: nothing is written.
    resume
        Continue the run in `run_dir`.
    callbacks
        Called at the end of every round (see `parsifl.engine.training.Callback`).
    metrics
        Further metrics, besides those that the problem always has (see `parsifl.Metric`).
    **settings
        Settings of the run, declared in `parsifl.engine.settings.RunSettings`.

    Warns
    -----
    DroppedClientWarning
        If a client is dropped from a round, once per client.
    DivergenceWarning
        If the global model (or the server's state, where there is none) is finite at the end, but
        so large that the run must have diverged.
    """
    startup.reproducible()  # raises if it was requested too late
    checks.check_parts(algorithm, problem, clients)
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the directory of the run to continue")
    if isinstance(clients, ClientData) and test is not None:
        raise ConfigError(
            "test= applies to a list of (X, y) pairs; a ClientData has its own split "
            "(ClientData.of(..., test=...), parsifl.data.prepare(..., test=...))"
        )
    checks.check_arguments(callbacks, run_dir)
    config.check_names(RunSettings, settings, config.option_defaults(simulate))
    chosen = RunSettings(rounds=rounds, **settings)
    algorithm = chosen.compose(algorithm)
    problem = with_metrics(problem, metrics)
    size = checks.check_learnable(problem)
    share = 0.25 if test is None else test
    data = (
        clients
        if isinstance(clients, ClientData)
        else checks.stack_clients(problem, clients, test=share)
    )
    if profiles is not None:
        data = replace(data, profiles=tuple(profiles))
    checks.check_numbers(data)
    checks.check_profiles(algorithm, data)
    _check_validation_rows(chosen.evaluation, data)
    algorithm = with_buffer_policy(algorithm, problem)
    algorithm.check_capabilities(problem)
    where, sparse = check_device(chosen.device), not isinstance(data.x, Tensor)
    executor, block = choose_executor(chosen.executor, problem, sparse=sparse, cpu=where == CPU)
    described = {
        **chosen.identity(),
        "executor": executor,
        "block": block,
        **({} if where == CPU else {"device": str(where)}),
    }
    pool = LocalPool(
        ClientProgram(algorithm, problem),
        data,
        executor=executor,
        block=block,
        # messages and states of the clients of a window must fit in memory
        window=max(BLOCK, min(chosen.window, WINDOW_BYTES // max(1, 4 * size))),
        precision=chosen.precision,
        evaluation=chosen.evaluation,
        store=StateStore(chosen.state_limit),
        device=where,
    )
    on_disk = run_dir is not None
    configuration = identity(algorithm, problem, data, described, checksum=on_disk)
    training = Training(
        algorithm,
        problem,
        pool,
        chosen,
        callbacks=[_DroppedClients(), *callbacks],
        run_dir=None if run_dir is None else RunDir(Path(run_dir)),
        configuration=configuration,
    )
    with warnings.catch_warnings():
        # torch asks users to report layers that vmap runs one by one
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not")
        state = training.run(chosen.rounds, resume=resume)
    last = max(0, len(state.records) - 1)
    if diverged := divergence(algorithm, problem, state.server, last):
        warnings.warn(diverged, DivergenceWarning, stacklevel=2)
    return Run(
        algorithm=algorithm,
        problem=problem,
        records=state.records,
        server=state.server,
        evaluation=chosen.evaluation,
        run_dir=None if run_dir is None else Path(run_dir),
        configuration=configuration,
        pool=pool,
        seed=chosen.seed,
    )


class _DroppedClients:
    """Warns about clients that are dropped from a round, once per client."""

    _MOST = 10

    def __init__(self) -> None:
        self._named: set[int] = set()

    def __call__(self, event: RoundEnd) -> None:
        record = event.record
        for client, reason in record.dropped.items():
            if client in self._named or len(self._named) >= self._MOST:
                continue
            self._named.add(client)
            what = f"diverged in round {record.round} ({reason}) and was dropped."
            if not has_diverged(reason):
                what = f"was dropped in round {record.round}: {reason.removesuffix('.')}."
            hint = lower_rate(event.algorithm, record.round, reason)
            more = " Further clients are not named." if len(self._named) == self._MOST else ""
            text = f"Client {client} {what}{hint}{more}"
            warnings.warn(text, DroppedClientWarning, stacklevel=2)


def _check_validation_rows(evaluation: Evaluation, data: ClientData) -> None:
    if evaluation.select == "best-validation" and not any(map(len, data.validation)):
        raise ConfigError(
            "select='best-validation' needs validation rows; hold some out (validation=0.1)"
        )
