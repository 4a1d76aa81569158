"""The client behind a ClientApp: its data, its answers to requests, and its state on disk.

Version n of the state is the one after round n. A server that has accepted a client's result
acknowledges its round, and every later message names the last acknowledged version. The client
starts from exactly that one, so lost replies, repeated rounds and resumed servers do no harm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import CheckpointError, ConfigError, DataError, WireError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Problem, flatten_inputs
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.evaluator import Evaluator
from parsifl.engine.executors import check_device, placed
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.finite import inspect
from parsifl.engine.pool import ClientProgram, ClientRequest
from parsifl.engine.safe_files import make_directory, reject_links, remove_temporary, replace_file
from parsifl.flower.hello import DataSchema, this_machine
from parsifl.flower.logs import node_log, note_context
from parsifl.flower.message import Envelope, Kind, printable
from parsifl.flower.network_schema import (
    LARGEST_METRIC,
    EvaluateReply,
    EvaluateRequest,
    FailureReply,
    HelloReply,
    HelloRequest,
    TrainReply,
    TrainRequest,
    WorkRequest,
    read,
)

_NAME = re.compile(r"round-(\d{8,})\.state")
_LARGEST = 1 << 34
_EXPERIMENT = re.compile(r"[0-9a-f]{32}")
NodeConfig = Mapping[str, Any]
Arrays = tuple[Any, Any] | ClientData
Load = Callable[[NodeConfig], Arrays]
MakeProblem = Callable[[ClientData], Problem]
Parts = Mapping[str, bytes]
STATE_VARIABLE = "PARSIFL_STATE"
_SLACK, _MODELS = 16 << 20, 64
"""Memory limit of a decoded message: these bytes plus this many models."""


class LostState(CheckpointError):
    """The version of a client's state that the server names is missing or damaged."""


class ClientStates:
    """The versions of one client's state in one experiment.

    Parameters
    ----------
    root
        The node's state directory. It holds personal models, so only the owner may read it.
    experiment
        32 hexadecimal digits, drawn by the server.
    kind
        The type of the state (see `algorithm.message_types`).
    """

    def __init__(self, root: Path, experiment: str, client: int, kind: Any) -> None:
        if not _EXPERIMENT.fullmatch(experiment):
            # it becomes a directory name, so nothing else may come from the network
            raise WireError(f"experiment: {experiment!r:.40} is not 32 hexadecimal digits")
        self._folder = root / experiment / f"client-{client}"
        self._client, self._kind = client, kind
        self._stateless = kind is type(None)

    def load(self, version: int) -> Any:
        """Return a version of the state; version 0 is no state yet."""
        if self._stateless or version == 0:
            return None
        path = self._path(version)
        try:
            state = wire.decode(path.read_bytes(), self._kind, limit=_LARGEST)
        except FileNotFoundError:
            raise LostState(
                f"client {self._client} has no state of round {version} in {self._folder}: restore "
                "the directory, or start a new run"
            ) from None
        except (OSError, WireError) as error:
            raise LostState(f"the client state {path} cannot be read ({error})") from error
        # a copy: with the memory alignment of a local run, results are bit-identical
        return tree.copy(state)

    def save(self, version: int, state: Any) -> None:
        """Write a version; when this returns it survives a crash."""
        if self._stateless:
            return
        reject_links(self._folder, self._folder.parent)
        make_private(self._folder)
        replace_file(self._path(version), wire.encode(state), 0o600)

    def versions(self) -> list[int]:
        """Return the versions on disk, ascending."""
        if not self._folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def forget(self, accepted: int, oldest: int, newest: int) -> None:
        """Delete the versions that the server cannot request.

        No checkpoint of the server names a version before `oldest`. Versions between `accepted` and
        `newest` were sent but never accepted.
        """
        for version in self.versions():
            if version < min(oldest, accepted) or accepted < version < newest:
                self._path(version).unlink(missing_ok=True)
        if self._folder.is_dir():
            remove_temporary(self._folder)

    def _path(self, version: int) -> Path:
        return self._folder / f"round-{version:08d}.state"


def make_private(folder: Path) -> None:
    """Create a directory and its missing parents, readable only by the owner."""
    make_directory(folder, 0o700)


def client_number(node: NodeConfig) -> int:
    """Return the client's number from the node's configuration (Flower calls it partition-id)."""
    number = node.get("partition-id")
    if type(number) is not int or number < 0:
        raise ConfigError(
            "the node has no number: start it with --node-config 'partition-id=0', with a "
            "different number for each node"
        )
    return number


def state_root(node: NodeConfig) -> Path:
    """Return the state directory: from the node config, the environment, or the home directory."""
    chosen = node.get("state-dir") or os.environ.get(STATE_VARIABLE)
    return Path(str(chosen)) if chosen else Path.home() / ".parsifl" / "state"


