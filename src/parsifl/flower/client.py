"""A client on its own machine: it reads its rows, trains on them, and keeps its state on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo
from parsifl.core.errors import ConfigError, DataError, ParsiflError, WireError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Problem, flatten_inputs
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.evaluator import Evaluator
from parsifl.engine.executors import reason
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.finite import inspect
from parsifl.engine.pool import ClientProgram, ClientRequest
from parsifl.flower.client_state import ClientStates
from parsifl.flower.data_schema import DataSchema
from parsifl.flower.message import Letter
from parsifl.flower.transport import Kind

NodeConfig = Mapping[str, Any]
Arrays = tuple[Any, Any] | ClientData
Load = Callable[[NodeConfig], Arrays]
MakeProblem = Callable[[ClientData], Problem]

STATE_VARIABLE = "PARSIFL_STATE"
_LONGEST_REASON = 500
_logger = logging.getLogger("parsifl")


def client_number(node: NodeConfig) -> int:
    """Return the client's number from the node's configuration (Flower calls it partition-id)."""
    number = node.get("partition-id")
    if type(number) is not int or number < 0:
        raise ConfigError(
            "the node has no number: start it with --node-config 'partition-id=0', each node with "
            "another one"
        )
    return number


def state_root(node: NodeConfig) -> Path:
    """Return the folder for client state: node config, environment, or the home folder."""
    chosen = node.get("state-dir") or os.environ.get(STATE_VARIABLE)
    return Path(str(chosen)) if chosen else Path.home() / ".parsifl" / "state"


def profile_of(node: NodeConfig) -> dict[str, Any]:
    """Return what a node says of its device: `profile-width=0.5` is the entry `width`.

    >>> profile_of({"partition-id": 0, "profile-width": 0.5})
    {'width': 0.5}
    """
    start = "profile-"
    return {name.removeprefix(start): node[name] for name in node if name.startswith(start)}


def placed(
    arrays: Arrays,
    client: int,
    experiment: Experiment,
    profile: Mapping[str, Any] | None = None,
) -> ClientData:
    """Return one client's data under its number, so that keys are the same as in one process."""
    data = arrays
    if not isinstance(data, ClientData):
        share = experiment.test
        if isinstance(share, str):
            raise ConfigError(f"test={share!r} needs a named data set; use a fraction such as 0.25")
        data = ClientData.of(
            [data], test=share, validation=experiment.validation, seed=experiment.seed
        )
    if len(data) != 1:
        raise DataError(f"load() returned {len(data)} clients; a node is one client")
    before: list[Any] = [[]] * client

    def at(parts: Any) -> Ragged:
        return Ragged.of([*before, parts[0]])

    return replace(
        data,
        train=at(data.train),
        validation=at(data.validation),
        test=at(data.test),
        profiles=({},) * client + ({**data.profiles[0], **(profile or {})},),
    )


