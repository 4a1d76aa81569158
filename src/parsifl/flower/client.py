"""A client at its own site: it reads its rows, works on them, and keeps its state on its disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parsifl import wire
from parsifl.core import tree
from parsifl.core.algorithm import ClientInfo, ClientUpdate
from parsifl.core.errors import ConfigError, DataError, ParsiflError, WireError
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Problem, flatten_inputs
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.engine import executors
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.evaluation import Split
from parsifl.engine.evaluator import Evaluator
from parsifl.engine.experiment import Experiment, problem_for
from parsifl.engine.finite import inspect
from parsifl.engine.round import initial_state, local_work
from parsifl.engine.state_store import StateStore
from parsifl.engine.tasks import Task
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
_SPLITS: tuple[Split, ...] = ("validation", "test")


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


class Site:
    """Answers the server's letters for one client.

    Parameters
    ----------
    arrays
        What the user's `load` returned: `(X, y)`, or a `ClientData` of one client.
    root
        The folder for client state.
    make
        Builds the problem from data of the agreed form; None: the experiment's model.
    profile
        What is known of the device, besides what the data say.
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
        self._method = experiment.method()
        self._types = self._method.tree_types()
        self._data = placed(arrays, client, experiment, profile)
        self._make = make or partial(problem_for, experiment.model)

    def answer(self, kind: Kind, letter: Letter) -> Letter:
        """Answer a letter of this kind."""
        if kind == "hello":
            return self.hello()
        return self.train(letter) if kind == "train" else self.judge(letter)

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
        """Do one round of local work; the new state is on disk before this returns."""
        visit = _Visit(self, letter)
        shard = visit.shards.shard(
            self._client, self._method.batches(visit.info, visit.key.round), visit.key
        )
        store = visit.store()
        first = initial_state(self._method, visit.problem, visit.info, visit.down, visit.key)
        task = Task(self._client, (visit.down, store.load(self._client, first), shard))
        outcome = executors.run(local_work(self._method, visit.problem), [task], "loop", 1)
        if self._client in outcome.failures:
            return visit.reply(error=outcome.failures[self._client])
        result: ClientUpdate[Any, Any] = outcome.results[self._client]
        if fault := inspect(result).fault:
            return visit.reply(error=fault)
        parts = {}
        try:
            if letter.get("uploads", bool) and result.upload is not None:
                parts["upload"] = wire.encode(result.upload, self._experiment.precision)
        except WireError as error:  # values beyond what this precision can tell
            return visit.reply(error=f"upload {error}")
        visit.durable.save(visit.key.round + 1, result.state)
        # the server stores its checkpoint between rounds, and may return to the one before
        visit.durable.forget(visit.ack, visit.key.round + 1)
        info = {name: float(value) for name, value in result.metrics.items()}
        return visit.reply(parts, info=info)

    def judge(self, letter: Letter) -> Letter:
        """Judge the global and the personal model on the client's own rows; metrics travel."""
        visit = _Visit(self, letter)
        judge = Evaluator(
            self._method,
            visit.problem,
            visit.data,
            visit.infos,
            visit.shards,
            self._experiment.evaluation,
            self._experiment.precision,
        )
        store = visit.store()
        found: dict[str, dict[str, Any]] = {"global": {}, "personal": {}}
        model = self._global_model(letter, visit.problem)
        for split in _SPLITS:
            own = judge.own_score(visit.down, store, self._client, split, visit.key)
            if own is not None:
                found["personal"][split] = own
            shared = None if model is None else judge.model_scores(model, [self._client], split)
            if shared is not None:
                found["global"][split] = {n: float(v[0]) for n, v in shared.values.items()}
        samples = {s: len(getattr(visit.data, s)[self._client]) for s in _SPLITS}
        return visit.reply(scores=found, samples=samples)

    def _global_model(self, letter: Letter, problem: Problem) -> Model | None:
        if "model" in letter.parts:
            params = wire.decode(letter.parts["model"], dict[str, torch.Tensor])
            return Model(problem, tree.map(_copy, params))
        if "server" in letter.parts:
            server = tree.map(_copy, wire.decode(letter.parts["server"], self._types.server))
            return self._method.model(problem, server)
        return None


def told(answer: Callable[[], Letter]) -> Letter:
    """Answer; a failure becomes a letter that tells the server its reason."""
    try:
        return answer()
    except ParsiflError as error:
        return Letter({"error": str(error)[:_LONGEST_REASON]})
    except Exception as error:  # the user's load may fail in any way, and its text may hold data
        _logger.exception("a letter could not be answered")
        return Letter({"error": f"{type(error).__name__} (its text stays on the node)"})


class _Visit:
    """One letter from the server, opened: the problem, the downlink, the state that counts."""

    def __init__(self, site: Site, letter: Letter) -> None:
        self._client = site._client
        if letter.get("client", int) != self._client:
            raise WireError(f"client: this is {self._client}, not {letter.meta['client']}")
        self._experiment, self.ack = letter.get("experiment", str), letter.get("ack", int)
        facts = DataSchema.read(letter.meta.get("facts"))
        # built on the agreed form: this client may lack classes that others have
        self.problem = site._make(facts.example())
        site._method.check_capabilities(self.problem)
        self.data = replace(site._data, classes=facts.classes)
        if flatten_inputs(self.problem):
            self.data = self.data.flattened()
        self.key = Key(site._experiment.seed, round=letter.get("round", int))
        self.infos = Infos(self.data)
        self.shards = BatchSampler(self.data, self.problem)
        self.down = None
        if "down" in letter.parts:
            self.down = tree.map(_copy, wire.decode(letter.parts["down"], site._types.downlink))
        self.durable = ClientStates(site._root, self._experiment, self._client, site._types.client)

    @property
    def info(self) -> ClientInfo:
        """What the server knows of this client."""
        return self.infos[self._client]

    def store(self) -> StateStore:
        """Return a store with the state that the server has acknowledged, if there is one."""
        store = StateStore()
        if self.ack:
            store.restore({self._client: self.durable.load(self.ack)})
        return store

    def reply(self, parts: Mapping[str, bytes] | None = None, **meta: Any) -> Letter:
        """Answer, saying which letter this is the answer to."""
        head = {
            "client": self._client,
            "round": self.key.round,
            "experiment": self._experiment,
        }
        return Letter({**head, **meta}, parts or {})


def _copy(leaf: Any) -> Any:
    # memory that is aligned as in a run in one process gives the same bits
    return leaf.clone(memory_format=torch.contiguous_format)