def profile_of(node: NodeConfig) -> dict[str, Any]:
    """Return the device profile of a node: `profile-width=0.5` is the entry `width`.

    >>> profile_of({"partition-id": 0, "profile-width": 0.5})
    {'width': 0.5}
    """
    start = "profile-"
    return {name.removeprefix(start): node[name] for name in node if name.startswith(start)}


def as_client_number(
    arrays: Arrays,
    client: int,
    experiment: Experiment,
    profile: Mapping[str, Any] | None = None,
) -> ClientData:
    """Return one client's data under its number, so that keys are the same as in a local run."""
    data = arrays
    if not isinstance(data, ClientData):
        share = experiment.test
        if isinstance(share, str):
            raise ConfigError(f"test={share!r} needs a named dataset; use a fraction such as 0.25")
        data = ClientData.of(
            [data], test=share, validation=experiment.validation, seed=experiment.seed
        )
    if "labels" in data.source:
        raise DataError(
            "load() returned labels that are words: every node must give each class the same "
            "number, so return numbers"
        )
    if len(data) != 1:
        raise DataError(f"load() returned {len(data)} clients; a node is one client")
    return replace(data, first=client, profiles=({**data.profiles[0], **(profile or {})},))


def alone(data: ClientData, client: int) -> ClientData:
    """Return the data of one client of a partition."""
    if not 0 <= client < len(data):
        raise ConfigError(f"there are clients 0 to {len(data) - 1}, not {client}")
    parts = [split[client] for split in (data.train, data.validation, data.test)]
    rows = torch.from_numpy(Ragged.of(parts).values)
    x = data.x[rows] if isinstance(data.x, torch.Tensor) else data.x[rows.numpy()]
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    train, held, tested = (
        Ragged.of([list(range(end - len(part), end))])
        for part, end in zip(parts, ends, strict=True)
    )
    return replace(
        data,
        x=x,
        y=data.y[rows],
        train=train,
        validation=held,
        test=tested,
        profiles=(data.profiles[client],),
    )