def alone(data: ClientData, client: int) -> ClientData:
    """Return what one client of a partition owns, and nothing of the others."""
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
        Builds the problem from data of the agreed form; None: the experiment's model.
    profile
        What is known about the device, besides what the data say.
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
        self._algorithm = experiment.method()
        self._types = self._algorithm.tree_types()
        self._data = placed(arrays, client, experiment, profile)
        self._make = make or partial(problem_for, experiment.model)

    def answer(self, kind: Kind, letter: Letter) -> Letter:
        """Reply to a message of this kind."""
        if kind == "hello":
            return self.hello()
        return self.train(letter) if kind == "train" else self.evaluate(letter)

    def hello(self) -> Letter:
        """Report what the server must know: the number of rows and their form, never a row."""
        info = Infos(self._data)[self._client]
        return Letter(
            {
                "client": self._client,
                "samples": info.samples,
                "profile": dict(info.profile),
                "facts": DataSchema.of(self._data).to_json(),
            }
        )

    def train(self, letter: Letter) -> Letter:
        """Train one round; the new state is on disk before this returns."""
        work = self._read(letter)
        wanted = self._algorithm.batches(work.client, work.key.round)
        data = work.sampler.draw(self._client, wanted, work.key)
        try:
            update = work.program(work.received, work.state(), data)
        except ParsiflError:
            raise
        except Exception as error:  # the server drops this client and continues
            return work.reply(error=reason(error))
        if fault := inspect(update).fault:
            return work.reply(error=fault)
        parts = {}
        try:
            if letter.get("uploads", bool) and update.upload is not None:
                parts["upload"] = wire.encode(update.upload, self._experiment.precision)
        except WireError as error:  # values beyond the range of this precision
            return work.reply(error=f"upload {error}")
        work.states.save(work.key.round + 1, update.state)
        work.states.forget(work.accepted, work.oldest, work.key.round + 1)
        info = {name: float(value) for name, value in update.metrics.items()}
        return work.reply(parts, info=info)

    def evaluate(self, letter: Letter) -> Letter:
        """Evaluate the global and the personal model on the client's own rows."""
        work = self._read(letter)
        evaluator = Evaluator(work.program, work.data, work.sampler, self._experiment.evaluation)
        request = ClientRequest(work.client, work.key, None, upload=False)
        model = self._global_model(letter, work.program.problem)
        (scores,) = evaluator.scores([request], model, lambda _: (work.received, work.state()))
        return work.reply(scores=scores.values, samples=dict(scores.samples))

    def _global_model(self, letter: Letter, problem: Problem) -> Model | None:
        if "model" in letter.parts:
            params = wire.decode(letter.parts["model"], dict[str, torch.Tensor])
            return Model(problem, tree.map(_copy, params))
        if "server" in letter.parts:
            server = tree.map(_copy, wire.decode(letter.parts["server"], self._types.server))
            return self._algorithm.model(problem, server)
        return None

    def _read(self, letter: Letter) -> _Work:
        if letter.get("client", int) != self._client:
            raise WireError(f"client: this is {self._client}, not {letter.meta['client']}")
        experiment = letter.get("experiment", str)
        schema = DataSchema.read(letter.meta.get("facts"))
        # built on the agreed form: this client may lack classes that others have
        problem = self._make(schema.example())
        self._algorithm.check_capabilities(problem)
        data = replace(self._data, classes=schema.classes)
        if flatten_inputs(problem):
            data = data.flattened()
        received = None
        if "down" in letter.parts:
            received = tree.map(_copy, wire.decode(letter.parts["down"], self._types.downlink))
        return _Work(
            client=Infos(data)[self._client],
            program=ClientProgram(self._algorithm, problem),
            data=data,
            sampler=BatchSampler(data, problem),
            key=Key(self._experiment.seed, round=letter.get("round", int)),
            received=received,
            states=ClientStates(self._root, experiment, self._client, self._types.client),
            experiment=experiment,
            accepted=letter.get("ack", int),
            oldest=letter.get("oldest", int),
        )


@dataclass(frozen=True)
class _Work:
    """A message, read: the program, the data, what was received, and the states."""

    client: ClientInfo
    program: ClientProgram
    data: ClientData
    sampler: BatchSampler
    key: Key
    received: Any
    states: ClientStates
    experiment: str
    accepted: int
    oldest: int

    def state(self) -> Any:
        """Return the state that the server has accepted, or the first one."""
        if self.accepted:
            return self.states.load(self.accepted)
        return self.program.initial_state(self.client, self.received, self.key.seed)

    def reply(self, parts: Mapping[str, bytes] | None = None, **meta: Any) -> Letter:
        """Return the reply to this very message."""
        head = {
            "client": self.client.id,
            "round": self.key.round,
            "experiment": self.experiment,
        }
        return Letter({**head, **meta}, parts or {})


def answered(answer: Callable[[], Letter]) -> Letter:
    """Return the reply; a failure becomes a reply that gives the server its reason."""
    try:
        return answer()
    except ParsiflError as error:
        return Letter({"error": str(error)[:_LONGEST_REASON]})
    except Exception as error:  # the user's load may fail in any way, and its text may hold data
        _logger.exception("a message could not be answered")
        return Letter({"error": f"{type(error).__name__} (its text stays on the node)"})


def _copy(leaf: Any) -> Any:
    # memory that is aligned as in a run in one process gives the same bits
    return leaf.clone(memory_format=torch.contiguous_format)
