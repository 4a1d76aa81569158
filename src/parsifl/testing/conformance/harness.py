"""One algorithm on one problem: the runs and single steps that the checks examine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parsifl.core import config, tree
from parsifl.core.algorithm import (
    AnyAlgorithm,
    ClientInfo,
    ClientUpdate,
    ClientUpload,
)
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import ConfigError, ParsiflError
from parsifl.core.keys import Key
from parsifl.core.leaves import densify
from parsifl.core.problem import Model, Problem
from parsifl.data.clients import ClientData
from parsifl.engine.batch_sampler import BatchSampler, Infos
from parsifl.engine.local_pool import LocalPool
from parsifl.engine.pool import ClientProgram
from parsifl.engine.run import Run
from parsifl.engine.settings import RunSettings
from parsifl.engine.simulate import simulate
from parsifl.engine.training import Training
from parsifl.testing.conformance.examples import Example, example_for

SEED = 3
ROUNDS = 3
SMALL: Mapping[str, Any] = {"local_steps": 3, "batch_size": 4}


class ConformanceError(ParsiflError):
    """An algorithm fails a check."""


class NotApplicable(Exception):
    """A check does not apply to this algorithm; the message is the reason."""


@dataclass(frozen=True, eq=False)
class ClientStep:
    """One client's step in a round: arguments and result."""

    info: ClientInfo
    down: Any
    client: Any
    shard: ClientRoundData
    result: ClientUpdate[Any, Any]


@dataclass(frozen=True, eq=False)
class WatchedProgram(ClientProgram):
    """A client program that records arguments and results."""

    calls: list[tuple[Any, Any, ClientRoundData, ClientUpdate[Any, Any]]] = field(
        default_factory=list
    )

    def __call__(self, received: Any, state: Any, data: ClientRoundData) -> ClientUpdate[Any, Any]:
        """Train one client and record the call."""
        update = super().__call__(received, state, data)
        self.calls.append((received, state, data, update))
        return update


@dataclass(frozen=True, eq=False)
class RoundState:
    """The state between two rounds."""

    server: Any
    clients: dict[int, Any] = field(default_factory=dict)
    round: int = 0
    client_steps: tuple[ClientStep, ...] = ()
    """The steps of the last round."""