class RemoteClient:
    """Answers the server's messages for one client.

    Parameters
    ----------
    arrays
        What the user's `load` returned: `(X, y)`, or a `ClientData` of one client.
    root
        The directory for client state.
    make
        Builds the problem from data of the agreed schema; None: the experiment's model.
    profile
        Entries of the device profile, in addition to those of the data.
    """

    def __init__(
        self,
        experiment: Experiment,
        client: int,
        arrays: Arrays,
        root: Path,
        make: MakeProblem | None = None,
        profile: Mapping[str, Any] | None = None,
    ) -> None:
        self._experiment, self._client, self._root = experiment, client, root
        self._device = check_device(experiment.device)
        self._algorithm = experiment.build_algorithm()
        self._types = self._algorithm.tree_types()
        self._data = as_client_number(arrays, client, experiment, profile)
        self._make = make or partial(problem_for, experiment.model)

    def answer(self, kind: Kind, envelope: Envelope) -> Envelope:
        """Reply to a request of this kind."""
        if kind == "hello":
            read(HelloRequest, envelope)
            return self.hello()
        if kind == "train":
            return self.train(read(TrainRequest, envelope), envelope.parts)
        if kind == "evaluate":
            return self.evaluate(read(EvaluateRequest, envelope), envelope.parts)
        raise WireError(f"a client of this run does not answer requests of kind {kind!r}")

    def hello(self) -> Envelope:
        """Report the number of rows and their schema, never a row."""
        info = self._info(self._data)
        reply = HelloReply(
            client=self._client,
            samples=info.samples,
            profile=dict(info.profile),
            data_schema=DataSchema.of(self._data),
            machine=this_machine(self._root),
        )
        return reply.envelope()

    def train(self, request: TrainRequest, parts: Parts) -> Envelope:
        """Train one round; the new state is on disk before this returns."""
        work = self._prepare(request, parts)
        wanted = self._algorithm.batches(work.client, request.round)
        data = work.sampler.draw(self._client, wanted, work.key)
        state, lost = work.state()
        update = placed(work.program, self._device)(work.received, state, data)
        if fault := inspect(update).fault:
            return _unusable(work.program.cause(fault, data, work.key.seed))
        sent, state, precision = {}, update.state, self._experiment.precision
        try:
            if request.uploads and update.upload is not None:
                upload = work.program.compact(update.upload)
                sent["upload"] = wire.encode(upload, precision)
                if precision != "exact":
                    arrived = wire.as_received(upload, precision)
                    state = work.program.acknowledge(state, update.upload, arrived)
        except WireError as error:  # values beyond the range of this precision
            return _unusable(f"upload {error}")
        work.states.save(request.round + 1, state)
        work.states.forget(request.accepted, request.oldest, request.round + 1)
        metrics = {name: float(value) for name, value in update.metrics.items()}
        if not all(abs(value) <= LARGEST_METRIC for value in metrics.values()):
            return _unusable(f"its metrics exceed {LARGEST_METRIC:g}")
        reply = TrainReply(**_address(request), metrics=metrics, reinitialized=lost)
        return reply.envelope(sent)

    def evaluate(self, request: EvaluateRequest, parts: Parts) -> Envelope:
        """Evaluate the global and the personal model on the client's own rows."""
        work = self._prepare(request, parts)
        evaluator = Evaluator(
            work.program,
            work.data,
            work.sampler,
            self._experiment.evaluation,
            device=self._device,
        )
        asked = ClientRequest(work.client, work.key, None, upload=False)
        model = self._global_model(parts, work)
        state, lost = work.state()
        (scores,) = evaluator.scores([asked], model, lambda _: (work.received, state))
        values: Any = scores.values
        all_metrics = [metrics for splits in values.values() for metrics in splits.values()]
        if not all(abs(value) <= LARGEST_METRIC for part in all_metrics for value in part.values()):
            return _unusable(f"its scores are not finite or exceed {LARGEST_METRIC:g}")
        samples: Any = {split: int(rows) for split, rows in scores.samples.items() if rows}
        reply = EvaluateReply(
            **_address(request), scores=values, samples=samples, reinitialized=lost
        )
        return reply.envelope()

    def _global_model(self, parts: Parts, work: _Work) -> Model | None:
        problem = work.program.problem
        if "model" in parts:
            params = wire.decode(parts["model"], dict[str, torch.Tensor], limit=work.limit)
            wire.check(params, problem.init(Key(0)))
            return Model(problem, tree.copy(params))
        if "server" in parts:
            server = wire.decode(parts["server"], self._types.server, limit=work.limit)
            return self._algorithm.model(problem, tree.copy(server))
        return None

    def _info(self, data: ClientData) -> ClientInfo:
        return ClientInfo(self._client, len(data.train[0]), data.profiles[0])

    def _prepare(self, request: WorkRequest, parts: Parts) -> _Work:
        note_context(run=request.experiment, round=request.round + 1, client=request.client)
        if request.client != self._client:
            raise WireError(f"client: this is {self._client}, not {request.client}")
        schema, local_schema = request.data_schema, DataSchema.of(self._data)
        fewer = (schema.classes or 0) < (local_schema.classes or 0)
        if fewer or replace(schema, classes=local_schema.classes) != local_schema:
            raise WireError("data_schema: does not match this client's rows")
        # built from the agreed schema: this client may lack classes that others have
        problem = self._make(schema.example())
        self._algorithm.check_capabilities(problem)
        data = replace(self._data, classes=schema.classes)
        if flatten_inputs(problem):
            data = data.flattened()
        size = sum(leaf.nbytes for leaf in tree.leaves(problem.init(Key(0))))
        limit = _SLACK + size * (_MODELS + (self._experiment.clients or 0))
        received = None
        if "down" in parts:
            received = wire.decode(parts["down"], self._types.downlink, limit=limit)
        states = ClientStates(self._root, request.experiment, self._client, self._types.client)
        return _Work(
            request=request,
            client=self._info(data),
            program=ClientProgram(self._algorithm, problem),
            data=data,
            sampler=BatchSampler(data, problem),
            key=Key(self._experiment.seed, round=request.round),
            received=tree.copy(received),
            states=states,
            limit=limit,
        )


@dataclass(frozen=True)
class _Work:
    """The inputs of a request for work: the program, the data, the downlink, and the states."""

    request: WorkRequest
    client: ClientInfo
    program: ClientProgram
    data: ClientData
    sampler: BatchSampler
    key: Key
    received: Any
    states: ClientStates
    limit: int

    def state(self) -> tuple[Any, bool]:
        """Return the state that the server has accepted, and whether it was lost and reinitialized.

        A client whose state was never accepted starts from its first state.
        """
        lost = False
        if self.request.accepted:
            try:
                return self.states.load(self.request.accepted), False
            except LostState as error:
                if self.request.lost_state != "reinitialize":
                    raise
                lost = True
                node_log().warning("%s; the state is reinitialized", error)
        return self.program.initial_state(self.client, self.received, self.key.seed), lost


def _unusable(fault: str) -> Envelope:
    """Return the reply of a client whose result is unusable; it names a tensor."""
    return FailureReply(error="UnusableResult", detail=printable(fault)).envelope()


def _address(request: WorkRequest) -> dict[str, Any]:
    return {
        "client": request.client,
        "round": request.round,
        "experiment": request.experiment,
    }
