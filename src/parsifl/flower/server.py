"""The server of a deployment: the loop (`engine.training`) over a Flower pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parsifl.core.algorithm import unread_entries
from parsifl.core.errors import CheckpointError
from parsifl.core.problem import Problem
from parsifl.engine import checkpoint
from parsifl.engine.experiment import problem_for
from parsifl.engine.fingerprint import identity_of, profiles_checksum
from parsifl.engine.finite import divergence
from parsifl.engine.record import RoundRecord
from parsifl.engine.run_dir import RunDir, read_records
from parsifl.engine.training import RoundEnd, Training, TrainingState
from parsifl.flower.client import MakeProblem
from parsifl.flower.membership import Log
from parsifl.flower.message import Link
from parsifl.flower.monitor import Monitor
from parsifl.flower.pool import EXECUTOR, FlowerPool
from parsifl.flower.settings import DEPLOYMENT_FILES, DeploymentSettings


class Federation:
    """A deployed run.

    All persistent data is in the run directory: the server's state, the records, the clients, and
    the accepted version of each client's state. A server that is killed resumes from there.
    """

    _files: tuple[str, ...] = ()
    """Files in the run directory besides those of every run."""

    def __init__(
        self, settings: DeploymentSettings, link: Link, log: Log, make: MakeProblem | None = None
    ) -> None:
        self._settings, self._experiment = settings, settings.experiment
        chosen, deployment = settings.experiment, settings.deployment
        out, port = Path(deployment.out), deployment.metrics_port
        self.monitor = Monitor(
            out,
            chosen.algorithm,
            chosen.rounds,
            settings.clients,
            log,
            port,
            deployment.certificate,
        )
        self._link, self._log = self.monitor.watch(link), log
        self._maker = make or partial(problem_for, self._experiment.model)
        self._run_dir = RunDir(out, DEPLOYMENT_FILES)
        self._diverged = ""
        self._connect({})

    def _connect(self, left_out: Mapping[int, str]) -> None:
        """Start with a new pool, without excluded clients."""
        self._algorithm = self._experiment.build_algorithm()
        self._pool = FlowerPool(
            self._algorithm, self._settings, self._link, self._log, self._maker, left_out
        )
        self.monitor.attach(self._pool.members, self._pool.experiment)

    def run(self) -> Sequence[RoundRecord]:
        """Run until all rounds are done; return their records."""
        with self._run_dir.locked():
            return self._run()

    def check(self) -> list[str]:
        """Let every client report, and return problems for the operator."""
        self._prepare(resumed=False)
        self._pool.open(resumed=False)
        members, problems = self._pool.members, []
        for client, node in sorted(members.owners().items()):
            machine = members.machines[client]
            self._log(
                f"client {client} (node {node}): {members.infos[client].samples} rows, "
                f"Parsifl {machine.parsifl}, torch {machine.torch}, Python {machine.python}, "
                f"{machine.free >> 20:,} MiB free"
            )
            problems += [f"client {client} (node {node}): {t}" for t in members.concerns[client]]
        torches = sorted({machine.torch for machine in members.machines.values()})
        if len(torches) > 1:
            problems.append(f"nodes have different versions of torch: {', '.join(torches)}")
        return [*self.monitor.health().problems(), *problems]

    def _run(self) -> Sequence[RoundRecord]:
        resume = self._settings.deployment.resume
        check_free(self._run_dir.path, resume=resume)
        self._run_dir.check(*self._files)
        self.monitor.check()
        # the clients, and with them the problem, are known only after the pool is open
        types, directory = self._algorithm.tree_types(), self._run_dir.checkpoints
        saved = checkpoint.load(directory, types, self._pool.restore)
        resumed = saved is not None
        if saved is not None:
            pending = [] if saved.pending is None else [saved.pending]
            records = read_records(self._run_dir.path)[: saved.round - len(pending)]
            self.monitor.resume([*records, *pending])
        self._prepare(resumed=resumed)
        problem = self._pool.open(resumed=resumed)
        if unread := unread_entries(self._algorithm, (c.profile for c in self._pool.clients)):
            self._log(f"warning: {unread}")
        chosen = self._experiment
        # by default after every round, so that no client's work is lost
        seconds = chosen.checkpoint_seconds or 0.0
        training = Training(
            self._algorithm,
            problem,
            self._pool,
            replace(chosen.run_settings(), checkpoint_seconds=seconds),
            callbacks=[self._report],
            run_dir=self._run_dir,
            configuration=self._configuration(problem),
            left_out=frozenset(self._pool.left_out),
        )
        state = training.run(chosen.rounds, resume=resume)
        self._finish(problem, state)
        return state.records

    def _report(self, event: RoundEnd) -> None:
        self.monitor.round(event.record)
        self._log(f"round {event.record.round} of {self._experiment.rounds} is done")
        if not self._diverged:
            where = event.problem, event.server, event.record.round - 1
            self._diverged = divergence(event.algorithm, *where)
            if self._diverged:
                self._log(f"warning: {self._diverged}")

    def _prepare(self, *, resumed: bool) -> None:
        """Run steps that precede the clients' reports."""

    def _finish(self, problem: Problem, state: TrainingState) -> None:
        """Run the final steps after all rounds; repeated on every resume."""

    def _configuration(self, problem: Problem) -> dict[str, Any]:
        experiment = self._experiment
        clients = [self._pool.clients[number] for number in self._pool.present]
        data = {
            "name": experiment.data if self._pool.schema.name != "own" else "own",
            "clients": len(clients),
            "rows": sum(client.samples for client in clients),
            "augment": self._pool.schema.augment,
            "profiles": profiles_checksum(client.profile for client in clients),
        }
        run = {**experiment.identity(), "executor": EXECUTOR}
        return identity_of(self._algorithm, problem, data, run)


def check_free(folder: Path, *, resume: bool) -> None:
    """Raise CheckpointError if a directory contains a run and resume is not set."""
    replaceable = RunDir(folder, DEPLOYMENT_FILES).replaceable()
    if (folder / "config.toml").exists() and not replaceable and not resume:
        raise CheckpointError(
            f"{folder} already holds a run; resume it (--resume, deployment.resume=true), or "
            "choose another directory"
        )