@dataclass(frozen=True, eq=False)
class Harness:
    """A configured algorithm with a problem and clients."""

    algorithm: AnyAlgorithm
    problem: Problem
    data: ClientData
    own_example: bool = True
    """Whether problem and data are built-in examples, which exist in other dtypes too."""

    @cached_property
    def infos(self) -> Infos:
        """What the server knows about the clients."""
        return Infos(self.data)

    @cached_property
    def shards(self) -> BatchSampler:
        """The sampler that draws client data."""
        return BatchSampler(self.data, self.problem)

    @property
    def key(self) -> Key:
        """The key of all runs."""
        return Key(SEED)

    # ------------------------------------------------------------------ whole runs
    def simulate(self, executor: Any = "loop", rounds: int = ROUNDS, **options: Any) -> Run:
        """Run the engine."""
        chosen = {"seed": SEED, "executor": executor, **options}
        with warnings.catch_warnings():
            # the examples have one slow device, whether or not the algorithm reads profiles
            warnings.filterwarnings("ignore", ".* does not read .* of the device profiles")
            return simulate(self.algorithm, self.problem, self.data, rounds, **chosen)

    @cached_property
    def sequential(self) -> Run:
        """A run in the loop."""
        return self.simulate("loop")

    @cached_property
    def batched(self) -> dict[str, Run]:
        """The same run in the batched executors."""
        chosen = self.simulate("fused")
        if chosen.records[0].executor != "fused":
            return {"vmap": chosen}
        return {"fused": chosen, "vmap": self.simulate("vmap")}

    # ------------------------------------------------------------------ single steps
    @cached_property
    def start(self) -> RoundState:
        """Before the first round."""
        algorithm, key = self.algorithm, self.key.replace(purpose="server")
        return RoundState(algorithm.init_server(self.problem, self.infos, key))

    @cached_property
    def first(self) -> RoundState:
        """After one round."""
        return self.run_round(self.start)

    @cached_property
    def second(self) -> RoundState:
        """After two rounds, when every state has changed."""
        return self.run_round(self.first)

    def run_round(self, round_state: RoundState) -> RoundState:
        """Run one round with every client through `Training` and a recording program."""
        program = WatchedProgram(self.algorithm, self.problem)
        pool = LocalPool(program, self.data)
        pool.store.restore(round_state.clients)
        training = Training(self.algorithm, self.problem, pool, RunSettings(seed=SEED))
        server, _ = training.round(round_state.server, round_state.round)
        infos = [self.infos[client] for client in range(len(self.data))]
        client_steps = tuple(
            ClientStep(info, *watched) for info, watched in zip(infos, program.calls, strict=True)
        )
        clients = {step.info.id: step.result.state for step in client_steps}
        return RoundState(server, clients, round_state.round + 1, client_steps)

    def client_step(self, round_state: RoundState, client: int) -> ClientStep:
        """Train one client."""
        down, state = self.received(round_state, client)
        info = self.infos[client]
        key = self.key.replace(round=round_state.round)
        shard = self.shards.draw(client, self.algorithm.batches(info, round_state.round), key)
        result = self.algorithm.client_update(self.problem, down, state, shard)
        return ClientStep(info, down, state, shard, result)

    def received(self, round_state: RoundState, client: int) -> tuple[Any, Any]:
        """Return the message to a client, and its state."""
        key, info = self.key.replace(round=round_state.round), self.infos[client]
        here = key.replace(client=client, purpose="broadcast")
        down = self.algorithm.broadcast(self.problem, round_state.server, info, here)
        if client in round_state.clients:
            return down, round_state.clients[client]
        return down, ClientProgram(self.algorithm, self.problem).initial_state(info, down, key.seed)

    def combine(self, server: Any, client_steps: tuple[ClientStep, ...], round: int) -> Any:
        """Aggregate the uploads in the order given."""
        key = self.key.replace(round=round, purpose="aggregate")
        accumulator = self.algorithm.accumulator(self.problem)
        for step in client_steps:
            weight = self.algorithm.weight(step.info)
            upload = ClientUpload(step.info, weight, step.result.upload, step.down)
            accumulator.add(upload)
        return self.algorithm.aggregate(self.problem, server, accumulator.total(), key)

    def personal(self, round_state: RoundState, client: int) -> Model:
        """Return the model that a client is evaluated on."""
        down, state = self.received(round_state, client)
        key = self.key.replace(round=round_state.round, purpose="tuning")
        shard = self.shards.draw(
            client, self.algorithm.personalization_batches(self.infos[client]), key
        )
        return self.algorithm.personalize(self.problem, down, state, shard)

    def models(self, round_state: RoundState) -> dict[str, Any]:
        """Return the parameters of the global model and of all personal ones."""
        shared = self.algorithm.model(self.problem, round_state.server)
        personal = {
            f"client {i}": self.personal(round_state, i).params for i in range(len(self.data))
        }
        return personal if shared is None else {"global": shared.params, **personal}


def harness_for(
    algorithm: AnyAlgorithm, problem: Problem | None = None, data: ClientData | None = None
) -> Harness:
    """Return a harness for an algorithm, on the given problem and data or on a matching example."""
    if (problem is None) != (data is None):
        raise ConformanceError("pass both problem= and data=, or neither")
    if problem is not None and data is not None:
        return Harness(algorithm, problem, data, own_example=False)
    example: Example = example_for(algorithm)
    return Harness(algorithm, example.problem, example.data)


def small(kind: type[AnyAlgorithm], settings: Mapping[str, Any] | None = None) -> AnyAlgorithm:
    """Build an algorithm with few local steps; `conformance` and then `settings` override them."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # algorithms are dataclasses
    chosen = {**kind.conformance.settings, **(settings or {})}
    algorithm = config.build(kind, chosen)
    for name, value in SMALL.items():
        if name in known - chosen.keys():
            try:
                algorithm = replace(algorithm, **{name: value})  # type: ignore[type-var]  # see above
            except ConfigError:  # some algorithms allow fewer values; keep the default
                continue
    return algorithm


def snapshot(run: Run) -> dict[str, Any]:
    """Return all results of a run as one tree."""
    personal = {str(i): run.personal(i).params for i in range(len(run.pool.clients))}
    states = {str(client): state for client, state in run.pool.store}
    return {"server": run.server, "clients": states, "personal": personal}


def difference(left: Any, right: Any) -> float:
    """Return the largest difference over all leaves, relative to the size of the leaf."""
    ours, form = tree.flatten(densify(left))
    theirs, other_form = tree.flatten(densify(right))
    if form != other_form:
        raise ConformanceError("the results differ in structure")
    return max((_leaf_difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _leaf_difference(left: Tensor, right: Tensor) -> float:
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ConformanceError(
            f"a leaf is {left.dtype} {tuple(left.shape)} here, {right.dtype} {tuple(right.shape)} "
            "there"
        )
    if not left.numel():
        return 0.0
    gap = (left.to(torch.float64) - right.to(torch.float64)).abs().max()
    return float(gap / right.to(torch.float64).abs().max().clamp(min=1.0))
